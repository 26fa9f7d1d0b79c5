"""A connection subscribed to a partition of a channel, for consumers and range readers.

::

    reader = await PartitionReader.open(request)    # connect, IDENTIFY, SUB; the server sends nothing yet
    reader.set_ready(100)
    reader.flush()
    await reader.read(on_messages)                  # until the connection ends
"""

from __future__ import annotations

import logging
from math import inf
from typing import TYPE_CHECKING, Any, Self

import anyio
from attrs import evolve, field, frozen

from nsqext.client.consumer.message import KeySharing
from nsqext.errors import InvalidSetting, NsqError, PartitionUnavailable
from nsqext.errors.server import InvalidCommand
from nsqext.protocol.client.commands import CLS, rdy, sub
from nsqext.protocol.identify import KEY_FAILOVER, SHARED, IdentifyRequest
from nsqext.protocol.messages import decode_into
from nsqext.transport.handshake import open_connection, subscribe

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.protocol.frames import MessageData
    from nsqext.protocol.identify import Negotiated
    from nsqext.protocol.messages import RawMessage
    from nsqext.transport.connection import Connection
    from nsqext.types import Address, TopicMeta


_UNBUFFERED = -1
_SHORTEST = 0.01  # seconds, the shortest output buffer timeout of the redesigned server
_SHORTEST_ORIGINAL = 0.025  # of the original server


@frozen
class SubscribeRequest:
    """The partition and channel to subscribe to, and how."""

    topic: str
    channel: str
    partition: int | None  #: None on the original NSQ
    address: Address  #: the node of its leader
    meta: TopicMeta  #: decides extend support and order
    options: ConsumerOptions = field(kw_only=True)
    tag: str | None = field(default=None, kw_only=True)  #: required tag of messages; None for all
    #: names a consumer that shares keys by tags in the server's statistics
    client_id: str = field(default="", kw_only=True)
    #: number of key buckets; 0 if keys are not shared by tags
    key_tags: int = field(default=0, kw_only=True)

    @property
    def key_sharing(self) -> KeySharing:
        """How the channel's consumers share the keys of the partition."""
        if self.options.dispatch != KEY_FAILOVER:
            return KeySharing.NONE
        return KeySharing.TAGS if self.key_tags else KeySharing.SERVER

    @property
    def ordered(self) -> bool:
        """Whether to subscribe in order."""
        return self.meta.ordered if self.options.ordered is None else self.options.ordered

    @property
    def verb(self) -> str:
        """The subscribe command (smart client note, ordered consumption)."""
        if self.ordered:
            return "SUB_ORDERED"
        options = self.options
        # lanes restore the order by the offsets of messages
        sorts = options.lanes is not None and self.key_sharing is not KeySharing.SERVER
        return "SUB_ADVANCED" if (options.queue_position or sorts) and self.partition is not None else "SUB"

    def identify(self) -> IdentifyRequest:
        """Return the body of IDENTIFY; extend support as the topic's (captured: sub_ext_need, sub_ext_forbidden)."""
        extend = self.meta.extend_support
        size, timeout = self._buffer()
        return IdentifyRequest(
            msg_timeout=self.options.msg_timeout,
            sample_rate=self.options.sample_rate,
            output_buffer_size=size,
            output_buffer_timeout=timeout,
            extend_support=extend,
            desired_tag=self.tag if extend else None,
            ext_filter=self.options.ext_filter if extend else None,
            extra=self._dispatch(),
        )

    def _buffer(self) -> tuple[int | None, float | None]:
        """Return size and timeout of the server's output buffer.

        A node without partitions may be of either generation; the original refuses shorter timeouts.
        """
        options, connection = self.options, self.options.connection
        timeout = options.output_buffer_timeout
        if timeout is None:
            return options.output_buffer_size, None
        if not timeout and not connection.snappy and not connection.deflate_level:
            return _UNBUFFERED, None
        # with compression only the timer flushes, whatever the buffer size
        return options.output_buffer_size, max(timeout, _SHORTEST_ORIGINAL if self.partition is None else _SHORTEST)

    def _dispatch(self) -> dict[str, str]:
        dispatch, key = self.options.dispatch, self.options.key
        if dispatch is None:
            return {}
        if self.key_tags:  # the setting client_id may be that of other consumers, too
            return {"dispatch": SHARED, "client_id": self.client_id}
        return {"dispatch": dispatch} | ({"key_header": key} if isinstance(key, str) else {})

    def supported_by(self, negotiated: Negotiated) -> SubscribeRequest:
        """Return the request that a server can serve: this request, or by tags if the server does not share keys.

        Only the server's answer decides: so all consumers of a channel share a partition in the same way, also while
        servers are replaced. A server with key_failover makes all consumers subscribe in the same way as the first.

        Raises InvalidSetting if keys cannot be shared; PartitionUnavailable for a redesigned node that lookup lists
        without a partition, as after a kill: it would send messages of a partition that another connection reads, too.
        """
        if self.partition is None and self.meta.partition_num and negotiated.redesigned:
            raise PartitionUnavailable("lookup lists the node, but no partition that it leads", topic=self.topic)
        sharing = self.key_sharing
        if sharing is KeySharing.NONE or (sharing is KeySharing.SERVER and negotiated.dispatch == KEY_FAILOVER):
            return self
        from nsqext.client.consumer.subscriptions.tag_sharing import check_tags, tags_instead

        chosen = self
        if sharing is KeySharing.SERVER:
            count, tag = tags_instead(self.options, negotiated, self.topic)
            chosen = evolve(self, key_tags=count, tag=tag)
        check_tags(self.options, negotiated, self.meta, self.topic, self.partition)
        return chosen

    def explain(self, error: NsqError) -> NsqError:
        """Return `InvalidSetting`, which is not retried, if a setting is the reason; otherwise the error."""
        if isinstance(error, InvalidCommand) and "is dispatched by" in str(error):
            return InvalidSetting(error.message, hint="set dispatch to the type of the channel, or to None")
        if isinstance(error, InvalidCommand) and "command SUB_ORDERED" in error.message:
            return InvalidSetting("the original NSQ has no ordered topics", topic=self.topic, hint="leave ordered out")
        return error

    def fits(self, meta: TopicMeta) -> bool:
        """Return whether this subscription fits a topic's meta."""
        return self.meta.extend_support == meta.extend_support and self.meta.ordered == meta.ordered


