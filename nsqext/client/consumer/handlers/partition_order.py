"""Restore the order of a partition in lanes after its connection was lost.

When a connection ends, the server redelivers the messages in flight, in any order and mixed with new messages (measured
on the redesigned NSQ); the original NSQ does so after their timeout:

* *received*, unfinished messages: their ids are known;
* *unseen* messages, which the server had sent and this process never received: at most as many as RDY allowed, directly
  behind the last received message, because a server reads its queue in order. Queue offsets show their places: a
  message begins where its predecessor ends.

A killed leader of the redesigned NSQ may lose its newest messages and give their ids and offsets to other messages. The
timestamp distinguishes a redelivery from another message with the same id.

A key waits while its first message was requeued or has to be redelivered. A received, unhandled message is in its lane
or in a `Wait`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, cast

from attrs import define, field

from nsqext.client.consumer.message import KeySharing

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from nsqext.client.consumer.handlers.workers import MessageQueue
    from nsqext.client.consumer.message import Message, Owner


@define(eq=False)
class Wait:
    """A message that cannot be handled yet, and the later messages of its key."""

    message: Message
    lane: MessageQueue
    #: when the message is handled again; for a lost message, when the wait for its redelivery ends, infinite on a
    #: key_failover channel while no message waits behind it
    due: float
    behind: list[Message] = field(factory=list)

    def messages(self) -> Iterator[Message]:
        yield self.message
        yield from self.behind


@define(eq=False)
class PartitionOrder:
    """The unfinished messages of a partition (or a node of the original NSQ), across its subscriptions.

    RDY bounds its memory: it holds messages in flight now or when a connection ended, and as many ids of finished
    messages; ids of earlier subscriptions until `forget_handled`.
    """

    #: with SERVER, keys keep their order across connections, and no message has to return to this consumer
    key_sharing: KeySharing = KeySharing.NONE
    redelivery_wait: float = 60.0  #: seconds that later messages of a key wait for the redelivery of a lost message
    lost: dict[bytes, Wait] = field(factory=dict, init=False)  #: keys whose first message the server has to redeliver
    owner: Owner | None = field(default=None, init=False)  #: the current subscription
    #: received and unfinished messages by id, also lost messages
    unfinished: dict[bytes, Message] = field(factory=dict, init=False)
    early: dict[int, Message] = field(factory=dict, init=False)  #: received ahead of unseen messages, by offset
    #: when the wait for unseen messages ends; None without early messages
    gap_due: float | None = field(default=None, init=False)
    full_since: float | None = field(default=None, init=False)  #: since when waiting messages use up RDY
    most_ready: int = field(default=1, init=False)  #: most messages that the server could have in flight
    #: when the server can redeliver all lost messages of earlier connections
    held_from: float = field(default=0.0, init=False)
    #: how often messages were requeued without being handled, by id
    returned: dict[bytes, int] = field(factory=dict, init=False)
    #: ids of early messages that were requeued, until they are received again
    sent_back: set[bytes] = field(factory=set, init=False)
    #: the first messages are collected and sorted, as an earlier consumer's may be redelivered in any order
    settling: bool = field(default=False, init=False)
    # ids on this subscription, oldest first, with the timestamps
    _finished: dict[bytes, int] = field(factory=dict, init=False)
    # ids on earlier subscriptions, with the timestamps and the earliest time of a redelivery
    _finished_before: dict[bytes, tuple[int, float]] = field(factory=dict, init=False)
    _frontier: int = field(default=-1, init=False)  # offset behind the last message without an unseen message before it
    _last_end: int = field(default=-1, init=False)  # offset behind the last message ever received
    _unseen: int = field(default=0, init=False)  # messages behind the frontier that may be redelivered out of order

    @property
    def ordered_by_server(self) -> bool:
        return self.key_sharing is KeySharing.SERVER

    def subscribe(self, owner: Owner, now: float) -> bool:
        """Continue with a new subscription; return whether to forget earlier lost messages.

        These are forgotten if the channel was moved, or the server keeps the order.
        """
        previous, self.owner = self.owner, owner
        if previous is not None:
            self.note_ready(previous.ready)  # it may have grown after the last message
            self.held_from = now + previous.msg_timeout if owner.original else now
        if self._frontier < 0 and self.early:
            self._frontier = min(self.early)  # lost while the first messages were collected
        if not self._recovering:
            self.sent_back.clear()
        self.early.clear()
        self.gap_due = self.full_since = None
        self._finished_before.update((known, (stored, self.held_from)) for known, stored in self._finished.items())
        self._finished.clear()
        if owner.moved:
            self._finished_before.clear()
        if previous is None or owner.moved or self.ordered_by_server:
            self._frontier, self._last_end, self._unseen = -1, -1, 0
            self.settling = not (owner.moved or self.ordered_by_server)
            return previous is not None
        self.settling = self._frontier < 0 and owner.partition is not None  # the original NSQ has no offsets to sort by
        if self._frontier >= 0:
            # subscriptions in between received nothing, but the server may have sent messages
            self._unseen += max(1, owner.number - previous.number) * self.most_ready
        return False

    def note_ready(self, ready: int) -> None:
        """Record how many messages the server may have in flight."""
        self.most_ready = max(self.most_ready, ready)

    def finish(self, message: Message) -> None:
        """Record that FIN was sent, which is not acknowledged.

        The server has read all but the last RDY FINs: otherwise it would not have sent further messages. The ids of
        these last messages are kept.
        """
        if self.unfinished.get(message.id) is message:
            del self.unfinished[message.id]
        finished = self._finished
        finished[message.id] = message.timestamp
        if len(finished) > self.most_ready:
            del finished[next(iter(finished))]

    def was_finished(self, message: Message) -> bool:
        """Return whether a delivery repeats a message whose FIN was lost with its connection, or received too late.

        A first attempt on the same connection is no repetition: the channel was moved back.
        """
        stored, _ = self._finished_before.get(message.id, (None, 0.0))
        if stored == message.timestamp:
            return True
        return message.attempts > 1 and self._finished.get(message.id) == message.timestamp

    def forget_answered(self, handed_out: Container[Message]) -> None:
        """Forget the messages whose FIN was lost, except for those of a batch: the channel was moved."""
        self.unfinished = {
            known: one for known, one in self.unfinished.items() if not one.answered or one in handed_out
        }

    def forget_behind(self, offset: int) -> None:
        """Forget unseen messages behind an offset: the server has lost them and stores other messages."""
        self._frontier = self._last_end = min(self._frontier, offset)
        self._unseen, self.gap_due = 0, None
        self.early = {at: message for at, message in self.early.items() if not message.lost}

    def receive(self, message: Message) -> list[Message]:
        """Record a new message; return the messages that can be handled now, in order."""
        offset, end = message.offset, message.offset + message.size
        if offset < 0:
            self.settling = False
            return [message]
        if not self._recovering:
            self._frontier = self._last_end = max(self._frontier, end)
            return [message]
        self._last_end = max(self._last_end, end)
        if offset > self._frontier or self.settling:
            self.early[offset] = message
            return []
        ready = [message]
        while offset <= self._frontier < end:
            self._frontier, self._unseen = end, self._unseen - 1
            following = self.early.pop(end, None)
            if following is not None:
                ready.append(following)
                offset, end = end, end + following.size
        if not self._recovering:
            ready += self.end_gap()
        return ready

    @property
    def _recovering(self) -> bool:
        return self.settling or self._unseen > 0 or bool(self.early) or self._frontier < self._last_end

    def end_gap(self) -> list[Message]:
        """Stop waiting for unseen messages; return the early messages in order."""
        early = [self.early[offset] for offset in sorted(self.early)]
        self.early.clear()
        self._frontier, self._unseen, self.gap_due, self.settling = self._last_end, 0, None, False
        return early

    def forget_handled(self, since: float) -> None:
        """Forget handled messages that the server did not redeliver, although it could since before a time."""
        before = self._finished_before
        for message_id in [message_id for message_id, (_, held) in before.items() if held < since]:
            del before[message_id]
        unfinished = self.unfinished
        for message in [message for message in unfinished.values() if message.answered]:
            if message.lost and message.received + message.owner.msg_timeout < since:
                del unfinished[message.id]

    def precedes(self, message: Message, other: Message) -> bool:
        """Return whether an unfinished message was received before another one."""
        return next((known for known in self.unfinished if known in (message.id, other.id)), None) == message.id

    def note_returned(self, message: Message) -> int:
        """Record a requeue of an unhandled message, which is not an attempt; return how often."""
        times = self.returned[message.id] = self.returned.get(message.id, 0) + 1
        return times

    def forget_returned(self) -> tuple[int, int]:
        """Forget the requeues of finished messages; return count and bytes of the other messages."""
        early = {message.id for message in self.early.values()} | self.sent_back  # not known as unfinished
        kept = self.unfinished.keys() | early
        self.returned = {known: times for known, times in self.returned.items() if known in kept}
        waiting = [self.unfinished[known] for known in self.returned if known not in early]
        return len(waiting), sum(len(message.body) for message in waiting)

    def drop_newest_early(self) -> list[Message]:
        """Remove and return the newer half of the early messages, at least one; they are received again."""
        newest = [self.early.pop(offset) for offset in sorted(self.early)[len(self.early) // 2 :]]
        self.sent_back.update(message.id for message in newest)
        return newest

    def redelivery_due(self, now: float) -> float:
        """Return the end of a wait for a lost message that begins now."""
        return max(now, self.held_from) + self.redelivery_wait

    def can_receive(self) -> bool:
        """Return whether the server can deliver a message; only then the time of a wait for redelivery passes.

        It cannot while disconnected or paused, or while RDY messages are being handled. If waiting messages use up
        RDY, it can: some are requeued, see `lacks_room`.
        """
        owner = self.owner
        if owner is None or owner.horizon == inf or not owner.ready:
            return False
        return self.in_flight() < owner.ready or self.count_blocked() * 2 >= owner.ready

    def count_blocked(self) -> int:
        """Return how many messages in flight wait for unseen or lost messages."""
        behind = (message for wait in self.lost.values() for message in wait.behind)
        return len(self.early) + sum(not message.lost for message in behind)

    def lacks_room(self, now: float, longest: float) -> bool:
        """Return whether waiting messages have used up RDY for a time in seconds."""
        if self.owner is None or self.settling or not self.count_blocked() or self.in_flight() < self.owner.ready:
            self.full_since = None
        elif self.full_since is None:
            self.full_since = now
        elif now - self.full_since >= longest:
            self.full_since = None
            return True
        return False

    def in_flight(self) -> int:
        """Return how many messages of the current subscription this process holds."""
        return len(self.early) + sum(not message.lost for message in self.unfinished.values())


class KeyLaneOwner:
    """Owner of messages in lanes: passes answers to their subscription, but delays requeued messages."""

    def __init__(
        self,
        owner: Owner,
        order: PartitionOrder,
        delay: Callable[[Message, float], None],
        held_with: Callable[[Message], set[Message]],
    ) -> None:
        self.owner: Owner = owner
        self.order: PartitionOrder = order
        self.held_with: Callable[[Message], set[Message]] = held_with  #: see `KeyLanes.held_with`
        self.topic: str = owner.topic
        self.partition: int | None = owner.partition
        self.original: bool = owner.original
        self.node: str = owner.node
        self.in_order: bool = owner.in_order
        self.key_sharing: KeySharing = owner.key_sharing
        self.moved: bool = owner.moved
        self.number: int = owner.number
        self.msg_timeout: float = owner.msg_timeout
        self.max_msg_timeout: float = owner.max_msg_timeout
        self.ignore_lost: bool = owner.ignore_lost
        self._delay = delay  # seconds

    @property
    def horizon(self) -> float:
        return self.owner.horizon

    @horizon.setter
    def horizon(self, time: float) -> None:
        self.owner.horizon = time

    @property
    def ready(self) -> int:
        return self.owner.ready

    @property
    def taking_over(self) -> bool:
        return self.owner.taking_over

    def finish(self, message: Message) -> None:
        self.owner.finish(message)
        self.order.finish(message)

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        """Delay the message and later messages of its key in this process."""
        self._delay(message, delay)

    def send_requeue(self, message: Message, delay: float = 0.0) -> None:
        """Send REQ with a delay in seconds, if the message is in flight."""
        if not message.lost:
            self.owner.requeue(message, delay, backoff=False)
            message.mark_answered()

    def touch(self, message: Message) -> None:
        self.owner.touch(message)

    def record_outcome(self, failed: bool) -> None:
        """Do nothing: a failure delays its key only."""

    def expired(self, message: Message) -> bool:
        return self.owner.expired(message)

    def reset(self, reason: str) -> None:
        self.owner.reset(reason)


def owner_of(message: Message) -> KeyLaneOwner:
    """Return the owner of a message in lanes."""
    return cast("KeyLaneOwner", message.owner)


def held_back(messages: Sequence[Message]) -> set[Message]:
    """Return the messages of a handled batch that are handed out again, behind a requeued message of their key."""
    owner = messages[0].owner if messages else None
    return owner.held_with(messages[0]) if isinstance(owner, KeyLaneOwner) else set()


def name_of(owner: Owner) -> tuple[str, int | str] | Owner:
    """Return what an order belongs to: a partition, or a connection with all messages of its keys."""
    if owner.key_sharing is KeySharing.TAGS:
        return owner
    return (owner.topic, owner.node if owner.partition is None else owner.partition)


def is_gone(message: Message) -> bool:
    """Return whether a message is lost and was not requeued by its consumer."""
    return message.lost and message.id not in owner_of(message).order.returned


def in_order_received(messages: Sequence[Message]) -> list[Message]:
    """Sort the messages of each partition among its places."""
    places: dict[PartitionOrder, list[int]] = {}
    for place, message in enumerate(messages):
        places.setdefault(owner_of(message).order, []).append(place)
    row = list(messages)
    for order, found in places.items():
        numbers = {known: number for number, known in enumerate(order.unfinished)}
        received = sorted((messages[place] for place in found), key=lambda message: numbers.get(message.id, inf))
        for place, message in zip(found, received, strict=True):
            row[place] = message
    return row


def take_where(lane: MessageQueue, wanted: Callable[[Message], bool]) -> list[Message]:
    """Remove messages from a lane and return them."""
    taken: list[Message] = []
    others: list[Message] = []
    for message in lane.messages:
        (taken if wanted(message) else others).append(message)
    lane.messages.clear()
    lane.messages.extend(others)
    return taken
