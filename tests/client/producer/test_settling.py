"""Unknown outcomes are settled by the log: stored, not stored, or still unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync

from nsqext import Admin, DeliveryUnknown, OutgoingMessage, Producer
from nsqext.broker import Cluster
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.request import SentTo
from nsqext.client.producer.settling import Settler
from nsqext.errors import (
    ConnectionLost,
    InvalidSetting,
    NsqError,
    OperationNotSupported,
    PublishFailed,
    RequestTimeout,
)
from tests.support.fake_nsqd import until
from tests.support.machine_pauses import repeated_if_paused
from tests.support.producers import bounded

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledConnection
    from nsqext.client.producer.request import PublishRequest
    from nsqext.lookup.metadata import MetadataCache

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(nodes=1) as running:
        running.create_topic("plain", partitions=1, replicas=1, channels=["ch"])
        running.create_topic("extended", partitions=1, replicas=1, extend=True, channels=["ch"])
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    shared.faults.heal()


def _settling(cluster: Cluster, **settings: Any) -> Producer:
    return Producer(cluster.lookupd, **{"on_unknown": "settle", "timeout": 10.0, **settings})


async def _stored(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    """Return the newest bodies of a topic, oldest first."""
    async with Admin(cluster.lookupd) as admin:
        return [message.body.encode() for message in reversed(await admin.peek(topic, count=count))]


@pytest.mark.parametrize("topic", ["plain", "extended"])
@pytest.mark.parametrize("direction", ["in", "out"])
async def test_a_message_is_stored_once_whichever_half_of_the_exchange_is_lost(
    cluster: Cluster, topic: str, direction: Any
) -> None:
    async with bounded(), _settling(cluster) as producer:
        await producer.publish(topic, b"before")
        await run_sync(lambda: cluster.faults.cut("n1", direction))
        receipt = await producer.publish(topic, b"lost")
        after = await producer.publish(topic, b"after")
        assert producer.statistics().unknown == 0
    assert await _stored(cluster, topic, 3) == [b"before", b"lost", b"after"]
    assert receipt.offset is not None
    assert receipt.size is not None
    assert receipt.offset + receipt.size == after.offset


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_a_batch_is_stored_once(cluster: Cluster, direction: Any) -> None:
    tagged, traced = OutgoingMessage(b"tagged", headers={"a": "b"}), OutgoingMessage(b"traced", trace_id=77)
    async with bounded(), _settling(cluster) as producer:
        await producer.publish("extended", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", direction))
        receipts = await producer.publish_many("extended", [b"plain", tagged, traced])
        assert receipts[2].trace_id == 77
    assert await _stored(cluster, "extended", 4) == [b"before", b"plain", b"tagged", b"traced"]


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_waiting_publishes_of_a_key_are_settled_together(cluster: Cluster, direction: Any) -> None:
    bodies = [b"%d" % number for number in range(30)]

    async def publish(producer: Producer, body: bytes) -> None:
        await producer.publish("plain", body, key="k")

    async with bounded(), _settling(cluster) as producer:
        await producer.publish("plain", b"before", key="k")
        await run_sync(lambda: cluster.faults.cut("n1", direction, connections=2))
        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(publish, producer, body)
                await checkpoint()  # trio starts tasks in random order
    assert await _stored(cluster, "plain", 31) == [b"before", *bodies]


async def test_many_publishes_at_a_time_share_searches(cluster: Cluster) -> None:
    bodies = {b"%d" % number for number in range(200)}
    async with bounded(), _settling(cluster) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", "out"))
        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(producer.publish, "plain", body)
        assert producer.statistics().stored == 201
    found = await _stored(cluster, "plain", 201)
    assert found[0] == b"before"
    assert sorted(found[1:]) == sorted(bodies)


@pytest.mark.parametrize("others", [0, 3, 9])
async def test_the_log_of_a_topic_that_was_created_again_is_searched_from_its_beginning(
    cluster: Cluster, others: int
) -> None:
    def create() -> None:
        cluster.create_topic("again", partitions=1, replicas=1, channels=["ch"])

    await run_sync(create)
    async with bounded(), _settling(cluster) as producer, Producer(cluster.lookupd) as other:
        for number in range(4):
            await producer.publish("again", b"old %d" % number)
        await run_sync(lambda: cluster.delete_topic("again"))
        await run_sync(create)
        if others:
            await other.publish_many("again", [b"new %d" % number for number in range(others)])
        await run_sync(lambda: cluster.faults.cut("n1", "out"))
        await producer.publish("again", b"lost")
    stored = [b"new %d" % number for number in range(others)]
    assert await _stored(cluster, "again", others + 2) == [*stored, b"lost"]
    await run_sync(lambda: cluster.delete_topic("again"))


async def test_a_publish_that_may_have_been_in_the_log_of_a_deleted_topic_stays_unknown(cluster: Cluster) -> None:
    """Simulation, seed 61707: it was delivered before the topic was deleted, and sent again to the new one."""

    def create() -> None:
        cluster.create_topic("replaced", partitions=1, replicas=1, channels=["ch"])

    await run_sync(create)
    async with bounded(), _settling(cluster) as producer:
        await producer.publish("replaced", b"old")
        await run_sync(lambda: cluster.delete_topic("replaced"))
        await run_sync(create)
        await run_sync(lambda: cluster.faults.cut("n1", "in", connections=1))
        with pytest.raises(DeliveryUnknown, match="the log was replaced"):
            await producer.publish("replaced", b"lost")
    await run_sync(lambda: cluster.delete_topic("replaced"))


async def test_the_first_publish_of_a_producer_is_looked_for_from_the_beginning(cluster: Cluster) -> None:
    async with bounded(), _settling(cluster) as producer:
        await producer.ping()
        await run_sync(lambda: cluster.faults.cut("n1", "out"))
        receipt = await producer.publish("plain", b"first")
        assert receipt.offset is not None
    assert await _stored(cluster, "plain", 1) == [b"first"]


@repeated_if_paused(0.1)
async def test_without_the_leader_it_stays_unknown(cluster: Cluster) -> None:
    await run_sync(cluster.faults.heal)
    async with bounded(), _settling(cluster, settle_timeout=0.8) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", "in"))
        await run_sync(lambda: cluster.faults.refuse("n1"))
        with pytest.raises(DeliveryUnknown, match=r"still unknown after 0.8 s; last error of the search: "):
            await producer.publish("plain", b"x", partition=0)
        assert producer.statistics().unknown == 1


@repeated_if_paused(0.1)
async def test_a_publish_that_the_server_may_still_execute_stays_unknown(cluster: Cluster) -> None:
    """Its connection is open: the command may be executed after the log was read."""
    await run_sync(cluster.faults.heal)
    async with bounded(), _settling(cluster, timeout=0.5, settle_timeout=1.5) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.delay("n1", "in", 4.0))
        with pytest.raises(DeliveryUnknown):
            await producer.publish("plain", b"late")
        await run_sync(cluster.faults.heal)


@repeated_if_paused(0.1)
async def test_a_message_that_is_not_stored_in_time_was_certainly_not_stored(cluster: Cluster) -> None:
    await run_sync(cluster.faults.heal)
    async with bounded(), _settling(cluster, timeout=0.3) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", "in", connections=1))
        with pytest.raises(PublishFailed, match="its log does not contain it"):
            await producer.publish("plain", b"never")
    assert await _stored(cluster, "plain", 1) == [b"before"]


async def test_a_closed_producer_reports_what_it_does_not_know(cluster: Cluster) -> None:
    outcomes: list[BaseException] = []

    async def publish(producer: Producer) -> None:
        try:
            await producer.publish("plain", b"x")
        except DeliveryUnknown as error:
            outcomes.append(error)

    async with bounded(), anyio.create_task_group() as tasks, _settling(cluster, close_timeout=0.2) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", "in"))
        await run_sync(lambda: cluster.faults.refuse("n1"))
        tasks.start_soon(publish, producer)
        await until(lambda: not producer._pool.connections)
    assert len(outcomes) == 1


async def test_it_is_refused_where_no_log_can_be_searched() -> None:
    with pytest.raises(InvalidSetting, match="needs lookupd"):
        Producer(nsqd="127.0.0.1:4150", on_unknown="settle")
    with pytest.raises(InvalidSetting, match="settle_timeout has no effect"):
        Producer("127.0.0.1:4161", settle_timeout=3)
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("t")
        async with bounded(), _settling(original) as producer:
            with pytest.raises(OperationNotSupported, match="redesigned"):
                await producer.publish("t", b"x")
            with pytest.raises(OperationNotSupported, match="redesigned"):
                await producer.publish_many("t", [b"x"])
            with pytest.raises(OperationNotSupported, match="redesigned"):
                await producer.publish("t", b"x", delay=1)


class _Log:
    """A log that is searched: each search finds the next of some rows of trace ids; the last row is found again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *rows: set[int], node: str = "n:1") -> None:
        self.rows, self.node, self.wanted = list(rows), node, list[list[int]]()
        log = self

        class Search:
            error = None

            def __init__(self, *_: object) -> None:
                self.node, self.found = log.node, dict[int, object]()

            async def run(self, ids: list[int]) -> None:
                log.wanted.append(ids)
                for _ in range(3):
                    await checkpoint()
                row = log.rows.pop(0) if len(log.rows) > 1 else log.rows[0]
                self.found = {trace: f"receipt {trace}" for trace in ids if trace in row}

        monkeypatch.setattr("nsqext.client.producer.settling.LogSearch", Search)
        monkeypatch.setattr("nsqext.client.producer.settling._PAUSE", 0.001)

    async def settle(self, *ids: int, cause: Exception | None) -> object:
        """Settle a publish with these trace ids."""
        (outcome,) = await self.settle_all([ids], cause)
        return outcome

    async def settle_all(
        self, publishes: list[tuple[int, ...]], cause: Exception | None, count: int = 0
    ) -> list[object]:
        """Settle publishes at a time; return their outcomes."""
        outcomes: list[object] = []
        settler = Settler(ProducerOptions(on_unknown="settle", settle_timeout=0.2), cast("MetadataCache", None))

        async def settle(ids: tuple[int, ...]) -> None:
            request = _Request(ids)
            unknown = DeliveryUnknown("no response")
            unknown.__cause__ = cause
            try:
                outcomes.append(await settler.settle(cast("PublishRequest", request), unknown))
            except DeliveryUnknown as error:
                outcomes.append(str(error))

        async with anyio.create_task_group() as tasks:
            for ids in publishes:
                tasks.start_soon(settle, ids)
        assert not any(searches.waiting for searches in settler._searches.values())
        return outcomes


