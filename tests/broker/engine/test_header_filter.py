"""Filters on extend headers, with the behaviour of the real server."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from nsqext.broker.engine.header_filter import compile_filter, compile_wildcard, text_at
from nsqext.protocol.messages import EXT_JSON
from nsqext.protocol.record import Record

HEADERS: list[Any] = [
    {"k1": "abc"},
    {"k1": "xbc", "k2": "v2"},
    {"k1": 5},
    {"k2": "v2", "k1": "abd"},
    {"a.b": "abc"},
    {"a": {"b": "abc"}},
    [1],
    "text",
    {},
    {"K1": "abc"},
]
PLAIN = len(HEADERS)


def matched(**wanted: Any) -> list[int] | None:
    test = compile_filter({"filter_ext_key": "k1", **wanted})
    if test is None:
        return None
    records = [Record(0, 0, 0, b"", EXT_JSON, orjson.dumps(header)) for header in HEADERS]
    records.append(Record(0, 0, 0, b""))
    return [number for number, record in enumerate(records) if test(record)]


PAIRS = [{"filter_ext_key": "k1", "filter_data": "abd"}, {"filter_ext_key": "k2", "filter_data": "v2"}]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ({"type": 1, "filter_data": "abc"}, [0]),
        ({"type": 1, "filter_data": "abc", "inverse": True}, [1, 2, 3, 4, 5, 6, 7, 8, 9, PLAIN]),
        ({"type": 1, "filter_ext_key": "a.b", "filter_data": "abc"}, [5]),
        ({"type": 1, "filter_ext_key": "a\\.b", "filter_data": "abc"}, [4]),
        ({"type": 2, "filter_data": "^ab"}, [0, 3]),
        ({"type": 1, "filter_ext_key": "k*", "filter_data": "v2"}, [3]),
        ({"type": 1, "filter_ext_key": "?2", "filter_data": "v2"}, [1, 3]),
        ({"type": 2, "filter_data": "^$"}, [2, 4, 5, 6, 7, 8, 9]),
        ({"type": 3, "filter_data": "a*"}, [0, 3]),
        ({"type": 3, "filter_data": "[ax]bc"}, [0, 1]),
        ({"type": 4, "filter_ext_key": "all", "filter_data_list": PAIRS}, [3]),
        ({"type": 4, "filter_ext_key": "any", "filter_data_list": PAIRS}, [1, 3]),
        ({"type": 4, "filter_ext_key": "some", "filter_data_list": PAIRS}, []),
    ],
)
def test_matching_headers(wanted: dict[str, Any], numbers: list[int]) -> None:
    assert matched(**wanted) == numbers


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"type": 1},
        {"type": 1, "filter_ext_key": "", "filter_data": "x"},
        {"type": 2, "filter_data": "("},
        {"type": 2, "filter_data": "(" * 5000 + ")" * 5000},
        {"type": 3, "filter_data": "[a"},
        {"type": 3, "filter_data": "[b-a]"},
        {"type": 3, "filter_data": "[]"},
        {"type": 4, "filter_ext_key": "any"},
        {"type": 4, "filter_ext_key": "any", "filter_data_list": [{"filter_ext_key": "k1"}]},
        {"type": 9, "filter_data": "x"},
    ],
)
def test_invalid_filters_are_ignored(wanted: dict[str, Any]) -> None:
    assert matched(**wanted) is None


def test_an_unreadable_header_matches_like_an_empty_one() -> None:
    test = compile_filter({"type": 2, "filter_ext_key": "k1", "filter_data": "^$"})
    assert test is not None
    assert test(Record(0, 0, 0, b"", EXT_JSON, b"{"))


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("?" * 0x10000, "k" * 0x10000, False),
        ("é" * 0x8000 + "?", "é" * 0x8000 + "k", False),
        ("k" * 0xFFFF + "*", "k" * 0xFFFF, True),
        ("*" * 0x80000, "k", True),
    ],
    ids=["characters", "bytes", "longest", "stars"],
)
def test_a_name_with_wildcards_that_is_longer_than_any_header_matches_none(
    pattern: str, text: str, found: bool
) -> None:
    """RE2 refuses very long ones, which was raised while a message was delivered."""
    assert compile_wildcard(pattern)(text) is found


def test_values_nested_too_deeply_are_not_found() -> None:
    """The search for a path needs more of the stack than reading the header, and raised an error at some depths."""
    for depth in range(999, 0, -1):
        if text_at(".".join("*" * depth), b'{"a":' * depth + b'"x"' + b"}" * depth) is not None:
            break
    assert depth > 500
