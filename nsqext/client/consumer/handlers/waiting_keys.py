"""Keys whose first message cannot be handled yet: it was requeued, or the server has to redeliver it.

A message that was received and not handled is in its lane, or it waits in one place; the messages of a key keep
their order on the way from one to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.client.consumer.handlers.partition_order import owner_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nsqext.client.consumer.handlers.partition_order import PartitionOrder
    from nsqext.client.consumer.handlers.workers import MessageQueue
    from nsqext.client.consumer.message import Message

WaitName = tuple[bytes, "PartitionOrder | None"]
"""A key, and the partition whose messages of this key wait for a lost one; None if all messages of the key wait."""


@define(eq=False)
class Wait:
    """A key whose first message cannot be handled yet."""

    message: Message  # its first message
    lane: MessageQueue  # the lane of the key
    # when the message is handled again, or for a lost one, when the wait for its redelivery ends. Infinite for a lost
    # message of a key_failover channel while no other message waits behind it.
    due: float
    lost: bool  # whether the server has to redeliver the message first
    behind: list[Message] = field(factory=list)  # later messages of the key


class WaitingKeys:
    """The waits of all keys."""

    def __init__(self, key: Callable[[Message], bytes]) -> None:
        self.waits: dict[WaitName, Wait] = {}  # by key and partition; read it, and change it by the methods
        self._key = key  # reads the key of a message

    def find(self, key: bytes, order: PartitionOrder) -> Wait | None:
        """Return what a new message of a key and partition waits for; None if it can be handled."""
        return self.waits.get((key, None)) or self.waits.get((key, order))

    def of(self, order: PartitionOrder) -> list[Wait]:
        """Return the waits for lost messages of a partition."""
        return [wait for (_, partition), wait in self.waits.items() if partition is order]

    def due(self, now: float) -> list[tuple[WaitName, Wait]]:
        """Return the waits whose time has passed."""
        return [entry for entry in self.waits.items() if entry[1].due <= now]

    def messages(self) -> Iterator[Message]:
        """Return all messages that wait."""
        for wait in self.waits.values():
            yield wait.message
            yield from wait.behind

    def delay(self, key: bytes, messages: Sequence[Message], lane: MessageQueue, due: float) -> None:
        """Let all messages of a key wait for a requeued one, the first of those that were handed out together."""
        first, *behind = messages
        behind += take(lane, lambda other: self._key(other) == key)
        before = self.waits.get((key, None))
        if before is not None:  # of another partition, whose messages do not wait for those of this one
            behind += (before.message, *before.behind)
            due = max(due, before.due)
        self.waits[key, None] = Wait(first, lane, due, lost=False, behind=behind)

    def lose(self, key: bytes, message: Message, lane: MessageQueue, due: float) -> None:
        """Let the messages of a key and partition wait for a lost one."""
        order = owner_of(message).order
        wait = Wait(message, lane, due, lost=True)
        wait.behind = take(lane, lambda other: owner_of(other).order is order and self._key(other) == key)
        self.waits[key, order] = wait

    def end(self, name: WaitName, *, without_first: bool = False) -> None:
        """End a wait: its messages return to their lane, in front of the others, or wait for another message."""
        key, wait = name[0], self.waits.pop(name)
        row = wait.behind if without_first else [wait.message, *wait.behind]
        delayed = self.waits.get((key, None))
        if delayed is not None:
            delayed.behind[:0] = row
            return
        ready: list[Message] = []
        for message in row:
            lost = self.waits.get((key, owner_of(message).order))
            (ready if lost is None else lost.behind).append(message)
        wait.lane.messages.extendleft(reversed(ready))
        wait.lane.wake()

    def remove(self, lanes: Sequence[MessageQueue], gone: Callable[[Message], bool]) -> list[Message]:
        """Remove messages from the lanes and the waits, and return them."""
        removed = [message for lane in lanes for message in take(lane, gone)]
        for name, wait in list(self.waits.items()):
            removed += filter(gone, wait.behind)
            wait.behind = [message for message in wait.behind if not gone(message)]
            if gone(wait.message):
                removed.append(wait.message)
                self.end(name, without_first=True)
        return removed


def take(lane: MessageQueue, wanted: Callable[[Message], bool]) -> list[Message]:
    """Remove messages from a lane and return them."""
    taken: list[Message] = []
    others: list[Message] = []
    for message in lane.messages:
        (taken if wanted(message) else others).append(message)
    lane.messages.clear()
    lane.messages.extend(others)
    return taken
