"""Publishes that the calling thread sends and receives by itself: threads, kills, interrupts, and the end."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

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
    RequestTimeout,
)
from nsqext.middleware import Middleware, Publishing
from nsqext.protocol.client.commands import LARGE, with_body
from nsqext.sync import direct as module
from nsqext.sync import producer as producer_module
from nsqext.sync.direct import DirectPublisher
from nsqext.sync.loop import OpenLoop
from nsqext.transport import thread_connections
from nsqext.transport.connection import Connection
from nsqext.transport.handshake import open_connection
from nsqext.transport.thread_connections import ThreadConnections, ThreadRequest
from nsqext.types import Address
from tests.support.connections import pub
from tests.support.fake_nsqd import ok

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledNode
    from nsqext.protocol.client.client_protocol import Reply

_BIG = 20_000_000


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + 25
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


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
        until(lambda: ticks)
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
        until(lambda: producer.publish(topic, b"x") and threads.asked > asked)
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
                    until(lambda count=count: len(stored) > count + 200)  # type: ignore[misc]
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
            until(lambda: not producer.publish(topic, b"x", partition=0))
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
        until(lambda: all(connection.closed for connection in threads.connections))
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
        until(lambda: producer.publish(topic, b"x") and threads.connections)
        until(lambda: threads.connections[0].closed)
        until(lambda: not len(threads.pools[0]))


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
        until(lambda: producer.publish(topic, b"x", partition=0) and threads.asked)
        for _ in range(80):
            producer.publish(topic, b"x", partition=0)
        assert threads.asked == 1, "not soon again"
        until(lambda: producer.publish(topic, b"x", partition=0) and threads.asked > 1)
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


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Make SIGALRM raise KeyboardInterrupt."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        # without a trace function, as of the mutation campaign, nothing is interrupted between a lock and its `with`
        if frame is not None and frame.f_code.co_filename.endswith("/mutation/reach.py"):
            signal.setitimer(signal.ITIMER_REAL, 0.00005)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


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


# The connection


class Command(ThreadRequest):
    """A command that a thread sends by itself."""

    def __init__(self, connection: Connection, data: bytes, deadline: float) -> None:
        self._connection = connection
        self._arguments = (data, deadline)

    def post(self) -> tuple[Connection, Reply]:
        return self._connection, self._connection.post(*self._arguments)

    def result(self) -> bytes:
        """Return the data of the response; raises its error."""
        reply = self.answer()
        assert reply is not None
        if reply.error is not None:
            raise reply.error
        return reply.data or b""


class Shared:
    """A connection that threads share."""

    def __init__(self, connection: Connection, socket: Socket) -> None:
        self.connection, self.socket = connection, socket
        self.connections = ThreadConnections()
        self.connections.add(connection)

    def request(self, data: bytes, deadline: float) -> bytes:
        """Send a command, and return the data of its response."""
        command = Command(self.connection, data, deadline)
        self.connections.run(command)
        return command.result()


class Sending(Command):
    """Holds up the requests of other threads, as a thread does while it sends, until `leave` is set."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, b"", 0)
        self.entered, self.leave = threading.Event(), threading.Event()

    def post(self) -> None:  # type: ignore[override]
        self.entered.set()
        assert self.leave.wait(25)


@contextmanager
def sending(shared: Shared, executor: ThreadPoolExecutor) -> Iterator[None]:
    """Let a thread send within a block, so that further requests wait in the queue."""
    sender = Sending(shared.connection)
    done = executor.submit(shared.connections.run, sender)
    assert sender.entered.wait(25)
    try:
        yield
    finally:
        sender.leave.set()
        done.result(25)


class Socket(socket.socket):
    """A socket; an interrupt may end a call that has sent."""

    interrupts = False

    def sendmsg(self, parts: Any, *rest: Any) -> int:
        sent = super().sendmsg(parts, *rest)
        if self.interrupts:
            raise KeyboardInterrupt
        return sent


@contextmanager
def blocking(request_timeout: float = 10.0) -> Iterator[tuple[Shared, socket.socket]]:
    """A connection that threads use, and the socket of its peer."""
    ours, right = socket.socketpair()
    left = Socket(fileno=ours.detach())
    left.setblocking(False)
    connection = Connection(left, Address("127.0.0.1", 1), max_frame_size=1000, request_timeout=request_timeout)
    shared = Shared(connection, left)
    connection.protocol.read_ahead()
    with right:
        yield shared, right
        connection.close()
        assert shared.connections.close(25)


