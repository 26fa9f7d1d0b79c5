"""Handlers in parallel, one lane for each range of the keys, so that the order of a key is kept (Key_Failover note).

A message that is requeued stays here: its key waits until it is handled again, all other keys go on. So the order holds
against any server, as long as one consumer has the channel to itself or the channel is of type key_failover.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsqext.client.consumer.handlers.auto_touch import AutoTouch
from nsqext.client.consumer.handlers.message_queue import MessageQueue
from nsqext.dispatch import KeyRanges
from nsqext.errors import InvalidInput, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nsqext.client.consumer.message import Message, Owner
    from nsqext.client.consumer.options import KeyOf

__all__ = ("KeyLaneOwner", "KeyLanes", "key_reader")


def key_reader(key: str | KeyOf) -> Callable[[Message], bytes]:
    """Return what finds the key of a message: a header by its name, or a function; without a key its id stands in."""

    def read(message: Message) -> bytes:
        try:
            found = message.header_value(key) if isinstance(key, str) else key(message)
        except ProtocolError:  # a header that servers refuse to store
            return message.id
        if found is None:
            return message.id
        return found.encode("utf-8", "surrogatepass") if isinstance(found, str) else bytes(found)

    return read


class KeyLaneOwner:
    """Stands between a message and its subscription, and keeps here what is requeued.

    Args:
        owner: the subscription.
        lanes: where requeued messages wait.
    """

    __slots__ = (
        "_lanes",
        "ignore_lost",
        "in_order",
        "max_msg_timeout",
        "msg_timeout",
        "node",
        "owner",
        "partition",
        "topic",
    )

    def __init__(self, owner: Owner, lanes: KeyLanes) -> None:
        self.owner: Owner = owner
        self.topic: str = owner.topic
        self.partition: int = owner.partition
        self.node: str = owner.node
        self.in_order: bool = owner.in_order
        self.msg_timeout: float = owner.msg_timeout
        self.max_msg_timeout: float = owner.max_msg_timeout
        self.ignore_lost: bool = owner.ignore_lost
        self._lanes = lanes

    @property
    def horizon(self) -> float:
        """Messages that arrived before this time are no longer ours."""
        return self.owner.horizon

    @horizon.setter
    def horizon(self, time: float) -> None:
        self.owner.horizon = time

    def finish(self, message: Message) -> None:
        """Send FIN."""
        self.owner.finish(message)

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Let the message and all behind it of its key wait here; nobody else slows down."""
        self._lanes.hold(message, delay)

    def give_back(self, messages: Iterable[Message], delay: float = 0.0) -> None:
        """Send REQ with a delay in seconds for messages that are still ours."""
        for message in messages:
            if message.received >= self.horizon:
                self.owner.requeue(message, delay, backoff=False)
                message.answered = True

    def touch(self, message: Message) -> None:
        """Send TOUCH."""
        self.owner.touch(message)

    def record_outcome(self, failed: bool) -> None:
        """Leave the backoff alone: the key waits, and no other."""

    def expired(self, message: Message) -> bool:
        """Return whether the message went back to the server."""
        return self.owner.expired(message)


class _Held:
    """A key whose first message waits to be handled again."""

    __slots__ = ("behind", "due", "lane", "message")

    def __init__(self, message: Message, lane: MessageQueue, due: float) -> None:
        self.message = message
        self.lane = lane
        self.due = due
        self.behind: deque[Message] = deque()


