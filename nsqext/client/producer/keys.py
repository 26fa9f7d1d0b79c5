"""Publishes with a key: one after another; publishes that wait for an earlier publish become one batch.

Only a batch, stored wholly or not at all, keeps the order when an attempt fails: of pipelined commands, a server may
refuse the first and accept the second while a leader moves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

from nsqext.client.producer.attempt_errors import delivery_unknown, outcome_unknown
from nsqext.client.producer.batch import Batch
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.client.producer.request import MessageRequest, key_bytes
from nsqext.errors import InvalidInput, InvalidState, NsqError, PublishFailed
from nsqext.waits import WaitingTasks

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledConnection
    from nsqext.client.producer.publishing import TopicKey
    from nsqext.client.producer.route import Route, Target
    from nsqext.client.producer.sender import Sender
    from nsqext.types import Receipt
    from nsqext.waits import EventWaiter, Waiter


class KeyLock:
    """A fair lock for each topic and key; a key without a publish in flight takes no memory.

    A publish takes its place for all its keys before any wait, such as a lookup. So places have the order of the calls,
    and two publishes never wait for each other.
    """

    def __init__(self) -> None:
        self.tasks: WaitingTasks = WaitingTasks()  #: that wait for their places
        self._rows: dict[TopicKey, deque[Place] | tuple[()]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: TopicKey) -> bool:
        return key in self._rows

    def try_enter(self, key: TopicKey) -> bool:
        """Acquire a key's lock if it is free; return whether it was."""
        if key in self._rows:
            return False
        self._rows[key] = ()  # a deque takes 600 bytes
        return True

    def leave(self, key: TopicKey) -> None:
        """Pass a key's lock to the next place."""
        row = self._rows[key]
        if row:
            row.popleft().grant(key)
        else:
            del self._rows[key]

    def queue(self, keys: Iterable[TopicKey], place: Place | None = None) -> Place:
        """Take the last place without waiting; `Place.enter` waits, `Place.leave` gives it up."""
        place = place or Place(self)
        for key in keys:
            if self.try_enter(key):
                place.held.add(key)
            else:
                place.missing.add(key)
                self._row(key).append(place)
        return place

    def take_behind(self, key: TopicKey, joins: Callable[[Place], bool]) -> None:
        """Remove the places that wait for a key, up to the first that does not join; `Place.wake` continues them.

        A place of several keys must not join.
        """
        row = self._rows[key]
        while row and joins(row[0]):
            row.popleft().missing.clear()

    def is_last(self, place: Place, key: TopicKey) -> bool:
        row = self._rows.get(key)
        return row is not None and (row[-1] is place if row else key in place.held)

    def withdraw(self, place: Place, key: TopicKey) -> None:
        self._row(key).remove(place)

    def _row(self, key: TopicKey) -> deque[Place]:
        row = self._rows[key]
        if not isinstance(row, deque):
            row = self._rows[key] = deque()
        return row


class Place:
    """A place in the queues of its keys, see `KeyLock.queue`."""

    __slots__ = ("_lock", "_waiter", "held", "missing", "request")

    def __init__(self, lock: KeyLock, request: MessageRequest | None = None) -> None:
        self.request: MessageRequest | None = request  #: what is published with its only key
        self.held: set[TopicKey] = set()  #: keys whose lock it has
        self.missing: set[TopicKey] = set()  #: keys that it waits for
        self._lock = lock
        self._waiter: Waiter | EventWaiter | None = None

    async def enter(self, timeout: float) -> None:
        """Wait for all keys; an error or cancellation keeps the place. Raises PublishFailed."""
        if not self.missing:
            return
        with anyio.move_on_after(max(0.0, timeout)):
            await self.sleep()
        self.check_entered(timeout)

    def check_entered(self, timeout: float) -> None:
        """Raise PublishFailed if a key is missing after ``timeout`` seconds."""
        if self.missing:
            raise PublishFailed(
                f"not sent within {timeout:g} s, because earlier publishes of its key are still running",
                topic=next(iter(self.missing))[0],
            )

    def sleep(self) -> Awaitable[None]:
        """Wait until `wake` is called."""
        self._waiter = waiter = self._lock.tasks.new()
        return waiter

    def wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set()

    def grant(self, key: TopicKey) -> None:
        """Receive a key's lock."""
        self.missing.discard(key)
        self.held.add(key)
        if not self.missing:
            self.wake()

    def leave(self) -> None:
        """Release the keys, and stop waiting for others."""
        while self.missing:
            self._lock.withdraw(self, self.missing.pop())
        while self.held:
            self._lock.leave(self.held.pop())


_clock = time.monotonic

Group = tuple["Sequence[MessageRequest]", Batch, "Route", "Target", "PooledConnection"]
"""Publishes of one batch, and where it is sent."""


