"""Refresh partition maps by polling and after errors, a round of requests per topic at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio

from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, NsqError, TopicNotFound
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger, failure
from nsqext.waits import Doubling, Wakeup, chance

if TYPE_CHECKING:
    from nsqext.lookup.options import LookupOptions
    from nsqext.lookup.responses import LookupAnswer
    from nsqext.types import Address

_FIRST_PAUSE = 0.05
_UNSETTLED = 1.0  # seconds to the next poll after a leader is lost; later polls wait as long as it is missing
_ADDED_SHARE = 20  # added partitions are polled after this part of the time for which they have had no leader
_POLLS = 4  # topics polled concurrently
_REFRESHES = 32  # rounds per second, and at once, after errors of found topics
_REFRESHED_WITHIN = 5.0  # seconds within which errors may refresh each of many topics once
_NEVER = float("inf")
_LISTED_FOR_ONE = 10  # a list of this many topics costs a lookup node less than a look-up costs both sides


class PollPace:
    """Pauses between rounds after errors: none at first, then they double up to ``max_pause``.

    A change of the map, or a period without errors, resets them.
    """

    def __init__(self, max_pause: float, jitter: Callable[[], float] | None = None) -> None:
        self._max = max_pause  # seconds
        self._jitter = jitter or (lambda: chance.uniform(0.75, 1.0))  # factor for each pause
        self._pauses = Doubling(_FIRST_PAUSE, max_pause)
        self._pause = 0.0
        self._ended = float("-inf")

    def wait(self, now: float) -> float:
        """Return seconds until the next round may start."""
        if now - self._ended > 1.0 + 2 * self._max:
            self._reset()
        return max(0.0, self._ended + self._pause - now)

    def ended(self, now: float, *, changed: bool, after_error: bool) -> None:
        self._ended = now
        if changed:
            self._reset()
        elif after_error:
            self._pause = self._pauses.next() * self._jitter()

    def _reset(self) -> None:
        self._pauses.reset()
        self._pause = 0.0


class RefreshBudget:
    """Limits the rounds after errors, over all topics of a cache.

    A lost node leads partitions of many topics, and each error requests a round. Without a limit, every client process
    would look up all these topics several times within the first second.
    """

    def __init__(self, rate: float = _REFRESHES) -> None:
        self.topics: int = 0  #: topics of the cache
        # rounds per second, and at once; with many topics a fifth of their number: all are refreshed in five seconds
        self._rate = rate
        self._free_at = float("-inf")

    def take(self, now: float) -> float:
        """Reserve a round; return seconds until it may start."""
        interval = 1 / max(self._rate, self.topics / _REFRESHED_WITHIN)
        self._free_at = max(self._free_at, now - 1.0) + interval
        return max(0.0, self._free_at - now)


class Refresher:
    """The partition map of a topic and access, and the rounds of requests that refresh it.

    The first task that needs a round runs it, and others wait. If this task is cancelled, another task takes over.
    """

    def __init__(
        self,
        topic: str,
        access: str,
        ask: Callable[[], Awaitable[Sequence[LookupAnswer]]],
        options: LookupOptions,
        changed: Callable[[PartitionMap], None],
        budget: RefreshBudget,
        admits: Callable[[Address], bool] | None = None,
    ) -> None:
        self.topic: str = topic
        self.map: PartitionMap | None = None  #: None until a lookup node has found the topic
        #: of the last failed round
        self.error: NsqError = LookupFailed("the lookup service has not been queried yet", topic=topic)
        self.unknown: bool = False  #: in the last round lookup nodes responded, and no node found the topic
        #: nodes without partitions that were listed in the last round; None if no lookup node responded
        self.listed: frozenset[Address] | None = None
        self.poll_at: float = _NEVER  #: in seconds of the event loop's clock
        self._access = access  # ``w`` or ``r``
        self._merger = PartitionMapMerger(topic, access, admits=admits)
        self._admits = admits  # whether a node is used; None for all
        self._ask = ask
        self._options = options
        self._changed = changed  # called with each new map
        self._pace = PollPace(options.max_pause)
        self._budget = budget
        self._rounds = 0
        self._running = anyio.Lock()
        self._settled_at: float | None = None
        self._intervals = Doubling(options.poll_interval, max(options.poll_interval, options.max_poll_interval))
        self._outdated = False

    async def refresh(
        self, failed: PartitionMap | None = None, partition: int | None = None, *, after_error: bool = True
    ) -> None:
        """See `MetadataCache.refresh`; a failed round sets ``error``."""
        if failed is not None:
            if self.map is not None and self.map.version > failed.version:
                return
            if partition is not None and partition in failed.leaders:
                self._merger.suspect(partition, failed.leaders[partition])
        before = self._rounds
        async with self._running:
            while self._rounds == before:
                await self._run_round(after_error)

    def poll_soon(self) -> None:
        """Poll now, and again after a running round: its answers may be older than this call."""
        self.poll_at = float("-inf")
        self._outdated = self._running.locked()

    def start_over(self, ask: Callable[[], Awaitable[Sequence[LookupAnswer]]]) -> None:
        """Query other lookup nodes, whose map replaces the current map when they find the topic."""
        self._ask = ask
        self._merger = PartitionMapMerger(self.topic, self._access, self._merger.current.version, self._admits)
        self._pace = PollPace(self._options.max_pause)
        self.poll_at = float("-inf")

    async def _run_round(self, after_error: bool) -> None:
        merger = self._merger
        pause = self._pace.wait(anyio.current_time())
        if pause:
            await anyio.sleep(pause)
        if after_error and self.map is not None:
            pause = self._budget.take(anyio.current_time())
            if pause:
                await anyio.sleep(pause)
        answers = await self._ask()
        if merger is self._merger:
            self._merge(answers, after_error)

    def _merge(self, answers: Sequence[LookupAnswer], after_error: bool) -> None:
        self._merger.merge(answers)
        now = anyio.current_time()
        changed = False
        if any(answer.found for answer in answers):
            # a topic that is known again is news: consumers of found topics have given up partitions meanwhile
            changed = self.map is not self._merger.current or self.unknown
            self.map = self._merger.current
        else:
            self.error = failure([answer.error for answer in answers if answer.error is not None], self.topic)
        self.unknown = isinstance(self.error, TopicNotFound) and not any(answer.found for answer in answers)
        responded = any(not isinstance(answer.error, LookupFailed) for answer in answers)
        self.listed = frozenset(node.tcp for answer in answers for node in answer.nodes) if responded else None
        self._rounds += 1
        self._pace.ended(now, changed=changed, after_error=after_error)
        self._schedule(now, changed=changed or after_error)
        if changed and self.map is not None:
            self._changed(self.map)

    def _schedule(self, now: float, *, changed: bool) -> None:
        options = self._options
        settled = self.map is not None and self.map.complete and not self.map.unlisted
        if settled or self._settled_at is None:
            self._settled_at = now
        # errors notify a producer of changes; a consumer would miss new partitions
        if changed or not settled or self._access != "w":
            self._intervals.reset()
        interval = self._intervals.next()
        if not settled:
            added = self.map is not None and not self.map.complete
            missing = (now - self._settled_at) / (_ADDED_SHARE if added else 1)
            interval = min(interval, max(_UNSETTLED, missing))
        self.poll_at = now + interval * (1 + options.poll_jitter * chance.uniform(-1, 1))
        if self._outdated:
            self.poll_at, self._outdated = float("-inf"), False


class ExtendedTopics:
    """Reads the list of all topics with extend support, where this costs less than look-ups."""

    def __init__(self, ask: Callable[[], Awaitable[dict[str, bool]]], extended: Callable[[str], None]) -> None:
        self.poll_at: float = _NEVER  #: now or never
        self._ask = ask  # extend support of all topics
        # called with each requested topic that has extend support, or that the list omits
        self._extended = extended
        self._requested: dict[str, None] = {}
        self._listed = 0

    def cheap_for(self, count: int) -> bool:
        """Return whether a list costs less than ``count`` look-ups."""
        return self._listed <= count * _LISTED_FOR_ONE

    def request(self, topics: Iterable[str]) -> None:
        self._requested |= dict.fromkeys(topics)
        self.poll_at = -_NEVER

    async def refresh(self, *, after_error: bool = False) -> None:
        """Read the list, and report the requested topics; raises InvalidState."""
        requested, self._requested = self._requested, {}
        try:
            found = await self._ask()
        except InvalidState:
            raise
        except LookupUnreachable:
            return
        except NsqError:  # the real server fails while a topic is being deleted
            found = {}
        else:
            self._listed = len(found)
        for topic in requested:
            if found.get(topic, True):
                self._extended(topic)


class Polled(Protocol):
    """A topic's map or a list."""

    poll_at: float  #: in seconds of the event loop's clock

    async def refresh(self, *, after_error: bool) -> None:
        """Poll; raises InvalidState."""


