"""Publish received messages again, as they are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.errors import InvalidInput, ProtocolError
from nsqext.protocol.frames import DEFAULT_MAX_FRAME_SIZE
from nsqext.protocol.messages import EXT_TAG, TAG_HEADER, TRACE_ID_HEADER

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.producer import Producer
    from nsqext.types import Receipt


def as_stored(message: Message, header: bytes | None = None) -> OutgoingMessage:
    """Return a message with stored body, extend header, trace id and key of a received message.

    Args:
        header: another extend header, with the message's trace id.
    """
    found = header_as_stored(message) if header is None else header
    try:
        key = message.key
    except ProtocolError:
        key = None
    return OutgoingMessage(
        message.stored_body, trace_id=None if found else message.trace_id or None, key=key, header=found
    )


def header_as_stored(message: Message) -> bytes:
    """Return the extend header of a received message; for a tag alone, which no publish can store, one of JSON."""
    if message.version != EXT_TAG:
        return message.header
    members = {} if message.tag is None else {TAG_HEADER: message.tag}
    if message.trace_id:
        members[TRACE_ID_HEADER] = str(message.trace_id)
    return orjson.dumps(members) if members else b""


def republisher(
    lookupd: Any = (), *, nsqd: Any = (), max_frame_size: int = DEFAULT_MAX_FRAME_SIZE, **connection: Any
) -> Producer:
    """Return a producer of received messages: what was received in a frame, the servers have stored.

    Args:
        max_frame_size: of the consumer.
        connection: other settings of connections.
    """
    # a consumer that publishes nothing again needs no modules of the producer
    from nsqext.client.producer.producer import Producer

    connection["max_frame_size"] = connection["max_message_size"] = max_frame_size
    return Producer(lookupd, nsqd=nsqd, **connection)


async def republish(producer: Producer, topic: str, message: Message, header: bytes | None = None) -> Receipt:
    """Publish a received message to a topic; see `as_stored`.

    Raises:
        InvalidInput: the topic cannot store it, nothing was sent; the error names the message.
        NsqError: as for `nsqext.Producer.publish`.
    """
    again = as_stored(message, header)
    try:
        return await producer.publish(topic, again.body, trace_id=again.trace_id, key=again.key, header=again.header)
    except InvalidInput as error:
        error.message = f"{message!r} cannot be published again: {error.message}"
        raise
