"""Consume topics batch by batch: messages are in flight until their batch is completed."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Self

import anyio

from nsqext.admin import Admin
from nsqext.admin.options import admin_settings
from nsqext.client.consumer.consumer import Consumer
from nsqext.client.settings import settings_for
from nsqext.errors import NsqError, PartitionUnavailable
from nsqext.spark.cluster.portal import readers_loop
from nsqext.spark.read.arrow import RowFormat, to_batches
from nsqext.spark.read.frames import from_messages
from nsqext.sync.loop import BlockingClient, Method

if TYPE_CHECKING:
    import pyarrow as pa

    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.settings import ConsumerSettings
    from nsqext.protocol.messages import RawMessage
    from nsqext.spark.options import SourceOptions

logger: logging.Logger = logging.getLogger("nsqext.spark")

WAIT: float = 0.2
"""Seconds of waiting for a batch's first message."""
SETTLED: float = 0.5
"""Seconds without a message until the channel's depth is requested."""


class ChannelBatches:
    """Holds the messages of batches in flight; an async context manager."""

    def __init__(self, options: SourceOptions) -> None:
        client, topics, self._channel = options.client, tuple(options.topics), options.channel or ""
        self._options = options
        self._limit = options.max_offsets_per_trigger or options.rdy
        self._later: list[Message] = []
        self._held: deque[Message] = deque()
        self._number = 0  # of the first held message; offsets refer to it
        self._frozen_at: int | None = None
        own: ConsumerSettings = client.keywords("read")
        self._admin = Admin(client.lookupd, **{**settings_for(admin_settings(), own), "node_filter": None})
        settings: ConsumerSettings = {
            **own,
            "max_in_flight": 2 * self._limit,  # the next batch arrives while Spark processes the current batch
            "on_lost": "ignore",
            "decompress": False,
            "block_warning": 0,
        }
        self._consumer = Consumer(topics, self._channel, client.lookupd, **settings)
        self._batches = self._consumer.batches(max_count=self._limit, max_wait=0.0)  # touches their messages

    async def __aenter__(self) -> Self:
        await self._consumer.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._give_back()
        try:
            await self._consumer.aclose()
        finally:
            await self._admin.aclose()

    def _give_back(self) -> None:
        """Requeue the messages of incomplete batches on the original NSQ, where they would wait for their timeout."""
        self._consumer.pause()
        for message in (*self._held, *self._later):
            if message.owner.original and not message.expired:
                message.requeue_now(0.0, backoff=False)
            elif not message.answered:
                message.mark_answered()

    async def freeze(self, moment: int | None = None) -> None:
        """Exclude messages stored from now on, or after a time in nanoseconds since 1970, by the servers' clocks."""
        self._frozen_at = time.time_ns() if moment is None else moment

    async def take(self, start: int) -> list[Message]:
        """Finish the messages before ``start``; return the next messages, the same for each call with ``start``."""
        await self.finish(start)
        if not self._held:
            self._number = start
            self._held += await (self._next(WAIT) if self._frozen_at is None else self._next_frozen(self._frozen_at))
        return list(self._held)

    async def _next(self, seconds: float) -> list[Message]:
        """Return the next messages as soon as they arrive; empty after ``seconds``."""
        with anyio.move_on_after(seconds):
            return list(await anext(self._batches))
        return []

    async def _next_frozen(self, frozen_at: int) -> list[Message]:
        """Return the next messages that are not excluded; empty without such messages in the channel.

        A pause is not sufficient: a message may be in flight on a lost consumer. Nor are later messages, which may
        arrive over other connections.
        """
        until = anyio.current_time() + self._options.read_timeout
        while True:
            found = await self._next(SETTLED)
            self._later += [message for message in found if message.timestamp > frozen_at]
            if wanted := [message for message in found if message.timestamp <= frozen_at]:
                return wanted
            is_over = anyio.current_time() >= until
            try:
                count = await unfinished_count(self._admin, self._options.topics, self._channel)
            except NsqError:
                if is_over:
                    raise
                continue
            left = count - len(self._later)
            if left > 0 and is_over:
                logger.warning(
                    "the query ends, but the channel %s has %d unfinished messages: other consumers hold them, or they "
                    "are deferred",
                    self._channel,
                    left,
                )
            if left <= 0 or is_over or len(self._later) >= 2 * self._limit:  # or nothing else can be received
                return []

    async def finish(self, number: int) -> None:
        """Finish all messages before a number; the server redelivers expired messages."""
        while self._held and self._number < number:
            self._held.popleft().finish_now()
            self._number += 1


class ChannelReader(BlockingClient[ChannelBatches]):
    _what = "channel"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(ChannelBatches(options))
        self._enter(readers_loop.kept())

    freeze: Final = Method(ChannelBatches.freeze)
    take: Final = Method(ChannelBatches.take)
    finish: Final = Method(ChannelBatches.finish)

    def close(self) -> None:
        self.__exit__(None, None, None)


def rows_of(options: SourceOptions, messages: Iterable[Message]) -> list[pa.RecordBatch]:
    """Return messages as rows, ordered by partition, with unknown offsets."""
    rows = RowFormat.of(options)
    by_partition: dict[tuple[str, int | None], list[RawMessage]] = {}
    for message in messages:
        by_partition.setdefault((message.topic, message.partition), []).append(message)
    return [
        batch
        for (topic, partition), found in by_partition.items()
        for batch in to_batches(from_messages(found), None, topic, partition, rows)
    ]


async def unfinished_count(admin: Admin, topics: Iterable[str], channel: str) -> int:
    """Return the number of a channel's unfinished messages over several topics."""
    count = 0
    for topic in topics:
        stats = await admin.stats(topic, channel)
        for node in stats.unreachable:
            raise PartitionUnavailable("the node does not report its messages", topic=topic, node=str(node))
        for partition in stats.missing or ():
            raise PartitionUnavailable("no node reports its messages", topic=topic, partition=partition)
        count += sum(one.lag for one in stats.channels.values())
    return count
