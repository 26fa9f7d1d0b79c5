"""Count messages of the last seconds by their place in the hash space."""

from __future__ import annotations

from array import array
from collections.abc import Callable

__all__ = ("CELLS", "CELL_BITS", "SPACE", "KeyLoad")

SPACE = 1 << 32
CELL_BITS = 20
CELLS = SPACE >> CELL_BITS
_NOTHING = bytes(8 * CELLS)


class KeyLoad:
    """Messages of the last seconds in each of 4,096 cells of the hash space.

    The window of so many seconds has two halves: when the newer half is complete, the older one is dropped.
    """

    __slots__ = ("_began", "_clock", "_half", "_newer", "_older")

    def __init__(self, clock: Callable[[], float], window: float) -> None:
        self._clock = clock  # seconds that never go backwards
        self._half = window / 2
        self._began = clock()
        self._newer = array("Q", _NOTHING)
        self._older = array("Q", _NOTHING)

    def add(self, position: int, count: int) -> None:
        """Count messages at a position."""
        self._turn()
        self._newer[position >> CELL_BITS] += count

    def _turn(self) -> float:
        """Drop the older half if the newer one is complete; return the seconds that are counted."""
        now = self._clock()
        if now - self._began >= self._half:
            complete = now - self._began < 2 * self._half
            self._older = self._newer if complete else array("Q", _NOTHING)
            self._newer = array("Q", _NOTHING)
            self._began = self._began + self._half if complete else now
        return self._half + now - self._began

    def cells(self) -> list[int]:
        """Return the messages of each cell."""
        self._turn()
        return [newer + older for newer, older in zip(self._newer, self._older, strict=True)]

    def between(self, start: int, stop: int) -> float:
        """Return the messages from one position to another; a part of a cell has that part of its messages."""
        self._turn()
        return sum(_between(half, start, stop) for half in (self._newer, self._older))

    def rate(self, start: int, stop: int) -> float:
        """Return the messages per second from one position to another."""
        seconds = self._turn()
        return self.between(start, stop) / seconds


def _between(cells: array[int], start: int, stop: int) -> float:
    first, last = start >> CELL_BITS, stop >> CELL_BITS
    before = cells[first] * (start & ((1 << CELL_BITS) - 1)) / (1 << CELL_BITS)
    behind = cells[last] * (stop & ((1 << CELL_BITS) - 1)) / (1 << CELL_BITS) if last < CELLS else 0.0
    return sum(cells[first:last]) - before + behind
