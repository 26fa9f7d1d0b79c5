"""Requests of a thread over a connection that the event loop does not read any more."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.protocol.client.commands import Command
    from nsqext.transport.connection import Connection


_TICK = 250  # milliseconds after which a waiting thread enforces the timeouts


def thread_can_wait() -> bool:
    """Return whether this system has `select.poll`."""
    return hasattr(select, "poll")


class BlockingConnection:
    """Requests of a thread, which holds a lock, with the connection's protocol and timeouts."""

    __slots__ = ("_poll", "_writing", "connection")

    def __init__(self, connection: Connection) -> None:
        """Take over a connection, in its event loop."""
        connection.detach()
        self.connection: Connection = connection
        self._writing = False
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def request(self, data: Command, deadline: float) -> bytes:
        """Send a command and return the data of its response, as `Connection.request`.

        An exception from a signal in this thread, such as KeyboardInterrupt, closes the connection: bytes may have been
        read and not processed, and later responses would belong to other commands.
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
        connection = self.connection
        writing = connection.sending
        if writing != self._writing:
            self._poll.modify(connection.fileno(), select.POLLIN | (select.POLLOUT if writing else 0))
            self._writing = writing
        if self._poll.poll(_TICK) and not writing:
            connection.poll()
        else:
            connection.tick()
