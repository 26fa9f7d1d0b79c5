"""Publish in the calling threads."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from nsqext.client.producer.attempt_errors import delivery_unknown, outcome_unknown
from nsqext.client.producer.publish_port import PublishPort
from nsqext.errors import InvalidState, NsqError
from nsqext.protocol.identify import IdentifyRequest
from nsqext.sync.loop import call, call_now, shared_loop
from nsqext.transport.handshake import open_connection
from nsqext.transport.thread_connections import ThreadConnections, ThreadRequest, thread_can_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyio.from_thread import BlockingPortal

    from nsqext.client.producer.connection_pool import PooledNode
    from nsqext.client.producer.producer import Producer as AsyncProducer
    from nsqext.client.producer.publish_port import ReadyPublish
    from nsqext.client.producer.publishing import OutgoingMessage
    from nsqext.client.producer.statistics import ProducerStatistics
    from nsqext.transport.connection import Connection
    from nsqext.transport.thread_connections import Posted
    from nsqext.types import Receipt

# publishes to a node before a connection for threads opens: many programs publish only once
_WARM_UP = 3
_PAUSE = 100  # publishes in the event loop after a failed connection for threads
_IDLE_TICK = 5.0
_TICKS_PER_HEARTBEAT = 8
_ABORT_TIMEOUT = 5.0  # seconds within which threads learn that their sockets were shut down


class _Publish(ThreadRequest):
    """A publish of a thread: a message or a batch."""

    _ready: ReadyPublish | None = None
    _connection: Connection | None = None

    def __init__(self, direct: DirectPublisher, choose: Callable[[], ReadyPublish | None]) -> None:
        self._choose = choose
        self._direct = direct

    def post(self) -> Posted | None:
        ready = self._choose()
        if ready is None:
            return None
        connection = self._direct.connection(ready)
        if connection is None:
            return None
        self._ready, self._connection = ready, connection
        return connection, self._direct.port.post(ready, connection)

    def result(self) -> list[Receipt] | None:
        """Return the receipts; None if the event loop must publish."""
        ready, connection = self._ready, self._connection
        try:
            reply = self.answer()
            if reply is None or ready is None or connection is None:
                return None
            return self._direct.port.receipts(ready, connection, reply)
        except NsqError as failure:
            if ready is None:
                raise
            return self._direct.publish_again(ready, ready.request.failed(failure))


class DirectPublisher:
    """Publishes messages and single batches without key on connections of the calling threads.

    A call of the event loop costs several times a publish, because two threads wait for each other. Therefore threads
    publish themselves, on a second connection to each node, with the routes, protocol and timeouts of the asynchronous
    producer. The event loop does all else: a topic's first publishes, publishes with a key, and further attempts.
    """

    def __init__(self, producer: AsyncProducer, portal: BlockingPortal) -> None:
        self.port: PublishPort = PublishPort(producer)
        self._portal = portal  # of its event loop, in which this is called
        self._loop_thread = threading.get_ident()
        self._connections: ThreadConnections | None = None
        self._of_nodes: dict[PooledNode, Connection] = {}
        self._missed: dict[PooledNode, int] = {}
        self._to_open: deque[PooledNode] = deque()
        self._counting = threading.Lock()  # held to count publishes before the first connection
        self._closed = self.port.in_event_loop_only or not thread_can_wait()

    def publish(self, topic: str, message: OutgoingMessage, partition: int | None) -> Receipt | None:
        """Publish a message and wait until it is stored; None if the event loop must publish it."""
        if self._loop_must_publish():
            return None
        receipts = self._publish(partial(self.port.ready, topic, message, partition))
        return None if receipts is None else receipts[0]

    def publish_many(
        self, topic: str, messages: list[bytes | OutgoingMessage], partition: int | None, trace_ids: Sequence[int]
    ) -> list[Receipt] | None:
        """Publish messages as one batch, and wait until it is stored; None if the event loop must publish them."""
        if self._loop_must_publish():
            return None
        batch = self.port.batch(topic, messages, partition, trace_ids)  # checked before any lock
        if batch is None:
            return None
        try:
            return self._publish(partial(self.port.ready_batch, batch))
        except InvalidState:
            raise  # nothing was sent
        except NsqError as error:
            from nsqext.client.producer.batch_publisher import raise_for_all

            raise_for_all(error, batch.count)

    def _loop_must_publish(self) -> bool:
        return self._closed or self._portal in shared_loop.orphaned or threading.get_ident() == self._loop_thread

    def _publish(self, choose: Callable[[], ReadyPublish | None]) -> list[Receipt] | None:
        connections = self._connections
        if connections is None:
            with self._counting:
                ready = choose()
                if ready is not None:
                    self.connection(ready)
            self._open_missing()
            return None
        publish = _Publish(self, choose)
        connections.run(publish)
        if self._to_open:
            self._open_missing()
        return publish.result()

    def publish_again(self, publish: ReadyPublish, failure: NsqError) -> list[Receipt]:
        """Let the event loop continue after a failed attempt."""
        try:
            return call(self._portal, "producer", self.port.again, publish, failure)
        except InvalidState as error:
            if not outcome_unknown(failure):
                raise
            where = {"topic": publish.request.topic, "node": publish.node.node}
            raise delivery_unknown(failure.message, **where) from error

    # Connections

    def connection(self, publish: ReadyPublish) -> Connection | None:
        """Return the connection of a publish's node; without one give the publish back, and note it after a few."""
        connection = self._of_nodes.get(publish.node)
        if connection is not None and connection.usable:
            return connection
        publish.give_back()
        node = publish.node
        self._missed[node] = missed = self._missed.get(node, 0) + 1
        if missed == _WARM_UP:
            self._to_open.append(node)
        return None

    def _open_missing(self) -> None:
        """Open noted connections, in a thread without locks: it waits for the event loop, which may wait for them."""
        with suppress(IndexError, RuntimeError):  # another thread was quicker, or closed the producer
            while self._to_open:
                self._portal.start_task_soon(self._open, self._to_open.popleft())

    async def _open(self, node: PooledNode) -> None:
        try:
            connection, _ = await open_connection(node.address, self.port.options.connection, IdentifyRequest())
        except NsqError:
            self._missed[node] = -_PAUSE
            return
        if not connection.usable:  # the server ended it at once
            connection.close()
            self._missed[node] = -_PAUSE
            return
        first = not self._of_nodes
        if self._connections is None:
            self._connections = ThreadConnections()
        self._connections.add(connection)
        self._of_nodes[node] = connection
        self._missed.pop(node, None)
        if self._closed:  # meanwhile, by a thread that may not have seen it
            self._connections.close(0)
        elif first:
            self.port.start_soon(self._run)

    async def _run(self) -> None:
        """Check the connections periodically while any exists."""
        rest = min(_IDLE_TICK, self.port.options.connection.heartbeat_interval / _TICKS_PER_HEARTBEAT)
        while self._of_nodes and self._connections is not None:
            await anyio.sleep(rest)
            self._connections.tick()
            for node, connection in tuple(self._of_nodes.items()):
                needed = connection.usable and node.wanted and node.connection is not None
                if not needed and self._connections.retire(connection):
                    del self._of_nodes[node]

    def close(self) -> None:
        """Wait at most ``close_timeout`` seconds for running publishes, then abort them; close the connections."""
        self._closed = True
        connections = self._connections
        if connections is None:
            return
        if self._portal in shared_loop.orphaned:  # the connections belong to the parent
            connections.abandon()
            return
        closed = False
        try:
            closed = connections.close(self.port.options.close_timeout)
        finally:
            if not closed:  # too late, or interrupted
                call_now(self._portal, "producer", self.port.abort)  # without another attempt
                connections.shut_down()
                connections.close(_ABORT_TIMEOUT)

    @property
    def stored(self) -> int:
        """Messages stored by these publishes."""
        return self.port.counters.stored

    def add_to(self, statistics: ProducerStatistics) -> ProducerStatistics:
        """Return the producer's statistics with these publishes."""
        counters, connections = self.port.counters, self._connections
        if connections is None:
            return statistics
        return evolve(
            statistics,
            connections=statistics.connections + len(connections),
            pending=statistics.pending + connections.in_flight,
            stored=statistics.stored + counters.stored,
            bytes_sent=statistics.bytes_sent + counters.bytes_sent,
        )