@define(eq=False)
class KeyGroups:
    """Publishes messages with a key."""

    _sender: Sender
    lock: KeyLock  #: shared by all publishes of the producer
    _start_soon: Callable[..., object]
    _deadlines: dict[Place, float] = field(factory=dict, init=False)  # of waiting places, earliest first
    _watched: bool = field(default=False, init=False)  # whether a task wakes places at their deadlines

    def waiting(
        self, key: TopicKey, body: bytes, headers: Mapping[str, str] | None, tag: str | None, trace_id: int | None
    ) -> MessageRequest | None:
        """Return the request of a message that waits for its key; None if it needs further checks now."""
        routes, topic = self._sender.routes, key[0]
        options = routes.topic_options.of(topic)
        if topic not in routes.by_topic or type(body) is not bytes or not 0 < len(body) <= options.max_message_size:
            return None
        # a message object costs as much as the rest of its request
        bare = headers is None and tag is None and trace_id is None
        return MessageRequest(
            options, topic, body if bare else OutgoingMessage(body, headers, tag, trace_id), key=key[1]
        )

    async def publish(self, request: MessageRequest, key: TopicKey) -> Receipt:
        """Publish a message after all earlier publishes of its key."""
        place = Place(self.lock, request)
        request.on_outcome = place.wake
        self.lock.queue((key,), place)
        leaves = True
        try:
            if place.missing:
                try:
                    await self._sleep(place)
                finally:
                    self._deadlines.pop(place, None)
                place.check_entered(self._sender.options.timeout)
            if place.held:
                group = self._group(request, key)
                if group is None:
                    return (await self._sender.publish(request))[0]
                self._start(place, group)
                leaves = False  # the group releases the key, even if this task is cancelled
        finally:
            if leaves:
                place.leave()
        while request.outcome is None:
            await place.sleep()  # the group bounds the time
        return request.result()

    def _sleep(self, place: Place) -> Awaitable[None]:
        """Wait as `Place.enter`, with one timer for all places: a cancel scope for each would double their cost."""
        if not self._watched:
            try:
                self._start_soon(self._watch_deadlines)
            except InvalidState:  # the producer closes
                return place.enter(self._sender.options.timeout)
            self._watched = True
        self._deadlines[place] = _clock() + self._sender.options.timeout
        return place.sleep()

    async def _watch_deadlines(self) -> None:
        deadlines = self._deadlines
        try:
            while deadlines:
                place, deadline = next(iter(deadlines.items()))
                now = _clock()
                if deadline <= now:
                    del deadlines[place]
                    place.wake()
                else:
                    await anyio.sleep(deadline - now)
        finally:
            self._watched = False

    def _start(self, place: Place, group: Group) -> None:
        try:
            self._start_soon(self._publish_group, place, *group)
        except InvalidState:
            for member in group[0]:
                member.settle(PublishFailed("not sent: the producer was closed", topic=member.topic))
            raise

    def _group(self, first: MessageRequest, key: TopicKey) -> Group | None:
        """Return a batch of a publish and the following publishes; None to send it alone."""
        topic = key[0]
        route = self._sender.routes.current(topic)
        late = _clock() - first.started > self._sender.options.timeout / 2  # others must not fail with its timeout
        if route is None or late or not first.joinable(route.meta):
            return None
        try:
            target = self._sender.choose(route, first)
        except NsqError:
            return None
        connection = target.node.connection
        if connection is None or not connection.usable or target.rest_until:
            return None
        batch = Batch(topic, target.partition, started=first.started)
        members: list[MessageRequest] = []

        def joins(request: MessageRequest | None) -> bool:
            if request is None or not request.joinable(route.meta):
                return False
            try:
                encoded = request.encoded(route.meta)
            except InvalidInput:
                return False  # its own attempt raises the error
            if not batch.has_room(*encoded, self._sender.options):
                return False
            batch.add(batch.count, *encoded)
            batch.started = min(batch.started, request.started)
            members.append(request)
            return True

        if not joins(first):
            return None
        self.lock.take_behind(key, lambda place: joins(place.request))
        return (members, batch, route, target, connection) if len(members) > 1 else None

    async def _publish_group(
        self,
        place: Place,
        members: Sequence[MessageRequest],
        batch: Batch,
        route: Route,
        target: Target,
        connection: PooledConnection,
    ) -> None:
        try:
            try:
                receipts = await self._sender.send(batch, target, connection)
            except NsqError as failure:
                if self._sender.settler is None or not outcome_unknown(failure):
                    await self._publish_alone(members, route, target, failure)
                    return
                # a batch is stored wholly or not at all
                receipts = await self._sender.publish_again(batch, route, target, failure)
            for member, receipt in zip(members, receipts, strict=True):
                member.settle(receipt)
            # the tasks of the members run first: what they publish next becomes one batch, not one message and a batch
            await checkpoint()
            await checkpoint()  # trio runs the tasks of a turn in any order
        except NsqError as error:
            for member in members:
                member.settle(copy(error))
        finally:
            place.leave()
            for member in members:
                if member.outcome is None:  # cut off when the producer closed
                    cut_off = "the producer was closed before the response to a batch of its key"
                    member.settle(delivery_unknown(cut_off, topic=member.topic))

    async def _publish_alone(
        self, members: Sequence[MessageRequest], route: Route, target: Target, failure: NsqError
    ) -> None:
        """Publish the members of a failed group one after another."""
        counts = failure.retryable or outcome_unknown(failure)  # otherwise the batch is refused, and nothing stored
        for member in members:
            try:
                again = self._sender.publish_again(member, route, target, failure) if counts else None
                member.settle((await (again or self._sender.publish(member)))[0])
            except NsqError as error:
                member.settle(error)


def keys_of(
    messages: Sequence[bytes | OutgoingMessage], key: str | bytes | int | None, partition: int | None
) -> set[bytes]:
    """Return the keys that decide partitions; empty if ``partition`` decides. Raises InvalidInput."""
    if partition is not None:
        return set()
    own = [message.key if isinstance(message, OutgoingMessage) else None for message in messages]
    keys = {key_bytes(each) for each in own if each is not None}
    if key is not None and None in own:
        keys.add(key_bytes(key))
    return keys
