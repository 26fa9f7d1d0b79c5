"""The schedule that `make simulate` runs: publishers and consumers of every kind, under the faults of a seed."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal

import anyio

from nsqext import Lookup
from tests.campaigns.simulation.checkers import judge
from tests.campaigns.simulation.consumers import Client, Consumers
from tests.campaigns.simulation.history import Channel, History
from tests.campaigns.simulation.operators import Operators
from tests.campaigns.simulation.plan import JOINS, LATE, NODES, PARTED
from tests.campaigns.simulation.publishers import KEYED, Publishers
from tests.campaigns.simulation.wire import RdyWatch

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.testing.simulation import World
    from tests.campaigns.simulation.plan import Plan

__all__ = ("Schedule", "Violated", "run_schedule")

DRAIN = 150.0
"""Virtual seconds after the last fault within which everything has to be handled."""
_CALM = 2.0
"""Virtual seconds without a message that is due, after which a schedule ends."""
_WAITING = 100.0
"""Virtual seconds between two kills of nodes while messages wait for their delays."""
_REJOINED = 3.0
"""Virtual seconds after which a node that was separated has caught up."""
_LATE_PAUSE = 30.0
"""Virtual seconds after which a request to pause, repeated after its timeout, has arrived a second time."""
MAX_ATTEMPTS = 2
"""Attempts of a message of the topic ``rejected``; then it goes to the dead-letter topic ``letters``."""

_UNSETTLED = 0.8
"""Share of the schedules whose producers do not settle publishes of unknown outcome."""


class Violated(AssertionError):
    """The history of a schedule violates a guarantee."""


class Schedule:
    """One schedule: its world, its clients, its history."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world: World = world
        self.plan: Plan = plan
        random = world.random
        share = random.random()
        on_unknown: Literal["retry", "raise", "settle"] = "raise" if share < 0.4 else "retry"
        if share > _UNSETTLED:
            on_unknown = "settle"
        self.history: History = History(on_unknown, timeout=random.choice((4.0, 10.0)))
        if on_unknown == "settle":
            self.history.settle_timeout = 10.0
        self.request_timeout: float = random.choice((1.0, 3.0, 10.0))
        self._lookupd: list[str] | Lookup = world.cluster.lookupd
        if plan.shared_lookup:
            self._lookupd = Lookup(self._lookupd)
        self._extend = {"lanes", "keyed", "tagged", "rejected", "filtered"} | (
            {"recreated"} if "lanes" in plan.habits else set()
        )
        self._publishers = Publishers(world, plan, self.history, self._lookupd, self.request_timeout, self._extend)

    async def run(self) -> None:
        """Run it."""
        await self._create_topics()
        async with anyio.create_task_group() as tasks:  # loops over batches end when their consumers are closed
            await self._run(tasks)
        self.history.left_over += await self._leftovers()

    async def _run(self, tasks: TaskGroup) -> None:
        world, history, publishers = self.world, self.history, self._publishers
        makers = Consumers(world, self.plan, history, self._lookupd, self.request_timeout, tasks, self._extend)
        nodes = world.cluster.runtime.nodes.values()
        operators = Operators(world, history, makers.guest)
        watch = RdyWatch({node.tcp.port for node in nodes}, lambda: world.now, 60.0, history.rdy_exceeded.append)
        if "seek" not in self.plan.habits:  # a seek ends what is in flight, which the connection does not show
            world.network.on_sent, world.network.on_received = watch.sent, watch.received
        async with AsyncExitStack() as stack:
            clients = []
            for client in makers.every():
                await stack.enter_async_context(self._closing(client))
                clients.append(client)
            for _ in range(self.plan.producers):
                await self._add_producer(stack)
            doomed = world.start(lambda: self._doomed_client(makers)) if self.plan.doomed else None
            async with anyio.create_task_group() as publishing:
                consumers = [(client.channel[0], client.consumer) for client in clients]
                for kind in (*publishers.duties(), *operators.duties(self.plan.habits, consumers)):
                    publishing.start_soon(kind)
                if self.plan.guests:
                    publishing.start_soon(self._come_and_go, makers)
                if JOINS in self.plan.features:
                    publishing.start_soon(self._join_in_order, makers)
                if "tagged" in self.plan.topics and self.plan.come_and_go:
                    publishing.start_soon(self._want_green, makers)
                if "rejected" in self.plan.topics and self.plan.come_and_go:
                    publishing.start_soon(self._reject_and_leave, makers)
                publishing.start_soon(self._sample)
                async with world.inject_faults():
                    began = world.now
                    history.paused = sum(fault.seconds for fault in world.faults if fault.kind == "pause")
                    history.half_open = any(fault.kind == "half_open" for fault in world.faults)
                    history.misled = any(fault.kind in ("lookup_wrong", "move") for fault in world.faults)
                    history.faults = [(began + fault.at, began + fault.at + fault.seconds) for fault in world.faults]
                    history.disturbances += history.faults
                    await anyio.sleep(self.plan.seconds)
                    if doomed is not None:
                        history.disturbances.append((world.now, world.now))
                        await doomed.kill(silently=world.random.random() < 0.5)
                publishers.working = operators.working = False
                history.healed = world.now
                if PARTED in self.plan.features:
                    await anyio.sleep(_REJOINED)
                    await self._move_leaders()
                elif world.faults and world.random.random() < 0.5:
                    await self._move_leaders()
                if world.faults:
                    history.disturbances.append((began, world.now))
                    history.faults.append((began, world.now))
            await operators.resume_channels()
            await self._publish_afterwards()
            if LATE in self.plan.features:
                await self._replace_consumers(stack, clients, makers)
                await self._kill_while_messages_wait()
            await self._drain(operators)
            await makers.note_unanswered(clients)

    async def _replace_consumers(self, stack: AsyncExitStack, clients: list[Client], makers: Consumers) -> None:
        """Replace consumers that remember which messages wait by others, for which the servers alone do."""
        await anyio.sleep(_WAITING)
        began = self.world.now
        for client in [client for client in clients if client.channel[0] == "plain"]:
            await client.consumer.aclose()
            clients.remove(client)
        for client in makers.every(("plain",)):
            await stack.enter_async_context(self._closing(client))
            clients.append(client)
        self.history.disturbances.append((began, self.world.now))

    async def _kill_while_messages_wait(self) -> None:
        """Kill each node and start it again, while messages wait for the end of long delays."""
        await anyio.sleep(_WAITING)
        for node in NODES:
            began = self.world.now
            await self.world.cluster.kill(node)
            await anyio.sleep(self.world.random.uniform(0.1, 3.0))
            await self.world.cluster.restart(node)
            await anyio.sleep(_WAITING)
            self.history.disturbances.append((began, self.world.now))
            self.history.faults.append((began, self.world.now))

    async def _drain(self, operators: Operators) -> None:
        """Wait until all messages are handled; give up when nothing was handled for DRAIN seconds."""
        history, world, disk = self.history, self.world, self.world.cluster.disk
        if disk is not None and self.plan.disk is not None and self.plan.disk.fsync == "interval":
            stopped = sum(fault.seconds for fault in world.faults if fault.kind in ("freeze", "pause"))
            history.forget_unsynced(disk.power_losses, 2 * self.plan.disk.sync_interval + stopped)
        fewest, since, late = len(history.due), world.now, world.now + _LATE_PAUSE
        longest = DRAIN + max((found.delay for found in history.deliveries), default=0.0)
        waits = True
        while waits:
            while history.due and world.now < since + longest:
                await anyio.sleep(0.25)
                if len(history.due) < fewest:
                    fewest, since = len(history.due), world.now
                if world.now > late:
                    late = inf
                    await operators.resume_channels()
            await anyio.sleep(_CALM)
            # a copy that nothing waited for may have been delivered meanwhile, and its handler may have raised
            waits = bool(history.due) and world.now < since + longest

    async def _create_topics(self) -> None:
        history, cluster, plan = self.history, self.world.cluster, self.plan
        history.recreated = any(fault.kind == "recreate" for fault in self.world.faults)
        channels = {
            "plain": [Channel("plain", "a"), Channel("plain", "b")],
            "lanes": [Channel("lanes", "a", "key")],
            "keyed": [Channel("keyed", "a", "key", shared=True)],
            "ordered": [Channel("ordered", "a", "partition")],
            "upgraded": [Channel("upgraded", "a")],
            "recreated": [Channel("recreated", "a")],
            "tagged": [Channel("tagged", "a")],
            "filtered": [Channel("filtered", "a"), Channel("filtered", "blue", color="blue")],
            "rejected": [Channel("rejected", "a", max_attempts=MAX_ATTEMPTS, letters="letters")],
        }
        for topic in plan.topics:
            await cluster.create_topic(
                topic,
                plan.partitions,
                replicas=plan.replicas,
                extend=topic in self._extend,
                ordered=topic == "ordered",
                channels=[channel.name for channel in channels[topic]],
                dispatch="key_failover" if topic == "keyed" and not self._publishers.tags_of(topic) else "",
            )
            if topic != "recreated" or not history.recreated:
                history.channels += channels[topic]
        if "rejected" in plan.topics:
            await cluster.create_topic("letters", 1, replicas=plan.replicas, extend=True, channels=["a"])
            history.channels.append(Channel("letters", "a"))
        cluster.upgraded += [topic for topic in plan.topics if topic == "upgraded"]
        cluster.recreated += [topic for topic in plan.topics if topic == "recreated"]

    async def _add_producer(self, stack: AsyncExitStack) -> None:
        publishers = self._publishers
        producer = await stack.enter_async_context(self._closing(publishers.producer()))
        publishers.producers.append(producer)
        if tags := publishers.tags_of("keyed"):
            tagging = await stack.enter_async_context(self._closing(publishers.producer(key_tags=tags)))
            publishers.tagging[producer] = tagging

    def _closing(self, client: Any) -> Any:
        schedule = self

        class Timed:
            async def __aenter__(self) -> Any:
                return await client.__aenter__()

            async def __aexit__(self, *error: Any) -> None:
                began = schedule.world.now
                await client.__aexit__(*error)
                history = schedule.history
                history.close_seconds = max(history.close_seconds, schedule.world.now - began)

        return Timed()

    async def _come_and_go(self, makers: Consumers) -> None:
        """Join and leave the shared channels; some of the handlers hang until their consumer leaves."""
        random, world = self.world.random, self.world
        shared = [topic for topic in self.plan.topics if topic in ("plain", "keyed")]
        number = 0
        while self._publishers.working and shared:
            await anyio.sleep(random.uniform(0.5, 3.0))
            topic = random.choice(shared)
            dispatch: Literal["key_failover"] | None = "key_failover" if topic == "keyed" else None
            number += 1
            name = f"{topic}/a/guest {number}"
            hangs = random.random() < 0.2
            client = makers.make(topic, "a", {"concurrency": 2, "dispatch": dispatch}, name=name, hangs=hangs)
            began = world.now
            async with self._closing(client):
                await anyio.sleep(random.uniform(0.1, 2.0))
            self.history.disturbances.append((began, world.now))

    async def _join_in_order(self, makers: Consumers) -> None:
        """Join and leave the topic whose keys are shared, for as long as buckets take to move; no handler hangs."""
        random, number = self.world.random, 0
        while self._publishers.working:
            number += 1
            name = f"keyed/a/guest {number}"
            client = makers.make("keyed", "a", {"concurrency": 2, "dispatch": "key_failover"}, name=name)
            async with self._closing(client):
                await anyio.sleep(random.uniform(3.0, 9.0))
            await anyio.sleep(random.uniform(0.5, 2.0))

    async def _want_green(self, makers: Consumers) -> None:
        """Join and leave a channel with a tag; some of the handlers hang until their consumer leaves."""
        random, world = self.world.random, self.world
        while self._publishers.working:
            hangs = random.random() < 0.2
            client = makers.make("tagged", "a", {"concurrency": 2, "tag": "green"}, hangs=hangs)
            began = world.now
            async with self._closing(client):
                await anyio.sleep(random.uniform(0.1, 1.5))
            self.history.disturbances.append((began, world.now))
            await anyio.sleep(random.uniform(0.3, 1.5))

    async def _reject_and_leave(self, makers: Consumers) -> None:
        """Join and leave a channel with dead letters; the end cancels the publish of a letter, or the process dies."""
        random, world = self.world.random, self.world
        while self._publishers.working:
            began = world.now
            if random.random() < 0.5:
                client = makers.make("rejected", "a", {"concurrency": 2}, lookupd=world.cluster.lookupd)
                process = world.start(partial(_hold_open, client))
                await anyio.sleep(random.uniform(0.1, 1.5))
                await process.kill(silently=random.random() < 0.2)
            else:
                client = makers.make("rejected", "a", {"concurrency": 2}, close_timeout=0.1)
                async with self._closing(client):
                    await anyio.sleep(random.uniform(0.1, 1.5))
            self.history.disturbances.append((began, world.now))
            await anyio.sleep(random.uniform(0.3, 1.5))

    async def _sample(self) -> None:
        """Count what uses memory, while faults last."""
        world = self.world
        while self._publishers.working:
            sessions = sum(len(node.member.node.sessions) for node in world.cluster.runtime.nodes.values())
            counts = len(asyncio.all_tasks()), len(world.network.sockets), sessions
            self.history.samples.append((world.now, *counts))
            await anyio.sleep(1.0)

    async def _doomed_client(self, makers: Consumers) -> None:
        """Consume and publish, until the process is killed."""
        lookupd = self.world.cluster.lookupd
        client = makers.make("plain", "b", {"concurrency": 2}, name="plain/b/doomed", lookupd=lookupd)
        async with client, self._publishers.producer(lookupd) as producer:
            await self._publishers.publish_each("plain", "doomed", producer)
            await anyio.sleep_forever()

    async def _move_leaders(self) -> None:
        """Move every leader twice, so that nodes lead what they copied after a fault."""
        cluster, random = self.world.cluster, self.world.random
        for _ in range(2):
            for topic, partitions in cluster.topics.items():
                for partition in range(partitions):
                    replicas = cluster.runtime.replicas(topic, partition).state.replicas
                    await cluster.move_leader(topic, partition, random.choice(replicas))

    async def _publish_afterwards(self) -> None:
        """Publish after the faults, with a new producer and with those that saw the faults."""
        await anyio.sleep(self.plan.rest)
        publishers = self._publishers
        async with self._closing(publishers.producer()) as fresh:
            for topic in self.plan.topics:
                for producer in publishers.producers if publishers.tags_of(topic) else (fresh, *publishers.producers):
                    await publishers.publish_one(producer, topic, "last" if topic in KEYED else "")

    async def _leftovers(self) -> list[str]:
        """Return sockets of living clients that exist although every client was closed."""
        await anyio.sleep(1.0)
        network = self.world.network
        mine = [sock for sock in network.sockets.values() if sock.host in self.world.clients]
        return [f"open socket {sock!r}" for sock in mine if sock.host not in network.dead]


async def _hold_open(client: Client) -> None:
    async with client:
        await anyio.sleep_forever()


class _Warnings(logging.Handler):
    """Notes when lanes announce that they do not wait for messages any longer."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(logging.WARNING)
        self._schedule = schedule

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if str(record.msg).endswith("later messages are handled first: %r"):
            place = str(getattr(record, "topic", "")), int(getattr(record, "partition", -1))
            self._schedule.history.order_given_up.append((*place, self._schedule.world.now))


async def run_schedule(world: World, plan: Plan) -> None:
    """Run a schedule and judge its history.

    Raises:
        Violated: it violates a guarantee.
    """
    schedule = Schedule(world, plan)
    warnings = _Warnings(schedule)
    logger = logging.getLogger("nsqext.consumer")
    logger.addHandler(warnings)
    try:
        await schedule.run()
    finally:
        logger.removeHandler(warnings)
    histories.append(schedule.history)
    del histories[:-1]
    found = judge(schedule.history)
    if found:
        raise Violated("\n".join(found))


histories: list[History] = []
"""The last history, for figures."""
