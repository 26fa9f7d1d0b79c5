"""Show the next messages of a topic of the original NSQ, which has no log to read from."""

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
    from nsqext.client.consumer.options import ConsumerSettings


@frozen
class WatchedMessage:
    """A received message, with the members of `nsqext.StoredMessage` that the page shows."""

    id: str  # message id, in hexadecimal digits
    timestamp: int  # when the server stored it, in nanoseconds since 1970
    body: str  # the body as text, with U+FFFD in place of bytes that are not UTF-8
    node: str  # TCP address of the node that sent it


async def watch(
    admin: Admin, lookupd: str | Sequence[str], topic: str, settings: ConsumerSettings, *, count: int, seconds: float
) -> list[WatchedMessage]:
    """Return messages that are published after the call, newest first.

    They are copies, received through an ephemeral channel, which the servers delete when its consumer disconnects.
    """
    for part in (await admin.stats(topic)).partitions:
        if not part.channels:
            raise InvalidState(
                "the topic has no channel, so a temporary channel would consume the waiting messages",
                topic=topic,
                node=str(part.node),
                hint="create a channel first",
            )
    found: list[WatchedMessage] = []
    channel = f"watch_{token_hex(4)}#ephemeral"
    own: ConsumerSettings = {**settings, "max_in_flight": count}
    consumer = Consumer(topic, channel, lookupd, **own)
    async with consumer:
        with anyio.move_on_after(seconds):
            while len(found) < count:
                message = await anext(consumer)
                await message.finish()
                body = message.body.decode(errors="replace")
                found.append(WatchedMessage(message.id.hex(), message.timestamp, body, message.node))
    return sorted(found, key=lambda one: one.timestamp, reverse=True)
