"""Settings of a node."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from nsqext.broker.engine.options import MIB, QueueOptions

if TYPE_CHECKING:
    from nsqext.http.guard import HttpGuard


@frozen(kw_only=True)
class NodeOptions(QueueOptions):
    """Settings of one node; times in seconds, sizes in bytes."""

    # seconds for output buffers, also while ``clock`` stands still; read when a node is made, for simulations
    machine_clock: Callable[[], float] = field(factory=lambda: time.monotonic)
    broadcast_address: str = "127.0.0.1"  # host that clients connect to, in lookup responses
    hostname: str = field(factory=lambda: socket.gethostname())  # its name in lookup responses
    client_timeout: float = 60.0  # how long a new connection may take for its first four bytes
    # bytes of replies and messages of one connection that are kept while the client does not read. Beyond that the
    # client's commands are not read, and nothing is delivered to it, until it has read them.
    max_unsent: int = 4 * MIB
    # bytes of publishes of one partition that may wait for replicas (E_PUB_TOO_MUCH_WAITING)
    max_pub_waiting: int = 200 * MIB
    allow_ext_compatible: bool = False  # a topic that takes no headers drops internal ones instead of refusing them
    allow_sub_ext_compatible: bool = False  # consumers without extend support may subscribe to extend topics
    tls: ssl.SSLContext | None = None  # certificate of the TCP side, used when ``limits.tls`` is true
    auth_addresses: tuple[str, ...] = ()  # ``host:port`` or URL of HTTP auth servers; empty without authorization
    auth_method: str = "get"  # ``get`` or ``post``
    # refuses HTTP requests that a foreign web page caused; None accepts them, as the real servers do
    http_guard: HttpGuard | None = None
    https_only: bool = False  # the HTTP port refuses everything (original generation, with ``--tls-required``)
    # seconds between two flushes of a redesigned node without a cluster, where the first channel of a topic starts at
    # the last flush. The real one flushes every fourth ``--sync-timeout``.
    flush_interval: float = 8.0
    node_memory_bound: int = 1024 * MIB  # bytes of messages that all partitions together keep in memory
    # repeats what is random at the real server: the order of requeued messages, sampling. None for no seed.
    seed: int | None = None
    # values that ``/config`` of the original generation shows for options without effect in this server
    reported: Mapping[str, Any] = field(factory=dict)