def test_a_large_request_is_sent_while_the_server_reads() -> None:
    received: list[int] = []

    def serve() -> None:
        while sum(received) < _BIG:
            received.append(len(right.recv(1 << 20)))
        right.sendall(ok())

    with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
        served = threads.submit(serve)
        assert connection.request(pub(b"b" * (_BIG - 10)), float("inf")) == b"OK"
        served.result(30)

        def serve_again() -> None:
            assert right.recv(100) == pub(b"small")
            right.sendall(ok(b"2"))

        served = threads.submit(serve_again)
        assert connection.request(pub(b"small"), float("inf")) == b"2"
        served.result(30)


def test_a_request_over_a_socket_with_the_number_of_a_closed_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAP", "_TICK"):
        monkeypatch.setattr(thread_connections, name, 60.0)
    with blocking() as (shared, right), ThreadPoolExecutor(1) as threads:
        number = shared.connection.fileno()
        lost = threads.submit(shared.request, pub(b"x" * _BIG), float("inf"))
        until(lambda: shared.connection.sending)
        right.close()
        with pytest.raises(ConnectionLost):
            lost.result(25)
        ours, peer = socket.socketpair()
        if peer.fileno() == number:
            ours, peer = peer, ours
        given = ours.detach()
        os.dup2(given, number)
        if given != number:
            os.close(given)
        left = Socket(fileno=number)
        left.setblocking(False)
        connection = Connection(left, Address("127.0.0.1", 2), max_frame_size=1000)
        connection.protocol.read_ahead()
        shared.connections.add(connection)
        data = pub(b"y" * _BIG)
        command = Command(connection, data, float("inf"))
        sent = threads.submit(shared.connections.run, command)
        with peer:
            peer.settimeout(25)
            unread = len(data)
            while unread:
                unread -= len(peer.recv(1 << 20))
            peer.sendall(ok(b"y"))
            sent.result(25)
        assert command.result() == b"y"


def test_a_late_response_belongs_to_its_own_request() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
        with pytest.raises(RequestTimeout):
            connection.request(pub(b"first"), time.monotonic() - 1)
        assert right.recv(100) == pub(b"first")
        second = threads.submit(connection.request, pub(b"second"), float("inf"))
        assert right.recv(100) == pub(b"second")
        right.sendall(ok(b"late") + ok(b"own"))
        assert second.result(25) == b"own"


def test_a_silent_server_loses_the_connection() -> None:
    with blocking(request_timeout=0.1) as (connection, _):
        with pytest.raises(RequestTimeout):
            connection.request(pub(b"x"), float("inf"))
        assert not connection.connection.usable
        with pytest.raises(NotSent):
            connection.request(pub(b"x"), float("inf"))


def test_a_connection_that_ends_while_no_thread_publishes_is_forgotten() -> None:
    with blocking(request_timeout=0.1) as (connection, right):
        right.close()

        def ticked_off() -> bool:
            connection.connections.tick()
            return not len(connection.connections)

        until(ticked_off)
        assert not connection.connections._poll.poll(0), "threads would poll a closed socket"


def test_a_connection_that_is_shut_down_wakes_its_thread() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(connection.request, pub(b"x"), float("inf"))
        assert right.recv(100)
        connection.connection.shut_down()
        with pytest.raises(ConnectionLost):
            waiting.result(25)


def answer(sock: socket.socket) -> None:
    """Respond to each PUB with its body, until the client closes the connection."""
    with sock, sock.makefile("rb") as file, suppress(OSError):
        while file.readline():
            sock.sendall(ok(file.read(int.from_bytes(file.read(4), "big"))))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_interrupts_at_any_point_never_mix_up_responses(interrupts: None) -> None:
    choose = random.Random(1)
    interrupted = closed = responses = 0
    longest = 0.0002  # as long as this machine needs, so that about half of the requests are interrupted
    while interrupted < 200:
        with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
            ended = threads.submit(answer, right.dup())
            right.close()
            while connection.connection.usable:
                body = b"%d" % choose.getrandbits(60)
                try:
                    signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.00001, longest))
                    response = connection.request(pub(body), float("inf"))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(0)  # the signal may have been received
                except KeyboardInterrupt:
                    interrupted += 1
                    longest *= 1.1
                    closed += not connection.connection.usable
                else:
                    longest = max(longest / 1.1, 0.00002)
                    responses += 1
                    assert response == body
                if interrupted >= 200:
                    connection.connection.close()
            ended.result(25)
    assert closed > 20
    assert responses > 20


