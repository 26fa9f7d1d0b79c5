"""Sample a cluster's topics, statistics and nodes, and derive rates from successive samples."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, evolve, field, frozen

from nsqext.admin import Admin, NodeStatus, TopicInfo, TopicStats
from nsqext.admin.options import admin_settings
from nsqext.admin.requests import ask_all
from nsqext.client.settings import settings_for
from nsqext.errors import NsqError, TopicNotFound
from nsqext.waits import Waiters, Wakeup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KEPT = 60  # points of a sparkline
_AVERAGED = 5  # points of a rate shown as a number
_WATCHED = 30.0  # seconds of sampling after the last request
_LOOKED_UP = 32  # unchanged topics looked up per sample
# short, because a frozen node delays all numbers
_REQUEST_TIMEOUT, _STRAGGLER_TIMEOUT = 1.5, 0.5


@frozen
class Rate:
    """Messages per second over the last samples."""

    points: tuple[float, ...] = ()  #: oldest first

    @property
    def now(self) -> float:
        latest = self.points[-_AVERAGED:]
        return sum(latest) / len(latest) if latest else 0.0


_NO_RATE = Rate()


@frozen
class Snapshot:
    """A cluster's state at one time."""

    taken: float  #: in seconds since 1970
    topics: Mapping[str, TopicInfo]
    stats: Mapping[str, TopicStats]
    nodes: tuple[NodeStatus, ...]
    published: Mapping[str, Rate]  #: by topic
    finished: Mapping[tuple[str, str], Rate]  #: by topic and channel
    error: NsqError | None = None  #: of a failed sample after it

    def publish_rate(self, topic: str) -> Rate:
        return self.published.get(topic, _NO_RATE)

    def finish_rate(self, topic: str, channel: str) -> Rate:
        return self.finished.get((topic, channel), _NO_RATE)

    @property
    def total_rate(self) -> Rate:
        series = [rate.points for rate in self.published.values()]
        length = max(map(len, series), default=0)
        padded = [(0.0,) * (length - len(points)) + points for points in series]
        return Rate(tuple(sum(column) for column in zip(*padded, strict=True)))

    @property
    def total_lag(self) -> int:
        return sum(channel.lag for topic in self.stats.values() for channel in topic.channels.values())


def _agrees(info: TopicInfo | None, stats: TopicStats) -> bool:
    """Return whether statistics have the leaders, nodes and channels of lookup."""
    if info is None or set(info.channels) != set(stats.channels):
        return False
    if info.generation == "original":
        return set(info.nodes) == {part.node for part in stats.partitions}
    return info.leaders == {part.partition: part.node for part in stats.partitions}


@define
class _Counter:
    """A rate from counters of a topic's parts, which change as leaders move.

    A single decrease is ignored: nodes do not read messages and depth at one instant. A counter that stays lower was
    reset.
    """

    parts: dict[object, int] = field(factory=dict)
    lower: set[object] = field(factory=set)
    points: deque[float] = field(factory=lambda: deque(maxlen=_KEPT))

    def add(self, parts: Mapping[Any, int], elapsed: float) -> None:
        grown = 0
        known = bool(self.parts)
        for part, count in parts.items():
            old = self.parts.get(part, count)
            if count < old and part not in self.lower:
                self.lower.add(part)
                continue
            self.lower.discard(part)
            self.parts[part] = count
            grown += max(count - old, 0)
        if known and elapsed > 0:
            self.points.append(grown / elapsed)


