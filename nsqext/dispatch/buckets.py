"""Buckets of keys, which are the dispatch tags of messages, and how consumers divide them among themselves.

The tag of a bucket names their number too, so that producers and consumers with different numbers are noticed: nothing
is delivered to the wrong bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

from nsqext.arguments import is_whole
from nsqext.dispatch.ranges import position_of
from nsqext.errors import InvalidSetting

__all__ = (
    "DEFAULT_KEY_TAGS",
    "KeySharing",
    "Moves",
    "bucket_tag",
    "bucket_tags",
    "check_key_tags",
    "count_of_tag",
    "plan_moves",
    "shared_tag",
)

DEFAULT_KEY_TAGS: Final = 16
"""Buckets of consumers that share keys by tags, where no number is given."""
_MOST = 1024
_PREFIX = "keys-"


class KeySharing(Enum):
    """How the keys of a partition are shared by the consumers of a channel."""

    NONE = "none"  # not at all, because one consumer has all of them, or the order of keys does not count
    SERVER = "server"  # by the server, in a channel of type key_failover
    TAGS = "tags"  # by the tags of messages. Each bucket has one consumer, on a connection of its own.


def check_key_tags(count: int) -> None:
    """Raise `InvalidSetting` for an invalid number of buckets."""
    if not is_whole(count, 0, _MOST):
        raise InvalidSetting(f"key_tags={count!r} is not a number of buckets, 0 to {_MOST}")


def bucket_tag(key: bytes, count: int) -> str:
    """Return the tag of a key's bucket, of so many buckets.

    The bucket is chosen by the high bits of the hash, the partition by the hash modulo the number of partitions: both
    are independent.
    """
    return _tag(count, position_of(key) * count >> 32)


def bucket_tags(count: int) -> tuple[str, ...]:
    """Return the tags of so many buckets."""
    return tuple(_tag(count, number) for number in range(count))


def shared_tag(count: int) -> str:
    """Return the tag of messages without a key, which any consumer of the channel may receive."""
    return f"{_PREFIX}{count}-none"


def _tag(count: int, number: int) -> str:
    return f"{_PREFIX}{count}-{number}"


def count_of_tag(tag: str) -> int:
    """Return the number of buckets that the tag of a bucket, or of messages without a key, names; 0 for other tags."""
    count, _, number = tag.removeprefix(_PREFIX).partition("-")
    return int(count) if tag.startswith(_PREFIX) and number and count.isascii() and count.isdigit() else 0


class Moves(NamedTuple):
    """What a consumer does with buckets of a partition."""

    claim: tuple[str, ...] = ()  # tags of buckets without an owner that it claims
    release: tuple[str, ...] = ()  # tags of its buckets that it gives to consumers with fewer


def plan_moves(
    me: str, tags: Sequence[str], owners: Mapping[str, Collection[str]], members: Iterable[str], releasing: int = 0
) -> Moves:
    """Return what a consumer does next; consumers with the same view do not claim the same bucket.

    A bucket without an owner goes to the consumer with the fewest. While there is none, consumers with the most buckets
    release some until the numbers differ by one at most. No other bucket moves.

    Args:
        owners: the consumers that are connected with each tag.
        releasing: buckets that this consumer releases at this time.
    """
    held: dict[str, list[str]] = {member: [] for member in {*members, me}}
    free = []
    for tag in tags:
        connected = owners.get(tag) or ()
        for member in connected:
            held.setdefault(member, []).append(tag)
        if not connected:
            free.append(tag)
    counts = {member: len(found) for member, found in held.items()}
    claim = []
    for tag in free:
        poorest = min(counts, key=lambda member: (counts[member], member))
        counts[poorest] += 1
        if poorest == me:
            claim.append(tag)
    if free:
        return Moves(tuple(claim))
    surplus = 0
    while True:
        poorest = min(counts, key=lambda member: (counts[member], member))
        richest = max(counts, key=lambda member: (counts[member], member))
        if counts[richest] <= counts[poorest] + 1:
            break
        counts[richest] -= 1
        counts[poorest] += 1
        surplus += richest == me
    return Moves(release=tuple(reversed(held[me]))[: max(0, surplus - releasing)])
