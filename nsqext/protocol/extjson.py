"""Extend headers as the servers parse them.

orjson parses valid JSON. The servers also accept invalid numbers, control characters in strings and invalid UTF-8, use
the first of equal names, and quote in their errors what they could not parse (captured: pub_ext_errors).
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple, NoReturn

import orjson

from nsqext.protocol.json_fields import encodable, refuse_constant
from nsqext.types import RawJson

_MAX_DEPTH = 300
_SHOWN = 80
_BLANK = re.compile(rb"[ \n\t\r]*")
_NUMBER = re.compile(rb"[0-9.eE+-]*")
_ODD_NUMBER = re.compile(rb"[+-]?(?:inf|nan)", re.IGNORECASE)
_STRING = re.compile(rb'([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_WORDS = (b"true", b"false", b"null")
_NAMES = {b"{": "object", b"[": "array"}
_ENDS = {b"{": b"}", b"[": b"]"}


_ESCAPES = {7: "\\a", 8: "\\b", 12: "\\f", 10: "\\n", 13: "\\r", 9: "\\t", 11: "\\v", 92: "\\\\", 34: '\\"'}


class UnreadableHeader(ValueError):
    """The server cannot parse the header; the text is its error."""


class Member(NamedTuple):
    name: str
    value: bytes
    start: int  #: where its name begins, with the quote
    stop: int  #: behind its value


def members_of(header: bytes) -> list[Member]:
    """Return a header's members in order, also of equal names; empty for a JSON value that is not an object.

    Raises `UnreadableHeader` as the server does.
    """
    return _Reader(header).read()


def read_header(header: bytes, name: str) -> dict[str, Any]:
    """Return a header's values by name; of equal names the last, but of ``name`` the first (captured: pub_ext).

    Members and errors are as of `members_of`.
    """
    deep = header.count(b"{") + header.count(b"[") >= _MAX_DEPTH
    if deep or header.count(f'"{name}"'.encode()) > 1:
        return read_leniently(header)
    try:
        value = orjson.loads(header)
    except orjson.JSONDecodeError:
        return read_leniently(header)
    return value if isinstance(value, dict) else {}


def read_leniently(header: bytes) -> dict[str, Any]:
    """Return the values of `members_of` by name; of equal names the first, as the server."""
    return {name: _read_value(value) for name, value, *_ in reversed(members_of(header))}


def read_values(header: bytes) -> dict[str, Any]:
    """Return the values of `members_of` by name; of equal names the last.

    Whole numbers are exact. A value that is not JSON (``NaN``, ``1e400``, ``01``) is a `RawJson`.
    """
    return {encodable(name): _without_surrogates(_read_value(value)) for name, value, *_ in members_of(header)}


def _read_value(value: bytes) -> Any:
    if value[:1] == b'"':
        return _unescape(value[1:-1])
    text = value.decode("utf-8", "replace")
    try:
        return json.loads(text, strict=False, parse_float=_finite, parse_constant=refuse_constant)
    except (ValueError, RecursionError):  # also of a number with more digits than Python converts
        return RawJson(text)


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number} is beyond the largest number")
    return value


def _without_surrogates(value: Any) -> Any:
    if type(value) is str:
        return encodable(value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {encodable(name): _without_surrogates(item) for name, item in value.items()}
    return value


def quote(text: str) -> str:
    """Return a text in double quotes, with unprintable characters escaped (captured: sub_bad_names)."""
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


class _Reader:
    """Parse a value without recursion; return the outermost object's members."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._open: list[bytes] = []
        self._name = ""
        self._named = 0  # start of the current member's name
        self._start = 0  # start of its value
        self._members: list[Member] = []

    def read(self) -> list[Member]:
        position, wanted = self._skip(0), True
        while wanted or self._open:
            if wanted and self._open == [b"{"]:
                self._start = position
            position, wanted = self._value(position) if wanted else self._behind(position)
            if not wanted and self._open == [b"{"]:
                self._members.append(Member(self._name, self._data[self._start : position], self._named, position))
        position = self._skip(position)
        if position < len(self._data):
            raise UnreadableHeader(f"unexpected tail: {_tail(self._data[position:])}")
        return self._members

    def _skip(self, position: int) -> int:
        found = _BLANK.match(self._data, position)
        return found.end() if found else position

    def _at(self, position: int) -> bytes:
        return self._data[position : position + 1]

    def _value(self, position: int) -> tuple[int, bool]:
        """Parse a value or the start of a container; return the next position, and whether a value follows."""
        first = self._at(position)
        if not first:
            self._fail("cannot parse empty string", position)
        if len(self._open) >= _MAX_DEPTH:
            self._fail(f"too big depth for the nested JSON; it exceeds {_MAX_DEPTH}", position)
        if first in _NAMES:
            return self._enter(first, self._skip(position + 1))
        if first == b'"':
            return self._string(position + 1, "cannot parse string: ")[1], False
        if first in (b"t", b"f", b"n"):
            return self._word(position), False
        return self._number(position), False

    def _enter(self, kind: bytes, position: int) -> tuple[int, bool]:
        self._open.append(kind)
        first = self._at(position)
        if not first:
            self._fail_inside(f"missing '{_ENDS[kind].decode()}'", position)
        if first == _ENDS[kind]:
            self._open.pop()
            return position + 1, False
        return (self._key(position) if kind == b"{" else position), True

    def _behind(self, position: int) -> tuple[int, bool]:
        """Parse what follows a value in a container."""
        position = self._skip(position)
        kind, first = self._open[-1], self._at(position)
        if not first:
            self._fail_inside(f"unexpected end of {_NAMES[kind]}", position)
        if first == _ENDS[kind]:
            self._open.pop()
            return position + 1, False
        if first != b",":
            self._fail_inside(f"missing ',' after {_NAMES[kind]} value", position)
        position = self._skip(position + 1)
        return (self._key(position) if kind == b"{" else position), True

    def _key(self, position: int) -> int:
        if self._at(position) != b'"':
            self._fail_inside('cannot find opening \'"" for object key', position)
        start = position
        name, position = self._string(position + 1, "cannot parse object key: ", inside=True)
        position = self._skip(position)
        if self._at(position) != b":":
            self._fail_inside("missing ':' after object key", position)
        if self._open == [b"{"]:
            self._name, self._named = _unescape(name), start
        return self._skip(position + 1)

    def _string(self, position: int, what: str, inside: bool = False) -> tuple[bytes, int]:
        found = _STRING.match(self._data, position)
        if found is None:
            fail = self._fail_inside if inside else self._fail
            fail(f"{what}missing closing '\"'", len(self._data))
        return found[1], found.end()

    def _word(self, position: int) -> int:
        for word in _WORDS:
            if self._data.startswith(word, position):
                return position + len(word)
        rest = self._data[position:]
        if rest[:3].lower() == b"nan":
            return position + 3
        self._fail(f"unexpected value found: {quote(_as_text(rest))}", position)

    def _number(self, position: int) -> int:
        found = _NUMBER.match(self._data, position)
        stop = found.end() if found else position
        signed = stop == position + 1 and self._at(position) in (b"+", b"-")
        if stop < len(self._data) and (stop == position or signed):
            odd = _ODD_NUMBER.match(self._data, position)
            if odd is None:
                self._fail(f"cannot parse number: unexpected char: {quote(_as_text(self._at(position)))}", position)
            return odd.end()
        return stop

    def _fail(self, text: str, position: int) -> NoReturn:
        names = [_NAMES[kind] for kind in self._open]
        where = "".join(f"cannot parse {name}: cannot parse {name} value: " for name in names)
        raise UnreadableHeader(f"cannot parse JSON: {where}{text}; unparsed tail: {_tail(self._data[position:])}")

    def _fail_inside(self, text: str, position: int) -> NoReturn:
        kind = self._open.pop()
        self._fail(f"cannot parse {_NAMES[kind]}: {text}", position)


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _unescape(text: bytes) -> str:
    plain = _as_text(text)
    if "\\" not in plain:
        return plain
    try:
        value = json.loads(f'"{plain}"', strict=False)
    except json.JSONDecodeError:
        return plain
    return value if isinstance(value, str) else plain


def _tail(data: bytes) -> str:
    half = _SHOWN // 2
    return quote(_as_text(data) if len(data) <= _SHOWN else f"{_as_text(data[:half])}...{_as_text(data[-half:])}")
