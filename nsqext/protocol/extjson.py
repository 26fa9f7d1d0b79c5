"""JSON as the servers parse it: extend headers with a parser that accepts more than the standard allows, and objects.

orjson parses valid JSON. Other headers are parsed as the server does: it accepts some of them (invalid numbers, control
characters in strings, bytes that are not UTF-8), uses the first of equal names, and quotes in its errors what it could
not parse (captured: pub_ext_errors).

`read_fields` parses JSON objects as Go's ``encoding/json`` does for the servers' structures. Names match
case-insensitively. Of equal names the last is used, and objects are merged. Null and unknown names are ignored. A value
of another type is an error for the whole object. Invalid UTF-8 becomes replacement characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, NoReturn

import orjson

from nsqext.arguments import is_whole
from nsqext.types import RawJson

_SURROGATE = re.compile("[\ud800-\udfff]")
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


def encodable(text: str) -> str:
    """Replace each half of a surrogate pair, which JSON may contain and UTF-8 may not, by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class UnreadableHeader(ValueError):
    """The server cannot parse the header; its error has this text."""


def read_header(header: bytes, name: str) -> dict[str, Any]:
    """Return the members of a header; a JSON value that is not an object has none (captured: pub_ext).

    Of equal names the last is used, except for ``name``: the first. Raises `UnreadableHeader` as the server does.
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
    """Return the members of a header as the server parses it, or raise `UnreadableHeader`; the first of equal names."""
    return {name: _read_value(value) for name, value in reversed(_Reader(header).read())}


def read_values(header: bytes) -> dict[str, Any]:
    """Return each member of a header that can be read on its own, or raise `UnreadableHeader` as the server does.

    Whole numbers are exact. A value that is not JSON (``NaN``, ``1e400``, ``01``) is a `RawJson`. Of equal names the
    last is used, as JSON parsers do.
    """
    members = _Reader(header).read()
    return {encodable(name): _without_surrogates(_read_value(value)) for name, value in members}


def _read_value(value: bytes) -> Any:
    if value[:1] == b'"':
        return _unescape(value[1:-1])
    text = value.decode("utf-8", "replace")
    try:
        return json.loads(text, strict=False, parse_float=_finite, parse_constant=_refuse)
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
    """Return the text in double quotes, with unprintable characters escaped (captured: sub_bad_names)."""
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
    """Parse a value without recursion; return the name and the bytes of each member of the outermost object."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._open: list[bytes] = []
        self._name = ""
        self._start = 0  # where the value of the current member begins
        self._members: list[tuple[str, bytes]] = []

    def read(self) -> list[tuple[str, bytes]]:
        position, wanted = self._skip(0), True
        while wanted or self._open:
            if wanted and self._open == [b"{"]:
                self._start = position
            position, wanted = self._value(position) if wanted else self._behind(position)
            if not wanted and self._open == [b"{"]:
                self._members.append((self._name, self._data[self._start : position]))
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
        """Parse a value, or the start of an object or array; return the next position, and whether a value follows."""
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
        """Parse what follows a value in an object or array."""
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
        name, position = self._string(position + 1, "cannot parse object key: ", inside=True)
        position = self._skip(position)
        if self._at(position) != b":":
            self._fail_inside("missing ':' after object key", position)
        if self._open == [b"{"]:
            self._name = _unescape(name)
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


Schema = Mapping[str, Any]
"""Name to ``str``, ``bool``, ``int``, the largest number as an ``int`` value, a schema, or a list of one of these."""

_INT64 = (1 << 63) - 1
_DEEPEST = 10_000  # levels that Go's library reads
_SHALLOW = 100  # levels that are parsed as they are: more than schemas have, fewer than Python's recursion limit
_TEXT = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(rf"{_TEXT}|[\[\]{{}}]", re.DOTALL)
_NO_BRACKETS = re.compile(rf'{_TEXT}|"|[^\[\]{{}}"]+', re.DOTALL)


class UnreadableFields(ValueError):
    """The body is not JSON, not an object, or has a value of a type that the schema does not allow."""


def read_fields(body: bytes, schema: Schema) -> dict[str, Any]:
    """Return the known members of a JSON object or raise `UnreadableFields`, by the schema's names; null has none."""
    value = _load(body)
    return {} if value is None else _object(value, schema)


class Members(tuple[tuple[str, Any], ...]):
    """Members of a JSON object, including those of equal names."""

    __slots__ = ()


def _load(body: bytes) -> Any:
    text = body.decode("utf-8", "replace")
    try:
        return _parse(text)
    except ValueError as error:
        raise UnreadableFields(f"not JSON: {error}") from error


def _parse(text: str) -> Any:
    if text.count("{") + text.count("[") > _DEEPEST and _depth(text) > _DEEPEST:
        raise ValueError("nested too deeply")
    with suppress(RecursionError):
        return _parse_shallow(text)
    return _parse_shallow(_flattened(text))


def _depth(text: str) -> int:
    brackets = _NO_BRACKETS.sub("", text)
    return max(accumulate(1 if bracket in "{[" else -1 for bracket in brackets), default=0)


def _parse_shallow(text: str) -> Any:
    return json.loads(text, object_pairs_hook=Members, parse_constant=_refuse)


def _flattened(text: str) -> str:
    """Check objects and arrays that are nested deeply (`ValueError` if one is not JSON), and put 0 in their place."""
    open_parts: list[list[str]] = [[]]
    end = 0
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        if bracket in ("{", "["):
            open_parts[-1].append(text[end : token.start()])
            end = token.start()
            open_parts.append([])
        elif bracket in ("}", "]") and len(open_parts) > 1:
            whole = "".join((*open_parts.pop(), text[end : token.end()]))
            end = token.end()
            if len(open_parts) > _SHALLOW:
                _parse_shallow(whole)
                whole = "0"
            open_parts[-1].append(whole)
    return "".join((*(part for parts in open_parts for part in parts), text[end:]))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _object(value: Any, schema: Schema) -> dict[str, Any]:
    if not isinstance(value, Members):
        raise UnreadableFields(f"{type(value).__name__} in place of an object")
    found: dict[str, Any] = {}
    folded = {name.casefold(): name for name in schema}
    for name, member in value:
        known = name if name in schema else folded.get(name.casefold())
        if known is not None and member is not None:
            read = _member(known, member, schema[known])
            found[known] = {**found.get(known, {}), **read} if isinstance(read, dict) else read
    return found


def _member(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return _object(value, kind)
    if isinstance(kind, list) and isinstance(value, list):
        return [_item(name, item, kind[0]) for item in value]
    if kind is str and isinstance(value, str):
        return encodable(value)
    if kind is bool and isinstance(value, bool):
        return value
    if is_whole(value, -math.inf):
        largest = _INT64 if kind is int else kind
        if isinstance(largest, int) and -largest - 1 <= value <= largest:
            return value
    raise UnreadableFields(f"{name} cannot be {type(value).__name__}")


def _item(name: str, value: Any, kind: Any) -> Any:
    """Read an item of a list; null is the zero value of its type."""
    if value is None:
        return {} if isinstance(kind, Mapping) else kind()
    return _member(name, value, kind)
