"""Listening sockets, and those that were opened ahead.

The programs listen before the rest of them is imported: a client that comes in the meantime waits a moment instead of
being refused.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

__all__ = ("ListenError", "listen", "listen_early")

_LAST_PORT = 65535
_early: dict[str, socket.socket] = {}


class ListenError(OSError):
    """An address that cannot be had, told as the original programs tell it."""

    def __init__(self, address: str, number: int, reason: str) -> None:
        super().__init__(number, reason)
        self._text = f"listen ({address}) failed - listen tcp{reason}"

    def __str__(self) -> str:
        return self._text


def listen(address: str, backlog: int = 1024) -> socket.socket:
    """Return a listening TCP socket.

    Args:
        address: ``host:port``, port 0 for a free one; ``:port`` listens on every interface.
        backlog: connections that may wait.

    Raises:
        ListenError: the address cannot be had.
    """
    return _early.pop(address, None) or _open(address, backlog)


def listen_early(addresses: Iterable[str]) -> None:
    """Open sockets that `listen` hands out later; an address that cannot be had is left to `listen` to report."""
    for address in addresses:
        try:
            _early[address] = _open(address, 1024)
        except OSError:
            continue


def _open(address: str, backlog: int) -> socket.socket:
    host, _, port = address.rpartition(":")
    if ":" not in address:
        raise ListenError(address, errno.EINVAL, f": address {address}: missing port in address")
    if not port.isdecimal() or int(port) > _LAST_PORT:
        raise ListenError(address, errno.EINVAL, f": address {port}: invalid port")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(backlog)
        made.setblocking(False)
    except OSError as error:
        made.close()
        reason = (error.strerror or str(error)).lower()
        raise ListenError(address, error.errno or 0, f" {address}: bind: {reason}") from error
    return made
