"""A partition on disk: its queue, channel states and delayed queues."""

from __future__ import annotations

import logging
import re
from math import inf
from typing import TYPE_CHECKING

import msgspec
from attrs import define, field

from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedJournal
from nsqext.broker.engine.storage.files import (
    Number,
    decode_checked,
    keep_aside,
    topic_folder,
    usable,
    with_checksum,
    write_atomically,
)
from nsqext.broker.engine.storage.log import Log, LogEntry, MemoryBudget
from nsqext.broker.engine.storage.segments import DiskOptions, SegmentStore
from nsqext.protocol.identify import SHARED
from nsqext.protocol.messages import KEY_HEADER
from nsqext.protocol.names import MAX_PARTITION, is_valid_topic
from nsqext.protocol.record import COUNTER_BITS, Record, raw_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

_COUNTERS = (1 << COUNTER_BITS) - 1


class NewMessage(msgspec.Struct, eq=False, gc=False):
    """A message to store."""

    body: bytes
    trace_id: int = 0
    header: bytes = b""
    version: int = 0  #: of the extend part; 0 without, 4 for JSON
    delay: float = 0.0  #: seconds until delivery (DPUB of the original server)


@define(eq=False)
class Stored:
    """The stored messages of a publish."""

    message_id: int  #: internal id of the first message
    offset: int  #: of the first message
    size: int  #: raw bytes of all messages
    entries: list[LogEntry]
    #: parts of a large batch, which replicas copy in this order
    parts: Sequence[Stored] = ()


def as_entries(messages: Sequence[NewMessage], log: Log, first: tuple[int, int, int], extend: bool) -> list[LogEntry]:
    """Return entries for the end of a queue, without appending them.

    ``first`` is partition, counter and time stamp of the first message; counter and time stamp grow by 1 per message.
    """
    partition, counter, timestamp = first
    internal_id = partition << COUNTER_BITS | counter
    offset, number = log.end_offset, log.end_count
    entries: list[LogEntry] = []
    for message in messages:
        header, version = (message.header, message.version) if extend else (b"", 0)
        record = Record(timestamp, internal_id, message.trace_id, message.body, version, header, 0, extend)
        size = raw_size(len(message.body), len(header), extend, version)
        number += 1
        entries.append(LogEntry(record, offset, size, number))
        offset += size
        internal_id += 1
        timestamp += 1
    return entries


def counter_of(entry: LogEntry) -> int:
    """Return the counter in a message's internal id."""
    return entry.record.internal_id & _COUNTERS


logger: logging.Logger = logging.getLogger(__name__)
_STATE = ".channels.json"
_COPY = ".copy"
_FILE = re.compile(r"(.+)-([0-9]+)\.(?:diskqueue\.[0-9]+\.dat|channels\.json(?:\.copy)?)")


@define
class ChannelState:
    """State of a channel."""

    name: str
    offset: Number  #: acknowledged position
    count: Number  #: messages before it
    #: first offset, end offset and number of the last message of each interval finished out of order
    intervals: list[tuple[Number, Number, Number]] = field(factory=list)
    paused: bool = False
    skipped: bool = False
    dispatch: str = SHARED
    key_header: str = KEY_HEADER
    fixed_dispatch: bool = False  #: see `ChannelKind`
    delayed: Number = 0  #: size of the delayed queue


@define
class StoredPartition:
    """State of a partition, besides its queue."""

    topic: str
    partition: Number
    extend: bool = False
    ordered: bool = False
    paused: bool = False  #: channels get no messages (original server)
    readable: Number = 0  #: number of the last message passed to channels (original server)
    channels: list[ChannelState] = field(factory=list)
    end_offset: Number = 0  #: end of the queue at the last write
    end_count: Number = 0  #: messages before it
    created: Number = 0  #: nanoseconds since 1970
    #: number, start offset and messages before it of each file
    files: list[tuple[Number, Number, Number]] = field(factory=list)

    def encode(self) -> bytes:
        return with_checksum(msgspec.json.encode(self))

    @classmethod
    def decode(cls, data: bytes) -> StoredPartition:
        """Decode the state; raises `ValueError` for damage or an invalid member."""
        state = decode_checked(data, cls)
        if not all(map(is_valid_topic, (state.topic, *(channel.name for channel in state.channels)))):
            raise ValueError("the name of the topic or of a channel is not valid")
        if state.partition > MAX_PARTITION:
            raise ValueError(f"there is no partition {state.partition}")
        return state

    def renumber(self, log: Log) -> None:
        """Count the messages before the channels' positions again.

        Numbers of lost messages are estimates: a channel could continue behind later messages.
        """
        for channel in self.channels:
            lost = log.start_offset - channel.offset
            if lost > 0:
                logger.warning(
                    "channel %s of topic %s partition %d: the queue starts at offset %d, behind its position %d; "
                    "%d bytes of unfinished messages are lost",
                    channel.name, self.topic, self.partition, log.start_offset, channel.offset, lost,
                )  # fmt: skip
            channel.offset = log.find_offset(channel.offset)
            channel.count = log.count_before(channel.offset)
            channel.intervals = [(first, end, log.count_before(end)) for first, end, _ in channel.intervals]


def _copy_of(path: Path) -> Path:
    return path.with_name(path.name + _COPY)


def _first_readable(*paths: Path) -> StoredPartition | None:
    for path in paths:
        try:
            return StoredPartition.decode(path.read_bytes())
        except (OSError, ValueError):
            continue
    return None


