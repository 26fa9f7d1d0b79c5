"""How many messages each connection may have in flight (RDY): arithmetic without I/O, given the time.

Backoff while handlers fail is a state machine without I/O and clock:

::

    running ──failure──▶ waiting (RDY 0) ──time is over──▶ probing (RDY 1)
       ▲                     ▲                                │
       └──── success at level 1 ◀─────────────────────────────┤
                             └── failure: one level up, or success: one level down

The pause of level n is ``base * 2**n``, as in the Go clients. Outcomes during a pause change nothing, so
that many messages that fail together count once.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.options import BackoffOptions


@define(eq=False)
class Backoff:
    """The state of one consumer, or of one of its connections."""

    _options: BackoffOptions
    _chance: Callable[[], float] = random.random  # returns the share of a pause to wait, 0 to 1, with jitter
    level: int = 0  # 0 while handlers succeed
    until: float = 0.0  # end of the pause, on the clock of the caller; 0 without one

    @property
    def state(self) -> Literal["running", "waiting", "probing"]:
        """Whether messages are received at full speed, not at all, or one at a time."""
        if not self.level:
            return "running"
        return "waiting" if self.until else "probing"

    def failed(self, now: float) -> bool:
        """Record a failed message; return whether the state changed."""
        if self.until or self._options.mode == "off":
            return False
        if self._pause(self.level + 1) <= self._options.max_wait:
            self.level += 1
        self._wait(now)
        return True

    def succeeded(self, now: float) -> bool:
        """Record a handled message; return whether the state changed."""
        if self.until or not self.level:
            return False
        self.level -= 1
        if self.level:
            self._wait(now)
        return True

    def passed(self, now: float) -> bool:
        """Record a requeue without backoff; return whether the state changed."""
        if self.until or not self.level:
            return False
        self._wait(now)
        return True

    def tick(self, now: float) -> bool:
        """End the pause if its time has passed; return whether it ended."""
        if not self.until or now < self.until:
            return False
        self.until = 0.0
        return True

    def _pause(self, level: int) -> float:
        return self._options.base * 2.0**level

    def _wait(self, now: float) -> None:
        pause = self._pause(self.level)
        self.until = now + (pause * self._chance() if self._options.jitter else pause)

    def __repr__(self) -> str:
        return f"<Backoff {self.state} level={self.level}>"


K = TypeVar("K", bound=Hashable)

IDLE = 10.0
"""Seconds without a message after which a connection has RDY 1 in favour of busier ones, and its window is reset."""
_TURN = 5.0  # longest turn of a busy connection while others wait for one
IDLE_TURN = 1.0
"""Longest turn of a connection that receives nothing."""
_TURNOVER = 0.05  # seconds within which a window was exhausted if as many messages were received


@define(eq=False)
class _Member:
    """A connection."""

    limit: int  # its largest RDY count
    backoff: Backoff  # its own, or that of the consumer
    received: float  # time of the last message
    window: int  # the RDY count that it has reached so far; it doubles when it is exhausted
    initial: int  # its first window, and that after it was idle
    sole: bool  # no other consumer receives its messages, so it never has to wait for a turn
    share: int = 0  # its current RDY count
    size: float = 0.0  # bytes of a message: a moving average, which a larger message raises at once
    recent: int = 0  # messages received since ``recent_since``
    recent_since: float = 0.0
    turn: float | None = None  # when its turn began; None while it has no turn
    order: int = 0  # number of its last turn: the member with the lowest one has waited longest
    paused: bool = False  # while True, its RDY count is 0

    @property
    def most(self) -> int:
        if self.paused:
            return 0
        state = self.backoff.state
        return min(self.limit, self.window) if state == "running" else 0 if state == "waiting" else 1


class RdyDistributor(Generic[K]):
    """Distribute ``max_in_flight`` among connections as RDY counts.

    Their sum is never larger. The window of a connection starts at ``initial_ready`` (seed 004: 1) and
    doubles while it limits the consumer: it was exhausted, and a handler or the caller waits for messages. So a
    consumer with slow handlers keeps few messages that others could handle, and one with fast handlers reaches its
    share within milliseconds.

    Connections that have received nothing for a while give way to busier ones. With more connections than messages
    that may be in flight, and while a backoff allows only one message, they take turns, longest waiting first, so that
    none starves; an idle connection ends its turn early. Buckets of keys do not: the server delivers nothing of
    a partition behind a message whose bucket requests none.
    """

    def __init__(self, max_in_flight: int, backoff: Backoff, max_bytes: int = 0, initial_ready: int = 1) -> None:
        self.max_in_flight: int = max_in_flight  # messages over all connections; may be changed
        self.paused: bool = False  # while True, all counts are 0
        # handlers that run at the same time; a window grows to this number of messages even while no handler waits
        self.concurrency: int = 1
        self._backoff = backoff
        # bytes over all connections, by the size of the messages received so far; each connection may have one message
        # in all cases
        self._max_bytes = max_bytes
        self._initial = initial_ready  # the first window
        self._members: dict[K, _Member] = {}
        self.exhausted: dict[_Member, None] = {}  # connections whose window limits the consumer; `grow` doubles it
        self._turns = 0
        self._extra = 0
        self._sole = 0  # connections whose messages no other consumer could handle

    def __len__(self) -> int:
        return len(self._members)

    @property
    def takes_turns(self) -> bool:
        """Whether there are more connections than messages that may be in flight."""
        return len(self._members) > max(self.max_in_flight, self._sole)

    def add(self, member: K, limit: int, backoff: Backoff, now: float, *, sole: bool = False) -> None:
        """Add a connection, with the largest RDY count that its server accepts.

        Args:
            backoff: its own, or that of the consumer.
            sole: no other consumer could handle its messages: its first window is all that may be in flight, and it has
                a count of 1 at least, even if there are more connections than messages that may be in flight.
        """
        first = self.max_in_flight if sole else self._initial
        self._members[member] = _Member(limit, backoff, now, first, first, sole)
        self._sole += sole

    def pause(self, member: K, *, paused: bool) -> None:
        """Give a connection no messages, or messages again; one that is unknown is ignored."""
        found = self._members.get(member)
        if found is not None:
            found.paused = paused

    def remove(self, member: K) -> None:
        """Remove a connection; one that is unknown is ignored."""
        found = self._members.pop(member, None)
        if found is not None:
            self.exhausted.pop(found, None)
            self._sole -= found.sole

    def widen(self, held: int) -> None:
        """Raise the total by the messages that wait for their key or their time, by ``max_in_flight`` at most."""
        self._extra = min(held, self.max_in_flight)

    def received(self, member: K, count: int, size: int, in_flight: int, now: float) -> bool:
        """Record messages since the last call, 1 or more, and their bytes; return whether the counts change.

        Args:
            in_flight: messages of this connection that are not answered, these included.
            now: the time of the last read.
        """
        found = self._members.get(member)
        if found is None:
            return False
        changed = now - found.received > IDLE
        found.received = now
        mean = size / count
        found.size = max(mean, found.size + (mean - found.size) / 16)
        if not self._limits(found):
            return changed
        if now - found.recent_since > _TURNOVER:
            found.recent, found.recent_since = 0, now
        found.recent += count
        if in_flight < found.share and found.recent < found.share:
            return changed
        if found.window < self.concurrency:
            _grow(found)
            return True
        self.exhausted[found] = None
        return changed

    def limits(self, member: K) -> bool:
        """Return whether the window of a connection limits the consumer, so that each read has to be recorded."""
        return self._limits(self._members[member])

    def _limits(self, member: _Member) -> bool:
        if self._backoff.level or member.backoff.level:
            return False
        return member.share >= member.window < member.limit

    def grow(self) -> None:
        """Double the windows that were exhausted, because a handler or the caller waits."""
        for member in self.exhausted:
            _grow(member)
        self.exhausted.clear()

    def shares(self, now: float) -> Mapping[K, int]:
        """Return the RDY count of each connection."""
        shares = dict.fromkeys(self._members, 0) | self._shares(now)
        for key, member in self._members.items():
            member.share = shares[key]
        return shares

    def _shares(self, now: float) -> dict[K, int]:
        """Return the RDY counts that are not 0."""
        most = self._most()
        able = {key: member for key, member in self._members.items() if member.most > 0} if most else {}
        if len(able) > most:
            self._take_turns(able, most, now)
            return {key: 1 for key, member in able.items() if member.turn is not None}
        idle: list[K] = []
        for key, member in self._members.items():
            member.turn = None
            if now - member.received > IDLE:
                member.window = member.initial
                idle.append(key)
        idle = [key for key in idle if key in able]
        if len(idle) == len(able):
            idle = []
        busy = {key: self._limit(member, len(able)) for key, member in able.items() if key not in idle}
        return dict.fromkeys(idle, 1) | _share_out(most - len(idle), busy, {key: able[key].share for key in busy})

    def _limit(self, member: _Member, members: int) -> int:
        """Return the largest count for a member: its window, and its part of the bytes that may be in flight."""
        if not self._max_bytes or not member.size:
            return member.most
        return min(member.most, max(1, int(self._max_bytes / members / member.size)))

    def _most(self) -> int:
        state = self._backoff.state
        if self.paused or state == "waiting":
            return 0
        return max(self.max_in_flight + self._extra, self._sole) if state == "running" else 1

    def _take_turns(self, able: Mapping[K, _Member], most: int, now: float) -> None:
        for member in self._members.values():
            if member.turn is not None:
                quiet = now - max(member.received, member.turn)
                over = now - member.turn > _TURN or quiet > IDLE_TURN
                if over or not member.most:
                    member.turn = None
        having = [member for member in able.values() if member.turn is not None]
        for member in sorted(having, key=lambda member: member.order)[most:]:
            member.turn = None
        waiting = sorted((member for member in able.values() if member.turn is None), key=lambda member: member.order)
        for member in waiting[: max(0, most - len(having))]:
            self._turns += 1
            member.turn, member.order = now, self._turns


def _grow(member: _Member) -> None:
    member.window = min(2 * member.window, member.limit)
    member.recent = 0


def _share_out(total: int, limits: Mapping[K, int], current: Mapping[K, int]) -> dict[K, int]:
    """Give each an equal share, up to its limit; what one cannot use is given to the others.

    The remainder of the division goes to the largest current shares: moving it would lower a count whose messages are
    in flight already, so that more than ``total`` messages would be in flight.
    """
    shares: dict[K, int] = {}
    rest = sorted(limits.items(), key=lambda item: item[1])
    while rest and rest[0][1] <= total // len(rest):
        key, limit = rest.pop(0)
        shares[key] = limit
        total -= limit
    if rest:
        level, more = divmod(total, len(rest))
        rest.sort(key=lambda item: current[item[0]])
        for number, (key, _) in enumerate(rest):
            shares[key] = level + (number >= len(rest) - more)
    return shares
