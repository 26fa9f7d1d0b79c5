"""Protection of an HTTP API without authentication against web pages: cross-site requests and DNS rebinding."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::[0-9]+)?")
_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES = frozenset(("", "same-origin", "none"))


def _host_of(authority: str) -> str:
    """Return the host of ``host:port``; empty for another form."""
    found = _HOST.fullmatch(authority)
    return found["host"].strip("[]").lower() if found else ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class HttpGuard:
    """Refuses requests that a web page of another site made a browser send.

    A page whose host name resolves to this server after a DNS rebinding names its own host in ``Host``: only addresses,
    ``localhost``, this machine's name and the given names are accepted. A page of another origin cannot hide its
    ``Origin`` from a request that changes something. Programs send neither, and are not affected.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def refusal(self, method: str, host: str, origin: str, site: str) -> str:
        """Return why a request is refused; empty when it is accepted.

        Args:
            host: header ``Host``; empty without one (HTTP/1.0, which no browser speaks).
            origin: header ``Origin``, empty without one.
            site: header ``Sec-Fetch-Site``, empty without one.
        """
        name = _host_of(host)
        if host and not (name in self._names or name.endswith(".localhost") or _is_address(name)):
            return f"host {host!r} is not allowed: give the name with --http-host"
        if origin and _authority(origin) != host.lower():
            return f"cross-site request refused: origin {origin!r} is not {host!r}"
        if method not in _READING and site.lower() not in _OWN_SITES:
            return "cross-site request refused: Sec-Fetch-Site"
        return ""
