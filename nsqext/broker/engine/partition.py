"""A partition: its queue, its channels, and what of the queue they may read."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from attrs import define

from nsqext.broker.engine.channel import Channel
from nsqext.broker.engine.log import Entry, Log
from nsqext.broker.engine.options import PartitionOptions
from nsqext.broker.engine.refusal import QueueFull
from nsqext.protocol.record import Record, raw_size

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("FIRST_COUNTER", "NewMessage", "Partition", "PartitionOptions", "Stored")

FIRST_COUNTER = 2
"""Counter of the first message of a partition (captured: partition_ids)."""

_PARTITION_SHIFT = 50


@define(eq=False)
class NewMessage:
    """A message that is to be stored.

    Attributes:
        body: its bytes.
        trace_id: what the publisher gave; 0 for none.
        header: extend header; empty for none.
        version: version of the extend part: 0 none, 4 JSON.
        delay: seconds that channels wait with it (DPUB of the original server).
    """

    body: bytes
    trace_id: int = 0
    header: bytes = b""
    version: int = 0
    delay: float = 0.0


@define(eq=False)
class Stored:
    """What was put into a queue.

    Attributes:
        message_id: internal id of the first message.
        offset: offset of the first message.
        size: raw bytes of all.
        entries: the messages.
    """

    message_id: int
    offset: int
    size: int
    entries: list[Entry]


class Partition:
    """One partition of a topic on one node.

    Args:
        topic: the topic.
        partition: its number.
        options: its settings.

    Attributes:
        topic: the topic.
        partition: its number.
        options: its settings.
        extend: messages carry extend headers.
        ordered: channels are consumed with SUB_ORDERED only.
        log: its queue.
        channels: its channels by name.
        readable: number of the last message that channels may read.
        readable_offset: where what they may read ends.
        suspended: another node leads it; nobody is served here.
        on_channel_deleted: called with the name of a channel that went away; None for nobody.
    """

    def __init__(self, topic: str, partition: int, options: PartitionOptions | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.options = options or PartitionOptions()
        self.extend = self.options.extend
        self.ordered = self.options.ordered
        self.log = Log()
        self.channels: dict[str, Channel] = {}
        self.readable = 0
        self.readable_offset = 0
        self.suspended = False
        self.on_channel_deleted: Callable[[str], None] | None = None
        self._counter = FIRST_COUNTER

    # the queue

    def put(self, messages: list[NewMessage]) -> Stored:
        """Append messages to the queue; channels see them when they are committed.

        Raises:
            QueueFull: what the slowest channel has before it fills the memory.
        """
        self._make_room()
        log, extend = self.log, self.extend
        first = offset = log.end_offset
        number = log.end_count
        internal_id = self.partition << _PARTITION_SHIFT | self._counter
        timestamp = self.options.wall()
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
        self._counter += len(messages)
        log.append(entries)
        return Stored(entries[0].record.internal_id, first, offset - first, entries)

    def commit(self, stored: Stored) -> None:
        """Let channels read up to here, because all in-sync replicas have it."""
        last = stored.entries[-1]
        if last.count > self.readable:
            self.readable = last.count
            self.readable_offset = last.offset + last.size
            for channel in self._each():
                channel.pump()

    def rollback(self, stored: Stored) -> None:
        """Take away what was put and never committed, with all that came behind it."""
        if stored.offset >= self.readable_offset:
            self.truncate(stored.offset)

    def append_replica(self, entries: list[Entry]) -> None:
        """Append what the leader has; a gap means that the leader has nothing older, so the queue begins there."""
        first, last = entries[0], entries[-1]
        if first.offset != self.log.end_offset:
            self.log.restart(first.offset, first.count - 1)
        self.log.append(entries)
        self._counter = max(self._counter, (last.record.internal_id & ((1 << _PARTITION_SHIFT) - 1)) + 1)
        self.readable, self.readable_offset = self.log.end_count, self.log.end_offset
        for channel in self._each():
            channel.pump()

    def truncate(self, offset: int) -> None:
        """Drop what lies at or behind an offset: a replica drops what its new leader does not have."""
        self.log.truncate(offset)
        entry = self.log.at(self.log.end_count)
        if entry is not None:
            self._counter = (entry.record.internal_id & ((1 << _PARTITION_SHIFT) - 1)) + 1
        if self.readable_offset > self.log.end_offset:
            self.readable, self.readable_offset = self.log.end_count, self.log.end_offset
            for channel in self._each():
                channel.cut(self.readable_offset, self.readable)

    def _make_room(self) -> None:
        bound = self.options.memory_bytes
        if self.log.held <= bound:
            return
        self.log.trim(self._slowest())
        if self.log.held > bound:
            raise QueueFull(
                f"topic {self.topic} partition {self.partition} holds {self.log.held} bytes that are not consumed, "
                f"more than {bound}"
            )

    def _slowest(self) -> int:
        """Offset behind which some channel may still have to read."""
        return min(
            (channel.backlog.confirmed.offset for channel in self.channels.values()), default=self.readable_offset
        )

    # channels

    def channel(self, name: str) -> Channel:
        """Return a channel; a new one begins at the end of the queue."""
        channel = self.channels.get(name)
        if channel is None:
            channel = self.channels[name] = Channel(self, name, self.readable_offset, self.readable)
            self.note_channels()
        return channel

    def delete_channel(self, name: str) -> None:
        """Remove a channel and close its clients; nothing happens when it is not there."""
        channel = self.channels.pop(name, None)
        if channel is None:
            return
        channel.close()
        self.note_channels()
        if self.on_channel_deleted is not None:
            self.on_channel_deleted(name)

    def _each(self) -> list[Channel]:
        return list(self.channels.values())

    def upgrade_extend(self) -> None:
        """Make the topic an extend topic, for ever.

        Older records stay as they are and are delivered as version 0 (captured: upgrade_old_records).
        """
        self.extend = True

    # time and end

    def tick(self) -> float | None:
        """Let what is due happen in every channel; returns the clock time of the next, None when nothing waits."""
        due = min((channel.tick() for channel in self._each()), default=inf)
        return None if due == inf else due

    def suspend(self) -> None:
        """Serve nobody any more, because another node leads: clients are closed, what is on its way is forgotten."""
        self.suspended = True
        for channel in self._each():
            channel.suspend()

    def resume(self) -> None:
        """Serve again, from the confirmed positions."""
        self.suspended = False
        for channel in self._each():
            channel.pump()

    def close(self) -> None:
        """Close the clients of all channels."""
        for channel in self._each():
            channel.close()

    # notes of the channels

    def note_progress(self) -> None:
        """Hear that a confirmed position moved."""

    def note_delayed(self) -> None:
        """Hear that a delayed queue changed."""

    def note_channels(self) -> None:
        """Hear that channels came, went or were switched."""
