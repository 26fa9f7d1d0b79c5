"""From a publication to its receipts: straight where all is well, with retries where it is not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from nsqext.client.publication import read_receipt
from nsqext.client.retry import RetryPolicy, given_up, refusal
from nsqext.client.routes import Route, Target
from nsqext.client.tracelog import trace_log
from nsqext.errors import (
    ConnectionFailed,
    DeliveryUnknown,
    LookupFailed,
    NotLeader,
    NsqError,
    ProtocolError,
    ServerError,
    TopicNotExist,
    TopicNotFound,
)
from nsqext.lookup.table import TopicView
from nsqext.protocol.hashing import key_hash

if TYPE_CHECKING:
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from nsqext.client.options import ProducerOptions
    from nsqext.client.pool import NodePool
    from nsqext.client.publication import Publication
    from nsqext.lookup.directory import Directory
    from nsqext.protocol.hashing import KeyHash
    from nsqext.transport.connection import Connection
    from nsqext.types import Receipt

__all__ = ("Delivery", "Sender")

_MAKESHIFT = 0.5
"""Seconds for which nodes are used for a topic that lookup does not know yet, before it is asked again."""
_MOVES = 3
"""Failures after which even a publish that could go elsewhere waits before it does."""

_clock = time.monotonic


class Sender:
    """Sends publications to where their topics are.

    Args:
        options: of the producer.
        directory: where topics are.
        pool: connections by node.

    Attributes:
        routes: targets by topic.
        running: publications that are not as simple as most.
        closed: nothing is sent any more.
    """

    def __init__(self, options: ProducerOptions, directory: Directory, pool: NodePool) -> None:
        self.options = options
        self.directory = directory
        self.retry: RetryPolicy = RetryPolicy(options)
        self.routes: dict[str, Route] = {}
        self.running: set[Delivery] = set()
        self.closed: bool = False
        self.tasks: TaskGroup | None = None
        self._pool = pool
        self._key_hash = key_hash(options.key_hash)
        self._makeshift: dict[str, tuple[TopicView, float]] = {}
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
        """Return the route of a topic, asking lookup where nothing is known.

        Raises:
            TopicNotFound: lookup works and does not know the topic.
            LookupFailed: no lookup address gave a usable answer.
        """
        view = self.directory.peek(topic, "w")
        if view is None or not (view.leaders or view.nodes):
            view = await self._ask(topic)
        route = self.routes.get(topic)
        if route is None or route.view is not view:
            least_pending = self.options.balance == "least_pending"
            route = self.routes[topic] = Route(topic, view, self._pool, route, least_pending=least_pending)
            self._pool.keep_only({target.node.address for route in self.routes.values() for target in route.everyone()})
            if topic not in self._unwatch and self.directory.peek(topic, "w") is view:
                # it stays fresh for as long as anybody publishes to it
                self._unwatch[topic] = self.directory.watch(topic, "w", _look_later)
        return route

    async def _ask(self, topic: str) -> TopicView:
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

    async def _any_nodes(self, topic: str) -> TopicView | None:
        """Return all nodes where they are of the original NSQ, which makes topics when they are first published to."""
        try:
            nodes = await self.directory.nodes()
        except LookupFailed:
            return None
        if not nodes or any("HA" in node.version for node in nodes):
            return None
        return TopicView(topic, "w", nodes=tuple(node.tcp for node in nodes))

    def choose(self, route: Route, publication: Publication, tried: list[Target] | None = None) -> Target:
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

    def refresh_soon(self, topic: str, view: TopicView, partition: int | None) -> None:
        """Ask lookup in the background, unless that is going on already."""
        if topic not in self._refreshing and self.tasks is not None:
            self._refreshing.add(topic)
            self.tasks.start_soon(self._refresh, topic, view, partition)

    async def _refresh(self, topic: str, view: TopicView, partition: int | None) -> None:
        try:
            await self.directory.refresh(topic, "w", failed=view, partition=partition)
        except NsqError:
            # closed meanwhile: there is nobody left whom it concerns
            return
        finally:
            self._refreshing.discard(topic)

    # Sending

    async def send(self, publication: Publication) -> list[Receipt]:
        """Publish; returns a receipt for each message.

        Raises:
            NsqError: see `nsqext.client.producer.Producer.publish`.
        """
        started = _clock()
        route = self.current(publication.topic)
        if route is None:
            return await Delivery(self, publication, started).run()
        target = None
        failure: NsqError | None = None
        try:
            target = self.choose(route, publication)
            connection = target.node.connection
            if connection is not None and connection.usable:
                # as `request` does it, without the cost of one more coroutine
                command = publication.command(target, route.meta, target.node.negotiated)
                publication.in_doubt = True
                reply = await connection.request(command, started + self.options.timeout, breaks=publication.breaks)
                publication.in_doubt = False
                return self.receipts(publication, route, target, connection, reply)
        except NsqError as error:
            publication.in_doubt = False
            failure = error.at(topic=publication.topic)
            if target is not None:
                failure.at(partition=target.partition, node=target.node.node)
        return await Delivery(self, publication, started).run(route, target, failure)

    async def request(
        self, publication: Publication, route: Route, target: Target, connection: Connection, deadline: float
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
        self, publication: Publication, route: Route, target: Target, connection: Connection, reply: bytes
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

    def forget(self) -> None:
        """Have no topic kept fresh any more."""
        for unwatch in self._unwatch.values():
            unwatch()
        self._unwatch.clear()

    def stop(self) -> None:
        """Give up what is still running."""
        self.closed = True
        for delivery in self.running:
            delivery.stop()


class Delivery:
    """A publication on its way, with all its attempts.

    Args:
        sender: sends it.
        publication: what is published.
        started: when the publish began, in seconds of the monotonic clock.

    Attributes:
        errors: how the attempts so far ended.
    """

    __slots__ = ("_publication", "_route", "_scope", "_sender", "_started", "_tried", "errors")

    def __init__(self, sender: Sender, publication: Publication, started: float) -> None:
        self._sender = sender
        self._publication = publication
        self._started = started
        self._route: Route | None = None
        self._tried: list[Target] = []
        self._scope = anyio.CancelScope()
        self.errors: list[NsqError] = []

    async def run(
        self, route: Route | None = None, target: Target | None = None, failure: NsqError | None = None
    ) -> list[Receipt]:
        """Publish; returns the receipts.

        Args:
            route: the route of an attempt that was made already.
            target: its target; None where there was none to be found.
            failure: how it ended; None where there was no attempt.

        Raises:
            NsqError: see `nsqext.client.producer.Producer.publish`.
        """
        self._route = route
        if failure is not None:
            self._note(failure, target)
        left = self._started + self._sender.options.timeout - _clock()
        self._sender.running.add(self)
        try:
            with self._scope:
                self._scope.deadline = anyio.current_time() + max(0.0, left)
                return await self._run(target if failure is None else None)
        finally:
            self._sender.running.discard(self)
        if self._sender.closed:
            reason = "before the producer was closed"
        else:
            reason = f"within {self._sender.options.timeout:g} s"
        raise given_up(reason, self.errors, self._publication.in_doubt).at(topic=self._publication.topic)

    def stop(self) -> None:
        """Give it up."""
        self._scope.cancel()

    async def _run(self, target: Target | None) -> list[Receipt]:
        if not self.errors:
            try:
                return await self._attempt(target)
            except NsqError as error:
                self.errors.append(error)
        if self._sender.retry.final(self.errors):
            refused = refusal(self.errors)
            raise refused from refused.__cause__
        return await self._sender.retry.go_on(self, self._again)

    @property
    def moves(self) -> bool:
        """Whether the next attempt goes somewhere that has not failed yet."""
        return (
            self._publication.free
            and len(self.errors) <= _MOVES
            and self._route is not None
            and self._route.untried(self._tried)
        )

    @property
    def paced(self) -> bool:
        """Whether the next attempt waits for an answer of lookup."""
        return self.errors[-1].refresh_lookup and self._sender.directory.asks

    async def _again(self) -> list[Receipt]:
        last = self.errors[-1]
        topic = self._publication.topic
        if last.refresh_lookup:
            view = self._route.view if self._route is not None else None
            refused = self._tried[-1].partition if self._tried and _not_there(last) else None
            partition = refused if refused is not None and refused >= 0 else None
            if view is not None and self.moves:
                self._sender.refresh_soon(topic, view, partition)
            else:
                await self._sender.directory.refresh(topic, "w", failed=view, partition=partition)
        return await self._attempt(None)

    async def _attempt(self, target: Target | None) -> list[Receipt]:
        sender, publication = self._sender, self._publication
        if target is None or self._route is None:
            route = self._route = await sender.route(publication.topic)
            try:
                target = sender.choose(route, publication, self._tried)
            except NsqError as error:
                raise error.at(topic=publication.topic) from error.__cause__
        try:
            connection = await sender.connected(target)
            return await sender.request(
                publication, self._route, target, connection, self._started + sender.options.timeout
            )
        except NsqError as error:
            self._mark(error, target)
            raise

    def _note(self, error: NsqError, target: Target | None) -> None:
        self.errors.append(error)
        self._mark(error, target)

    def _mark(self, error: NsqError, target: Target | None) -> None:
        if target is not None:
            self._tried.append(target)
            if error.retryable and isinstance(error, ServerError):
                target.refused()


def _look_later(view: TopicView) -> None:
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


def _not_there(error: NsqError) -> bool:
    """Whether the node that lookup names does not lead the partition, or is gone."""
    return isinstance(error, (NotLeader, TopicNotExist, ConnectionFailed))
