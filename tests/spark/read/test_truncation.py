"""Logs that were truncated and have grown again, in numbers: nothing of them is skipped."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from nsqext.errors import DataLoss
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.offsets import Offsets, Range
from nsqext.spark.read.planning import PartitionState
from nsqext.spark.read.stream_planner import StreamPlanner, TruncationCheck
from tests.support.spark_admin import FakeAdmin, Log

if TYPE_CHECKING:
    from nsqext.partitions import MessagePosition
    from nsqext.spark.read.offsets import Key
    from nsqext.spark.read.stream_planner import LastMessages

pytestmark = pytest.mark.anyio

REPLACED = (
    r"message 77, the last message read, was the message with id 77 at byte offset 770, stored at 1970-01-01T00:00:00"
    r".000\+00:00, and is the message with id 77 at byte offset 770, stored at 1970-01-01T00:00:01.000\+00:00 now"
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


def logs() -> FakeAdmin:
    return FakeAdmin({("orders", 0): Log(0, 78, size=10), ("orders", 1): Log(0, 5, size=10)})


def planner(servers: FakeAdmin, **given: str) -> StreamPlanner:
    known = {"lookupd": "127.0.0.1:1", "subscribe": "orders", "channel": "spark", "startingOffsets": "earliest"}
    return StreamPlanner(SourceOptions.parse({**known, **given}, streaming=True), servers.admin)


async def read_all(servers: FakeAdmin) -> tuple[Offsets, LastMessages]:
    """Return the checkpoint of a query that has read everything."""
    query = planner(servers)
    end = await query.latest(await query.initial(), None)
    return end, query.last


async def test_a_regrown_log_raises_and_says_what_was_there_and_what_is_there() -> None:
    servers = logs()
    read, last = await read_all(servers)
    servers.logs["orders", 0].regrown_from = 74
    for end in (78, 80):
        servers.logs["orders", 0].end = end
        with pytest.raises(DataLoss, match=REPLACED) as raised:
            await planner(servers).latest(read, None, last=last)
        assert (raised.value.topic, raised.value.partition) == ("orders", 0)


async def test_a_log_that_is_shorter_than_before_is_an_error_that_moves_no_anchor() -> None:
    servers = logs()
    read, last = await read_all(servers)
    log = servers.logs["orders", 0]
    for end in (76, 77):
        log.end = log.anchor = end
        with pytest.raises(DataLoss, match=f"78 messages were read, but the partition has only {end}"):
            await planner(servers).latest(read, None, last=last)
        assert log.anchor == end


async def test_the_last_message_that_was_read_is_the_first_one_that_is_retained() -> None:
    servers = logs()
    read, last = await read_all(servers)
    servers.logs["orders", 0].start, servers.logs["orders", 0].regrown_from = 77, 77
    with pytest.raises(DataLoss, match=REPLACED):
        await planner(servers).latest(read, None, last=last)


async def test_a_regrown_log_of_a_leader_whose_clock_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is newer than the last one that was read: reading continues behind it."""
    servers, asked = logs(), list[int]()
    query = planner(servers)
    first = await query.latest(await query.initial(), 20)
    known = query.last
    second = await query.latest(first, 20, last=known)
    count = first["orders", 0]
    servers.logs["orders", 0].regrown_from = count - 1

    async def count_since(_: FakeAdmin, topic: str, partition: int, timestamp: int) -> int:
        asked.append(timestamp)
        return 78

    monkeypatch.setattr(FakeAdmin, "count_since", count_since)
    lenient = planner(servers, failOnDataLoss="false")
    assert (await lenient.latest(first, 20, last=known))["orders", 0] > count
    assert {part.partition for part in await lenient.ranges(first, second, known)} == {1}
    assert set(asked) == {known["orders", 0].timestamp + 1}


async def test_a_log_that_regrows_while_the_query_runs() -> None:
    servers = logs()
    query = planner(servers)
    read = await query.latest(await query.initial(), None)
    assert await query.latest(read, None, last=query.last) == read
    servers.logs["orders", 0].regrown_from, servers.logs["orders", 0].end = 74, 80
    with pytest.raises(DataLoss, match="the log was truncated and has grown again, or the topic was recreated"):
        await query.latest(read, None, last=query.last)


@pytest.mark.parametrize("end", [76, 77, 78, 80])
async def test_without_the_check_a_regrown_log_is_read_from_its_first_new_message(
    end: int, caplog: pytest.LogCaptureFixture
) -> None:
    servers = logs()
    read, last = await read_all(servers)
    log = servers.logs["orders", 0]
    log.regrown_from, log.end, log.anchor = 74, end, min(end, 78)
    query = planner(servers, failOnDataLoss="false")
    with caplog.at_level(logging.WARNING, "nsqext.spark"):
        back = await query.latest(read, None, last=last)
    assert ("truncated" in caplog.text) is (end >= 78)
    assert back == {("orders", 0): 74, ("orders", 1): 5}
    await query.commit(read)
    assert log.anchor == 74, "the server retains the messages that were not read"
    assert await query.ranges(read, back, last, query.last) == []
    more = await query.latest(back, None, last=query.last)
    assert await query.ranges(back, more) == [Range("orders", 0, 74, end)]
    assert await query.latest(more, None, last=query.last) == more


