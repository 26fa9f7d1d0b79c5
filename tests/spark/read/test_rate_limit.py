"""Batches that are bounded by the number of their messages or by their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.spark.options import SourceOptions
from nsqext.spark.read.planning import Lag, PartitionState
from nsqext.spark.read.stream_planner import StreamPlanner, within_bytes
from tests.support.spark_admin import FakeAdmin, Log

if TYPE_CHECKING:
    from nsqext.spark.read.offsets import Key

KEYS = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """A partition; what is said to end it may lie behind its end."""
    start = draw(st.integers(0, 20))
    return Log(
        start, draw(st.integers(start, 60)), size=draw(st.integers(30, 500)), unsure=draw(st.sampled_from((0, 1, 999)))
    )


async def counted(found: dict[Key, Log], begins: dict[Key, int], limit: int) -> dict[Key, int]:
    """Return how much the next batch reads."""
    servers = FakeAdmin(found)
    lags = {key: Lag(begins[key], log.end - begins[key]) for key, log in found.items()}
    standings = {key: PartitionState(log.start, log.end, None, log.end_offset) for key, log in found.items()}
    return await within_bytes(servers.admin, lags, standings, limit)


def counts(found: dict[Key, Log], begins: dict[Key, int], limit: int) -> dict[Key, int]:
    """Return how much the next batch reads."""
    return anyio.run(counted, found, begins, limit)


@given(st.dictionaries(KEYS, logs(), min_size=1, max_size=6), st.integers(1, 20_000))
def test_batches_read_everything_within_their_limit(found: dict[Key, Log], limit: int) -> None:
    async def read() -> dict[Key, int]:
        begins = {key: log.start for key, log in found.items()}
        while any(begins[key] < log.end for key, log in found.items()):
            taken = await counted(found, begins, limit)
            assert any(taken.values())
            assert all(0 <= count <= found[key].end - begins[key] for key, count in taken.items())
            # each may give one message although there is no room for it
            assert sum(max(count - 1, 0) * found[key].size for key, count in taken.items()) <= limit
            begins = {key: begin + taken.get(key, 0) for key, begin in begins.items()}
        return await counted(found, begins, limit)

    assert anyio.run(read) == {}


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, 1), (99, 1), (199, 1), (200, 2), (299, 2), (999, 9), (1000, 10), (5000, 10)],
)
def test_a_batch_ends_between_messages(limit: int, expected: int) -> None:
    assert counts({("a", 0): Log(0, 10, size=100)}, {("a", 0): 0}, limit) == {("a", 0): expected}


def test_the_last_message_waits_where_its_end_is_not_known() -> None:
    log = Log(0, 10, size=100, unsure=1)
    assert counts({("a", 0): log}, {("a", 0): 0}, 1000) == {("a", 0): 9}
    assert counts({("a", 0): log}, {("a", 0): 9}, 1000) == {("a", 0): 1}


def test_bytes_before_the_batch_do_not_count() -> None:
    assert counts({("a", 0): Log(0, 10, size=100)}, {("a", 0): 5}, 700) == {("a", 0): 5}
    assert counts({("a", 0): Log(0, 10, size=100)}, {("a", 0): 5}, 499) == {("a", 0): 4}


def test_a_partition_whose_size_is_unknown_is_read_completely() -> None:
    assert counts({("a", 0): Log(0, 10, size=100, unsure=-1000)}, {("a", 0): 0}, 1) == {("a", 0): 10}


def test_a_partition_without_a_share_waits() -> None:
    found = {("a", partition): Log(0, 10, size=100) for partition in range(3)}
    assert sorted(counts(found, dict.fromkeys(found, 0), 2).values()) == [0, 1, 1]


def test_shares_are_in_proportion_to_bytes() -> None:
    found = {("a", 0): Log(0, 90, size=100), ("a", 1): Log(0, 10, size=100)}
    assert counts(found, {("a", 0): 0, ("a", 1): 0}, 5000) == {("a", 0): 45, ("a", 1): 5}
    large = {("a", 0): Log(0, 10, size=900), ("a", 1): Log(0, 90, size=100)}
    assert counts(large, {("a", 0): 0, ("a", 1): 0}, 9000) == {("a", 0): 5, ("a", 1): 45}


@pytest.mark.anyio
async def test_a_query_that_ends_does_not_wait_for_more_messages() -> None:
    """With AvailableNow, the messages behind its first batch were left to the next query."""
    servers = FakeAdmin({("orders", 0): Log(0, 80)})
    base = {"lookupd": "127.0.0.1:1", "subscribe": "orders", "channel": "spark", "startingOffsets": "earliest"}
    options = SourceOptions.parse({**base, "minOffsetsPerTrigger": "60"}, streaming=True)
    planner = StreamPlanner(options, servers.admin)
    await planner.freeze()
    end = await planner.latest(await planner.initial(), 30)
    assert end == {("orders", 0): 30}
    assert await planner.latest(end, 30) == {("orders", 0): 60}
