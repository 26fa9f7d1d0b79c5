"""Messages that were given up go to a topic of their own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from nsqext.client.producer.producer import Producer
from nsqext.errors import ExtendNotSupported, InvalidHeader
from nsqext.errors.server import ExtendRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.lookup.shared import Lookup

__all__ = ("DeadLetterTopic",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")


class DeadLetterTopic:
    """Publishes messages that were given up.

    Body, trace id, headers and tag are kept; headers and tag only where the topic takes them.

    Args:
        topic: name of the topic.
        lookupd: lookup addresses, or a shared lookup.
        nsqd: nsqd addresses, instead.
        options: how to publish.
    """

    def __init__(
        self, topic: str, lookupd: str | Sequence[str] | Lookup, nsqd: str | Sequence[str], options: ProducerOptions
    ) -> None:
        self.topic: str = topic
        self._producer = Producer(lookupd, nsqd=nsqd, options=options)
        self._open = anyio.Event()

    async def run(self) -> None:
        """Keep the producer open until cancelled."""
        async with self._producer:
            self._open.set()
            await anyio.sleep_forever()

    async def take(self, message: Message, error: Exception | None) -> None:
        """Publish a message; returns when it is stored.

        Raises:
            NsqError: it is not stored, or nobody knows.
        """
        await self._open.wait()
        trace_id = message.trace_id or None
        if message.header:
            try:
                headers = {name: str(value) for name, value in message.headers.items()}
                await self._producer.publish(
                    self.topic, message.body, headers=headers, tag=message.tag, trace_id=trace_id
                )
                return
            except (ExtendNotSupported, ExtendRefused, InvalidHeader) as refusal:
                logger.warning("the headers of %r are left behind: %s", message, refusal, extra={"topic": self.topic})
        try:
            await self._producer.publish(self.topic, message.body, trace_id=trace_id)
        except ExtendNotSupported:
            # the original NSQ knows no trace ids
            await self._producer.publish(self.topic, message.body)
