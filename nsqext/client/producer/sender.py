"""Send publish requests; retry them until they are stored, permanently refused, or timed out."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.lowlevel

from nsqext.client.events import tracing
from nsqext.client.producer.attempt_errors import AttemptErrors, delivery_unknown
from nsqext.errors import (
    BatchFailed,
    ConnectionFailed,
    DeliveryUnknown,
    ExtendNotSupported,
    InvalidInput,
    InvalidPartition,
    InvalidState,
    LookupFailed,
    NsqError,
    PartitionUnavailable,
    ProtocolError,
    PublishFailed,
    ServerError,
)
from nsqext.errors.server import ExtendRefused, NotLeader, TopicNotExist

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from nsqext.client.producer.connection_pool import ConnectionPool, PooledConnection
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.route import Route, RouteTable, Target
    from nsqext.client.producer.settling import Settler
    from nsqext.types import Receipt

_EXPLAINED = 8  # failed attempts until lookup is asked again why it does not offer the partition
_MOVES = 3  # failures after which a publish for any partition pauses, too, before a retry

_clock = time.monotonic

T = TypeVar("T")


class Counters:
    """See `nsqext.client.producer.statistics.ProducerStatistics`."""

    def __init__(self) -> None:
        self.stored: int = 0
        self.failed: int = 0
        self.unknown: int = 0
        self.retries: int = 0
        self.bytes_sent: int = 0

    def count(self, error: NsqError, messages: int = 1) -> None:
        """Count messages whose publish raised an error, by their outcomes where it has them."""
        if isinstance(error, BatchFailed):
            for outcome in error.outcomes:
                if isinstance(outcome, NsqError):
                    self.count(outcome)
        elif isinstance(error, DeliveryUnknown):
            self.unknown += messages
        elif not isinstance(error, (InvalidInput, InvalidState)):
            self.failed += messages


class Sender:
    """Sends publish requests and returns their receipts."""

    def __init__(self, options: ProducerOptions, routes: RouteTable, pool: ConnectionPool) -> None:
        self.options: ProducerOptions = options
        self.routes: RouteTable = routes
        self.pool: ConnectionPool = pool
        self.counters: Counters = Counters()
        self.settler: Settler | None = None  #: with ``on_unknown="settle"``
        #: of publishes off the fast path, and of waits for lookup
        self.attempts: set[anyio.CancelScope] = set()
        self.closed: bool = False  #: no further request is sent

    async def publish(self, request: PublishRequest) -> list[Receipt]:
        """Publish; return a receipt for each message."""
        if self.closed:
            raise PublishFailed("not sent: the producer was closed", topic=request.topic)
        route = self.routes.current(request.topic)
        if route is None:
            return await PublishAttempt(self, request).run()
        target = None
        try:
            target = self.choose(route, request)
            connection = target.node.connection
            if connection is not None and connection.usable:
                # as `send`, without its coroutine: 7 % of a publish
                response = await self._post(request, target, connection)
                return self.receipts(request, target, connection, response)
            failure = None
        except NsqError as error:
            failure = request.failed(error)
        return await PublishAttempt(self, request).run(route, target, failure)

    async def publish_again(
        self, request: PublishRequest, route: Route | None, target: Target, failure: NsqError
    ) -> list[Receipt]:
        """Publish after a failed attempt; see `publish`."""
        return await PublishAttempt(self, request).run(route, target, failure)

    def choose(self, route: Route, request: PublishRequest, tried: Collection[Target] = ()) -> Target:
        """Return the target of a request; raises as `Route.at` and `Route.any`."""
        if request.partition is not None:
            return route.at(request.partition)
        if request.key is not None:
            return route.at(route.partition_of(request.key, self.routes.key_hash))
        return route.any(tried)

    async def send(self, request: PublishRequest, target: Target, connection: PooledConnection) -> list[Receipt]:
        """Send a request once, and return its receipts; raises DeliveryUnknown."""
        try:
            response = await self._post(request, target, connection)
        except NsqError as error:
            raise request.failed(error) from error.__cause__
        return self.receipts(request, target, connection, response)

    def _post(self, request: PublishRequest, target: Target, connection: PooledConnection) -> Awaitable[bytes]:
        if self.settler is not None:
            self.settler.sending(request, target, connection)
        command = request.command(target)
        request.in_doubt, request.sent = True, len(command)
        return connection.request(command, request.started + self.options.timeout, breaks=request.breaks)

    def receipts(
        self, request: PublishRequest, target: Target, connection: PooledConnection, response: bytes
    ) -> list[Receipt]:
        """Parse and count a response; raises DeliveryUnknown."""
        request.in_doubt = False
        try:
            receipts = request.receipts(target, response)
        except ProtocolError as error:
            raise out_of_step(target, connection, error) from error
        self.counters.stored += len(receipts)
        self.counters.bytes_sent += request.sent
        if self.settler is not None:
            self.settler.stored(receipts)
        if tracing.log is not None:
            tracing.log.published(receipts, connection.local_address)
        return receipts

    async def connection(self, target: Target) -> PooledConnection:
        try:
            return await self.pool.connection(target.node)
        except NsqError as error:
            raise error.at(topic=target.topic, partition=target.partition, node=target.node.node) from error.__cause__

    async def wait_for_route(self, topic: str, started: float | None = None) -> Route:
        """Return a topic's route as `wait_for_lookup`; raises TopicNotFound or TopicNotReady, too."""
        return await self.wait_for_lookup(partial(self.routes.find, topic), started)

    async def wait_for_lookup(
        self, ask: Callable[[], Awaitable[T]], started: float | None = None, *, retry: bool = True
    ) -> T:
        """Return a lookup request's result; wait while lookup does not respond or knows no node.

        ``timeout`` began at ``started``, by default now; without ``retry`` the first error is raised.

        Raises LookupFailed or PublishFailed.
        """
        errors = AttemptErrors(self.options)
        left = self.options.timeout if started is None else started + self.options.timeout - _clock()
        with anyio.move_on_after(max(0.0, left)) as scope:
            self.attempts.add(scope)
            try:
                while True:
                    try:
                        return await ask()
                    except (PartitionUnavailable, LookupFailed) as error:
                        errors.add(error)
                        waits = isinstance(error, PartitionUnavailable) or self.routes.waits_for_lookup(error)
                    if not (retry and waits):
                        refusal = errors.refusal()
                        raise refusal from refusal.__cause__
                    await anyio.sleep(errors.pause(paced=False))
            finally:
                self.attempts.discard(scope)
        raise errors.given_up(self.time_over())

    def time_over(self) -> str:
        """Return why a publish is not attempted again."""
        return "before the producer was closed" if self.closed else f"within {self.options.timeout:g} s"

    # Closing

    def close(self) -> None:
        self.closed = True
        for scope in self.attempts:
            scope.cancel()


