"""An honest producer and consumer, whose messages have to arrive while others attack."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import anyio

from nsqext import Consumer, Message, Producer

if TYPE_CHECKING:
    from tests.campaigns.hostile.meter import Usage

__all__ = ("HONEST_TOPIC", "Honest", "honest")

HONEST_TOPIC = "honest"
_PAUSE = 0.02


class Honest:
    """Publishes one message after the other and waits until each is consumed.

    Args:
        producer: publishes them.
        usage: receives the longest wait, and the number of messages.
    """

    def __init__(self, producer: Producer, usage: Usage) -> None:
        self._producer = producer
        self._usage = usage
        self._numbers = count()
        self._received: dict[bytes, anyio.Event] = {}

    async def handle(self, message: Message) -> None:
        """Handle a received message."""
        waiting = self._received.get(message.body)
        if waiting is not None:
            waiting.set()

    async def exchange(self, rounds: int = 1) -> None:
        """Publish and consume messages."""
        for _ in range(rounds):
            body = b"%d" % next(self._numbers)
            received = self._received[body] = anyio.Event()
            started = time.monotonic()
            await self._producer.publish(HONEST_TOPIC, body)
            await received.wait()
            del self._received[body]
            self._usage.wait = max(self._usage.wait, time.monotonic() - started)
            self._usage.served += 1
            await anyio.sleep(_PAUSE)

    async def exchange_until(self, deadline: float) -> None:
        """Publish and consume messages until a time of the monotonic clock."""
        while time.monotonic() < deadline:
            await self.exchange()


@asynccontextmanager
async def honest(lookupd: str, usage: Usage, channel: str = "default") -> AsyncIterator[Honest]:
    """Run an honest producer, and a consumer with a channel of its own."""
    async with Producer(lookupd) as producer:
        peer = Honest(producer, usage)
        consumer = Consumer(HONEST_TOPIC, channel, lookupd=lookupd, output_buffer_timeout=0)
        consumer.handler(peer.handle)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(consumer.serve, signals=False))
            with anyio.fail_after(25):
                await peer.exchange(5)
            usage.wait, usage.served = 0.0, 0
            yield peer
            await consumer.aclose()
            tasks.cancel_scope.cancel()
