"""Consumes topics batch by batch: the messages of a batch are in flight until it is completed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final, Self

import anyio

from nsqext.admin import Admin
from nsqext.admin.options import admin_settings
from nsqext.client.consumer.consumer import Consumer
from nsqext.client.consumer.handlers.in_flight import touch_due
from nsqext.client.settings import settings_for
from nsqext.errors import NsqError, PartitionUnavailable
from nsqext.protocol.messages import is_text_id
from nsqext.spark.cluster.portal import readers_loop
from nsqext.spark.read.arrow import RowFormat, to_batches
from nsqext.spark.read.frames import from_messages
from nsqext.sync.loop import BlockingClient
from nsqext.sync.mirror import Method
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from types import TracebackType

    import pyarrow as pa

    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import ConsumerSettings
    from nsqext.protocol.messages import RawMessage
    from nsqext.spark.options import SourceOptions

logger: logging.Logger = logging.getLogger("nsqext.spark")

_clock = time.monotonic

_WAIT = 0.2  # seconds to wait for the first message of a batch
_SETTLED = 0.5  # seconds without a message after which the depth of the channel is requested
_TICK = 0.25


class ChannelBatches:
    """Holds the messages of batches of a channel in flight until they are completed; an async context manager."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._limit = options.max_offsets_per_trigger or options.rdy
        self._received: deque[Message] = deque()
        self._later: list[Message] = []
        self._held: deque[Message] = deque()
        self._number = 0  # of the first held message; offsets refer to it
        self._frozen_at: int | None = None
        self._error: NsqError | None = None
        self._wake = Wakeup()
        own = settings_for(admin_settings(), options.client.reading())
        self._admin = Admin(options.client.lookupd, **{**own, "node_filter": None})
        self._consumer: Consumer
        self._closing = AsyncExitStack()

    def _make_consumer(self) -> Consumer:
        client = self._options.client
        settings: ConsumerSettings = {
            **client.reading(),
            "max_in_flight": 2 * self._limit,  # the next batch is received while Spark processes the current one
            "on_lost": "ignore",
            "decompress": False,
            "block_warning": 0,
        }
        return Consumer(tuple(self._options.topics), self._options.channel or "", client.lookupd, **settings)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._admin.aclose)
            self._consumer = await stack.enter_async_context(self._make_consumer())
            # after the receiving task has ended: it would keep a message that the server delivers again
            stack.callback(self._requeue)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            self._closing = stack.pop_all()
        tasks.start_soon(self._receive)
        tasks.start_soon(self._touch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closing.aclose()

    def _requeue(self) -> None:
        """Requeue unfinished messages: the original NSQ would keep them in flight until their timeout."""
        self._consumer.pause()
        for message in (*self._held, *self._later, *self._received):
            if is_text_id(message.id) and not message.expired:
                message.requeue_now(0.0, backoff=False)
        self._held.clear()
        self._later.clear()
        self._received.clear()

    async def _receive(self) -> None:
        try:
            async for message in self._consumer:
                late = self._frozen_at is not None and message.timestamp > self._frozen_at
                (self._later if late else self._received).append(message)
                self._wake.wake()
        except NsqError as error:
            self._error = error
            self._wake.wake()

    async def _touch(self) -> None:
        while True:
            await anyio.sleep(_TICK)
            touch_due((*self._held, *self._received, *self._later), _clock())

    async def freeze(self) -> None:
        """Exclude messages that are stored from now on, by the clocks of the servers."""
        self._frozen_at = time.time_ns()

    async def take(self, start: int) -> list[Message]:
        """Finish the messages before ``start``, and return the next ones, which are numbered from ``start``.

        A call with the same number returns the same messages.
        """
        await self.finish(start)
        if not self._held:
            self._number = start
            await (self._wait(_WAIT) if self._frozen_at is None else self._wait_for_all())
            while self._received and len(self._held) < self._limit:
                message = self._received.popleft()
                if not message.expired:
                    self._held.append(message)
        if not self._held and self._error is not None:
            raise self._error
        return list(self._held)

    async def _wait_for_all(self) -> None:
        """Wait for a message that is not excluded, or until the channel has no such message.

        A pause without messages is not sufficient: a message may be in flight on a lost consumer until its timeout. Nor
        are later messages, which may be received over other connections.
        """
        until = anyio.current_time() + self._options.read_timeout
        while not self._received and self._error is None:
            await self._wait(_SETTLED)
            is_over = anyio.current_time() >= until
            try:
                count = await unfinished_count(self._admin, self._options.topics, self._options.channel or "")
                left = count - len(self._later)
            except NsqError:
                if is_over and not self._received:
                    raise
                continue
            if left <= 0 or len(self._later) >= 2 * self._limit:
                return
            if is_over and not self._received:
                logger.warning(
                    "the query ends, but the channel %s has %d unfinished messages: other consumers hold them, or they "
                    "are deferred",
                    self._options.channel,
                    left,
                )
                return

    async def _wait(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while not self._received and self._error is None:
                await self._wake.wait()

    async def finish(self, number: int) -> None:
        """Finish all messages before a number; the server delivers those again that are not in flight any more."""
        while self._held and self._number < number:
            self._held.popleft().finish_now()
            self._number += 1


class ChannelReader(BlockingClient[ChannelBatches]):
    """`ChannelBatches` for blocking code."""

    _what = "channel"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(ChannelBatches(options))
        self._enter(self._original, readers_loop.kept())

    freeze: Final = Method(ChannelBatches.freeze)
    take: Final = Method(ChannelBatches.take)
    finish: Final = Method(ChannelBatches.finish)

    def close(self) -> None:
        """Close the connections; unfinished messages are delivered again."""
        self._exit(None, None, None)


def rows_of(options: SourceOptions, messages: Iterable[Message]) -> list[pa.RecordBatch]:
    """Return messages as rows, ordered by partition; their offsets are unknown."""
    rows = RowFormat.of(options)
    by_partition: dict[tuple[str, int], list[RawMessage]] = {}
    for message in messages:
        by_partition.setdefault((message.topic, message.partition), []).append(message)
    return [
        batch
        for (topic, partition), found in by_partition.items()
        for batch in to_batches(from_messages(found), None, topic, partition, rows)
    ]


async def unfinished_count(admin: Admin, topics: Iterable[str], channel: str) -> int:
    """Return the number of unfinished messages of a channel of several topics, including those in flight."""
    count = 0
    for topic in topics:
        stats = await admin.stats(topic, channel)
        for node in stats.unreachable:
            raise PartitionUnavailable("the node does not report its messages", topic=topic, node=str(node))
        count += sum(one.lag for one in stats.channels.values())
    return count
