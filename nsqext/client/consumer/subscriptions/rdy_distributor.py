"""Distribute messages in flight among connections (RDY): arithmetic without I/O, given the time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from attrs import define

from nsqext.client.consumer.subscriptions.backlog import LATE, TOLERANCE

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.backoff import Backoff

K = TypeVar("K", bound=Hashable)
_NOTHING: Mapping[Any, int] = {}

IDLE = 10.0
"""Seconds without a message after which a connection has RDY 1 in favour of others, and its window is reset."""
TURN = 5.0
"""Seconds after which a connection that receives messages ends its turn while others wait."""
IDLE_TURN = 0.25
"""Seconds after which a connection that receives nothing, and has nothing in flight, ends its turn."""
SETTLED = 0.25
"""Seconds within which a server has read a sent command, such as a lower RDY count or an answer."""
_TIMER = 0.005  # seconds without a message after which a server sends what it collects, although RDY is not used up
_TURNOVER = 0.05  # seconds in which a window counts as exhausted if that many messages were received
_PROBE = 0.25  # seconds without a message after which a backoff asks further connections
_PROBES = 8  # factor by which it then asks more connections


@define(eq=False)
class _Member:
    """A connection."""

    limit: int  #: its largest RDY count
    backoff: Backoff  #: its own, or the consumer's
    received: float  #: time of the last message
    window: int  #: RDY count reached so far; doubles when it is exhausted
    initial: int  #: first window, also after it was idle
    sole: bool  #: no other consumer receives its messages, so it never waits for a turn
    share: int = 0  #: RDY count
    claim: int = 0  #: messages that may be in flight by the server's count, RDY or more after RDY was lowered
    lowered_at: float = 0.0  #: when its RDY count was lowered
    lower: int = 0  #: the claim once the server has read what was sent
    lower_since: float | None = None  #: None while the claim is not to be lowered
    size: float = 0.0  #: bytes of a message, a moving average, raised at once by a larger message
    recent: int = 0  #: messages received since ``recent_since``
    recent_since: float = 0.0
    fresh: bool = False  #: its last messages had not waited at the server
    excess: float = inf  #: seconds for which its newest message had waited at the server
    width: float = inf  #: widest window that is filled soon
    round_trip: float = 0.0  #: shortest time from an answer to the next message; 0 before RDY was 1
    turn: float | None = None  #: begin of its turn; None without a turn
    idle_since: float | None = None  #: when its turn was first known to be idle; None after a message
    order: int = 0  #: number of its last turn; the lowest has waited longest
    paused: bool = False
    retired: bool = False  #: it will be closed

    @property
    def most(self) -> int:
        if self.paused or self.retired:
            return 0
        state = self.backoff.state
        return min(self.limit, self.window) if state == "running" else 0 if state == "waiting" else 1

    def set_window(self, count: int) -> None:
        """Set the window, within its bounds."""
        self.window = min(max(self.initial, count), self.limit)

    def set_share(self, count: int, now: float) -> None:
        if count < self.share:
            self.lowered_at, self.lower_since = now, None
        self.share = count
        self.claim = max(self.claim, count)

    def settle(self, in_flight: int, now: float) -> None:
        """Lower the claim to the messages in flight when the server must have read earlier answers and a lower RDY.

        Until then, messages sent with a larger RDY count may arrive.
        """
        used = max(self.share, in_flight)
        if used >= self.claim:
            self.claim, self.lower_since = used, None
        elif now < self.lowered_at + SETTLED:
            return
        elif self.lower_since is None:
            self.lower, self.lower_since = used, now
        else:
            self.lower = max(self.lower, used)
            if now >= self.lower_since + SETTLED:
                self.claim, self.lower_since = self.lower, None


class RdyDistributor(Generic[K]):
    """Distribute ``max_in_flight`` among connections as RDY counts.

    The messages in flight over all connections never exceed it. A lower RDY count takes no message back: others get
    what a connection gives up when its messages are answered and the server must have read the RDY count.

    The window of a connection starts at ``initial_ready`` (seed 004: 1) and doubles while it limits the consumer: it
    was exhausted, messages had waited at the server, and a handler or the caller waits. So slow handlers leave messages
    to other consumers, and fast handlers reach their share within milliseconds.

    A server collects messages until the RDY count is used up, or for ``output_buffer_timeout``. So a window shrinks
    while messages do not wait for it, to the messages in flight and a message for a waiting handler, which is sent at
    once.

    Idle connections give way to busier connections. If connections outnumber the messages that may be in flight, they
    take turns, longest waiting first; an idle connection ends its turn early. Key buckets take no turns: the server
    delivers nothing of a partition behind a message whose bucket has RDY 0.

    After a pause of the backoff, the connection that received the last message is asked first, and more connections
    while it has no message.
    """

    def __init__(self, max_in_flight: int, backoff: Backoff, max_bytes: int = 0, initial_ready: int = 1) -> None:
        self.max_in_flight: int = max_in_flight  #: messages over all connections; may be changed
        self.paused: bool = False  #: while True, all counts are 0
        #: concurrent handlers; a window grows to this number even while no handler waits
        self.concurrency: int = 1
        self._backoff = backoff
        # over all connections, by the sizes received so far; each connection may always have a message
        self._max_bytes = max_bytes
        self._initial = initial_ready
        self._members: dict[K, _Member] = {}
        self.exhausted: dict[_Member, None] = {}  #: connections whose window limits the consumer; `fit` doubles it
        self._unanswered: dict[K, _Member] = {}  # connections with messages in flight
        self.wide: dict[K, _Member] = {}  #: connections that a handler waits for, with room for several messages
        self._turns = 0
        self._extra = 0
        self._sole = 0  # connections whose messages no other consumer could handle
        self._probing_since: float | None = None  # when the backoff began to ask for a message
        self._asked = 0  # number of the last turn before that

    def __len__(self) -> int:
        return len(self._members)

    @property
    def takes_turns(self) -> bool:
        """Whether connections outnumber the messages that may be in flight."""
        return len(self._members) > max(self.max_in_flight, self._sole)

    @property
    def _bound(self) -> int:
        return max(self.max_in_flight + self._extra, self._sole)

    @property
    def unsettled(self) -> bool:
        """Whether connections may have more in flight than their RDY count; others get it later."""
        return any(member.claim > member.share for member in self._members.values())

    def add(self, member: K, limit: int, backoff: Backoff, now: float, *, sole: bool = False) -> None:
        """Add a connection, with the largest RDY count that its server accepts.

        Args:
            backoff: its own, or the consumer's.
            sole: no other consumer could handle its messages: its first window is ``max_in_flight``, and its count is
                always at least 1.
        """
        first = self.max_in_flight if sole else self._initial
        self._members[member] = _Member(limit, backoff, now, first, first, sole)
        self._sole += sole

    def pause(self, member: K, *, paused: bool) -> None:
        """Stop or resume a connection; an unknown connection is ignored."""
        found = self._members.get(member)
        if found is not None:
            found.paused = paused

    def retire(self, member: K) -> None:
        """Give a connection no messages until it is removed; an unknown connection is ignored."""
        found = self._members.get(member)
        if found is not None:
            found.retired = True
            self._forget(member, found)

    def remove(self, member: K) -> None:
        """Remove a connection; an unknown connection is ignored."""
        found = self._members.pop(member, None)
        if found is not None:
            self._forget(member, found)
            self._sole -= found.sole

    def _forget(self, key: K, member: _Member) -> None:
        self.exhausted.pop(member, None)
        self._unanswered.pop(key, None)
        self.wide.pop(key, None)

    def widen(self, held: int) -> None:
        """Raise the total by messages that wait for their key or time, by ``max_in_flight`` at most."""
        self._extra = min(held, self.max_in_flight)

    def received(
        self,
        member: K,
        count: int,
        size: int,
        in_flight: int,
        now: float,
        waited: float = 0.0,
        excess: float = inf,
        width: float = inf,
    ) -> bool:
        """Record messages since the last call, at least 1, and their bytes; return whether the counts change.

        Args:
            in_flight: unanswered messages of this connection, with these.
            now: time of the last read.
            waited: seconds without a message or an answer before it.
            excess: see `Backlog.excess`.
            width: see `Backlog.width`.
        """
        found = self._members.get(member)
        if found is None:
            return False
        changed = now - found.received > IDLE or self._probing_since is not None
        found.received, found.idle_since = now, None
        mean = size / count
        found.size = max(mean, found.size + (mean - found.size) / 16)
        found.excess = excess
        if found.share == 1:
            found.round_trip = min(found.round_trip or SETTLED, waited)
        waited -= min(waited, found.round_trip)
        if self._backoff.level or found.backoff.level or found.limit == 1:
            return changed
        self._unanswered[member] = found
        before = found.window
        if now - found.recent_since > _TURNOVER:
            found.recent, found.recent_since = 0, now
        found.recent += count
        exhausted = in_flight >= found.share or found.recent >= found.share
        if exhausted and excess > min(LATE, max(TOLERANCE, waited)):  # it waited before the server became quiet
            self._note_backlog(found)
        elif waited > (TOLERANCE if exhausted else _TIMER):
            self._note_fresh(found, in_flight)
        elif exhausted and in_flight < self.concurrency:
            found.set_window(max(found.window, in_flight + 1))
        if found.window > max(width, self.concurrency):
            found.set_window(max(int(width), self.concurrency))
        found.width = width
        return changed or found.window != before

    def _note_backlog(self, member: _Member) -> None:
        """Let a window grow that is smaller than the backlog."""
        member.fresh = False
        if member.share >= member.window < member.limit:
            if member.window < self.concurrency:
                _grow(member)
            else:
                self.exhausted[member] = None

    def _note_fresh(self, member: _Member, in_flight: int) -> None:
        """Shrink a window that is wider than the backlog, to room for a message of a waiting handler."""
        fits = in_flight + 1 if in_flight < self.concurrency else min(in_flight, member.window, member.share) // 2
        self._shrink(member, fits)

    def _shrink(self, member: _Member, window: int) -> None:
        member.set_window(window)
        member.recent, member.fresh = 0, True
        self.exhausted.pop(member, None)

    def watches(self, member: K) -> bool:
        """Return whether reads have to be recorded at once, and not only before a handler waits.

        The backoff asks the connection, or its window may shrink.
        """
        found = self._members[member]
        if self._probing_since is not None:
            return True
        if self._backoff.level or found.backoff.level or found.sole or found.limit == 1:
            return False
        return max(found.window, self.concurrency) > 1

    def fit(self, in_flight: Callable[[K], int]) -> bool:
        """Fit windows because a handler or the caller waits; return whether any changed.

        Exhausted windows double, and messages in flight leave room for a message. Without a backlog a window is not
        larger: the server would collect messages instead of sending the next at once.

        Args:
            in_flight: returns the unanswered messages of a connection.
        """
        changed = bool(self.exhausted)
        for member in self.exhausted:
            _grow(member)
        self.exhausted.clear()
        for key, member in list(self._unanswered.items()):
            unanswered = in_flight(key)
            before, room = member.window, unanswered + 1
            member.set_window(room if member.fresh else max(before, room))
            changed = changed or member.window != before
            if member.window > room and not member.sole:
                self.wide[key] = member
            if not unanswered:
                del self._unanswered[key]
        return changed

    def narrow(self, quiet: float, in_flight: Callable[[K], int]) -> tuple[bool, float]:
        """Shrink windows of servers that send nothing while handlers wait: they collect the next messages.

        Args:
            quiet: seconds for which handlers have waited, and no connection has received a message.
            in_flight: as for `fit`.

        Returns:
            Whether any changed, and in how many seconds to call this again; infinity without `wide` connections.
        """
        changed, due = False, inf
        for key, member in list(self.wide.items()):
            room = in_flight(key) + 1
            if room > self.concurrency or room >= member.window:
                del self.wide[key]
                continue
            rest = member.round_trip + (TOLERANCE if member.excess <= LATE else LATE) - quiet
            if rest > 0:
                due = min(due, rest)
                continue
            del self.wide[key]
            self._shrink(member, room)
            changed = True
        return changed, due

    def widen_window(self, member: K) -> None:
        """Double the window of a connection; an unknown connection is ignored."""
        found = self._members.get(member)
        if found is not None:
            _grow(found)

    def shares(self, now: float, in_flight: Mapping[K, int] = _NOTHING) -> Mapping[K, int]:
        """Return the RDY count of each connection, by its unanswered messages."""
        free = self._bound
        for key, member in self._members.items():
            if member.claim != member.share or in_flight.get(key, 0) > member.share:
                member.settle(in_flight.get(key, 0), now)
            free -= member.claim
        self._grant(self._wanted(in_flight, now), free, now)
        return {key: member.share for key, member in self._members.items()}

    def _grant(self, wanted: Mapping[K, int], free: int, now: float) -> None:
        """Lower RDY counts at once; raise them within their claims, and by what no claim covers.

        If claims exceed the bound, because it was lowered, no count is raised: claims that are used again never settle.

        Args:
            free: what no claim covers, negative if they exceed the bound.
        """
        missing: dict[K, int] = {}
        for key, member in self._members.items():
            count = wanted.get(key, 0)
            most = member.claim if free >= 0 else max(member.share, int(member.sole))
            if count != member.share:
                member.set_share(min(count, most), now)
            if count > member.claim and free >= 0:
                missing[key] = count - member.claim
        granted = _share_out(max(0, free), missing, dict.fromkeys(missing, 0))
        for key in missing:
            member = self._members[key]
            member.set_share(max(member.claim + granted[key], int(member.sole)), now)

    def _wanted(self, in_flight: Mapping[K, int], now: float) -> dict[K, int]:
        """Return the RDY counts above 0, as if no connection had more in flight."""
        most = self._most(in_flight, now)
        able = {key: count for key, member in self._members.items() if (count := member.most)} if most else {}
        if len(able) > most:
            self._take_turns(able, most, in_flight, now)
            return {key: 1 for key in able if self._members[key].turn is not None}
        idle: list[K] = []
        for key, member in self._members.items():
            member.turn = None
            if now - member.received > IDLE:
                member.window = member.initial
                if key in able:
                    able[key] = member.most
                    idle.append(key)
        if len(idle) == len(able):
            idle = []
        limits = self._within_bytes(able) if self._max_bytes else dict(able)
        for key in idle:
            del limits[key]
        return dict.fromkeys(idle, 1) | _share_out(
            most - len(idle), limits, {key: self._members[key].share for key in limits}
        )

    def _within_bytes(self, able: Mapping[K, int]) -> dict[K, int]:
        """Bound the counts of connections by their part of the bytes that may be in flight."""
        part = self._max_bytes / len(able) if able else 0.0
        sizes = {key: self._members[key].size for key in able}
        return {key: min(count, max(1, int(part / sizes[key]))) if sizes[key] else count for key, count in able.items()}

    def _most(self, in_flight: Mapping[K, int], now: float) -> int:
        state = self._backoff.state
        if state != "probing":
            self._probing_since = None
        if self.paused or state == "waiting":
            return 0
        most = self._bound
        return most if state == "running" else min(most, self._probes(in_flight, now))

    def _probes(self, in_flight: Mapping[K, int], now: float) -> int:
        """Return how many connections to ask after a pause of the backoff."""
        since = self._probing_since
        if since is None:
            since = self._probe_again(now)
            for member in self._members.values():
                member.turn = None
        last = max(self._members.items(), key=lambda item: item[1].received, default=None)
        if last is not None and last[1].received >= since:
            key, member = last
            if in_flight.get(key, 0) or now - member.received <= IDLE_TURN:
                return 1
            since = self._probe_again(now)  # neither handled nor failed: it was not due, or lost
        return int(_PROBES ** int((now - since) / _PROBE))

    def _probe_again(self, now: float) -> float:
        """Ask from now on, first the connections that received last."""
        self._probing_since, self._asked = now, self._turns
        return now

    def _order_of_probes(self, member: _Member) -> float:
        """Return the place of a connection: the latest received first; each is asked before any is asked again."""
        answered = self._probing_since is not None and member.received >= self._probing_since
        return member.order if member.order > self._asked and not answered else -member.received

    def _take_turns(self, able: Iterable[K], most: int, in_flight: Mapping[K, int], now: float) -> None:
        """Give ``most`` connections a turn, longest waiting first; for the backoff, the last that received."""
        for key, member in self._members.items():
            if member.turn is not None:
                if member.idle_since is None and not in_flight.get(key, 0):
                    member.idle_since = now
                idle = member.idle_since is not None and now - member.idle_since > IDLE_TURN
                if idle or now - member.turn > TURN or not member.most:
                    member.turn = None
        probing = self._probing_since is not None
        members = [self._members[key] for key in able]
        having = [member for member in members if member.turn is not None]
        for member in sorted(having, key=lambda member: -member.received if probing else member.order)[most:]:
            member.turn = None
        waiting = sorted((member for member in members if member.turn is None), key=lambda member: member.order)
        if probing:
            waiting.sort(key=self._order_of_probes)
        free = self._bound - sum(max(member.claim, member.turn is not None) for member in self._members.values())
        for member in waiting[: max(0, most - len(having))]:
            if (free <= 0 and not member.claim) or (free < 0 and not member.share):
                break  # what it waits for is not given to connections behind it
            free -= not member.claim
            self._turns += 1
            member.turn = member.idle_since = now
            member.order = self._turns


def _grow(member: _Member) -> None:
    member.set_window(max(member.window, int(min(2 * member.window, max(member.width, 2.0)))))
    member.recent = 0


def _share_out(total: int, limits: Mapping[K, int], current: Mapping[K, int]) -> dict[K, int]:
    """Give each an equal share, up to its limit; unused shares go to the others.

    The remainder goes to the largest current shares: if it moved, it would lower a count whose messages are in flight,
    and more than ``total`` messages would be in flight.
    """
    shares: dict[K, int] = {}
    if sum(limits.values()) <= total:
        return dict(limits)
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
