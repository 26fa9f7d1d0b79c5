"""Delayed messages for a relay (`nsqext.delays`)."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from nsqext.client.producer.delayed_request import check_delay, due_after
from nsqext.client.producer.request import check_choice, encode_message, key_bytes, no_extend_support
from nsqext.errors import InvalidInput, InvalidPartition
from nsqext.protocol.names import check_identity, check_topic

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.publishing import Publishing
    from nsqext.types import TopicMeta


def relayed(options: ProducerOptions, publishing: Publishing) -> bytes | None:
    """Return the body of a message that a relay publishes; None for a message to publish now. Raises InvalidInput."""
    way = options.delay_via if publishing.via is None else publishing.via
    check_way(way, publishing.delay, publishing.identity)
    if publishing.via is not None and publishing.delay is None:
        raise InvalidInput("via= is for delayed messages", hint="give delay=, or leave out via=")
    delay = publishing.delay
    # the relay knows which identities were published or cancelled
    if delay is None or way == "consumer" or (not delay and publishing.identity is None):
        return None
    check_choice(publishing.messages[0].key, publishing.partition)
    return delayed_body(publishing, delay)


def check_way(way: object, delay: float | None, identity: str | None) -> None:
    """Raise InvalidInput for an unknown ``via``, or an argument that would be ignored."""
    if way not in ("consumer", "relay"):
        raise InvalidInput(f"via={way!r} is neither 'consumer' nor 'relay'")
    if identity is not None and (delay is None or way != "relay"):
        raise InvalidInput("identity= is for messages that a relay delays", hint='give delay= and via="relay"')


def delayed_body(publishing: Publishing, delay: float) -> bytes:
    """Return the body that makes a relay publish a message after ``delay`` seconds; raises InvalidInput."""
    from nsqext.protocol.delay_record import DelayedMessage, encode_delay

    message, identity = publishing.messages[0], publishing.identity
    record = DelayedMessage(
        identity=os.urandom(16).hex() if identity is None else check_identity(identity),
        topic=check_topic(publishing.topic),
        due=due_after(check_delay(delay, publishing.topic)),
        headers=None if message.headers is None else dict(message.headers),
        tag=message.tag,
        trace_id=message.trace_id,
        key=None if message.key is None else key_bytes(message.key),
        partition=publishing.partition,
        header=message.header,
    )
    return encode_delay(record, message.body)


def check_for_topic(options: ProducerOptions, meta: TopicMeta, publishing: Publishing) -> None:
    """Check a relayed message as a publish to its topic does; raises InvalidInput."""
    message = publishing.messages[0]
    encode_message(options, meta, message)
    if (message.headers or message.tag is not None or message.header) and not meta.extend_support:
        raise no_extend_support(publishing.topic)
    if meta.ordered and message.key is None and publishing.partition is None:
        raise InvalidPartition("an ordered topic needs a key or a partition", topic=publishing.topic)


def cancellation(identity: str) -> bytes:
    """Return the body that cancels a delayed message; raises InvalidInput."""
    from nsqext.protocol.delay_record import DelayCancel, encode_delay

    return encode_delay(DelayCancel(identity=check_identity(identity), time=round(time.time() * 1000)))