def test_threads_share_a_connection_and_receive_their_own_responses() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(17) as threads:
        ended = threads.submit(answer, right.dup())
        right.close()

        def publish(name: int) -> None:
            for number in range(300):
                body = b"%d-%d" % (name, number)
                assert connection.request(pub(body), float("inf")) == body

        for done in [threads.submit(publish, name) for name in range(16)]:
            done.result(60)
        assert not connection.connections.in_flight
        connection.connection.close()
        ended.result(25)


def test_waiting_requests_are_sent_together() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(8) as threads:
        first = threads.submit(connection.request, pub(b"first"), float("inf"))
        assert right.recv(1000) == pub(b"first")
        with sending(connection, threads):
            others = [threads.submit(connection.request, pub(b"%d" % number), float("inf")) for number in range(6)]
            until(lambda: connection.connections.in_flight == 8)
        right.sendall(ok(b"first"))
        assert first.result(25) == b"first"
        sent = right.recv(1000)
        assert len(sent) == 6 * len(pub(b"0"))
        right.sendall(b"".join(ok(sent[end - 1 : end]) for end in range(len(pub(b"0")), len(sent) + 1, len(pub(b"0")))))
        assert [other.result(25) for other in others] == [b"%d" % number for number in range(6)]


def test_a_response_wakes_its_thread_and_the_reader_that_ends_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_connections, "NAP", 3600.0)
    with blocking() as (connection, right), ThreadPoolExecutor(5) as threads:
        reader = threads.submit(connection.request, pub(b"1"), float("inf"))
        assert right.recv(1000) == pub(b"1")
        with sending(connection, threads):
            others = [threads.submit(connection.request, pub(b"2"), float("inf")) for _ in range(3)]
            until(lambda: len(connection.connections._sleeping) == 3)
        until(lambda: connection.connection.in_flight == 4)
        right.sendall(ok(b"1") + ok(b"2"))
        assert reader.result(25) == b"1"
        until(lambda: sum(other.done() for other in others) == 1)
        right.sendall(ok(b"2") * 2)
        assert [other.result(25) for other in others] == [b"2"] * 3


def test_a_thread_that_waits_for_a_tick_reads_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_connections, "NAP", 3600.0)
    entered, leave = threading.Event(), threading.Event()

    def tick() -> None:
        entered.set()
        assert leave.wait(25)

    with blocking() as (shared, right), ThreadPoolExecutor(2) as threads:
        with monkeypatch.context() as patched:
            patched.setattr(shared.connection, "tick", tick)
            ticks = threads.submit(shared.connections.tick)
            assert entered.wait(25)
            waiting = threads.submit(shared.request, pub(b"x"), float("inf"))
            until(lambda: len(shared.connections._sleeping) == 1)
            leave.set()
            ticks.result(25)
        assert right.recv(100) == pub(b"x")
        right.sendall(ok(b"x"))
        assert waiting.result(25) == b"x"


def test_a_request_that_waits_while_a_connection_is_retired_is_sent_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_connections, "_TICK", 60.0)
    entered, leave = threading.Event(), threading.Event()

    class Retired:
        closed = False

        @property
        def in_flight(self) -> int:
            entered.set()
            assert leave.wait(25)
            return 1

    with blocking() as (shared, right), ThreadPoolExecutor(2) as threads:
        right.settimeout(25)
        retires = threads.submit(shared.connections.retire, cast("Connection", Retired()))
        assert entered.wait(25)
        waiting = threads.submit(shared.request, pub(b"x"), float("inf"))
        until(lambda: shared.connections._reader)
        leave.set()
        assert not retires.result(25)
        assert right.recv(100) == pub(b"x")
        right.sendall(ok(b"x"))
        assert waiting.result(25) == b"x"


