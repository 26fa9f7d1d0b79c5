"""One run of the demo: two consumers and a producer, until every flight is received."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import anyio
from attrs import frozen
from rich.progress import Progress, TaskID

from nsqext import Consumer, Message, Producer
from nsqext.cli.flights.results import ConsumerCounts, DemoResults
from nsqext.cli.flights.rows import CANARY, Flight
from nsqext.errors import MessageNotInFlight

__all__ = ("CHANNEL", "DemoOutcome", "DemoRun", "run_demo")

CHANNEL = "departures"
"""The channel that both consumers share."""

_PUBLISHERS = 64
_IDLE_TIMEOUT = 20.0
"""Seconds without a received message after which the missing ones count as lost."""
_DUPLICATES_WAIT = 0.5
"""Seconds to wait for duplicates after every flight has been received."""


@frozen
class DemoRun:
    """Parameters of a run.

    Attributes:
        flights: flights to publish.
        topic: an existing topic.
        lookupd: lookup addresses of the cluster.
        progress: display that the run updates.
    """

    flights: Sequence[Flight]
    topic: str
    lookupd: str | Sequence[str]
    progress: Progress


@frozen
class DemoOutcome:
    """Results of a run.

    Attributes:
        results: receipts and received messages.
        publish_seconds: seconds from the first publish to the last receipt.
        receive_seconds: seconds from the first publish to the last received message.
    """

    results: DemoResults
    publish_seconds: float
    receive_seconds: float


async def run_demo(run: DemoRun) -> DemoOutcome:
    """Publish and consume all flights.

    Both consumers subscribe before the first publish: while no consumer of its tag is subscribed, a tagged message is
    delivered to the consumer without a tag.
    """
    consumer_counts = [ConsumerCounts(f"tag {CANARY}", CANARY), ConsumerCounts("without tag", None)]
    results = DemoResults(run.flights, consumer_counts)
    receiver = _Receiver(results)
    topic, lookupd, progress = run.topic, run.lookupd, run.progress
    async with AsyncExitStack() as stack:
        consumers = [
            await stack.enter_async_context(
                Consumer(topic, CHANNEL, lookupd=lookupd, tag=c.tag, queue_position=True, start_timeout=30.0)
            )
            for c in consumer_counts
        ]
        producer = await stack.enter_async_context(Producer(lookupd))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        publishing = progress.add_task("published", total=len(run.flights))
        for consumer, counts in zip(consumers, consumer_counts, strict=True):
            line = progress.add_task(f"received {counts.name}", total=counts.expected)
            tasks.start_soon(_consume, consumer, counts, receiver, _advance(progress, line))
        started = time.monotonic()
        await _publish_all(producer, topic, results, _advance(progress, publishing))
        published = time.monotonic()
        await receiver.wait()
        await anyio.sleep(_DUPLICATES_WAIT)
        for consumer in consumers:
            consumer.stop()
    return DemoOutcome(results, published - started, max(receiver.last, published) - started)


def _advance(progress: Progress, line: TaskID) -> Callable[[], None]:
    return lambda: progress.advance(line)


class _Receiver:
    """Records received messages and waits for the last one."""

    def __init__(self, results: DemoResults) -> None:
        self.results = results
        self.last = time.monotonic()
        self._complete = anyio.Event()

    def record(self, counts: ConsumerCounts, message: Message) -> None:
        """Record a received message."""
        self.results.add_message(counts, message)
        self.last = time.monotonic()
        if self.results.complete:
            self._complete.set()

    async def wait(self) -> None:
        """Return when every flight has been received, or no message has been for `_IDLE_TIMEOUT` seconds."""
        began = time.monotonic()
        while not self._complete.is_set():
            left = max(self.last, began) + _IDLE_TIMEOUT - time.monotonic()
            if left <= 0:
                return
            with anyio.move_on_after(left):
                await self._complete.wait()


async def _publish_all(producer: Producer, topic: str, results: DemoResults, advance: Callable[[], None]) -> None:
    """Publish concurrently; publishes of one key keep their order."""
    flights = iter(results.flights)

    async def publisher() -> None:
        for flight in flights:
            receipt = await producer.publish(
                topic, flight.body, headers=flight.headers, tag=flight.tag, trace_id=flight.number, key=flight.key
            )
            results.add_receipt(flight, receipt)
            advance()

    async with anyio.create_task_group() as tasks:
        for _ in range(_PUBLISHERS):
            tasks.start_soon(publisher)


async def _consume(
    consumer: Consumer, counts: ConsumerCounts, receiver: _Receiver, advance: Callable[[], None]
) -> None:
    async for message in consumer:
        receiver.record(counts, message)
        advance()
        try:
            await message.finish()
        except MessageNotInFlight:
            receiver.results.unfinished += 1
