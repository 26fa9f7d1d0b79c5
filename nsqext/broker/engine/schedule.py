"""When partitions are ticked, and when their channels deliver; idle partitions cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol

from attrs import define, field


class Scheduled(Protocol):
    """Something with deadlines."""

    def tick(self) -> float | None:
        """Process what is due; return the clock time of the next deadline."""


@define(eq=False)
class Schedule:
    """Deadlines of a node's partitions; `run` ticks partitions that are due or were added."""

    on_change: Callable[[], None] = lambda: None  #: called at the first `add` since the last `run`
    _changed: dict[Scheduled, None] = field(factory=dict)
    _deadlines: dict[Scheduled, float] = field(factory=dict)
    _heap: list[tuple[float, int, Scheduled]] = field(factory=list)
    _order: Iterator[int] = field(factory=count)

    def add(self, item: Scheduled) -> None:
        if not self._changed:
            self.on_change()
        self._changed[item] = None

    @property
    def next_deadline(self) -> float:
        """Clock time of the next `run`, -infinity for now, infinity for never."""
        if self._changed:
            return -inf
        return self._heap[0][0] if self._heap else inf

    def remove(self, item: Scheduled) -> None:
        self._changed.pop(item, None)
        self._deadlines.pop(item, None)

    def run(self, now: float) -> None:
        due, self._changed = self._changed, {}
        while self._heap and self._heap[0][0] <= now:
            deadline, _, item = heappop(self._heap)
            if self._deadlines.get(item) == deadline:
                del self._deadlines[item]
                due[item] = None
        for item in due:
            following = item.tick()
            if following is None:
                self._deadlines.pop(item, None)
            elif self._deadlines.get(item) != following:
                self._deadlines[item] = following
                heappush(self._heap, (following, next(self._order), item))


class Pumped(Protocol):
    """A channel."""

    def pump(self) -> None: ...


@define(eq=False)
class Turn:
    """Delays deliveries until the commands received together are executed.

    In the real servers another goroutine delivers, usually after the answers to these commands: after SUB, RDY and PUB
    in one segment, both OK preceded the message in 97 of 100 runs (redesigned).
    """

    _channels: dict[Pumped, None] = field(factory=dict)
    _open: bool = False

    def begin(self) -> None:
        self._open = True

    def defers(self, channel: Pumped) -> bool:
        """Return whether a channel is pumped at the end of the turn instead."""
        if self._open:
            self._channels[channel] = None
        return self._open

    def end(self) -> None:
        self._open = False
        if self._channels:
            waiting, self._channels = self._channels, {}
            for channel in waiting:
                channel.pump()
