"""Publishes that the calling thread sends and receives by itself: threads, kills, and the end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal

import nsqext
from nsqext import sync
from nsqext.broker import Cluster
from nsqext.errors import (
    BatchFailed,
    ConnectionLost,
    DeliveryUnknown,
    InvalidState,
    NotSent,
)
from nsqext.middleware import Middleware, Publishing
from nsqext.sync import direct as module
from nsqext.sync import producer as producer_module
from nsqext.sync.direct import DirectPublisher
from nsqext.sync.loop import OpenLoop
from nsqext.transport.connection import Connection
from nsqext.transport.handshake import open_connection
from nsqext.transport.thread_connections import ThreadConnections
from tests.support.blocking_client import eventually

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledNode

_BIG = 20_000_000


class Threads:
    """What blocking producers make to publish in the calling threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.publishers: list[DirectPublisher] = []
        self.pools: list[ThreadConnections] = []
        self.connections: list[Connection] = []
        self.asked = 0  # connections that were to be opened
        threads = self

        class Publisher(DirectPublisher):
            def __init__(self, *parts: Any) -> None:
                super().__init__(*parts)
                threads.publishers.append(self)

        class Pool(ThreadConnections):
            def __init__(self) -> None:
                super().__init__()
                threads.pools.append(self)

            def add(self, connection: Connection) -> None:
                super().add(connection)
                threads.connections.append(connection)

        monkeypatch.setattr(producer_module, "DirectPublisher", Publisher)
        monkeypatch.setattr(module, "ThreadConnections", Pool)
        self.pool: Callable[[], ThreadConnections] = Pool
        monkeypatch.setattr(module, "open_connection", self.opening)

    async def opening(self, *arguments: Any) -> Any:
        """Open a connection, and count it."""
        self.asked += 1
        return await open_connection(*arguments)

    @property
    def direct(self) -> DirectPublisher:
        """The part of the latest producer."""
        return self.publishers[-1]

    def warm(self, producer: sync.Producer, topic: str) -> int:
        """Publish until the calling thread publishes to both partitions by itself; return the number of messages."""
        count = 0
        deadline = time.monotonic() + 25
        for partition in (0, 1):
            before = self.direct.stored
            while self.direct.stored == before:
                producer.publish(topic, b"warm", partition=partition)
                count += 1
                assert time.monotonic() < deadline
        return count

    def nodes(self, topic: str) -> list[PooledNode]:
        """Return the nodes of both partitions."""
        message = nsqext.OutgoingMessage(b"x")
        found = [self.direct.port.ready(topic, message, partition) for partition in (0, 1)]
        return [publish.node for publish in found if publish is not None]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """What the producers of a test make to publish in the calling threads."""
    return Threads(monkeypatch)


def bodies_of(cluster: Cluster, topic: str, wanted: set[bytes]) -> list[bytes]:
    """Consume until all bodies were received, for 25 seconds at most; return what was received."""
    bodies: list[bytes] = []
    with sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        deadline = time.monotonic() + 25
        while not wanted <= set(bodies) and time.monotonic() < deadline:
            batch = consumer.fetch(200, 0.2)
            bodies += [message.body for message in batch]
            batch.finish()
    return bodies


def test_a_lone_thread_publishes_by_itself_and_is_counted(cluster: Cluster, topic: str, threads: Threads) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(topic, b"first")
        producer.publish(topic, b"second", partition=0)
        producer.ping()
        assert threads.asked == 0  # many programs publish once
        before = 2 + threads.warm(producer, topic)
        receipts = [producer.publish(topic, b"%d" % number, trace_id=number) for number in range(50)]
        assert [receipt.trace_id for receipt in receipts] == list(range(50))
        assert {receipt.partition for receipt in receipts} == {0, 1}
        large = producer.publish(topic, b"x" * 900_000, headers={"name": "value"}, tag="blue")
        assert large.partition in {0, 1}
        assert producer.statistics().stored == before + 51
        assert producer.statistics().bytes_sent > 900_000
        assert producer.statistics().connections > len(threads.pools[-1]) > 0, "those of the event loop, too"
        with pytest.raises(nsqext.errors.InvalidInput, match="delay"):
            producer.publish(topic, b"x", delay=-1.0)
        with pytest.raises(nsqext.errors.InvalidInput, match="identity"):
            producer.publish(topic, b"x", delay=1.0, via="relay", identity="")
        with pytest.raises(nsqext.errors.InvalidInput, match="identity"):
            producer.publish(topic, b"x", identity="a")
        with pytest.raises(nsqext.errors.InvalidInput, match="via"):
            producer.publish(topic, b"x", via="relay")
        assert threads.direct.stored > 40
    assert producer.statistics().stored == before + 51, "also after the close"
    bodies = {b"%d" % number for number in range(50)} | {b"x" * 900_000}
    assert bodies <= set(bodies_of(cluster, topic, bodies))


