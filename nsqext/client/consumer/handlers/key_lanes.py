"""Handle messages in parallel lanes that keep the order of each key (Key_Failover note).

A message that its handler requeues stays in this process: its key waits until it is handled again, and all other keys
continue. A *lost* message (it timed out, or its connection ended) keeps its place: newer messages of its key and
partition wait until the server has redelivered it. So the order holds with any server, if the channel has no other
consumer or is of type key_failover.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING
from zlib import crc32

from nsqext.client.consumer.handlers.batches import touch_due
from nsqext.client.consumer.handlers.partition_order import (
    KeyLaneOwner,
    PartitionOrder,
    Wait,
    WaitingKeys,
    WaitName,
    is_lost,
    owner_of,
)
from nsqext.client.consumer.handlers.workers import MessageQueue
from nsqext.dispatch.buckets import KeySharing
from nsqext.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nsqext.client.consumer.message import Message, Owner
    from nsqext.client.consumer.options import DeliveryOptions

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_FULL = 1.0  # seconds for which messages that wait for others may use up RDY, before some of them are requeued
_SETTLE = 0.2  # seconds for which the first messages of a partition are collected and sorted
_SETTLE_OWNED = 0.8  # the same, for a bucket of keys that another consumer may have left with many messages in flight
_RETURN = 0.5
"""Delay in seconds of the REQ for a message that waits for a lost one, times its requeues; original NSQ only."""
_MOST_RETURNED = 10_000
_MOST_RETURNED_BYTES = 64 << 20
"""Most messages and bytes of a partition that are requeued and keep their places; with more, the order is given up."""
_FAILOVER_WAIT = 2.0
"""Seconds for which messages of a key_failover channel wait for the redelivery of an earlier one of their key, before
the connection is ended: the server then redelivers all of them in order."""


class KeyLanes:
    """Queues of messages, one for each worker; the messages of a key are always in the same one."""

    def __init__(
        self, count: int, key: Callable[[Message], bytes], clock: Callable[[], float], delivery: DeliveryOptions
    ) -> None:
        self.lanes: list[MessageQueue] = [MessageQueue() for _ in range(count)]
        self.key: Callable[[Message], bytes] = key  # reads the key of a message
        self.clock: Callable[[], float] = clock  # gives the time
        self._redelivery_wait = delivery.redelivery_wait
        self._gap_wait = delivery.gap_wait
        self._orders: dict[tuple[str, int | str] | Owner, PartitionOrder] = {}
        self._owners: dict[PartitionOrder, KeyLaneOwner] = {}
        self._waiting = WaitingKeys(key)
        self._waits = self._waiting.waits
        self._unstarted: list[Message] = []
        # messages of the batches that handlers have, and when those that were requeued are due
        self.handed_out: dict[Message, float | None] = {}

    @property
    def waiting(self) -> int:
        """Number of messages in flight that wait for their key, or for unseen messages."""
        return sum(not is_lost(message) for message in self._blocked())

    def count_in_flight(self) -> int:
        """Return how many messages are in lanes, or wait for others."""
        return sum(len(lane.messages) for lane in self.lanes) + self.waiting

    # Receiving

    def put(self, messages: list[Message]) -> None:
        """Queue the messages of one read of a subscription; raises InvalidInput if the key of one cannot be read.

        The messages before that one are queued; it and those after it are kept for `requeue_remaining`.
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
            settle = _SETTLE_OWNED if order.key_sharing is KeySharing.TAGS else _SETTLE
            order.gap_due = self.clock() + (settle if order.settling else self._gap_wait)
        for lane in woken:
            lane.wake()

    def _put_one(self, order: PartitionOrder, message: Message, woken: dict[MessageQueue, None]) -> None:
        if order.returned:
            message.attempts -= order.returned.get(message.id, 0)
        known = order.unfinished.get(message.id)
        if known is not None and known.timestamp != message.timestamp:
            self._forget_replaced(order, known, message)
            known = None
        if known is not None:
            self._redelivered(order, known, message)
        elif order.was_finished(message):
            logger.info("finished again, its first FIN was lost: %r", message, extra={"topic": message.topic})
            message.finish_now()
        else:
            self._accept_all(order, order.receive(message), woken)

    def _accept_all(self, order: PartitionOrder, messages: list[Message], woken: dict[MessageQueue, None]) -> None:
        accepted = iter(messages)
        for message in accepted:
            try:
                self._accept(order, message, woken)
            except InvalidInput:
                self._unstarted += (message, *accepted)
                raise

    def _owner(self, owner: Owner) -> KeyLaneOwner:
        name = _name_of(owner)
        order = self._orders.get(name)
        if order is None:
            order = self._orders[name] = PartitionOrder(owner.key_sharing)
        found = self._owners.get(order)
        if found is None or found.owner is not owner:
            found = self._owners[order] = KeyLaneOwner(owner, order, self.delay)
            if order.subscribe(found, self.clock()):
                self._forget_lost(order)
            else:
                due = self._redelivery_due(order)
                for wait in self._waiting.of(order):
                    wait.due = due
        return found

    def _redelivery_due(self, order: PartitionOrder) -> float:
        """Return when a wait that begins now for a lost message ends."""
        return max(self.clock(), order.held_from) + self._wait_of(order)

    def _wait_of(self, order: PartitionOrder) -> float:
        return _FAILOVER_WAIT if order.ordered_by_server else self._redelivery_wait

    def _accept(self, order: PartitionOrder, message: Message, woken: dict[MessageQueue, None]) -> None:
        key = self.key(message)
        order.unfinished[message.id] = message
        if self._waits:
            wait = self._waiting.find(key, order)
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

    def _lane(self, key: bytes) -> MessageQueue:
        return self.lanes[lane_number(key, len(self.lanes))]

    def _redelivered(self, order: PartitionOrder, message: Message, delivery: Message) -> None:
        """Continue a message that keeps its place, or whose handler runs, with its new delivery."""
        key = self.key(message)
        message.renew(delivery)
        delayed = self._waits.get((key, None))
        requeued = (delayed is not None and delayed.message is message) or self.handed_out.get(message) is not None
        if message.answered and not requeued:
            logger.info("finished again, its first FIN was lost: %r", message, extra={"topic": message.topic})
            message.finish_now()
            return
        wait = self._waits.get((key, order))
        if wait is not None and wait.message is message:
            self._waiting.end((key, order))

    def forget(self, owner: Owner) -> None:
        """Forget the messages of a connection that ended, except for those whose handlers run.

        The server redelivers them to any consumer, which handles them from the first unfinished one.
        """
        order = self._orders.pop(_name_of(owner), None)
        if order is not None:
            self._owners.pop(order, None)
            self._forget_lost(order)

    # Waiting

    def delay(self, message: Message, delay: float) -> None:
        """Handle a message again after a delay in seconds, and the later ones of its key after it.

        One of a batch waits from the end of its handler on: that may answer further messages of the key.
        """
        key, due = self.key(message), self.clock() + delay
        if message in self.handed_out:
            self.handed_out[message] = due
        else:
            self.delay_all(key, [message], self._lane(key), due)

    def delay_all(self, key: bytes, messages: list[Message], lane: MessageQueue, due: float) -> None:
        """Handle messages of a key again at a time, in their order, and the later ones of the key after them."""
        kept = [message for message in messages if not self._is_forgotten(message)]
        if kept:
            self._waiting.delay(key, kept, lane, due)

    def _is_forgotten(self, message: Message) -> bool:
        """Return whether the connection of a message has ended, and the server redelivers it to any consumer."""
        order = owner_of(message).order
        return order.key_sharing is KeySharing.TAGS and order not in self._owners

    def expired(self, message: Message) -> None:
        """Keep the place of a message that was lost before its handler was called."""
        key = self.key(message)
        self._waiting.lose(key, message, self._lane(key), self._redelivery_due(owner_of(message).order))

    def tick(self, now: float) -> None:
        """Handle messages again whose delay has passed, end waits that took too long, and touch waiting messages."""
        for wait in self._waits.values():
            if not wait.lost:
                wait.message.answered = False  # its handler requeued it, and no REQ was sent
        if not self.lanes[0].stopped:
            for entry in self._waiting.due(now):
                self._end_wait(*entry)
            for order in self._orders.values():
                self._watch(order, now)
        touch_due(self._blocked(), now)
        touch_due((message for message, due in self.handed_out.items() if due is not None), now, requeued=True)

    def _end_wait(self, name: WaitName, wait: Wait) -> None:
        message = wait.message
        order = owner_of(message).order
        if wait.lost and order.ordered_by_server:
            self._end_failover_wait(wait)
        elif wait.lost and not self._can_receive(order):
            wait.due = self._redelivery_due(order)
        elif wait.lost:
            lost = [message, *(other for other in wait.behind if _is_gone(other))]
            wait.behind = [other for other in wait.behind if not _is_gone(other)]
            for other in lost:
                owner_of(other).order.unfinished.pop(other.id, None)
            logger.warning(
                "%d messages of a key were not redelivered within %g s, later ones are handled first: %r",
                len(lost),
                self._redelivery_wait,
                message,
                extra={"topic": message.topic, "partition": message.partition},
            )
            self._waiting.end(name, without_first=True)
        else:
            message.answered = False
            if not is_lost(message):
                message.attempts += 1
            self._waiting.end(name)  # if it is lost, its worker calls `expired`

    def _end_failover_wait(self, wait: Wait) -> None:
        """End the connection if messages wait for one that was not redelivered.

        Another consumer may have the key, but this one cannot know: the server may have sent the messages that wait,
        and further ones that are still to be received, before it noticed the timeout. On a new connection it starts
        with the first unfinished message of each key. While nothing waits, the place is kept.
        """
        wait.due = inf
        if not all(map(is_lost, wait.behind)):
            owner = owner_of(wait.message).order.owner
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
        behind = (message for wait in self._waiting.of(order) for message in wait.behind)
        return len(order.early) + sum(not is_lost(message) for message in behind)

    def _watch(self, order: PartitionOrder, now: float) -> None:
        """End the wait for unseen messages; make room where messages that wait use up RDY."""
        owner = order.owner
        if owner is None or owner.horizon == inf:
            return
        order.forget_handled(now - self._wait_of(order))
        if order.ordered_by_server:
            self._bound_lost(order)
            return
        if order.gap_due is not None:
            if not order.settling and not self._can_receive(order):
                order.gap_due = now + self._gap_wait
            elif order.gap_due <= now and not (order.settling and owner.taking_over):
                self._end_gap(order)
        blocked = self._count_blocked(order)
        if order.returned:
            count, size = order.forget_returned()
            if count > _MOST_RETURNED or size > _MOST_RETURNED_BYTES:
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

    def _bound_lost(self, order: PartitionOrder) -> None:
        """End the connection when more messages were lost to other consumers than could be in flight."""
        owner, lost = order.owner, sum(1 + len(wait.behind) for wait in self._waiting.of(order))
        if owner is not None and lost > 2 * order.most_ready:
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
        self._accept_all(order, messages, woken)
        for lane in woken:
            lane.wake()

    def _make_room(self, order: PartitionOrder) -> None:
        """Requeue the newer half of the messages that wait for others; they keep their places."""
        for message in order.drop_newest_early():
            self._return(message)
        for wait in self._waiting.of(order):
            behind = [message for message in wait.behind if not is_lost(message)]
            for message in behind[len(behind) // 2 :]:
                self._return(message)

    def _return(self, message: Message) -> None:
        """Requeue a message that waits for another one.

        The original NSQ redelivers a lost message when it has timed out, behind all messages in its queue. The messages
        that wait for it are requeued with a delay until then, so that the server can deliver the queue.
        """
        owner = owner_of(message)
        times, delay = owner.order.note_returned(message), 0.0
        if message.partition < 0:
            delay = max(_RETURN * times, owner.order.held_from - self.clock())
        owner.send_requeue(message, delay)
        message.answered, message.received = False, -inf

    def _forget_replaced(self, order: PartitionOrder, known: Message, message: Message) -> None:
        """Forget a message whose id the server has given to another one, and those that were behind it in the queue."""
        logger.warning(
            "the server has lost %r and stored another message in its place", known, extra={"topic": known.topic}
        )
        offset = min(known.offset, message.offset)
        order.forget_behind(offset)
        self._forget_lost(order, offset)
        order.unfinished.pop(known.id, None)  # its handler may run; the message that replaced it may be lost, too

    def _forget_lost(self, order: PartitionOrder, offset: int = -1) -> None:
        """Remove the lost messages of a partition behind an offset, except for those whose handlers run."""

        def gone(message: Message) -> bool:
            return owner_of(message).order is order and is_lost(message) and message.offset >= offset

        for message in self._waiting.remove(self.lanes, gone):
            order.unfinished.pop(message.id, None)

    def _blocked(self) -> Iterator[Message]:
        """Return the messages that wait for others, and so are in no lane."""
        yield from self._waiting.messages()
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

        Only for those that are ``wanted``: the server redelivers the others when the connection ends.
        """
        now = self.clock()
        remaining = [(message, 0.0) for message in self._unstarted]
        for order in self._orders.values():
            remaining += [(message, 0.0) for message in order.early.values()]
            order.early.clear()
        for wait in self._waits.values():
            delay = 0.0 if wait.lost else max(0.0, wait.due - now)
            remaining += [(message, delay) for message in (wait.message, *wait.behind)]
        self._waits.clear()
        self._unstarted = []
        for message, delay in remaining:
            if wanted(message):
                owner_of(message).send_requeue(message, delay)

    def queued(self) -> Iterator[Message]:
        """Return the messages in the lanes, without those that wait for their key."""
        for lane in self.lanes:
            yield from lane.messages


def _name_of(owner: Owner) -> tuple[str, int | str] | Owner:
    """Return what an order belongs to: a partition, or one connection that has all messages of its keys."""
    if owner.key_sharing is KeySharing.TAGS:
        return owner
    return (owner.topic, owner.partition if owner.partition >= 0 else owner.node)


def _is_gone(message: Message) -> bool:
    """Return whether a message is lost, and does not arrive again because it was requeued."""
    return is_lost(message) and message.id not in owner_of(message).order.returned


def lane_number(key: bytes, count: int) -> int:
    """Return the lane of a key.

    The hash is independent of the one that divides keys among consumers (MurmurHash3). Otherwise a consumer whose keys
    are a range of hashes would use only a part of its lanes.
    """
    return (crc32(key) * 0x9E3779B1 >> 8) % count