class Poller:
    """Polls all topics in a single task; if it is cancelled, another task in `run` takes over."""

    def __init__(self, polled: Callable[[], Iterable[Polled]]) -> None:
        self._polled = polled
        self._wake = Wakeup()
        self._polling = anyio.Lock()
        self._stopped = False

    async def run(self) -> None:
        """Poll, or wait to take over, until `stop`."""
        async with self._polling:
            if not self._stopped:
                await self._poll_all()

    def wake(self) -> None:
        self._wake.wake()

    def stop(self) -> None:
        """Make `run` return without waiting for responses."""
        self._stopped = True
        self.wake()

    async def _poll_all(self) -> None:
        limiter = anyio.CapacityLimiter(_POLLS)
        async with anyio.create_task_group() as tasks:
            while not self._stopped:
                now, next_poll = anyio.current_time(), _NEVER
                for refresher in self._polled():
                    if refresher.poll_at <= now:
                        refresher.poll_at = _NEVER
                        tasks.start_soon(self._poll, refresher, limiter)
                    next_poll = min(next_poll, refresher.poll_at)
                with anyio.move_on_after(next_poll - now):
                    await self._wake.wait()

    async def _poll(self, refresher: Polled, limiter: anyio.CapacityLimiter) -> None:
        try:
            async with limiter:
                if refresher.poll_at == _NEVER:  # otherwise refreshed meanwhile
                    await refresher.refresh(after_error=False)
        except InvalidState:
            return  # closed during the request
        except anyio.get_cancelled_exc_class():
            refresher.poll_at = float("-inf")  # first for the task that takes over
            raise
        self.wake()
