"""A partition on disk: its queue, the state of its channels, and their delayed queues."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson
from attrs import define, field

from nsqext.broker.engine.storage.delayed_journal import ChannelJournal, DelayedJournal
from nsqext.broker.engine.storage.files import topic_folder, usable, write_atomically
from nsqext.broker.engine.storage.log import Log
from nsqext.broker.engine.storage.segments import DiskOptions, SegmentStore
from nsqext.errors import InvalidSetting
from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import SHARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from nsqext.broker.engine.storage.delayed_queue import Delayed

__all__ = ("ChannelState", "PartitionState", "PartitionStore", "stored_partitions")

_LOG = logging.getLogger(__name__)
_STATE = ".channels.json"


@define
class ChannelState:
    """What is kept of a channel.

    Attributes:
        name: the channel.
        offset: everything before it is finished.
        count: messages before it.
        intervals: what was finished behind it: first offset, end offset, last message's number.
        paused: nothing is given out.
        skipped: everything is dropped.
        dispatch: its type.
        key_header: the extend header that carries keys.
        fixed_dispatch: the type was chosen when the channel was created.
    """

    name: str
    offset: int
    count: int
    intervals: list[tuple[int, int, int]] = field(factory=list)
    paused: bool = False
    skipped: bool = False
    dispatch: str = SHARED
    key_header: str = KEY_HEADER
    fixed_dispatch: bool = False


@define
class PartitionState:
    """What is kept of a partition besides its queue.

    Attributes:
        topic: the topic.
        partition: its number.
        extend: messages carry extend headers.
        ordered: channels are consumed with SUB_ORDERED only.
        paused: messages are not passed to channels (original server).
        readable: number of the last message that went to channels (original server).
        channels: its channels.
    """

    topic: str
    partition: int
    extend: bool = False
    ordered: bool = False
    paused: bool = False
    readable: int = 0
    channels: list[ChannelState] = field(factory=list)

    def encode(self) -> bytes:
        """Return it as JSON."""
        members: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}
        members["channels"] = [
            {name: getattr(channel, name) for name in channel.__slots__ if not name.startswith("_")}
            for channel in self.channels
        ]
        return orjson.dumps(members)

    @classmethod
    def decode(cls, data: bytes) -> PartitionState:
        """Read it from JSON; a member that is missing or odd is a KeyError, TypeError or ValueError."""
        members = orjson.loads(data)
        members["channels"] = [
            ChannelState(
                **(channel | {"intervals": [(start, end, count) for start, end, count in channel["intervals"]]})
            )
            for channel in members["channels"]
        ]
        return cls(**members)


def _read_state(path: Path) -> PartitionState:
    try:
        return PartitionState.decode(path.read_bytes())
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise InvalidSetting(
            f"{path} cannot be read: {error}", hint="restore it, or remove it: all channels are forgotten then"
        ) from error


def stored_partitions(data_path: Path) -> Iterator[PartitionState]:
    """Return what is kept in a folder, a partition at a time.

    Raises:
        InvalidSetting: a file is damaged.
    """
    for path in sorted(data_path.glob(f"*/*{_STATE}")):
        yield _read_state(path)


class PartitionStore:
    """The files of one partition.

    Args:
        data_path: folder of the node; the partition's files are in a folder of its topic.
        topic: the topic.
        partition: its number.
        options: how to use the disk.

    Attributes:
        store: the files of the queue.
        dirty: the state of channels changed since it was written.
    """

    def __init__(self, data_path: Path, topic: str, partition: int, options: DiskOptions) -> None:
        folder = topic_folder(data_path, topic)
        name = f"{topic}-{partition}"
        self.store: SegmentStore = SegmentStore(folder, name, options)
        self.dirty: bool = False
        self._path = folder / (name + _STATE)
        self._options = options
        self._journal = DelayedJournal(folder / f"{name}.delayed.jsonl")
        self._next = 0.0

    def open_log(self, memory_bytes: int, segment_bytes: int) -> Log:
        """Return the queue as it is on the disk; a torn tail is cut off and reported to the log of the program.

        Args:
            memory_bytes: what is kept in memory at once while it is read.
            segment_bytes: see `Log`.
        """
        log: Log | None = None
        for run in self.store.recover():
            if log is None:
                log = Log(self.store, run[0].offset, run[0].count - 1, segment_bytes=segment_bytes)
            log.append(run, stored=True)
            log.shrink(memory_bytes)
        found = self.store.recovery
        if found.cut_file:
            _LOG.warning("%s: cut off a torn tail of %d bytes", found.cut_file, found.cut_bytes)
        for lost in found.lost_files:
            _LOG.warning("%s: does not continue the file before it, renamed to .lost", lost)
        return log if log is not None else Log(self.store, *self.store.beginning, segment_bytes=segment_bytes)

    def load(self) -> PartitionState | None:
        """Return the state that was kept; None for a new partition.

        Raises:
            InvalidSetting: the file is damaged.
        """
        return _read_state(self._path) if self._path.exists() else None

    def load_delayed(self) -> dict[str, dict[int, Delayed]]:
        """Return what the delayed queues held, and write the journal anew.

        Raises:
            InvalidSetting: the disk does not take it.
        """
        with usable(self._path.parent):
            held = self._journal.load()
            self._journal.rewrite((channel, messages.values()) for channel, messages in held.items())
        return held

    def compact(self, held: Callable[[], Iterable[tuple[str, Iterable[Delayed]]]]) -> None:
        """Write the journal anew when most of it is of no use any more.

        Args:
            held: returns what the delayed queues hold, by channel.
        """
        if self._journal.is_overgrown:
            try:
                self._journal.rewrite(held())
            except OSError as error:
                _LOG.warning("%s: the journal cannot be written anew: %s", self._path.name, error.strerror)

    def journal(self, channel: str) -> ChannelJournal:
        """Return the journal of a channel's delayed queue."""
        return ChannelJournal(self._journal, channel)

    def save(self, state: PartitionState) -> None:
        """Write the state; what the disk does not take is tried again with the next interval."""
        try:
            write_atomically(self._path, state.encode(), sync=self._options.fsync != "never")
        except OSError as error:
            _LOG.warning("%s cannot be written: %s", self._path, error.strerror)
            self.dirty = True
            return
        self.dirty = False

    def is_due(self, now: float) -> bool:
        """Return whether it is time to write what changed; then the next interval begins."""
        if now < self._next:
            return False
        self._next = now + self._options.sync_interval
        self.store.sync()
        return self.dirty

    @property
    def next_deadline(self) -> float:
        """Clock time of the next writing."""
        return self._next

    def close(self) -> None:
        """Close the files."""
        self.store.close()
        self._journal.close()

    def destroy(self) -> None:
        """Close and remove the files."""
        self.store.destroy()
        self._journal.destroy()
        self._path.unlink(missing_ok=True)
        if self._path.parent.exists() and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()
