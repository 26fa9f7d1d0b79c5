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
    key_header: str = KEY_HEADER  #: extend header that carries the key
    fixed: bool = False  #: chosen at the channel's creation, not by the first subscriber

    def __str__(self) -> str:
        other = f" with keys in {self.key_header}" if self.key_header != KEY_HEADER else ""
        return self.type + other

    def same(self, other: ChannelKind) -> bool:
        return self.type == other.type and (self.type == SHARED or self.key_header == other.key_header)


PLAIN = ChannelKind()


def make_kind(dispatch: str, key_header: str = "", *, fixed: bool = False) -> ChannelKind | None:
    """Return the requested type, None without a request; raises `Refusal` for an unknown type."""
    if not dispatch:
        return None
    if dispatch not in DISPATCH_TYPES:
        raise Refusal(f"dispatch type {dispatch} is unknown, use {' or '.join(DISPATCH_TYPES)}")
    return ChannelKind(dispatch, (dispatch == KEY_FAILOVER and key_header) or KEY_HEADER, fixed)


@frozen
class ChannelRules:
    """Limits and thresholds of the redesigned server's channels."""

    delayed_threshold: float = 900.0  #: seconds; REQ with a longer delay moves the message to disk
    #: finished intervals behind an unfinished message at which a channel stops reading
    confirm_window: int = 500
    delayed_batch: int = 100  #: messages taken from the delayed queue at a time
    delayed_most: int = 160_000  #: bound of a channel's delayed queue; 0 allows one message
    replay_limit: int = 10_000  #: messages that a key_failover channel reads ahead of its clients
    rate_limit: int = 0  #: KiB per second of large messages in each channel; 0 for no limit
    ignored_attempts: int = 0  #: after more attempts, an old message is finished, not redelivered
    ignored_after: float = 0.0  #: seconds after which a message is old; 0 for never, also with ``ignored_attempts`` 0

    def ignores(self, attempts: int, age: float) -> bool:
        """Return whether a message of these attempts and this age (seconds) is finished, not redelivered."""
        return self.ignored_attempts > 0 and attempts > self.ignored_attempts and 0 < self.ignored_after < age


@frozen(kw_only=True)
class QueueOptions:
    """Settings that all partitions of a node share; times in seconds, sizes in bytes."""

    #: what the node allows and offers; ``limits.generation`` is the server's
    limits: ServerLimits = field(factory=ServerLimits)
    clock: Callable[[], float] = time.monotonic  #: monotonic seconds
    wall: Callable[[], int] = time.time_ns  #: nanoseconds since 1970, for time stamps
    clustered: bool = True  #: a coordinator places topics
    data_path: Path | None = None  #: folder of the queues; None for memory
    disk: DiskOptions = field(factory=DiskOptions)
    rules: ChannelRules = field(factory=ChannelRules)
    #: without ``data_path``, bytes of a partition's unfinished messages before publishes are refused
    memory_bound: int = 256 * MIB
    #: messages of a topic and of a channel that the original server keeps in memory
    mem_queue_size: int = 10_000

    @property
    def original(self) -> bool:
        return self.limits.generation == "original"


@frozen(kw_only=True)
class PartitionOptions(QueueOptions):
    """Settings of one partition."""

    extend: bool = False  #: messages carry extend headers
    ordered: bool = False  #: channels accept only SUB_ORDERED
    #: without ``data_path``, finished messages in memory for consumers that seek backwards
    finished_bytes: int = 16 * MIB
    cache_bytes: int = 16 * MIB  #: with ``data_path``, messages in memory
    #: whether extend topics serve consumers without extend support
    extend_compatible: Callable[[], bool] = field(default=lambda: False)
    turn: Turn = field(factory=Turn)  #: commands of a client in execution; shared by a node's partitions
    #: for sampling and a lost connection's requeue order; seed it to repeat a run
    random: Random = field(factory=Random)

    @property
    def segment_bytes(self) -> int:
        """Memory of a segment of the queue, a small part of the bounds."""
        return min(max(min(self.memory_bound, self.finished_bytes, self.cache_bytes) // 16, 4096), MIB)


@frozen(kw_only=True)
class NodeOptions(QueueOptions):
    """Settings of one node; times in seconds, sizes in bytes."""

    #: seconds for output buffers, also while ``clock`` stands still; read when a node is made, for simulations
    machine_clock: Callable[[], float] = field(factory=lambda: time.monotonic)
    broadcast_address: str = "127.0.0.1"  #: host for clients, in lookup responses
    hostname: str = field(factory=lambda: socket.gethostname())  #: its name in lookup responses
    client_timeout: float = 60.0  #: seconds until the first four bytes of a new connection
    #: unsent bytes of a connection; beyond, its commands are not read, and it gets no messages until the client reads
    max_unsent: int = 4 * MIB
    #: bytes of a partition's publishes that may wait for replicas (E_PUB_TOO_MUCH_WAITING)
    max_pub_waiting: int = 200 * MIB
    allow_ext_compatible: bool = False  #: a topic without headers drops internal headers instead of refusing them
    allow_sub_ext_compatible: bool = False  #: consumers without extend support may use extend topics
    tls: ssl.SSLContext | None = None  #: certificate of the TCP side, with ``limits.tls``
    auth_addresses: tuple[str, ...] = ()  #: ``host:port`` or URL of HTTP auth servers
    auth_method: str = "get"  #: ``get`` or ``post``
    #: refuses HTTP requests caused by foreign web pages; None accepts them, as the real servers do
    http_guard: HttpGuard | None = None
    https_only: bool = False  #: the HTTP port refuses everything (original generation, ``--tls-required``)
    #: seconds between flushes of a redesigned node without cluster, where a topic's first channel starts at the last
    #: flush; the real nsqd flushes every fourth ``--sync-timeout``
    flush_interval: float = 8.0
    node_memory_bound: int = 1024 * MIB  #: bytes of messages in memory
    #: seed of the requeue order and the sampling
    seed: int | None = None
    #: values in ``/config`` of the original generation, without effect in this server
    reported: Mapping[str, Any] = field(factory=dict)
