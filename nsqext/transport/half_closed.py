"""A connection that sends nothing more, and is open until the server has ended it, too."""

from __future__ import annotations

import socket
from contextlib import suppress

_READ_SIZE = 16384


class HalfClosed:
    """The rest of a connection whose last commands have no response.

    nsqd executes the commands of a connection one after another, and closes the connection after the last one that it
    received. After that, it executes no further command.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.ended: bool = False  #: by the server
        self._sock = sock  # non-blocking
        with suppress(OSError):  # the server has reset it
            sock.shutdown(socket.SHUT_WR)

    def poll(self) -> bool:
        """Discard what was received; return whether the server has ended the connection."""
        while not self.ended and self._sock.fileno() >= 0:
            try:
                received = self._sock.recv(_READ_SIZE)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                received = b""
            if not received:
                self.ended = True
                self._sock.close()
        return self.ended
