"""A consumer whose handler blocks the event loop until the server ends the connection."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from nsqext import Consumer, Message, Producer
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK = 4.0  # seconds; a server ends a connection that is silent for three heartbeat intervals
_PATIENCE = 60.0


async def handled_by_a_blocking_handler(lookupd: Sequence[str], topic: str, channel: str) -> list[bytes]:
    """Return the bodies of handled messages, each finished before its handler blocks the event loop."""
    handled: list[bytes] = []
    consumer = Consumer(topic, channel, lookupd, heartbeat_interval=1, msg_timeout=1, reconnect_wait=0.05)

    @consumer.handler
    async def block(message: Message) -> None:
        handled.append(message.body)
        await message.finish()
        if message.body != b"last":
            time.sleep(_BLOCK)  # noqa: ASYNC251 - the test is about code that blocks

    async with Producer(lookupd) as producer, consumer:
        await producer.publish_many(topic, [b"1", b"2"])
        await eventually(lambda: len(handled) >= 2 and consumer.statistics().reconnects >= 2, _PATIENCE)
        await anyio.sleep(1.5)  # longer than the timeout of messages
        await producer.publish(topic, b"last")
        await eventually(lambda: b"last" in handled, _PATIENCE)
    return handled
