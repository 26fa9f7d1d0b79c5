"""Settings of a connection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from nsqext.arguments import check_counts, check_kinds, check_number, check_times
from nsqext.errors import InvalidSetting
from nsqext.protocol.frames import DEFAULT_MAX_FRAME_SIZE, MAX_DECODED

if TYPE_CHECKING:
    import ssl

_IDENTIFY = (
    *("heartbeat_interval", "snappy", "deflate_level"),
    *("client_id", "hostname", "user_agent", "topology_region", "topology_zone"),
)


def make_tls_context(given: object, setting: str = "tls") -> ssl.SSLContext | None:
    """Return the context for a context, a file of CA certificates, or True for the system's certificates.

    Returns None for None and False, without the slow import of ``ssl``. Raises InvalidSetting.
    """
    if given is None or given is False:
        return None
    import ssl

    if isinstance(given, ssl.SSLContext):
        return given
    if not isinstance(given, (bool, str)):
        raise InvalidSetting(
            f"{setting}={given!r} is a {type(given).__name__}",
            hint="give True, the path of a PEM file of CA certificates, or an ssl.SSLContext",
        )
    try:
        return ssl.create_default_context(cafile=given if isinstance(given, str) else None)
    except OSError as error:  # also ssl.SSLError
        raise InvalidSetting(
            f"{setting}={given!r} is not a file of CA certificates: {error.strerror or error}",
            hint="give a PEM file, True for the system's certificates, or an ssl.SSLContext",
        ) from error


@frozen
class ConnectionOptions:
    """The values of `ConnectionSettings`."""

    connect_timeout: float = 5.0
    request_timeout: float = 10.0
    heartbeat_interval: float = 30.0
    local_host: str | None = None
    max_frame_size: int = DEFAULT_MAX_FRAME_SIZE
    max_decompressed_size: int = MAX_DECODED
    tls: ssl.SSLContext | bool | str | None = None
    tls_hostname: str | None = None
    snappy: bool = False
    deflate_level: int = 0
    auth_secret: str | None = field(default=None, repr=False)
    client_id: str | None = None
    hostname: str | None = None
    user_agent: str | None = None
    topology_region: str | None = None
    topology_zone: str | None = None

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_times(self, "connect_timeout", "request_timeout", zero=False)
        check_counts(self, "max_frame_size", "max_decompressed_size")
        check_times(self, "heartbeat_interval")
        if not 1 <= self.heartbeat_interval <= 60:
            raise InvalidSetting(f"heartbeat_interval={self.heartbeat_interval!r} is not within 1..60 seconds")
        check_number("deflate_level", self.deflate_level, 0, 9)
        if self.snappy and self.deflate_level:
            raise InvalidSetting("snappy and deflate cannot be used together", hint="choose one")
        if self.auth_secret == "":
            raise InvalidSetting("auth_secret is empty", hint="leave it out, or give the secret")
        self.tls_context()
        if self.tls_hostname is not None and not self.tls:
            raise InvalidSetting("tls_hostname is given without tls", hint="add tls=True, or a CA file")

    def tls_context(self) -> ssl.SSLContext | None:
        return make_tls_context(self.tls)

    def identify_members(self) -> dict[str, Any]:
        return {name: value for name in _IDENTIFY if (value := getattr(self, name)) is not None}