logger: logging.Logger = logging.getLogger("nsqext.consumer")

_READ_SIZE = 65536
_CLOSE_TIMEOUT = 2.0
_HEARTBEAT_LATE = 1.0  # seconds after which a heartbeat is missing
_PAST_DUE = 0.05  # seconds between a due time and the tick for it
# messages in flight accepted beyond twice the RDY count: the server's count restarts at 0 when an administrator empties
# or moves the channel
_EXCESS = 16


class PartitionReader:
    """A subscribed connection; see `open`."""

    def __init__(self, request: SubscribeRequest, connection: Connection, negotiated: Negotiated) -> None:
        self.request: SubscribeRequest = request
        self.node: str = str(request.address)  #: ``host:port`` of the node
        self.pending: list[bytes] = []  #: FIN, REQ and TOUCH for the next `flush`
        self.ready: int = 0  #: the last RDY count
        #: the server's largest RDY count, or 1 for an ordered subscription
        self.max_ready: int = 1 if request.ordered else negotiated.max_rdy_count
        self.msg_timeout: float = negotiated.msg_timeout  #: seconds that a message may be in flight
        #: seconds, touches included
        self.max_msg_timeout: float = negotiated.max_msg_timeout
        self._connection = connection
        self.extend: bool = request.meta.extend_support  #: whether messages have an extend header
        self.detail: bool = request.verb != "SUB"  #: whether messages have offset and size
        self._rdy: int | None = None
        self._largest = 0
        #: most messages that the server may have sent, neither answered nor timed out, by the largest RDY count; the
        #: server may notice timeouts before this client
        self.most_in_flight: int = _EXCESS
        self._silent_since = 0.0
        # set when CLS was acknowledged or failed; None before CLS
        self._closing: anyio.Event | None = None

    @classmethod
    async def open(cls, request: SubscribeRequest, *, read_size: int = _READ_SIZE, **members: Any) -> Self:
        """Connect and subscribe; cancellation closes the connection.

        If the server cannot share the keys of the request, the keys are shared by tags.

        Args:
            read_size: bytes of a read, at most; more while reads are full.
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
            connection.read_at_least(read_size)
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

    def decode(self, message: RawMessage, data: MessageData) -> None:
        """Fill a message from a frame; raises ProtocolError."""
        decode_into(message, data, self.extend, self.detail)

    # Sending

    @property
    def has_pending(self) -> bool:
        """Whether `flush` has anything to send."""
        return bool(self.pending) or self._rdy is not None

    def set_ready(self, count: int) -> bool:
        """Set the RDY count for the next `flush`; return whether it changed."""
        if count == self.ready:
            return False
        self.ready = self._rdy = count
        self._largest = max(self._largest, count)
        self.most_in_flight = 2 * self._largest + _EXCESS
        return True

    def flush(self) -> None:
        """Send RDY and pending commands with one write."""
        connection, pending = self._connection, self.pending
        if self._rdy is not None:
            connection.write(rdy(self._rdy))
            self._rdy = None
        if pending:
            connection.write(b"".join(pending))
            pending.clear()
        connection.flush()

    # Receiving

    async def read(self, on_messages: Callable[[list[MessageData]], None]) -> None:
        """Read until the connection ends; call a function with the message frames of each read, see `decode`."""
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
        """When to call `tick` if nothing is received until then; infinity without heartbeats."""
        received, interval = self._connection.received_at, self._connection.heartbeat_interval
        if not interval:
            return inf
        missing = received != self._silent_since
        return received + (interval + _HEARTBEAT_LATE if missing else 2 * interval + _HEARTBEAT_LATE) + _PAST_DUE

    def misses_heartbeat(self, now: float) -> bool:
        """Return, once in a silence, whether the server is silent for longer than a heartbeat interval.

        After an upgrade to extend, a topic sends old consumers neither messages nor heartbeats (captured: upgrade_ext).
        """
        connection = self._connection
        received, interval = connection.received_at, connection.heartbeat_interval
        if not interval or now - received <= interval + _HEARTBEAT_LATE or received == self._silent_since:
            return False
        self._silent_since = received
        return True

    # Ending

    def fail(self, error: NsqError) -> None:
        """End the connection with an error, which `read` raises."""
        self._connection.protocol.fail(error)
        self._connection.close()

    async def stop(self) -> None:
        """Send pending commands and CLS, and wait for its acknowledgement: the server sends no further messages.

        Does not raise. The server still accepts answers (captured: cls) and refuses a second CLS: concurrent calls wait
        for the first.
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
        """Stop as `stop` does, then close the connection; cancellation closes it at once."""
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
        """Close the connection at once; repeatable."""
        self._connection.close()


def _located(error: NsqError, request: SubscribeRequest) -> NsqError:
    return error.at(topic=request.topic, partition=request.partition, node=str(request.address))
