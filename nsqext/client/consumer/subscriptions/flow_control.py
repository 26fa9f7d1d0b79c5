"""How many messages each connection may have in flight: pure arithmetic, no I/O, told the time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from attrs import define

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.backoff import Backoff

__all__ = ("RdyDistributor",)

K = TypeVar("K", bound=Hashable)

_IDLE = 10.0
"""Seconds without a message after which a connection gives way to busier ones."""
_TURN = 5.0
"""Longest turn of a busy connection, where others wait for one."""
_IDLE_TURN = 1.0
"""Longest turn of a connection over which nothing comes."""


@define(eq=False)
class _Member:
    limit: int
    backoff: Backoff
    delivered: float
    turn: float | None = None
    """When its turn began."""
    order: int = 0
    """Grows with each turn: the lowest has waited longest."""

    @property
    def most(self) -> int:
        state = self.backoff.state
        return self.limit if state == "running" else 0 if state == "waiting" else 1


class RdyDistributor(Generic[K]):
    """Shares ``max_in_flight`` out among connections.

    The sum of the shares is never above it. Connections over which nothing has come for a while give way to busier
    ones. With more connections than messages that may be in flight, and while a backoff lets only one message
    through, they take turns: those that waited longest come first, and nothing coming ends a turn early, so that none
    starves.

    Args:
        max_in_flight: for all connections together.
        backoff: of the consumer.
    """

    def __init__(self, max_in_flight: int, backoff: Backoff) -> None:
        self.max_in_flight = max_in_flight
        self.paused: bool = False
        """Nothing is wanted at the moment: all shares are 0."""
        self._backoff = backoff
        self._members: dict[K, _Member] = {}
        self._turns = 0
        self._extra = 0

    @property
    def max_in_flight(self) -> int:
        """For all connections together; may be changed.

        Raises:
            InvalidSetting: it is no positive number.
        """
        return self._max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidSetting(f"max_in_flight={count!r} is not a positive number")
        self._max_in_flight = count

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: K, limit: int, backoff: Backoff, now: float) -> None:
        """Add a connection.

        Args:
            member: the connection.
            limit: the largest RDY that its server takes.
            backoff: its own, or that of the consumer.
            now: the time.
        """
        self._members[member] = _Member(limit, backoff, now)

    def widen(self, held: int) -> bool:
        """Let so many messages not count, up to as many again; returns whether that changes anything."""
        extra, self._extra = self._extra, min(held, self.max_in_flight)
        return extra != self._extra

    def remove(self, member: K) -> None:
        """Forget a connection."""
        self._members.pop(member, None)

    def delivered(self, member: K, now: float) -> bool:
        """Note that messages came over a connection; returns whether it was taken for idle, so that shares change."""
        found = self._members.get(member)
        if found is None:
            return False
        idle = now - found.delivered > _IDLE
        found.delivered = now
        return idle

    def shares(self, now: float) -> Mapping[K, int]:
        """Return how many messages each connection may have in flight now."""
        most = self._most()
        shares = dict.fromkeys(self._members, 0)
        able = {key: member for key, member in self._members.items() if member.most > 0} if most else {}
        if len(able) > most:
            self._take_turns(able, most, now)
            shares.update({key: 1 for key, member in able.items() if member.turn is not None})
            return shares
        for member in self._members.values():
            member.turn = None
        idle = [key for key, member in able.items() if now - member.delivered > _IDLE]
        if len(idle) == len(able):
            idle = []
        shares.update(dict.fromkeys(idle, 1))
        busy = {key: member.most for key, member in able.items() if key not in idle}
        shares.update(_share_out(most - len(idle), busy))
        return shares

    def _most(self) -> int:
        state = self._backoff.state
        if self.paused or state == "waiting":
            return 0
        return self.max_in_flight + self._extra if state == "running" else 1

    def _take_turns(self, able: Mapping[K, _Member], most: int, now: float) -> None:
        for member in self._members.values():
            if member.turn is not None:
                quiet = now - max(member.delivered, member.turn)
                over = now - member.turn > _TURN or quiet > _IDLE_TURN
                if over or not member.most:
                    member.turn = None
        having = [member for member in able.values() if member.turn is not None]
        for member in sorted(having, key=lambda member: member.order)[most:]:
            member.turn = None
        waiting = sorted((member for member in able.values() if member.turn is None), key=lambda member: member.order)
        for member in waiting[: max(0, most - len(having))]:
            self._turns += 1
            member.turn, member.order = now, self._turns


def _share_out(total: int, limits: Mapping[K, int]) -> dict[K, int]:
    """Give each an equal share, up to its limit; what one cannot take goes to the others."""
    shares: dict[K, int] = {}
    rest = sorted(limits.items(), key=lambda item: item[1])
    while rest:
        key, limit = rest.pop(0)
        shares[key] = min(limit, total // (len(rest) + 1))
        total -= shares[key]
    return shares
