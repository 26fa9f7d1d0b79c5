"""A partition: its queue, its channels, and what of the queue they may read."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from nsqext.broker.engine.channel import Channel
from nsqext.broker.engine.channel_key_failover import KeyFailoverChannel
from nsqext.broker.engine.channel_types import PLAIN, ChannelKind
from nsqext.broker.engine.classic import ClassicChannel
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.options import PartitionOptions
from nsqext.broker.engine.publish import FIRST_COUNTER, NewMessage, Stored, as_entries, counter_of
from nsqext.broker.engine.storage.log import Entry, Log
from nsqext.broker.engine.storage.partition_store import PartitionState, PartitionStore
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.names import is_ephemeral

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nsqext.broker.engine.storage.delayed_queue import Delayed, Journal
    from nsqext.broker.engine.storage.segments import Recovery

__all__ = ("NewMessage", "Partition", "PartitionOptions", "Stored")


class Partition:
    """One partition of a topic on one node.

    Args:
        topic: the topic.
        partition: its number.
        options: its settings; with a ``data_path`` the partition is opened as it is there.

    Attributes:
        topic: the topic.
        partition: its number.
        options: its settings.
        extend: messages carry extend headers.
        ordered: channels are consumed with SUB_ORDERED only.
        log: its queue.
        channels: its channels by name.
        committed: number of the last message that counts as stored.
        readable: number of the last message that channels may read.
        readable_offset: where what they may read ends.
        suspended: another node leads it; nobody is served here.
        paused: messages are not passed to channels (original server).
        message_count: messages that were stored since the partition was opened.
        message_bytes: bytes of their bodies.
        on_channel_deleted: called with the name of a channel that went away; None for nobody.

    Raises:
        InvalidSetting: what is in ``data_path`` is damaged.
    """

    def __init__(self, topic: str, partition: int, options: PartitionOptions | None = None) -> None:
        self.topic = topic
        self.partition = partition
        self.options: PartitionOptions = options or PartitionOptions()
        self.extend: bool = self.options.extend
        self.ordered: bool = self.options.ordered
        self.log: Log = Log(segment_bytes=self.options.segment_bytes)
        self.channels: dict[str, Channel] = {}
        self.committed: int = 0
        self.readable: int = 0
        self.readable_offset: int = 0
        self.suspended: bool = False
        self.paused: bool = False
        self.message_count: int = 0
        self.message_bytes: int = 0
        self.on_channel_deleted: Callable[[str], None] | None = None
        self._original = self.options.generation == "nsq"
        self._counter = FIRST_COUNTER
        self._delays: dict[int, float] = {}
        self._closed = False
        self._owes = False
        self._storage: PartitionStore | None = None
        if self.options.data_path is not None and not is_ephemeral(topic):
            self._storage = PartitionStore(self.options.data_path, topic, partition, self.options.disk)
            self._open(self._storage)

    def _open(self, storage: PartitionStore) -> None:
        self.log = log = storage.open_log(self.options.memory_bytes, self.options.segment_bytes)
        self._continue_counter()
        self.committed, self.readable, self.readable_offset = log.end_count, log.end_count, log.end_offset
        state = storage.load()
        if state is None:
            self.note_channels()
            return
        delayed = storage.load_delayed()
        self.extend = self.extend or state.extend
        self.paused = state.paused
        for kept in state.channels:
            kind = ChannelKind(kept.dispatch, kept.key_header, kept.fixed_dispatch)
            channel = self._make_channel(kept.name, kept.offset, kept.count, kind)
            channel.restore(kept, delayed.get(kept.name, {}).values())
        if self._original:
            self.readable = min(max(state.readable, log.start_count), log.end_count)
            self.readable_offset = log.find_count(self.readable)
            for channel in self._each():
                if isinstance(channel, ClassicChannel):
                    channel.begin_anew()
            self._pass_on()

    @property
    def recovery(self) -> Recovery | None:
        """What was found on the disk; None without one."""
        return None if self._storage is None else self._storage.store.recovery

    # the queue

    def put(self, messages: list[NewMessage]) -> Stored:
        """Append messages to the queue; channels see them when they are committed.

        Raises:
            Refusal: what the slowest channel has before it fills the memory, the disk is full, or the
                partition is closed.
        """
        if self._closed:
            raise Refusal("exiting")
        if self.log.held > self.options.memory_bytes:
            self._make_room()
        first = self.partition, self._counter, self.options.wall()
        entries = as_entries(messages, self.log, first, self.extend)
        self.log.append(entries)
        self._counter += len(entries)
        if self._original:
            self._delays.update(
                {entry.count: new.delay for new, entry in zip(messages, entries, strict=True) if new.delay > 0}
            )
        return Stored(
            entries[0].record.internal_id, entries[0].offset, self.log.end_offset - entries[0].offset, entries
        )

    def use_up(self, count: int) -> None:
        """Give no message so many of the next ids, because messages that had them were refused."""
        self._counter += count

    def commit(self, stored: Stored) -> None:
        """Let channels read up to here, because all in-sync replicas have it."""
        last = stored.entries[-1]
        if last.count <= self.committed:
            return
        self.committed = last.count
        self.message_count += len(stored.entries)
        self.message_bytes += sum([len(entry.record.body) for entry in stored.entries])
        if self._original:
            self._pass_on()
        else:
            self.readable, self.readable_offset = last.count, last.offset + last.size
            for channel in self._each():
                channel.pump()

    def _pass_on(self) -> None:
        """Pass what is stored to the channels; the original server's topic does when it has some and is not paused."""
        if self.paused or not self.channels:
            return
        first, self.readable = self.readable, self.committed
        self.readable_offset = self.log.find_count(self.committed)
        channels = [channel for channel in self._each() if isinstance(channel, ClassicChannel)]
        if self._delays or any(channel.ephemeral for channel in channels):
            for count in range(first + 1, self.readable + 1):
                entry, delay = self.log.at(count), self._delays.pop(count, 0.0)
                for channel in channels:
                    if entry is not None:
                        channel.accept(entry, delay)
        self.note_progress()
        for channel in channels:
            channel.pump()

    def rollback(self, stored: Stored) -> None:
        """Take away what was put and never committed, with all that came behind it."""
        if stored.entries[0].count > self.committed:
            self.truncate(stored.offset)

    def append_replica(self, entries: list[Entry]) -> None:
        """Append what the leader has; a gap means that the leader has nothing older, so the queue begins there.

        A copy takes whatever its leader took, and lets go only what the leader let go: it hears late how far the
        channels are, and may stand for all of them tomorrow.

        Raises:
            Refusal: the disk does not take it.
        """
        if entries[0].offset != self.log.end_offset:
            self.log.restart(entries[0].offset, entries[0].count - 1)
        if self.log.held > self.options.memory_bytes:
            self.log.shrink(self.options.memory_bytes // 2)
        self.log.append(entries)
        self._continue_counter()
        self._follow_end()
        for channel in self._each():
            channel.pump()

    def truncate(self, offset: int) -> None:
        """Drop what lies at or behind an offset: a replica drops what its new leader does not have."""
        self.log.truncate(offset)
        self._continue_counter()
        if self.committed > self.log.end_count:
            self._follow_end()
            for channel in self._each():
                channel.cut(self.readable_offset, self.readable)

    def _follow_end(self) -> None:
        self.committed = self.readable = self.log.end_count
        self.readable_offset = self.log.end_offset

    def _continue_counter(self) -> None:
        last = self.log.at(self.log.end_count)
        if last is not None:
            self._counter = counter_of(last) + 1

    def _make_room(self) -> None:
        """Let go what nobody needs any more; with a disk, also from memory alone what is needed later."""
        bound, storage = self.options.memory_bytes, self._storage
        if storage is None:
            self._trim(0)
        else:
            self._save(storage)
        self.log.shrink(bound // 2)
        if self.log.held > bound and storage is None:
            raise Refusal(
                f"topic {self.topic} partition {self.partition} holds {self.log.held} bytes that are not consumed, "
                f"more than {bound}"
            )

    def _trim(self, keep: int) -> None:
        if self.suspended:
            return
        slowest = min((channel.confirmed.offset for channel in self.channels.values()), default=self.readable_offset)
        self.log.trim(min(slowest, self.readable_offset, max(self.log.end_offset - keep, 0)))

    # channels

    def channel(self, name: str, kind: ChannelKind = PLAIN) -> Channel:
        """Return a channel, of this type when it is new.

        A new one begins at the end of the queue; at the original server the first one gets what the topic held.
        """
        channel = self.channels.get(name)
        if channel is None:
            channel = self._make_channel(name, self.readable_offset, self.readable, kind)
            if self.suspended:
                self._owes = True  # a replica is told where the channel is at once: its end is no place to come back to
            else:
                self.note_channels()
            if self._original:
                self._pass_on()
        return channel

    def _make_channel(self, name: str, offset: int, count: int, kind: ChannelKind) -> Channel:
        channel: Channel
        if self._original:
            channel = ClassicChannel(self, name, offset, count)
        elif kind.type == KEY_FAILOVER:
            channel = KeyFailoverChannel(self, name, offset, count, kind)
        else:
            channel = Channel(self, name, offset, count)
            channel.kind = kind
        self.channels[name] = channel
        return channel

    def remake(self, channel: Channel, kind: ChannelKind) -> Channel:
        """Make a channel without clients one of another type; it goes on from what is finished."""
        state, delayed = channel.state(), list(channel.backlog.delayed.messages.values())
        fresh = self._make_channel(channel.name, state.offset, state.count, kind)
        fresh.restore(state, delayed)
        self.note_channels()
        return fresh

    def delete_channel(self, name: str) -> None:
        """Remove a channel and close its clients; nothing happens when it is not there."""
        channel = self.channels.pop(name, None)
        if channel is None:
            return
        channel.close()
        channel.backlog.delayed.clear()
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
        self.note_channels()

    # the topic of the original server

    @property
    def depth(self) -> int:
        """Messages that were not passed to channels."""
        return self.committed - self.readable

    def pause(self) -> None:
        """Pass nothing to channels."""
        self.paused = True
        self.note_channels()

    def unpause(self) -> None:
        """Pass messages to channels again."""
        self.paused = False
        self.note_channels()
        self._pass_on()

    def empty(self) -> None:
        """Drop what was not passed to channels; they keep what they have."""
        for count in [count for count in self._delays if count <= self.committed]:
            del self._delays[count]
        first, self.readable = self.readable, self.committed
        self.readable_offset = self.log.find_count(self.committed)
        for channel in self._each():
            if isinstance(channel, ClassicChannel):
                channel.pass_over(first)
        self.note_channels()

    # time and end

    def tick(self) -> float | None:
        """Let what is due happen in every channel and on the disk.

        Returns:
            The clock time of the next call that is needed, None when nothing waits.
        """
        due = min((channel.tick() for channel in self._each()), default=inf)
        storage = self._storage
        if storage is not None:
            if storage.is_due(self.options.clock()):
                self._save(storage)
                storage.compact(self._delayed)
            if self.log.held > self.options.memory_bytes:  # consumers read again what only the disk had
                self._make_room()
            due = min(due, storage.next_deadline)
        return None if due == inf else due

    def _delayed(self) -> list[tuple[str, Iterable[Delayed]]]:
        return [(channel.name, channel.backlog.delayed.messages.values()) for channel in self._each()]

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

    def close(self, *, destroy: bool = False, save: bool = True) -> None:
        """Close the clients of all channels and the files.

        Args:
            destroy: the topic is deleted: remove the files.
            save: write where the channels are; without it the files are as a killed process leaves them.
        """
        self._closed = True
        for channel in self._each():
            channel.close()
        storage, self._storage = self._storage, None
        if storage is not None and destroy:
            storage.destroy()
        elif storage is not None:
            if save:
                storage.save(self.state())
            storage.close()

    # what is kept on disk

    def state(self) -> PartitionState:
        """Return what is kept besides the queue."""
        channels = [channel.state() for channel in self._each() if not channel.ephemeral]
        return PartitionState(
            self.topic, self.partition, self.extend, self.ordered, self.paused, self.readable, channels
        )

    def _save(self, storage: PartitionStore) -> None:
        """Write the state, and then let go what no channel needs; where there is no room for it, that makes some."""
        storage.save(self.state())
        self._trim(self.options.disk.retention_bytes)

    def journal(self, channel: str) -> Journal | None:
        """Return where changes of a channel's delayed queue are kept; None without a disk."""
        return None if self._storage is None else self._storage.journal(channel)

    def note_progress(self) -> None:
        """Hear that a message was finished or the position moved: it is written with the next interval."""
        if self._storage is not None:
            self._storage.dirty = True

    def note_restored(self) -> None:
        """Hear that a channel was told where it is: that is written at once when it is new."""
        self.note_progress()
        if self._owes:
            self.note_channels()

    def note_channels(self) -> None:
        """Hear that channels came, went or were switched: that is written at once."""
        self._owes = False
        if self._storage is not None:
            self._save(self._storage)
