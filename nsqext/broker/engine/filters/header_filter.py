r"""Filters on extend headers that a client requests in IDENTIFY (captured: ext_filter).

They select a text by a path (github.com/tidwall/gjson): a dot descends into an object or selects an element of an
array; ``*`` and ``?`` match any characters of a name unless escaped with a backslash. The first match counts, so the
first of several members with one name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from nsqext.broker.engine.filters.go_regexp import InvalidExpression, compile_glob, compile_regexp, compile_wildcard
from nsqext.protocol.go_structs import Members
from nsqext.protocol.identify import FILTER_EQUAL, FILTER_GLOB, FILTER_MULTI, FILTER_REGEXP
from nsqext.protocol.messages import EXT_JSON

if TYPE_CHECKING:
    from nsqext.protocol.record import Record

_Test = Callable[[bytes], bool]


def compile_filter(wanted: Mapping[str, Any]) -> Callable[[Record], bool] | None:
    """Return the function that tells whether a record passes a filter; None for no filter and for an invalid one.

    The real server logs an invalid filter and ignores it. A record without a JSON header matches no filter, so it
    passes an inverse one.
    """
    try:
        test = _compile(wanted)
    except InvalidExpression:
        return None
    if test is None:
        return None
    inverse = bool(wanted.get("inverse"))

    def matches(record: Record) -> bool:
        return (record.version == EXT_JSON and test(record.header)) is not inverse

    return matches


def _compile(wanted: Mapping[str, Any]) -> _Test | None:
    kind, key, data = (wanted.get(name) or "" for name in ("type", "filter_ext_key", "filter_data"))
    if not key or (not data and kind != FILTER_MULTI):
        return None
    if kind == FILTER_EQUAL:
        return _equal(key, data)
    if kind == FILTER_REGEXP:
        return _expression(key, compile_regexp(data))
    if kind == FILTER_GLOB:
        return _expression(key, compile_glob(data))
    if kind == FILTER_MULTI:
        return _several(key, wanted.get("filter_data_list") or [])
    return None


def _equal(key: str, data: str) -> _Test:
    text_of = compile_path(key)
    return lambda header: text_of(header) == data


def _expression(key: str, matches: Callable[[str], bool]) -> _Test:
    text_of = compile_path(key)
    return lambda header: matches(text_of(header) or "")


def _several(relation: str, pairs: list[Mapping[str, Any]]) -> _Test | None:
    parts = [(pair.get("filter_ext_key") or "", pair.get("filter_data") or "") for pair in pairs]
    if not parts or not all(key and data for key, data in parts):
        return None
    tests = [_equal(key, data) for key, data in parts]
    if relation == "all":
        return lambda header: all(test(header) for test in tests)
    if relation == "any":
        return lambda header: any(test(header) for test in tests)
    return lambda header: False


_INDEX = re.compile(r"[0-9]+", re.ASCII)


def compile_path(path: str) -> Callable[[bytes], str | None]:
    """Return the function that finds the text at a path in a header; None if the value is missing or not a text."""
    return partial(_text_at, path)


def _text_at(path: str, header: bytes) -> str | None:
    try:
        document = json.loads(header.decode("utf-8", "surrogateescape"), object_pairs_hook=Members, strict=False)
    except (ValueError, RecursionError):
        return None
    found = _find([document], path[2:]) if path.startswith("..") else _find(document, path)
    return found if isinstance(found, str) else None


def _find(value: Any, path: str) -> Any:
    """Return the value at a path inside an object or array; an empty tuple if it is missing."""
    if isinstance(value, Members):
        name, wild, rest = _split(path)
        members = [member for key, member in value if (compile_wildcard(name)(key) if wild else name == key)]
    elif isinstance(value, list):
        place, dot, rest_text = path.partition(".")
        rest = rest_text if dot else None
        index = int(place) if _INDEX.fullmatch(place) and len(place) < 20 else len(value)
        members = value[index : index + 1]
    else:
        return ()
    if rest is None:
        return members[0] if members else ()
    for member in members:
        found = _find(member, rest)
        if found != ():
            return found
    return ()


def _split(path: str) -> tuple[str, bool, str | None]:
    """Return the first name of a path, whether it has wildcards, and the rest; None if nothing follows."""
    name, wild, at = "", False, 0
    while at < len(path):
        char = path[at]
        if char == ".":
            return name, wild, path[at + 1 :]
        if char == "\\":
            at += 1
            char = path[at : at + 1]
        elif char in "*?":
            wild = True
        name += char
        at += 1
    return name, wild, None
