"""Delays from 10 ms to half an hour in virtual time, with faults: no message is early, lost, or counted wrongly.

With LONGEST = 3 * DAY, `test_attempts_are_those_of_the_handler_whatever_the_delay` takes a minute, and passes.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import anyio

from nsqext import App, Consumer, Message, Producer, Requeue
from nsqext.delays import DelayRelay, DelayStore
from nsqext.testing import FaultOptions, simulate
from nsqext.testing.simulation import run_seed

if TYPE_CHECKING:
    from nsqext.testing import World

DAY = 86_400.0
LONGEST = DAY / 40
DELAYS = (0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 900.0, 901.0)
PER_DELAY = 8
FAULTS = FaultOptions(kinds=["cut", "move", "kill"], count=(1, 4), duration=30.0)


class Handled:
    """A handler that records how late each message is; it fails the first attempt of every second message."""

    def __init__(self) -> None:
        self.late: dict[bytes, float] = {}
        self.due: dict[bytes, float] = {}
        self.attempts: dict[bytes, list[int]] = {}

    async def handle(self, message: Message) -> None:
        self.attempts.setdefault(message.body, []).append(message.attempts)
        self.late.setdefault(message.body, time.time() - self.due[message.body])
        if message.attempts == 1 and message.body.endswith(b"odd"):
            raise Requeue(0.1, backoff=False)


async def until_all_are_handled(handled: Handled) -> None:
    """Wait until every message was handled, and for those that are delivered again."""
    while handled.late.keys() < handled.due.keys():  # noqa: ASYNC110 - a handler of another process changes it
        await anyio.sleep(5.0)
    await anyio.sleep(20.0)


async def publish(producer: Producer, handled: Handled, delays: tuple[float, ...]) -> None:
    """Publish messages with all delays."""
    for delay in delays:
        for number in range(PER_DELAY):
            body = b"%g %d %s" % (delay, number, b"odd" if number % 2 else b"even")
            handled.due[body] = time.time() + delay
            await producer.publish("orders", body, delay=delay)


async def delays_with_faults(world: World) -> None:
    """Delay messages while connections are cut, leaders move, and nodes are killed."""
    await world.cluster.create_topic("orders", replicas=2, extend=True, channels=["billing"])
    handled = Handled()
    consumer = Consumer("orders", "billing", lookupd=world.cluster.lookupd)
    consumer.handler(handled.handle)
    async with consumer, Producer(world.cluster.lookupd) as producer:
        async with world.inject_faults():
            await publish(producer, handled, DELAYS)
        await until_all_are_handled(handled)
    assert handled.late.keys() == handled.due.keys()
    assert min(handled.late.values()) >= 0


def test_no_message_is_early_or_lost_while_servers_fail() -> None:
    simulate(
        delays_with_faults,
        seeds=3,
        faults=FAULTS,
        time_limit=4000,
    )


async def long_delays(world: World) -> None:
    """Delay messages for up to LONGEST; another consumer takes over after half of it."""
    await world.cluster.create_topic("orders", extend=True, channels=["billing"])
    handled = Handled()
    async with Producer(world.cluster.lookupd) as producer:
        for rest in (LONGEST / 2, LONGEST * 2 / 3):
            consumer = Consumer("orders", "billing", lookupd=world.cluster.lookupd)
            consumer.handler(handled.handle)
            async with consumer:
                if not handled.due:
                    await publish(producer, handled, (*DELAYS, LONGEST / 6, LONGEST / 3, LONGEST * 2 / 3, LONGEST))
                await anyio.sleep(rest)
    assert handled.late.keys() == handled.due.keys()
    assert min(handled.late.values()) >= 0
    assert sorted(handled.late.values())[-2] < 2.0
    for body, attempts in handled.attempts.items():
        assert attempts == ([1, 2] if body.endswith(b"odd") else [1])


def test_attempts_are_those_of_the_handler_whatever_the_delay() -> None:
    run = run_seed(long_delays, 1, (), nodes=1, lookupds=1, time_limit=2 * LONGEST, most_turns=20_000_000)
    assert run.error is None


async def relayed_with_faults(world: World) -> None:
    """Delay messages by a relay while connections are cut, leaders move, and nodes are killed."""
    handled = Handled()
    with TemporaryDirectory() as folder, DelayStore(Path(folder) / "store") as store:
        relay = DelayRelay(store)
        await world.cluster.create_topic("orders", replicas=2, channels=["billing"])
        await world.cluster.create_topic(relay.topic, replicas=2, channels=relay.channels)
        app = App(world.cluster.lookupd)
        relay.attach(app)
        app.handler("orders", "billing")(handled.handle)
        await app.start()
        async with Producer(world.cluster.lookupd, delay_via="relay") as producer:
            async with world.inject_faults():
                await publish(producer, handled, DELAYS[:5])
            await until_all_are_handled(handled)
        await app.aclose()
        assert store.count() == 0
    assert handled.late.keys() == handled.due.keys()
    assert min(handled.late.values()) >= 0


def test_a_relay_loses_no_message_while_servers_fail() -> None:
    simulate(relayed_with_faults, seeds=3, faults=FAULTS, time_limit=1000)
