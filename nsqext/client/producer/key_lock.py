"""Publishes of one key take turns, so that a retry of one cannot be overtaken by the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import anyio

from nsqext.client.producer.retry import given_up

__all__ = ("KeyLock",)

Turn = tuple[str, bytes]


class KeyLock:
    """First come, first served, for each topic and key; a key that nobody publishes with costs nothing."""

    def __init__(self) -> None:
        self._waiting: dict[Turn, deque[anyio.Event]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def try_enter(self, turn: Turn) -> bool:
        """Take the turn if nobody has it; returns whether that worked."""
        if turn in self._waiting:
            return False
        self._waiting[turn] = deque()
        return True

    async def enter(self, turn: Turn) -> None:
        """Wait until all who came before have left. Cancellation gives the place in the row up."""
        if self.try_enter(turn):
            return
        row = self._waiting[turn]
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
        """Wait for several turns, one after the other, noting those that were entered.

        Raises:
            PublishFailed: earlier publishes of a key took longer than this, in seconds.
        """
        with anyio.move_on_after(timeout):
            for turn in turns:
                await self.enter(turn)
                entered.append(turn)
            return
        reason = f"within {timeout:g} s, because publishes of its key from before are not done"
        raise given_up(reason, (), in_doubt=False).at(topic=turns[0][0])

    def leave(self, turn: Turn) -> None:
        """Give the turn to the next in the row."""
        row = self._waiting[turn]
        if row:
            row.popleft().set()
        else:
            del self._waiting[turn]
