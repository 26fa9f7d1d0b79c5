"""Reads one range of one partition: every message of it, each once, in order, or an error; never less.

The reader has a scratch channel of its own at the leader, so that any number of readers may read the same range, at the
same time or again. Where a connection breaks or the leader changes, it goes on with a new scratch channel at the first
message that is missing.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

import anyio

from nsqext.client.tasks import OrderedTasks
from nsqext.errors import (
    ConnectionLost,
    DataLoss,
    InvalidState,
    NsqError,
    PartitionUnavailable,
    ProtocolError,
    RangeIncomplete,
    TopicNotFound,
)
from nsqext.protocol.client.commands import rdy
from nsqext.protocol.messages import RawMessage, decode_into
from nsqext.spark.cluster.admin import Admin
from nsqext.spark.cluster.ephemeral_channel import open_scratch, scratch_name
from nsqext.spark.read.reassembly import Block, Blocks, Reassembler

if TYPE_CHECKING:
    from nsqext.spark.cluster.client_config import Access
    from nsqext.spark.cluster.node_http import Leader
    from nsqext.spark.read.offsets import Range
    from nsqext.transport.connection import Connection

__all__ = ("Block", "RangeReader")

_clock = time.monotonic
_TICK = 0.25
_STALL = 5.0
"""Seconds without a message after which a connection is given up: everything in a range is there already."""
_PATIENCE = 2.0
"""Seconds that a channel has to get to its place."""
_READ_SIZE = 524288
_BLOCK_BYTES = 4 << 20
_AHEAD = 1
"""Blocks that wait while another one is worked on."""
_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5


class RangeReader:
    """Reads a range; use it with ``async with``, and iterate over it once.

    Reading goes on while a block is worked on, until one more is complete; then the server is told to wait.
    Cancellation at any time closes the connection, and the scratch channel goes with it.

    Args:
        access: how the servers are reached.
        found: the range.
        timeout: seconds within which the next message has to come, leader changes included; the access's by default.
        rdy: messages in flight.
        block_rows: messages of a block.
        channel: what the name of the scratch channel begins with.

    Attributes:
        range: the range.
    """

    def __init__(
        self,
        access: Access,
        found: Range,
        *,
        timeout: float | None = None,
        rdy: int = 1000,
        block_rows: int = 2000,
        channel: str | None = None,
    ) -> None:
        self.range: Range = found
        self._timeout = access.timeout if timeout is None else timeout
        self._admin = Admin(access)
        self._rdy = rdy
        self._prefix = channel
        self._placer = Reassembler(found.start, found.end, 2 * rdy)
        self._blocks = Blocks(found.start, block_rows, _BLOCK_BYTES, _AHEAD)
        self._tasks: OrderedTasks | None = None
        self._connection: Connection | None = None
        self._extend = False
        self._window = 1
        self._paused = False
        self._ended = False
        self._failure: NsqError | None = None
        self._came = anyio.Event()
        self._progress = 0.0

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise InvalidState("a range reader is used once")
        self._tasks = OrderedTasks()
        await self._tasks.enter()
        self._tasks.group.start_soon(self._run)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._tasks is not None:
            await self._tasks.leave(error)

    async def __aiter__(self) -> AsyncIterator[Block]:
        while (block := await self.next_block()) is not None:
            yield block

    async def next_block(self) -> Block | None:
        """Return the next block; None behind the last one.

        Raises:
            DataLoss: messages of the range are not kept any more.
            RangeIncomplete: a message did not come in time.
            NsqError: what another try would not change.
            InvalidState: the reader is not open.
        """
        if self._tasks is None:
            raise InvalidState("the range reader is not open", hint="use it inside 'async with'")
        while (block := self._blocks.pop()) is None:
            if self._failure is not None:
                raise self._failure
            if self._placer.done:
                return None
            if self._ended:
                raise InvalidState("the range reader is closed")
            self._came = anyio.Event()
            await self._came.wait()
        self._resume()
        return block

    # Connections

    async def _run(self) -> None:
        self._progress = _clock()
        errors: list[NsqError] = []
        try:
            async with self._admin:
                while not self._placer.done:
                    before = self._placer.count
                    try:
                        await self._read_on()
                    except NsqError as error:
                        errors = [*errors, error] if self._placer.count == before else [error]
                        self._judge(errors)
                        await anyio.sleep(min(_FIRST_PAUSE * len(errors), _LAST_PAUSE))
        except NsqError as error:
            self._failure = error
        finally:
            self._ended = True
            self._came.set()

    def _judge(self, errors: list[NsqError]) -> None:
        """Raise where another try makes no sense, or no more time is left."""
        last = errors[-1]
        unknown = isinstance(last, TopicNotFound) and len(errors) == 1 and self._placer.offset is None
        if unknown or not (last.retryable or isinstance(last, (ConnectionLost, ProtocolError))):
            raise last
        if _clock() - self._progress <= self._timeout:
            return
        failure = RangeIncomplete(
            f"message {self._placer.count} of the range {self.range.start}..{self.range.end} did not come within "
            f"{self._timeout:g} s: {last}",
            topic=self.range.topic,
            partition=self.range.partition,
            node=last.node,
            hint="is there a leader, and does the range end where the partition does?",
        )
        failure.attempts = tuple(errors[:-1])
        raise failure from last

    async def _read_on(self) -> None:
        """Read with one connection, until it ends or the range does."""
        topic, partition = self.range.topic, self.range.partition
        leader, meta = await self._admin.leader(topic, partition)
        channel = scratch_name(self._prefix)
        try:
            connection, granted = await open_scratch(self._admin.options, leader, topic, partition, meta, channel)
            try:
                await self._move(leader, channel)
                self._connection, self._extend = connection, meta.extend_support
                # an ordered channel sends one after the other, and its first message twice to those who ask for more
                # (captured: sub_ordered_first_reset_duplicate)
                self._window = 1 if meta.ordered else min(self._rdy, granted.max_rdy_count)
                await self._read(connection)
            finally:
                self._connection = None
                connection.close()
        except NsqError as error:
            if not self._placer.done:
                self._admin.distrust(topic, partition, leader)
                raise error.at(topic=topic, partition=partition, node=str(leader.tcp)) from error.__cause__

    async def _move(self, leader: Leader, channel: str) -> None:
        """Put the scratch channel to the first missing message, and learn where that begins."""
        topic, partition, count = self.range.topic, self.range.partition, self._placer.count
        await self._check_kept(leader)
        await self._admin.nodes.move(leader, topic, partition, channel, count)
        patience = min(_PATIENCE, self._timeout)
        try:
            place = await self._admin.arrive(leader, topic, partition, channel, count, patience)
        except PartitionUnavailable:
            await self._check_kept(leader)
            raise
        if not self._placer.begin(place.offset):
            raise DataLoss(
                f"message {count} begins at byte {place.offset} here, and at byte {self._placer.offset} at the node "
                "that led before: the partition was written anew",
                hint="the query has to begin anew as well",
            )

    async def _check_kept(self, leader: Leader) -> None:
        """Raise `DataLoss` if the first missing message is not kept: servers would begin behind it, and say nothing."""
        start = await self._admin.start(leader, self.range.topic, self.range.partition)
        if start > self._placer.count:
            raise DataLoss(
                f"message {self._placer.count} is not kept any more, the first one is {start}",
                hint="read sooner, keep messages longer, or give failOnDataLoss=false",
            )

    async def _read(self, connection: Connection) -> None:
        connection.read_size = _READ_SIZE
        connection.on_messages = self._deliver
        self._paused = self._blocks.full
        connection.write(rdy(0 if self._paused else self._window))
        connection.flush()
        ended: NsqError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, connection)
            try:
                await connection.read_forever()
            except NsqError as error:
                ended = error  # a task group would wrap it
            tasks.cancel_scope.cancel()
        if ended is not None:
            raise ended

    async def _watch(self, connection: Connection) -> None:
        since = _clock()
        stall = min(_STALL, self._timeout / 2)
        while True:
            await anyio.sleep(min(_TICK, stall))
            connection.tick()
            connection.protocol.notices.clear()  # FIN of what came twice
            now = _clock()
            if self._paused:
                since = self._progress = now
            elif now - max(since, self._progress) > stall:
                connection.fail(ConnectionLost(f"no message came for {stall:g} s"))

    # Messages

    def _deliver(self, frames: list[bytes]) -> None:
        connection, extend = self._connection, self._extend
        if connection is None or self._placer.done:
            return
        messages: list[RawMessage] = []
        try:
            for data in frames:
                message = RawMessage()
                decode_into(message, data, extend, True)
                messages.append(message)
            placed = self._placer.take(messages)
        except NsqError as error:
            connection.fail(error)
            return
        if placed:
            self._progress = _clock()
            self._blocks.add(placed)
            if self._placer.done:
                self._blocks.close()
                self._came.set()
                connection.close()
                return
        if self._blocks.full and not self._paused:
            self._paused = True
            connection.write(rdy(0))
            self._came.set()
        connection.write(b"".join([b"FIN %b\n" % message.id for message in messages]))
        connection.flush()

    def _resume(self) -> None:
        """Let the server go on when there is room."""
        if self._paused and not self._blocks.full:
            self._paused = False
            self._progress = _clock()
            if self._connection is not None:
                self._connection.write(rdy(self._window))
                self._connection.flush()
