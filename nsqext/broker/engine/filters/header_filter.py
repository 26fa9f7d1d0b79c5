"""Filters on extend headers that a client requests in IDENTIFY (captured: ext_filter)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nsqext.broker.engine.filters.go_regexp import InvalidExpression, compile_glob, compile_regexp
from nsqext.broker.engine.filters.json_path import compile_path
from nsqext.protocol.identify import FILTER_EQUAL, FILTER_GLOB, FILTER_MULTI, FILTER_REGEXP
from nsqext.protocol.messages import EXT_JSON

if TYPE_CHECKING:
    from nsqext.protocol.record import Record

__all__ = ("compile_filter",)

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