class _Request:
    def __init__(self, ids: tuple[int, ...]) -> None:
        self.topic, self.trace_ids, self.count = "t", ids, len(ids)
        self.sent_to = SentTo(0, "n:1", cast("PooledConnection", self), None)
        self.usable = True

    def fail(self, _: NsqError) -> None:
        self.usable = False


LOST, LATE = ConnectionLost("reset"), RequestTimeout("no response")


async def test_what_was_found_is_stored_and_what_nobody_can_store_any_more_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await _Log(monkeypatch, {7, 8}).settle(7, 8, cause=LATE) == ["receipt 7", "receipt 8"]
    assert await _Log(monkeypatch, set()).settle(7, cause=LOST) is None


async def test_when_the_leader_has_changed_the_log_is_searched_once_the_connection_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What seed 800179 showed: the former leader led again, and received what the kernel still had to transmit."""
    log = _Log(monkeypatch, set(), node="other:1")
    assert await log.settle(7, cause=LATE) is None
    assert len(log.wanted) == 2
    log = _Log(monkeypatch, set(), {7}, node="other:1")
    assert await log.settle(7, cause=LATE) == ["receipt 7"]


@pytest.mark.parametrize("cause", [LATE, None])
async def test_while_the_server_may_execute_it_the_log_is_searched_again(
    monkeypatch: pytest.MonkeyPatch, cause: Exception | None
) -> None:
    log = _Log(monkeypatch, set(), set(), {7})
    assert await log.settle(7, cause=cause) == ["receipt 7"]
    assert len(log.wanted) == 3


async def test_a_batch_of_which_the_log_has_only_a_part_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await _Log(monkeypatch, {7}).settle(7, 8, cause=LOST)
    assert "still unknown after 0.2 s" in str(found)


async def test_messages_without_trace_ids_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _Log(monkeypatch, {7})
    assert "still unknown" not in str(await log.settle(7, 0, cause=LOST))
    assert log.wanted == []


async def test_publishes_that_wait_for_a_search_share_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _Log(monkeypatch, {1, 2, 3, 4, 5})
    found = await log.settle_all([(number,) for number in range(1, 6)], LATE)
    assert sorted(map(str, found)) == [f"['receipt {number}']" for number in range(1, 6)]
    assert len(log.wanted) <= 2
