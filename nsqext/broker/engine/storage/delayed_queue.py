"""The delayed queue of a channel: messages that a client wants to see much later (captured: delayed_req_to_queue)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from attrs import define

if TYPE_CHECKING:
    from nsqext.broker.engine.storage.log import Entry

__all__ = ("Delayed", "DelayedQueue")


@define(eq=False)
class Delayed:
    """A message in the delayed queue.

    Attributes:
        entry: the stored message; the queue may have dropped it meanwhile.
        attempts: deliveries so far.
        due: when it is wanted, in nanoseconds since 1970.
    """

    entry: Entry
    attempts: int
    due: int


class Journal(Protocol):
    """Where the changes of a delayed queue are kept."""

    def put(self, delayed: Delayed) -> None:
        """Note that a message came in."""

    def removed(self, internal_id: int) -> None:
        """Note that a message left."""

    def cleared(self) -> None:
        """Note that all left."""


class DelayedQueue:
    """Messages by the time at which they are due; a message stays until it is finished.

    Args:
        journal: is told of every change; None for nobody.

    Attributes:
        messages: what is in it, by internal id.
    """

    __slots__ = ("_journal", "_order", "messages")

    def __init__(self, journal: Journal | None = None) -> None:
        self.messages: dict[int, Delayed] = {}
        self._order: list[tuple[int, int]] = []
        self._journal = journal

    def put(self, delayed: Delayed) -> None:
        """Take a message in."""
        if self._journal is not None:
            self._journal.put(delayed)
        self.restore(delayed)

    def restore(self, delayed: Delayed) -> None:
        """Take a message in that the journal knows."""
        internal_id = delayed.entry.record.internal_id
        self.messages[internal_id] = delayed
        heappush(self._order, (delayed.due, internal_id))

    def remove(self, internal_id: int) -> None:
        """Take a message out, if it is there."""
        if self.messages.pop(internal_id, None) is not None and self._journal is not None:
            self._journal.removed(internal_id)

    def clear(self) -> None:
        """Take all messages out."""
        if self.messages and self._journal is not None:
            self._journal.cleared()
        self.messages.clear()
        self._order.clear()

    @property
    def first_due(self) -> int:
        """When the first message is due, in nanoseconds since 1970; 0 for none."""
        order = self._order
        while order and (order[0][1] not in self.messages or self.messages[order[0][1]].due != order[0][0]):
            heappop(order)
        return order[0][0] if order else 0

    def due(self, now: int, most: int) -> list[Delayed]:
        """Return the first messages that are due; they stay in the queue.

        Args:
            now: nanoseconds since 1970.
            most: how many at most.
        """
        if not 0 < self.first_due <= now:
            return []
        found: list[Delayed] = []
        back: list[tuple[int, int]] = []
        while self._order and self._order[0][0] <= now and len(found) < most:
            key = heappop(self._order)
            delayed = self.messages.get(key[1])
            if delayed is not None and delayed.due == key[0]:
                found.append(delayed)
                back.append(key)
        self._order += back
        heapify(self._order)
        return found
