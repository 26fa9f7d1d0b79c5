"""Readers of ranges with scripted connections: RDY and FIN, errors and attempts, and connections that fall silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import pytest
from attrs import evolve

from nsqext.errors import (
    ConnectionLost,
    DataLoss,
    InvalidPartition,
    NsqError,
    PartitionUnavailable,
    ProtocolError,
    RangeIncomplete,
    TopicNotFound,
)
from nsqext.partitions import MessagePosition
from nsqext.protocol.client.commands import rdy
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.options import SourceOptions
from nsqext.spark.read import range_reader
from nsqext.spark.read.offsets import Range
from nsqext.spark.read.planning import Planned
from nsqext.spark.read.range_reader import RangeReader, TaskReader
from nsqext.types import TopicMeta
from tests.support.clock import replace_clock
from tests.support.range_scene import LEADER, Clock, Connection, Servers, fins, frames
from tests.support.sleeps import replace_sleep
from tests.support.spark_readers import bodies

if TYPE_CHECKING:
    from nsqext.partitions import Leader
    from nsqext.spark.cluster.admin import SourceAdmin
    from nsqext.spark.read.frames import Block

pytestmark = pytest.mark.anyio

LOST = ConnectionLost("the node was stopped")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    replace_clock(monkeypatch, lambda: clock.now)
    monkeypatch.setattr(range_reader, "TICK", 0.25)
    replace_sleep(monkeypatch, clock.sleep)
    return clock


def options(**given: Any) -> SourceOptions:
    return SourceOptions(ClientConfig(("127.0.0.1:1",)), {"t": None}, **{"read_timeout": 4.0, **given})


def reader_of(monkeypatch: pytest.MonkeyPatch, servers: Servers, end: int, start: int = 0, **given: Any) -> RangeReader:
    monkeypatch.setattr(range_reader, "open_ephemeral", servers.open)
    return RangeReader(cast("SourceAdmin", servers), Range("t", 0, start, end), options(**given))


async def read(reader: RangeReader) -> list[int]:
    """Return the numbers of all messages of a range."""
    numbers: list[int] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        while (block := await reader.next_block()) is not None:
            assert bodies(block) == [b"%d" % number for number in range(block.first, block.first + len(block))]
            numbers += range(block.first, block.first + len(block))
    return numbers


async def failure_of(reader: RangeReader, kind: type[NsqError]) -> Any:
    """Return the error with which a range ends."""
    await reader.run()
    with pytest.raises(kind) as caught:
        while await reader.next_block() is not None:
            pass
    return caught.value


@pytest.mark.parametrize(("max_ready", "ready"), [(1000, 7), (5, 5)])
async def test_messages_are_finished_until_the_range_is_complete(
    monkeypatch: pytest.MonkeyPatch, max_ready: int, ready: int
) -> None:
    connection = Connection(frames(3, 4), frames(4, 5), frames(6, 7, 8), frames(9), max_ready=max_ready)
    servers = Servers(connection)
    assert await read(reader_of(monkeypatch, servers, 8, start=3, rdy=7)) == [3, 4, 5, 6, 7]
    assert connection.sent == [rdy(ready), fins(3, 4), fins(4, 5)]
    assert (connection.ended, connection.failure, servers.moves, servers.known) == (True, None, [3], ["t"])
    assert servers.distrusted == []


async def test_the_server_is_stopped_while_blocks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered = anyio.Event()
    connection = Connection(frames(0, 1, 2, 3), frames(4), delivered.set)
    reader = reader_of(monkeypatch, Servers(connection), 9, rdy=7, arrow_batch_rows=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        await delivered.wait()
        assert connection.sent == [rdy(7), rdy(0) + fins(0, 1, 2, 3), fins(4)]
        assert await reader.next_block() is not None
        assert len(connection.sent) == 3, "one block still waits"
        assert await reader.next_block() is not None
        assert connection.sent[3:] == [rdy(7)]
        tasks.cancel_scope.cancel()
    assert connection.ended


async def test_a_block_is_returned_as_soon_as_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(monkeypatch, Servers(Connection(frames(0, 1, 2))), 9, arrow_batch_rows=2)
    found: list[Block | None] = []

    async def take() -> None:
        found.append(await reader.next_block())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        tasks.start_soon(reader.run)
        await anyio.wait_all_tasks_blocked()
        assert [None if block is None else len(block) for block in found] == [2]
        tasks.cancel_scope.cancel()


async def test_blocks_that_wait_when_the_connection_ends(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """The next connection begins without RDY until they are read."""
    second = Connection(clock.pass_by(3.0))
    servers = Servers(Connection(frames(0, 1, 2, 3), LOST), second)
    reader = reader_of(monkeypatch, servers, 5, rdy=7, arrow_batch_rows=2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader.run)
        while second.ticks < 20:
            await anyio.lowlevel.checkpoint()
        assert (second.sent, second.failure) == ([rdy(0)], None), "a paused connection is not too slow"
        for _ in range(2):
            assert await reader.next_block() is not None
        assert second.sent == [rdy(0), rdy(7)]
        tasks.cancel_scope.cancel()
    assert servers.moves == [0, 4]


async def test_a_block_is_taken_while_there_is_no_connection(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    servers = Servers(Connection(frames(0, 1), LOST), Connection(frames(2)))
    reader = reader_of(monkeypatch, servers, 3, arrow_batch_rows=2)
    found: list[list[bytes]] = []

    async def leader(topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        if servers.opened and (block := await reader.next_block()) is not None:
            found.append(bodies(block))
        return LEADER, TopicMeta()

    monkeypatch.setattr(servers, "leader", leader)
    await reader.run()
    assert found == [[b"0", b"1"]]
    assert servers.moves == [0, 2]


@pytest.mark.parametrize("bad", [[b"short"], frames(3, 4, 5)], ids=["short", "far ahead"])
async def test_a_delivery_that_cannot_be_used_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, bad: list[bytes]
) -> None:
    first = Connection(frames(0), frames(3, 4), bad, frames(1))
    servers = Servers(first, Connection(frames(1, 2)))
    reader = reader_of(monkeypatch, servers, 3, rdy=1)
    await reader.run()
    assert isinstance(first.failure, ProtocolError | RangeIncomplete)


async def test_a_connection_without_messages_is_replaced(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """After half of the timeout, counted from the last message."""
    first = Connection(clock.pass_by(1.0), frames(0))
    servers = Servers(first, Connection(frames(1)))
    assert await read(reader_of(monkeypatch, servers, 2)) == [0, 1]
    assert str(first.failure).startswith("no message was received for 2 s (")
    assert first.ticks >= 8
    ((waited, limit, error),) = servers.retries
    assert (error, limit) == (first.failure, 4.0)
    assert 2.0 < waited <= 2.75
    assert servers.distrusted == [("t", 0, LEADER)]
    assert first.ended


async def test_errors_are_followed_by_pauses_that_grow(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Until a message is received: then they begin again."""
    refused = [ConnectionLost("refused") for _ in range(30)]
    servers = Servers(*refused, Connection(frames(0), LOST), Connection(LOST), Connection(frames(1)))
    assert await read(reader_of(monkeypatch, servers, 2, read_timeout=60.0)) == [0, 1]
    grow = [0.02 * count for count in range(1, 25)] + [0.5] * 6
    assert [pause for pause in clock.pauses if pause != 0.25] == pytest.approx([*grow, 0.02, 0.04])
    assert [error for _, _, error in servers.retries] == [*refused, LOST, LOST]
    assert [waited for waited, _, _ in servers.retries][:3] == pytest.approx([0.0, 0.02, 0.06])
    assert len(servers.distrusted) == 32
    assert servers.known == ["t"] * 3


