"""What is published to the topic of delayed messages: a line of JSON, and for a delayed message its body behind it.

It is in the body, so that topics without extend headers and the original NSQ can store it.
"""

from __future__ import annotations

import msgspec

from nsqext.errors import ProtocolError

__all__ = ("DelayCancel", "DelayRecord", "DelayedMessage", "decode_delay", "encode_delay")


class DelayedMessage(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag="delay", tag_field="nsqext"):
    """A message that a relay publishes later; all members but the body are in the JSON."""

    identity: str  #: identifies it among all delayed messages
    topic: str  #: where it is published
    due: int  #: when, in milliseconds since 1970
    headers: dict[str, str] | None = None  #: its extend headers
    tag: str | None = None  #: its tag for dispatch
    trace_id: int | None = None  #: its trace id
    key: bytes | None = None  #: its key
    partition: int | None = None  #: the partition that the publisher chose


class DelayCancel(msgspec.Struct, kw_only=True, frozen=True, tag="cancel", tag_field="nsqext"):
    """A request not to publish a delayed message."""

    identity: str  #: identity of the message
    time: int  #: when it was made, in milliseconds since 1970


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
