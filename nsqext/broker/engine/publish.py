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

_COUNTERS = (1 << COUNTER_BITS) - 1


class NewMessage(msgspec.Struct, eq=False, gc=False):
    """A message to store."""

    body: bytes
    trace_id: int = 0  # trace id of the publisher; 0 for none
    header: bytes = b""  # extend header; empty for none
    version: int = 0  # version of the extend part: 0 none, 4 JSON
    delay: float = 0.0  # seconds before it is delivered (DPUB of the original server)


@define(eq=False)
class Stored:
    """The stored messages of one publish."""

    message_id: int  # internal id of the first message
    offset: int  # offset of the first message
    size: int  # raw bytes of all messages
    entries: list[Entry]  # the messages
    # of a large batch, the parts that were stored one after the other; replicas copy it in the same parts
    parts: Sequence[Stored] = ()


def as_entries(messages: Sequence[NewMessage], log: Log, first: tuple[int, int, int], extend: bool) -> list[Entry]:
    """Return the records of messages at the end of a queue, which is not changed.

    ``first`` is partition, counter and time stamp of the first message; the latter two grow by one per message.
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