def test_the_thread_that_reads_reads_a_connection_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAP", "_TICK"):
        monkeypatch.setattr(thread_connections, name, 3600.0)
    polls = threading.Event()

    class Poll:
        def __init__(self) -> None:
            self.poller = select.poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            polls.set()
            return self.poller.poll(timeout)

    parts = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(thread_connections, "select", parts)
    with blocking() as (shared, right), blocking() as (other, added), ThreadPoolExecutor(2) as threads:
        reads = threads.submit(shared.request, pub(b"1"), float("inf"))
        assert right.recv(100) == pub(b"1")
        assert polls.wait(25)
        shared.connections.add(other.connection)
        command = Command(other.connection, pub(b"2"), float("inf"))
        waiting = threads.submit(shared.connections.run, command)
        assert added.recv(100) == pub(b"2")
        added.sendall(ok(b"2"))
        waiting.result(25)
        assert command.result() == b"2"
        right.sendall(ok(b"1"))
        assert reads.result(25) == b"1"


def test_a_deadline_counts_although_something_arrives_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poll:
        def __init__(self) -> None:
            self.poller = select.poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            return self.poller.poll(1) or [(-1, select.POLLIN)]

    parts = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(thread_connections, "select", parts)
    with blocking() as (connection, _), ThreadPoolExecutor(1) as threads:
        late = threads.submit(connection.request, pub(b"x"), time.monotonic() + 0.1)
        with pytest.raises(RequestTimeout):
            late.result(25)


def test_connections_end_when_their_requests_have_outcomes() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(connection.request, pub(b"x"), float("inf"))
        assert right.recv(100)
        assert not connection.connections.retire(connection.connection)
        assert not connection.connections.close(0.01)
        closes = threads.submit(connection.connections.close, 25)
        until(closes.running)
        right.sendall(ok(b"1"))
        assert waiting.result(25) == b"1"
        assert closes.result(25)
        assert connection.connection.closed


def test_an_interrupted_send_ends_the_connections_and_the_requests_of_others() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(2) as threads:
        other = threads.submit(connection.request, pub(b"x"), float("inf"))
        assert right.recv(100)
        connection.socket.interrupts = True
        sending = threads.submit(connection.request, with_body(b"PUB t\n", b"b" * LARGE), float("inf"))  # type: ignore[arg-type]
        ends = {type(request.exception(25)) for request in (other, sending)}
        assert ends == {KeyboardInterrupt, ConnectionLost}  # either thread may have sent it
        assert connection.connection.closed
        assert not len(connection.connections)


def test_a_request_whose_sender_is_interrupted_has_an_outcome() -> None:
    class Interrupted(Command):
        def post(self) -> tuple[Connection, Reply]:
            raise KeyboardInterrupt

    with blocking() as (connection, right), ThreadPoolExecutor(3) as threads:
        reader = threads.submit(connection.request, pub(b"reader"), float("inf"))
        assert right.recv(100) == pub(b"reader")
        sender, command = Sending(connection.connection), Interrupted(connection.connection, b"", 0)
        sends = threads.submit(connection.connections.run, sender)
        assert sender.entered.wait(25)
        waits = threads.submit(connection.connections.run, command)
        until(lambda: connection.connections.in_flight == 3)
        sender.leave.set()
        waits.result(25)
        with pytest.raises(ConnectionLost, match="was interrupted"):
            command.result()
        assert KeyboardInterrupt in {type(other.exception(25)) for other in (reader, sends)}


