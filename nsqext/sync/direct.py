"""Publish in the calling thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from nsqext.client.producer.publish_port import PublishPort
from nsqext.errors import DeliveryUnknown, InvalidState, NsqError
from nsqext.protocol.identify import IdentifyRequest
from nsqext.sync.loop import call, call_now, shared_loop
from nsqext.transport.blocking_connection import BlockingConnection, thread_can_wait
from nsqext.transport.handshake import open_connection

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from nsqext.client.producer.connection_pool import PooledNode
    from nsqext.client.producer.producer import Producer as AsyncProducer
    from nsqext.client.producer.publish_port import ReadyPublish
    from nsqext.client.producer.request import OutgoingMessage
    from nsqext.client.producer.statistics import ProducerStatistics
    from nsqext.types import Receipt

# publishes to a node before a connection for threads opens: many programs publish only once
_WARM_UP = 3
_PAUSE = 100  # publishes in the event loop after a failed connection for threads
_IDLE_TICK = 5.0
_TICKS_PER_HEARTBEAT = 8


class DirectPublisher:
    """Publishes messages without key on connections of the calling thread.

    A call of the event loop costs several times a publish, because two threads wait for each other. Therefore one
    thread at a time publishes itself, on a second connection to each node, with the routes, protocol and timeouts of
    the asynchronous producer. Other threads publish in the event loop, which sends their commands together. The event
    loop also does everything else: a topic's first publishes, publishes with a key, and further attempts.
    """

    def __init__(self, producer: AsyncProducer, portal: BlockingPortal) -> None:
        self._port = PublishPort(producer)
        self._portal = portal  # of its event loop, in which this is called
        self._loop_thread = threading.get_ident()
        # held during a publish, until its outcome, and during a check of the connections
        self._lock = threading.Lock()
        self._connections: dict[PooledNode, BlockingConnection] = {}
        self._missed: dict[PooledNode, int] = {}
        self._closed = self._port.in_event_loop_only or not thread_can_wait()

    def publish(self, topic: str, message: OutgoingMessage, partition: int | None) -> Receipt | None:
        """Publish a message and wait until it is stored; None if the event loop must publish it."""
        if self._closed or self._portal in shared_loop.orphaned or threading.get_ident() == self._loop_thread:
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            publish = self._port.ready(topic, message, partition)
            if publish is None:
                return None
            blocking = self._connections.get(publish.node)
            if blocking is None or not blocking.connection.usable:
                self._miss(publish.node)
                publish.give_back()
                return None
            try:
                return self._port.attempt(publish, blocking)
            except NsqError as failure:
                return self._again(publish, failure)
        finally:
            self._lock.release()

    def _again(self, publish: ReadyPublish, failure: NsqError) -> Receipt:
        """Let the event loop continue after a failed attempt."""
        try:
            return call(self._portal, "producer", self._port.again, publish, failure)
        except InvalidState as error:
            if not failure.maybe_stored:
                raise
            raise DeliveryUnknown(
                f"the message may have been stored: {failure.message}",
                topic=publish.request.topic,
                node=publish.node.node,
            ) from error

    # Connections

    def _miss(self, node: PooledNode) -> None:
        """Count a publish without a connection to a node; after a few, open a connection."""
        self._missed[node] = missed = self._missed.get(node, 0) + 1
        if missed == _WARM_UP:
            self._portal.start_task_soon(self._open, node)

    async def _open(self, node: PooledNode) -> None:
        try:
            connection, _ = await open_connection(node.address, self._port.options.connection, IdentifyRequest())
        except NsqError:
            self._missed[node] = -_PAUSE
            return
        blocking = BlockingConnection(connection)
        if self._closed:
            connection.close()
            return
        first = not self._connections
        self._connections[node] = blocking
        self._missed.pop(node, None)
        if first:
            self._port.start_soon(self._run)

    async def _run(self) -> None:
        """Check the connections periodically while any exists."""
        rest = min(_IDLE_TICK, self._port.options.connection.heartbeat_interval / _TICKS_PER_HEARTBEAT)
        while self._connections:
            await anyio.sleep(rest)
            if self._lock.acquire(blocking=False):  # otherwise a thread uses a connection, and answers its heartbeats
                try:
                    self._tick()
                finally:
                    self._lock.release()

    def _tick(self) -> None:
        for node, blocking in tuple(self._connections.items()):
            connection = blocking.connection
            connection.tick()
            if not (connection.usable and node.wanted and node.connection is not None):
                connection.close()
                del self._connections[node]

    def close(self) -> None:
        """Wait at most ``close_timeout`` seconds for a running publish, then abort it; close the connections."""
        self._closed = True
        if self._portal in shared_loop.orphaned:
            return  # the connections belong to the parent
        if self._lock.acquire(timeout=self._port.options.close_timeout):
            for blocking in self._connections.values():
                blocking.connection.close()
            self._connections.clear()
            self._lock.release()
        else:
            call_now(self._portal, "producer", self._port.abort)  # without another attempt
            for blocking in tuple(self._connections.values()):
                blocking.connection.shut_down()

    @property
    def stored(self) -> int:
        """Messages stored by these publishes."""
        return self._port.counters.stored

    def add_to(self, statistics: ProducerStatistics) -> ProducerStatistics:
        """Return the producer's statistics with these publishes."""
        counters = self._port.counters
        return evolve(
            statistics,
            connections=statistics.connections + len(self._connections),
            pending=statistics.pending + self._lock.locked(),
            stored=statistics.stored + counters.stored,
            bytes_sent=statistics.bytes_sent + counters.bytes_sent,
        )
