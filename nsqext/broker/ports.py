"""Ports that a cluster keeps, also while the node behind one of them is killed."""

from __future__ import annotations

import socket
import sys

from nsqext.errors import InvalidSetting
from nsqext.types import Address

__all__ = ("Ports", "split_address")


def split_address(text: str, default_host: str = "127.0.0.1") -> Address:
    """Read ``host:port``; an empty host is the default one.

    Raises:
        InvalidSetting: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise InvalidSetting(f"{text!r} is not an address", hint="use host:port, port 0 for a free one")
    return Address(host.strip("[]") or default_host, int(port))


class Ports:
    """Addresses that belong to the cluster until it ends.

    On Linux a socket that is bound and does not listen keeps a port: connections are refused, a server may listen on it
    again, and nobody else gets it.
    """

    def __init__(self) -> None:
        self._kept: list[socket.socket] = []

    def take(self, address: Address) -> Address:
        """Return the address with its port, a free one where 0 was asked for.

        Raises:
            InvalidSetting: somebody else has it.
        """
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        kept = socket.socket(family, socket.SOCK_STREAM)
        try:
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((address.host, address.port))
            found = Address(address.host, kept.getsockname()[1])
        except OSError as error:
            kept.close()
            raise InvalidSetting(
                f"cannot listen on {address}: {error.strerror}", hint="choose another port, or 0 for a free one"
            ) from error
        if sys.platform == "linux":
            self._kept.append(kept)
        else:
            kept.close()
        return found

    def release(self) -> None:
        """Give every port back."""
        while self._kept:
            self._kept.pop().close()
