"""Tick partitions only when a deadline has passed, so that idle partitions cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Protocol


class Scheduled(Protocol):
    """A thing with deadlines."""

    def tick(self) -> float | None:
        """Process what is due; return the clock time of the next deadline, None for none."""


def _nothing() -> None:
    """Stand in for a callback that is not set."""


class Schedule:
    """The deadlines of all partitions of a node.

    A partition whose deadlines may have changed is added with `add` and ticked by the next `run`; afterwards it is
    ticked when its own next deadline passes.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = _nothing  # called when the first item was added since the last `run`
        self._changed: dict[Scheduled, None] = {}
        self._deadlines: dict[Scheduled, float] = {}
        self._heap: list[tuple[float, int, Scheduled]] = []
        self._order = count()

    def add(self, item: Scheduled) -> None:
        """Tick an item with the next `run`."""
        if not self._changed:
            self.on_change()
        self._changed[item] = None

    @property
    def next_deadline(self) -> float:
        """Clock time at which `run` has something to do; -infinity if it has now, infinity if nothing is due."""
        if self._changed:
            return -inf
        return self._heap[0][0] if self._heap else inf

    def remove(self, item: Scheduled) -> None:
        """Tick an item no more."""
        self._changed.pop(item, None)
        self._deadlines.pop(item, None)

    def run(self, now: float) -> None:
        """Tick everything that changed or is due at a clock time."""
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