class Monitor:
    """Samples a cluster while a page is open, for all viewers."""

    def __init__(
        self, lookupd: str | Sequence[str], interval: float, settings: Mapping[str, Any] | None = None
    ) -> None:
        # except times, the lookup client's settings are the caller's
        times = {"lookup_request_timeout": _REQUEST_TIMEOUT, "lookup_straggler_timeout": _STRAGGLER_TIMEOUT}
        self._admin = Admin(lookupd, **settings_for(admin_settings(), {**(settings or {}), **times}))
        self._interval = interval  # seconds between samples
        self._latest: Snapshot | None = None
        self._known: dict[str, TopicInfo] = {}
        self._turn = 0
        self._published: dict[str, _Counter] = {}
        self._finished: dict[tuple[str, str], _Counter] = {}
        self._sampled = float("-inf")
        self._counted = float("-inf")  # when a sample succeeded
        self._begun = float("-inf")
        self._viewed = float("-inf")
        self._sampling = anyio.Lock()
        self._wanted = Wakeup()
        self._changed = Waiters()

    async def run(self) -> None:
        """Sample until cancelled, while any page is open; then close the connections."""
        try:
            while True:
                if time.monotonic() - self._viewed > _WATCHED:
                    await self._wanted.wait()
                await self._sample()
                await anyio.sleep(self._interval)
        finally:
            with anyio.CancelScope(shield=True):
                await self._admin.aclose()

    async def current(self, *, newest: bool = False) -> Snapshot:
        """Return the latest sample; a new sample if it is too old, or after a change (``newest``)."""
        self._view()
        if newest or time.monotonic() - self._sampled > 3 * self._interval:
            await self._sample()
        if self._latest is None:
            raise NsqError("the cluster has not been sampled yet")
        if self._latest.error is not None and not self._latest.taken:
            raise self._latest.error
        return self._latest

    async def following(self) -> Snapshot:
        self._view()
        await self._changed.wait()
        return await self.current()

    async def replicas(self, topic: str) -> dict[int, tuple[str, ...]]:
        """Return the in-sync replicas by partition, the leader first; empty after a failed request."""
        with anyio.move_on_after(_REQUEST_TIMEOUT), suppress(NsqError):
            return await self._admin.replicas(topic)
        return {}

    def _view(self) -> None:
        self._viewed = time.monotonic()
        self._wanted.wake()

    async def _sample(self) -> None:
        """Take a sample; concurrent callers share the next sample, as an earlier sample may lack their changes."""
        called = time.monotonic()
        async with self._sampling:
            if self._begun >= called:
                return
            self._begun = time.monotonic()
            try:
                self._latest = await self._read()
            except NsqError as error:
                old = self._latest or Snapshot(0.0, {}, {}, (), {}, {})
                self._latest = evolve(old, error=error)
            self._sampled = time.monotonic()
            self._changed.wake()

    async def _read(self) -> Snapshot:
        stats = await self._admin.all_stats()
        await self._look_up(self._changed_topics(stats))
        topics = {name: self._known.get(name) or self._leaderless(name) for name in stats}
        nodes = await self._admin.nodes()
        now = time.monotonic()
        elapsed, self._counted = now - self._counted, now
        for name, topic in stats.items():
            parts = {part.node if part.partition is None else part.partition: part for part in topic.partitions}
            received = {key: part.messages for key, part in parts.items()}
            self._published.setdefault(name, _Counter()).add(received, elapsed)
            for channel in topic.channels:
                done = {
                    key: max(part.messages - part.channels[channel].lag, 0)
                    for key, part in parts.items()
                    if channel in part.channels
                }
                self._finished.setdefault((name, channel), _Counter()).add(done, elapsed)
        self._forget(topics, stats)
        return Snapshot(
            taken=time.time(),
            topics=topics,
            stats=stats,
            nodes=nodes,
            published={name: Rate(tuple(counter.points)) for name, counter in self._published.items()},
            finished={key: Rate(tuple(counter.points)) for key, counter in self._finished.items()},
        )

    def _changed_topics(self, stats: Mapping[str, TopicStats]) -> list[str]:
        """Return topics whose statistics differ from lookup's last answer, and some others in turn, to spare lookup."""
        changed = {name for name, topic in stats.items() if not _agrees(self._known.get(name), topic)}
        others = [name for name in stats if name not in changed]
        if others:
            start = self._turn % len(others)
            changed.update((others[start:] + others[:start])[:_LOOKED_UP])
            self._turn = start + _LOOKED_UP
        return sorted(changed)

    async def _look_up(self, names: Sequence[str]) -> None:
        found, failed = await ask_all(names, self._admin.topic)
        self._known |= found
        for name, error in failed.items():
            if not isinstance(error, TopicNotFound):
                raise error
            self._known.pop(name, None)  # without leaders, or deleted

    def _leaderless(self, name: str) -> TopicInfo:
        """Describe a topic that lookup lists but does not find, because no partition has a leader."""
        old = self._latest.topics.get(name) if self._latest is not None else None
        return TopicInfo(name, "redesigned", None, {}, (), ()) if old is None else evolve(old, leaders={})

    def _forget(self, topics: Mapping[str, TopicInfo], stats: Mapping[str, TopicStats]) -> None:
        channels = {name: {*info.channels, *stats[name].channels} for name, info in topics.items()}
        self._known = {name: info for name, info in self._known.items() if name in topics}
        self._published = {name: counter for name, counter in self._published.items() if name in topics}
        self._finished = {key: counter for key, counter in self._finished.items() if key[1] in channels.get(key[0], ())}
