"""A connection whose requests are sent and received by the calling thread, without an event loop."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.protocol.client.commands import Command
    from nsqext.transport.connection import Connection

_TICK = 250  # milliseconds after which a thread that waits for a response enforces the timeouts


def thread_can_wait() -> bool:
    """Return whether the system lets a thread wait for a socket by `select.poll`."""
    return hasattr(select, "poll")


class BlockingConnection:
    """Requests of one thread at a time over a connection that the event loop does not read any more.

    The protocol and the timeouts are those of the connection. The caller must hold a lock for each method.
    """

    __slots__ = ("_poll", "_writing", "connection")

    def __init__(self, connection: Connection) -> None:
        connection.detach()
        # as `nsqext.transport.handshake.open_connection` returned it; this is called in its event loop
        self.connection: Connection = connection
        self._writing = False
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def request(self, data: Command, deadline: float) -> bytes:
        """Send a command and return the data of its response; see `nsqext.transport.connection.Connection.request`.

        Any exception that a signal raises in this thread, such as KeyboardInterrupt, closes the connection: bytes may
        have been taken from the socket and not processed, so that later responses would belong to other commands.
        """
        connection = self.connection
        complete = False
        try:
            reply = connection.post(data, deadline)
            while reply.data is None and reply.error is None:
                self._wait()
            complete = True
        finally:
            if not complete:
                connection.close()
        if reply.error is not None:
            raise reply.error
        return reply.data or b""

    def _wait(self) -> None:
        """Wait until something can be received or sent, or a tick is due, and process it."""
        connection = self.connection
        writing = connection.sending
        if writing != self._writing:
            self._poll.modify(connection.fileno(), select.POLLIN | (select.POLLOUT if writing else 0))
            self._writing = writing
        if self._poll.poll(_TICK) and not writing:
            connection.poll()
        else:
            connection.tick()
