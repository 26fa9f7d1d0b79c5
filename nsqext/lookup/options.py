"""Options of the lookup client, and the addresses of lookup nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import field, frozen

from nsqext.arguments import check_counts, check_kinds, check_plain_function, check_times
from nsqext.errors import InvalidSetting
from nsqext.transport.options import make_tls_context
from nsqext.types import Address

if TYPE_CHECKING:
    import ssl

LOOKUP_PORT = 4161
"""Default port of nsqlookupd's HTTP API."""
NODE_PORT = 4151
"""Default port of nsqd's HTTP API."""

_COUNTS = ("max_failures", "max_answer_size", "max_lookup_nodes", "max_nodes", "max_topics", "max_concurrent")
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_.])?"
_IPV6 = r"[0-9A-Fa-f:.]+(?:%[\w.-]+)?"
_ADDRESS = re.compile(
    rf"(?:(?P<scheme>https?)://)?(?:(?P<name>{_HOST})|\[(?P<ip>{_IPV6})\])(?::(?P<port>\d{{1,5}}))?"
    r"(?P<path>/[\w./~%+-]*)?",
    re.ASCII,
)


@frozen
class LookupUrl(Address):
    """An HTTP address with HTTPS or a path prefix; a plain ``host:port`` is an `Address`."""

    scheme: str = "https"  #: ``http`` or ``https``
    path: str = ""  #: prefix of all paths, without a trailing slash

    def __str__(self) -> str:
        return f"{self.scheme}://{super().__str__()}{self.path}"


