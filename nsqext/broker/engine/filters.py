"""Filters on extend headers, as a client asks for them in IDENTIFY (captured: ext_filter)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nsqext.errors import ProtocolError
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.identify import FILTER_EQUAL, FILTER_GLOB, FILTER_MULTI, FILTER_REGEXP
from nsqext.protocol.messages import EXT_JSON

if TYPE_CHECKING:
    from nsqext.protocol.record import Record

__all__ = ("compile_filter", "glob_expression")

_DOT = re.compile(r"(?<!\\)\.")

_Test = Callable[[Mapping[str, Any]], bool]


def compile_filter(wanted: Mapping[str, Any]) -> Callable[[Record], bool] | None:
    """Return the test that tells whether a record is wanted; None for no filter, and for one that makes no sense.

    The real server writes an invalid filter to its log and goes on without it. A record without a JSON header matches
    no filter, so an inverse one wants it.
    """
    try:
        test = _compile(wanted)
    except re.error:
        return None
    if test is None:
        return None
    inverse = bool(wanted.get("inverse"))

    def matches(record: Record) -> bool:
        matched = False
        if record.version == EXT_JSON:
            try:
                headers = decode_headers(record.header)
            except ProtocolError:
                headers = {}
            matched = test(headers)
        return matched is not inverse

    return matches


def _compile(wanted: Mapping[str, Any]) -> _Test | None:
    kind, key, data = (wanted.get(name) or "" for name in ("type", "filter_ext_key", "filter_data"))
    if not key or (not data and kind != FILTER_MULTI):
        return None
    if kind == FILTER_EQUAL:
        return _equal(key, data)
    if kind == FILTER_REGEXP:
        return _expression(key, re.compile(data).search)
    if kind == FILTER_GLOB:
        return _expression(key, re.compile(glob_expression(data), re.DOTALL).fullmatch)
    if kind == FILTER_MULTI:
        return _several(key, wanted.get("filter_data_list") or [])
    return None


def _value(headers: Mapping[str, Any], key: str) -> str | None:
    """Text of a header; a dot in the name leads into a nested object, unless a backslash is before it."""
    value: Any = headers
    for part in _DOT.split(key):
        value = value.get(part.replace("\\.", ".")) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else None


def _equal(key: str, data: str) -> _Test:
    return lambda headers: _value(headers, key) == data


def _expression(key: str, search: Callable[[str], object]) -> _Test:
    return lambda headers: search(_value(headers, key) or "") is not None


def _several(relation: str, pairs: list[Mapping[str, Any]]) -> _Test | None:
    parts = [(pair.get("filter_ext_key") or "", pair.get("filter_data") or "") for pair in pairs]
    if not parts or not all(key and data for key, data in parts):
        return None
    tests = [_equal(key, data) for key, data in parts]
    if relation == "all":
        return lambda headers: all(test(headers) for test in tests)
    if relation == "any":
        return lambda headers: any(test(headers) for test in tests)
    return lambda headers: False


def glob_expression(pattern: str) -> str:
    """Return the regular expression of a glob with ``*``, ``?``, ``[…]``, ``[!…]``, ``{a,b}`` and backslashes.

    Raises:
        re.error: brackets are not closed.
    """
    out, position, depth = [], 0, 0
    simple = {"*": ".*", "?": "."}
    while position < len(pattern):
        char = pattern[position]
        position += 1
        if char == "\\" and position < len(pattern):
            out.append(re.escape(pattern[position]))
            position += 1
        elif char == "[":
            stop = pattern.find("]", position + 1)
            if stop < 0:
                raise re.error("unclosed bracket", pattern, position)
            inside = pattern[position:stop]
            not_in = inside.startswith("!")
            out.append(f"[{'^' * not_in}{inside[not_in:].replace('^', chr(92) + '^')}]")
            position = stop + 1
        elif char == "{" or (depth and char in ",}"):
            depth += (char == "{") - (char == "}")
            out.append({"{": "(?:", ",": "|", "}": ")"}[char])
        else:
            out.append(simple.get(char) or re.escape(char))
    if depth:
        raise re.error("unclosed brace", pattern, position)
    return "".join(out)