class PublishAttempt:
    """All attempts of a publish request, after a failure on the fast path or without a connection."""

    __slots__ = ("_errors", "_lacks_channel", "_request", "_route", "_scope", "_sender", "_tried")

    def __init__(self, sender: Sender, request: PublishRequest) -> None:
        self._sender = sender
        self._request = request
        self._route: Route | None = None
        self._tried: list[Target] = []
        self._errors = AttemptErrors(sender.options)
        self._lacks_channel = False

    async def run(
        self, route: Route | None = None, target: Target | None = None, failure: NsqError | None = None
    ) -> list[Receipt]:
        """Publish; continue after the fast path's failed attempt, if given."""
        self._route = route
        try:
            return await self._run_settled(target, failure)
        except NsqError as error:
            error.at(topic=self._request.topic)
            raise

    async def _run_settled(self, target: Target | None, failure: NsqError | None) -> list[Receipt]:
        """Publish; settle an unknown outcome, and publish again what was not stored."""
        sender, request = self._sender, self._request
        while True:
            try:
                return await self._run(target, failure)
            except DeliveryUnknown as unknown:
                receipts = await self._settled(unknown)
                if receipts is not None:
                    sender.counters.stored += len(receipts)
                    return receipts
                if _clock() - request.started >= sender.options.timeout:
                    text = f"not stored {sender.time_over()}: its log does not contain it"
                    raise PublishFailed(text, topic=request.topic, partition=unknown.partition) from unknown
            if self._route is not None:  # its leader may have moved
                refused = None if request.sent_to is None else request.sent_to.partition
                await sender.routes.refresh(request.topic, self._route.view, refused)
            target = failure = None
            self._errors = AttemptErrors(sender.options)
            sender.counters.retries += 1

    async def _settled(self, unknown: DeliveryUnknown) -> list[Receipt] | None:
        """Return the receipts of stored messages; None if they were not stored. Raises DeliveryUnknown."""
        sender = self._sender
        if sender.settler is None or sender.closed:
            raise unknown
        with anyio.CancelScope() as scope:
            sender.attempts.add(scope)
            try:
                return await sender.settler.settle(self._request, unknown)
            finally:
                sender.attempts.discard(scope)
        raise unknown

    async def _run(self, target: Target | None, failure: NsqError | None) -> list[Receipt]:
        sender = self._sender
        left = self._request.started + sender.options.timeout - _clock()
        self._scope = anyio.CancelScope()
        sender.attempts.add(self._scope)
        try:
            with self._scope:
                if sender.closed:  # it broke the connection: report the outcome, without retry
                    self._scope.cancel()
                self._scope.deadline = anyio.current_time() + max(0.0, left)
                return await self._attempt_until_stored(target, failure)
        finally:
            sender.attempts.discard(self._scope)
        raise self._errors.given_up(sender.time_over(), self._request.in_doubt)

    async def _attempt_until_stored(self, target: Target | None, failure: NsqError | None) -> list[Receipt]:
        if failure is not None:
            self._errors.add(failure)
            self._mark(failure, target)
            target = None
        while True:
            try:
                if self._errors.count and not await self._retries():
                    break
                self._sender.counters.retries += bool(self._errors.count)
                return await self._attempt(target)
            except NsqError as error:
                self._errors.add(error)
                target = None
        refusal = self._errors.refusal()
        raise refusal from refusal.__cause__

    async def _retries(self) -> bool:
        """Return whether the publish is retried, after the pause and refresh for its latest error."""
        sender, errors, topic, last = self._sender, self._errors, self._request.topic, self._errors.last
        if isinstance(last, ExtendNotSupported):
            return await sender.routes.upgraded(topic)
        if isinstance(last, ExtendRefused):  # of a header that the topic's meta asked for, such as a key
            return await sender.routes.downgraded(topic)
        if isinstance(last, InvalidPartition) and self._request.partition is not None:
            return await sender.routes.upgraded(topic, self._request.partition + 1)
        if errors.final() or (isinstance(last, LookupFailed) and not sender.routes.waits_for_lookup(last)):
            if last.refresh_lookup and last.maybe_stored and self._route is not None:
                sender.routes.refresh_soon(topic, self._route.view, self._refused_partition)
            return False
        await anyio.lowlevel.checkpoint_if_cancelled()  # by the close
        moves = self._moves
        if last.overload or not moves:
            await anyio.sleep(errors.pause(paced=last.refresh_lookup and sender.routes.asks_lookup))
        if last.refresh_lookup:
            view = self._route.view if self._route is not None else None
            partition = self._refused_partition
            if view is not None and moves:
                sender.routes.refresh_soon(topic, view, partition)
            else:
                await sender.routes.refresh(topic, view, partition)
        return True

    @property
    def _refused_partition(self) -> int | None:
        """The partition whose leader has moved or is down, by the latest error."""
        if not self._tried or not isinstance(self._errors.last, (NotLeader, TopicNotExist, ConnectionFailed)):
            return None
        return self._tried[-1].partition

    @property
    def _moves(self) -> bool:
        """Whether the next attempt uses a target that has not failed."""
        return (
            self._request.any_partition
            and self._errors.count <= _MOVES
            and self._route is not None
            and self._route.untried(self._tried)
        )

    async def _attempt(self, target: Target | None) -> list[Receipt]:
        sender, request = self._sender, self._request
        if target is None or self._route is None:
            route = self._route = await sender.routes.find(request.topic)
            try:
                target = sender.choose(route, request, self._tried)
            except PartitionUnavailable as error:
                raise await self._explained(error) from None
        try:
            return await sender.send(request, target, await sender.connection(target))
        except NsqError as failure:
            self._mark(failure, target)
            raise

    async def _explained(self, error: PartitionUnavailable) -> PartitionUnavailable:
        """Return the error of a partition that lookup does not offer; says if it has no channel."""
        topic, partition = self._request.topic, error.partition
        if self._errors.count % _EXPLAINED == 1:
            self._lacks_channel = await self._sender.routes.lacks_channel(topic, partition)
        if not self._lacks_channel:
            return error
        return PartitionUnavailable(
            "the partition has no channel, so that lookup does not offer it to producers",
            topic=topic,
            partition=partition,
            hint=f"create a channel: nsqext channel create {topic} NAME",
        )

    def _mark(self, error: NsqError, target: Target | None) -> None:
        error.at(topic=self._request.topic)
        if target is not None:
            error.at(partition=target.partition, node=target.node.node)
            self._tried.append(target)
            if error.retryable and isinstance(error, ServerError):
                target.refused()


def out_of_step(target: Target, connection: PooledConnection, error: ProtocolError) -> DeliveryUnknown:
    """Close a connection whose responses do not match the commands; return the error to raise."""
    unknown = unreadable(target, error)
    connection.fail(error)
    return unknown


def unreadable(target: Target, error: ProtocolError) -> DeliveryUnknown:
    """Return the error of a publish whose response does not match its command."""
    error.at(topic=target.topic, partition=target.partition, node=target.node.node)
    hint = "the server's responses do not match the commands; publishing again may store it twice"
    return delivery_unknown(error.message, hint=hint, **error.where)