def test_a_lone_thread_publishes_batches_by_itself(cluster: Cluster, topic: str, threads: Threads) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        before = threads.warm(producer, topic)
        already = threads.direct.stored
        receipts = producer.publish_many(topic, (b"a%d" % number for number in range(20)))
        assert len({receipt.partition for receipt in receipts}) == 1
        assert [receipt.partition for receipt in producer.publish_many(topic, [b"b", b"c"], partition=1)] == [1, 1]
        assert threads.direct.stored == already + 22
        traced = producer.publish_many(topic, [b"d", b"e"], trace_ids=[5, 6])
        assert [receipt.trace_id for receipt in traced] == [5, 6]
        assert threads.direct.stored == already + 24
        assert producer.statistics().stored == before + 24
    bodies = {b"a%d" % number for number in range(20)} | {b"b", b"c", b"d", b"e"}
    assert bodies <= set(bodies_of(cluster, topic, bodies))


def test_batches_that_must_be_checked_or_divided_are_left_to_the_event_loop(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd, max_batch_count=3) as producer:
        threads.warm(producer, topic)
        already = threads.direct.stored
        assert len(producer.publish_many(topic, [b"x"] * 4)) == 4
        assert producer.publish_many(topic, []) == []
        assert len({receipt.partition for receipt in producer.publish_many(topic, [b"x"] * 3, key="k")}) == 1
        producer.publish_many(topic, [b"x", nsqext.OutgoingMessage(b"y", headers={"name": "value"})])
        producer.publish_many(topic, [b"x"], headers={"name": ["value"]})
        with pytest.raises(nsqext.errors.InvalidInput, match="1 trace ids were given for 2 messages"):
            producer.publish_many(topic, [b"x", b"y"], trace_ids=[1])
        with pytest.raises(nsqext.errors.InvalidInput, match="3 trace ids were given for 2 messages"):
            producer.publish_many(topic, [b"x", b"y"], trace_ids=[1, 2, True])  # as many of type int as messages
        with pytest.raises(nsqext.errors.InvalidBody) as refused:
            producer.publish_many(topic, [b"x", b""])
        assert refused.value.index == 1
        with pytest.raises(nsqext.errors.InvalidPartition):
            producer.publish_many(topic, [b"x"], partition=7)
        for one in (b"x", "x"):
            with pytest.raises(nsqext.errors.InvalidBody, match="needs a list of bodies, not one body"):
                producer.publish_many(topic, one)  # type: ignore[arg-type]
        assert threads.direct.stored == already


def test_tags_of_batches_are_left_to_the_event_loop(cluster: Cluster, topic: str, threads: Threads) -> None:
    with sync.Producer(cluster.lookupd, key_tags=16) as producer:
        threads.warm(producer, topic)
        already = threads.direct.stored
        producer.publish_many(topic, [b"x", b"y"])
        assert threads.direct.stored == already


