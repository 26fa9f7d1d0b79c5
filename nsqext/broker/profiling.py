"""What both redesigned servers answer to an operator who wants to profile them: there is nothing to profile."""

from __future__ import annotations

from nsqext.broker.nsqd.texts import parse_int
from nsqext.broker.web import Call, HttpFault, first_values

__all__ = ("set_block_rate",)

_FORM = "application/x-www-form-urlencoded"


async def set_block_rate(call: Call) -> None:
    """Answer ``/debug/setblockrate`` after the check of its argument ``rate``.

    The real handler looks into a form before the query, and skips what it cannot read of either.

    Raises:
        HttpFault: it is no number.
    """
    given = call.readable_args
    if call.headers.get("content-type", "").partition(";")[0].strip() == _FORM:
        given = {**given, **first_values((await call.body()).decode("latin-1"))}
    try:
        parse_int(given.get("rate", ""))
    except ValueError as error:
        raise HttpFault(400, f"invalid block rate : {error}") from None
