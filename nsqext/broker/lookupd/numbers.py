"""Numbers in queries, read as the real servers read them."""

from __future__ import annotations

import re

from nsqext.broker.web import HttpFault

__all__ = ("number", "ranged")

_INTEGER = re.compile(r"[+-]?[0-9]+")


def number(text: str, fault: str = "") -> int:
    """Return a signed 64-bit number.

    Args:
        text: its digits.
        fault: text of the error; by default the one that names what cannot be read.
    """
    if not _INTEGER.fullmatch(text):
        raise HttpFault(400, fault or f'strconv.Atoi: parsing "{text}": invalid syntax')
    value = int(text) if len(text) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 63:
        raise HttpFault(400, fault or f'strconv.Atoi: parsing "{text}": value out of range')
    return value


def ranged(text: str, low: int, high: int, fault: str) -> int:
    """Return a number within bounds; raises `HttpFault` with the given text otherwise."""
    value = number(text, fault)
    if not low <= value <= high:
        raise HttpFault(400, fault)
    return value
