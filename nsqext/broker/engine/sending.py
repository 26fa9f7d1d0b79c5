"""From a message on its way to what a session sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.headers import TAG_HEADER, tag_of
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, RawMessage, message_id

if TYPE_CHECKING:
    from nsqext.broker.engine.in_flight import Flight

__all__ = ("as_message", "dispatch_tag")


def as_message(flight: Flight) -> RawMessage:
    """Return the message with every field filled."""
    entry = flight.entry
    record = entry.record
    message = RawMessage()
    message.timestamp = record.timestamp
    message.attempts = flight.attempts
    message.id = message_id(record.internal_id, record.trace_id)
    message.version = record.version
    message.header = record.header
    message.offset = entry.offset
    message.size = entry.size
    message.body = record.body
    return message


def dispatch_tag(flight: Flight) -> str:
    """Return the tag of a message, empty for none; a header that cannot be read gives none."""
    tag = flight.tag
    if tag is None:
        tag = flight.tag = _read_tag(flight)
    return tag


def _read_tag(flight: Flight) -> str:
    record = flight.entry.record
    if record.version == EXT_TAG:
        return record.header.decode("utf-8", "replace")
    if record.version != EXT_JSON:
        return ""
    try:
        return tag_of(read_header(record.header, TAG_HEADER)) or ""
    except UnreadableHeader:
        return ""
