"""Handle messages in parallel lanes that keep the order of each key (Key_Failover note).

A message that its handler requeues stays in this process: its key waits until it is handled again, and all other keys
continue. A *lost* message (it timed out, or its connection ended) keeps its place: newer messages of its key and
partition wait until the server has redelivered it. So the order holds with any server, if the channel has no other
consumer or is of type key_failover.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, cast
from zlib import crc32

from attrs import define, field

from nsqext.client.consumer.handlers.in_flight import touch_due
from nsqext.client.consumer.handlers.message_queue import MessageQueue
from nsqext.client.consumer.handlers.partition_order import PartitionOrder, is_lost
from nsqext.errors import InvalidInput, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from nsqext.client.consumer.message import Message, Owner
    from nsqext.client.consumer.options import DeliveryOptions, KeyOf

__all__ = ("KeyLaneOwner", "KeyLanes", "key_reader")

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_FULL = 1.0
"""Seconds for which messages that wait for others may use up RDY, before some of them are requeued."""
_SETTLE = 0.2
"""Seconds for which the first messages of a partition are collected and sorted."""
_RETURN = 0.5
"""Delay in seconds of the REQ for a message that waits for a lost one, times its requeues; original NSQ only."""
_MOST_RETURNED = 10_000
_MOST_RETURNED_BYTES = 64 << 20
"""Most messages and bytes of a partition that are requeued and keep their places; with more, the order is given up."""
_FAILOVER_WAIT = 2.0
"""Seconds for which messages of a key_failover channel wait for the redelivery of an earlier one of their key, before
the connection is ended: the server then redelivers all of them in order."""


def key_reader(key: str | KeyOf) -> Callable[[Message], bytes]:
    """Return a function that reads the key of a message from a header, or by the user's function.

    The key of a message without one is its id.
    """

    def read(message: Message) -> bytes:
        try:
            found = message.header_value(key) if isinstance(key, str) else message.with_unpacked_body(key)
        except ProtocolError:  # a header that servers refuse to store
            return message.id
        if found is None:
            return message.id
        return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else bytes(found)

    return read


def lane_number(key: bytes, count: int) -> int:
    """Return the lane of a key.

    The hash is independent of the one that divides keys among consumers (MurmurHash3). Otherwise a consumer whose keys
    are a range of hashes would use only a part of its lanes.
    """
    return (crc32(key) * 0x9E3779B1 >> 8) % count


class KeyLaneOwner:
    """The owner of messages in lanes: passes answers on to their subscription, but delays requeued messages itself.

    Args:
        owner: the subscription.
        order: of its partition.
        lanes: where requeued messages wait.
    """

    __slots__ = (
        "_lanes",
        "ignore_lost",
        "in_order",
        "max_msg_timeout",
        "moved",
        "msg_timeout",
        "node",
        "number",
        "order",
        "owner",
        "partition",
        "topic",
    )

    def __init__(self, owner: Owner, order: PartitionOrder, lanes: KeyLanes) -> None:
        self.owner: Owner = owner
        self.order: PartitionOrder = order
        self.topic: str = owner.topic
        self.partition: int = owner.partition
        self.node: str = owner.node
        self.in_order: bool = owner.in_order
        self.moved: bool = owner.moved
        self.number: int = owner.number
        self.msg_timeout: float = owner.msg_timeout
        self.max_msg_timeout: float = owner.max_msg_timeout
        self.ignore_lost: bool = owner.ignore_lost
        self._lanes = lanes

    @property
    def horizon(self) -> float:
        """Messages received before this time are not in flight any more."""
        return self.owner.horizon

    @horizon.setter
    def horizon(self, time: float) -> None:
        self.owner.horizon = time

    @property
    def ready(self) -> int:
        """Messages that the server may have in flight."""
        return self.owner.ready

    def finish(self, message: Message) -> None:
        """Send FIN."""
        self.owner.finish(message)
        self.order.finish(message)

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Delay the message in this process, and the later ones of its key; other keys continue."""
        self._lanes.delay(message, delay)

    def send_requeue(self, messages: Iterable[Message], delay: float = 0.0) -> None:
        """Send REQ with a delay in seconds for those of the messages that are in flight."""
        for message in messages:
            if not is_lost(message):
                self.owner.requeue(message, delay, backoff=False)
                message.mark_answered()

    def touch(self, message: Message) -> None:
        """Send TOUCH."""
        self.owner.touch(message)

    def record_outcome(self, failed: bool) -> None:
        """Do nothing: a failure delays its key only."""

    def expired(self, message: Message) -> bool:
        """Return whether the message is not in flight any more."""
        return self.owner.expired(message)

    def reset(self, reason: str) -> None:
        """End the connection; the consumer connects again."""
        self.owner.reset(reason)


