"""Extend headers that are not quite JSON, as the redesigned server reads them.

Its parser forgives more than the rule (bad numbers, control characters in strings), and the texts of its errors name
what it stumbled over (captured: pub_ext_errors).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

__all__ = ("UnreadableHeader", "quote", "read_leniently")

_BLANK = " \n\t\r"
_NUMBER = re.compile(r"[0-9.eE+-]*")
_ODD_NUMBER = re.compile(r"[+-]?(inf|nan)", re.IGNORECASE)
_STRING_END = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)
_MAX_DEPTH = 300
_SHOWN = 80


_ESCAPES = {7: "\\a", 8: "\\b", 12: "\\f", 10: "\\n", 13: "\\r", 9: "\\t", 11: "\\v", 92: "\\\\", 34: '\\"'}


class UnreadableHeader(ValueError):
    """The server cannot read the header either; its text says why."""


def read_leniently(header: bytes) -> Any:
    """Return the value of a header that no strict parser takes; strings keep their escapes, numbers are None.

    Raises:
        UnreadableHeader: with the server's text.
    """
    return _Reader(header.decode("utf-8", "surrogateescape")).read()


def quote(text: str) -> str:
    """Return the text in double quotes, with escapes for what cannot be printed (captured: sub_bad_names)."""
    parts: list[str] = []
    for char in text:
        code = ord(char)
        if code in _ESCAPES:
            parts.append(_ESCAPES[code])
        elif 0xDC80 <= code <= 0xDCFF:
            parts.append(f"\\x{code - 0xDC00:02x}")
        elif code < 0x20 or code == 0x7F:
            parts.append(f"\\x{code:02x}")
        elif char.isprintable():
            parts.append(char)
        else:
            parts.append(f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return f'"{"".join(parts)}"'


class _Unreadable(Exception):
    """What is wrong, and where the text could not be read any further."""

    def __init__(self, text: str, position: int) -> None:
        super().__init__(text)
        self.position = position


_Part = Callable[[int, int], tuple[Any, int]]


class _Reader:
    """Reads one JSON value."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = len(text)

    def read(self) -> Any:
        start = self._skip(0)
        try:
            value, position = self._value(start, 0)
        except _Unreadable as error:
            tail = _shorten(self._text[error.position :])
            raise UnreadableHeader(f"cannot parse JSON: {error}; unparsed tail: {quote(tail)}") from None
        position = self._skip(position)
        if position < self._end:
            raise UnreadableHeader(f"unexpected tail: {quote(_shorten(self._text[position:]))}")
        return value

    def _skip(self, position: int) -> int:
        while position < self._end and self._text[position] in _BLANK:
            position += 1
        return position

    def _value(self, position: int, depth: int) -> tuple[Any, int]:
        text = self._text
        if position >= self._end:
            raise _Unreadable("cannot parse empty string", position)
        if depth >= _MAX_DEPTH:
            raise _Unreadable(f"too big depth for the nested JSON; it exceeds {_MAX_DEPTH}", position)
        first = text[position]
        if first == "{":
            return self._within("object", self._object, position + 1, depth + 1)
        if first == "[":
            return self._within("array", self._array, position + 1, depth + 1)
        if first == '"':
            try:
                return self._string(position + 1)
            except _Unreadable as error:
                raise _Unreadable(f"cannot parse string: {error}", error.position) from None
        if first in "tfn":
            return self._word(position)
        return self._number(position)

    def _within(self, name: str, reader: _Part, position: int, depth: int) -> tuple[Any, int]:
        try:
            value, stop = reader(position, depth)
        except _Unreadable as error:
            raise _Unreadable(f"cannot parse {name}: {error}", error.position) from None
        return value, stop

    def _word(self, position: int) -> tuple[Any, int]:
        rest = self._text[position:]
        for word, value in (("true", True), ("false", False), ("null", None)):
            if rest.startswith(word):
                return value, position + len(word)
        if rest[:3].lower() == "nan":
            return None, position + 3
        raise _Unreadable(f"unexpected value found: {quote(rest)}", position)

    def _number(self, position: int) -> tuple[None, int]:
        found = _NUMBER.match(self._text, position)
        stop = found.end() if found else position
        if stop < self._end and (stop == position or (stop == position + 1 and self._text[position] in "+-")):
            odd = _ODD_NUMBER.match(self._text, position)
            if odd is None:
                sign = self._text[position]
                raise _Unreadable(f"cannot parse number: unexpected char: {quote(sign)}", position)
            stop = odd.end()
        return None, stop

    def _string(self, position: int) -> tuple[str, int]:
        found = _STRING_END.match(self._text, position)
        if found is None:
            raise _Unreadable("missing closing '\"'", self._end)
        return self._text[position : found.end() - 1], found.end()

    def _array(self, position: int, depth: int) -> tuple[Any, int]:
        position = self._skip(position)
        if position >= self._end:
            raise _Unreadable("missing ']'", position)
        if self._text[position] == "]":
            return [], position + 1
        while True:
            try:
                position = self._skip(self._value(self._skip(position), depth)[1])
            except _Unreadable as error:
                raise _Unreadable(f"cannot parse array value: {error}", error.position) from None
            if position >= self._end:
                raise _Unreadable("unexpected end of array", position)
            if self._text[position] == "]":
                return [], position + 1
            if self._text[position] != ",":
                raise _Unreadable("missing ',' after array value", position)
            position += 1

    def _object(self, position: int, depth: int) -> tuple[Any, int]:
        members: dict[str, Any] = {}
        position = self._skip(position)
        if position >= self._end:
            raise _Unreadable("missing '}'", position)
        if self._text[position] == "}":
            return members, position + 1
        while True:
            key, value, position = self._member(self._skip(position), depth)
            members.setdefault(key, value)
            if position >= self._end:
                raise _Unreadable("unexpected end of object", position)
            if self._text[position] == "}":
                return members, position + 1
            if self._text[position] != ",":
                raise _Unreadable("missing ',' after object value", position)
            position += 1

    def _member(self, position: int, depth: int) -> tuple[str, Any, int]:
        if position >= self._end or self._text[position] != '"':
            raise _Unreadable('cannot find opening \'"" for object key', position)
        try:
            key, position = self._string(position + 1)
        except _Unreadable as error:
            raise _Unreadable(f"cannot parse object key: {error}", error.position) from None
        position = self._skip(position)
        if position >= self._end or self._text[position] != ":":
            raise _Unreadable("missing ':' after object key", position)
        try:
            value, position = self._value(self._skip(position + 1), depth)
        except _Unreadable as error:
            raise _Unreadable(f"cannot parse object value: {error}", error.position) from None
        return key, value, self._skip(position)


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"
