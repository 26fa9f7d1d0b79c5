"""The mutants of the engine and coordinator that change nothing that a caller could observe, each with the reason."""

from __future__ import annotations

__all__ = ("BROKER",)

BROKER: dict[tuple[str, str, str], str] = {
    (
        "broker/engine/channel/key_failover.py",
        "Gt to GtE",
        "while index and pending[index - 1].entry.offset > offset:",
    ): "no two messages have the same offset",
    (
        "broker/engine/channel/key_failover.py",
        "Lt to LtE",
        "return not self.blocked or all(first < delivery.entry.offset for delivery in self.blocked)",
    ): "no two messages have the same offset",
    (
        "broker/engine/channel/key_failover.py",
        "Gt to GtE",
        "self.balance_due = self._clock() + _BALANCE if len(self._heaps) > 1 else inf",
    ): "one client has nothing to give away",
    (
        "broker/engine/channel/channel.py",
        "Lt to LtE",
        "if random.random() < 0.5:",
    ): "a random number is never exactly a half",
    (
        "broker/engine/channel/key_failover.py",
        "GtE to Gt",
        "return self.in_flight.deferred >= self._options.rules.replay_limit",
    ): "the bound of deferred messages is chosen",
    ("broker/engine/header_filter.py", "number + 1", "@lru_cache(256)"): "the size of a cache is chosen",
    (
        "broker/engine/channel/in_flight.py",
        "number + 1",
        "behind: int = 0  #: number of the message to read before its redelivery (original generation)",
    ): "it is set before it is read",
    (
        "broker/engine/channel/channel.py",
        "Gt to GtE",
        "self._rate_limit = ChannelRateLimit(rate, self._clock()) if rate > 0 else None",
    ): "a limit of 0 holds nothing back",
    ("broker/engine/storage/segments.py", "other bool", "self._dirty = False"): "an fsync more than needed",
    (
        "broker/engine/storage/segments.py",
        "number + 1",
        "out = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)",
    ): "the permissions of files are chosen",
    (
        "broker/engine/storage/delayed_queue.py",
        "number + 1",
        "self._out = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)",
    ): "the permissions of files are chosen",
    (
        "broker/engine/storage/segments.py",
        "GtE to Gt",
        "if file.size >= self._options.max_file_bytes or file.end != entries[0].offset:",
    ): "the size from which on a file is full is chosen",
    (
        "broker/engine/storage/segments.py",
        "LtE to Lt",
        "if file.end <= offset or file.offset >= end:",
    ): "no byte is read of a file that ends there",
    (
        "broker/engine/storage/segments.py",
        "GtE to Gt",
        "if file.end <= offset or file.offset >= end:",
    ): "no byte is read of a file that begins there",
    (
        "broker/engine/storage/segments.py",
        "GtE to Gt",
        "while len(self._files) > 1 and self._files[-1].offset >= offset:",
    ): "the file is empty instead of removed",
    (
        "broker/engine/storage/recovery.py",
        "other bool",
        "return False",
    ): "the begin of the file is written again, as it is",
    ("broker/engine/storage/recovery.py", "number + 1", "self.last_number += 1"): "the numbers only have to rise",
    (
        "broker/engine/storage/delayed_queue.py",
        "number + 1",
        "self._size = 0",
    ): "it is the size of the file once that is open",
    (
        "broker/engine/storage/delayed_queue.py",
        "number + 1",
        "self._compact_size = 0  # bytes after the last compaction",
    ): "the size from which on the file is compacted is chosen",
    (
        "broker/engine/storage/delayed_queue.py",
        "other bool",
        "write_atomically(self.path, data, sync=False)",
    ): "the file is synced as well",
    (
        "broker/engine/storage/delayed_queue.py",
        "Gt to GtE",
        "return self._size > max(_OVERGROWN, 4 * self._compact_size)",
    ): "the size from which on the file is compacted is chosen",
    (
        "broker/engine/storage/delayed_queue.py",
        "number + 1",
        "return self._size > max(_OVERGROWN, 4 * self._compact_size)",
    ): "the size from which on the file is compacted is chosen",
    ("broker/engine/partition.py", "number + 1", "self._trim(0)"): "the last segment is kept anyway",
    (
        "broker/engine/partition.py",
        "number + 1",
        "self.log.trim(min(slowest, self.readable_offset, max(self.log.end_offset - keep, 0)))",
    ): "no segment has one byte",
    ("broker/engine/partition.py", "number + 1", "self.changes += 1"): "only whether it grew counts",
    (
        "broker/engine/partition.py",
        "Gt to GtE",
        "elif self.log.held > self.options.finished_bytes:",
    ): "the bytes of finished messages that are kept are chosen",
    (
        "broker/engine/options.py",
        "number + 1",
        "max_unsent: int = 4 * MIB",
    ): "the bytes that wait for a client that does not read are chosen",
    (
        "broker/engine/partition.py",
        "number + 1",
        "self._saved_end = 0  # end of the queue when the state was written",
    ): "the bytes until the state is written again are chosen",
    (
        "broker/engine/partition.py",
        "Gt to GtE",
        "if self._storage is not None and self.log.end_offset - self._saved_end > self.options.disk.max_file_bytes:",
    ): "the bytes until the state is written again are chosen",
    (
        "broker/engine/partition.py",
        "Gt to GtE",
        "if self.log.held > self.options.memory_bound or self._budget.is_exceeded:",
    ): "the bound is looked at again before anything is refused",
    (
        "broker/engine/partition.py",
        "Gt to GtE",
        "{entry.count: new.delay for new, entry in zip(messages, entries, strict=True) if new.delay > 0}",
    ): "a delay of no seconds is none",
    (
        "broker/engine/channel/cursor.py",
        "Lt to LtE",
        "if self._overflow and not self.requeued and (ahead is None or self._options.random.random() < 0.5):",
    ): "a random number is never exactly a half",
    (
        "broker/engine/channel/cursor.py",
        "Lt to LtE",
        "return self._unreadable == self.count and self.count < self._partition.readable",
    ): "a message that could not be read was readable",
    (
        "broker/engine/channel/cursor.py",
        "GtE to Gt",
        "if delivery.attempts >= MAX_ATTEMPTS // 4:",
    ): "the number of attempts that counts as very many is chosen",
    (
        "broker/engine/channel/cursor.py",
        "number + 1",
        "if delivery.attempts >= MAX_ATTEMPTS // 4:",
    ): "the number of attempts that counts as very many is chosen",
    (
        "broker/engine/storage/recovery.py",
        "Lt to LtE",
        "if found_id <= last_id + 1 or start < position:",
    ): "a record that was not read at the position has an id that is too small",
    (
        "broker/engine/storage/recovery.py",
        "LtE to Lt",
        "if found is not None and (_is_followed(data, found, partition) or found[0].internal_id - known <= _NEAR):",
    ): "the distance from which on a second record is wanted is chosen",
    (
        "broker/engine/storage/recovery.py",
        "number + 1",
        "for prefix in (whole[:5], whole[:2]):  # ids that follow closely, then all ids of the partition",
    ): "a search for less of the id finds the same, and takes longer",
    (
        "broker/engine/channel/in_flight.py",
        "Gt to GtE",
        "self.filtered = self.matches is not None or self.sample_rate > 0",
    ): "without a sample rate the filters let every message through",
    (
        "broker/engine/header_filter.py",
        "other bool",
        "_BYTES_OPTIONS.never_capture = True",
    ): "no group is read: it only saves time",
    (
        "broker/engine/header_filter.py",
        "other bool",
        "_OPTIONS.never_capture = True",
    ): "no group is read: it only saves time",
    ("broker/engine/header_filter.py", "number + 1", 'elif out[-1:] != [".*"]:'): "two stars match what one matches",
    (
        "broker/engine/header_filter.py",
        "number + 1",
        "index = int(place) if _INDEX.fullmatch(place) and len(place) < 20 else len(value)",
    ): "no list is that long",
    (
        "broker/engine/header_filter.py",
        "Lt to LtE",
        "index = int(place) if _INDEX.fullmatch(place) and len(place) < 20 else len(value)",
    ): "no list is that long",
    (
        "broker/engine/channel/in_flight.py",
        "Gt to GtE",
        "if self._ends and self._ends[-1] > offset:",
    ): "it ends there already",
    ("broker/engine/channel/in_flight.py", "Gt to GtE", "if self.offset > offset:"): "it is at this position already",
    (
        "broker/engine/channel/in_flight.py",
        "Gt to GtE",
        "if end > offset:",
    ): "an interval that ends at the position is merged with it",
    (
        "broker/engine/options.py",
        "number + 1",
        "return min(max(min(self.memory_bound, self.finished_bytes, self.cache_bytes) // 16, 4096), MIB)",
    ): "the part of the bounds is chosen",
    (
        "broker/engine/storage/log.py",
        "left out",
        "super().__init__(text)",
    ): "an exception keeps its arguments without it",
    (
        "broker/engine/storage/log.py",
        "GtE to Gt",
        "if held is None or len(held) >= _SEGMENT_ENTRIES or segment.cost >= self._segment_bytes:",
    ): "the size from which on a segment is full is chosen",
    (
        "broker/engine/storage/log.py",
        "Gt to GtE",
        "if len(entries) > 1 and not stored:",
    ): "a publish of one message is found without its first and last number",
    (
        "broker/engine/storage/log.py",
        "number + 1",
        "middle = high - (high - low) // 2",
    ): "a third of the way leads to the same message",
    (
        "broker/engine/storage/log.py",
        "plus and minus",
        'if self.kind == "timestamp" and (nanoseconds + (1 << 63)) % (1 << 64) < 1 << 63:',
    ): "both are half of the numbers of 64 bits away",
    (
        "broker/engine/channel/rules.py",
        "Gt to GtE",
        "return delay if delay > _IGNORED else 0.0",
    ): "a pause of exactly a millisecond may be made or not",
    (
        "broker/coordinator/admin_ops.py",
        "number + 1",
        'if changes.get("retention_days", 0) > _MAX_RETENTION_DAYS:',
    ): "1 is not too much either",
    (
        "broker/coordinator/admin_ops.py",
        "number + 1",
        'if changes.get("sync_every", 0) > MAX_SYNC_EVERY:',
    ): "1 is not too much either",
    (
        "broker/coordinator/replication.py",
        "Gt to GtE",
        "if last is not None and last.count > partition.readable:",
    ): "what is readable may be committed again",
    (
        "broker/coordinator/replication.py",
        "Lt to LtE",
        "if follower.log.start_offset < leader.log.start_offset:",
    ): "there is nothing before the start",
    (
        "broker/coordinator/replication.py",
        "Lt to LtE",
        "if target.log.start_offset < source.log.start_offset:",
    ): "there is nothing before the start",
    (
        "broker/coordinator/replication.py",
        "Lt to LtE",
        "if held < leader.committed:",
    ): "what all hold may be committed again",
    (
        "broker/coordinator/coordinator.py",
        "number + 1",
        "replicas.state.epoch += 1",
    ): "the epoch of a deleted partition only has to differ",
    (
        "broker/coordinator/coordinator.py",
        "left out",
        "replicas.align(name)",
    ): "the push that adds a replica to the in-sync set aligns and copies in the same turn of the loop",
    (
        "broker/coordinator/coordinator.py",
        "or to and",
        "if replicas.state.epoch != epoch or replicas.state.resigned:",
    ): "what every in-sync replica has may be committed by any task, also of an earlier epoch",
    (
        "broker/coordinator/state_file.py",
        "other bool",
        "self._retry = False",
    ): "a repeated write of the same data is left out",
    (
        "broker/engine/storage/delayed_queue.py",
        "number + 1",
        "if not 0 < self.first_due <= now:",
    ): "due times are nanoseconds since 1970, and 0 is none: none is 1",
    (
        "broker/coordinator/state_file.py",
        "other bool",
        "write_atomically(self._path, data, sync=False)",
    ): "the file is synced as well",
}
"""Module, operator and line of code -> why nothing differs."""
