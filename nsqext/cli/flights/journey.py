"""The demo's journey: two consumers, one producer, and everything that was published arrives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import anyio
from attrs import frozen
from rich.progress import Progress, TaskID

from nsqext import Consumer, ConsumerOptions, Message, Producer
from nsqext.cli.flights.rows import CANARY, Flight
from nsqext.cli.flights.tally import Side, Tally
from nsqext.errors import MessageNotInFlight

__all__ = ("CHANNEL", "Journey", "Outcome", "travel")

CHANNEL = "departures"
"""The channel that both consumers share."""

_PUBLISHERS = 64
_PATIENCE = 20.0
"""Seconds without any arrival after which what is missing counts as lost."""
_AFTERMATH = 0.5
"""Seconds during which duplicates may still arrive when everything has."""

_CONSUMER = ConsumerOptions(queue_position=True, start_timeout=30.0)


@frozen
class Journey:
    """What a run of the demo does.

    Attributes:
        flights: what is published.
        topic: where to.
        lookupd: lookup addresses of the cluster.
        progress: shows how far it is.
    """

    flights: Sequence[Flight]
    topic: str
    lookupd: str | Sequence[str]
    progress: Progress


@frozen
class Outcome:
    """How it went: the book, seconds until the last receipt, seconds until the last arrival."""

    tally: Tally
    publishing: float
    all_in: float


async def travel(journey: Journey) -> Outcome:
    """Publish and consume everything.

    Both consumers are subscribed before the first publish: without a consumer for its tag, a message would go to the
    other one.
    """
    sides = [Side(f"tag {CANARY}", CANARY), Side("without tag", None)]
    tally = Tally(journey.flights, sides)
    arrived = _Arrivals(tally)
    topic, lookupd, progress = journey.topic, journey.lookupd, journey.progress
    async with AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(Consumer(topic, CHANNEL, lookupd=lookupd, tag=side.tag, options=_CONSUMER))
            for side in sides
        ]
        producer = await stack.enter_async_context(Producer(lookupd))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        publishing = progress.add_task("published", total=len(journey.flights))
        for consumer, side in zip(consumers, sides, strict=True):
            line = progress.add_task(f"received {side.name}", total=side.expected)
            tasks.start_soon(_consume, consumer, side, arrived, _advance(progress, line))
        started = time.monotonic()
        await _publish_all(producer, topic, tally, _advance(progress, publishing))
        published = time.monotonic()
        await arrived.wait()
        await anyio.sleep(_AFTERMATH)
        for consumer in consumers:
            consumer.stop()
    return Outcome(tally, published - started, max(arrived.last, published) - started)


def _advance(progress: Progress, line: TaskID) -> Callable[[], None]:
    return lambda: progress.advance(line)


class _Arrivals:
    """Notes what arrives, and waits for the last of it."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.last = time.monotonic()
        self._all = anyio.Event()

    def note(self, side: Side, message: Message) -> None:
        """Note a message."""
        self.tally.arrived(side, message)
        self.last = time.monotonic()
        if self.tally.complete:
            self._all.set()

    async def wait(self) -> None:
        """Return when everything has arrived, or nothing did for a while."""
        began = time.monotonic()
        while not self._all.is_set():
            left = max(self.last, began) + _PATIENCE - time.monotonic()
            if left <= 0:
                return
            with anyio.move_on_after(left):
                await self._all.wait()


async def _publish_all(producer: Producer, topic: str, tally: Tally, advance: Callable[[], None]) -> None:
    """Publish with many publishes under way; those of one key keep their order."""
    flights = iter(tally.flights)

    async def publisher() -> None:
        for flight in flights:
            receipt = await producer.publish(
                topic, flight.body, headers=flight.headers, tag=flight.tag, trace_id=flight.number, key=flight.key
            )
            tally.published(flight, receipt)
            advance()

    async with anyio.create_task_group() as tasks:
        for _ in range(_PUBLISHERS):
            tasks.start_soon(publisher)


async def _consume(consumer: Consumer, side: Side, arrived: _Arrivals, advance: Callable[[], None]) -> None:
    async for message in consumer:
        arrived.note(side, message)
        advance()
        try:
            await message.finish()
        except MessageNotInFlight:
            arrived.tally.unfinished += 1
