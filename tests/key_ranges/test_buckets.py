"""Buckets of keys: which bucket a key has, and how consumers with the same view divide them."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidSetting
from nsqext.key_ranges import bucket_tag, bucket_tags, check_key_tags, count_of_tag, plan_moves, shared_tag
from nsqext.protocol.hashing import murmur3_32
from nsqext.protocol.names import check_tag


@given(st.binary(max_size=40), st.integers(1, 1024))
def test_every_key_has_one_of_the_tags(key: bytes, count: int) -> None:
    tags = bucket_tags(count)
    assert bucket_tag(key, count) in tags
    assert len(set(tags)) == count
    assert shared_tag(count) not in tags
    assert [check_tag(tag) for tag in (tags[-1], shared_tag(count))] == [tags[-1], shared_tag(count)]
    assert not set(tags) & set(bucket_tags(count + 1))
    assert {count_of_tag(tag) for tag in (*tags, shared_tag(count))} == {count}


@pytest.mark.parametrize(
    "tag", ["", "red", "keys-", "keys-8", "keys-8-", "keys-x-1", "keys-\u0668-1", "other-8-1", "8-1"]
)
def test_other_tags_are_of_no_bucket(tag: str) -> None:
    assert count_of_tag(tag) == 0


def test_known_buckets_do_not_change() -> None:
    """Producers and consumers of different versions have to agree."""
    assert [bucket_tag(key, 8) for key in (b"", b"a", b"order-42", b"key-7")] == [
        "keys-8-0",
        "keys-8-1",
        "keys-8-2",
        "keys-8-3",
    ]


@pytest.mark.parametrize("partitions", [2, 3, 8])
def test_the_keys_of_a_partition_use_all_buckets(partitions: int) -> None:
    keys = [b"key-%d" % number for number in range(20_000)]
    for partition in range(partitions):
        mine = [key for key in keys if murmur3_32(key) % partitions == partition]
        counts = Counter(bucket_tag(key, 16) for key in mine)
        assert len(counts) == 16
        assert max(counts.values()) < 1.3 * len(mine) / 16


def test_invalid_numbers_are_refused() -> None:
    for right in (0, 1, 1024):
        check_key_tags(right)
    for wrong in (-1, 1025, True, 2.0, "8"):
        with pytest.raises(InvalidSetting, match="is not a number of buckets"):
            check_key_tags(wrong)  # type: ignore[arg-type]


class Partition:
    """Consumers that move buckets in turns, each with the connections that it sees."""

    def __init__(self, count: int, chance: random.Random) -> None:
        self.tags = bucket_tags(count)
        self.chance = chance
        self.members: list[str] = []
        self.connected: dict[str, list[str]] = {tag: [] for tag in self.tags}
        self.moved = 0

    def turn(self) -> bool:
        """Let every consumer act on the same view, in a random order; return whether one did."""
        view = {tag: tuple(found) for tag, found in self.connected.items()}
        members = tuple(self.members)
        acted = False
        for me in self.chance.sample(members, len(members)):
            moves = plan_moves(me, self.tags, view, members)
            for tag in moves.claim:
                assert self.connected[tag] == [], "two consumers with the same view claim a bucket"
                self.connected[tag].append(me)
            for tag in moves.release:
                assert view[tag] == (me,)
                self.connected[tag].remove(me)
            self.moved += len(moves.claim)
            acted = acted or bool(moves.claim or moves.release)
        return acted

    def settle(self) -> None:
        """Act until nothing changes, which takes few turns."""
        for _ in range(4):
            if not self.turn():
                return
        raise AssertionError("the buckets do not come to rest")


@given(st.integers(1, 40), st.lists(st.sampled_from(["join", "join", "leave", "die"]), max_size=20), st.integers())
def test_consumers_divide_the_buckets_evenly_and_move_few(count: int, events: list[str], seed: int) -> None:
    partition = Partition(count, random.Random(seed))
    for number, event in enumerate(events):
        before = {tag: found[0] for tag, found in partition.connected.items() if found}
        partition.moved = 0
        if event == "join":
            partition.members.append(f"consumer-{seed}-{number}")
        elif partition.members:
            gone = partition.members.pop(partition.chance.randrange(len(partition.members)))
            for found in partition.connected.values():
                if gone in found:
                    found.remove(gone)
        partition.settle()
        if not partition.members:
            continue
        counts = Counter(dict.fromkeys(partition.members, 0))
        counts.update(found[0] for found in partition.connected.values())
        assert all(len(found) == 1 for found in partition.connected.values())
        assert max(counts.values()) - min(counts.values()) <= 1
        stayed = [owner for owner in before.values() if owner in partition.members]
        lost = count - len(stayed)
        share = -(-count // len(partition.members))
        assert partition.moved <= lost + (share if event == "join" else 0)


def test_a_consumer_that_releases_waits_before_it_releases_more() -> None:
    tags = bucket_tags(8)
    owners = dict.fromkeys(tags, ("a",))
    assert plan_moves("a", tags, owners, ("a", "b")).release == tuple(reversed(tags))[:4], (
        "those of the highest numbers"
    )
    assert len(plan_moves("a", tags, owners, ("a", "b"), releasing=3).release) == 1
    assert plan_moves("a", tags, owners, ("a", "b"), releasing=4).release == ()


def test_a_consumer_that_lookup_does_not_list_yet_claims_buckets() -> None:
    assert plan_moves("me", ("a", "b"), {}, []).claim == ("a", "b")
    assert plan_moves("me", ("a", "b"), {"a": ["other"]}, ["other"]).claim == ("b",)


def test_no_bucket_is_released_while_others_are_free() -> None:
    """They go to the consumer with the fewest; a move would stop keys for nothing."""
    tags = bucket_tags(8)
    owners = dict.fromkeys(tags[:6], ("a",))
    assert plan_moves("a", tags, owners, ("a", "b")) == ((), ())
    assert plan_moves("b", tags, owners, ("a", "b")) == (tuple(tags[6:]), ())
