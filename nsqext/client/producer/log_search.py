"""Search the end of a partition's log for messages by their trace ids, on an ephemeral channel of its own."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.position import Position
from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader
from nsqext.client.consumer.subscriptions.subscribe_request import SubscribeRequest
from nsqext.errors import ConnectionLost, DataLoss, NsqError, PartitionUnavailable
from nsqext.protocol.client.commands import fin
from nsqext.protocol.messages import RawMessage
from nsqext.types import Receipt
from nsqext.waits import Doubling

if TYPE_CHECKING:
    from collections.abc import Collection

    from nsqext.lookup.metadata import MetadataCache
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.producer")

_clock = time.monotonic

_GRACE = 0.5
"""Seconds from a leader's response until it has executed or dropped commands of connections that had ended before."""
_TICK = 0.25
_STALL = 2.0
"""Seconds without progress after which the channel is opened again: a server may lose the move of a channel."""
_READY = 2000
_CONSUMER = ConsumerOptions(queue_position=True, msg_timeout=60.0, output_buffer_timeout=0.01)


class LogSearch:
    """Reads the log of a partition from a record to its end.

    Each connection reads the last known record once more: another one in its place means that the topic was deleted and
    created again, and the new log is read from its begin.
    """

    def __init__(
        self,
        metadata: MetadataCache,
        connection: ConnectionOptions,
        topic: str,
        partition: int,
        since: Receipt | None,
    ) -> None:
        self.found: dict[int, Receipt] = {}  # receipts of the messages with trace id, by trace id
        self.node: str = ""  # the leader that responded last; empty before
        self.error: NsqError | None = None  # why the last pass ended early; None where none did
        self._metadata = metadata
        self._options = evolve(_CONSUMER, connection=connection)
        self._topic = topic
        self._partition = partition
        self._last = since  # an acknowledged record to begin with; None for the first retained one
        self._checked = False
        self._replaced = False
        self._next = 0
        self._end = 0
        self._wanted: set[int] = set()
        self._progress = 0.0
        self._done = anyio.Event()
        self._raw = RawMessage()

    async def run(self, wanted: Collection[int]) -> None:
        """Read until all wanted trace ids are found, or the end is reached; raises DataLoss.

        Errors of servers are retried without limit; the caller cancels. Nothing is added to ``wanted`` while
        connections that sent its messages are open.
        """
        self._wanted = set(wanted)
        await self._read_to_end()
        if self._wanted:
            await anyio.sleep(_GRACE)
            await self._read_to_end()
        if self._wanted and self._replaced:
            raise DataLoss("the log was replaced; the records that it had were removed")

    def _begin_again(self) -> None:
        self._last, self._replaced = None, True

    async def _read_to_end(self) -> None:
        pauses = Doubling(0.05, 0.5)
        view: PartitionMap | None = None
        while True:
            try:
                view = await self._metadata.resolve(self._topic, "r")
                await self._pass(view)
                return
            except DataLoss:
                raise
            except NsqError as error:
                self.error = error.at(topic=self._topic, partition=self._partition)
                logger.debug("the log of %s/%d is searched again: %s", self._topic, self._partition, error)
            await anyio.sleep(pauses.next())
            await self._metadata.refresh(self._topic, "r", view, self._partition)

    async def _pass(self, view: PartitionMap) -> None:
        """Read with one connection; return at the end. Raises DataLoss."""
        leader = view.leaders.get(self._partition)
        http = None if leader is None else view.http.get(leader)
        if leader is None or http is None:
            raise PartitionUnavailable("lookup returned no leader with an HTTP address")
        start, self._end, _ = await self._metadata.channels.log_bounds(http, self._topic, self._partition)
        self.node = str(leader)
        self._next = self._begin(start)
        if self._next >= self._end:
            return
        channel = f"nsqext_settle_{os.urandom(8).hex()}#ephemeral"
        request = SubscribeRequest(self._topic, channel, self._partition, leader, view.meta, None, self._options)
        reader = await PartitionReader.open(request)
        try:
            position = str(Position.offset(self._next))
            await self._metadata.channels.move(http, self._topic, self._partition, channel, position)
            await self._read(reader, http)
        finally:
            reader.end()

    def _begin(self, start: int) -> int:
        """Return the offset to begin with at a leader, whose log begins at ``start``; the end if nothing is new."""
        last = self._last
        if last is None or last.offset is None or last.size is None:
            return start
        known = last.offset + last.size
        if self._end < known:
            self._begin_again()
            return start
        if start > known:
            raise DataLoss(f"the log begins at byte {start}; its records from byte {known} on were removed")
        if self._end == known and self._checked:
            return known
        return max(start, last.offset)

    async def _read(self, reader: PartitionReader, http: Address) -> None:
        ended: list[NsqError] = []
        self._done = anyio.Event()
        self._progress = _clock()

        async def read() -> None:
            try:
                await reader.read(lambda frames: self._deliver(reader, frames))
            except NsqError as error:
                ended.append(error)  # a task group would wrap it
            self._done.set()

        reader.set_ready(min(_READY, reader.max_ready))
        reader.flush()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            try:
                await self._watch(reader, http)
            except NsqError as error:
                ended.append(error)
            tasks.cancel_scope.cancel()
        if ended and not self._complete:
            raise ended[0]

    @property
    def _complete(self) -> bool:
        return not self._wanted or self._next >= self._end

    async def _watch(self, reader: PartitionReader, http: Address) -> None:
        """Answer heartbeats until the end is reached; follow an end that moves back, where a write was undone."""
        while not self._done.is_set():
            with anyio.move_on_after(_TICK):
                await self._done.wait()
                return
            reader.tick()
            if _clock() - self._progress > _STALL:
                raise ConnectionLost(f"no record at byte {self._next} was received for {_STALL:g} s")
            self._end = min(
                self._end, (await self._metadata.channels.log_bounds(http, self._topic, self._partition)).end
            )
            if self._end < self._next:
                raise _replaced(f"it ends at byte {self._end}")
            if self._complete:
                return

    def _deliver(self, reader: PartitionReader, frames: list[bytes]) -> None:
        message = self._raw
        try:
            for frame in frames:
                reader.decode(message, frame)
                reader.pending.append(fin(message.id))
                self._take(message)
        except NsqError as error:
            reader.fail(error)
            return
        if self._complete:
            self._done.set()
        else:
            reader.flush()

    def _take(self, message: RawMessage) -> None:
        trace, last = message.trace_id, self._last
        record = Receipt(
            self._topic, self._partition, self.node, message.internal_id, trace, message.offset, message.size
        )
        if message.offset == self._next:  # a server may send records of the old position before it moves a channel
            if last is not None and last.offset == record.offset and last[3:5] != record[3:5]:
                self._begin_again()
                raise _replaced(f"another record is at byte {message.offset}")
            self._last, self._checked = record, True
            self._next += message.size
            self._progress = _clock()
        if trace in self._wanted:
            self._wanted.discard(trace)
            self.found[trace] = record


def _replaced(reason: str) -> NsqError:
    return PartitionUnavailable(f"the log was replaced while it was searched: {reason}")
