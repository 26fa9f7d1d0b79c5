"""Key hashes: published vectors, and values of the Go and the Java client."""

from __future__ import annotations

import pytest

from nsqext.errors import InvalidInput, InvalidPartition, InvalidSetting
from nsqext.protocol.hashing import (
    PARTITIONERS,
    java_long_hash,
    java_long_partition,
    java_string_hash,
    java_string_partition,
    key_hash,
    murmur3_32,
    murmur3_partition,
)
from tests.support.tables import table

_COUNTS = (2, 3, 4, 8, 16)


@table(
    ("data", "seed", "expected"),
    [
        (b"", 0, 0),
        (b"", 1, 0x514E28B7),
        (b"", 0xFFFFFFFF, 0x81F16F39),
        (b"\xff\xff\xff\xff", 0, 0x76293B50),
        (b"\x21\x43\x65\x87", 0, 0xF55B516B),
        (b"\x21\x43\x65\x87", 0x5082EDEE, 0x2362F9DE),
        (b"\x21\x43\x65", 0, 0x7E4A8634),
        (b"\x21\x43", 0, 0xA0F7B07A),
        (b"\x21", 0, 0x72661CF4),
        (bytes(4), 0, 0x2362F9DE),
        (bytes(3), 0, 0x85F0B427),
        (bytes(2), 0, 0x30F4C306),
        (bytes(1), 0, 0x514E28B7),
        (b"test", 0, 0xBA6BD213),
        (b"hello", 0, 0x248BFA47),
        (b"hello, world", 0, 0x149BBB7F),
        (b"19 Jan 2038 at 3:14:07 AM", 0, 0xE31E8A70),
        (b"The quick brown fox jumps over the lazy dog.", 0, 0xD5C48BFC),
        (b"aaaa", 0x9747B28C, 0x5A97808A),
        (b"aaa", 0x9747B28C, 0x283E0130),
        (b"aa", 0x9747B28C, 0x5D211726),
        (b"a", 0x9747B28C, 0x7FA09EA6),
        (b"Hello, world!", 0x9747B28C, 0x24884CBA),
        (b"The quick brown fox jumps over the lazy dog", 0x9747B28C, 0x2FA826CD),
    ],
)
def test_murmur3_gives_the_published_values(data: bytes, seed: int, expected: int) -> None:
    assert murmur3_32(data, seed) == expected


@pytest.mark.parametrize(
    ("key", "murmur", "partitions"),
    [
        ("", 0, (0, 0, 0, 0, 0)),
        ("order-1", 4117911073, (1, 1, 1, 1, 1)),
        ("order-2", 1101609887, (1, 2, 3, 7, 15)),
        ("user:42", 3349586805, (1, 0, 1, 5, 5)),
        ("hello", 613153351, (1, 1, 3, 7, 7)),
        ("polygenelubricants", 3249086048, (0, 2, 0, 0, 0)),
        ("订单-1", 2602998107, (1, 2, 3, 3, 11)),
    ],
)
def test_murmur3_partitions_are_the_go_clients(key: str, murmur: int, partitions: tuple[int, ...]) -> None:
    assert murmur3_32(key.encode()) == murmur
    assert tuple(murmur3_partition(key.encode(), count) for count in _COUNTS) == partitions


@table(
    ("key", "code", "partitions"),
    [
        ("", 0, (0, 0, 0, 0, 0)),
        ("order-1", -1207111310, (0, 2, 2, 6, 14)),
        ("order-2", -1207111309, (1, 1, 1, 5, 13)),
        ("user:42", -147170163, (1, 0, 3, 3, 3)),
        ("hello", 99162322, (0, 1, 2, 2, 2)),
        ("polygenelubricants", -2147483648, (0, 2, 0, 0, 0)),
        ("订单-1", 1085411543, (1, 2, 3, 7, 7)),
        ("😀", 1772899, (1, 1, 3, 3, 3)),
    ],
)
def test_java_partitions_are_the_java_clients(key: str, code: int, partitions: tuple[int, ...]) -> None:
    """Values of ``String.hashCode()`` and of the absolute ``hash % count``, printed by Java 17."""
    assert java_string_hash(key) == code
    assert tuple(java_string_partition(key.encode(), count) for count in _COUNTS) == partitions


@table(
    ("key", "code", "partitions"),
    [
        (0, 0, (0, 0, 0, 0, 0)),
        (1, 1, (1, 1, 1, 1, 1)),
        (-1, 0, (0, 0, 0, 0, 0)),
        (-5, 4, (0, 1, 0, 4, 4)),
        (255, 255, (1, 0, 3, 7, 15)),
        (4294967296, 1, (1, 1, 1, 1, 1)),
        (123456789012, -1097262584, (0, 2, 0, 0, 8)),
        (-123456789012, -1097262577, (1, 1, 1, 1, 1)),
        (9223372036854775807, -2147483648, (0, 2, 0, 0, 0)),
        (-9223372036854775808, -2147483648, (0, 2, 0, 0, 0)),
        (2147483648, -2147483648, (0, 2, 0, 0, 0)),
        (-2147483648, 2147483647, (1, 1, 3, 7, 15)),
        (6442450943, 2147483646, (0, 0, 2, 6, 14)),
    ],
)
def test_numbers_have_the_partitions_that_java_computes(key: int, code: int, partitions: tuple[int, ...]) -> None:
    """Values of ``Long.hashCode(key)`` and ``Math.abs(hash % count)``, printed by Java 17."""
    assert java_long_hash(key) == code
    assert tuple(java_long_partition(b"%d" % key, count) for count in _COUNTS) == partitions


@pytest.mark.parametrize("key", [b"", b"x", b"1.5", b" 1", b"1_0", b"9223372036854775808", b"-" + b"9" * 19])
def test_java_numbers_have_64_bits(key: bytes) -> None:
    with pytest.raises(InvalidInput, match="is not a number"):
        java_long_partition(key, 4)


def test_java_hashes_utf_16_units() -> None:
    assert java_string_hash("😀") == 0xD83D * 31 + 0xDE00
    assert java_string_hash("\ud83d") == 0xD83D


def test_java_needs_text() -> None:
    with pytest.raises(InvalidInput, match=r"not UTF-8 text.*use murmur3"):
        java_string_partition(b"\xff", 4)


@pytest.mark.parametrize("strategy", sorted(PARTITIONERS))
@pytest.mark.parametrize("count", [0, -1])
def test_a_key_needs_partitions_to_choose_from(strategy: str, count: int) -> None:
    with pytest.raises(InvalidPartition, match="must be known"):
        key_hash(strategy)(b"1", count)


def test_strategies_have_names_or_are_functions() -> None:
    assert key_hash("murmur3") is murmur3_partition
    assert key_hash("java_string") is java_string_partition

    def first(key: bytes, partitions: int) -> int:
        return key[0] % partitions

    assert key_hash(first) is first
    with pytest.raises(InvalidSetting, match="'md5' is unknown: use one of murmur3, java_string, java_long"):
        key_hash("md5")

    async def later(key: bytes, count: int) -> int:
        return count

    with pytest.raises(InvalidSetting, match="is a coroutine function"):
        key_hash(later)  # type: ignore[arg-type]
