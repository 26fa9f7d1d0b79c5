"""Settings of a cluster."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.arguments import check_kinds, check_number, check_texts, check_time, is_whole
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.protocol.server.negotiate import ServerLimits

MIB = 1024 * 1024
_LISTS = ("lookupd_http", "lookupd_tcp", "nsqd_tcp", "nsqd_http", "auth_addresses", "http_hosts")
_TIMES = ("lease", "join_pause", "replace_after", "inactive_producer_timeout", "tombstone_lifetime", "lookup_ping")


@frozen
class ClusterOptions:
    """Settings of a cluster besides its size; times in seconds, sizes in bytes.

    Attributes:
        host: where all servers listen.
        broadcast_address: host in the addresses that clients get; empty for ``host``.
        lookupd_http: ``host:port`` of the lookup nodes' HTTP, in order; free ports for the rest.
        lookupd_tcp: the same for their TCP side.
        nsqd_tcp: the same for the nodes' TCP side.
        nsqd_http: the same for the nodes' HTTP.
        lease: how long a silent leader stays leader.
        join_pause: how long writes wait while a replica joins the in-sync replicas.
        replace_after: seconds until another node, if available, replaces a node that is down.
        inactive_producer_timeout: original generation: when lookup stops showing a node that sends no PING.
        tombstone_lifetime: original generation: how long a tombstone hides a node.
        lookup_ping: original generation: seconds between two PINGs of a node; 15 in the real server.
        limits: limits of the nodes; None for the real server's defaults.
        memory_bound: bytes of unfinished messages in a partition's memory; publishes beyond it are refused.
        node_memory_bound: bytes of messages in memory, in all partitions of a node. Beyond it, finished messages are
            removed, then publishes are refused; with a data path, messages are read from disk instead.
        tls: certificate of the nodes' TCP side.
        auth_addresses: ``host:port`` of HTTP auth servers.
        http_guard: refuse HTTP requests of foreign web pages: an unknown ``Host``, or another ``Origin``.
        http_hosts: host names that HTTP clients use, besides addresses, ``localhost``, this machine's name, ``host``
            and ``broadcast_address``.
        seed: makes repeatable what the real server randomizes: sampling, and the requeue order of a lost connection's
            messages.
    """

    host: str = "127.0.0.1"
    broadcast_address: str = ""
    lookupd_http: tuple[str, ...] = ()
    lookupd_tcp: tuple[str, ...] = ()
    nsqd_tcp: tuple[str, ...] = ()
    nsqd_http: tuple[str, ...] = ()
    lease: float = 0.3
    join_pause: float = 0.05
    replace_after: float = 600.0
    inactive_producer_timeout: float = 300.0
    tombstone_lifetime: float = 45.0
    lookup_ping: float = 0.5
    limits: ServerLimits | None = None
    memory_bound: int = 256 * MIB
    node_memory_bound: int = 1024 * MIB
    tls: ssl.SSLContext | None = None
    auth_addresses: tuple[str, ...] = ()
    http_guard: bool = True
    http_hosts: tuple[str, ...] = ()
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        for name in _LISTS:
            check_texts(name, getattr(self, name))
        if self.tls is not None and not isinstance(self.tls, ssl.SSLContext):
            raise InvalidSetting(f"tls={self.tls!r} is not an ssl.SSLContext")
        if self.seed is not None and not is_whole(self.seed):
            raise InvalidSetting(f"seed={self.seed!r} is not a whole number")
        for name in _TIMES:
            check_time(name, getattr(self, name))
        check_number("memory_bound", self.memory_bound, 1)
        check_number("node_memory_bound", self.node_memory_bound, 1)


@frozen
class ClusterShape:
    """Size, generation and data path of a cluster."""

    nodes: int = 3
    lookupds: int = 1
    generation: str = "redesigned"  #: ``redesigned`` or ``original``
    data_path: Path | None = None  #: folder of messages and topics; None for memory

    def __attrs_post_init__(self) -> None:
        check_number("nodes", self.nodes, 1, 64)
        check_number("lookupds", self.lookupds, 1, 16)
        if self.generation not in ("redesigned", "original"):
            raise InvalidSetting(f"generation={self.generation!r} is unknown", hint='use "redesigned" or "original"')

    def check_addresses(self, options: ClusterOptions) -> None:
        """Raise InvalidSetting for addresses of more servers than the cluster has, which would be ignored."""
        lists = (("nodes", self.nodes, "nsqd"), ("lookupds", self.lookupds, "lookupd"))
        for kind, count, server in lists:
            for name in (f"{server}_http", f"{server}_tcp"):
                given = len(getattr(options, name))
                if given > count:
                    raise InvalidSetting(f"{name} has {given} addresses, and {kind}={count}")
