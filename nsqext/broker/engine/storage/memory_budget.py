"""Bound of the memory that all queues of a node take together."""

from __future__ import annotations

from math import inf
from typing import Protocol


class MemoryUser(Protocol):
    """A queue that can free memory."""

    def free_memory(self) -> None:
        """Free everything that is finished, or that can be read from disk again."""


class MemoryBudget:
    """Bytes of messages that a node keeps in memory."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # the bound in bytes
        self.held = 0  # bytes in memory, as the queues count them
        self._users: dict[MemoryUser, None] = {}
        self._fruitless: float = inf  # bytes that were held when nothing could be freed

    def add(self, user: MemoryUser) -> None:
        self._users[user] = None

    def remove(self, user: MemoryUser) -> None:
        self._users.pop(user, None)

    @property
    def is_exceeded(self) -> bool:
        return self.held > self.limit

    def reclaim(self) -> None:
        """Have every queue free memory, unless that freed nothing and hardly anything was freed since."""
        if self.held > self._fruitless * 31 / 32:
            return
        self._fruitless = inf
        for user in list(self._users):
            user.free_memory()
        if self.is_exceeded:
            self._fruitless = self.held
