"""How many messages each connection may have in flight: pure arithmetic, no I/O and no clock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from nsqext.errors import InvalidSetting

__all__ = ("ReadyFlow",)

K = TypeVar("K", bound=Hashable)


class ReadyFlow(Generic[K]):
    """Shares ``max_in_flight`` out among connections.

    The sum of the shares is never above it. With more connections than that, some get 1 and the others 0, and `rotate`
    lets them take turns, so that no connection starves.

    Args:
        max_in_flight: for all connections together.
    """

    def __init__(self, max_in_flight: int) -> None:
        if isinstance(max_in_flight, bool) or not isinstance(max_in_flight, int) or max_in_flight < 1:
            raise InvalidSetting(f"max_in_flight={max_in_flight!r} is not a positive number")
        self.max_in_flight = max_in_flight
        self.paused = False
        """Nothing is wanted at the moment: all shares are 0."""
        self._members: dict[K, int] = {}
        self._first = 0

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: K, limit: int = 2500) -> None:
        """Add a connection; ``limit`` is the largest RDY that its server takes."""
        self._members[member] = limit

    def remove(self, member: K) -> None:
        """Forget a connection."""
        self._members.pop(member, None)

    @property
    def scarce(self) -> bool:
        """Whether there are more connections than messages that may be in flight."""
        return len(self._members) > self.max_in_flight

    def shares(self) -> Mapping[K, int]:
        """Return how many messages each connection may have in flight now."""
        count = len(self._members)
        if self.paused or not count:
            return dict.fromkeys(self._members, 0)
        share, rest = divmod(self.max_in_flight, count)
        return {
            member: min(share + ((number - self._first) % count < rest), limit)
            for number, (member, limit) in enumerate(self._members.items())
        }

    def rotate(self) -> None:
        """Let those without a share have one; does nothing while there is enough for all."""
        if self.scarce:
            self._first = (self._first + self.max_in_flight) % len(self._members)