class KeyLanes:
    """Rows of messages, one for each worker; a key is always in the same one.

    Args:
        count: how many lanes.
        key: finds the key of a message.
        clock: the time in seconds.

    Attributes:
        rows: the row of each lane.
        waiting: messages that wait behind a requeued one of their key, it included.
    """

    def __init__(self, count: int, key: Callable[[Message], bytes], clock: Callable[[], float]) -> None:
        self.rows: list[MessageQueue] = [MessageQueue() for _ in range(count)]
        self.waiting: int = 0
        self._key = key
        self._clock = clock
        self._ranges = KeyRanges[int](clock=clock)
        for number in range(count):
            self._ranges.add_consumer(number)
        self._owners: dict[int, KeyLaneOwner] = {}
        self._held: dict[bytes, _Held] = {}
        self._auto_touch = AutoTouch()
        self._left: list[Message] = []

    def put(self, messages: list[Message]) -> None:
        """Sort messages in; those of a key that is held wait behind its first.

        Raises:
            InvalidInput: the key of a message cannot be had; what came before it is sorted in.
        """
        rows: dict[int, list[Message]] = {}
        try:
            for message in messages:
                key = self._read(message)
                message.owner = self._owner(message.owner)
                held = self._held.get(key)
                if held is None:
                    rows.setdefault(self._ranges.get_consumer(key) or 0, []).append(message)
                else:
                    held.behind.append(message)
                    self.waiting += 1
        finally:
            for number, row in rows.items():
                self.rows[number].put(row)

    def _read(self, message: Message) -> bytes:
        try:
            return self._key(message)
        except Exception as error:
            raise InvalidInput(
                f"the key of {message!r} cannot be had: {error!r}",
                topic=message.topic,
                partition=message.partition,
                hint="mend the consumer's key function; it returns text, bytes or None",
            ) from error

    def _owner(self, owner: Owner) -> KeyLaneOwner:
        found = self._owners.get(id(owner))
        if found is None or found.owner is not owner:
            if len(self._owners) > 64:  # of connections that came and went
                self._owners.clear()
            found = self._owners[id(owner)] = KeyLaneOwner(owner, self)
        return found

    def hold(self, message: Message, delay: float) -> None:
        """Let a message be handled again after a delay in seconds, and what is behind it of its key not before."""
        key = self._read(message)
        lane = self.rows[self._ranges.get_consumer(key) or 0]
        held = self._held[key] = _Held(message, lane, self._clock() + delay)
        others: list[Message] = []
        for other in lane.messages:
            (held.behind if self._read(other) == key else others).append(other)
        lane.messages.clear()
        lane.messages.extend(others)
        self.waiting += 1 + len(held.behind)

    def missed(self, message: Message) -> None:
        """Give back what waits behind a message of its key that timed out in its lane, to come again after it."""
        owner, key = message.owner, self._read(message)
        lane = self.rows[self._ranges.get_consumer(key) or 0]
        behind: list[Message] = []
        others: list[Message] = []
        for other in lane.messages:
            ours = other.owner is owner and other.received >= owner.horizon
            (behind if ours and self._read(other) == key else others).append(other)
        if behind and isinstance(owner, KeyLaneOwner):
            lane.messages.clear()
            lane.messages.extend(others)
            owner.give_back(behind)

    def tick(self, now: float) -> None:
        """Let keys go on whose delay has passed, and ask for more time for those that are held."""
        stopped = self.rows[0].stopped
        for key, held in [entry for entry in self._held.items() if entry[1].due <= now and not stopped]:
            del self._held[key]
            self.waiting -= 1 + len(held.behind)
            self._go_on(held)
        for held in self._held.values():
            held.message.answered = False  # it was answered with a requeue that the server does not know of
        self._auto_touch.tick(self._all_held(), now)

    def _all_held(self) -> Iterator[Message]:
        for held in self._held.values():
            yield held.message
            yield from held.behind

    def _go_on(self, held: _Held) -> None:
        message, lane = held.message, held.lane
        row = [message, *held.behind]
        if message.received < message.owner.horizon:
            # it comes again, and so has to what came with it: the rest was delivered anew behind it
            owner = message.owner
            row = [other for other in held.behind if other.owner is not owner]
            if isinstance(owner, KeyLaneOwner):
                owner.give_back(other for other in held.behind if other.owner is owner)
        else:
            message.answered = False
            message.attempts += 1
        lane.messages.extendleft(reversed(row))
        lane.wake()

    def stop(self) -> None:
        """Give out nothing further."""
        self._left += self.here()
        for row in self.rows:
            row.stop()

    def give_back(self, wanted: Callable[[Message], bool]) -> None:
        """Requeue after the stop what nobody has begun with, and what is held with the rest of its delay.

        Args:
            wanted: which messages; the others are left to their next delivery.
        """
        now = self._clock()
        held, self._held = self._held, {}
        left = [(message, 0.0) for message in self._left]
        for entry in held.values():
            left += [(message, max(0.0, entry.due - now)) for message in (entry.message, *entry.behind)]
        self._left = []
        self.waiting = 0
        for message, delay in left:
            if isinstance(message.owner, KeyLaneOwner) and wanted(message):
                message.owner.give_back([message], delay)

    def here(self) -> Iterator[Message]:
        """Return the messages that wait for their handlers, the held ones not included."""
        for row in self.rows:
            yield from row.messages
