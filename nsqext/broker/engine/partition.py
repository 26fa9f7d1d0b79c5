"""A partition: its queue, its channels, and the readable part of the queue."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from nsqext.broker.engine.channel.channel import Channel
from nsqext.broker.engine.channel.key_failover import KeyFailoverChannel
from nsqext.broker.engine.channel.original import OriginalChannel
from nsqext.broker.engine.options import PLAIN, ChannelKind, PartitionOptions
from nsqext.broker.engine.schedule import Schedule
from nsqext.broker.engine.storage.log import FIRST_COUNTER, Log, LogEntry, MemoryBudget, Refusal
from nsqext.broker.engine.storage.partition_store import (
    NewMessage,
    PartitionStore,
    Stored,
    StoredPartition,
    as_entries,
    counter_of,
)
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.names import is_ephemeral

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedJournal
    from nsqext.broker.engine.storage.recovery import Recovery


class Partition:
    """A partition on a node; raises `InvalidSetting` for unusable data in its ``data_path``."""

    def __init__(
        self,
        topic: str,
        partition: int,
        options: PartitionOptions | None = None,
        *,
        schedule: Schedule | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.options: PartitionOptions = options or PartitionOptions()
        self.extend: bool = self.options.extend
        self.ordered: bool = self.options.ordered
        self._budget: MemoryBudget = budget or MemoryBudget()  # of the node
        self.log: Log = Log(segment_bytes=self.options.segment_bytes, budget=self._budget)
        self.channels: dict[str, Channel] = {}
        self.committed: int = 0  #: number of the last committed message
        self.readable: int = 0  #: number of the last message for channels
        self.readable_offset: int = 0  #: offset behind it
        self.suspended: bool = False  #: another node is the leader
        self.paused: bool = False  #: channels get no messages (original server)
        self.touched: bool = False  #: a deadline may have changed since the last `tick`
        self.changes: int = 0  #: grows with each change of the channels' stored state and each removal of records
        self.truncations: int = 0  #: grows with each removal of records at the end
        self.message_count: int = 0  #: stored since the partition was opened
        self.message_bytes: int = 0  #: of their bodies
        #: called with the name
        self.on_channel_deleted: Callable[[str], None] | None = None
        self._schedule = schedule or Schedule()
        self.created: int = self.options.wall()  #: nanoseconds since 1970
        self._original = self.options.original
        # captured: the first id of a node without cluster is 1
        self._counter = FIRST_COUNTER if self.options.clustered else FIRST_COUNTER - 1
        self._delays: dict[int, float] = {}
        self._closed = False
        self._new_on_replica = False
        self._saved_end = 0  # end of the queue when the state was written
        self._stored_count = 0  # messages when the server started (original server)
        self._storage: PartitionStore | None = None
        self._budget.add(self)
        if self.options.data_path is not None and not is_ephemeral(topic):
            self._storage = PartitionStore(self.options.data_path, topic, partition, self.options.disk)
            self._open(self._storage)
        self.touch()

    def _open(self, storage: PartitionStore) -> None:
        state = storage.load()
        options = self.options
        self.log = log = storage.open_log(state, options.cache_bytes, options.segment_bytes, self._budget)
        self._continue_counter()
        self.committed, self.readable, self.readable_offset = log.end_count, log.end_count, log.end_offset
        if state is None:
            self.note_channels()
            return
        delayed = storage.load_delayed(state)
        self.created = state.created or self.created
        self.extend = self.extend or state.extend
        self.paused = state.paused
        if storage.store.recovery.is_damaged:
            state.renumber(log)
        for stored in state.channels:
            kind = ChannelKind(stored.dispatch, stored.key_header, stored.fixed_dispatch)
            channel = self._make_channel(stored.name, stored.offset, stored.count, kind)
            channel.restore(stored, delayed.get(stored.name, {}).values())
        if self._original:
            self.readable = min(max(state.readable, log.start_count), log.end_count)
            self.readable_offset = log.find_count(self.readable)
            self._stored_count = log.end_count
            channels = [channel for channel in self._all_channels() if isinstance(channel, OriginalChannel)]
            for channel in channels:
                channel.cursor.pass_over_finished()
            self._pass_to_channels()  # a killed process did not write the number
            for channel in channels:
                channel.reset_counters()

    @property
    def is_stored(self) -> bool:
        return self._storage is not None

    @property
    def recovery(self) -> Recovery | None:
        """None without a data path."""
        return None if self._storage is None else self._storage.store.recovery

    # The queue

    def put(self, messages: Sequence[NewMessage]) -> Stored:
        """Append messages, which channels read after `commit`; raises `Refusal`."""
        if self._closed:
            raise Refusal("exiting")
        if self.log.held > self.options.memory_bound or self._budget.is_exceeded:
            self._make_room()
        first = self.partition, self._counter, self.options.wall()
        entries = as_entries(messages, self.log, first, self.extend)
        self.log.append(entries)
        self._counter += len(entries)
        if self._original:
            self._delays.update(
                {entry.count: new.delay for new, entry in zip(messages, entries, strict=True) if new.delay > 0}
            )
        if self._storage is not None and self.log.end_offset - self._saved_end > self.options.disk.max_file_bytes:
            self._save(self._storage)
        if not self.touched:
            self.touch()
        return Stored(
            entries[0].record.internal_id, entries[0].offset, self.log.end_offset - entries[0].offset, entries
        )

    def skip_ids(self, count: int) -> None:
        self._counter += count

    def commit(self, stored: Stored, *, flushed: bool = True) -> None:
        """Let channels read these messages, which all in-sync replicas have; if not ``flushed``, from `flush` on."""
        last = stored.entries[-1]
        if last.count <= self.committed:
            return
        self.committed = last.count
        self.message_count += len(stored.entries)
        self.message_bytes += sum([len(entry.record.body) for entry in stored.entries])
        if self._original:
            self._pass_to_channels()
            if self.depth > self.options.mem_queue_size and is_ephemeral(self.topic):
                self._drop_behind(self.readable + self.options.mem_queue_size)
        elif flushed:
            self._read_to(last.count, last.offset + last.size)

    def flush(self) -> None:
        """Let channels read all committed messages."""
        if self.readable < self.committed:
            self._read_to(self.committed, self.log.find_count(self.committed))

    def _read_to(self, count: int, offset: int) -> None:
        self.readable, self.readable_offset = count, offset
        for channel in self._all_channels():
            channel.pump()

    def uncommit(self, count: int) -> None:
        """Let channels read only ``count`` messages, and acknowledged messages: an in-sync replica lacks the next."""
        finished = max((channel.acked.count for channel in self.channels.values()), default=0)
        self.committed = self.readable = min(self.committed, max(count, finished))
        self.readable_offset = self.log.find_count(self.readable)

    def _pass_to_channels(self) -> None:
        """Pass committed messages to the channels of a topic that is not paused (original server)."""
        if self.paused or not self.channels:
            return
        first, self.readable = self.readable, self.committed
        self.readable_offset = self.log.find_count(self.committed)
        channels = [channel for channel in self._all_channels() if isinstance(channel, OriginalChannel)]
        if self._delays or any(channel.ephemeral for channel in channels):
            for before in range(first, self.readable):
                entry, delay = self.log.at(before + 1), self._delays.pop(before + 1, 0.0)
                for channel in channels:
                    if entry is not None:
                        channel.accept(entry, delay)
        for channel in channels:
            channel.pump()

    def _drop_behind(self, count: int) -> None:
        """Drop messages that wait in an ephemeral topic, which has no disk for them (original server)."""
        for number in range(count + 1, self.committed + 1):
            self._delays.pop(number, None)
        self.committed = count
        self.log.truncate(self.log.find_count(count))

    def rollback(self, stored: Stored) -> None:
        if stored.entries[0].count > self.committed:
            self.truncate(stored.offset)

    def append_replica(self, entries: list[LogEntry], *, leader_start: int | None = None) -> None:
        """Append records of the leader, in order; a jump between them is a gap of its queue.

        If the leader's queue starts (at ``leader_start``, or with None the first record) behind this queue's end, this
        queue restarts there. A replica accepts and removes only what its leader did: it learns late how far the
        channels are, and may become the leader. Raises `Refusal` for an unwritable disk.
        """
        log = self.log
        if entries[0].offset != log.end_offset and (leader_start is None or leader_start > log.end_offset):
            log.restart(entries[0].offset, entries[0].count - 1)
        log.append_runs(entries)
        self._continue_counter()
        self._follow_end()
        self.touch()
        for channel in self._all_channels():
            channel.pump()

    def truncate(self, offset: int) -> None:
        """Remove everything at or behind an offset: a new leader lacks it, or a publish is refused."""
        self.truncations += 1
        self.log.truncate(offset)
        self._continue_counter()
        if self.committed > self.log.end_count:
            self._follow_end()
            for channel in self._all_channels():
                channel.cut(self.readable_offset, self.readable)

    def _follow_end(self) -> None:
        self.committed = self.readable = self.log.end_count
        self.readable_offset = self.log.end_offset

    def _continue_counter(self) -> None:
        last = self.log.at(self.log.end_count)
        if last is not None:
            self._counter = counter_of(last) + 1

    # Memory

    def _make_room(self) -> None:
        """Free memory; raises `Refusal` if unfinished messages exceed the bound of partition or node."""
        self.free_memory()
        bound, budget = self.options.memory_bound, self._budget
        if self.log.held > bound and self._storage is None:
            raise Refusal(
                f"topic {self.topic} partition {self.partition} holds {self.log.held} bytes that are not consumed, "
                f"more than {bound}"
            )
        if not budget.is_exceeded:
            return
        budget.reclaim()
        if budget.is_exceeded and self._storage is None:
            raise Refusal(
                f"the node holds {budget.held} bytes that are not consumed, more than {budget.limit}; "
                f"topic {self.topic} partition {self.partition} holds {self.log.held} of them"
            )

    def free_memory(self) -> None:
        """Remove finished messages, or with a data path all messages, from memory."""
        if self._storage is None:
            self._trim(0)
        else:
            self.log.shrink(0)

    def _trim(self, keep: int) -> None:
        """Remove finished messages, except the last ``keep`` bytes of the queue."""
        if self.suspended:
            return
        slowest = min((channel.acked.offset for channel in self.channels.values()), default=self.readable_offset)
        start = self.log.start_offset
        self.log.trim(min(slowest, self.readable_offset, max(self.log.end_offset - keep, 0)))
        if self.log.start_offset != start:
            self.changes += 1

    # Channels

    def channel(self, name: str, kind: ChannelKind = PLAIN) -> Channel:
        """Return a channel; a new channel has this type and starts at the end of the queue.

        On the original server, the first channel gets the topic's messages.
        """
        channel = self.channels.get(name)
        if channel is None:
            channel = self._make_channel(name, self.readable_offset, self.readable, kind)
            if self.suspended:
                self._new_on_replica = True  # its position follows at once
            else:
                self.note_channels()
            if self._original:
                self._pass_to_channels()
        return channel

    def add_channels(self, names: list[str]) -> None:
        """Create channels, each with the topic's messages (original server)."""
        for name in names:
            self._make_channel(name, self.readable_offset, self.readable, PLAIN)
        self.note_channels()
        self._pass_to_channels()

    def _make_channel(self, name: str, offset: int, count: int, kind: ChannelKind) -> Channel:
        channel: Channel
        if self._original:
            channel = OriginalChannel(self, name, offset, count)
        elif kind.type == KEY_FAILOVER:
            channel = KeyFailoverChannel(self, name, offset, count, kind)
        else:
            channel = Channel(self, name, offset, count)
            channel.kind = kind
        self.channels[name] = channel
        return channel

    def set_kind(self, name: str, kind: ChannelKind) -> Channel:
        """Return a channel of this type: new, or converted at its acknowledged position, without subscribers."""
        channel = self.channels.get(name)
        if channel is None or channel.kind == kind:
            return self.channel(name, kind)
        if channel.kind.same(kind):
            channel.kind = kind
        else:
            state, delayed = channel.state(), list(channel.cursor.delayed.messages.values())
            channel = self._make_channel(name, state.offset, state.count, kind)
            channel.restore(state, delayed)
        self.note_channels()
        return channel

    def check_kind(self, name: str, wanted: ChannelKind) -> None:
        """Raise `Refusal` if a channel, existing or not, cannot have a type."""
        channel = self.channels.get(name)
        kind = channel.kind if channel else PLAIN
        if kind.same(wanted):
            return
        if channel and (channel.clients or (kind.fixed and not wanted.fixed)):
            raise Refusal(f"channel {name} of topic {self.topic} is dispatched by {kind}, not {wanted}")
        if wanted.type == KEY_FAILOVER and (self.ordered or (channel and channel.ordered)):
            raise Refusal(f"channel {name} of topic {self.topic} is ordered and cannot become {wanted}")

    def admit(self, name: str, wanted: ChannelKind | None) -> Channel:
        """Return the channel for a subscriber or a request to create it; raises `Refusal` as `check_kind`.

        The first subscriber chooses the type, unless the creation did; None keeps it.
        """
        channel = self.channel(name)
        if wanted is None or (channel.kind.same(wanted) and channel.kind.fixed):
            return channel
        self.check_kind(name, wanted)
        return self.set_kind(name, wanted)

    def delete_channel(self, name: str) -> None:
        channel = self.channels.pop(name, None)
        if channel is None:
            return
        channel.close()
        channel.cursor.delayed.clear()
        self.note_channels()
        if self.on_channel_deleted is not None:
            self.on_channel_deleted(name)

    def _all_channels(self) -> list[Channel]:
        """Return a copy: calls may remove an ephemeral channel with its last client."""
        return list(self.channels.values())

    def upgrade_extend(self) -> None:
        """Make the topic an extend topic; older records are delivered as version 0 (captured: upgrade_old_records)."""
        self.extend = True
        self.note_channels()

    # The topic of the original server

    @property
    def depth(self) -> int:
        return self.committed - self.readable

    @property
    def stored_depth(self) -> int:
        """Messages from before the server's start that no channel got."""
        return max(min(self.committed, self._stored_count) - self.readable, 0)

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self.note_channels()
        self._pass_to_channels()

    def empty(self) -> None:
        self._delays.clear()
        first, self.readable = self.readable, self.committed
        self.readable_offset = self.log.find_count(self.committed)
        for channel in self._all_channels():
            if isinstance(channel, OriginalChannel):
                channel.discard_after(first)
        self.note_channels()

    # Time and end

    def touch(self) -> None:
        self.touched = True
        self._schedule.add(self)

    def tick(self) -> float | None:
        """Process what is due in channels and on disk; free memory of finished messages.

        Returns the clock time of the next call; None to wait for `touch`.
        """
        self.touched = True  # also for changes of the channels now
        due = min((channel.tick() for channel in self._all_channels()), default=inf)
        storage = self._storage
        if storage is not None:
            if storage.begin_interval(self.options.clock()):
                self._save(storage)
                storage.compact(self._delayed)
            due = min(due, storage.next_deadline)
        elif self.log.held > self.options.finished_bytes:
            self._trim(self.options.finished_bytes)
        self.touched = False
        return None if due == inf else due

    def _delayed(self) -> list[tuple[str, Iterable[Delayed]]]:
        return [(channel.name, channel.cursor.delayed.messages.values()) for channel in self._all_channels()]

    def suspend(self) -> None:
        """Close and refuse consumers, because another node is the leader."""
        self.suspended = True
        for channel in self._all_channels():
            channel.suspend()

    def resume(self) -> None:
        self.suspended = False
        for channel in self._all_channels():
            channel.pump()

    def restart(self) -> None:
        """Continue as a restarted process."""
        self.message_count = self.message_bytes = 0
        self._stored_count = self.committed
        for channel in self._all_channels():
            channel.restart()
            channel.pump()

    def close(self, *, destroy: bool = False, save: bool = True) -> None:
        """Close all clients and files; ``destroy`` removes the files.

        Without ``save``, the files are left as by a killed process.
        """
        self._closed = True
        for channel in self._all_channels():
            channel.close()
        self._schedule.remove(self)
        self._budget.remove(self)
        storage, self._storage = self._storage, None
        if storage is not None and destroy:
            storage.destroy()
        elif storage is not None:
            if save:
                storage.save(self.state())
            storage.close()
        self.log.release()

    # State on disk

    def state(self) -> StoredPartition:
        channels = [channel.state() for channel in self._all_channels() if not channel.ephemeral]
        end = self.log.end_offset, self.log.end_count, self.created
        return StoredPartition(
            self.topic, self.partition, self.extend, self.ordered, self.paused, self.readable, channels, *end
        )

    def _save(self, storage: PartitionStore) -> None:
        """Write the state; remove finished messages also if this fails: it frees a full disk."""
        storage.save(self.state())
        self._saved_end = self.log.end_offset
        self._trim(self.options.disk.retention_bytes)

    @property
    def journal(self) -> DelayedJournal | None:
        return None if self._storage is None else self._storage.journal

    def note_progress(self) -> None:
        self.changes += 1
        if self._storage is not None:
            self._storage.dirty = True
            if not self.touched:
                self.touch()

    def note_restored(self) -> None:
        """Write positions, at once for a channel new on a replica, else with the interval."""
        self.note_progress()
        if self._new_on_replica:
            self.note_channels()

    def note_channels(self) -> None:
        """Write the state at once: channels were created, deleted or switched."""
        self._new_on_replica = False
        self.changes += 1
        if self._storage is not None:
            self._save(self._storage)
