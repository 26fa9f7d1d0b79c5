"""One subscription: a connection to the leader of one partition, for as long as it lasts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio
from attrs import frozen

from nsqext.client.message import Message
from nsqext.client.options import ConsumerOptions
from nsqext.errors import MessageNotInFlight, NsqError, ProtocolError
from nsqext.protocol.commands import CLS, rdy, sub
from nsqext.protocol.identify import IdentifyRequest
from nsqext.protocol.messages import decode_into
from nsqext.transport.connection import Connection
from nsqext.transport.handshake import open_connection
from nsqext.types import Address, TopicMeta

__all__ = ("Subscription", "SubscriptionPlan")

logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_FLUSH_BYTES = 16384
_READ_SIZE = 65536


@frozen
class SubscriptionPlan:
    """What to subscribe to, and how.

    Attributes:
        topic: name of the topic.
        channel: name of the channel.
        partition: the partition; -1 at the original NSQ.
        address: the node that leads it.
        meta: the topic's meta; decides extend support and order.
        tag: tag that is wanted.
        options: the consumer's options.
    """

    topic: str
    channel: str
    partition: int
    address: Address
    meta: TopicMeta
    tag: str | None
    options: ConsumerOptions

    @property
    def ordered(self) -> bool:
        """Whether to subscribe in order."""
        return self.meta.ordered if self.options.ordered is None else self.options.ordered

    @property
    def verb(self) -> str:
        """The subscribe command that fits (smart client note, ordered consumption)."""
        if self.ordered:
            return "SUB_ORDERED"
        return "SUB_ADVANCED" if self.options.queue_position and self.partition >= 0 else "SUB"

    def identify(self) -> IdentifyRequest:
        """Return what to tell the server: extend support has to follow the topic (captured: sub_ext_need, sub_ext_forbidden)."""
        extend = self.meta.extend_support
        return IdentifyRequest(
            msg_timeout=self.options.msg_timeout,
            sample_rate=self.options.sample_rate,
            extend_support=extend,
            desired_tag=self.tag if extend else None,
            ext_filter=self.options.ext_filter if extend else None,
        )


class Subscription:
    """A connection that is subscribed; the owner of the messages that came over it.

    Args:
        plan: what to subscribe to.
        arrived: takes the messages of each read.
        dirty: told when there is something to be flushed.
    """

    __slots__ = (
        "_acks",
        "_arrived",
        "_connection",
        "_detail",
        "_dirty",
        "_rdy",
        "_size",
        "in_flight",
        "in_order",
        "live",
        "max_rdy",
        "msg_timeout",
        "node",
        "partition",
        "plan",
        "ready",
        "stopped",
        "topic",
    )

    def __init__(
        self,
        plan: SubscriptionPlan,
        arrived: Callable[[list[Message]], None],
        dirty: Callable[[Subscription], None],
    ) -> None:
        self.plan = plan
        self.topic = plan.topic
        self.partition = plan.partition
        self.node = str(plan.address)
        self.in_order = plan.ordered
        self.in_flight = 0
        self.live = False
        self.stopped = False
        """Ended because somebody here wanted it."""
        self.max_rdy = 2500
        self.msg_timeout = 60.0
        self.ready = 0
        self._arrived = arrived
        self._dirty = dirty
        self._detail = plan.verb != "SUB"
        self._acks: list[bytes] = []
        self._size = 0
        self._rdy: int | None = None
        self._connection: Connection | None = None

    async def open(self) -> None:
        """Connect and subscribe.

        Raises:
            NsqError: it did not work; nothing stays open.
        """
        plan = self.plan
        connection, negotiated = await open_connection(plan.address, plan.options.connection, plan.identify())
        try:
            connection.read_size = _READ_SIZE
            connection.on_messages = self._deliver
            await connection.request(sub(plan.topic, plan.channel, plan.partition, verb=plan.verb))
        except NsqError as error:
            connection.close()
            raise error.at(topic=plan.topic, partition=plan.partition, node=self.node) from error.__cause__
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self.max_rdy = negotiated.max_rdy_count
        self.msg_timeout = negotiated.msg_timeout
        self.live = True

    async def read(self) -> None:
        """Read until the connection ends.

        Raises:
            NsqError: why it ended.
        """
        assert self._connection is not None
        try:
            await self._connection.read_forever()
        except NsqError as error:
            raise error.at(topic=self.topic, partition=self.partition, node=self.node) from error.__cause__
        finally:
            self.end()

    def _deliver(self, frames: list[bytes]) -> None:
        now = _clock()
        extend, detail = self.plan.meta.extend_support, self._detail
        messages: list[Message] = []
        try:
            for data in frames:
                message = Message(self)
                decode_into(message, data, extend, detail)
                message.received = now
                messages.append(message)
        except ProtocolError as error:
            assert self._connection is not None
            self._connection.protocol.fail(error)
        self.in_flight += len(messages)
        self._arrived(messages)

    # Answers

    def respond(self, message: Message, command: str, delay: float = 0.0) -> None:
        """Send FIN, REQ or TOUCH with the next flush.

        Raises:
            MessageNotInFlight: the connection that the message came over is gone.
        """
        if not self.live:
            raise MessageNotInFlight(
                f"the message {message.id.hex()} cannot be answered, its connection is gone",
                topic=self.topic,
                partition=self.partition,
                node=self.node,
                hint="it will be delivered again",
            )
        acks = self._acks
        if not acks and self._rdy is None:
            self._dirty(self)
        if command == "FIN":
            acks.append(b"FIN %b\n" % message.id)
            self.in_flight -= 1
        elif command == "REQ":
            acks.append(b"REQ %b %d\n" % (message.id, round(delay * 1000)))
            self.in_flight -= 1
        else:
            acks.append(b"TOUCH %b\n" % message.id)
            message.received = _clock()
        self._size += 21
        if self._size > _FLUSH_BYTES:
            self.flush()

    def expired(self, message: Message) -> bool:
        """Return whether the message went back to the server."""
        return not self.live or _clock() - message.received > self.msg_timeout

    def set_ready(self, count: int) -> None:
        """Ask for so many messages in flight, with the next flush."""
        if count == self.ready or not self.live:
            return
        self.ready = count
        if not self._acks and self._rdy is None:
            self._dirty(self)
        self._rdy = count

    def flush(self) -> None:
        """Send what is kept as one piece, RDY first."""
        connection = self._connection
        if connection is None or not self.live:
            return
        parts = self._acks
        if self._rdy is not None:
            connection.write(rdy(self._rdy))
            self._rdy = None
        if parts:
            connection.write(b"".join(parts))
            parts.clear()
            self._size = 0
        connection.flush()

    # Upkeep and end

    def tick(self) -> None:
        """Look after the connection; log answers that the server refused."""
        connection = self._connection
        if connection is None or not self.live:
            return
        connection.tick()
        notices = connection.protocol.notices
        for notice in notices:
            logger.warning(
                "a message was not ours any more: %s",
                notice,
                extra={"topic": self.topic, "partition": self.partition, "node": self.node},
            )
        notices.clear()

    async def close(self, timeout: float = 2.0) -> None:
        """Send what is kept, take leave (CLS), and close the connection.

        Args:
            timeout: seconds that the server may take.
        """
        self.stopped = True
        connection = self._connection
        if connection is None:
            return
        try:
            if self.live and connection.usable:
                self.flush()
                with anyio.move_on_after(timeout):
                    await connection.request(CLS)
                    self.flush()
                    await connection.drain()
        except NsqError as error:
            logger.debug("the connection ended before its leave was taken: %s", error)
        finally:
            self.end()

    def end(self) -> None:
        """Close the connection at once; messages that came over it are no longer ours."""
        self.live = False
        if self._connection is not None:
            self._connection.close()
