"""Numbers as Go parses them."""

from __future__ import annotations

import pytest

from nsqext.protocol.server.go_format import base10, parse_int, parse_unsigned, wrap
from tests.support.tables import table


@table(
    ("text", "value"),
    [
        ("0", 0),
        ("007", 7),
        ("-" + "0" * 40 + "7", -7),
        ("+7", 7),
        ("-0", 0),
        ("9223372036854775807", (1 << 63) - 1),
        ("-9223372036854775808", -(1 << 63)),
    ],
)
def test_numbers(text: str, value: int) -> None:
    assert parse_int(text) == value


@table(
    ("text", "reason"),
    [
        *((text, "invalid syntax") for text in ("", "x", "1.0", " 1", "1_0", "--1", "\u0661", "+")),
        *((text, "value out of range") for text in ("9223372036854775808", "-9223372036854775809", "9" * 5000)),
    ],
)
def test_texts_that_are_no_number_of_64_bits(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_int(text)


@table(
    ("text", "value"),
    [("0", 0), ("18446744073709551615", (1 << 64) - 1), ("18446744073709551616", None), ("-1", None), ("+1", None)],
)
def test_unsigned_numbers(text: str, value: int | None) -> None:
    assert parse_unsigned(text) == value


@table(("number", "wrapped"), [(5, 5), ((1 << 63) - 1, (1 << 63) - 1), (1 << 63, -(1 << 63)), (1 << 64, 0), (-1, -1)])
def test_arithmetic_wraps_at_64_bits(number: int, wrapped: int) -> None:
    assert wrap(number) == wrapped


@table(("word", "value"), [(b"", 0), (b"07", 7), (b"18446744073709551621", 5), (b"1" + b"0" * 63 + b"7", 7)])
def test_numbers_of_commands_wrap(word: bytes, value: int) -> None:
    assert base10(word, "") == value
