"""A consumer's subscription to a partition: receives messages, and sends their answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from nsqext.client.consumer.message import ACCEPTED_DELAY, MAX_DELAY, InFlightCount, KeySharing, Message
from nsqext.client.consumer.subscriptions.backlog import Backlog
from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader
from nsqext.client.events import tracing
from nsqext.errors import ConnectionLost, MessageNotInFlight, NsqError, ProtocolError
from nsqext.errors.server import TouchFailed
from nsqext.protocol.client.commands import req, touch
from nsqext.protocol.messages import COMPRESS_HEADER, DUE_HEADER, decode_into

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.backoff import Backoff
    from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
    from nsqext.client.consumer.subscriptions.order_check import OrderCheck
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
    from nsqext.client.consumer.unpacking import UnpackBudget
    from nsqext.protocol.frames import MessageData
    from nsqext.protocol.identify import Negotiated
    from nsqext.transport.connection import Connection

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_MANY = 750  # answers that are sent before the end of the turn of the event loop
_SPARE_COUNTS = 16  # counts of answered messages kept beyond twice the messages in flight
_COMPRESSED = COMPRESS_HEADER.encode()
_DELAYED = DUE_HEADER.encode()


class SubscriptionMonitor(Protocol):
    """Receives what a subscription reports, messages excepted."""

    early: EarlyMessages | None  #: None before the first message that is not due
    idle: bool  #: it needs notice of the next read
    unrecorded: dict[Subscription, None]  #: subscriptions with reads that were not reported
    on_time_until: float  #: messages read before this time arrived when they were read

    def unpacking(self) -> UnpackBudget:
        """Return the bound of unpacked bytes."""

    def early_messages(self) -> EarlyMessages:
        """Create and return ``early``."""

    @property
    def share(self) -> int:
        """Messages that each connection may have in flight if all receive equally; 2 or more."""

    def received(self, subscription: Subscription) -> None:
        """Record a read whose messages were queued, while this is idle, or the subscription is watched."""

    def earliest_receipt(self, now: float) -> float:
        """Return since when bytes read at a time may have been in the socket."""

    def make_room(self, subscription: Subscription) -> None:
        """Raise the RDY count of a subscription: its messages wait in flight until they are due."""

    def needs_flush(self, subscription: Subscription, *, answer: bool = False) -> bool:
        """Record that commands are pending; return whether an ``answer`` is sent at once instead of with others."""

    def rebalance(self) -> None:
        """Distribute RDY again: the state of a backoff changed."""


class Subscription(PartitionReader):
    """A subscription to a partition during a connection; owns the messages received over it."""

    def __init__(
        self,
        request: SubscribeRequest,
        connection: Connection,
        negotiated: Negotiated,
        *,
        deliver: Callable[[list[Message]], None],
        monitor: SubscriptionMonitor,
        backoff: Backoff,
    ) -> None:
        super().__init__(request, connection, negotiated)
        connection.protocol.split_large()
        self.key_sharing: KeySharing = request.key_sharing
        self.topic: str = request.topic
        self.partition: int | None = request.partition
        self.original: bool = self.partition is None and not negotiated.redesigned
        self.in_order: bool = request.ordered
        self.backoff: Backoff = backoff  #: of the consumer, or of this connection
        self.in_flight: int = 0  #: messages received, neither answered nor timed out
        self.received: int = 0
        self.received_bytes: int = 0
        self.received_at: float = _clock()  #: time of the last read; initially of the opening
        self._opened_at = self.received_at
        self.waited: float = 0.0  #: seconds without a message or an answer before the last read
        self._backlog = Backlog()
        self._published = 0  # when the last message was published, in nanoseconds; 0 if it was delivered before
        self._active_at: float = self.received_at  # time of the last read or answer
        self.watched: bool = True  #: each read is reported at once
        self.requeued: int = 0
        self.timed_out: int = 0
        self.live: bool = True
        self.stopped: bool = False  #: this client ended it, which is no error
        self.horizon: float = float("-inf")
        self.ignore_lost: bool = request.options.delivery.on_lost == "ignore"
        self.number: int = 1
        self.moved: bool = False
        self.taking_over: bool = False
        #: where the channel was moved to; earlier messages are finished undelivered
        self.start: Position | None = None
        self._deliver = deliver  # called with the messages of each read
        self._monitor = monitor
        self._order: OrderCheck | None = None
        if request.ordered:
            from nsqext.client.consumer.subscriptions.order_check import OrderCheck

            self._order = OrderCheck(request.options.failure.report_attempts)
        self._recorded = (0, 0)  # last result of `take_unrecorded`
        # whether messages that are due soon stay in flight; on a key_failover channel, later messages of their keys
        # would wait
        self._keeps_early = self.partition is not None and self.key_sharing is not KeySharing.SERVER
        self._counts: deque[InFlightCount] = deque()  # of the messages in flight, oldest first
        self._most_pending = _MANY
        # a killed nsqd of the original NSQ reads queued messages again: a message in flight twice is answered once, and
        # stays in the count that nsqd compares with RDY
        self._overcounted = False

    def skip_to(self, position: Position) -> None:
        """Skip messages that the server had read before it moved the channel (captured: channel_setoffset)."""
        self.start = position
        self.moved = True

    async def receive(self) -> None:
        """Receive messages until the connection ends; raises its error."""
        try:
            await self.read(self._receive)
        finally:
            self.end()

    async def receive_beside(self, work: Callable[[TaskGroup], Coroutine[Any, Any, None]]) -> None:
        """Receive messages beside other work, which is cancelled when the connection ends; raises its error."""
        reason: NsqError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, tasks)
            try:
                await self.receive()
            except NsqError as error:
                reason = error  # the task group would wrap it
            tasks.cancel_scope.cancel()
        if reason is not None:
            raise reason

    @property
    def busy(self) -> bool:
        """Whether `tick` is due several times a second."""
        return self.in_flight > 0 or self._connection.busy

    # Receiving

    def _receive(self, frames: list[MessageData]) -> None:
        if not self.live:
            return  # the server redelivers them
        now = _clock()
        self._expire(now)
        monitor = self._monitor
        extend, detail, order, request = self.extend, self.detail, self._order, self.request
        unpack = extend and request.options.delivery.decompress
        messages: list[Message] = []
        delayed = keep = False
        failure: NsqError | None = None
        on_time = now < monitor.on_time_until
        counted = InFlightCount(now if on_time else max(monitor.earliest_receipt(now), self._opened_at))
        try:
            for data in frames:
                message = Message(self, counted)
                decode_into(message, data, extend, detail)
                if order is not None and not order.accepts(message):
                    continue
                if unpack and message.header.find(_COMPRESSED) >= 0:
                    message.budget = monitor.unpacking()
                if extend and message.header.find(_DELAYED) >= 0:
                    delayed = True
                messages.append(message)
        except NsqError as error:
            failure = error
        count = len(messages)
        counted.count = count
        self._count(counted)
        self.received += count
        self.received_bytes += sum(map(len, frames))
        self.received_at = now
        self.waited, self._active_at = now - self._active_at, now
        if messages:
            newest = messages[-1]
            # the timestamp of a message that is delivered again is not the time of its publish
            self._published = newest.timestamp if newest.attempts == 1 else 0
        if self.start is not None:
            messages = self._skip(self.start, messages)
        if (log := tracing.log) is not None and log.wants(self.topic):
            log.consumed(messages, request.channel, self._connection.local_address)
        early = monitor.early
        if delayed or (early is not None and early.postponed):
            keep = self._keeps_early and not self.backoff.level and 2 * self.in_flight <= monitor.share
            messages = monitor.early_messages().without_early(messages, self.defer, keep=keep)
            if self.key_sharing is KeySharing.SERVER:
                self.flush()  # before a higher RDY, which would bring later messages of the key
        self._deliver(messages)
        if failure is not None:
            self.fail(failure)
            return
        if self.in_flight > self.most_in_flight:
            self._flooded()
        if self.watched or monitor.idle:
            monitor.received(self)
        else:
            monitor.unrecorded[self] = None
        if keep and not messages:
            monitor.make_room(self)

    def _flooded(self) -> None:
        self.fail(
            ProtocolError(
                f"the server sent {self.in_flight} messages that were not answered, with RDY {self.ready}; "
                f"RDY was never above {self._largest}",
                node=self.node,
                hint="the server ignores RDY; the connection is closed to bound memory",
            )
        )

    def take_unrecorded(self) -> tuple[int, int, float, float]:
        """Return messages and bytes received since the last call, and `Backlog.excess` and `Backlog.width` of these."""
        (before, size), self._recorded = self._recorded, (self.received, self.received_bytes)
        count, size = self.received - before, self.received_bytes - size
        if not (count and self._published and self.max_ready > 1):
            return count, size, inf, inf
        published = self._published / 1e9
        excess = self._backlog.excess(published, self.received_at)
        return count, size, excess, self._backlog.width(published, count, excess)

    def _skip(self, start: Position, messages: list[Message]) -> list[Message]:
        for number, message in enumerate(messages):
            if start.reached_by(message):
                self.start = None
                return messages[number:]
            message.finish_now()
        return []

    def _count(self, counted: InFlightCount) -> None:
        self.in_flight += counted.count
        counts = self._counts
        counts.append(counted)
        if len(counts) > 2 * self.in_flight + _SPARE_COUNTS:
            self._counts = deque(counted for counted in counts if counted.count)

    def _expire(self, now: float) -> None:
        """Advance the horizon; count timed out messages as not in flight."""
        self.horizon = horizon = now - self.msg_timeout
        counts = self._counts
        while counts and counts[0].time < horizon:
            count = counts.popleft().count
            self.in_flight -= count
            self.timed_out += count

    # Answers

    def flush(self) -> None:
        if self.pending:
            self._active_at = _clock()
        super().flush()

    def _answer(self, message: Message, command: bytes) -> None:
        """Send an answer with the next flush; raises MessageNotInFlight."""
        if message.received < self.horizon:
            raise self._lost(message)
        if not self.pending:
            self._begin_answers()  # first: refuses calls in another event loop
        message.counted.count -= 1
        self.in_flight -= 1
        self.pending.append(command)
        if len(self.pending) > self._most_pending:
            self.flush()

    def _begin_answers(self) -> None:
        """Decide whether to send answers at once, or together at the end of the turn of the event loop."""
        at_once = self._monitor.needs_flush(self, answer=True)
        self._most_pending = 0 if at_once else _MANY

    def finish(self, message: Message) -> None:
        # as `_answer` and `commands.fin`, without two calls, which would be 5 % of a message's bytecode
        if message.received < self.horizon:
            raise self._lost(message)
        pending = self.pending
        if not pending:
            self._begin_answers()
        message.counted.count -= 1
        self.in_flight -= 1
        pending.append(b"FIN %b\n" % message.id)
        if self.backoff.level and self.backoff.succeeded(_clock()):
            self._monitor.rebalance()
        if len(pending) > self._most_pending:
            self.flush()

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        if backoff is not None:
            self.record_outcome(backoff)
        if delay > ACCEPTED_DELAY or self._monitor.early is not None:
            self._monitor.early_messages().postpone(message, delay)
        self.defer(message, min(delay, MAX_DELAY))

    def defer(self, message: Message, delay: float) -> None:
        """Send REQ with the next flush, without effect on the backoff; raises MessageNotInFlight."""
        self._answer(message, req(message.id, round(delay * 1000)))
        self.requeued += 1

    def record_outcome(self, failed: bool) -> None:
        now = _clock()
        if self.backoff.failed(now) if failed else self.backoff.passed(now):
            self._monitor.rebalance()

    def touch(self, message: Message) -> None:
        self._answer(message, touch(message.id))
        message.counted = counted = InFlightCount(_clock(), 1)
        message.received = counted.time
        self._count(counted)

    def _lost(self, message: Message) -> MessageNotInFlight:
        reason = "its timeout has passed" if self.live else "its connection was closed"
        return MessageNotInFlight(
            f"the message {message.id.hex()} cannot be answered: {reason}",
            topic=self.topic,
            partition=self.partition,
            node=self.node,
            hint="it will be delivered again",
        )

    def expired(self, message: Message) -> bool:
        now = _clock()
        if message.received < max(self.horizon, now - self.msg_timeout):
            return True
        # the server may have ended the connection, and given its keys to another consumer
        return self.key_sharing is KeySharing.TAGS and self._may_be_ended(now)

    def _may_be_ended(self, now: float) -> bool:
        """Return whether nothing was received for nearly three heartbeat intervals.

        Then the server ends a connection (captured: heartbeat).
        """
        interval = self._connection.heartbeat_interval
        return interval > 0 and now - self._connection.received_at > 2.5 * interval

    def reset(self, reason: str) -> None:
        if self.live:
            self._send_answers()
            self.fail(ConnectionLost(f"ended by the client: {reason}", topic=self.topic, node=self.node))

    def set_ready(self, count: int) -> bool:
        pending = self.has_pending
        changed = self.live and super().set_ready(count)
        if changed and not pending:
            self._monitor.needs_flush(self)
        return changed

    def _send_answers(self) -> None:
        """Send pending answers before the connection is closed, without a RDY that would request messages."""
        if self._connection.usable:
            self._rdy = None
            self.flush()

    # Timers and closing

    def tick(self) -> None:
        self._expire(_clock())
        for notice in self._connection.protocol.notices:
            logger.warning(
                "server rejected FIN, REQ or TOUCH, message not in flight: %s",
                notice,
                extra={"topic": self.topic, "partition": self.partition, "node": self.node},
            )
            self._overcounted |= self.partition is None and not isinstance(notice, TouchFailed)
        super().tick()
        if self._overcounted and not self.in_flight:
            self.reset("nsqd may count more messages in flight than there are")

    @property
    def upgradable(self) -> bool:
        """Whether it stands still, without notice, when its topic gets extend support."""
        return self.partition is not None and not self.request.meta.extend_support

    async def stop(self) -> None:
        self.stopped = True
        await super().stop()

    def end(self) -> None:
        self._send_answers()
        self.live = False
        self.horizon = inf
        super().end()