async def test_a_recreated_topic_with_as_many_messages_begins_again() -> None:
    servers = logs()
    read, last = await read_all(servers)
    servers.logs["orders", 0] = Log(0, 80, size=10, regrown_from=0)
    with pytest.raises(DataLoss, match="or the topic was recreated"):
        await planner(servers).latest(read, None, last=last)
    query = planner(servers, failOnDataLoss="false")
    back = await query.latest(read, None, last=last)
    assert back == {("orders", 0): 0, ("orders", 1): 5}
    assert servers.logs["orders", 0].anchor == 0
    more = await query.latest(back, None, last=query.last)
    assert await query.ranges(back, more) == [Range("orders", 0, 0, 80)]


async def test_a_stored_batch_of_a_regrown_log() -> None:
    servers = logs()
    query = planner(servers)
    start = await query.latest(await query.initial(), 60)
    known = query.last
    end = await query.latest(start, None, last=known)
    first = start["orders", 0]
    servers.logs["orders", 0].regrown_from, servers.logs["orders", 0].end = 74, 80
    with pytest.raises(DataLoss, match="message 77, the last message read"):
        await planner(servers).ranges(start, end, known, query.last)
    lenient = planner(servers, failOnDataLoss="false")
    planned = await lenient.ranges(start, end, known, query.last)
    assert planned[0] == Range("orders", 0, first, 74), "the next batches read the messages from 74 on"
    back = await lenient.latest(end, None, last=query.last)
    assert back["orders", 0] == 74


async def test_old_checkpoints_are_read_and_get_last_messages() -> None:
    servers = logs()
    read, _ = await read_all(servers)
    query = planner(servers)
    assert await query.latest(read, None, last={}) == read
    assert query.last == {}, "without messages there is no batch"
    servers.logs["orders", 0].end = 90
    end = await query.latest(read, None, last={})
    assert {key: message.count for key, message in query.last.items()} == {("orders", 0): 89, ("orders", 1): 4}
    assert await query.ranges(read, end) == [Range("orders", 0, 78, 90)]


async def test_messages_that_are_not_retained_are_not_compared() -> None:
    servers = logs()
    read, last = await read_all(servers)
    servers.logs["orders", 0].start, servers.logs["orders", 0].end = 78, 80
    query = planner(servers)
    assert await query.latest(read, None, last=last) == {("orders", 0): 80, ("orders", 1): 5}


async def test_only_partitions_with_new_messages_are_asked_for_their_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = logs()
    asked: list[Key] = []
    query = planner(servers)
    read = await query.latest(await query.initial(), None)
    message = FakeAdmin.message

    async def record(admin: FakeAdmin, topic: str, partition: int, count: int) -> MessagePosition:
        asked.append((topic, partition))
        return await message(admin, topic, partition, count)

    monkeypatch.setattr(FakeAdmin, "message", record)
    servers.logs["orders", 0].end = 90
    await query.latest(read, None, last=query.last)
    assert set(asked) == {("orders", 0)}
    assert {key: found.count for key, found in query.last.items()} == {("orders", 0): 89, ("orders", 1): 4}


async def test_an_idle_query_requests_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = logs()
    query = planner(servers)
    read = await query.latest(await query.initial(), None)
    await query.latest(read, None, last=query.last)
    monkeypatch.delattr(FakeAdmin, "message")
    assert await query.latest(read, None, last=query.last) == read


async def test_a_last_message_that_was_just_removed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server returns the first retained message, which is not the last one that was read."""
    servers = FakeAdmin({("t", 0): Log(0, 50)})

    async def message(admin: FakeAdmin, topic: str, partition: int, count: int) -> MessagePosition:
        return admin.log(topic, partition).message(count + 3)

    monkeypatch.setattr(FakeAdmin, "message", message)
    check = TruncationCheck(servers.admin, fail_on_data_loss=False)
    assert await check.last_messages({("t", 0): 5}, {("t", 0): PartitionState(0, 50)}, {}, {}) == {}


@pytest.mark.parametrize("strict", [True, False])
async def test_a_last_message_that_was_just_removed_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    servers = FakeAdmin({("t", 0): Log(0, 50)})
    known = {("t", 0): servers.log("t", 0).message(4)}

    async def message(admin: FakeAdmin, topic: str, partition: int, count: int) -> MessagePosition:
        return admin.log(topic, partition).message(count + 3)

    monkeypatch.setattr(FakeAdmin, "message", message)
    check = TruncationCheck(servers.admin, fail_on_data_loss=strict)
    assert await check.divergences(known, {("t", 0): PartitionState(0, 50)}) == {}