@define(eq=False)
class _Wait:
    """A key whose first message cannot be handled yet.

    Attributes:
        message: its first message.
        lane: the lane of the key.
        due: when the message is handled again, or for a lost one, when the wait for its redelivery ends. Infinite for a
            lost message of a key_failover channel while no other message waits behind it.
        lost: whether the server has to redeliver the message first.
        behind: later messages of the key.
    """

    message: Message
    lane: MessageQueue
    due: float
    lost: bool
    behind: list[Message] = field(factory=list)


_WaitKey = tuple[bytes, PartitionOrder | None]
"""A key, and the partition whose messages of this key wait for a lost one; None if all messages of the key wait."""


class KeyLanes:
    """Queues of messages, one for each worker; the messages of a key are always in the same one.

    Args:
        count: number of lanes, one for each worker.
        key: reads the key of a message.
        clock: gives the time.
        delivery: how long to wait for lost messages.
        ordered_by_server: the channel is of type key_failover: lost messages are redelivered in order, and possibly to
            another consumer.

    Attributes:
        lanes: the queues.
    """

    def __init__(
        self,
        count: int,
        key: Callable[[Message], bytes],
        clock: Callable[[], float],
        delivery: DeliveryOptions,
        *,
        ordered_by_server: bool = False,
    ) -> None:
        self.lanes: list[MessageQueue] = [MessageQueue() for _ in range(count)]
        self._key = key
        self._clock = clock
        self._ordered_by_server = ordered_by_server
        self._redelivery_wait = _FAILOVER_WAIT if ordered_by_server else delivery.redelivery_wait
        self._gap_wait = delivery.gap_wait
        self._orders: dict[tuple[str, int | str], PartitionOrder] = {}
        self._owners: dict[PartitionOrder, KeyLaneOwner] = {}
        self._waits: dict[_WaitKey, _Wait] = {}
        self._unstarted: list[Message] = []

    @property
    def waiting(self) -> int:
        """Number of messages in flight that wait for their key, or for unseen messages."""
        return sum(not is_lost(message) for message in self._blocked())

    # Receiving

    def put(self, messages: list[Message]) -> None:
        """Queue the messages of one read of a subscription.

        Raises:
            InvalidInput: the key of a message cannot be read. The messages before it are queued; it and the messages
                after it are kept for `requeue_remaining`.
        """
        if not messages:
            return
        owner = self._owner(messages[0].owner)
        order = owner.order
        order.note_ready(owner.ready)
        woken: dict[MessageQueue, None] = {}
        for message in messages:
            message.owner = owner
        received = iter(messages)
        try:
            for message in received:
                self._put_one(order, message, woken)
        except InvalidInput:
            self._unstarted += received
            raise
        if order.early and order.gap_due is None:
            order.gap_due = self._clock() + (_SETTLE if order.settling else self._gap_wait)
        for lane in woken:
            lane.wake()

    def _put_one(self, order: PartitionOrder, message: Message, woken: dict[MessageQueue, None]) -> None:
        if order.returned:
            message.attempts -= order.returned.get(message.id, 0)
        known = order.unfinished.get(message.id)
        if known is not None and known.timestamp != message.timestamp:
            self._forget_replaced(known, message)
            known = None
        if known is not None:
            self._redelivered(known, message)
        elif order.was_finished(message):
            logger.info("finished again, its first FIN was lost: %r", message, extra={"topic": message.topic})
            message.finish_now()
        else:
            self._accept_all(order.receive(message), woken)

    def _accept_all(self, messages: list[Message], woken: dict[MessageQueue, None]) -> None:
        accepted = iter(messages)
        for message in accepted:
            try:
                self._accept(message, woken)
            except InvalidInput:
                self._unstarted += (message, *accepted)
                raise

    def _owner(self, owner: Owner) -> KeyLaneOwner:
        name = (owner.topic, owner.partition if owner.partition >= 0 else owner.node)
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = PartitionOrder(ordered_by_server=self._ordered_by_server)
        found = self._owners.get(order)
        if found is None or found.owner is not owner:
            found = self._owners[order] = KeyLaneOwner(owner, order, self)
            if order.subscribe(found, self._clock()):
                self._forget_lost(order)
            else:
                due = self._redelivery_due(order)
                for (_, partition), wait in self._waits.items():
                    if partition is order:
                        wait.due = due
        return found

    def _redelivery_due(self, order: PartitionOrder) -> float:
        """Return when a wait that begins now for a lost message ends."""
        return max(self._clock(), order.held_from) + self._redelivery_wait

    def _accept(self, message: Message, woken: dict[MessageQueue, None]) -> None:
        key = self._read(message)
        order = _order_of(message)
        order.unfinished[message.id] = message
        if self._waits:
            wait = self._waits.get((key, None)) or self._waits.get((key, order))
            if wait is not None:
                wait.behind.append(message)
                if wait.due == inf:
                    wait.due = self._redelivery_due(order)
                if wait.lost and message.partition < 0:
                    self._return(message)
                return
        lane = self._lane(key)
        if not lane.stopped:
            lane.messages.append(message)
            woken[lane] = None

    def _read(self, message: Message) -> bytes:
        try:
            return self._key(message)
        except Exception as error:
            raise InvalidInput(
                f"the key function failed for {message!r}: {error!r}",
                topic=message.topic,
                partition=message.partition,
                hint="the function key= must return str, bytes or None",
            ) from error

    def _lane(self, key: bytes) -> MessageQueue:
        return self.lanes[lane_number(key, len(self.lanes))]

    def _redelivered(self, message: Message, delivery: Message) -> None:
        """Continue a message that keeps its place, or whose handler runs, with its new delivery."""
        key = self._read(message)
        order = _order_of(delivery)
        message.renew(delivery)
        delayed = self._waits.get((key, None))
        if message.answered and (delayed is None or delayed.message is not message):
            logger.info("finished again, its first FIN was lost: %r", message, extra={"topic": message.topic})
            message.finish_now()
            return
        wait = self._waits.get((key, order))
        if wait is not None and wait.message is message:
            del self._waits[key, order]
            self._resume(key, wait)

    # Waiting

    def delay(self, message: Message, delay: float) -> None:
        """Handle a message again after a delay in seconds, and the later ones of its key after it."""
        key = self._read(message)
        wait = self._waits[key, None] = _Wait(message, self._lane(key), self._clock() + delay, lost=False)
        wait.behind = self._take(wait.lane, lambda other: self._read(other) == key)

    def expired(self, message: Message) -> None:
        """Keep the place of a message that was lost before its handler was called."""
        key, order = self._read(message), _order_of(message)
        wait = _Wait(message, self._lane(key), self._redelivery_due(order), lost=True)
        wait.behind = self._take(wait.lane, lambda other: _order_of(other) is order and self._read(other) == key)
        self._waits[key, order] = wait

    def _take(self, lane: MessageQueue, wanted: Callable[[Message], bool]) -> list[Message]:
        """Remove messages from a lane and return them."""
        taken: list[Message] = []
        others: list[Message] = []
        for message in lane.messages:
            (taken if wanted(message) else others).append(message)
        lane.messages.clear()
        lane.messages.extend(others)
        return taken

    def _resume(self, key: bytes, wait: _Wait, *, without_first: bool = False) -> None:
        """Return the messages of a key to its lane, in front of the others."""
        row = wait.behind if without_first else [wait.message, *wait.behind]
        delayed = self._waits.get((key, None))
        if delayed is not None:
            delayed.behind[:0] = row
            return
        ready: list[Message] = []
        for message in row:
            lost = self._waits.get((key, _order_of(message)))
            (ready if lost is None else lost.behind).append(message)
        wait.lane.messages.extendleft(reversed(ready))
        wait.lane.wake()

    def tick(self, now: float) -> None:
        """Handle messages again whose delay has passed, end waits that took too long, and touch waiting messages."""
        for wait in self._waits.values():
            if not wait.lost:
                wait.message.answered = False  # its handler requeued it, and no REQ was sent
        if not self.lanes[0].stopped:
            for entry in [entry for entry in self._waits.items() if entry[1].due <= now]:
                self._end_wait(*entry, now)
            for order in self._orders.values():
                self._watch(order, now)
        touch_due(self._blocked(), now)

    def _end_wait(self, name: _WaitKey, wait: _Wait, now: float) -> None:
        key, message = name[0], wait.message
        if wait.lost and self._ordered_by_server:
            self._end_failover_wait(wait)
            return
        if wait.lost and not self._can_receive(_order_of(message)):
            wait.due = self._redelivery_due(_order_of(message))
            return
        del self._waits[name]
        if not wait.lost:
            message.answered = False
            if not is_lost(message):
                message.attempts += 1
            self._resume(key, wait)  # if it is lost, its worker calls `expired`
            return
        returned = _order_of(message).returned  # these arrive again
        lost = [message, *(other for other in wait.behind if is_lost(other) and other.id not in returned)]
        wait.behind = [other for other in wait.behind if not is_lost(other) or other.id in returned]
        for other in lost:
            _order_of(other).unfinished.pop(other.id, None)
        logger.warning(
            "%d messages of a key were not redelivered within %g s, later ones are handled first: %r",
            len(lost),
            self._redelivery_wait,
            message,
            extra={"topic": message.topic, "partition": message.partition},
        )
        self._resume(key, wait, without_first=True)

    def _end_failover_wait(self, wait: _Wait) -> None:
        """End the connection if messages wait for one that was not redelivered.

        Another consumer may have the key, but this one cannot know: the server may have sent the messages that wait,
        and further ones that are still to be received, before it noticed the timeout. On a new connection it starts
        with the first unfinished message of each key. While nothing waits, the place is kept.
        """
        wait.due = inf
        if not all(map(is_lost, wait.behind)):
            owner = _order_of(wait.message).owner
            if owner is not None:
                owner.reset("a message timed out and was not redelivered, but later ones of its key were received")

    def _can_receive(self, order: PartitionOrder) -> bool:
        """Return whether the server can deliver a message; the time of a wait for redelivery passes only while it can.

        It cannot while it is disconnected or paused, or while as many messages as RDY allows are being handled. It can
        where messages that wait for others use up RDY, because `_make_room` requeues some of them.
        """
        owner = order.owner
        if owner is None or owner.horizon == inf or not owner.ready:
            return False
        return order.in_flight() < owner.ready or self._count_blocked(order) * 2 >= owner.ready

    def _count_blocked(self, order: PartitionOrder) -> int:
        waits = [wait for (_, partition), wait in self._waits.items() if partition is order]
        return len(order.early) + sum(not is_lost(message) for wait in waits for message in wait.behind)

    def _watch(self, order: PartitionOrder, now: float) -> None:
        """End the wait for unseen messages; make room where messages that wait use up RDY."""
        owner = order.owner
        if owner is None or owner.horizon == inf:
            return
        order.forget_handled(now - self._redelivery_wait)
        if self._ordered_by_server:
            self._bound_lost(order)
            return
        if order.gap_due is not None:
            if not order.settling and not self._can_receive(order):
                order.gap_due = now + self._gap_wait
            elif order.gap_due <= now:
                self._end_gap(order)
        blocked = self._count_blocked(order)
        if order.returned:
            order.forget_returned()
            if len(order.returned) > _MOST_RETURNED or order.returned_bytes > _MOST_RETURNED_BYTES:
                self._give_up(order)
        if order.settling or not blocked or order.in_flight() < owner.ready:
            order.full_since = None
        elif order.full_since is None:
            order.full_since = now
        elif now - order.full_since >= _FULL:
            order.full_since = None
            self._make_room(order)

    def _give_up(self, order: PartitionOrder) -> None:
        """Stop waiting for the lost messages of a partition, because too many messages wait for them."""
        owner = order.owner
        logger.warning(
            "%d messages of %s wait for a redelivery of earlier ones of their keys: that order is given up",
            len(order.returned),
            "" if owner is None else owner.topic,
            extra={} if owner is None else {"topic": owner.topic, "partition": owner.partition},
        )
        self._forget_lost(order)
        order.forget_returned()

    def _bound_lost(self, order: PartitionOrder) -> None:
        """End the connection when more messages were lost to other consumers than could be in flight."""
        waits = [wait for (_, partition), wait in self._waits.items() if partition is order]
        owner = order.owner
        if owner is not None and sum(1 + len(wait.behind) for wait in waits) > 2 * order.most_ready:
            owner.reset("messages of many keys timed out and were not redelivered")

    def _end_gap(self, order: PartitionOrder) -> None:
        woken: dict[MessageQueue, None] = {}
        settling = order.settling
        messages = order.end_gap()
        if messages and not settling:
            logger.warning(
                "messages before this one were not received within %g s, later ones are handled first: %r",
                self._gap_wait,
                messages[0],
                extra={"topic": messages[0].topic, "partition": messages[0].partition},
            )
        self._accept_all(messages, woken)
        for lane in woken:
            lane.wake()

    def _make_room(self, order: PartitionOrder) -> None:
        """Requeue the newer half of the messages that wait for others; they keep their places."""
        for message in order.drop_newest_early():
            self._return(message)
        for wait in [wait for (_, partition), wait in self._waits.items() if partition is order]:
            behind = [message for message in wait.behind if not is_lost(message)]
            for message in behind[len(behind) // 2 :]:
                self._return(message)

    def _return(self, message: Message) -> None:
        """Requeue a message that waits for another one.

        The original NSQ redelivers a lost message when it has timed out, behind all messages in its queue. The messages
        that wait for it are requeued with a delay until then, so that the server can deliver the queue.
        """
        order = _order_of(message)
        times, delay = order.note_returned(message), 0.0
        if message.partition < 0:
            delay = max(_RETURN * times, order.held_from - self._clock())
        self._send_requeue(message, delay)
        message.answered, message.received = False, -inf

    def _send_requeue(self, message: Message, delay: float = 0.0) -> None:
        if isinstance(message.owner, KeyLaneOwner):
            message.owner.send_requeue([message], delay)

    def _forget_replaced(self, known: Message, message: Message) -> None:
        """Forget a message whose id the server has given to another one, and those that were behind it in the queue."""
        order, offset = _order_of(known), min(known.offset, message.offset)
        logger.warning(
            "the server has lost %r and stored another message in its place", known, extra={"topic": known.topic}
        )
        order.forget_behind(offset)
        self._forget_lost(order, offset)
        order.unfinished.pop(known.id, None)  # its handler may run

    def _forget_lost(self, order: PartitionOrder, offset: int = -1) -> None:
        """Remove the lost messages of a partition behind an offset, except for those whose handlers run."""

        def gone(message: Message) -> bool:
            return _order_of(message) is order and is_lost(message) and message.offset >= offset

        for lane in self.lanes:
            for message in self._take(lane, gone):
                order.unfinished.pop(message.id, None)
        for name, wait in list(self._waits.items()):
            for message in filter(gone, wait.behind):
                order.unfinished.pop(message.id, None)
            wait.behind = [message for message in wait.behind if not gone(message)]
            if gone(wait.message):
                order.unfinished.pop(wait.message.id, None)
                del self._waits[name]
                self._resume(name[0], wait, without_first=True)

    def _blocked(self) -> Iterator[Message]:
        """Return the messages that wait for others, and so are in no lane."""
        for wait in self._waits.values():
            yield wait.message
            yield from wait.behind
        for order in self._orders.values():
            yield from order.early.values()

    # Closing

    def stop(self) -> None:
        """Hand out no further message."""
        self._unstarted += self.queued()
        for lane in self.lanes:
            lane.stop()

    def requeue_remaining(self, wanted: Callable[[Message], bool]) -> None:
        """Send REQ for messages that were not handled, delayed ones with the rest of their delay; call `stop` first.

        Args:
            wanted: selects messages; the server redelivers the others when the connection ends.
        """
        now = self._clock()
        waits, self._waits = self._waits, {}
        remaining = [(message, 0.0) for message in self._unstarted]
        for order in self._orders.values():
            remaining += [(message, 0.0) for message in order.early.values()]
            order.early.clear()
        for wait in waits.values():
            delay = 0.0 if wait.lost else max(0.0, wait.due - now)
            remaining += [(message, delay) for message in (wait.message, *wait.behind)]
        self._unstarted = []
        for message, delay in remaining:
            if wanted(message):
                self._send_requeue(message, delay)

    def queued(self) -> Iterator[Message]:
        """Return the messages in the lanes, without those that wait for their key."""
        for lane in self.lanes:
            yield from lane.messages


def _order_of(message: Message) -> PartitionOrder:
    return cast("KeyLaneOwner", message.owner).order
