"""Topics as a stream that is consumed: `spark.readStream` with ``readMode=channel``.

For servers where ranges cannot be read again: the original NSQ, and topics whose channels have to be registered. The
process that Spark asks for batches holds their messages in flight, and finishes them when the batch is done. What was
not finished when it ends comes again, in another batch: at least once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import anyio
import pyarrow as pa
from attrs import define
from pyspark.sql.datasource import SimpleDataSourceStreamReader
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from nsqext.client.consumer.consumer import Consumer
from nsqext.client.consumer.handlers.auto_touch import touch_due
from nsqext.client.consumer.options import ConsumerOptions, DeliveryOptions
from nsqext.errors import InvalidInput, NsqError
from nsqext.protocol.messages import is_text_id
from nsqext.spark.cluster import portal as bridge
from nsqext.spark.read.arrow import to_batches
from nsqext.spark.read.channel_lag import Backlog
from nsqext.spark.read.reassembly import Block
from nsqext.sync.loop import Opened

if TYPE_CHECKING:
    from types import TracebackType

    from nsqext.client.consumer.message import Message
    from nsqext.protocol.messages import RawMessage
    from nsqext.spark.options import SourceOptions

__all__ = ("Holder", "NsqChannelReader")

logger: logging.Logger = logging.getLogger("nsqext.spark")

_VERSION = 1
_WAIT = 0.2
"""Seconds that a batch waits for its first message."""
_SETTLED = 0.5
"""Seconds without a message after which the servers are asked whether the channel is read to its end."""
_TICK = 0.25
_OFFSET = 3  # the column whose value only ranges know


@define(eq=False)
class _Held:
    """A message of a batch, with the number that the offsets count it by."""

    number: int
    message: Message


class Holder:
    """Consumes topics and holds the messages of batches in flight, until they are done; an async context manager.

    Args:
        options: what is consumed.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._most = options.max_offsets_per_trigger or options.rdy
        self._arrived: deque[Message] = deque()
        self._later: list[Message] = []
        self._held: deque[_Held] = deque()
        self._until: int | None = None
        self._error: NsqError | None = None
        self._wake = anyio.Event()
        self._backlog = Backlog(options.connection, options.topics, options.channel or "")
        self._closing = AsyncExitStack()

    def _consumer(self, topic: str) -> Consumer:
        connection = self._options.connection
        return Consumer(
            topic,
            self._options.channel or "",
            lookupd=connection.lookupd,
            # one batch is on its way while the other one is worked on
            max_in_flight=2 * self._most,
            options=ConsumerOptions(
                connection=connection.transport(),
                lookup=connection.lookup(),
                delivery=DeliveryOptions(on_lost="ignore", decompress=False, block_warning=0),
            ),
        )

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            consumers = [await stack.enter_async_context(self._consumer(topic)) for topic in self._options.topics]
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            stack.push_async_callback(self._backlog.aclose)
            self._closing = stack.pop_all()
        for consumer in consumers:
            tasks.start_soon(self._take_in, consumer)
        tasks.start_soon(self._touch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()
        await self._closing.aclose()

    def _give_back(self) -> None:
        """Requeue what was not done: the original NSQ would keep it until its timeout has passed."""
        for message in (*(entry.message for entry in self._held), *self._later, *self._arrived):
            if is_text_id(message.id) and not message.expired:
                message.requeue_now(0.0, backoff=False)
        self._held.clear()
        self._later.clear()
        self._arrived.clear()

    async def _take_in(self, consumer: Consumer) -> None:
        try:
            async for message in consumer:
                late = self._until is not None and message.timestamp > self._until
                (self._later if late else self._arrived).append(message)
                self._wake.set()
        except NsqError as error:
            self._error = error
            self._wake.set()

    async def _touch(self) -> None:
        while True:
            await anyio.sleep(_TICK)
            held = [entry.message for entry in self._held]
            touch_due((*held, *self._arrived, *self._later), time.monotonic())

    async def freeze(self) -> None:
        """Give out nothing any more that is stored from now on, by the clocks of the servers."""
        self._until = time.time_ns()

    async def take(self, start: int) -> list[Message]:
        """Finish everything before a number, and return the next messages, which are counted from it on.

        The same number again gives the same messages again.

        Args:
            start: the number.

        Raises:
            NsqError: nothing further will come.
        """
        await self.done(start)
        if not self._held:
            await (self._wait(_WAIT) if self._until is None else self._wait_for_all())
            while self._arrived and len(self._held) < self._most:
                message = self._arrived.popleft()
                if not message.expired:
                    self._held.append(_Held(start + len(self._held), message))
        if not self._held and self._error is not None:
            raise self._error
        return [entry.message for entry in self._held]

    async def _wait_for_all(self) -> None:
        """Wait for a message that is to be given out, unless there is none.

        Silence alone does not tell: a message may be in flight at a consumer that has died, until its timeout. Nor do
        messages that came later, which come over other connections.
        """
        with anyio.move_on_after(self._options.read_timeout):
            while not self._arrived and self._error is None:
                await self._wait(_SETTLED)
                left = await self._backlog.count()
                if left is None or left <= len(self._later) or len(self._later) >= 2 * self._most:
                    return

    async def _wait(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            while not self._arrived and self._error is None:
                self._wake = anyio.Event()
                await self._wake.wait()

    async def done(self, number: int) -> None:
        """Finish all messages before a number; those that are no longer ours come again."""
        while self._held and self._held[0].number < number:
            self._held.popleft().message.finish_now()


class _Channel(Opened):
    """A `Holder` for blocking code."""

    _what = "channel"

    def __init__(self, options: SourceOptions) -> None:
        super().__init__()
        self._holder = Holder(options)
        self._enter(self._holder, bridge.portal())

    def freeze(self) -> None:
        self._run(self._holder.freeze)

    def take(self, start: int) -> list[Message]:
        return self._run(self._holder.take, start)

    def done(self, number: int) -> None:
        self._run(self._holder.done, number)

    def close(self) -> None:
        self._exit(None, None, None)


class NsqChannelReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    """Consumes topics batch by batch, at least once.

    Args:
        options: what is consumed.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._channel: _Channel | None = None
        self._ends = False
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_channel": None, "_ends": False, "_ended": False}

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins: offsets only count messages."""
        return _dump(0)

    def prepareForTriggerAvailableNow(self) -> None:
        """Consume nothing that is published from now on."""
        self._ends = True
        self._opened().freeze()

    def read(self, start: Mapping[str, Any]) -> tuple[Iterator[pa.RecordBatch], dict[str, Any]]:
        """Return the next batch and where it ends; Spark only asks when the batch before is done."""
        number = _load(start)
        messages = [] if self._ended else self._opened().take(number)
        if self._ends and not messages:
            # whatever comes from now on is for the next query, which may begin before this process has ended
            self._ended = True
            self.stop()
        return iter(self._rows(messages)), _dump(number + len(messages))

    def _rows(self, messages: list[Message]) -> list[pa.RecordBatch]:
        options = self._options
        places: dict[tuple[str, int], list[RawMessage]] = {}
        for message in messages:
            places.setdefault((message.topic, message.partition), []).append(message)
        batches: list[pa.RecordBatch] = []
        for (topic, partition), found in places.items():
            batches += to_batches(
                Block(0, found),
                topic,
                partition,
                options.include_headers,
                decompress=options.connection.decompress,
            )
        return [_without_offset(batch) for batch in batches]

    def readBetweenOffsets(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Return nothing: the messages of a batch that was not done come again in one of the next."""
        logger.warning(
            "the batch from %d to %d was not done when the query ended: its messages come again",
            _load(start),
            _load(end),
        )
        return iter(())

    def commit(self, end: Mapping[str, Any]) -> None:
        """Finish the messages of a batch that is done."""
        if self._channel is not None:
            self._channel.done(_load(end))

    def stop(self) -> None:
        """Close the connections; what was not finished comes again."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()

    def _opened(self) -> _Channel:
        if self._channel is None:
            self._channel = _Channel(self._options)
        return self._channel


def _without_offset(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = batch.columns
    columns[_OFFSET] = pa.nulls(batch.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _dump(number: int) -> dict[str, Any]:
    return {"v": _VERSION, "consumed": number}


def _load(offset: Mapping[str, Any]) -> int:
    number = offset.get("consumed")
    if offset.get("v") != _VERSION or not isinstance(number, int):
        raise InvalidInput(
            f"{offset!r} is no offset of a consumed channel",
            hint="a checkpoint belongs to one readMode: go back to it, or use a new checkpoint",
        )
    return number
