"""The schedule that `make simulate` runs: producers and consumers of every kind, under the faults of a seed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import anyio

from nsqext import (
    BackoffOptions,
    BatchFailed,
    ConnectionOptions,
    Consumer,
    ConsumerOptions,
    DeliveryUnknown,
    FailureOptions,
    Lookup,
    Message,
    NsqError,
    OutgoingMessage,
    Producer,
    ProducerOptions,
    Receipt,
    Requeue,
)
from tests.simulation.checkers import judge
from tests.simulation.history import Channel, Delivery, History, Publish, PublishOutcome
from tests.simulation.operators import Operators
from tests.simulation.wire import RdyWatch

if TYPE_CHECKING:
    from nsqext.testing.simulation import World
    from tests.simulation.plan import Plan

__all__ = ("Schedule", "Violated", "run_schedule")

KEYS = 6
_KEYED = ("lanes", "keyed", "ordered")
DRAIN = 150.0
"""Virtual seconds after the last fault within which everything has to be handled."""


class Violated(AssertionError):
    """The history of a schedule violates a guarantee."""


class HandlerFailed(Exception):
    """What handlers raise now and then."""


class Schedule:
    """One schedule: its world, its clients, its history."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world: World = world
        self.plan: Plan = plan
        random = world.random
        on_unknown: Literal["retry", "raise"] = "raise" if random.random() < 0.4 else "retry"
        self.history: History = History(on_unknown, timeout=random.choice((4.0, 10.0)))
        self.connection: ConnectionOptions = ConnectionOptions(request_timeout=random.choice((1.0, 3.0, 10.0)))
        self._lookupd: list[str] | Lookup = world.cluster.lookupd
        if plan.shared_lookup:
            self._lookupd = Lookup(self._lookupd)
        self._extend = {"lanes", "keyed"} | ({"recreated"} if "lanes" in plan.habits else set())
        self._numbers = 0
        self._with_headers: dict[int, dict[str, Any]] = {}
        self._failing = 0.2 if "failing" in plan.habits else 0.05 if "delays" in plan.habits else 0.01
        self._publishing = True
        self._producers: list[Producer] = []

    async def run(self) -> None:
        """Run it."""
        world, history = self.world, self.history
        await self._create_topics()
        nodes = world.cluster.runtime.nodes.values()
        operators = Operators(world, history, self._guest)
        consumers: list[tuple[str, Consumer]] = []
        watch = RdyWatch({node.tcp.port for node in nodes}, lambda: world.now, 60.0, history.rdy_exceeded.append)
        if "seek" not in self.plan.habits:  # a seek ends what is in flight, which the connection does not show
            world.network.on_sent, world.network.on_received = watch.sent, watch.received
        async with AsyncExitStack() as stack:
            for topic, channel, settings in self._consumers():
                consumer = self._consumer(topic, channel, f"{topic}/{channel}/{len(history.concurrency)}", settings)
                await stack.enter_async_context(self._closing(consumer))
                consumers.append((topic, consumer))
            for _ in range(self.plan.producers):
                self._producers.append(await stack.enter_async_context(self._closing(self._producer())))
            doomed = world.start(self._doomed_client) if self.plan.doomed else None
            async with anyio.create_task_group() as tasks:
                for kind in (*self._publishers(), *operators.duties(self.plan.habits, consumers)):
                    tasks.start_soon(kind)
                if self.plan.guests:
                    tasks.start_soon(self._come_and_go)
                tasks.start_soon(self._sample)
                async with world.inject_faults():
                    began = world.now
                    history.paused = sum(fault.seconds for fault in world.faults if fault.kind == "pause")
                    history.half_open = any(fault.kind == "half_open" for fault in world.faults)
                    history.disturbances += [
                        (began + fault.at, began + fault.at + fault.seconds) for fault in world.faults
                    ]
                    await anyio.sleep(self.plan.seconds)
                    if doomed is not None:
                        history.disturbances.append((world.now, world.now))
                        await doomed.kill(silently=world.random.random() < 0.5)
                self._publishing = operators.working = False
                history.healed = world.now
                if world.faults and world.random.random() < 0.5:
                    await self._move_leaders()
                if world.faults:
                    history.disturbances.append((began, world.now))
            await operators.resume_channels()
            await self._publish_afterwards()
            await self._drain()
        history.left_over += await self._leftovers()

    async def _drain(self) -> None:
        """Wait until all messages are handled; give up when nothing was handled for DRAIN seconds."""
        history, world = self.history, self.world
        fewest, since = len(history.due), world.now
        while history.due and world.now < since + DRAIN:
            await anyio.sleep(0.25)
            if len(history.due) < fewest:
                fewest, since = len(history.due), world.now
        await anyio.sleep(2.0)

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
        }
        for topic in plan.topics:
            await cluster.create_topic(
                topic,
                plan.partitions,
                replicas=plan.replicas,
                extend=topic in self._extend,
                ordered=topic == "ordered",
                channels=[channel.name for channel in channels[topic]],
                dispatch="key_failover" if topic == "keyed" else "",
            )
            if topic != "recreated" or not history.recreated:
                history.channels += channels[topic]
        cluster.upgraded += [topic for topic in plan.topics if topic == "upgraded"]
        cluster.recreated += [topic for topic in plan.topics if topic == "recreated"]

    # --- consumers ------------------------------------------------------------------------------------------------

    def _consumers(self) -> list[tuple[str, str, dict[str, Any]]]:
        every: list[tuple[str, str, dict[str, Any]]] = [
            ("plain", "a", {"concurrency": 4}),
            ("plain", "b", {"concurrency": 2, "max_in_flight": 5}),
            ("lanes", "a", {"concurrency": 4, "key": "##key"}),
            ("keyed", "a", {"concurrency": 3, "dispatch": "key_failover"}),
            ("keyed", "a", {"concurrency": 3, "dispatch": "key_failover"}),
            ("ordered", "a", {"concurrency": 2}),
            ("upgraded", "a", {"concurrency": 2}),
            ("recreated", "a", {"concurrency": 2} | ({"key": "##key"} if "recreated" in self._extend else {})),
        ]
        return [consumer for consumer in every if consumer[0] in self.plan.topics]

    def _consumer(
        self,
        topic: str,
        channel: str,
        name: str,
        settings: dict[str, Any],
        *,
        hangs: bool = False,
        lookupd: list[str] | None = None,
    ) -> Consumer:
        options = ConsumerOptions(
            close_timeout=1.0 if hangs else 30.0,
            failure=FailureOptions(requeue_delay=0.05),
            backoff=BackoffOptions(mode="off"),
            max_reconnect_wait=1.0,
            connection=self.connection,
        )
        world, history, random = self.world, self.history, self.world.random
        consumer = Consumer(topic, channel, lookupd=lookupd or self._lookupd, options=options, **settings)
        history.concurrency[name] = settings["concurrency"]

        @consumer.handler
        async def handle(message: Message) -> None:
            delivery = Delivery(
                message.body,
                topic,
                channel,
                name,
                message.partition,
                message.internal_id,
                message.attempts,
                world.now,
            )
            history.begun(delivery)
            self._check_headers(message)
            try:
                chance = random.random()
                if hangs:
                    await anyio.sleep_forever()
                if chance < 0.2:
                    await anyio.sleep(random.uniform(0.0, 0.02))
                elif chance < 0.205:
                    await anyio.sleep(random.uniform(1.0, 8.0))
                if random.random() < self._failing:
                    delivery.outcome = "raised"
                    if "delays" in self.plan.habits:
                        raise Requeue(delay=random.choice((0.0, 0.3, 2.0)))
                    raise HandlerFailed
                delivery.outcome = "returned"
                history.handled(delivery)
            finally:
                delivery.end = world.now
                if delivery.outcome == "running":
                    delivery.outcome = "cancelled"

        return consumer

    def _guest(self, topic: str, channel: str) -> Consumer:
        return self._consumer(topic, channel, f"{topic}/{channel}/{len(self.history.concurrency)}", {"concurrency": 2})

    def _headers(self, publish: Publish) -> dict[str, Any] | None:
        """Return the headers of a message; a topic that is not upgraded refuses them."""
        if "headers" not in self.plan.habits or publish.topic not in (*self._extend, "upgraded"):
            return None
        return {"number": str(publish.number)} if publish.number % 3 else None

    def _check_headers(self, message: Message) -> None:
        found, number = message.headers.get("number"), int(message.body.rsplit(b"/", 1)[1])
        due = str(number) if "number" in self._with_headers.get(number, ()) else None
        if found != due:
            self.history.changed.append(f"{message.body!r} arrived with header {found!r} instead of {due!r}")

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

    async def _come_and_go(self) -> None:
        """Join and leave the shared channels; some of the handlers hang until their consumer leaves."""
        random, world = self.world.random, self.world
        shared = [topic for topic in self.plan.topics if topic in ("plain", "keyed")]
        number = 0
        while self._publishing and shared:
            await anyio.sleep(random.uniform(0.5, 3.0))
            topic = random.choice(shared)
            dispatch: Literal["key_failover"] | None = "key_failover" if topic == "keyed" else None
            number += 1
            name = f"{topic}/a/guest {number}"
            hangs = random.random() < 0.2
            consumer = self._consumer(topic, "a", name, {"concurrency": 2, "dispatch": dispatch}, hangs=hangs)
            began = world.now
            async with self._closing(consumer):
                await anyio.sleep(random.uniform(0.1, 2.0))
            self.history.disturbances.append((began, world.now))

    async def _sample(self) -> None:
        """Count what uses memory, while faults last."""
        world = self.world
        while self._publishing:
            sessions = sum(len(node.member.node.sessions) for node in world.cluster.runtime.nodes.values())
            counts = len(asyncio.all_tasks()), len(world.network.sockets), sessions
            self.history.samples.append((world.now, *counts))
            await anyio.sleep(1.0)

    async def _doomed_client(self) -> None:
        """Consume and publish, until the process is killed."""
        lookupd = self.world.cluster.lookupd
        consumer = self._consumer("plain", "b", "plain/b/doomed", {"concurrency": 2}, lookupd=lookupd)
        async with consumer, self._producer(lookupd) as producer:
            await self._publish_each("plain", "doomed", producer)
            await anyio.sleep_forever()

    # --- publishers -----------------------------------------------------------------------------------------------

    def _publishers(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        return [
            *(partial(self._publish_each, topic, f"single {topic}") for topic in self.plan.single),
            *(partial(self._publish_batches, topic, f"batch {topic}") for topic in self.plan.batches),
        ]

    def _producer(self, lookupd: list[str] | None = None) -> Producer:
        history = self.history
        options = ProducerOptions(on_unknown=history.on_unknown, timeout=history.timeout, connection=self.connection)
        return Producer(lookupd or self._lookupd, options=options)

    def _begin(self, topic: str, key: str, batch: int = 0) -> Publish:
        self._numbers += 1
        body = f"{topic}/{key}/{self._numbers}".encode()
        publish = Publish(body, topic, key, self._numbers, self.world.now, batch=batch)
        self.history.publishes.append(publish)
        return publish

    def _end(self, publish: Publish, result: Receipt | BaseException) -> None:
        publish.end = self.world.now
        if isinstance(result, Receipt):
            publish.outcome, publish.partition = "stored", result.partition
            publish.message_id, publish.offset = result.message_id, result.offset
            self.history.stored(publish)
            return
        outcome: PublishOutcome = "undocumented"
        if isinstance(result, NsqError):
            outcome = "unknown" if isinstance(result, DeliveryUnknown) else "failed"
        elif not isinstance(result, Exception):
            outcome = "killed"
        publish.outcome, publish.error = outcome, repr(result)

    async def _publish_each(self, topic: str, name: str, producer: Producer | None = None) -> None:
        random, keyed = self.world.random, topic in _KEYED
        producer = producer or random.choice(self._producers)
        while self._publishing:
            await self._publish_one(producer, topic, f"{name}{random.randrange(KEYS)}" if keyed else "")
            await anyio.sleep(random.uniform(0.0, self.plan.pause))

    async def _publish_one(self, producer: Producer, topic: str, key: str) -> None:
        publish = self._begin(topic, key)
        trace_id = publish.number if self.world.random.random() < 0.5 else None
        headers = None if topic == "upgraded" and self.history.healed is not None else self._headers(publish)
        self._with_headers[publish.number] = headers or {}
        try:
            receipt = await producer.publish(topic, publish.body, headers=headers, key=key or None, trace_id=trace_id)
        except BaseException as error:
            self._end(publish, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._end(publish, receipt)

    async def _publish_batches(self, topic: str, name: str) -> None:
        random = self.world.random
        producer = random.choice(self._producers)
        while self._publishing:
            size = random.randint(1, self.plan.batch)
            keyed = topic in _KEYED
            number = self._numbers + 1
            batch = [
                self._begin(topic, f"{name}{random.randrange(KEYS)}" if keyed else "", number) for _ in range(size)
            ]
            messages = [self._outgoing(publish) for publish in batch]
            outcomes: list[Any]
            try:
                outcomes = list(await producer.publish_many(topic, messages))
            except BatchFailed as error:
                outcomes = list(error.outcomes)
            except Exception as error:
                outcomes = [error] * len(batch)
            for publish, outcome in zip(batch, outcomes, strict=True):
                self._end(publish, outcome)
            await anyio.sleep(random.uniform(0.0, 4 * self.plan.pause))

    def _outgoing(self, publish: Publish) -> OutgoingMessage:
        headers = self._with_headers[publish.number] = self._headers(publish) or {}
        return OutgoingMessage(publish.body, headers or None, key=publish.key or None)

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
        async with self._closing(self._producer()) as fresh:
            for topic in self.plan.topics:
                for producer in (fresh, *self._producers):
                    await self._publish_one(producer, topic, "last" if topic in _KEYED else "")

    async def _leftovers(self) -> list[str]:
        """Return sockets of living clients that exist although every client was closed."""
        await anyio.sleep(1.0)
        network = self.world.network
        mine = [sock for sock in network.sockets.values() if sock.host in self.world.clients]
        return [f"open socket {sock!r}" for sock in mine if sock.host not in network.dead]


class _Warnings(logging.Handler):
    """Notes when lanes announce that they do not wait for messages any longer."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(logging.WARNING)
        self._schedule = schedule

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if str(record.msg).endswith("later ones are handled first: %r"):
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
