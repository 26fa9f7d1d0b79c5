"""One subscription: a connection to the leader of one partition, for as long as it lasts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

import anyio

from nsqext.client.consumer.message import Message
from nsqext.client.consumer.subscriptions.order_check import OrderCheck
from nsqext.client.trace_log import trace_log
from nsqext.errors import InvalidSetting, InvalidState, MessageNotInFlight, NsqError, ProtocolError
from nsqext.protocol.client.body_compression import COMPRESS_HEADER
from nsqext.protocol.client.commands import CLS, rdy, sub
from nsqext.protocol.messages import decode_into
from nsqext.transport.handshake import open_connection, subscribe

if TYPE_CHECKING:
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.backoff import Backoff
    from nsqext.client.consumer.subscriptions.subscribe_request import SubscribeRequest
    from nsqext.transport.connection import Connection

__all__ = ("Hub", "Subscription")

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_MANY = 750  # answers that are worth a send of their own
_READ_SIZE = 65536
_COMPRESSED = COMPRESS_HEADER.encode()


class Hub(Protocol):
    """What a subscription reports to."""

    def arrived(self, subscription: Subscription, messages: list[Message], now: float) -> None:
        """Take the messages of one read."""

    def mark(self, subscription: Subscription) -> None:
        """Note that there is something to be flushed."""

    def level(self) -> None:
        """Share out anew what may be in flight."""


class Subscription:
    """A connection that is subscribed; the owner of the messages that came over it.

    Args:
        plan: what to subscribe to.
        hub: what it reports to.
        backoff: told how messages ended; of the consumer, or its own.
    """

    __slots__ = (
        "_acks",
        "_connection",
        "_detail",
        "_hub",
        "_order",
        "_rdy",
        "backoff",
        "horizon",
        "ignore_lost",
        "in_flight",
        "in_order",
        "live",
        "max_msg_timeout",
        "max_rdy",
        "msg_timeout",
        "node",
        "partition",
        "plan",
        "ready",
        "start",
        "stopped",
        "topic",
    )

    def __init__(self, plan: SubscribeRequest, hub: Hub, backoff: Backoff) -> None:
        self.plan: SubscribeRequest = plan
        self.topic: str = plan.topic
        self.partition: int = plan.partition
        self.node: str = str(plan.address)
        self.in_order: bool = plan.ordered
        self.backoff: Backoff = backoff
        self.in_flight: int = 0
        """Messages that came and were not answered."""
        self.live: bool = False
        self.stopped: bool = False
        """Ended because somebody here wanted it."""
        self.horizon: float = float("-inf")
        """Messages that arrived before this time are no longer ours: they timed out, or the connection is gone."""
        self.ignore_lost: bool = plan.options.delivery.on_lost == "ignore"
        self.max_rdy: int = 2500
        self.msg_timeout: float = 60.0
        self.max_msg_timeout: float = 900.0
        self.ready: int = 0
        self.start: Position | None = None
        """Where the channel was moved to; messages from before are finished unseen."""
        self._hub = hub
        self._detail = plan.verb != "SUB"
        self._order = OrderCheck(plan.options.failure.report_attempts) if plan.ordered else None
        self._acks: list[bytes] = []
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
            plan.check(negotiated)
            connection.read_size = _READ_SIZE
            connection.on_messages = self._deliver
            command = sub(plan.topic, plan.channel, plan.partition, verb=plan.verb)
            await subscribe(connection, command, plan.options.connection.request_timeout)
        except NsqError as error:
            connection.close()
            error = plan.explain(error)
            raise error.at(topic=plan.topic, partition=plan.partition, node=self.node) from error.__cause__
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        # an ordered channel sends one after the other, and its first message twice to those who ask for more
        # (captured: sub_ordered_first_reset_duplicate)
        self.max_rdy = 1 if self.in_order else negotiated.max_rdy_count
        self.msg_timeout = negotiated.msg_timeout
        self.max_msg_timeout = negotiated.max_msg_timeout
        self.live = True

    async def read(self) -> None:
        """Read until the connection ends.

        Raises:
            NsqError: why it ended.
        """
        connection = self._connection
        if connection is None:
            raise InvalidState("the subscription is not open", topic=self.topic, partition=self.partition)
        try:
            await connection.read_forever()
        except NsqError as error:
            raise error.at(topic=self.topic, partition=self.partition, node=self.node) from error.__cause__
        finally:
            self.end()

    def _deliver(self, frames: list[bytes]) -> None:
        now = _clock()
        self.horizon = now - self.msg_timeout
        plan, order = self.plan, self._order
        extend, detail = plan.meta.extend_support, self._detail
        messages: list[Message] = []
        failure: NsqError | None = None
        try:
            for data in frames:
                message = Message(self)
                decode_into(message, data, extend, detail)
                message.received = now
                if order is not None and not order.takes(message):
                    continue
                if extend and message.header.find(_COMPRESSED) >= 0 and plan.options.delivery.decompress:
                    _unpack(message)
                messages.append(message)
        except NsqError as error:
            failure = error
        self.in_flight += len(messages)
        if self.start is not None:
            messages = self._skip(self.start, messages)
        if trace_log.active and trace_log.wants(self.topic):
            trace_log.consumed(messages, plan.channel, self.local_address)
        self._hub.arrived(self, messages, now)
        if failure is not None:
            self._break(failure)

    def _skip(self, start: Position, messages: list[Message]) -> list[Message]:
        """Finish what lies before the start: the server had read it ahead of the move (captured: channel_setoffset)."""
        for number, message in enumerate(messages):
            if start.reached_by(message):
                self.start = None
                return messages[number:]
            message.finish_now()
        return []

    def _break(self, error: NsqError) -> None:
        """End the connection because of what came over it."""
        if self._connection is not None:
            self._connection.protocol.fail(error)
            self._connection.close()

    @property
    def local_address(self) -> str:
        """``host:port`` of this end; empty after the end."""
        return self._connection.local_address if self._connection is not None else ""

    # Answers

    def finish(self, message: Message) -> None:
        """Send FIN with the next flush.

        Raises:
            MessageNotInFlight: the message is no longer ours.
        """
        if message.received < self.horizon:
            raise self._lost(message)
        acks = self._acks
        if not acks and self._rdy is None:
            self._hub.mark(self)
        acks.append(b"FIN %b\n" % message.id)
        self.in_flight -= 1
        if self.backoff.level and self.backoff.succeeded(_clock()):
            self._hub.level()
        if len(acks) > _MANY:
            self.flush()

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Send REQ with the next flush; with ``backoff`` it counts as a failure.

        Raises:
            MessageNotInFlight: the message is no longer ours.
        """
        self.record_outcome(backoff)
        if message.received < self.horizon:
            raise self._lost(message)
        self._append(b"REQ %b %d\n" % (message.id, round(delay * 1000)))
        self.in_flight -= 1

    def record_outcome(self, failed: bool) -> None:
        """Tell the backoff that a message failed, or was given back without being counted as a failure."""
        now = _clock()
        if self.backoff.failed(now) if failed else self.backoff.passed(now):
            self._hub.level()

    def touch(self, message: Message) -> None:
        """Send TOUCH with the next flush.

        Raises:
            MessageNotInFlight: the message is no longer ours.
        """
        if message.received < self.horizon:
            raise self._lost(message)
        self._append(b"TOUCH %b\n" % message.id)
        message.received = _clock()

    def _append(self, command: bytes) -> None:
        if not self._acks and self._rdy is None:
            self._hub.mark(self)
        self._acks.append(command)

    def _lost(self, message: Message) -> MessageNotInFlight:
        reason = "its timeout has passed" if self.live else "its connection is gone"
        return MessageNotInFlight(
            f"the message {message.id.hex()} cannot be answered, {reason}",
            topic=self.topic,
            partition=self.partition,
            node=self.node,
            hint="it will be delivered again",
        )

    def expired(self, message: Message) -> bool:
        """Return whether the message went back to the server."""
        return message.received < max(self.horizon, _clock() - self.msg_timeout)

    def set_ready(self, count: int) -> None:
        """Ask for so many messages in flight, with the next flush."""
        if count == self.ready or not self.live:
            return
        self.ready = count
        if not self._acks and self._rdy is None:
            self._hub.mark(self)
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
        connection.flush()

    # Timers and closing

    def tick(self, now: float) -> None:
        """Look after the connection; log answers that the server refused."""
        connection = self._connection
        if connection is None or not self.live:
            return
        self.horizon = now - self.msg_timeout
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
        self.horizon = float("inf")
        if self._connection is not None:
            self._connection.close()


def _unpack(message: Message) -> None:
    """Restore a compressed body; where that does not work, it stays as it is, with the headers that say so."""
    try:
        message.unpack()
    except (InvalidSetting, ProtocolError) as error:
        logger.warning("a body stays compressed: %s: %r", error, message, extra={"topic": message.topic})
