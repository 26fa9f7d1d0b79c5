"""Records in the topic of delayed messages: a line of JSON, behind which a delayed message has its body.

All of it is in the body, for topics without extend headers and the original NSQ.
"""

from __future__ import annotations

import msgspec

from nsqext.errors import InvalidInput, ProtocolError
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.names import check_identity, check_partition, check_topic

__all__ = ("DelayCancel", "DelayRecord", "DelayedMessage", "decode_delay", "encode_delay")


class DelayedMessage(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, tag="delay", tag_field="nsqext"):
    """A message that a relay publishes later."""

    identity: str  #: unique among all delayed messages
    topic: str  #: where it is published
    due: int  #: milliseconds since 1970
    headers: dict[str, str] | None = None  #: extend headers
    tag: str | None = None  #: dispatch tag
    trace_id: int | None = None
    key: bytes | None = None
    partition: int | None = None
    header: bytes | None = None  #: encoded extend header without an identity; replaces headers and tag


class DelayCancel(msgspec.Struct, kw_only=True, frozen=True, tag="cancel", tag_field="nsqext"):
    """A request to drop a delayed message."""

    identity: str
    time: int  #: of the request, in milliseconds since 1970


DelayRecord = DelayedMessage | DelayCancel

_LATEST = 253_402_300_799_999  # end of the year 9999, the latest time that programs can show
_decoder: msgspec.json.Decoder[DelayRecord] = msgspec.json.Decoder(DelayRecord)


def encode_delay(record: DelayRecord, body: bytes = b"") -> bytes:
    """Return the bytes of a record, followed by the delayed message's body."""
    return msgspec.json.encode(record) + b"\n" + body


def decode_delay(data: bytes) -> tuple[DelayRecord, bytes]:
    """Parse a delayed message and its body, or a cancellation; raises ProtocolError for anything else."""
    line, _, body = data.partition(b"\n")
    try:
        record = _decoder.decode(line)
        _check(record, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidInput, RecursionError) as error:
        raise ProtocolError(f"not a delayed message: {error}") from error
    return record, body


def _check(record: DelayRecord, body: bytes) -> None:
    """Raise `InvalidInput` for what stores cannot keep or producers do not publish."""
    check_identity(record.identity)
    when = record.due if isinstance(record, DelayedMessage) else record.time
    if not 0 <= when <= _LATEST:
        raise InvalidInput(f"the time {when} is not in milliseconds since 1970")
    if isinstance(record, DelayCancel):
        return
    check_topic(record.topic)
    encode_headers(record.headers, tag=record.tag, trace_id=record.trace_id)
    if record.partition is not None:
        check_partition(record.partition)
    if not body:
        raise InvalidInput("its body is empty")
    if record.key is not None and not record.key:
        raise InvalidInput("its key is empty")
