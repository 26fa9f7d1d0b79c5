"""What one consumer of many connections has in flight by the servers' own counts, and which connections wait.

A schedule has one consumer of 1 to 60 connections on servers of either generation. Its seed draws the settings, how
long handlers take and how often they fail, and what an operator does: pauses, changes of ``max_in_flight``, and
moves of leaders. Each time that a server sends something, the messages in flight of all clients are counted.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from nsqext import Consumer, Message, Producer
from nsqext.broker.options import ClusterOptions, ClusterShape
from nsqext.broker.runtimes import RuntimeOriginal
from nsqext.errors import NsqError
from nsqext.testing.simulation.cluster import as_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.broker.coordinator.topics import ClusterMember, TopicSpec
    from nsqext.broker.engine.channel.in_flight import SubscribedClient
    from nsqext.broker.runtime import Runtime
    from nsqext.testing.simulation import World
    from nsqext.testing.simulation.sockets import SimulatedSocket
    from tests.campaigns.simulation.plan import Plan

__all__ = ("FlowViolated", "run_flow")

_CHANNEL = "flow"
_LOWERED = 1.0
"""Seconds in which what was in flight when ``max_in_flight`` was lowered may still be sent."""
_LOST = 2.0
"""Seconds after a move in which servers may not have noticed that a connection was closed."""
_TURN = 6.0
"""Seconds of a turn, apart from handlers, as guarantees.md says."""
_PROBED = 1.0
"""Seconds from the end of a pause of the backoff to the next message."""
_IDLE_TURN = 1.0
"""Seconds of the turn of a connection without messages, and until its server has read the lower RDY count."""
_BASE = 0.2
"""Seconds of `backoff_base`."""
_MOMENT = 0.3
_DRAIN = 400.0


class FlowViolated(AssertionError):
    """More was in flight than allowed, or a connection waited for too long."""


class _Original(RuntimeOriginal):
    """Nodes of the original generation without lookup nodes: their registration uses other sockets."""

    def add_member(self, member: ClusterMember) -> None:  # type: ignore[override]
        member.node.load()

    async def wait_registered(self) -> None:
        """Return at once."""

    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        for running in self.nodes.values():
            hosted = running.member.node.create_topic(name)
            for channel in channels:
                running.member.node.channel(hosted, channel)


class _Flow:
    """One schedule."""

    def __init__(self, world: World, plan: Plan, runtime: Runtime, *, original: bool) -> None:
        random = Random(f"flow {plan.seed}")
        self._world = world
        self._random = random
        self._runtime = runtime
        self._original = original
        wanted = random.choice((1, 2, 3, 5, 10, 20, 40, 60))
        self._partitions = 1 if original else random.choice((1, 1, 2, 3))
        topics = max(1, wanted // (len(runtime.nodes) if original else self._partitions))
        self._topics = [f"flow{number}" for number in range(topics)]
        self._connections = topics * (len(runtime.nodes) if original else self._partitions)
        self._setting: int = random.choice((1, 1, 2, 5, 20, 200))
        self._concurrency: int = random.choice((1, 1, 4))
        self._slow: float = random.choice((0.0, 0.02, 0.3))  # longest time of a handler
        self._failing: float = random.choice((0.0, 0.0, 0.02, 0.2))
        self._backoff: str = random.choice(("consumer", "consumer", "connection", "off"))
        self._moves: bool = not original and random.random() < 0.3
        self._habits = [habit for habit in ("pause", "pause topic", "change") if random.random() < 0.4]
        self._consumer = self._make_consumer()
        self._paused: set[str] = set()
        self._published = 0
        self._stored: set[bytes] = set()
        self._handled: set[bytes] = set()
        self._allowed = self._setting  # what may be in flight
        self._lowered_at = -_LOWERED
        self._excused_until = 0.0
        self._waiting: dict[str, float] = {}  # connections with messages and RDY 0, since when
        self._idle_since: float | None = None  # nothing is in flight, although messages wait
        self.found: dict[str, str] = {}

    def _make_consumer(self) -> Consumer:
        settings: dict[str, Any] = {
            "max_in_flight": self._setting,
            "concurrency": self._concurrency,
            "backoff": self._backoff,
            "backoff_base": _BASE,
            "backoff_max_wait": 2.0,
            "requeue_delay": 0.0,
            "initial_ready": self._random.choice((1, 1, 1, 10)),
            "close_timeout": 5.0,
        }
        consumer = Consumer(self._topics, _CHANNEL, **self._addresses(), **settings)
        consumer.handler(self._handle)
        return consumer

    def _addresses(self) -> dict[str, Any]:
        if not self._original:
            return {"lookupd": self._world.cluster.lookupd}
        return {"nsqd": [str(running.tcp) for running in self._runtime.nodes.values()]}

    async def _handle(self, message: Message) -> None:
        random = self._world.random
        if random.random() < 0.5:
            await anyio.sleep(random.uniform(0.0, self._slow))
        if random.random() < self._failing:
            raise ValueError
        self._handled.add(message.body)

    async def run(self) -> None:
        """Run it."""
        world = self._world
        for topic in self._topics:
            if self._original:
                await self._runtime.create_topic(topic, None, (_CHANNEL,))  # type: ignore[arg-type]
            else:
                await world.cluster.create_topic(topic, self._partitions, channels=[_CHANNEL])
        world.network.on_sent = self._count
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(Producer(**self._addresses()))
            await stack.enter_async_context(self._consumer)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                with anyio.move_on_after(self._random.choice((5.0, 15.0))):
                    async with anyio.create_task_group() as duties:
                        duties.start_soon(self._publish, producer)
                        duties.start_soon(self._operate)
                self._failing = 0.0
                self._consumer.resume()
                for topic in tuple(self._paused):
                    self._resume(topic)
                await self._drain()
                tasks.cancel_scope.cancel()

    async def _publish(self, producer: Producer) -> None:
        random = self._random
        busy = self._topics if random.random() < 0.5 else random.sample(self._topics, 1)
        while True:
            topic = random.choice(busy if random.random() < 0.9 else self._topics)
            bodies = [b"%d" % (self._published + number) for number in range(random.choice((1, 1, 5, 30)))]
            self._published += len(bodies)
            with anyio.CancelScope(shield=True):
                try:
                    await producer.publish_many(topic, bodies)
                    self._stored.update(bodies)
                except NsqError:  # while its leader moves
                    self._excuse()
            await anyio.sleep(random.choice((0.0, 0.02, 0.3, 2.0)))

    async def _operate(self) -> None:
        random = self._random
        habits = [*self._habits, *["move"] * self._moves]
        while habits:
            await anyio.sleep(random.uniform(0.3, 3.0))
            topic = random.choice(self._topics)
            match random.choice(habits):
                case "pause":
                    self._consumer.pause()
                    await anyio.sleep(random.uniform(0.0, 1.5))
                    self._consumer.resume()
                case "pause topic" if topic in self._paused:
                    self._resume(topic)
                case "pause topic":
                    self._paused.add(topic)
                    self._consumer.pause(topic)
                case "change":
                    self._set(random.choice((1, 2, 5, 20, 200)))
                case _:
                    self._excuse()
                    leader = random.choice(self._world.cluster.nodes)
                    partition = random.randrange(self._partitions)
                    with anyio.CancelScope(shield=True):
                        await self._world.cluster.move_leader(topic, partition, leader)
                    self._excuse()
            self._waiting.clear()
            self._idle_since = None

    def _resume(self, topic: str) -> None:
        self._paused.discard(topic)
        self._consumer.resume(topic)

    def _set(self, setting: int) -> None:
        if setting < self._setting:
            self._lowered_at = self._world.now
        self._setting = setting
        self._allowed = max(self._allowed, setting)
        self._consumer.max_in_flight = setting

    def _excuse(self) -> None:
        self._excused_until = self._world.now + _LOST

    # What the servers count

    def _clients(self) -> Iterator[tuple[str, str, int, SubscribedClient]]:
        """Yield for each connection its topic, its place, the messages that wait on the server, and the client."""
        for name, running in self._runtime.nodes.items():
            for (topic, partition), hosted in running.member.node.hosted.items():
                channel = hosted.partition.channels.get(_CHANNEL)
                if channel is not None:
                    depth = channel.cursor.stats().depth
                    for client in channel.clients.values():
                        yield topic, f"{topic}[{partition}] on {name}", depth, client

    def _count(self, _: SimulatedSocket, __: bytes) -> None:
        in_flight = sum(
            client.in_flight
            for running in self._runtime.nodes.values()
            for hosted in running.member.node.hosted.values()
            if (channel := hosted.partition.channels.get(_CHANNEL)) is not None
            for client in channel.clients.values()
        )
        now = self._world.now
        if now > self._lowered_at + _LOWERED:
            self._allowed = max(self._setting, min(self._allowed, in_flight))
        if in_flight:
            self._idle_since = None
        if in_flight > self._allowed and now > self._excused_until:
            self.found.setdefault("bound", f"{in_flight} messages in flight at {now:.3f} s, allowed {self._allowed}")

    async def _watch(self) -> None:
        """Look for connections that wait for too long."""
        while True:
            await anyio.sleep(0.1)
            now = self._world.now
            levels = [one.backoff for one in self._consumer.connections]
            disturbed = self._consumer.paused or now < self._excused_until
            self._watch_turns(now, usual=not disturbed and not any(levels))
            self._watch_pauses(now, max(levels, default=0), usual=not disturbed)

    def _watch_turns(self, now: float, *, usual: bool) -> None:
        handlers = self._slow * max(1.0, self._setting / self._concurrency)
        longest = (_TURN + handlers) * max(1, ceil(self._connections / self._setting)) + _MOMENT
        waiting = {
            f"connection {client.id} of {place}": waits
            for topic, place, waits, client in self._clients()
            if usual and waits and not client.ready and not client.in_flight and topic not in self._paused
        }
        self._waiting = {found: self._waiting.get(found, now) for found in waiting}
        for found, since in self._waiting.items():
            if now - since > longest:
                text = f"RDY 0 from {since:.3f} to {now:.3f} s with {waiting[found]} messages, allowed {longest:.1f} s"
                text = f"{found}: {text}"
                self.found.setdefault("turns", text)

    def _watch_pauses(self, now: float, level: int, *, usual: bool) -> None:
        clients = list(self._clients())
        waits = any(waits and topic not in self._paused for topic, _, waits, _ in clients)
        if not usual or not waits or any(client.in_flight for *_, client in clients):
            self._idle_since = None
            return
        since = self._idle_since = self._idle_since if self._idle_since is not None else now
        longest = _BASE * 2.0**level + _PROBED + _MOMENT if level else _MOMENT
        turns = ceil(self._connections / self._setting)
        if turns > 1 or not level or self._backoff == "connection":  # idle connections take turns
            longest += _IDLE_TURN * turns
        if now - since > longest:
            text = f"nothing was in flight from {since:.3f} to {now:.3f} s at level {level}, allowed {longest:.1f} s"
            self.found.setdefault("pauses", text)

    async def _drain(self) -> None:
        with anyio.move_on_after(_DRAIN):
            while not self._stored <= self._handled:  # noqa: ASYNC110 - handlers have no event
                await anyio.sleep(0.25)
        if lost := self._stored - self._handled:
            self.found["lost"] = f"{len(lost)} of {self._published} messages were not handled"

    def __repr__(self) -> str:
        return (
            f"{'original' if self._original else 'redesigned'}, {self._connections} connections, max_in_flight "
            f"{self._setting}, concurrency {self._concurrency}, handlers up to {self._slow} s, backoff {self._backoff}"
        )


async def run_flow(world: World, plan: Plan) -> None:
    """Run a consumer of many connections.

    Raises:
        FlowViolated: see `FlowViolated`.
    """
    if Random(f"generation {plan.seed}").random() < 0.5:
        flow = _Flow(world, plan, world.cluster.runtime, original=False)
        await flow.run()
    else:
        runtime = _Original(ClusterShape(3, 1, "original"), ClusterOptions(seed=plan.seed))
        async with anyio.create_task_group() as tasks:
            with as_server():
                await tasks.start(runtime.run)
            flow = _Flow(world, plan, runtime, original=True)
            await flow.run()
            runtime.stop()
    if flow.found:
        raise FlowViolated("\n".join((*(f"{name}: {text}" for name, text in flow.found.items()), repr(flow))))
