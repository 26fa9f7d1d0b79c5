"""A connection that is subscribed to one partition of a channel: the part that consumers and range readers share.

::

    reader = await PartitionReader.open(request)    # connect, IDENTIFY, SUB; the server sends nothing yet
    await reader.move(http, position)               # optional: move the channel to a position first
    reader.set_ready(100)
    reader.flush()
    await reader.read(on_messages)                  # until the connection ends
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Self

import anyio

from nsqext.errors import NsqError
from nsqext.protocol.client.commands import CLS, rdy, sub
from nsqext.protocol.messages import decode_into
from nsqext.transport.handshake import open_connection, subscribe

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.subscriptions.subscribe_request import SubscribeRequest
    from nsqext.protocol.identify import Negotiated
    from nsqext.protocol.messages import RawMessage
    from nsqext.transport.connection import Connection

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_READ_SIZE = 65536
_CLOSE_TIMEOUT = 2.0
_HEARTBEAT_LATE = 1.0  # seconds after which a heartbeat is missing
_PAST_DUE = 0.05  # seconds by which a tick follows such a time
_EXCESS = 16
"""Messages in flight beyond twice the RDY count that are accepted: the server restarts its count at 0 when an
administrator empties or moves the channel."""


class PartitionReader:
    """A connection that is subscribed; made by `open`.

    Commands are sent by `flush`: RDY first, then the others in the order in which they were added.
    """

    def __init__(self, request: SubscribeRequest, connection: Connection, negotiated: Negotiated) -> None:
        self.request: SubscribeRequest = request  # what it is subscribed to
        self.node: str = str(request.address)  # ``host:port`` of the node
        self.pending: list[bytes] = []  # commands that the next `flush` sends: FIN, REQ, TOUCH
        self.ready: int = 0  # the RDY count that was set last
        # largest RDY count: that of the server, or 1 for an ordered subscription, whose channel sends one at a time
        self.max_ready: int = 1 if request.ordered else negotiated.max_rdy_count
        self.msg_timeout: float = negotiated.msg_timeout  # seconds that a message may be in flight
        # seconds that a message may be in flight, touches included
        self.max_msg_timeout: float = negotiated.max_msg_timeout
        self._connection = connection
        self.extend: bool = request.meta.extend_support  # whether messages carry an extend header
        self.detail: bool = request.verb != "SUB"  # whether messages carry their offset and size
        self._rdy: int | None = None
        self._largest = 0
        # largest number of messages that the server may have sent and that were neither answered nor timed out, by the
        # largest RDY count. The server may redeliver them shortly before this client notices that they timed out.
        self.most_in_flight: int = _EXCESS
        self._silent_since = 0.0
        self._closing: anyio.Event | None = None
        """Set when CLS was acknowledged, or is not awaited any more; None before CLS."""

    @classmethod
    async def open(cls, request: SubscribeRequest, *, read_size: int = _READ_SIZE, **members: Any) -> Self:
        """Connect and subscribe; cancellation closes the connection.

        A request that shares keys by the server's dispatch becomes one by tags where the server does not have it.

        Args:
            read_size: bytes that one read takes at most.
            members: further arguments of a derived class.
        """
        connection: Connection | None = None
        try:
            options = request.options.connection
            while True:
                connection, negotiated = await open_connection(request.address, options, request.identify())
                supported = request.supported_by(negotiated)
                if supported is request:
                    break
                connection.close()
                request = supported
            connection.read_size = read_size
            command = sub(request.topic, request.channel, request.partition, verb=request.verb)
            await subscribe(connection, command, options.request_timeout)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, NsqError):
                raise
            reason = request.explain(error)
            raise _located(reason, request) from reason.__cause__
        return cls(request, connection, negotiated, **members)

    def decode(self, message: RawMessage, data: bytes) -> None:
        """Fill a message from the data of a frame; raises ProtocolError."""
        decode_into(message, data, self.extend, self.detail)

    # Sending

    @property
    def has_pending(self) -> bool:
        """Whether `flush` has something to send."""
        return bool(self.pending) or self._rdy is not None

    def set_ready(self, count: int) -> bool:
        """Set the RDY count, to be sent by the next `flush`; return whether it changed."""
        if count == self.ready:
            return False
        self.ready = self._rdy = count
        self._largest = max(self._largest, count)
        self.most_in_flight = 2 * self._largest + _EXCESS
        return True

    def flush(self) -> None:
        """Send RDY and the pending commands as one piece."""
        connection, pending = self._connection, self.pending
        if self._rdy is not None:
            connection.write(rdy(self._rdy))
            self._rdy = None
        if pending:
            connection.write(b"".join(pending))
            pending.clear()
        connection.flush()

    # Receiving

    async def read(self, on_messages: Callable[[list[bytes]], None]) -> None:
        """Read until the connection ends, calling a function with the message frames of each read, see `decode`."""
        connection = self._connection
        connection.on_messages = on_messages
        try:
            await connection.read_forever()
        except NsqError as error:
            raise _located(error, self.request) from error.__cause__

    def tick(self) -> None:
        """Answer heartbeats, and detect a silent server.

        Call it a few times a second while messages are in flight, otherwise a few times per heartbeat interval.
        """
        self._connection.tick()

    @property
    def silence_due(self) -> float:
        """When `tick` has to be called, unless anything is received until then; infinity without heartbeats."""
        received, interval = self._connection.received_at, self._connection.heartbeat_interval
        if not interval:
            return inf
        missing = received != self._silent_since
        return received + (interval + _HEARTBEAT_LATE if missing else 2 * interval + _HEARTBEAT_LATE) + _PAST_DUE

    def misses_heartbeat(self, now: float) -> bool:
        """Return, once in a silence, whether the server is silent for longer than a heartbeat interval.

        A topic that was upgraded to extend sends neither messages nor heartbeats to old consumers (captured:
        upgrade_ext).
        """
        connection = self._connection
        received, interval = connection.received_at, connection.heartbeat_interval
        if not interval or now - received <= interval + _HEARTBEAT_LATE or received == self._silent_since:
            return False
        self._silent_since = received
        return True

    # Ending

    def fail(self, error: NsqError) -> None:
        """End the connection because of an error, which `read` raises."""
        self._connection.protocol.fail(error)
        self._connection.close()

    async def stop(self) -> None:
        """Send what is pending, and wait until the server has acknowledged CLS: it sends no more messages.

        Does not raise. The server still accepts answers (captured: cls). While another task waits, what is pending is
        sent, and the other task awaited: the server refuses a second CLS.
        """
        if not self._connection.usable:
            return
        try:
            self.flush()
            with anyio.move_on_after(_CLOSE_TIMEOUT):
                if self._closing is not None:
                    await self._closing.wait()
                else:
                    await self._send_cls()
                await self._connection.drain()
        except NsqError as error:
            logger.debug("connection ended before CLS was acknowledged: %s", error)

    async def close(self) -> None:
        """Stop as `stop` does, and close the connection. Cancellation closes it at once."""
        try:
            await self.stop()
        finally:
            self.end()

    async def _send_cls(self) -> None:
        self._closing = closing = anyio.Event()
        try:
            await self._connection.request(CLS)
            self.flush()
        finally:
            closing.set()

    def end(self) -> None:
        """Close the connection at once. May be called again."""
        self._connection.close()


def _located(error: NsqError, request: SubscribeRequest) -> NsqError:
    return error.at(topic=request.topic, partition=request.partition, node=str(request.address))
