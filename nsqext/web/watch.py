"""Show the next messages of a topic of the original NSQ, which keeps no log to read."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from nsqext.client.consumer.consumer import Consumer
from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from nsqext.admin import Admin
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import ConsumerOptions

__all__ = ("WatchedMessage", "watch")


@frozen
class WatchedMessage:
    """A received message, with the members of `nsqext.StoredMessage` that the page shows.

    Attributes:
        id: message id, in hexadecimal digits.
        timestamp: when the server stored it, in nanoseconds since 1970.
        body: the body as text, with U+FFFD in place of bytes that are not UTF-8.
        node: TCP address of the node that sent it.
    """

    id: str
    timestamp: int
    body: str
    node: str


async def watch(
    admin: Admin, lookupd: str | Sequence[str], topic: str, options: ConsumerOptions, *, count: int, seconds: float
) -> list[WatchedMessage]:
    """Return messages that are published from now on, newest first.

    They are copies: an ephemeral channel receives them, which the servers delete when its consumer leaves.

    Args:
        admin: reads the topic's statistics.
        lookupd: lookup addresses.
        topic: the topic.
        options: how to consume.
        count: how many at most.
        seconds: how long to wait for them.

    Raises:
        InvalidState: a node has no channel of the topic: the first channel, which this would be, takes its messages.
        NsqError: the topic cannot be read.
    """
    for part in (await admin.stats(topic)).partitions:
        if not part.channels:
            raise InvalidState(
                "the topic has no channel: a channel that is made to watch it would take the messages that wait",
                topic=topic,
                node=str(part.node),
                hint="create a channel first",
            )
    found: list[WatchedMessage] = []
    channel = f"watch_{token_hex(4)}#ephemeral"
    consumer = Consumer(topic, channel, lookupd=lookupd, max_in_flight=count, options=options)
    async with consumer:
        with anyio.move_on_after(seconds):
            while len(found) < count:
                message = await anext(consumer)
                await message.finish()
                found.append(_watched(message))
    return sorted(found, key=lambda one: one.timestamp, reverse=True)


def _watched(message: Message) -> WatchedMessage:
    return WatchedMessage(message.id.hex(), message.timestamp, message.body.decode(errors="replace"), message.node)
