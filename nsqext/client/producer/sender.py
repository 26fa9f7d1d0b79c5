"""Route publish requests and make one attempt to send them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from nsqext.client.producer.request import read_receipt, refuse
from nsqext.client.producer.retry import RetryPolicy, given_up
from nsqext.client.producer.routing import Route
from nsqext.client.trace_log import trace_log
from nsqext.errors import DeliveryUnknown, LookupFailed, NsqError, PartitionUnavailable, ProtocolError, TopicNotFound
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.hashing import key_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.producer.connection_pool import ConnectionPool
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.routing import Target
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.protocol.hashing import KeyHash
    from nsqext.transport.connection import Connection
    from nsqext.types import Receipt

__all__ = ("Sender",)

_MAKESHIFT = 0.5
"""Seconds for which nodes are used for a topic that lookup does not know yet, before it is asked again."""

_clock = time.monotonic


class Sender:
    """Knows where topics are, and sends publications there.

    Args:
        options: of the producer.
        directory: where topics are.
        pool: connections by node.

    Attributes:
        routes: targets by topic.
        running: scopes of publications that are not as simple as most.
        closed: nothing is sent any more.
    """

    def __init__(self, options: ProducerOptions, directory: MetadataCache, pool: ConnectionPool) -> None:
        self.options = options
        self.directory = directory
        self.retry: RetryPolicy = RetryPolicy(options)
        self.routes: dict[str, Route] = {}
        self.running: set[anyio.CancelScope] = set()
        self.closed: bool = False
        self.tasks: BackgroundTasks | None = None
        self._pool = pool
        self._key_hash = key_hash(options.key_hash)
        self._makeshift: dict[str, tuple[PartitionMap, float]] = {}
        self._unwatch: dict[str, Callable[[], None]] = {}
        self._refreshing: set[str] = set()

    @property
    def key_hash(self) -> KeyHash:
        """The function of key and number of partitions."""
        return self._key_hash

    # Routes

    def current(self, topic: str) -> Route | None:
        """Return the route of a topic if it is up to date."""
        route = self.routes.get(topic)
        return route if route is not None and route.view is self.directory.peek(topic, "w") else None

    async def route(self, topic: str) -> Route:
        """Return the route of a topic, waiting while lookup knows of no node: the cluster is only starting then.

        Raises:
            TopicNotFound: lookup works and does not know the topic.
            LookupFailed: no lookup address gave a usable answer.
            PublishFailed: no node came up within ``options.timeout``.
        """
        errors: list[NsqError] = []
        with anyio.move_on_after(self.options.timeout):
            while True:
                try:
                    return await self.find(topic)
                except PartitionUnavailable as error:
                    errors = [error]
                await anyio.sleep(self.options.retry_wait)
        raise given_up(f"within {self.options.timeout:g} s", errors, in_doubt=False).at(topic=topic)

    async def find(self, topic: str) -> Route:
        """Return the route of a topic, asking lookup where nothing is known.

        Raises:
            TopicNotFound: lookup works and does not know the topic.
            LookupFailed: no lookup address gave a usable answer.
            PartitionUnavailable: lookup knows neither the topic nor any node.
        """
        view = self.directory.peek(topic, "w")
        if view is None or not (view.leaders or view.nodes):
            view = await self._ask(topic)
        route = self.routes.get(topic)
        if route is None or route.view is not view:
            least_pending = self.options.balance == "least_pending"
            route = self.routes[topic] = Route(topic, view, self._pool, route, least_pending=least_pending)
            self._keep_nodes()
            if topic not in self._unwatch and self.directory.peek(topic, "w") is view:
                # it stays fresh for as long as anybody publishes to it
                self._unwatch[topic] = self.directory.watch(topic, "w", _look_later)
        return route

    def _keep_nodes(self) -> None:
        self._pool.keep_only({target.node.address for route in self.routes.values() for target in route.everyone()})

    async def run(self) -> None:
        """Forget topics that nobody publishes to any more, until cancelled."""
        while True:
            await anyio.sleep(self.options.forget_after)
            self.forget_idle()

    def forget_idle(self) -> None:
        """Forget topics that nothing was sent to since the last time, with connections that no other topic needs."""
        for topic, route in list(self.routes.items()):
            if route.used:
                route.used = False
                continue
            del self.routes[topic]
            self._unwatch.pop(topic, _nothing)()
        now = _clock()
        self._makeshift = {topic: entry for topic, entry in self._makeshift.items() if entry[1] > now}
        self._keep_nodes()

    async def _ask(self, topic: str) -> PartitionMap:
        view, until = self._makeshift.get(topic, (None, 0.0))
        if view is not None and _clock() < until:
            return view
        try:
            found = await self.directory.resolve(topic, "w")
        except TopicNotFound:
            makeshift = await self._any_nodes(topic)
            if makeshift is None:
                raise
            self._makeshift[topic] = (makeshift, _clock() + _MAKESHIFT)
            return makeshift
        self._makeshift.pop(topic, None)
        return found

    async def _any_nodes(self, topic: str) -> PartitionMap | None:
        """Return all nodes where they are of the original NSQ, which makes topics when they are first published to.

        Raises:
            PartitionUnavailable: there is none, of no generation.
        """
        try:
            nodes = await self.directory.nodes()
        except LookupFailed:
            return None
        if not nodes:
            raise PartitionUnavailable(
                "the lookup service knows of no node at all",
                topic=topic,
                hint="is an nsqd up, and does it register at this lookup service?",
            )
        if any("HA" in node.version for node in nodes):
            return None
        return PartitionMap(topic, "w", nodes=tuple(node.tcp for node in nodes))

    def choose(self, route: Route, publication: PublishRequest, tried: list[Target] | None = None) -> Target:
        """Return the target of a publication.

        Raises:
            PartitionUnavailable: it has no leader at the moment.
            InvalidPartition: the topic has no such partition.
        """
        if publication.partition is not None:
            return route.at(publication.partition)
        if publication.key is not None:
            return route.at(route.keyed(publication.key, self._key_hash))
        return route.any(tried or ())

    def refresh_soon(self, topic: str, view: PartitionMap, partition: int | None) -> None:
        """Ask lookup in the background, unless that is going on already."""
        if topic not in self._refreshing and self.tasks is not None:
            self._refreshing.add(topic)
            self.tasks.start_soon(self._refresh, topic, view, partition)

    async def _refresh(self, topic: str, view: PartitionMap, partition: int | None) -> None:
        try:
            await self.directory.refresh(topic, "w", failed=view, partition=partition)
        except NsqError:
            # closed meanwhile: there is nobody left whom it concerns
            return
        finally:
            self._refreshing.discard(topic)

    # Sending

    async def request(
        self, publication: PublishRequest, route: Route, target: Target, connection: Connection, deadline: float
    ) -> list[Receipt]:
        """Make one attempt over a connection.

        Raises:
            NsqError: how it ended.
        """
        try:
            command = publication.command(target, route.meta, target.node.negotiated)
            publication.in_doubt = True
            reply = await connection.request(command, deadline, breaks=publication.breaks)
            publication.in_doubt = False
        except NsqError as error:
            publication.in_doubt = False
            raise error.at(topic=target.topic, partition=target.partition, node=target.node.node) from error.__cause__
        return self.receipts(publication, route, target, connection, reply)

    def receipts(
        self, publication: PublishRequest, route: Route, target: Target, connection: Connection, reply: bytes
    ) -> list[Receipt]:
        """Read a reply; one that is none to this command ends the connection, which is out of step then.

        Raises:
            DeliveryUnknown: it is none.
        """
        try:
            receipts = publication.receipts(target, route.meta, reply)
        except ProtocolError as error:
            raise _out_of_step(target, connection, error) from error
        if trace_log.active:
            trace_log.published(receipts, connection.local_address)
        return receipts

    def receipt(self, target: Target, connection: Connection, reply: bytes, *, traced: bool) -> Receipt:
        """Read the reply to one message that is not in the trace log; see `receipts`.

        Raises:
            DeliveryUnknown: it is none to this command.
        """
        try:
            return read_receipt(target, reply, traced=traced)
        except ProtocolError as error:
            raise _out_of_step(target, connection, error) from error

    async def connected(self, target: Target) -> Connection:
        """Return the connection to a target.

        Raises:
            NsqError: it cannot be made.
        """
        try:
            return await self._pool.connection(target.node)
        except NsqError as error:
            raise error.at(topic=target.topic, partition=target.partition, node=target.node.node) from error.__cause__

    async def check_marked(self, route: Route, *, header: bool) -> None:
        """Find out from the first node that can be reached whether it takes headers and tags, or trace ids.

        Raises:
            ExtendNotSupported: it does not; nothing was sent.
        """
        with anyio.move_on_after(self.options.timeout):
            for target in route.targets:
                try:
                    await self.connected(target)
                except NsqError:
                    continue  # what is the matter shows when it is published to
                refuse(target.meta, target.node.negotiated, target.topic, header=header)
                return

    def forget(self) -> None:
        """Have no topic kept fresh any more."""
        for unwatch in self._unwatch.values():
            unwatch()
        self._unwatch.clear()

    def stop(self) -> None:
        """Give up what is still running."""
        self.closed = True
        for scope in self.running:
            scope.cancel()


def _nothing() -> None:
    """Do nothing about a topic that is not watched."""


def _look_later(view: PartitionMap) -> None:
    """Leave it to the next publish to see that the view is another one."""


def _out_of_step(target: Target, connection: Connection, error: ProtocolError) -> DeliveryUnknown:
    """End a connection whose replies are not those to our commands; returns what to raise."""
    error.at(topic=target.topic, partition=target.partition, node=target.node.node)
    connection.fail(error)
    return DeliveryUnknown(
        f"the message may have been stored: {error.message}",
        topic=target.topic,
        partition=target.partition,
        node=target.node.node,
        hint="the server's answers are not those to our commands; publishing again may store it twice",
    )
