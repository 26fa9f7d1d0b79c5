"""The delayed queue of a channel: messages that were requeued with a long delay (captured: delayed_req_to_queue)."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Protocol

from attrs import define

if TYPE_CHECKING:
    from nsqext.broker.engine.storage.log import Entry


@define(eq=False)
class Delayed:
    """A message in the delayed queue."""

    entry: Entry  # the stored message; the queue may have removed it meanwhile
    attempts: int  # deliveries so far
    due: int  # nanoseconds since 1970


class Journal(Protocol):
    """Persistent record of the changes of delayed queues, by channel."""

    def put(self, channel: str, delayed: Delayed) -> None: ...
    def removed(self, channel: str, internal_id: int) -> None: ...
    def cleared(self, channel: str) -> None: ...


class DelayedQueue:
    """Messages by due time; a message stays until it is finished."""

    __slots__ = ("_channel", "_journal", "_order", "messages")

    def __init__(self, channel: str, journal: Journal | None = None) -> None:
        self.messages: dict[int, Delayed] = {}  # messages by internal id
        self._order: list[tuple[int, int]] = []
        self._channel = channel
        self._journal = journal  # records every change; None for none

    def put(self, delayed: Delayed) -> None:
        """Add a message; raises `Refusal` if the journal cannot be written."""
        if self._journal is not None:
            self._journal.put(self._channel, delayed)
        self.restore(delayed)

    def restore(self, delayed: Delayed) -> None:
        """Add a message that the journal contains already."""
        internal_id = delayed.entry.record.internal_id
        self.messages[internal_id] = delayed
        heappush(self._order, (delayed.due, internal_id))

    def remove(self, internal_id: int) -> None:
        if self.messages.pop(internal_id, None) is not None and self._journal is not None:
            self._journal.removed(self._channel, internal_id)

    def clear(self) -> None:
        if self.messages and self._journal is not None:
            self._journal.cleared(self._channel)
        self.messages.clear()
        self._order.clear()

    @property
    def first_due(self) -> int:
        """Due time of the first message, in nanoseconds since 1970; 0 for none."""
        order = self._order
        while order and (order[0][1] not in self.messages or self.messages[order[0][1]].due != order[0][0]):
            heappop(order)
        return order[0][0] if order else 0

    def due(self, now: int, most: int) -> list[Delayed]:
        """Return the first messages that are due (nanoseconds since 1970), at most so many; they stay in the queue."""
        if not 0 < self.first_due <= now:
            return []
        found: list[Delayed] = []
        keep: list[tuple[int, int]] = []
        while self._order and self._order[0][0] <= now and len(found) < most:
            key = heappop(self._order)
            delayed = self.messages.get(key[1])
            if delayed is not None and delayed.due == key[0]:
                found.append(delayed)
                keep.append(key)
        self._order += keep
        heapify(self._order)
        return found