def test_the_error_of_a_threads_request_is_not_that_of_another() -> None:
    class Broken(Command):
        def post(self) -> tuple[Connection, Reply]:
            raise ValueError("broken")

    with blocking() as (connection, right), ThreadPoolExecutor(3) as threads:
        with sending(connection, threads):
            broken = Broken(connection.connection, b"", 0)
            ended = threads.submit(connection.connections.run, broken)
            good = threads.submit(connection.request, pub(b"good"), float("inf"))
            until(lambda: connection.connections.in_flight == 3)
        assert right.recv(1000) == pub(b"good")
        right.sendall(ok(b"good"))
        assert good.result(25) == b"good"
        ended.result(25)
        with pytest.raises(ValueError, match="broken"):
            broken.result()
        assert connection.connection.usable


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_an_interrupted_thread_leaves_the_others_an_outcome(interrupts: None) -> None:
    choose = random.Random(2)
    interrupted = 0
    while interrupted < 60:
        outcomes: list[object] = []
        with blocking() as (connection, right), ThreadPoolExecutor(5) as threads:
            ended = threads.submit(answer, right.dup())
            right.close()

            def publish(name: int, shared: Shared = connection, outcomes: list[object] = outcomes) -> None:
                number = 0
                while shared.connection.usable:
                    number += 1
                    body = b"%d-%d" % (name, number)
                    try:
                        assert shared.request(pub(body), float("inf")) == body
                    except (ConnectionLost, NotSent) as error:
                        outcomes.append(error)

            ends = [threads.submit(publish, name) for name in range(4)]
            while connection.connection.usable:
                try:
                    signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.00001, 0.003))
                    connection.request(pub(b"main"), float("inf"))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(0)  # the signal may have been received
                except KeyboardInterrupt:
                    interrupted += 1
                except (ConnectionLost, NotSent):
                    break
                if interrupted >= 60:
                    connection.connection.shut_down()
                    break
            signal.setitimer(signal.ITIMER_REAL, 0)
            for end in ends:
                end.result(25)
            ended.result(25)


def test_what_an_interrupted_send_may_have_sent_counts_as_sent() -> None:
    with blocking() as (shared, right):
        connection = shared.connection
        connection.post(pub(b"first"))
        replies = [connection.post(command) for command in (pub(b"x"), with_body(b"PUB t\n", b"b" * LARGE))]
        shared.socket.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            connection.flush()
        connection.close()
        assert [type(reply.error) for reply in replies] == [ConnectionLost, ConnectionLost]
        assert right.recv(100).startswith(pub(b"first") + pub(b"x"))


def test_an_interrupted_thread_takes_no_request_of_another_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed, left = threading.Event(), threading.Event()

    class Interrupted:
        def acquire(self, timeout: float) -> bool:
            noticed.wait(25)
            raise KeyboardInterrupt

        def release(self) -> None: ...

    class Queue(deque[ThreadRequest]):
        def popleft(self) -> ThreadRequest:
            if len(self) == 2:
                noticed.set()
                left.wait(0.2)  # never, if its thread waits for the lock
            return super().popleft()

    def leave(connections: ThreadConnections, command: Command) -> None:
        with pytest.raises(KeyboardInterrupt):
            connections.run(command)
        left.set()

    monkeypatch.setattr(thread_connections, "deque", Queue)
    with blocking() as (shared, right), ThreadPoolExecutor(5) as threads:
        connections = shared.connections
        reader = threads.submit(shared.request, pub(b"reader"), float("inf"))
        assert right.recv(100) == pub(b"reader")
        ended = threads.submit(answer, right.dup())
        command = Command(shared.connection, pub(b"left"), float("inf"))
        command.sleep = Interrupted()  # type: ignore[assignment]
        with sending(shared, threads):
            leaves = threads.submit(leave, connections, command)
            until(lambda: connections.in_flight == 3)
            stays = threads.submit(shared.request, pub(b"stays"), time.monotonic() + 25)
            until(lambda: connections.in_flight == 4)
            right.sendall(ok(b"reader"))
        assert reader.result(25) == b"reader"
        assert stays.result(25) == b"stays"
        leaves.result(25)
        assert not connections.in_flight
        shared.connection.close()
        ended.result(25)


def test_a_reader_that_was_interrupted_before_it_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a thread had the right to read, and did not read."""
    monkeypatch.setattr(thread_connections, "NAP", 0.05)
    stuck, over = threading.Event(), threading.Event()

    class Poll:
        def __init__(self) -> None:
            self.poller = select.poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            if not stuck.is_set():
                stuck.set()
                over.wait(60)
            return self.poller.poll(timeout)

    parts = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(thread_connections, "select", parts)
    with blocking() as (shared, right), ThreadPoolExecutor(2) as threads:
        reads = threads.submit(shared.request, pub(b"reads"), float("inf"))
        assert stuck.wait(25)
        waiting = threads.submit(shared.request, pub(b"x"), float("inf"))
        try:
            assert right.recv(len(pub(b"reads"))) == pub(b"reads")
            assert right.recv(100) == pub(b"x")
            right.sendall(ok(b"reads") + ok(b"x"))
            assert waiting.result(25) == b"x"
        finally:
            over.set()
        assert reads.result(25) == b"reads"
