"""What is published to the topic of delayed messages: a line of JSON, and for a delayed message its body behind it.

It is in the body, so that topics without extend headers and the original NSQ can store it.
"""

from __future__ import annotations

import msgspec

from nsqext.errors import ProtocolError

__all__ = ("DelayCancel", "DelayRecord", "DelayedMessage", "decode_delay", "encode_delay")


class DelayedMessage(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag="delay", tag_field="nsqext"):
    """A message that a relay publishes later; all members but the body are in the JSON.

    Attributes:
        identity: identifies it among all delayed messages.
        topic: where it is published.
        due: when, in milliseconds since 1970.
        headers: its extend headers.
        tag: its tag for dispatch.
        trace_id: its trace id.
        key: its key.
        partition: the partition that the publisher chose.
    """

    identity: str
    topic: str
    due: int
    headers: dict[str, str] | None = None
    tag: str | None = None
    trace_id: int | None = None
    key: bytes | None = None
    partition: int | None = None


class DelayCancel(msgspec.Struct, kw_only=True, frozen=True, tag="cancel", tag_field="nsqext"):
    """A request not to publish a delayed message.

    Attributes:
        identity: identity of the message.
        time: when it was made, in milliseconds since 1970.
    """

    identity: str
    time: int


DelayRecord = DelayedMessage | DelayCancel

_decoder: msgspec.json.Decoder[DelayRecord] = msgspec.json.Decoder(DelayRecord)


def encode_delay(record: DelayRecord, body: bytes = b"") -> bytes:
    """Return the bytes of a delayed message with its body, or of a cancellation."""
    return msgspec.json.encode(record) + b"\n" + body


def decode_delay(data: bytes) -> tuple[DelayRecord, bytes]:
    """Return a delayed message and its body, or a cancellation.

    Raises:
        ProtocolError: it is neither.
    """
    line, _, body = data.partition(b"\n")
    try:
        return _decoder.decode(line), body
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a delayed message: {error}") from error
