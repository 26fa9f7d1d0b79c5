"""What servers answer to an operator who wants to profile them: there is nothing to profile."""

from __future__ import annotations

from nsqext.broker.http_api import Call, HttpFault, first_values
from nsqext.broker.nsqd.go_format import parse_int

__all__ = ("check_block_rate", "set_block_rate")

_FORM = "application/x-www-form-urlencoded"


def check_block_rate(text: str) -> None:
    """Check the argument ``rate`` of ``/debug/setblockrate``.

    Raises:
        HttpFault: it is no number.
    """
    try:
        parse_int(text)
    except ValueError as error:
        raise HttpFault(400, f"invalid block rate : {error}") from None


async def set_block_rate(call: Call) -> None:
    """Answer ``/debug/setblockrate`` of the redesigned servers after the check of its argument ``rate``.

    The real handler looks into a form before the query, and skips what it cannot read of either.

    Raises:
        HttpFault: it is no number.
    """
    given = call.readable_args
    if call.headers.get("content-type", "").partition(";")[0].strip() == _FORM:
        given = {**given, **first_values((await call.body()).decode("latin-1"))}
    check_block_rate(given.get("rate", ""))
