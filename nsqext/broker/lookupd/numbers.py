"""Numbers in queries, read as the real servers read them."""

from __future__ import annotations

from nsqext.broker.go_format import parse_int
from nsqext.broker.http_api import HttpFault

__all__ = ("number", "ranged")


def number(text: str, fault: str = "") -> int:
    """Return a signed 64-bit number.

    Args:
        text: its digits.
        fault: text of the error; by default the one that names what cannot be read.
    """
    try:
        return parse_int(text)
    except ValueError as error:
        raise HttpFault(400, fault or str(error)) from None


def ranged(text: str, low: int, high: int, fault: str) -> int:
    """Return a number within bounds; raises `HttpFault` with the given text otherwise."""
    value = number(text, fault)
    if not low <= value <= high:
        raise HttpFault(400, fault)
    return value
