"""Find out with one request which of many topics have got extend support."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from math import inf

from nsqext.errors import InvalidState, LookupUnreachable, NsqError

_LISTED_FOR_ONE = 10
"""A list of this many topics costs a lookup node less than the lookup of one topic costs it and the client."""


class ExtendedTopics:
    """Reads the list of all topics with their extend support, where that costs less than a lookup of each."""

    def __init__(self, ask: Callable[[], Awaitable[dict[str, bool]]], extended: Callable[[str], None]) -> None:
        self.poll_at: float = inf  # when the list is read next: now, or never
        self._ask = ask  # returns the extend support of all topics
        # called with each requested topic that has extend support, or whose support the list does not tell
        self._extended = extended
        self._requested: dict[str, None] = {}
        self._listed = 0

    def cheap_for(self, count: int) -> bool:
        """Return whether one list costs less than lookups of this many topics."""
        return self._listed <= count * _LISTED_FOR_ONE

    def request(self, topics: Iterable[str]) -> None:
        """Read the list soon, for these topics."""
        self._requested |= dict.fromkeys(topics)
        self.poll_at = -inf

    async def refresh(self, *, after_error: bool = False) -> None:
        """Read the list, and report the requested topics; raises InvalidState."""
        requested, self._requested = self._requested, {}
        try:
            found = await self._ask()
        except InvalidState:
            raise
        except LookupUnreachable:
            return
        except NsqError:  # the real server fails while one of the topics is being deleted
            found = {}
        else:
            self._listed = len(found)
        for topic in requested:
            if found.get(topic, True):
                self._extended(topic)
