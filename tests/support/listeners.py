"""Listening sockets of a system that has no file descriptor left."""

from __future__ import annotations

import errno
import socket
from typing import Any

__all__ = ("ScarceListener", "scarce_listener")


class ScarceListener(socket.socket):
    """A listening socket for whose next connection there is no file descriptor."""

    refused = 0
    number = errno.EMFILE

    def accept(self) -> tuple[socket.socket, Any]:
        """Fail once, as `accept` of the system does."""
        if not self.refused:
            self.refused += 1
            raise OSError(self.number, "too many open files")
        return super().accept()


def scarce_listener() -> ScarceListener:
    """Return a listening socket on a free port, which does not block."""
    listener = ScarceListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    return listener
