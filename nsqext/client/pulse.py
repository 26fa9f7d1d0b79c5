"""Shared by the consumers of an event loop: detect standstills of the process, and look up silent topics."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

from anyio.lowlevel import RunVar
from attrs import define, field, frozen

from nsqext.waits import chance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.lookup.metadata import MetadataCache
    from nsqext.types import Address

PAST_DUE = 0.01
"""Seconds between a due time and its tick."""
# seconds after a late tick within which bytes may have waited in the socket; trio orders timers and readers freely
_AFTERWARDS = 0.05

_SILENCE = 4.0  # seconds without a message, and between two lookups, of a topic
_JITTER = 1.0  # most seconds by which a pause is shorter, so that processes do not coincide
_RATE = 25.0  # most single lookups per second
_LIST_FROM = 4  # topics of a service from which on the list of all topics is read, if it is not long

_Service: TypeAlias = "frozenset[Address]"


class PulseMember(Protocol):
    """A consumer's subscriptions, with a timer."""

    @property
    def metadata(self) -> MetadataCache:
        """Where its topics are looked up."""

    def upgradable_topics(self) -> dict[str, float]:
        """Return the subscribed topics without extend support, with the time of their last messages."""

    def longest_pause(self) -> float:
        """Return the seconds until its next tick at the latest."""

    def wake_timer(self) -> None:
        """Tick in the next turn of the event loop."""


@frozen
class _Upgradable:
    """Subscribed topics of a lookup service without extend support."""

    metadata: MetadataCache
    since: dict[str, float] = field(factory=dict)  #: last messages of each topic

    def look_up(self, looked_up: dict[str, float], now: float) -> float:
        """Look up the due topics; return when the next is due."""
        listed = len(self.since) >= _LIST_FROM and self.metadata.lists_cheaply(len(self.since))
        pause = _SILENCE if listed else max(_SILENCE, len(self.since) / _RATE)
        due = [topic for topic, since in self.since.items() if max(since, looked_up[topic]) + pause <= now]
        if due and listed:
            self.metadata.poll_extended(self.since)
        for topic in self.since if due and listed else due:
            if not listed:
                self.metadata.poll_soon(topic, "r")
            looked_up[topic] = now - chance.uniform(0.0, _JITTER)
        return min((max(since, looked_up[topic]) + pause for topic, since in self.since.items()), default=inf)


class SilenceWatch:
    """Looks up silent topics, which another tool may have upgraded to extend support.

    After an upgrade, the first message stops the deliveries to connections without extend support: the server sends
    them neither messages nor heartbeats nor an error (captured: upgrade_ext), which shows only after 30 s. So topics
    without extend support are looked up while no message arrives. Several topics are looked up in a list of all topics,
    unless it is long.
    """

    def __init__(self) -> None:
        self.due: float = inf  #: next `look_up`
        self._looked_up: dict[_Service, dict[str, float]] = {}

    def watch(self, now: float) -> None:
        self.due = min(self.due, now + _SILENCE)

    def look_up(self, members: Iterable[PulseMember], now: float) -> None:
        """Look up the due topics of all consumers."""
        services: dict[_Service, _Upgradable] = {}
        for member in members:
            topics, service = member.upgradable_topics(), member.metadata.service
            if topics and service not in services:
                services[service] = _Upgradable(member.metadata)
            for topic, received in topics.items():
                since = services[service].since
                since[topic] = max(received, since.get(topic, -inf))
        before, self._looked_up, self.due = self._looked_up, {}, inf
        for service, found in services.items():
            last = before.get(service, {})
            looked_up = self._looked_up[service] = {topic: last.get(topic, -inf) for topic in found.since}
            self.due = min(self.due, found.look_up(looked_up, now))


@define(eq=False)
class Pulse:
    """Detects standstills of process or event loop, for all consumers of a loop.

    The first consumer's timer is enough: the others wake only when something is due.
    """

    members: dict[PulseMember, None] = field(factory=dict)  #: open consumers; the first consumer's timer keeps ticking
    ticked_at: float = field(default=0.0, init=False)  #: last tick of that timer
    due_at: float = field(default=inf, init=False)  #: its next tick
    stood_since: float = field(default=0.0, init=False)  #: last tick before the latest standstill
    stood_until: float = field(default=-inf, init=False)  #: until when read bytes may be from the standstill
    silence: SilenceWatch = field(factory=SilenceWatch, init=False)

    @classmethod
    def current(cls) -> Pulse:
        """Return the pulse of the running event loop."""
        pulse = _current.get(None) or cls()
        _current.set(pulse)
        return pulse

    def notice(self, since: float, now: float) -> None:
        """Record that a timer was late; ``since`` is its last tick."""
        if now >= self.stood_until:
            self.stood_since, self.stood_until = max(since, self.ticked_at), now + _AFTERWARDS

    def limit(self, member: PulseMember, pause: float, now: float) -> float:
        """Return the pause of a timer, short for the first consumer."""
        first = next(iter(self.members))
        if first is not member:
            if now + member.longest_pause() < self.due_at:
                first.wake_timer()
            return pause
        pause = min(pause, *(other.longest_pause() for other in self.members))
        pause = max(0.0, min(pause, self.silence.due + PAST_DUE - now))
        self.ticked_at, self.due_at = now, now + pause
        return pause

    def look_up_silent(self, now: float) -> None:
        """Look up the topics that may have been upgraded."""
        if now >= self.silence.due:
            self.silence.look_up(self.members, now)

    def watch_silence(self, now: float) -> None:
        """Look up a subscribed topic without extend support while no message arrives."""
        self.silence.watch(now)
        if self.silence.due + PAST_DUE < self.due_at:
            self._wake_first()

    def leave(self, member: PulseMember) -> None:
        """Remove a consumer that ends."""
        del self.members[member]
        self.due_at = inf
        self._wake_first()

    def _wake_first(self) -> None:
        for first in self.members:
            first.wake_timer()
            break


_current: RunVar[Pulse] = RunVar("nsqext_pulse")