def test_a_thread_waits_for_a_response_until_the_timeout_and_ends_a_connection_that_it_cannot_read(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd, timeout=7.0) as producer:
        threads.warm(producer, topic)
        port, connection = threads.direct.port, threads.connections[0]
        publish = port.ready(topic, nsqext.OutgoingMessage(b"x"), 0)
        assert publish is not None
        posted: list[float] = []
        stub: Any = SimpleNamespace(post=lambda command, deadline, breaks: posted.append(deadline))
        port.post(publish, stub)
        assert posted == [publish.request.started + 7.0]
        odd: Any = SimpleNamespace(error=None, data=b"odd")
        with pytest.raises(DeliveryUnknown, match="received b'odd' in response to a publish"):
            port.receipts(publish, connection, odd)
        eventually(lambda: producer.publish(topic, b"x", partition=0) and not connection.usable)


def test_a_program_that_publishes_twice_opens_no_connection_for_threads(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        for _ in range(2):
            producer.publish(topic, b"x", partition=0)
        producer.ping()  # behind what was to be opened in the event loop
        assert threads.asked == 0


def test_a_message_whose_header_is_passed_on_is_left_to_the_event_loop(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd) as producer, sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        for _ in range(threads.warm(producer, topic)):
            next(consumer).finish()
        producer.publish(topic, b"x", header=b'{"a":1e0}')
        message = next(consumer)
        message.finish()
    assert message._original.header == b'{"a":1e0}'


def test_a_batch_that_was_not_sent_because_its_producer_closes_has_no_outcomes(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise InvalidState("the producer was closed")

    with sync.Producer(cluster.lookupd) as producer:
        threads.warm(producer, topic)
        monkeypatch.setattr(threads.direct.port, "ready_batch", closed)
        with pytest.raises(InvalidState, match=r"^the producer was closed$"):
            producer.publish_many(topic, [b"x", b"y"])


def test_connections_of_threads_are_checked_and_have_time_for_their_last_publishes(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checks, a publish to a node that does not respond would not end."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await anyio.sleep(seconds)

    monkeypatch.setattr(module, "anyio", SimpleNamespace(sleep=sleep))
    with sync.Producer(cluster.lookupd, heartbeat_interval=1.0, close_timeout=7.0) as producer:
        threads.warm(producer, topic)
        (pool,) = threads.pools
        ticks, waits, close = list[int](), list[float](), pool.close
        monkeypatch.setattr(pool, "tick", lambda: ticks.append(1))

        def close_noted(timeout: float) -> bool:
            waits.append(timeout)
            return close(timeout)

        monkeypatch.setattr(pool, "close", close_noted)
        eventually(lambda: ticks)
    assert waits == [7.0]
    assert {*pauses} == {0.125}, "several times in a heartbeat interval"


def test_the_loss_of_a_batch_of_a_thread_is_reported_for_each_message(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd, on_unknown="raise") as producer:
        threads.warm(producer, topic)
        connection = threads.connections[0]
        post = connection.post

        def posted(*arguments: Any, **options: Any) -> Any:
            reply = post(*arguments, **options)
            # the response would sometimes be read before the end of the connection
            connection.poll = lambda: connection.fail(ConnectionLost("lost"))  # type: ignore[method-assign]
            return reply

        connection.post = posted  # type: ignore[method-assign]
        with pytest.raises(BatchFailed) as failed:
            for _ in range(20):  # the partitions take turns, among them those without a connection of threads
                producer.publish_many(topic, [b"x", b"y"])
        assert producer.statistics().unknown == 2
    assert [type(outcome) for outcome in failed.value.outcomes] == [DeliveryUnknown, DeliveryUnknown]


def test_a_connection_is_opened_while_no_lock_is_held(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread waits for the event loop then, which waits for the lock to check the connections."""
    start = BlockingPortal.start_task_soon
    checked = 0

    def start_task_soon(self: BlockingPortal, *arguments: Any, **options: Any) -> Any:
        nonlocal checked
        if threads.pools:
            loop.submit(threads.pools[0].tick).result(10)
            checked += 1
        return start(self, *arguments, **options)

    with sync.Producer(cluster.lookupd) as producer, ThreadPoolExecutor(1) as loop:
        threads.warm(producer, topic)
        asked = threads.asked
        monkeypatch.setattr(BlockingPortal, "start_task_soon", start_task_soon)
        for connection in threads.connections:
            connection.shut_down()
        eventually(lambda: producer.publish(topic, b"x") and threads.asked > asked)
        monkeypatch.undo()
    assert checked


def test_keys_and_refusals_are_those_of_the_asynchronous_producer(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        threads.warm(producer, topic)
        partitions = {producer.publish(topic, b"x", key="k").partition for _ in range(4)}
        assert len(partitions) == 1
        with pytest.raises(nsqext.errors.InvalidHeader):
            producer.publish(topic, b"x", headers={"##reserved": "x"})
        with pytest.raises(nsqext.errors.InvalidBody):
            producer.publish(topic, b"")
        with pytest.raises(nsqext.errors.InvalidPartition):
            producer.publish(topic, b"x", partition=7)


def test_every_publish_runs_through_the_middleware(cluster: Cluster, topic: str) -> None:
    seen: list[bytes] = []

    class Noting(Middleware):
        async def publish(self, publishing: Publishing, send_next: Any) -> Any:
            seen.append(publishing.messages[0].body)
            return await send_next(publishing)

    with sync.Producer(cluster.lookupd, middleware=[Noting()]) as producer:
        for number in range(20):
            producer.publish(topic, b"%d" % number)
    assert seen == [b"%d" % number for number in range(20)]


def test_threads_publish_through_kills_of_leaders_without_loss(threads: Threads) -> None:
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=3, replicas=3, extend=True, channels=["ch"])
        stored: list[bytes] = []
        unknown: list[bytes] = []
        ended = threading.Event()

        def publish(name: int) -> None:
            number = 0
            while not ended.is_set():
                number += 1
                body = b"%d-%d" % (name, number)
                try:
                    if name % 2:
                        receipt = producer.publish("orders", body, trace_id=number)
                    else:
                        receipt = producer.publish_many("orders", [body, b"other"], trace_ids=[number, 0])[0]
                except (DeliveryUnknown, BatchFailed):
                    unknown.append(body)
                else:
                    assert receipt.trace_id == number
                    stored.append(body)

        with sync.Producer(cluster.lookupd) as producer, ThreadPoolExecutor(6) as pool:
            threads.warm(producer, "orders")
            ends = [pool.submit(publish, name) for name in range(6)]
            try:
                for _ in range(3):
                    count = len(stored)
                    leader = cluster.leader("orders", 0)
                    cluster.kill(leader)
                    eventually(lambda count=count: len(stored) > count + 200)  # type: ignore[misc]
                    cluster.restart(leader)
            finally:
                ended.set()
            for end in ends:
                end.result(30)
        assert set(stored) <= set(bodies_of(cluster, "orders", set(stored)))


@pytest.mark.usefixtures("own_loop")
def test_a_lost_connection_while_the_producer_closes_leaves_the_outcome_unknown(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        threads.warm(producer, topic)
        direct = threads.direct
        publish = direct.port.ready(topic, nsqext.OutgoingMessage(b"x"), None)
        assert publish is not None
    with pytest.raises(DeliveryUnknown, match="may have been stored: lost"):
        direct.publish_again(publish, ConnectionLost("lost"))
    with pytest.raises(InvalidState):
        direct.publish_again(publish, NotSent("not sent"))


@pytest.mark.usefixtures("own_loop")
def test_a_producer_that_another_thread_closes_opens_no_connection(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        port = threads.direct.port
        ready = port.ready

        def closing(*arguments: Any) -> Any:
            publish = ready(*arguments)
            if publish is not None:
                for _ in range(2):  # as many as a connection is opened after
                    assert threads.direct.connection(publish) is None
                producer.close()
            return publish

        monkeypatch.setattr(port, "ready", closing)
        with pytest.raises(InvalidState, match="not open"):
            eventually(lambda: not producer.publish(topic, b"x", partition=0))
    assert threads.asked == 0


@pytest.mark.parametrize(("member", "value"), [("wanted", False), ("connection", None)])
def test_connections_to_nodes_that_no_topic_needs_or_the_event_loop_has_left_are_closed(
    cluster: Cluster, topic: str, threads: Threads, member: str, value: object
) -> None:
    with sync.Producer(cluster.lookupd, heartbeat_interval=1.0) as producer:
        threads.warm(producer, topic)
        assert {connection.closed for connection in threads.connections} == {False}
        before = [(node, getattr(node, member)) for node in threads.nodes(topic)]
        for node, _ in before:
            setattr(node, member, value)
        eventually(lambda: all(connection.closed for connection in threads.connections))
        for node, own in before:
            setattr(node, member, own)


@pytest.mark.usefixtures("own_loop")
def test_an_interrupted_close_closes(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = sync.Producer(cluster.lookupd).start()
    threads.warm(producer, topic)
    (connections,) = threads.pools

    ends: list[object] = []

    def interrupted(timeout: float) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(threads.direct.port, "abort", lambda: ends.append("no further attempt"))
        monkeypatch.setattr(connections, "shut_down", lambda: ends.append(len(connections)))
        raise KeyboardInterrupt

    monkeypatch.setattr(connections, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    assert ends == ["no further attempt", 2], "their threads learn it at once"
    assert not len(connections)
    with pytest.raises(InvalidState, match="not open"):
        producer.ping()


def test_a_connection_that_opens_while_the_producer_closes_is_closed(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_late() -> ThreadConnections:
        threads.direct.close()
        return threads.pool()

    monkeypatch.setattr(module, "ThreadConnections", made_late)
    with sync.Producer(cluster.lookupd) as producer:
        eventually(lambda: producer.publish(topic, b"x") and threads.connections)
        eventually(lambda: threads.connections[0].closed)
        eventually(lambda: not len(threads.pools[0]))


@pytest.mark.parametrize("refused", [False, True])
def test_a_connection_that_the_server_ends_or_refuses_is_not_used(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    opened: list[Connection] = []

    async def ended(*arguments: Any) -> Any:
        connection, negotiated = await threads.opening(*arguments)
        if refused:
            connection.close()
            raise ConnectionLost("too many connections")
        connection.protocol.error = ConnectionLost("the server has ended")
        opened.append(connection)
        return connection, negotiated

    monkeypatch.setattr(module, "open_connection", ended)
    with sync.Producer(cluster.lookupd) as producer:
        eventually(lambda: producer.publish(topic, b"x", partition=0) and threads.asked)
        for _ in range(80):
            producer.publish(topic, b"x", partition=0)
        assert threads.asked == 1, "not soon again"
        eventually(lambda: producer.publish(topic, b"x", partition=0) and threads.asked > 1)
        assert (threads.connections, producer.statistics().failed) == ([], 0)
    assert {connection.closed for connection in opened} <= {True}


@pytest.mark.usefixtures("own_loop")
def test_the_event_loop_publishes_what_threads_cannot(
    cluster: Cluster, topic: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        partitions = [producer.publish(topic, b"x").partition for _ in range(5)]
        assert partitions[:2] + partitions[:2] + partitions[:1] == partitions, "partitions take turns"
        threads.warm(producer, topic)
        with OpenLoop() as portal, pytest.raises(InvalidState, match="its event loop's thread"):
            portal.call(producer.publish, topic, b"x")
        publish = threads.direct.port.ready(topic, nsqext.OutgoingMessage(b"x"), 0)
        assert publish is not None
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "usable", False)
            assert threads.direct.connection(publish) is None
        with monkeypatch.context() as patch:
            patch.setattr(ThreadConnections, "in_flight", 3)
            assert producer.statistics().pending == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_neither_uses_nor_ends_the_connections_of_its_parent(
    cluster: Cluster, topic: str, threads: Threads
) -> None:
    with sync.Producer(cluster.lookupd) as producer, producer.batcher(topic) as batcher:
        threads.warm(producer, topic)
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                try:
                    producer.publish(topic, b"child")
                except InvalidState as error:
                    assert error.hint == "create a new one in the child"
                    batcher.__exit__(None, None, None)
                    before = len([*Path("/dev/fd").iterdir()])
                    producer.close()
                    code = 0 if len([*Path("/dev/fd").iterdir()]) < before else 2
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        before = threads.direct.stored
        producer.publish(topic, b"parent")
        assert threads.direct.stored == before + 1
