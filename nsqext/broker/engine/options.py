"""Settings of partitions and their channels."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from nsqext.broker.engine.schedule import Turn
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.protocol.identify import DISPATCH_TYPES, KEY_FAILOVER, SHARED
from nsqext.protocol.messages import KEY_HEADER
from nsqext.protocol.server.negotiate import ServerLimits

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.http.uvicorn_server import HttpGuard

MIB: int = 1024 * 1024


@frozen
class ChannelKind:
    """How a channel distributes messages."""

    type: str = SHARED  #: ``shared`` or ``key_failover``
    key_header: str = KEY_HEADER  #: extend header with the key
    fixed: bool = False  #: chosen by the channel's creation, not its first subscriber

    def __str__(self) -> str:
        other = f" with keys in {self.key_header}" if self.key_header != KEY_HEADER else ""
        return self.type + other

    def same(self, other: ChannelKind) -> bool:
        return self.type == other.type and (self.type == SHARED or self.key_header == other.key_header)


PLAIN = ChannelKind()


def make_kind(dispatch: str, key_header: str = "", *, fixed: bool = False) -> ChannelKind | None:
    """Return the requested type, None for an empty request; raises `Refusal` for an unknown type."""
    if not dispatch:
        return None
    if dispatch not in DISPATCH_TYPES:
        raise Refusal(f"dispatch type {dispatch} is unknown, use {' or '.join(DISPATCH_TYPES)}")
    return ChannelKind(dispatch, (dispatch == KEY_FAILOVER and key_header) or KEY_HEADER, fixed)


@frozen
class ChannelRules:
    """Limits of the redesigned server's channels."""

    delayed_threshold: float = 900.0  #: seconds; REQ with a longer delay moves the message to disk
    #: finished intervals behind an unfinished message at which a channel stops reading
    confirm_window: int = 500
    delayed_batch: int = 100  #: messages taken from the delayed queue at a time
    delayed_most: int = 160_000  #: bound of a channel's delayed queue; 0 allows one message
    replay_limit: int = 10_000  #: messages that a key_failover channel reads ahead of its clients
    rate_limit: int = 0  #: KiB per second of large messages in each channel; 0 for no limit
    ignored_attempts: int = 0  #: after more attempts, an old message is finished, not redelivered; 0 for never
    ignored_after: float = 0.0  #: seconds after which a message is old; 0 for never

    def ignores(self, attempts: int, age: float) -> bool:
        """Return whether a message of this age (seconds) is finished, not redelivered."""
        return self.ignored_attempts > 0 and attempts > self.ignored_attempts and 0 < self.ignored_after < age


@frozen(kw_only=True)
class QueueOptions:
    """Settings that all partitions of a node share; times in seconds, sizes in bytes."""

    limits: ServerLimits = field(factory=ServerLimits)  #: with the generation
    clock: Callable[[], float] = time.monotonic  #: monotonic seconds
    wall: Callable[[], int] = time.time_ns  #: nanoseconds since 1970, for time stamps
    clustered: bool = True  #: with a coordinator
    data_path: Path | None = None  #: folder of the queues; None for memory
    disk: DiskOptions = field(factory=DiskOptions)
    rules: ChannelRules = field(factory=ChannelRules)
    #: without ``data_path``, bytes of a partition's unfinished messages before publishes are refused
    memory_bound: int = 256 * MIB
    #: messages of a topic, and of a channel, in the original server's memory
    mem_queue_size: int = 10_000

    @property
    def original(self) -> bool:
        return self.limits.generation == "original"


@frozen(kw_only=True)
class PartitionOptions(QueueOptions):
    """Settings of a partition."""

    extend: bool = False  #: messages carry extend headers
    ordered: bool = False  #: channels accept only SUB_ORDERED
    #: without ``data_path``, finished messages in memory for consumers that seek backwards
    finished_bytes: int = 16 * MIB
    cache_bytes: int = 16 * MIB  #: with ``data_path``, messages in memory
    #: whether extend topics serve consumers without extend support
    extend_compatible: Callable[[], bool] = field(default=lambda: False)
    turn: Turn = field(factory=Turn)  #: of the node
    random: Random = field(factory=Random)  #: for sampling and a lost connection's requeue order

    @property
    def segment_bytes(self) -> int:
        """Memory of a segment, a small part of the bounds."""
        return min(max(min(self.memory_bound, self.finished_bytes, self.cache_bytes) // 16, 4096), MIB)


@frozen(kw_only=True)
class NodeOptions(QueueOptions):
    """Settings of a node; times in seconds, sizes in bytes."""

    #: for output buffers, also while ``clock`` stands still; read when a node is made, for simulations
    machine_clock: Callable[[], float] = field(factory=lambda: time.monotonic)
    broadcast_address: str = "127.0.0.1"  #: host for clients
    hostname: str = field(factory=lambda: socket.gethostname())  #: in lookup responses
    client_timeout: float = 60.0  #: until the first four bytes of a new connection
    #: unsent bytes of a connection; beyond, it gets no messages and its commands are not read
    max_unsent: int = 4 * MIB
    #: bytes of a partition's publishes that may wait for replicas (E_PUB_TOO_MUCH_WAITING)
    max_pub_waiting: int = 200 * MIB
    allow_ext_compatible: bool = False  #: a topic without headers drops internal headers instead of refusing them
    allow_sub_ext_compatible: bool = False  #: consumers without extend support may use extend topics
    tls: ssl.SSLContext | None = None  #: certificate of the TCP side, with ``limits.tls``
    auth_addresses: tuple[str, ...] = ()  #: ``host:port`` or URL of HTTP auth servers
    auth_method: str = "get"  #: ``get`` or ``post``
    http_guard: HttpGuard | None = None  #: None accepts all HTTP requests, as the real servers
    https_only: bool = False  #: the HTTP port refuses everything (original generation, ``--tls-required``)
    #: between flushes of a redesigned node without cluster, where a topic's first channel starts at the last flush; the
    #: real nsqd flushes every fourth ``--sync-timeout``
    flush_interval: float = 8.0
    node_memory_bound: int = 1024 * MIB  #: messages in memory
    seed: int | None = None  #: of the partitions' ``random``
    #: values in ``/config`` of the original generation, without effect in this server
    reported: Mapping[str, Any] = field(factory=dict)