async def test_an_error_with_a_range_that_is_never_complete(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    errors = [ConnectionLost("first"), ConnectionLost("second"), ConnectionLost("third")]
    servers = Servers(*(Connection(clock.pass_by(1.7), error) for error in errors))
    reader = reader_of(monkeypatch, servers, 7, start=5)
    failure = await failure_of(reader, RangeIncomplete)
    assert str(failure).startswith("message 5 of the range 5..7 was not received within 4 s: third")
    assert (failure.__cause__, failure.attempts) == (errors[2], (errors[0], errors[1]))
    assert (failure.topic, failure.partition, failure.node) == ("t", 0, "n1:4150")


@pytest.mark.parametrize(
    ("begun", "errors", "final"),
    [
        (False, [TopicNotFound("deleted")], True),
        (False, [LOST, TopicNotFound("deleted")], False),
        (True, [TopicNotFound("deleted")], False),
        (False, [PartitionUnavailable("it has no leader")], False),
        (False, [LOST], False),
        (False, [ProtocolError("it cannot be read")], False),
        (False, [InvalidPartition("it does not exist")], True),
        (False, [LOST, DataLoss("it is not retained")], True),
    ],
)
async def test_errors_that_a_retry_cannot_help(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, begun: bool, errors: list[NsqError], final: bool
) -> None:
    before = [Connection(frames(0), LOST)] if begun else []
    servers = Servers(*before, *errors, Connection(frames(0, 1)))
    reader = reader_of(monkeypatch, servers, 2)
    if final:
        assert await failure_of(reader, type(errors[-1])) is errors[-1]
    else:
        assert await read(reader) == [0, 1]


async def test_messages_that_are_removed_before_the_channel_is_moved(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    servers = Servers(Connection(), Connection(), Connection(frames(5)))
    servers.retained[0] = [6]
    reader = reader_of(monkeypatch, servers, 6, start=5)
    failure = await failure_of(reader, DataLoss)
    assert "message 5 is not retained any more; the first retained message is 6" in str(failure)
    assert servers.moves == []
    servers.retained[0], servers.settled = [5, 6], PartitionUnavailable("it was not moved")
    failure = await failure_of(reader_of(monkeypatch, servers, 6, start=5), DataLoss)
    assert servers.moves == [5], "the move did not happen because the message was removed"
    servers.retained[0], servers.settled = [5], None
    assert await read(reader_of(monkeypatch, servers, 6, start=5)) == [5]


def planned_reader(
    monkeypatch: pytest.MonkeyPatch,
    servers: Servers,
    end: int,
    before: MessagePosition | None = None,
    start: int | None = None,
) -> RangeReader:
    """Return a reader of the messages from 5, whose planner has asked the leader, also for the ``start`` of the log."""
    monkeypatch.setattr(range_reader, "open_ephemeral", servers.open)
    planned = Planned(LEADER, TopicMeta(), before, start, 50)
    return RangeReader(cast("SourceAdmin", servers), Range("t", 0, 5, end), options(), planned)


async def test_the_message_before_a_range_shows_that_the_channel_has_moved(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    before = MessagePosition(4, 0, 40, 1)
    servers = Servers(Connection(frames(8), frames(4), frames(5, 6, 7)))
    monkeypatch.setattr(servers, "wait_for_move", None)  # nothing asks for the position
    assert await read(planned_reader(monkeypatch, servers, 8, before)) == [5, 6, 7]
    assert (servers.moves, servers.distrusted) == ([4], [])
    servers.waiting = [Connection(frames(4, 5, 6))]
    assert await read(planned_reader(monkeypatch, servers, 7, before)) == [5, 6], "in one delivery"
    servers.waiting = [Connection(frames(4, 5))]
    planned = planned_reader(monkeypatch, servers, 6, evolve(before, id=7))
    assert "message 4 had id 7 when the batch was planned, and has id 0 now" in str(await failure_of(planned, DataLoss))


async def test_a_channel_that_has_not_moved_to_the_message_before_a_range(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The next attempt moves it to the range, and asks whether it has moved."""
    silent = Connection(frames(9), clock.pass_by(1.9), clock.pass_by(0.2))
    for first in (silent, Connection(frames(9), LOST)):
        servers = Servers(first, Connection(frames(5, 6)))
        assert await read(planned_reader(monkeypatch, servers, 7, MessagePosition(4, 0, 40, 1))) == [5, 6]
        assert servers.moves == [4, 5]
    assert "no message was received for 2 s" in str(silent.failure)


async def test_the_first_message_of_a_log_shows_that_the_channel_has_moved(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    servers = Servers(Connection(frames(8), frames(5, 6)))
    settled, waited = servers.wait_for_move, []

    async def wait(*given: Any) -> Any:
        waited.append(given)
        return await settled(*given)

    monkeypatch.setattr(servers, "wait_for_move", wait)
    assert await read(planned_reader(monkeypatch, servers, 7, start=5)) == [5, 6]
    assert (servers.moves, waited) == ([5], []), "nothing asks for the position"
    servers.waiting = [Connection(frames(5, 6))]
    assert await read(planned_reader(monkeypatch, servers, 7, start=4)) == [5, 6]
    assert len(waited) == 1, "the range begins behind the start of the log"
    silent = Connection(frames(9), clock.pass_by(1.9), clock.pass_by(0.2))
    servers.waiting = [silent, Connection(frames(5, 6))]
    assert await read(planned_reader(monkeypatch, servers, 7, start=5)) == [5, 6]
    assert len(waited) == 2, "the channel did not move"
    assert "no message was received for 2 s" in str(silent.failure)


async def test_a_log_that_begins_later_than_planned(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Its messages were removed after the batch was planned: the server delivers what it has."""
    servers = Servers(Connection(frames(7, 8), clock.pass_by(2.1)), Connection(frames(5)))
    servers.retained[0] = [7]
    failure = await failure_of(planned_reader(monkeypatch, servers, 7, start=5), DataLoss)
    assert "message 5 is not retained any more; the first retained message is 7" in str(failure)


async def test_the_leader_that_planned_a_range_is_asked_nothing_twice(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    servers = Servers(Connection(frames(5)), Connection(frames(5), LOST), Connection(frames(6)))
    asked: list[str] = []

    async def leader(topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        asked.append("leader")
        return LEADER, TopicMeta()

    async def retained(*_: object) -> int:
        asked.append("retained")
        return 0

    monkeypatch.setattr(servers, "leader", leader)
    monkeypatch.setattr(servers, "first_retained", retained)
    for end, expected in ((6, []), (7, ["leader", "retained"])):
        planned = planned_reader(monkeypatch, servers, end)
        assert await read(planned) == [*range(5, end)]
        assert asked == expected
    servers.waiting, servers.settled = [Connection()], PartitionUnavailable("it was not moved")
    monkeypatch.setattr(servers, "first_retained", Servers.first_retained.__get__(servers))
    servers.retained[0] = [6]
    planned = planned_reader(monkeypatch, servers, 6)
    assert "message 5 is not retained any more" in str(await failure_of(planned, DataLoss))


async def test_messages_that_were_received_before_the_rest_was_lost_are_read(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    servers = Servers(Connection(frames(0, 1), LOST), Connection())
    servers.retained[0] = [0, 3]
    reader = reader_of(monkeypatch, servers, 5)
    await reader.run()
    block = await reader.next_block()
    assert block is not None
    assert (block.first, bodies(block)) == (0, [b"0", b"1"])
    with pytest.raises(DataLoss, match="message 2 is not retained any more"):
        await reader.next_block()


async def test_another_leader_with_another_log(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    servers = Servers(Connection(frames(0), LOST), Connection())
    reader = reader_of(monkeypatch, servers, 2)

    def rewrite(*_: object) -> None:
        servers.offset = 7

    monkeypatch.setattr(servers, "log_retry", rewrite)
    failure = await failure_of(reader, DataLoss)
    assert "message 1 begins at byte 17 on this node, and began at byte 10 on the previous leader" in str(failure)


# The ranges of a task


def tasks_of(monkeypatch: pytest.MonkeyPatch, servers: Servers, *ranges: Range, **given: Any) -> TaskReader:
    monkeypatch.setattr(range_reader, "open_ephemeral", servers.open)
    monkeypatch.setattr(range_reader, "SourceAdmin", lambda _: servers)
    return TaskReader(options(**given), ranges)


async def read_all(reader: TaskReader) -> list[tuple[int, int]]:
    """Return partition and number of the messages of a task."""
    found: list[tuple[int, int]] = []
    async with reader:
        while (block := await reader.next_block()) is not None:
            part, messages = block
            found += [(part.partition, number) for number in range(messages.first, messages.first + len(messages))]
    return found


async def test_the_next_ranges_of_a_task_are_opened_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "OPEN_RANGES", 2)
    servers = Servers(*(Connection(frames(0)) for _ in range(4)))
    reader = tasks_of(monkeypatch, servers, *(Range("t", partition, 0, 1) for partition in range(4)))
    async with reader:
        while servers.opened < 2:
            await anyio.lowlevel.checkpoint()
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert servers.opened == 2, "the others wait"
        found = [await reader.next_block() for _ in range(5)]
    assert [None if block is None else block[0].partition for block in found] == [0, 1, 2, 3, None]
    assert servers.closed


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_task_that_ends_early_closes_its_connections(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, cancelled: bool
) -> None:
    connection = Connection()
    servers = Servers(connection)
    with anyio.CancelScope() as scope:
        async with tasks_of(monkeypatch, servers, Range("t", 0, 0, 1)):
            while not connection.sent:
                await anyio.lowlevel.checkpoint()
            if cancelled:
                scope.cancel()
                await anyio.lowlevel.checkpoint()
    assert (servers.closed, connection.ended, connection.failure) == (True, True, None)


@pytest.mark.parametrize(
    ("received", "retained", "expected"),
    [([], 1, [1, 2, 3, 4]), ([], 7, []), ([0, 1], 3, [0, 1, 3, 4]), ([0, 1], 9, [0, 1])],
)
async def test_messages_that_are_not_retained_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    received: list[int],
    retained: int,
    expected: list[int],
) -> None:
    """Without failOnDataLoss: those at the start of a range, and those after the last message that was received."""
    connections = [Connection(frames(*received), LOST)] if received else []
    servers = Servers(Connection(frames(0)), *connections, Connection(), Connection(frames(*expected)))
    servers.retained[1] = [0, retained] if received else [retained]
    lost = Range("t", 1, 0, 5)
    monkeypatch.setattr(range_reader, "OPEN_RANGES", 1)
    found = await read_all(tasks_of(monkeypatch, servers, Range("t", 0, 0, 1), lost, fail_on_data_loss=False))
    assert found == [(0, 0), *((1, number) for number in expected)]
    assert f"messages {len(received)}..{retained} of {lost} are not retained any more: skipped" in caplog.text


async def test_lost_messages_that_are_retained_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    error = DataLoss("the log was rewritten")
    for start in (0, 3):
        servers = Servers(error)
        servers.retained[0] = [start]
        with pytest.raises(DataLoss, match="the log was rewritten"):
            await read_all(tasks_of(monkeypatch, servers, Range("t", 0, start, 5), fail_on_data_loss=False))
    servers = Servers(Connection())
    servers.retained[0] = [1]
    with pytest.raises(DataLoss, match="message 0 is not retained any more"):
        await read_all(tasks_of(monkeypatch, servers, Range("t", 0, 0, 5)))
    assert servers.closed


async def test_deleted_topics_are_skipped(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Without failOnDataLoss, once it is certain; otherwise the range is requested again after a pause."""
    monkeypatch.setattr(range_reader, "OPEN_RANGES", 1)
    unknown, found = TopicNotFound("lookup does not know it"), Range("t", 0, 3, 5)
    with pytest.raises(TopicNotFound, match="lookup does not know it"):
        await read_all(tasks_of(monkeypatch, Servers(unknown), found))
    servers = Servers(unknown, unknown, Connection(frames(3, 4)))
    servers.deleted = [False, True]
    ranges = found, Range("t", 1, 3, 5)
    assert await read_all(tasks_of(monkeypatch, servers, *ranges, fail_on_data_loss=False)) == [(1, 3), (1, 4)]
    assert [pause for pause in clock.pauses if pause != 0.25] == [0.5]
    assert f"the topic of {found} does not exist any more: skipped" in caplog.text
    servers = Servers(unknown, Connection(frames(0)))
    servers.deleted = [False]
    assert await read_all(tasks_of(monkeypatch, servers, Range("t", 0, 0, 1), fail_on_data_loss=False)) == [(0, 0)]


async def test_the_pause_of_a_slow_query_does_not_count(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """A connection that was lost after it made the task fail, also one that was lost soon after the query continued."""
    first, later = Connection(frames(0, 1, 2, 3), clock.pass_by(9.0), LOST), Connection(clock.pass_by(2.0), LOST)
    servers = Servers(first, later, Connection(frames(4)))
    reader = reader_of(monkeypatch, servers, 5, arrow_batch_rows=2)

    async def leader(topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        if servers.opened == 1:
            clock.now += 3.5
            assert [await reader.next_block() for _ in range(2)].count(None) == 0
        return LEADER, TopicMeta()

    monkeypatch.setattr(servers, "leader", leader)
    await reader.run()
    assert servers.opened == 3
