"""Keeps the view of one topic fresh: one round of questions at a time, paced while nothing changes."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import LookupFailed, NsqError
from nsqext.lookup.client import failure
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger

if TYPE_CHECKING:
    from nsqext.lookup.options import LookupOptions
    from nsqext.lookup.responses import LookupAnswer

__all__ = ("Pace", "Refresher")

_FIRST_PAUSE = 0.05
_UNSETTLED = 1.0  # seconds to the next poll after something went missing; as long again as it has been missing


class Pace:
    """Pauses between rounds that were asked for because of errors and changed nothing.

    The first one is not waited for, then pauses double up to ``max_pause``; a change, or a quiet time, starts anew.

    Args:
        max_pause: longest pause, seconds.
        jitter: a function that gives a factor for each pause.
    """

    def __init__(self, max_pause: float, jitter: Callable[[], float] | None = None) -> None:
        self._max = max_pause
        self._jitter = jitter or (lambda: random.uniform(0.75, 1.0))
        self._pause = 0.0
        self._ended = float("-inf")

    def wait(self, now: float) -> float:
        """Return how many seconds the next round has to wait."""
        if now - self._ended > 1.0 + 2 * self._max:
            self._pause = 0.0
        return max(0.0, self._ended + self._pause - now)

    def ended(self, now: float, *, changed: bool, asked_for: bool) -> None:
        """Note the end of a round: whether it changed the view, and whether an error had asked for it."""
        self._ended = now
        if changed:
            self._pause = 0.0
        elif asked_for:
            self._pause = min(self._max, max(_FIRST_PAUSE, self._pause * 2)) * self._jitter()


class Refresher:
    """One topic and access: its table, and the rounds of questions that renew it.

    Whoever needs a round first runs it, all others wait for the same one; when the one who runs it is cancelled, the
    next takes over. There is no task in the background.

    Args:
        topic: name of the topic.
        access: ``w`` or ``r``.
        ask: asks all lookup nodes.
        options: pauses and intervals.
        changed: called with every new view.
    """

    def __init__(
        self,
        topic: str,
        access: str,
        ask: Callable[[], Awaitable[Sequence[LookupAnswer]]],
        options: LookupOptions,
        changed: Callable[[PartitionMap], None],
    ) -> None:
        self.topic: str = topic
        self.view: PartitionMap | None = None
        """What is known; None until a lookup node has known the topic."""
        self.error: NsqError = LookupFailed("lookup was not asked yet", topic=topic)
        """Why the last round that failed did."""
        self.answered_at: float | None = None
        """When a lookup node gave a usable answer last, in seconds of the event loop's clock."""
        self.failures: int = 0
        """Rounds without a usable answer since then."""
        self.poll_at: float = float("inf")
        """When the next poll is due, in seconds of the event loop's clock."""
        self._table = PartitionMapMerger(topic, access)
        self._ask = ask
        self._options = options
        self._changed = changed
        self._pace = Pace(options.max_pause)
        self._rounds = 0
        self._running: anyio.Event | None = None
        self._settled_at: float | None = None

    async def refresh(
        self, failed: PartitionMap | None = None, partition: int | None = None, *, asked_for: bool = True
    ) -> None:
        """Return when a round has ended that is newer than ``failed``; at once when there is such a view already.

        A round that fails leaves the view as it is, and the reason in ``error``. Cancellation is safe at any time.

        Args:
            failed: the view that led to an error.
            partition: the partition whose leader in ``failed`` refused: another one is believed if there is word of it.
            asked_for: False for polling, which lengthens no pause.

        Raises:
            InvalidState: the lookup client was closed.
        """
        if failed is not None:
            if self.view is not None and self.view.version > failed.version:
                return
            if partition is not None and partition in failed.leaders:
                self._table.suspect(partition, failed.leaders[partition])
        before = self._rounds
        while self._rounds == before:
            if self._running is not None:
                await self._running.wait()
            else:
                await self._run_round(asked_for)

    def start_over(self, ask: Callable[[], Awaitable[Sequence[LookupAnswer]]]) -> None:
        """Ask others from now on, whose word replaces what is known as soon as they know the topic."""
        self._ask = ask
        self._table = PartitionMapMerger(self.topic, self._table.view.access, self._table.view.version)
        self._pace = Pace(self._options.max_pause)
        self.poll_at = float("-inf")

    async def _run_round(self, asked_for: bool) -> None:
        self._running = done = anyio.Event()
        table = self._table
        try:
            await anyio.sleep(self._pace.wait(anyio.current_time()))
            answers = await self._ask()
            if table is self._table:
                self._take(answers, asked_for)
        finally:
            self._running = None
            done.set()

    def _take(self, answers: Sequence[LookupAnswer], asked_for: bool) -> None:
        self._table.merge(answers)
        changed = False
        if any(answer.found for answer in answers):
            changed = self.view is not self._table.view
            self.view = self._table.view
        else:
            self.error = failure([answer.error for answer in answers if answer.error is not None], self.topic)
        now = anyio.current_time()
        if all(isinstance(answer.error, LookupFailed) for answer in answers):
            self.failures += 1
        else:
            self.answered_at, self.failures = now, 0
        self._rounds += 1
        self._pace.ended(now, changed=changed, asked_for=asked_for)
        self._schedule(now)
        if changed and self.view is not None:
            self._changed(self.view)

    def _schedule(self, now: float) -> None:
        options = self._options
        settled = self.view is not None and self.view.complete and not self.view.unlisted
        if settled or self._settled_at is None:
            self._settled_at = now
        interval = options.poll_interval
        if not settled:
            interval = min(interval, max(_UNSETTLED, now - self._settled_at))
        self.poll_at = now + interval * (1 + options.poll_jitter * random.uniform(-1, 1))
