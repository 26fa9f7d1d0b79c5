"""What an inbox remembers of a log: few rows, and never a message that was not handled."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.to_thread import run_sync
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from nsqext import Admin, Consumer, Message, Position, Producer
from nsqext.client.middleware import Handling
from nsqext.errors import InvalidSetting
from nsqext.transactions import Inbox, inbox
from nsqext.transactions.handled_ranges import HandledRange, HandledRanges, merged
from nsqext.transactions.schema import ChannelPartition, execute
from tests.support.consumers import eventually
from tests.support.messages import RecordingOwner, make_message
from tests.transactions.databases import rows_as_dicts, url_of

if TYPE_CHECKING:
    from nsqext.broker import Cluster

_SECONDS = 40
_SIZE = 34
NOW = 1000.0

Sessions = async_sessionmaker[AsyncSession]


def of_log(number: int, log: int = 1) -> HandledRange:
    """Return the range of one message of a log; the clocks of two leaders differ by half a second."""
    stored = log * 60_000_000_000 + number * 1000 + (number % 2) * 500_000_000
    return HandledRange(number * _SIZE, (number + 1) * _SIZE, stored, float(number))


@given(st.sets(st.integers(0, 30)), st.randoms(use_true_random=False))
def test_ranges_are_joined_in_any_order_and_contain_what_was_handled(numbers: set[int], chance: random.Random) -> None:
    ranges: list[HandledRange] = []
    listed = sorted(numbers)
    chance.shuffle(listed)
    for number in listed:
        ranges.append(of_log(number))
        if chance.random() < 0.3:
            ranges = merged([*ranges, *chance.choices([of_log(one) for one in numbers & {number}], k=1)], NOW)
    ranges = merged(ranges, NOW)
    found = [number for one in ranges for number in range(one.first // _SIZE, one.next // _SIZE)]
    assert found == sorted(numbers)
    assert len(ranges) == len([number for number in numbers if number - 1 not in numbers])
    for one in ranges:
        inside = [of_log(number) for number in range(one.first // _SIZE, one.next // _SIZE)]
        assert one.stored == max(message.stored for message in inside)
        assert one.handled == max(message.handled for message in inside)


@given(st.sets(st.integers(0, 10)), st.sets(st.integers(0, 10)))
def test_ranges_of_two_logs_contain_the_handled_messages_of_the_newer_one_and_no_other(
    old: set[int], new: set[int]
) -> None:
    ranges = merged([*merged(map(of_log, old), NOW), *(of_log(number, 2) for number in new)], NOW)
    for number in range(11):
        message = of_log(number, 2)
        covering = [one.stored for one in ranges if one.first <= message.first < one.next]
        assert (max(covering, default=0) >= message.stored) is (number in new)


def test_a_time_without_messages_keeps_ranges_apart_for_an_hour() -> None:
    before, behind = of_log(0), of_log(1, 2)
    assert merged([before, behind], behind.handled + 3500) == [before, behind]
    (joined,) = merged([before, behind], behind.handled + 3700)
    assert (joined.first, joined.next, joined.stored) == (0, 2 * _SIZE, behind.stored)
    assert merged([of_log(0, 2), of_log(1)], 1e6) == [of_log(0, 2), of_log(1)]


def test_a_range_is_kept_as_long_as_its_message_that_was_handled_last() -> None:
    """The first message may be redelivered after the others, and forgotten before them."""
    late, early = of_log(0)._replace(handled=500.0), of_log(1)._replace(handled=100.0)
    (joined,) = merged([late, early], NOW)
    assert joined.handled == 500.0


@pytest.fixture
async def sessions(database: str) -> AsyncIterator[Sessions]:
    """Sessions of a database with an empty table of effects."""
    engine = create_async_engine(url_of(database, "async"), pool_size=20)
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE IF EXISTS effects"))
        await connection.execute(text("CREATE TABLE effects (body TEXT)"))
    yield async_sessionmaker(engine)
    await engine.dispose()


async def note(session: AsyncSession, message: Message) -> None:
    await session.execute(text("INSERT INTO effects VALUES (:body)"), {"body": message.body.decode()})


async def effects(sessions: Sessions) -> Counter[str]:
    async with sessions() as session:
        return Counter((await session.execute(text("SELECT body FROM effects"))).scalars())


async def rows(sessions: Sessions) -> int:
    async with sessions() as session:
        return int((await session.execute(text("SELECT count(*) FROM nsqext_inbox_range"))).scalar_one())


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic that is not ordered."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=1, channels=["ch"])
    return name


class Worker:
    """A consumer with an inbox; every tenth message fails once, so that others overtake it."""

    def __init__(self, cluster: Cluster, topic: str, sessions: Sessions, concurrency: int = 4) -> None:
        self.inbox = Inbox(sessions.begin)
        self.calls = 0
        self.consumer = Consumer(
            topic,
            "ch",
            cluster.lookupd,
            middleware=[self.inbox],
            queue_position=True,
            concurrency=concurrency,
            requeue_delay=0.1,
            backoff="off",
        )

        @self.consumer.handler
        async def handle(message: Message) -> None:
            self.calls += 1
            await note(self.inbox.session(), message)
            if message.attempts == 1 and message.body.endswith(b"0"):
                raise RuntimeError("fails once")


async def publish(cluster: Cluster, topic: str, count: int, prefix: str = "") -> list[str]:
    bodies = [f"{prefix}{number}" for number in range(count)]
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [body.encode() for body in bodies])
    return bodies


@pytest.mark.anyio
async def test_the_table_is_bounded_by_what_is_in_flight(
    cluster: Cluster, topic: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MERGE_EVERY", 8)
    bodies = await publish(cluster, topic, 100)
    workers = [Worker(cluster, topic, sessions) for _ in range(3)]
    for worker in workers:
        await worker.consumer.start()
    await eventually(lambda: sum(one.consumer.statistics().finished for one in workers) >= 100, _SECONDS)
    for worker in workers:
        await worker.consumer.aclose()
    assert await effects(sessions) == dict.fromkeys(bodies, 1)
    assert await rows(sessions) < 3 * 8 + 20
    async with sessions() as session:
        assert (await session.execute(text("SELECT count(*) FROM nsqext_inbox"))).scalar_one() == 0

    async with Admin(cluster.lookupd) as admin:
        await admin.seek_channel(topic, "ch", Position.earliest())
    again = Worker(cluster, topic, sessions)
    async with again.consumer:
        await eventually(lambda: again.inbox.skipped >= 100, _SECONDS)
    assert again.calls == 0
    assert await rows(sessions) < 30


@pytest.mark.anyio
async def test_a_log_that_begins_again_is_noticed(
    cluster: Cluster, topic: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inbox, "MERGE_EVERY", 10)
    expected: list[str] = []
    for prefix in ("a", "b", "c"):
        expected += await publish(cluster, topic, 30, prefix)
        worker = Worker(cluster, topic, sessions)
        async with worker.consumer:
            await eventually(lambda: worker.consumer.statistics().finished >= 30, _SECONDS)  # noqa: B023
        await run_sync(cluster.delete_topic, topic)
        await run_sync(lambda: cluster.create_topic(topic, partitions=1, channels=["ch"]))
    assert await effects(sessions) == dict.fromkeys(expected, 1)
    assert "was the topic created again?" in caplog.text
    assert await rows(sessions) < 50


def message_of(number: int, log: int = 1) -> Message:
    """Return a delivery of a message of a log."""
    message = make_message(
        RecordingOwner(), number, b"%d" % number, offset=number * _SIZE, timestamp=of_log(number, log).stored
    )
    message.size = _SIZE
    return message


@pytest.mark.anyio
async def test_messages_are_handled_once_while_ranges_are_merged(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several processes handle the same deliveries at the same time."""
    monkeypatch.setattr(inbox, "MERGE_EVERY", 3)
    count, chance, calls = 30, random.Random(5), Counter[int]()

    async def handle(handling: Handling) -> None:
        calls[handling.message.offset // _SIZE] += 1
        await anyio.sleep(0.002)

    async def work(inbox: Inbox[AsyncSession], numbers: list[int]) -> None:
        for number in numbers:
            await inbox.handle(Handling([message_of(number)], "ch"), handle)

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            numbers = list(range(count))
            start = chance.randrange(count)
            tasks.start_soon(work, Inbox(sessions.begin), numbers[start:] + numbers[:start])
    assert calls == dict.fromkeys(range(count), 1)
    assert await rows(sessions) < 40


@pytest.mark.anyio
async def test_connections_that_return_rows_as_dicts_are_used(
    database: str, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL no ranges were merged, and on SQLite no message was handled."""
    monkeypatch.setattr(inbox, "MERGE_EVERY", 3)
    calls: list[int] = []

    async def handle(handling: Handling) -> None:
        calls.append(handling.message.offset // _SIZE)

    one: Inbox[Any] = Inbox(lambda: rows_as_dicts(database))
    for number in (0, 1, 2, 1, 1, 1):
        await one.handle(Handling([message_of(number)], "ch"), handle)
    assert (calls, one.skipped, await rows(sessions)) == ([0, 1, 2], 3, 1)


@pytest.mark.anyio
async def test_a_message_of_an_older_log_is_not_mistaken_for_one_that_was_handled(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MERGE_EVERY", 4)
    calls: list[tuple[int, int]] = []
    one = Inbox(sessions.begin)

    async def handle(handling: Handling) -> None:
        calls.append((handling.message.offset // _SIZE, handling.message.timestamp // 60_000_000_000))

    sent = [(number, 1) for number in range(10)] + [(number, 2) for number in (3, 0, 1, 2, 7, 4)]
    for number, log in [*sent, *sent[10:]]:
        await one.handle(Handling([message_of(number, log)], "ch"), handle)
        if log == 2:  # the first one tells that the log has begun again
            async with sessions() as session:
                of_old_log = text("SELECT count(*) FROM nsqext_inbox_range WHERE stored < 120000000000")
                assert (await session.execute(of_old_log)).scalar_one() == 0
    assert calls == sent
    assert one.skipped == 6


@pytest.mark.anyio
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_merge_does_not_wait_for_another_process_that_merges(sessions: Sessions) -> None:
    async def handle(_: Handling) -> None:
        """Do nothing."""

    for number in range(3):
        await Inbox(sessions.begin).handle(Handling([message_of(number)], "ch"), handle)
    message = message_of(0)
    key, ranges = ChannelPartition(message.topic, "ch", message.partition), HandledRanges()
    async with sessions.begin() as first:
        await ranges.merge(first, key)
        async with sessions.begin() as second:
            with anyio.fail_after(_SECONDS / 8):
                await ranges.merge(second, key)
    assert await rows(sessions) == 1


@pytest.mark.anyio
async def test_old_ranges_are_removed(sessions: Sessions) -> None:
    async def handle(_: Handling) -> None:
        """Do nothing."""

    async with sessions.begin() as session:
        await session.execute(text("INSERT INTO nsqext_inbox_range VALUES ('t', 'ch', 0, 0, 34, 1, 1.0)"))
        values = {"handled": time.time()}
        await session.execute(text("INSERT INTO nsqext_inbox_range VALUES ('t', 'ch', 0, 34, 68, 1, :handled)"), values)
    await Inbox(sessions.begin).handle(Handling([make_message(RecordingOwner())], "ch"), handle)
    assert await rows(sessions) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_an_isolation_level_that_hides_merges_is_refused(sessions: Sessions) -> None:
    async def handle(_: Handling) -> None:
        """Do nothing."""

    engine = sessions.kw["bind"].execution_options(isolation_level="REPEATABLE READ")
    with pytest.raises(InvalidSetting, match="repeatable read"):
        await Inbox(async_sessionmaker(engine).begin).handle(Handling([message_of(1)], "ch"), handle)


@pytest.mark.anyio
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_the_isolation_level_is_asked_for_once(sessions: Sessions) -> None:
    statements: list[str] = []

    async def handle(_: Handling) -> None:
        """Do nothing."""

    async def noted(session: AsyncSession, statement: str, values: Any) -> Any:
        statements.append(statement)
        return await execute(session, statement, values)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nsqext.transactions.handled_ranges.execute", noted)
        subject = Inbox(sessions.begin)
        for number in range(3):
            await subject.handle(Handling([message_of(number)], "ch"), handle)
    assert statements.count("SHOW transaction_isolation") == 1


@pytest.mark.anyio
async def test_a_merge_leaves_other_partitions_and_channels_as_they_are(sessions: Sessions) -> None:
    found = "SELECT topic, channel, partition, first, next FROM nsqext_inbox_range ORDER BY topic, channel, partition"
    others = [("other", "ch", 0, 0, 34), ("t", "ch", 1, 0, 34), ("t", "other", 0, 0, 34)]
    async with sessions.begin() as session:
        for topic, channel, partition, first, end in [*others, ("t", "ch", 0, 0, 34), ("t", "ch", 0, 34, 68)]:
            values = {"topic": topic, "channel": channel, "partition": partition, "first": first, "next": end}
            statement = "INSERT INTO nsqext_inbox_range VALUES (:topic, :channel, :partition, :first, :next, 1, 1.0)"
            await session.execute(text(statement), values)
    async with sessions.begin() as session:
        await HandledRanges().merge(session, ChannelPartition("t", "ch", 0))
    async with sessions() as session:
        left = [tuple(row) for row in await session.execute(text(found))]
    assert sorted(left) == sorted([*others, ("t", "ch", 0, 0, 68)])


@pytest.mark.anyio
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_ranges_are_merged_each_time_that_a_number_of_messages_was_handled(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges: list[ChannelPartition] = []

    async def note_merge(_: HandledRanges, session: AsyncSession, key: ChannelPartition) -> None:
        merges.append(key)

    async def handle(_: Handling) -> None:
        """Do nothing."""

    monkeypatch.setattr(inbox, "MERGE_EVERY", 3)
    monkeypatch.setattr(HandledRanges, "merge", note_merge)
    one = Inbox(sessions.begin)
    for number in range(7):
        await one.handle(Handling([message_of(number)], "ch"), handle)
    assert len(merges) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_merge_that_fails_is_logged_and_its_message_is_handled(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("no merge")

    async def handle(_: Handling) -> str:
        return "handled"

    monkeypatch.setattr(inbox, "MERGE_EVERY", 1)
    monkeypatch.setattr(HandledRanges, "merge", fail)
    assert await Inbox(sessions.begin).handle(Handling([message_of(0)], "ch"), handle) == "handled"
    assert "what was handled is not merged: no merge" in caplog.text
