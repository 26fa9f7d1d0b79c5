"""Words and numbers as the real servers parse and print them."""

from __future__ import annotations

import re
import sys

from nsqext.protocol.extjson import quote
from nsqext.protocol.server.request_error import RequestError

NANOSECONDS = 1_000_000_000
"""Of a second; Go's durations count nanoseconds."""
MASK_64: int = (1 << 64) - 1

_SIGNED = re.compile(r"[+-]?[0-9]+")
_DIGITS = re.compile(r"[0-9]+")
_TRUE = frozenset(("1", "t", "T", "TRUE", "true", "True"))
_FALSE = frozenset(("0", "f", "F", "FALSE", "false", "False"))


def build(version: str) -> str:
    """Return version and build, for ``--version`` and ``/stats``."""
    return f"{version} (built w/python{'.'.join(map(str, sys.version_info[:3]))})"


def decode(word: bytes) -> str:
    """Return a word as text, with surrogate escapes for invalid UTF-8."""
    return word.decode("utf-8", "surrogateescape")


def byte_list(word: bytes) -> str:
    """Return ``[98 111 …]``, as the redesigned server prints bytes (captured: unknown_commands)."""
    return f"[{' '.join(map(str, word))}]"


def word_lists(words: list[bytes]) -> str:
    """Return the words of a command as a list of byte lists."""
    return f"[{' '.join(map(byte_list, words))}]"


def parse_int(text: str, function: str = "Atoi") -> int:
    """Parse a signed 64-bit number; raises `ValueError` with the server's text, which names the function."""
    if not _SIGNED.fullmatch(text):
        raise ValueError(f"strconv.{function}: parsing {quote(text)}: invalid syntax")
    digits = text.lstrip("+-0") or "0"
    value = int(digits) if len(digits) < 32 else 1 << 64
    value = -value if text[0] == "-" else value
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"strconv.{function}: parsing {quote(text)}: value out of range")
    return value


def parse_unsigned(text: str) -> int | None:
    """Parse an unsigned 64-bit number; None for other text."""
    digits = text.lstrip("0") or text[-1:]
    return int(digits) if _DIGITS.fullmatch(digits) and len(digits) <= 20 and int(digits) <= MASK_64 else None


def parse_bool(text: str) -> bool:
    """Parse a boolean; raises `ValueError` with the server's text."""
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"strconv.ParseBool: parsing {quote(text)}: invalid syntax")


def wrap(value: int) -> int:
    """Wrap a number to signed 64 bits."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def base10(word: bytes, text: str) -> int:
    """Parse the number in RDY, REQ and DPUB: empty is 0, more than 64 bits wrap around.

    Raises `RequestError` with the given text for other words.
    """
    if not word:
        return 0
    if not word.isdigit():
        raise RequestError("E_INVALID", text)
    return wrap(int(word[-64:]))  # 2**64 divides 10**64: earlier digits do not count
