"""Settings of partitions and their channels."""

from __future__ import annotations

import time
from random import Random
from typing import TYPE_CHECKING

from attrs import field, frozen

from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.broker.engine.turn import Turn
from nsqext.protocol.server.negotiate import ServerLimits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MIB = 1024 * 1024


@frozen
class ChannelRules:
    """Numbers of the redesigned server's channels."""

    delayed_threshold: float = 900.0  # seconds; REQ with a longer delay moves the message to the delayed queue
    # a channel stops reading while so many intervals are finished behind an unfinished message
    confirm_window: int = 500
    delayed_batch: int = 100  # messages that are taken from the delayed queue at a time
    delayed_most: int = 160_000  # bound of a channel's delayed queue; with 0 it takes one message
    replay_limit: int = 10_000  # messages that a channel of type key_failover reads ahead of its clients
    rate_limit: int = 0  # KiB a second of large messages that each channel delivers; 0 for no limit
    ignored_attempts: int = 0  # a message is finished instead of delivered again after more attempts, if it is old
    ignored_after: float = 0.0  # seconds after which a message is old; 0 for never, and so with ``ignored_attempts`` 0

    def ignores(self, attempts: int, age: float) -> bool:
        """Return whether a message with so many attempts, published so many seconds ago, is finished instead."""
        return self.ignored_attempts > 0 and attempts > self.ignored_attempts and 0 < self.ignored_after < age


@frozen
class PartitionOptions:
    """Settings of one partition; times in seconds, sizes in bytes."""

    extend: bool = False  # messages carry extend headers
    ordered: bool = False  # channels are consumed with SUB_ORDERED only
    generation: str = "ha"  # ``ha`` (redesigned server) or ``nsq`` (original)
    clock: Callable[[], float] = time.monotonic  # monotonic seconds
    wall: Callable[[], int] = time.time_ns  # nanoseconds since 1970, for time stamps
    limits: ServerLimits = field(factory=ServerLimits)
    rules: ChannelRules = field(factory=ChannelRules)  # numbers of the redesigned server's channels
    # without ``data_path``, bound of unfinished messages; a publish beyond it is refused
    memory_bytes: int = 256 * _MIB
    # without ``data_path``, finished messages that stay in memory for consumers that seek backwards
    finished_bytes: int = 16 * _MIB
    cache_bytes: int = 16 * _MIB  # with ``data_path``, messages that stay in memory; others are read from disk
    mem_queue_size: int = 10_000  # messages that the original server keeps in memory before it uses the disk
    coordinated: bool = True  # the node belongs to a cluster
    # tells whether consumers without extend support are served on extend topics now
    extend_compatible: Callable[[], bool] = field(default=lambda: False)
    data_path: Path | None = None  # folder of the queue; None keeps it in memory
    disk: DiskOptions = field(factory=DiskOptions)  # how the folder is used
    turn: Turn = field(factory=Turn)  # commands of a client that are being run; shared by the partitions of a node
    # source of what is random at the real server: sampling, and the order in which messages of a lost connection are
    # requeued. Seed it to repeat a run.
    random: Random = field(factory=Random)

    @property
    def segment_bytes(self) -> int:
        """Memory of a segment of the queue, a small part of the bounds."""
        return min(max(min(self.memory_bytes, self.finished_bytes, self.cache_bytes) // 16, 4096), _MIB)
