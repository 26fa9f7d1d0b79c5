"""New messages, and the records that they are stored as."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from attrs import define

from nsqext.broker.engine.storage.log import Entry
from nsqext.protocol.record import COUNTER_BITS, Record, raw_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.broker.engine.storage.log import Log

__all__ = ("NewMessage", "Stored", "as_entries", "counter_of")

_COUNTERS = (1 << COUNTER_BITS) - 1


class NewMessage(msgspec.Struct, eq=False, gc=False):
    """A message to store.

    Attributes:
        body: the body.
        trace_id: trace id of the publisher; 0 for none.
        header: extend header; empty for none.
        version: version of the extend part: 0 none, 4 JSON.
        delay: seconds before it is delivered (DPUB of the original server).
    """

    body: bytes
    trace_id: int = 0
    header: bytes = b""
    version: int = 0
    delay: float = 0.0


@define(eq=False)
class Stored:
    """The stored messages of one publish.

    Attributes:
        message_id: internal id of the first message.
        offset: offset of the first message.
        size: raw bytes of all messages.
        entries: the messages.
        parts: of a large batch, the parts that were stored one after the other; replicas copy it in the same parts.
    """

    message_id: int
    offset: int
    size: int
    entries: list[Entry]
    parts: Sequence[Stored] = ()


def as_entries(messages: list[NewMessage], log: Log, first: tuple[int, int, int], extend: bool) -> list[Entry]:
    """Return the records of messages at the end of a queue.

    Args:
        messages: the messages.
        log: the queue; it is not changed.
        first: partition, counter and time stamp of the first message; counter and time stamp grow by one per message.
        extend: messages of the topic carry extend headers.
    """
    partition, counter, timestamp = first
    internal_id = partition << COUNTER_BITS | counter
    offset, number = log.end_offset, log.end_count
    entries: list[Entry] = []
    for message in messages:
        header, version = (message.header, message.version) if extend else (b"", 0)
        record = Record(timestamp, internal_id, message.trace_id, message.body, version, header, 0, extend)
        size = raw_size(len(message.body), len(header), extend, version)
        number += 1
        entries.append(Entry(record, offset, size, number))
        offset += size
        internal_id += 1
        timestamp += 1
    return entries


def counter_of(entry: Entry) -> int:
    """Return the counter in a message's internal id, without the partition."""
    return entry.record.internal_id & _COUNTERS
