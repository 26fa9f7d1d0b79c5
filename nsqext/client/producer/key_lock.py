"""A lock for each key, so that a later publish of a key cannot overtake an earlier one that waits or is retried."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import PublishFailed

if TYPE_CHECKING:
    from nsqext.client.producer.request import TopicKey


class KeyLock:
    """A fair lock for each topic and key; a key without a publish in flight takes no memory.

    A publish takes its place for all of its keys at once and before it waits for anything, such as a lookup. So the
    order of the places is the order of the calls, and two publishes never wait for each other.
    """

    def __init__(self) -> None:
        self._rows: dict[TopicKey, deque[Place] | tuple[()]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def try_enter(self, key: TopicKey) -> bool:
        """Acquire the lock of a key if it is free; return whether it was."""
        if key in self._rows:
            return False
        self._rows[key] = ()  # a deque takes 600 bytes
        return True

    def leave(self, key: TopicKey) -> None:
        """Release the lock of a key for the next place."""
        row = self._rows[key]
        if row:
            row.popleft().grant(key)
        else:
            del self._rows[key]

    def queue(self, keys: Iterable[TopicKey], place: Place | None = None) -> Place:
        """Take a place behind all earlier ones, without waiting; `Place.enter` waits, `Place.leave` gives it up."""
        place = place or Place(self)
        for key in keys:
            if self.try_enter(key):
                place.held.add(key)
            else:
                place.missing.add(key)
                self._row(key).append(place)
        return place

    def take_behind(self, key: TopicKey, joins: Callable[[Place], bool]) -> list[Place]:
        """Remove the places that wait for a key, from the next one to the first that does not join, and return them.

        They wait for nothing any more; `Place.wake` continues them.
        """
        taken: list[Place] = []
        row = self._rows[key]
        while row and len(row[0].missing) == 1 and not row[0].held and joins(row[0]):
            place = row.popleft()
            place.missing.clear()
            taken.append(place)
        return taken

    def is_last(self, place: Place, key: TopicKey) -> bool:
        """Return whether no other place is behind this one."""
        row = self._rows.get(key)
        return row is not None and (row[-1] is place if row else key in place.held)

    def withdraw(self, place: Place, key: TopicKey) -> None:
        """Remove a place that waits for a key."""
        self._row(key).remove(place)

    def _row(self, key: TopicKey) -> deque[Place]:
        row = self._rows[key]
        if not isinstance(row, deque):
            row = self._rows[key] = deque()
        return row


class Place:
    """A place in the queues of one or more keys; `KeyLock.queue` adds it to them."""

    __slots__ = ("_lock", "_woken", "held", "missing")

    def __init__(self, lock: KeyLock) -> None:
        self.held: set[TopicKey] = set()  # keys whose lock it has
        self.missing: set[TopicKey] = set()  # keys that it waits for
        self._lock = lock
        self._woken: anyio.Event | None = None

    async def enter(self, timeout: float) -> None:
        """Wait for all keys; neither this nor cancellation gives up the place. Raises PublishFailed."""
        if not self.missing:
            return
        await self.sleep(timeout)
        if self.missing:
            raise PublishFailed(
                f"not sent within {timeout:g} s, because earlier publishes of its key are still running",
                topic=next(iter(self.missing))[0],
            )

    async def sleep(self, timeout: float) -> None:
        """Wait until `wake` is called, or ``timeout`` seconds have passed."""
        self._woken = anyio.Event()
        with anyio.move_on_after(max(0.0, timeout)):
            await self._woken.wait()

    def wake(self) -> None:
        """Continue the task that waits."""
        if self._woken is not None:
            self._woken.set()

    def grant(self, key: TopicKey) -> None:
        """Receive the lock of a key."""
        self.missing.discard(key)
        self.held.add(key)
        if not self.missing:
            self.wake()

    def leave(self) -> None:
        """Release the keys, and stop waiting for those that are missing."""
        while self.missing:
            self._lock.withdraw(self, self.missing.pop())
        while self.held:
            self._lock.leave(self.held.pop())
