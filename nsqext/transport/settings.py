"""What the settings of a connection mean; loaded by type checkers and the help, not by clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    import ssl


class ConnectionSettings(TypedDict, total=False):
    """Settings of connections to nodes; times in seconds, sizes in bytes."""

    connect_timeout: float
    """For TCP, TLS, IDENTIFY and AUTH together."""
    request_timeout: float
    """A connection whose pending requests receive no response for this time is closed."""
    heartbeat_interval: float
    """Requested from the server; 1 to 60. After two intervals of silence the connection is lost."""
    local_host: str | None
    """Address of this host to connect from; None leaves it to the system."""
    max_frame_size: int
    """Largest accepted frame."""
    max_decompressed_size: int
    """Largest result of decompressing a read (snappy, deflate); more ends the connection."""
    tls: ssl.SSLContext | bool | str | None
    """True for TLS with the system's certificates, the path of a PEM file of CA certificates, or a context; None
    for plain TCP.
    """
    tls_hostname: str | None
    """Name in the server's certificate, if it is not the node's host."""
    snappy: bool
    """Compress with snappy (needs the ``snappy`` extra)."""
    deflate_level: int
    """Compress with deflate, 1 to 9; 0 for no compression."""
    auth_secret: str | None
    """Secret for AUTH; never shown."""
    client_id: str | None
    """Name of this client in the servers' statistics; None for host and process."""
    hostname: str | None
    """Name of this host in the servers' statistics; None for the system's."""
    user_agent: str | None
    """Program and version in the servers' statistics; None for this package's."""
    topology_region: str | None
    """Region of this client; original nsqd only."""
    topology_zone: str | None
    """Zone of this client; original nsqd only."""
