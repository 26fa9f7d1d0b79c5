"""Listening sockets, dual-stack and opened early, and ports that a cluster reserves."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterable
from typing import Any

from nsqext.errors import InvalidSetting
from nsqext.types import Address

make_socket = socket.socket
"""The simulation in `nsqext.testing` replaces it."""

_LAST_PORT = 65535
_BACKLOG = 1024
_WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
_MAPPED = "::ffff:"
_early: dict[str, list[socket.socket]] = {}


class ListenError(OSError):
    """An address cannot be bound; with the original programs' text."""

    def __init__(self, address: str, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self._text = f"listen ({address}) failed - listen tcp{reason}"

    def __str__(self) -> str:
        return self._text


def listen(address: str) -> socket.socket:
    """Return a non-blocking listening socket for ``host:port``; port 0 is a free port. Raises `ListenError`.

    A wildcard host (``:port``, ``0.0.0.0:port``, ``[::]:port``) listens on IPv6 and IPv4, as the original programs:
    ``localhost`` resolves to ``::1`` first.
    """
    waiting = _early.get(address)
    return waiting.pop(0) if waiting else _open(address)


def listen_early(addresses: Iterable[str]) -> None:
    """Open sockets for `listen`, which reports addresses that cannot be bound.

    A client that connects during the program's imports waits in the backlog and is not refused.
    """
    for address in addresses:
        try:
            _early.setdefault(address, []).append(_open(address))
        except OSError:
            continue


def _open(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if ":" not in address:
        raise ListenError(address, errno.EINVAL, f": address {address}: missing port in address")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ListenError(address, errno.EINVAL, f": address {port}: invalid port")
    host = host.strip("[]")
    try:
        if host in _WILDCARDS and socket.has_dualstack_ipv6():
            try:
                return _bind(socket.AF_INET6, "::", int(port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is switched off
                    raise
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return _bind(family, host, int(port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ListenError(address, error.errno or 0, f" {address}: bind: {reason}") from error


def _bind(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    made = make_socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((host, port))
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def peer_name(address: tuple[Any, ...]) -> str:
    """Return ``host:port`` of a socket address, without the IPv6 prefix of IPv4 addresses."""
    return str(Address(str(address[0]).removeprefix(_MAPPED), address[1]))


def split_address(text: str, default_host: str = "127.0.0.1") -> Address:
    """Parse ``host:port``; raises `InvalidSetting`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > _LAST_PORT:
        raise InvalidSetting(f"{text!r} is not an address", hint="use host:port, with port 0 for a free port")
    return Address(host.strip("[]") or default_host, int(port))


class Ports:
    """Addresses that a cluster reserves until it is closed, even while their nodes are down.

    On Linux a bound socket that does not listen reserves its port: connections are refused, port 0 does not choose it
    for others, and sockets without SO_REUSEADDR cannot bind it.
    """

    def __init__(self) -> None:
        self._kept: list[socket.socket] = []
        self._taken: set[tuple[str, int]] = set()

    def take(self, address: Address) -> Address:
        """Reserve an address; return it, with a free port for port 0. Raises `InvalidSetting` if it is in use."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        kept = make_socket(family, socket.SOCK_STREAM)
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((address.host, address.port))
        except OSError as error:
            kept.close()
            raise _cannot_listen(address, error.strerror) from error
        host, port = kept.getsockname()[:2]
        if (host, port) in self._taken:  # SO_REUSEADDR allows this until a socket listens
            kept.close()
            raise _cannot_listen(address, "another server of this cluster has the address")
        self._taken.add((host, port))
        if sys.platform == "linux":
            self._kept.append(kept)
        else:
            kept.close()
        return Address(address.host, port)

    def release(self) -> None:
        self._taken.clear()
        while self._kept:
            self._kept.pop().close()


def _cannot_listen(address: Address, reason: str | None) -> InvalidSetting:
    return InvalidSetting(f"cannot listen on {address}: {reason}", hint="choose another port, or 0 for a free port")