def stored_partitions(data_path: Path) -> Iterator[StoredPartition]:
    """Return the states of all partitions in a folder; for an unreadable state, without channels."""
    found: set[Path] = set()
    for file in sorted(data_path.glob("*/*")):
        match = _FILE.fullmatch(file.name)
        path = file.with_name(f"{match[1]}-{match[2]}{_STATE}") if match else None
        if match and path is not None and path not in found:
            found.add(path)
            yield _first_readable(path, _copy_of(path)) or StoredPartition(match[1], int(match[2]))


class PartitionStore:
    """Files of a partition."""

    def __init__(self, data_path: Path, topic: str, partition: int, options: DiskOptions) -> None:
        folder = topic_folder(data_path, topic)
        name = f"{topic}-{partition}"
        self.store: SegmentStore = SegmentStore(folder, topic, partition, options)
        self.dirty: bool = False  #: changed since the last write
        self._path = folder / (name + _STATE)
        self._options = options
        self.journal: DelayedJournal = DelayedJournal(
            folder / f"{name}.delayed.jsonl", durable=options.fsync != "never"
        )
        self._next = 0.0
        self._missing: list[str] = []

    def load(self) -> StoredPartition | None:
        """Return the stored state; None for a new partition, or if neither file nor copy is readable.

        A damaged file is renamed, with a warning; an `OSError` raises `InvalidSetting`.
        """
        states: list[StoredPartition] = []
        problems: list[str] = []
        with usable(self._path.parent):
            for path in (self._path, _copy_of(self._path)):
                try:
                    states.append(StoredPartition.decode(path.read_bytes()))
                except FileNotFoundError:
                    problems.append(f"{path} is missing")
                    self._missing.append(path.name)
                except ValueError as error:
                    kept = keep_aside(path, "damaged", move=True).name
                    self.store.recovery.damaged_files.append(kept)
                    problems.append(f"{path} is damaged ({error}) and kept as {kept}")
        if not states:
            return None
        if problems:
            self.dirty = True
            self.store.recovery.damaged_files += self._missing
            logger.warning("%s; channels are read from its copy", problems[0])
        return states[0]

    def open_log(
        self, state: StoredPartition | None, cache_bytes: int, segment_bytes: int, budget: MemoryBudget | None = None
    ) -> Log:
        """Return the queue; damage is repaired if possible, and logged."""

        def make(offset: int, count: int) -> Log:
            sizes = {"segment_bytes": segment_bytes, "cache_bytes": cache_bytes}
            return Log(self.store, offset, count, **sizes, budget=budget)

        log: Log | None = None
        end, files = ((state.end_offset, state.end_count), state.files) if state else ((0, 0), [])
        for run in self.store.recover(end, {number: (offset, count) for number, offset, count in files}):
            first = run[0]
            if log is None:
                log = make(first.offset, first.count - 1)
            elif first.offset != log.end_offset:
                log.append_gap(first.offset, first.count - 1)
            log.append(run, stored=True)
        if state is None and log is not None:
            self.store.recovery.damaged_files += self._missing
            logger.warning(
                "%s is missing or damaged: the channels of %d messages are unknown; new channels start at the end",
                self._path, log.end_count - log.start_count,
            )  # fmt: skip
        return log if log is not None else make(*self.store.beginning)

    def load_delayed(self, state: StoredPartition) -> dict[str, dict[int, Delayed]]:
        """Return the delayed queues; compact the journal. A disk error raises `InvalidSetting`."""
        with usable(self._path.parent):
            is_missing = not self.journal.path.exists()
            held = self.journal.load()
            self.journal.rewrite((channel, messages.values()) for channel, messages in held.items())
        recovery = self.store.recovery
        if self.journal.damaged_file:
            recovery.damaged_files.append(self.journal.damaged_file)
        if self.journal.torn_bytes and not recovery.torn_file:
            recovery.torn_file, recovery.torn_bytes = self.journal.path.name, self.journal.torn_bytes
        if is_missing and any(channel.delayed for channel in state.channels):
            lost = {channel.name: channel.delayed for channel in state.channels if channel.delayed}
            recovery.damaged_files.append(self.journal.path.name)
            recovery.lost_messages += sum(lost.values())
            logger.warning("%s is missing: delayed messages are lost, by channel: %s", self.journal.path, lost)
        return held

    def compact(self, held: Callable[[], Iterable[tuple[str, Iterable[Delayed]]]]) -> None:
        """Compact the journal if most of it concerns removed messages; ``held`` returns the queues."""
        if self.journal.is_overgrown:
            try:
                self.journal.rewrite(held())
            except OSError as error:
                logger.warning("%s: the journal cannot be compacted: %s", self._path.name, error.strerror)

    def save(self, state: StoredPartition) -> None:
        """Write the state twice; a failure is logged and retried with the next interval."""
        state.files = self.store.begins
        try:
            self.journal.sync()
            for path in (self._path, _copy_of(self._path)):
                write_atomically(path, state.encode(), sync=self._options.fsync != "never")
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error.strerror)
            self.dirty = True
            return
        self.dirty = False

    def begin_interval(self, now: float) -> bool:
        """Begin the next interval if due; return whether to write the state."""
        if now < self._next:
            return False
        self._next = now + self._options.sync_interval
        self.store.sync()
        return self.dirty

    @property
    def next_deadline(self) -> float:
        """Clock time of the next write; infinity if nothing changed."""
        return self._next if self.dirty or self.store.is_dirty else inf

    def close(self) -> None:
        self.store.close()
        self.journal.close()

    def destroy(self) -> None:
        self.store.destroy()
        self.journal.destroy()
        self._path.unlink(missing_ok=True)
        _copy_of(self._path).unlink(missing_ok=True)
        if self._path.parent.exists() and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()
