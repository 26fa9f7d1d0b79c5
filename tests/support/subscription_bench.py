"""The subscriptions of a consumer without connections: RDY counts, ticks and lookups are recorded."""

from __future__ import annotations

from contextlib import asynccontextmanager
from contextvars import ContextVar
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, cast
from unittest.mock import patch

import anyio
from anyio import wait_all_tasks_blocked

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.client.events import ClientEvent, ClientEvents
from nsqext.transport.options import ConnectionOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.lookup.metadata import MetadataCache

__all__ = ("Bench", "Connection", "Timers", "ready", "running")

_MODULE = "nsqext.client.consumer.subscriptions.subscription_group"


class Connection:
    """A subscription that records its RDY counts."""

    def __init__(self, topic: str = "t", partition: int = 0, backoff: Backoff | None = None) -> None:
        self.topic, self.partition, self.node = topic, partition, f"n:{partition}"
        self.backoff = backoff or Backoff(BackoffOptions(), lambda: 1.0)
        self.max_ready, self.msg_timeout = 100, 60.0
        self.key_sharing = KeySharing.NONE
        self.request = SimpleNamespace(options=SimpleNamespace(connection=ConnectionOptions()))
        self.live, self.busy, self.upgradable, self.silent = True, False, False, False
        self.stopped = False
        self.in_flight = self.received = self.requeued = self.timed_out = self.received_bytes = 0
        self.ready = self.flushes = 0
        self.pending: list[bytes] = []
        self.received_at, self.watched = 0.0, True
        self.silence_due = inf
        self.ticks = 0
        self.unrecorded = (0, 0)
        self.waited, self.excess, self.width = 0.0, inf, inf

    def set_ready(self, count: int) -> None:
        """Record a RDY count."""
        self.ready = count

    def take_unrecorded(self) -> tuple[int, int, float, float]:
        """Return what was received since the last call, and what the test says of it."""
        (count, size), self.unrecorded = self.unrecorded, (0, 0)
        return count, size, self.excess, self.width

    def flush(self) -> None:
        """Count the flushes."""
        self.flushes += 1
        self.pending.clear()

    def tick(self) -> None:
        """Count the ticks."""
        self.ticks += 1

    def misses_heartbeat(self, now: float) -> bool:
        """Return what the test says."""
        return self.silent


class Bench:
    """A group of connections that a test adds.

    Attributes:
        ticks: when its timer has ticked.
        late: by how much each tick was late.
        pause: seconds from its last tick to the next one; see `running`.
    """

    def __init__(
        self,
        max_in_flight: int = 10,
        mode: Literal["consumer", "connection"] = "connection",
        initial_ready: int = 100,
    ) -> None:
        self.events: list[ClientEvent] = []
        self.looked_up: list[str] = []
        self.ticks: list[float] = []
        self.late: list[float] = []
        self.pause = inf
        events = ClientEvents()
        events.add(self.events.append)
        options = ConsumerOptions(
            max_in_flight=max_in_flight,
            max_in_flight_bytes=0,
            initial_ready=initial_ready,
            backoff=BackoffOptions(mode=mode),
        )
        tasks = cast("BackgroundTasks", SimpleNamespace(check_event_loop=lambda: None))
        self.group = SubscriptionGroup(options, cast("MetadataCache", self), events, tasks)
        self.backoff, self.flow = self.group.backoff, self.group.flow

    answer_age: float | None = 1.5
    failures: int = 2
    service: frozenset[str] = frozenset(("lookup:4161",))

    def lists_cheaply(self, count: int) -> bool:
        """Return that the list of all topics is long."""
        return False

    def poll_soon(self, topic: str, access: str = "r") -> None:
        """Record what is looked up, as metadata of the consumer."""
        self.looked_up.append(topic)

    def add(self, *connections: Connection) -> None:
        """Add open subscriptions."""
        for connection in connections:
            self.group.add(cast("Subscription", connection))
        self.group.flush()

    def ticked(self, now: float, late: float) -> None:
        """Record a tick."""
        self.ticks.append(now)
        self.late.append(late)

    def remove(self, connection: Connection) -> bool:
        """Remove a subscription that ended."""
        added = self.group.remove(cast("Subscription", connection))
        self.group.flush()
        return added


def ready(*connections: Connection) -> list[int]:
    """Return the RDY counts."""
    return [connection.ready for connection in connections]


class Timers:
    """Timers of benches in the time of a test: they tick when they are due, and when they are woken.

    Args:
        now: what the clock of the groups shows, in a list.
    """

    def __init__(self, now: list[float]) -> None:
        self._now = now
        self._bench: ContextVar[Bench] = ContextVar("bench")
        self._rests: dict[Bench, tuple[float, anyio.CancelScope]] = {}

    async def run(self, bench: Bench) -> None:
        """Run the timer of a bench until cancelled."""
        self._bench.set(bench)
        await bench.group.run_timer(bench.ticked)

    def rest(self, pause: float) -> anyio.CancelScope:
        """Return the scope of a pause, as `anyio.move_on_after` does."""
        bench, scope = self._bench.get(), anyio.CancelScope()
        bench.pause = pause
        self._rests[bench] = self._now[0] + pause, scope
        if pause <= 0:
            scope.cancel()
        return scope

    async def settle(self) -> None:
        """Let the timers that were woken tick."""
        await wait_all_tasks_blocked()

    async def advance(self, seconds: float) -> None:
        """Let time pass: each timer ticks when it is due."""
        end = self._now[0] + seconds
        await self.settle()
        while (due := min((due for due, _ in self._rests.values()), default=inf)) <= end:
            await self._set(due)
        await self._set(end)

    async def stand_still(self, seconds: float) -> None:
        """Let time pass in one step: timers that were due meanwhile are late."""
        await self._set(self._now[0] + seconds)

    async def _set(self, time: float) -> None:
        self._now[0] = time
        for due, scope in self._rests.values():
            if due <= time:
                scope.cancel()
        await self.settle()


@asynccontextmanager
async def running(now: list[float], *benches: Bench) -> AsyncIterator[Timers]:
    """Run the timers of benches within a block."""
    timers = Timers(now)
    with anyio.fail_after(25), patch(f"{_MODULE}.anyio", SimpleNamespace(move_on_after=timers.rest)):
        async with anyio.create_task_group() as tasks:
            for bench in benches:
                tasks.start_soon(timers.run, bench)
                await timers.settle()
            yield timers
            tasks.cancel_scope.cancel()
