"""A lock for each key, so that a later publish of a key cannot overtake the retry of an earlier one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import anyio

from nsqext.errors import PublishFailed

__all__ = ("KeyLock",)

Turn = tuple[str, bytes]


class KeyLock:
    """A fair lock for each topic and key; a key without a publish in flight takes no memory."""

    def __init__(self) -> None:
        self._waiting: dict[Turn, deque[anyio.Event] | tuple[()]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def try_enter(self, turn: Turn) -> bool:
        """Acquire the lock if it is free; return whether it was."""
        if turn in self._waiting:
            return False
        self._waiting[turn] = ()  # a deque takes 600 bytes
        return True

    async def enter(self, turn: Turn) -> None:
        """Acquire the lock, after all earlier callers. Cancellation gives up the place in the queue."""
        if self.try_enter(turn):
            return
        found = self._waiting[turn]
        row = found if isinstance(found, deque) else deque[anyio.Event]()
        self._waiting[turn] = row
        event = anyio.Event()
        row.append(event)
        try:
            await event.wait()
        except BaseException:
            if event.is_set():
                self.leave(turn)
            else:
                row.remove(event)
            raise

    async def enter_all(self, turns: Sequence[Turn], entered: list[Turn], timeout: float) -> None:
        """Acquire several locks, one after the other, and append each to ``entered``.

        Raises:
            PublishFailed: earlier publishes of a key did not end within ``timeout`` seconds.
        """
        with anyio.move_on_after(timeout):
            for turn in turns:
                await self.enter(turn)
                entered.append(turn)
            return
        raise PublishFailed(
            f"not sent within {timeout:g} s, because earlier publishes of its key are still running", topic=turns[0][0]
        )

    def leave(self, turn: Turn) -> None:
        """Release the lock for the next in the queue."""
        row = self._waiting[turn]
        if row:
            row.popleft().set()
        else:
            del self._waiting[turn]
