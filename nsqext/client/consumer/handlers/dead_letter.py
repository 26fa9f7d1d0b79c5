"""Publish messages to a dead letter topic."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import anyio
from attrs import define, field

from nsqext.client.consumer.handlers.failure_policy import reason_of
from nsqext.client.consumer.handlers.republish import header_as_stored, republish, republisher
from nsqext.client.settings import connection_settings, settings_for
from nsqext.errors import (
    ExtendNotSupported,
    InvalidBody,
    InvalidHeader,
    InvalidState,
    NsqError,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.errors.server import BadMessage, ExtendRefused, RecordTooLarge
from nsqext.protocol.header_members import add_members
from nsqext.protocol.messages import TRACE_ID_HEADER

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.producer import Producer
    from nsqext.settings import Given

logger: logging.Logger = logging.getLogger("nsqext.consumer")

DEAD_LETTER_PREFIX: Final = "dead-letter-"
"""Prefix of the headers that a dead letter adds.

They are ``error``, ``topic``, ``channel``, ``partition``, ``attempts``, ``id`` (of the original message, hexadecimal),
``time`` (seconds since 1970), and ``header``: the bytes of a header without members, in Base64.
"""
FIRST_ADDED: Final = DEAD_LETTER_PREFIX + "error"
HEADER_OF_ORIGINAL: Final = DEAD_LETTER_PREFIX + "header"
_LONGEST_ERROR = 1000
_TOO_LONG = (InvalidHeader, InvalidBody, BadMessage, RecordTooLarge)  # with the origin


@define(eq=False)
class DeadLetterTopic:
    """Publishes dead letters.

    The stored body and the bytes of the extend header are kept; headers of `DEAD_LETTER_PREFIX` are added behind them.
    A topic without extend support stores only body and trace id (the original NSQ only the body): such a dead letter
    cannot be replayed.
    """

    topic: str
    _channel: str
    _producer: Producer  # not open
    _open: anyio.Event = field(factory=lambda: anyio.Event())

    @classmethod
    def of(cls, topic: str, channel: str, given: Given) -> DeadLetterTopic:
        """Return the dead letter topic of a consumer, whose connections it shares."""
        connection = settings_for(connection_settings(), given.values)
        return cls(topic, channel, republisher(given.lookupd, nsqd=given.nsqd, **connection))

    async def run(self, *, check: bool = True) -> None:
        """Keep the producer open until cancelled; ``check`` first warns if dead letters cannot be published."""
        async with self._producer:
            self._open.set()
            if check:
                await self._check_topic()
            await anyio.sleep_forever()

    async def _check_topic(self) -> None:
        """Warn if dead letters cannot be published, or would lose their headers."""
        try:
            meta = await self._producer.meta(self.topic)
        except (TopicNotFound, TopicNotReady) as error:
            logger.warning("dead letters cannot be published: %s", error, extra={"topic": self.topic})
        except NsqError:
            return  # the consumer reports failures of lookup
        else:
            if meta.partition_num and not meta.extend_support:
                logger.warning(
                    "dead letters will lose key, tag and headers, and cannot be replayed: the topic %s does not "
                    "support extend headers; upgrade it with Admin.upgrade_topic, or create it with extend",
                    self.topic,
                    extra={"topic": self.topic},
                )

    async def publish(self, message: Message, error: Exception | None) -> None:
        """Publish a message and wait until it is stored. Raises InvalidState for messages of this topic."""
        if message.topic == self.topic:
            raise InvalidState(
                "a message of the dead letter topic was rejected by its consumer",
                topic=message.topic,
                partition=message.partition,
                hint="give the consumer of dead letters another dead_letter, or consume them without a handler",
            )
        await self._open.wait()
        try:
            header = add_members(header_as_stored(message), self._origin(message, error), original=HEADER_OF_ORIGINAL)
            await republish(self._producer, self.topic, message, header)
            return
        except (ExtendNotSupported, ExtendRefused, *_TOO_LONG) as refusal:
            logger.warning(
                "dead letter without origin, it cannot be replayed: %s: %r",
                refusal,
                message,
                extra={"topic": self.topic},
            )
            too_long = isinstance(refusal, _TOO_LONG)
        if too_long:
            await republish(self._producer, self.topic, message)
            return
        trace_id = message.trace_id or None
        try:
            await self._producer.publish(self.topic, message.body, trace_id=trace_id, key=message.key)
        except ExtendNotSupported:
            # the original NSQ has no trace ids
            await self._producer.publish(self.topic, message.body)

    def _origin(self, message: Message, error: Exception | None) -> dict[str, str]:
        """Return the headers that say where the message failed, and why."""
        origin = {
            "error": reason_of(error).encode("utf-8", "replace").decode()[:_LONGEST_ERROR],
            "topic": message.topic,
            "channel": self._channel,
            "attempts": str(message.attempts),
            "id": message.id.hex(),
            "time": f"{time.time():.3f}",
        }
        if message.partition is not None:
            origin["partition"] = str(message.partition)
        members = {DEAD_LETTER_PREFIX + name: value for name, value in origin.items()}
        if message.trace_id and not message.header:
            members[TRACE_ID_HEADER] = str(message.trace_id)
        return members
