"""Handle messages in parallel lanes that keep the order of each key (Key_Failover note).

A requeued message stays in this process, and its key waits until it is handled again. A *lost* message (timed out, or
its connection ended) keeps its place: later messages of its key and partition wait for its redelivery. This holds with
any server, if the channel has no other consumer or is of type key_failover.
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING

from nsqext.client.consumer.handlers.message_keys import lane_number
from nsqext.client.consumer.handlers.partition_order import (
    KeyLaneOwner,
    PartitionOrder,
    Wait,
    in_order_received,
    is_gone,
    name_of,
    owner_of,
    take_where,
)
from nsqext.client.consumer.handlers.workers import MessageQueue
from nsqext.client.consumer.message import KeySharing, touch_due
from nsqext.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nsqext.client.consumer.message import Message, Owner
    from nsqext.client.consumer.options import DeliveryOptions

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_FULL = 1.0  # seconds for which waiting messages may use up RDY before some are requeued
# least seconds of `settle_wait` for a key bucket, which another consumer may have left with many messages in flight
_SETTLE_OWNED = 0.8
_RETURN = 0.5  # seconds, times its requeues, of the REQ for a message that waits for a lost message; original NSQ only
MOST_RETURNED: int = 10_000
"""Messages of a partition that are requeued and keep their places, at most; beyond, the order is given up."""
MOST_RETURNED_BYTES: int = 64 << 20
"""Their bytes, at most."""
# seconds for which messages of a key_failover channel wait for a redelivery before the connection is ended: then the
# server redelivers all in order
_FAILOVER_WAIT = 2.0


def _finish_again(message: Message) -> None:
    logger.info("finished again, its first FIN was lost: %r", message, extra={"topic": message.topic})
    message.finish_now()


class KeyLanes:
    """Queues of messages, one per worker; each key has one queue."""

    def __init__(
        self, count: int, key: Callable[[Message], bytes], clock: Callable[[], float], delivery: DeliveryOptions
    ) -> None:
        self.lanes: list[MessageQueue] = [MessageQueue() for _ in range(count)]
        self.key: Callable[[Message], bytes] = key
        self.clock: Callable[[], float] = clock
        self.is_handled: Callable[[Message], bool] = lambda message: True  #: whether its handler runs, or it is kept
        self._redelivery_wait = delivery.redelivery_wait
        self._gap_wait = delivery.gap_wait
        self._settle_wait = delivery.settle_wait
        self._orders: dict[tuple[str, int | str] | Owner, PartitionOrder] = {}
        self._owners: dict[PartitionOrder, KeyLaneOwner] = {}
        self._delayed: dict[bytes, Wait] = {}  # keys whose first message was requeued
        self._unstarted: list[Message] = []
        # messages of the batches that handlers have, and when requeued messages are due
        self._handed_out: dict[Message, float | None] = {}
        self._batches: dict[MessageQueue, dict[Message, bytes]] = {}  # these by lane, in order, with their keys

    @property
    def waiting(self) -> int:
        """Number of messages in flight that wait for their key or for unseen messages."""
        return sum(not message.lost for message in self._blocked())

    def count_in_flight(self) -> int:
        """Return the number of messages that are in lanes or wait."""
        return sum(len(lane.messages) for lane in self.lanes) + self.waiting

    # Receiving

    def put(self, messages: list[Message]) -> None:
        """Queue the messages of a read.

        Raises InvalidInput if a key cannot be read: messages before it are queued, the rest is kept for
        `requeue_remaining`.
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
            settle = max(self._settle_wait, _SETTLE_OWNED if order.key_sharing is KeySharing.TAGS else 0.0)
            order.gap_due = self.clock() + (settle if order.settling else self._gap_wait)
        for lane in woken:
            lane.wake()

    def _put_one(self, order: PartitionOrder, message: Message, woken: dict[MessageQueue, None]) -> None:
        if order.returned:
            message.attempts -= order.returned.get(message.id, 0)
            order.sent_back.discard(message.id)
        known = order.unfinished.get(message.id)
        if known is not None and known.timestamp != message.timestamp:
            self._forget_replaced(order, known, message)
            known = None
        if known is not None:
            self._redelivered(order, known, message, woken)
        elif order.was_finished(message):
            _finish_again(message)
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
        name = name_of(owner)
        order = self._orders.get(name)
        if order is None:
            sharing = owner.key_sharing
            patience = _FAILOVER_WAIT if sharing is KeySharing.SERVER else self._redelivery_wait
            order = self._orders[name] = PartitionOrder(sharing, patience)
        found = self._owners.get(order)
        if found is None or found.owner is not owner:
            found = self._owners[order] = KeyLaneOwner(owner, order, self.delay, self.held_with)
            if order.subscribe(found, self.clock()):
                self._forget_lost(order)
                if owner.moved:
                    order.forget_answered(self._handed_out)
            else:
                due = order.redelivery_due(self.clock())
                for wait in order.lost.values():
                    wait.due = due
        return found

    def _accept(self, order: PartitionOrder, message: Message, woken: dict[MessageQueue, None]) -> None:
        key = self.key(message)
        order.unfinished[message.id] = message
        delayed, lost = self._delayed.get(key), order.lost.get(key)
        if delayed is not None:
            delayed.behind.append(message)
            return
        if lost is not None:
            lost.behind.append(message)
            if lost.due == inf:
                lost.due = order.redelivery_due(self.clock())
            if message.owner.original:
                self._return(message)
            return
        lane = self._lane(key)
        if not lane.stopped:
            lane.messages.append(message)
            woken[lane] = None

    def _lane(self, key: bytes) -> MessageQueue:
        return self.lanes[lane_number(key, len(self.lanes))]

    def _redelivered(
        self, order: PartitionOrder, message: Message, delivery: Message, woken: dict[MessageQueue, None]
    ) -> None:
        """Continue a lost message, or a running handler, with the new delivery."""
        key = self.key(message)
        delayed, lost = self._delayed.get(key), order.lost.get(key)
        requeued = (delayed is not None and message in delayed.messages()) or self._handed_out.get(message) is not None
        waiting = (*self._lane(key).messages, *self._handed_out, *(() if lost is None else lost.messages()))
        if not (message.answered or requeued or message in waiting or self.is_handled(message)):
            self._accept_all(order, [delivery], woken)  # its handler left it unanswered
            return
        delivery.attempts -= message.answered  # the requeue counts when its delay ends
        message.renew(delivery)
        if message.answered and not requeued:
            _finish_again(message)
        elif lost is not None and lost.message is message:
            self._end(key, order.lost)

    def forget(self, owner: Owner) -> None:
        """Forget the messages of an ended connection, unless their handlers run: any consumer receives them."""
        order = self._orders.pop(name_of(owner), None)
        if order is not None:
            self._owners.pop(order, None)
            self._forget_lost(order)

    # Waiting

    def delay(self, message: Message, delay: float) -> None:
        """Handle a message again after a delay in seconds, and later messages of its key after it.

        The delay of a batch's message begins when the handler ends.
        """
        key, due = self.key(message), self.clock() + delay
        if message in self._handed_out:
            self._handed_out[message] = due
        else:
            self.delay_all(key, [message], self._lane(key), due)

    def delay_all(self, key: bytes, messages: list[Message], lane: MessageQueue, due: float) -> None:
        """Handle messages of a key again when due, in order, before later messages of the key."""
        row = [message for message in messages if not self._is_forgotten(message)]
        if not row:
            return
        before = self._delayed.get(key)
        if before is not None:  # of another partition, or its handler left it unanswered
            row = in_order_received([*before.messages(), *row])
            due = max(due, before.due)
        first, *behind = (*row, *take_where(lane, lambda other: self.key(other) == key))
        self._delayed[key] = Wait(first, lane, due, behind)

    def _is_forgotten(self, message: Message) -> bool:
        """Return whether the connection has ended and the server redelivers the message to any consumer."""
        order = owner_of(message).order
        return order.key_sharing is KeySharing.TAGS and order not in self._owners

    def expired(self, message: Message) -> None:
        """Keep the place of a message that was lost before its handler was called."""
        key, order = self.key(message), owner_of(message).order
        lane = self._lane(key)
        behind = take_where(lane, lambda other: owner_of(other).order is order and self.key(other) == key)
        later = order.lost.get(key)  # of a batch, which had this message
        order.lost[key] = Wait(message, lane, order.redelivery_due(self.clock()), behind)
        if later is not None:
            behind += later.messages()

    def tick(self, now: float, running: Sequence[Message] = ()) -> None:
        """End delays that have passed and waits that took too long; touch waiting messages.

        A message that its handler has requeued waits until the handler ends, in ``running`` until then.
        """
        if not self.lanes[0].stopped:
            for key in [key for key, wait in self._delayed.items() if wait.due <= now and wait.message not in running]:
                self._end(key, self._delayed)  # what is lost is passed to `expired` by its worker
            for order in self._orders.values():
                for key in [key for key, wait in order.lost.items() if wait.due <= now]:
                    self._give_up_waiting(order, key, now)
                self._watch(order, now)
        for message in [message for wait in self._delayed.values() for message in wait.messages()]:
            if message.answered and message.budget is not None and message not in running:
                message.budget.pack(message)
        touch_due(self._blocked(), now, requeued=True)
        touch_due((message for message, due in self._handed_out.items() if due is not None), now, requeued=True)

    def _give_up_waiting(self, order: PartitionOrder, key: bytes, now: float) -> None:
        """End a wait that took too long, unless the server could not deliver."""
        wait = order.lost[key]
        if order.ordered_by_server:
            self._end_failover_wait(wait)
            return
        if not order.can_receive():
            wait.due = order.redelivery_due(now)
            return
        lost = [message for message in wait.messages() if message is wait.message or is_gone(message)]
        wait.behind = [message for message in wait.behind if not is_gone(message)]
        for message in lost:
            owner_of(message).order.unfinished.pop(message.id, None)
        logger.warning(
            "%d messages of a key were not redelivered within %g s, later messages are handled first: %r",
            len(lost),
            self._redelivery_wait,
            wait.message,
            extra={"topic": wait.message.topic, "partition": wait.message.partition},
        )
        self._end(key, order.lost, without_first=True)

    def _end(self, key: bytes, waits: dict[bytes, Wait], *, without_first: bool = False) -> None:
        """End a wait: its messages return to the front of their lane, or wait for another message."""
        wait = waits.pop(key)
        row = wait.behind if without_first else list(wait.messages())
        for message in row:
            if message.answered:
                message.mark_unanswered()
                message.attempts += 1  # a requeue counts
        delayed = self._delayed.get(key)
        if delayed is not None:
            delayed.behind = in_order_received([*row, *delayed.behind])
            return
        ready: list[Message] = []
        for message in row:
            lost = owner_of(message).order.lost.get(key)
            if lost is None or owner_of(message).order.precedes(message, lost.message):
                ready.append(message)
            else:
                lost.behind.append(message)
        if waits is not self._delayed:  # earlier messages that were requeued may be in the lane
            ready = in_order_received([*ready, *take_where(wait.lane, lambda other: self.key(other) == key)])
        wait.lane.messages.extendleft(reversed(ready))
        wait.lane.wake()

    def _end_failover_wait(self, wait: Wait) -> None:
        """End the connection if messages wait for a message that was not redelivered.

        Another consumer may have the key: the server may have sent the waiting messages before it noticed the timeout.
        A new connection starts with the first unfinished message of each key.
        """
        wait.due = inf
        if not all(message.lost for message in wait.behind):
            owner = owner_of(wait.message).order.owner
            if owner is not None:
                owner.reset("a message timed out and was not redelivered, but later messages of its key were received")

    def _watch(self, order: PartitionOrder, now: float) -> None:
        """End the wait for unseen messages; make room if waiting messages use up RDY."""
        owner = order.owner
        if owner is None or owner.horizon == inf:
            return
        order.forget_handled(now - order.redelivery_wait)
        if order.ordered_by_server:
            self._bound_lost(order)
            return
        if order.gap_due is not None:
            if not order.settling and not order.can_receive():
                order.gap_due = now + self._gap_wait
            elif order.gap_due <= now and not (order.settling and owner.taking_over):
                self._end_gap(order)
        if order.returned:
            count, size = order.forget_returned()
            if count > MOST_RETURNED or size > MOST_RETURNED_BYTES:
                self._give_up(order)
        if order.lacks_room(now, _FULL):
            self._make_room(order)

    def _give_up(self, order: PartitionOrder) -> None:
        """Stop waiting for the lost messages of a partition."""
        owner = order.owner
        logger.warning(
            "%d messages of %s wait for the redelivery of earlier messages with their keys: that order is given up",
            len(order.returned),
            "" if owner is None else owner.topic,
            extra={} if owner is None else {"topic": owner.topic, "partition": owner.partition},
        )
        self._forget_lost(order)

    def _bound_lost(self, order: PartitionOrder) -> None:
        """End the connection if more messages were lost than could be in flight."""
        owner, lost = order.owner, sum(1 + len(wait.behind) for wait in order.lost.values())
        if owner is not None and lost > 2 * order.most_ready:
            owner.reset("messages of many keys timed out and were not redelivered")

    def _end_gap(self, order: PartitionOrder) -> None:
        woken: dict[MessageQueue, None] = {}
        settling = order.settling
        messages = order.end_gap()
        if messages and not settling:
            logger.warning(
                "messages before this message were not received within %g s, later messages are handled first: %r",
                self._gap_wait,
                messages[0],
                extra={"topic": messages[0].topic, "partition": messages[0].partition},
            )
        self._accept_all(order, messages, woken)
        for lane in woken:
            lane.wake()

    def _make_room(self, order: PartitionOrder) -> None:
        """Requeue the newer half of the waiting messages, which keep their places."""
        for message in order.drop_newest_early():
            self._return(message)
        for wait in order.lost.values():
            behind = [message for message in wait.behind if not message.lost]
            for message in behind[len(behind) // 2 :]:
                self._return(message)

    def _return(self, message: Message) -> None:
        """Requeue a message that waits for another message.

        The original NSQ redelivers the other message behind its whole queue: the delay lets it deliver the queue.
        """
        owner = owner_of(message)
        times, delay = owner.order.note_returned(message), 0.0
        if owner.original:
            delay = max(_RETURN * times, owner.order.held_from - self.clock())
        owner.send_requeue(message, delay)
        message.mark_returned()

    def _forget_replaced(self, order: PartitionOrder, known: Message, message: Message) -> None:
        """Forget a message whose id the server has given to another message, and unfinished messages behind it."""
        logger.warning(
            "the server has lost %r and stored another message in its place", known, extra={"topic": known.topic}
        )
        offset = min(known.offset, message.offset)
        order.forget_behind(offset)
        self._forget_lost(order, offset)
        order.unfinished.pop(known.id, None)  # its handler may run; its replacement may be lost, too

    def _forget_lost(self, order: PartitionOrder, offset: int = -1) -> None:
        """Forget the lost messages of a partition behind an offset, unless their handlers run."""

        def gone(message: Message) -> bool:
            return owner_of(message).order is order and message.lost and message.offset >= offset

        removed = [message for lane in self.lanes for message in take_where(lane, gone)]
        for waits in (self._delayed, order.lost):
            for key, wait in list(waits.items()):
                removed += filter(gone, wait.messages())
                wait.behind = [message for message in wait.behind if not gone(message)]
                if gone(wait.message):
                    self._end(key, waits, without_first=True)
        for message in removed:
            order.unfinished.pop(message.id, None)

    def _blocked(self) -> Iterator[Message]:
        """Yield the waiting messages, which are in no lane."""
        for wait in self._delayed.values():
            yield from wait.messages()
        for order in self._orders.values():
            for wait in order.lost.values():
                yield from wait.messages()
            yield from order.early.values()

    # Batches

    def take(self, lane: MessageQueue, count: int) -> list[Message]:
        """Take a batch from a lane as `MessageQueue.take`, in order; call `end_batch` afterwards."""
        keys = self._batches.setdefault(lane, {})
        for message in lane.take(count - len(keys), self.expired, self.clock()):
            keys[message] = self.key(message)
        self._handed_out |= dict.fromkeys(keys)
        return list(keys)

    def _rows(self, lane: MessageQueue) -> list[list[Message]]:
        """Return the requeued messages of a batch, by key; each row begins with the first.

        Later unanswered messages of the key wait in its row.
        """
        rows: dict[bytes, list[Message]] = {}
        for message, key in self._batches.get(lane, {}).items():
            if self._handed_out[message] is not None:
                rows.setdefault(key, []).append(message)
            elif key in rows and not message.answered:
                rows[key].append(message)
        return list(rows.values())

    def held_back(self, lane: MessageQueue) -> set[Message]:
        """Return the messages of a batch that wait for a requeued message of their key."""
        due = self._handed_out
        return {message for row in self._rows(lane) for message in row if due[message] is None}

    def held_with(self, message: Message) -> set[Message]:
        """Return what `held_back` returns for the batch of a message; empty without a batch."""
        return next((self.held_back(lane) for lane, keys in self._batches.items() if message in keys), set())

    def end_batch(self, lane: MessageQueue) -> None:
        """Let requeued and held back messages wait for the longest delay of their key."""
        rows, keys = self._rows(lane), self._batches.pop(lane, {})
        due = {message: self._handed_out.pop(message) for message in keys}
        for row in rows:
            for message in row:
                if due[message] is None and message.budget is not None:
                    message.budget.release(message)
            self.delay_all(keys[row[0]], row, lane, max(due[message] or 0.0 for message in row))

    # Closing

    def stop(self) -> None:
        """Hand out no further messages."""
        self._unstarted += self.queued()
        for lane in self.lanes:
            lane.stop()

    def requeue_remaining(self) -> None:
        """Send REQ for unhandled messages, with the rest of their delay; call `stop` first.

        Only on the original NSQ: the redesigned NSQ redelivers them when the connection ends.
        """
        now = self.clock()
        remaining = [(message, 0.0) for message in self._unstarted]
        for order in self._orders.values():
            remaining += [(message, 0.0) for message in order.early.values()]
            order.early.clear()
            remaining += [(message, 0.0) for wait in order.lost.values() for message in wait.messages()]
            order.lost.clear()
        for wait in self._delayed.values():
            remaining += [(message, max(0.0, wait.due - now)) for message in wait.messages()]
        self._delayed.clear()
        self._unstarted = []
        for message, delay in remaining:
            if message.owner.original:
                owner_of(message).send_requeue(message, delay)

    def send_requeue(self, message: Message) -> None:
        """Send REQ for a message whose handler was cancelled."""
        owner_of(message).send_requeue(message)

    def queued(self) -> Iterator[Message]:
        """Yield the messages in the lanes, without waiting messages."""
        for lane in self.lanes:
            yield from lane.messages
