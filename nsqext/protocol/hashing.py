"""Map keys to partitions, with the hashes of the Go and Java clients."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from nsqext.arguments import check_plain_function
from nsqext.errors import InvalidInput, InvalidPartition, InvalidSetting

__all__ = (
    "PARTITIONERS",
    "KeyHash",
    "java_long_hash",
    "java_long_partition",
    "java_string_hash",
    "java_string_partition",
    "key_hash",
    "murmur3_32",
    "murmur3_partition",
)

KeyHash = Callable[[bytes, int], int]
"""Takes key and number of partitions, returns the partition."""

_MASK = 0xFFFFFFFF
_DIGITS = re.compile(rb"-?\d{1,19}")


def murmur3_32(data: bytes, seed: int = 0) -> int:
    """Return the unsigned MurmurHash3 x86 32-bit hash, as the Go client."""
    h = seed & _MASK
    full = len(data) & ~3
    for position in range(0, full, 4):
        h ^= _mix(int.from_bytes(data[position : position + 4], "little"))
        h = (h << 13 | h >> 19) & _MASK
        h = (h * 5 + 0xE6546B64) & _MASK
    if full < len(data):
        h ^= _mix(int.from_bytes(data[full:], "little"))
    h ^= len(data)
    h = ((h ^ h >> 16) * 0x85EBCA6B) & _MASK
    h = ((h ^ h >> 13) * 0xC2B2AE35) & _MASK
    return h ^ h >> 16


def _mix(k: int) -> int:
    k = (k * 0xCC9E2D51) & _MASK
    k = (k << 15 | k >> 17) & _MASK
    return (k * 0x1B873593) & _MASK


def java_string_hash(text: str) -> int:
    """Return Java's ``String.hashCode``, a signed 32-bit number over UTF-16 units."""
    h = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for position in range(0, len(units), 2):
        h = (31 * h + (units[position] << 8 | units[position + 1])) & _MASK
    return h - (1 << 32) if h >> 31 else h


@lru_cache(maxsize=8192)
def murmur3_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key as the Go client, hash modulo partitions; raises InvalidPartition."""
    _check_count(partitions)
    return murmur3_32(key) % partitions


@lru_cache(maxsize=8192)
def java_string_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key as the Java client, the absolute remainder.

    Raises InvalidInput (not UTF-8 text) or InvalidPartition.
    """
    _check_count(partitions)
    try:
        text = key.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"key {key!r} is not UTF-8 text", hint="java_string hashes text; use murmur3") from error
    return abs(java_string_hash(text)) % partitions


def java_long_hash(number: int) -> int:
    """Return Java's ``Long.hashCode``, a signed 32-bit number.

    Raises:
        InvalidInput: more than 64 bits.
    """
    if not -(1 << 63) <= number < 1 << 63:
        raise InvalidInput(f"key {number} is not a number of 64 bits", hint="java_long hashes values of Java's Long")
    h = (number ^ (number & (1 << 64) - 1) >> 32) & _MASK
    return h - (1 << 32) if h >> 31 else h


@lru_cache(maxsize=8192)
def java_long_partition(key: bytes, partitions: int) -> int:
    """Return the partition of a key (decimal digits) as the Java client for a ``Long``.

    Raises InvalidInput (no number of 64 bits) or InvalidPartition.
    """
    _check_count(partitions)
    if _DIGITS.fullmatch(key) is None:
        raise InvalidInput(f"key {key!r} is not a number", hint="java_long hashes numbers; use java_string for text")
    return abs(java_long_hash(int(key))) % partitions


def _check_count(partitions: int) -> None:
    if partitions < 1:
        raise InvalidPartition(
            f"a key cannot choose among {partitions} partitions", hint="the number of partitions must be known"
        )


PARTITIONERS: dict[str, KeyHash] = {
    "murmur3": murmur3_partition,
    "java_string": java_string_partition,
    "java_long": java_long_partition,
}
"""Strategies by name."""


def key_hash(strategy: str | KeyHash) -> KeyHash:
    """Return the function for a name, or the given function; raises InvalidSetting for an unknown name."""
    if callable(strategy):
        check_plain_function("key_hash", strategy)
        return strategy
    found = PARTITIONERS.get(strategy)
    if found is None:
        raise InvalidSetting(
            f"key hash {strategy!r} is unknown", hint=f"use one of {', '.join(PARTITIONERS)} or a function"
        )
    return found
