"""Settings of a connection."""

from __future__ import annotations

import ssl

from attrs import field, frozen

from nsqext.errors import InvalidSetting
from nsqext.protocol.frames import DEFAULT_MAX_FRAME_SIZE

__all__ = ("ConnectionOptions",)


@frozen
class ConnectionOptions:
    """How connections to nsqd are made and watched; times in seconds, sizes in bytes.

    Attributes:
        connect_timeout: for TCP, TLS, IDENTIFY and AUTH together.
        request_timeout: how long no answer may come while one is awaited; then the connection is given up.
        heartbeat_interval: how often servers are asked to send a heartbeat; 1 to 60. One that is silent for twice as
            long counts as lost.
        local_host: address of this host to connect from; None leaves it to the system.
        max_frame_size: largest frame that is accepted.
        tls: a context for TLS, or True for the system's certificates; None for plain TCP.
        tls_hostname: name in the server's certificate, where it is not the node's host.
        snappy: compress with snappy (needs the ``snappy`` extra).
        deflate_level: compress with deflate, 1 to 9; 0 for none.
        auth_secret: secret for AUTH; never shown.
    """

    connect_timeout: float = 5.0
    request_timeout: float = 10.0
    heartbeat_interval: float = 30.0
    local_host: str | None = None
    max_frame_size: int = DEFAULT_MAX_FRAME_SIZE
    tls: ssl.SSLContext | bool | None = None
    tls_hostname: str | None = None
    snappy: bool = False
    deflate_level: int = 0
    auth_secret: str | None = field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("connect_timeout", "request_timeout"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is not a positive time in seconds")
        if not 1 <= self.heartbeat_interval <= 60:
            raise InvalidSetting(f"heartbeat_interval={self.heartbeat_interval!r} is not within 1..60 seconds")
        if not 0 <= self.deflate_level <= 9:
            raise InvalidSetting(f"deflate_level={self.deflate_level!r} is not within 0..9")
        if self.snappy and self.deflate_level:
            raise InvalidSetting("snappy and deflate cannot be used together", hint="choose one")

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the context for TLS, which verifies certificates unless a given one does not; None for plain TCP."""
        if self.tls is None or self.tls is False:
            return None
        return ssl.create_default_context() if self.tls is True else self.tls