def url_of(address: Address) -> str:
    """Return the URL of a node's HTTP API, without a trailing slash."""
    return str(address) if isinstance(address, LookupUrl) else f"http://{address}"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine, without resolving names."""
    import ipaddress  # lazy: needed only with a token

    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


@frozen
class LookupOptions:
    """The values of `LookupSettings`, named without prefix."""

    poll_interval: float = 60.0
    max_poll_interval: float = 300.0
    poll_jitter: float = 0.3
    request_timeout: float = 2.0
    straggler_timeout: float = 1.0
    max_pause: float = 1.0
    max_failures: int = 3
    retry_failed: float = 30.0
    max_answer_size: int = 16 * 1024 * 1024
    max_lookup_nodes: int = 64
    max_nodes: int = 1024
    max_topics: int = 100_000
    max_concurrent: int = 32
    auth_secret: str | None = field(default=None, repr=False)
    auth_over_http: bool = False
    address_map: str | Mapping[str, str] | Callable[[str], str] | None = None
    node_filter: Callable[[str], bool] | None = None
    ca: str | ssl.SSLContext | None = None

    def __attrs_post_init__(self) -> None:
        check_kinds(self)
        check_times(self, "poll_interval", "max_poll_interval", "request_timeout", "retry_failed", zero=False)
        check_times(self, "straggler_timeout", "max_pause", "poll_jitter")
        if not 0 <= self.poll_jitter < 1:
            raise InvalidSetting(f"poll_jitter={self.poll_jitter!r} is not within 0..1 (1 excluded)")
        check_counts(self, *_COUNTS)
        if self.auth_secret is not None and not (self.auth_secret.isascii() and self.auth_secret.isprintable()):
            raise InvalidSetting("auth_secret has characters that are not allowed in HTTP headers")
        if isinstance(self.ca, bool):
            raise InvalidSetting(
                f"ca={self.ca!r} is a bool", hint="give the path of a PEM file of CA certificates, or an ssl.SSLContext"
            )
        self.tls_context()
        if self.node_filter is not None:
            if not callable(self.node_filter):
                raise InvalidSetting(f"node_filter={self.node_filter!r} is not a function of host:port")
            check_plain_function("node_filter", self.node_filter)
        if callable(self.address_map):
            check_plain_function("address_map", self.address_map)
        elif self.address_map is not None:
            _check_address_map(self.address_map)

    def reached_at(self, listed: Address) -> Address:
        """Apply ``address_map`` to a listed address; raises InvalidSetting."""
        given = self.address_map
        if given is None:
            return listed
        if callable(given):
            try:
                text = given(str(listed))
            except Exception as error:
                raise InvalidSetting(f"address_map raised {error!r} for {listed}") from error
            return _parse_address(text, "address_map")
        table = _read_address_map(given) if isinstance(given, str) else given
        whole = table.get(str(listed))
        if whole is not None:
            return _parse_address(whole, "address_map")
        host = table.get(listed.host)
        return listed if host is None else Address(host, listed.port)

    def tls_context(self) -> ssl.SSLContext | None:
        return make_tls_context(self.ca, "ca")

    def check_auth(self, addresses: Sequence[Address]) -> None:
        """Raise InvalidSetting if the token would be sent in clear."""
        for address in addresses:
            if not self.may_authenticate(address):
                raise InvalidSetting(
                    f"lookupd: auth_secret would be sent in clear to {address}",
                    hint="use https://, or set lookup_auth_over_http",
                )

    def may_authenticate(self, address: Address) -> bool:
        """Return whether ``auth_secret``, if any, may be sent to an address."""
        secure = isinstance(address, LookupUrl) and address.scheme == "https"
        return self.auth_secret is None or self.auth_over_http or secure or is_loopback(address.host)


@lru_cache(maxsize=16)
def _read_address_map(text: str) -> Mapping[str, str]:
    pairs = [pair.strip().partition("=") for pair in text.split(",") if pair.strip()]
    return {listed.strip(): reached.strip() for listed, _, reached in pairs}


def _check_address_map(given: object) -> None:
    hint = "write host:port=host:port or host=host, several with commas"
    table = _read_address_map(given) if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        raise InvalidSetting(f"address_map={given!r} is neither a mapping nor a function", hint=hint)
    for listed, reached in table.items():
        kinds = [_ADDRESS.fullmatch(text) if isinstance(text, str) else None for text in (listed, reached)]
        if None in kinds or len({one["port"] is None for one in kinds if one is not None}) > 1:
            raise InvalidSetting(f"address_map: {listed!r} cannot be mapped to {reached!r}", hint=hint)


def parse_addresses(given: Sequence[str] | str, setting: str, http_port: int | None = None) -> tuple[Address, ...]:
    """Return the addresses of a list, or of a text with commas, without duplicates; raises InvalidSetting.

    They are written ``host:port`` or ``[IPv6]:port``. With a default port, they are HTTP addresses: they may begin with
    ``http://`` or ``https://`` (default port 443) and have a path prefix.
    """
    return tuple(dict.fromkeys(_parse_address(text, setting, http_port) for text in _split(given, setting)))


def parse_lookup_addresses(given: Sequence[str] | str) -> tuple[Address, ...]:
    """Return lookup addresses; see `parse_addresses`."""
    return parse_addresses(given, "lookupd", LOOKUP_PORT)


def _split(given: Sequence[str] | str, setting: str) -> Iterable[str]:
    if isinstance(given, str):
        return [text for text in given.split(",") if text.strip()]
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        raise _not_an_address(given, setting, "write text such as 127.0.0.1:4161, or a list of texts")
    return given


def _parse_address(text: str, setting: str, http_port: int | None = None) -> Address:
    match = _ADDRESS.fullmatch(text.strip()) if isinstance(text, str) else None
    hint = "write host:port or [IPv6]:port"
    if http_port is not None:
        hint = f"write host, host:port, [IPv6]:port or https://host/path; the port is {http_port} by default"
    if match is None or (http_port is None and (match["scheme"] or match["path"])):
        raise _not_an_address(text, setting, hint)
    scheme, path = match["scheme"] or "http", (match["path"] or "").rstrip("/")
    port = int(match["port"] or (443 if scheme == "https" else http_port or 0))
    if not 1 <= port <= 65535:
        raise _not_an_address(text, setting, hint)
    host = match["name"] or match["ip"]
    return Address(host, port) if scheme == "http" and not path else LookupUrl(host, port, scheme, path)


def _is_bare_ipv6(text: str) -> bool:
    """Return whether a text is an IPv6 address without brackets."""
    import ipaddress  # lazy: needed only for errors

    for host in (text, text.rpartition(":")[0]):
        with suppress(ValueError):
            return ipaddress.ip_address(host).version == 6
    return False


def _not_an_address(text: object, setting: str, hint: str) -> InvalidSetting:
    from nsqext.settings_text import redact_url

    shown = redact_url(text) if isinstance(text, str) else text
    if isinstance(text, str) and _is_bare_ipv6(text.strip()):
        shown, hint = text, f"an IPv6 address needs brackets; {hint}"
    return InvalidSetting(f"{setting}: {shown!r} is not an address", hint=hint)
