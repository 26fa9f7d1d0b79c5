"""Read a task's ranges: every message once, in order, or an error.

Each reader has an ephemeral channel at the leader, so that readers can read a range concurrently or again. After a lost
connection or a change of the leader, it continues with a new ephemeral channel at the first missing message.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Self

import anyio

from nsqext.client.tasks import first_error
from nsqext.errors import (
    ConnectionLost,
    DataLoss,
    NsqError,
    PartitionUnavailable,
    ProtocolError,
    RangeIncomplete,
    TopicNotFound,
)
from nsqext.spark.cluster.admin import SourceAdmin, ephemeral_name, open_ephemeral
from nsqext.spark.read.frames import (
    Block,
    Blocks,
    MessageColumns,
    Reassembler,
    decode_frames,
    finish_commands,
)
from nsqext.spark.read.offsets import Range
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.partitions import Leader, MessagePosition, PartitionReader
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Key
    from nsqext.spark.read.planning import Planned

logger: logging.Logger = logging.getLogger("nsqext.spark")

_clock = time.monotonic
TICK: float = 0.25
"""Seconds between two checks of the timeouts."""
STALL: float = 5.0
"""Seconds without a message until the connection is closed; all messages of a range are stored."""
_MOVE = 2.0  # seconds for the server to move the channel
_ID_SIZE = 8  # bytes of a message id before the trace id
BLOCK_BYTES: int = 4 << 20
"""Bytes of a block of messages, which is passed on at once."""
_READ_AHEAD = 1  # blocks received while the caller processes one
OPEN_RANGES: int = 6
"""Ranges of a task read concurrently, because opening a range takes several round trips."""
_FIRST_PAUSE = 0.02
LAST_PAUSE: float = 0.5
"""Longest pause before another attempt to open a range, in seconds."""


class RangeReader:
    """Reads a range: while `run` runs in a separate task, call `next_block` until it returns None.

    The reader receives a block ahead, then stops the server with RDY 0. Cancellation closes the connection with its
    ephemeral channel.
    """

    def __init__(
        self,
        admin: SourceAdmin,
        found: Range,
        options: SourceOptions,
        planned: Planned | None = None,
    ) -> None:
        self.range: Range = found
        self._planned = planned  # for the first attempt
        self._before: MessagePosition | None = None  # the message before the range, while it is awaited
        self._unproved = False  # whether the first message has to show that the server moved the channel
        self._admin = admin
        self._options = options
        self._timeout = options.read_timeout
        self._reassembler = self._reassembler_from(found.start)
        self._blocks = Blocks(found.start, options.arrow_batch_rows, BLOCK_BYTES, _READ_AHEAD)
        self._reader: PartitionReader | None = None
        self._paused = False  # waiting blocks hold back further messages
        self._failure: NsqError | None = None
        self._wake = Wakeup()
        self._progress = 0.0

    def _reassembler_from(self, count: int) -> Reassembler:
        return Reassembler(count, self.range.end, 2 * self._options.rdy)

    async def next_block(self) -> Block | None:
        """Return the next block; None at the end."""
        while (block := self._blocks.pop()) is None:
            if self._failure is not None:
                raise self._failure
            if self._reassembler.done:
                return None
            await self._wake.wait()
        self._resume()
        return block

    # Connections

    async def run(self) -> None:
        """Read the range; `next_block` raises an error after the blocks before it."""
        self._progress = _clock()
        errors: list[NsqError] = []
        try:
            while not self._reassembler.done:
                before = self._reassembler.count
                try:
                    await self._read_until_disconnected()
                except NsqError as error:
                    errors = [*errors, error] if self._reassembler.count == before else [error]
                    self._raise_if_final(errors)
                    self._admin.leaders.log_retry(_clock() - self._progress, self._timeout, error)
                    await anyio.sleep(min(_FIRST_PAUSE * len(errors), LAST_PAUSE))
        except NsqError as error:
            self._failure = error
            self._blocks.close()  # without failOnDataLoss, the messages before the lost messages are read
        self._wake.wake()

    def _raise_if_final(self, errors: list[NsqError]) -> None:
        last = errors[-1]
        unknown = isinstance(last, TopicNotFound) and len(errors) == 1 and self._reassembler.offset is None
        if unknown or not (last.retryable or isinstance(last, (ConnectionLost, ProtocolError))):
            raise last
        if _clock() - self._progress <= self._timeout:
            return
        failure = RangeIncomplete(
            f"message {self._reassembler.count} of the range {self.range.start}..{self.range.end} was not received "
            f"within {self._timeout:g} s: {last}",
            topic=self.range.topic,
            partition=self.range.partition,
            node=last.node,
            hint="check that the partition has a leader, and that the range ends before the end of the partition",
        )
        failure.attempts = tuple(errors[:-1])
        raise failure from last

    async def _read_until_disconnected(self) -> None:
        """Read on one connection until it ends or the range is complete."""
        topic, partition = self.range.topic, self.range.partition
        planned, self._planned = self._planned, None
        if planned is None:
            leader, meta = await self._admin.leaders.leader(topic, partition)
        else:
            leader, meta = planned.leader, planned.meta
        channel = ephemeral_name(self._options.channel)
        try:
            options = self._admin.connection
            reader = await open_ephemeral(options, leader, topic, partition, meta, channel)
            try:
                if planned is None or not await self._move_as_planned(reader, leader, planned):
                    await self._move(reader, leader, check=planned is None)
                self._admin.leaders.exists(topic)
                self._reader = reader
                await self._read(reader)
            finally:
                self._reader = None
                reader.end()
        except NsqError as error:
            if self._unproved:
                self._before, self._unproved = None, False
                self._reassembler = self._reassembler_from(self.range.start)
            if not self._reassembler.done:
                self._admin.leaders.distrust(topic, partition, leader)
                raise error.at(topic=topic, partition=partition, node=str(leader.tcp)) from error.__cause__

    async def _move(self, reader: PartitionReader, leader: Leader, *, check: bool) -> None:
        """Move the ephemeral channel to the first missing message; get that message's byte offset."""
        topic, partition, count = self.range.topic, self.range.partition, self._reassembler.count
        if check:
            await self._check_retained(leader)
        await self._admin.leaders.nodes.move(leader, topic, partition, reader.request.channel, count)
        timeout = min(_MOVE, self._timeout)
        try:
            position = await self._admin.wait_for_move(leader, topic, partition, reader.request.channel, count, timeout)
        except PartitionUnavailable:
            await self._check_retained(leader)
            raise
        if not self._reassembler.begin(position.offset):
            raise DataLoss(
                f"message {count} begins at byte {position.offset} on this node, and began at byte "
                f"{self._reassembler.offset} on the previous leader: the log was rewritten",
                hint="restart the query with a new checkpoint",
            )

    async def _move_as_planned(self, reader: PartitionReader, leader: Leader, planned: Planned) -> bool:
        """Move the ephemeral channel to the message before the range, or to the start of the log, whose arrival shows
        that the channel moved; return False for a range that begins elsewhere.
        """
        before, first = planned.before, self.range.start
        if before is not None and before.count + 1 == first:
            self._before, first, offset = before, before.count, before.offset
        elif planned.start == first:
            offset = planned.start_offset
        else:
            return False
        self._unproved = True
        self._reassembler = self._reassembler_from(first)
        self._reassembler.begin(offset)
        topic, partition = self.range.topic, self.range.partition
        await self._admin.leaders.nodes.move(leader, topic, partition, reader.request.channel, first)
        return True

    def _drop_before(self, run: MessageColumns, before: MessagePosition) -> MessageColumns:
        """Return a run without the message before the range, which is its first; raise `DataLoss` for another one."""
        found = int.from_bytes(run.heads["id"][0].tobytes()[:_ID_SIZE])
        if found != before.id:
            raise DataLoss(
                f"message {before.count} had id {before.id} when the batch was planned, and has id {found} now: the "
                "log was rewritten",
                hint="restart the query with a new checkpoint",
            )
        self._before = None
        return run.part(1, len(run))

    async def _check_retained(self, leader: Leader) -> None:
        """Raise `DataLoss` if the first missing message is not retained, which servers would skip silently."""
        start = await self._admin.first_retained(leader, self.range.topic, self.range.partition)
        if start > self._reassembler.count:
            raise DataLoss(
                f"message {self._reassembler.count} is not retained any more; the first retained message is {start}",
                hint="read sooner, raise the retention, or use failOnDataLoss=false",
            )

    async def _read(self, reader: PartitionReader) -> None:
        self._paused = self._blocks.full
        self._set_ready(reader)
        reader.flush()
        ended: NsqError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, reader)
            try:
                await reader.read(partial(self._deliver, reader))
            except NsqError as error:
                ended = error  # a task group would wrap it
            tasks.cancel_scope.cancel()
        if ended is not None:
            raise ended

    def _set_ready(self, reader: PartitionReader) -> None:
        reader.set_ready(0 if self._paused else min(self._options.rdy, reader.max_ready))

    async def _watch(self, reader: PartitionReader) -> None:
        since = _clock()
        while True:
            stall = min(_MOVE if self._unproved else STALL, self._timeout / 2)
            await anyio.sleep(min(TICK, stall))
            reader.tick()
            now = _clock()
            if self._paused:
                since = self._progress = now
            elif now - max(since, self._progress) > stall:
                reader.fail(ConnectionLost(f"no message was received for {stall:g} s"))

    # Messages

    def _deliver(self, reader: PartitionReader, frames: list[bytes]) -> None:
        if self._reassembler.done:
            return
        try:
            delivery = decode_frames(frames, reader.extend, with_bodies="value" in self._options.columns)
            runs = self._reassembler.take(delivery)
            if runs and self._before is not None:
                runs[0] = self._drop_before(runs[0], self._before)
            self._unproved = self._unproved and not runs
        except NsqError as error:
            reader.fail(error)
            return
        for run in runs:
            self._progress = _clock()
            self._blocks.add(run)
        if self._reassembler.done:
            self._blocks.close()
            reader.end()
            return
        if self._blocks.full and not self._paused:
            self._paused = True
            self._set_ready(reader)
            self._wake.wake()
        reader.pending.append(finish_commands(delivery))
        reader.flush()

    def _resume(self) -> None:
        if self._paused and not self._blocks.full:
            self._paused = False
            self._progress = _clock()
            if self._reader is not None:
                self._set_ready(self._reader)
                self._reader.flush()


class TaskReader:
    """Reads a task's ranges in order, the next of which are opened ahead; an async context manager."""

    def __init__(
        self, options: SourceOptions, ranges: Iterable[Range], planned: Mapping[Key, Planned] | None = None
    ) -> None:
        self._options = options
        self._planned = planned or {}
        self._admin = SourceAdmin(options.client)
        self._waiting = deque(ranges)
        self._open: deque[RangeReader] = deque()
        self._next = 0
        self._tasks: TaskGroup

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        for _ in range(OPEN_RANGES):
            self._open_next()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._tasks.cancel_scope.cancel()
        try:
            # without the caller's error, which the task group would wrap
            await self._tasks.__aexit__(None, None, None)
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            with anyio.CancelScope(shield=True):
                await self._admin.aclose()

    def _open_next(self) -> None:
        if self._waiting:
            found = self._waiting.popleft()
            self._open.append(self._start(found, self._planned.get((found.topic, found.partition))))

    def _start(self, found: Range, planned: Planned | None = None) -> RangeReader:
        reader = RangeReader(self._admin, found, self._options, planned)
        self._tasks.start_soon(reader.run)
        return reader

    async def next_block(self) -> tuple[Range, Block] | None:
        """Return the next block with its range; None at the end.

        Without ``failOnDataLoss``, skips lost messages and deleted topics.
        """
        while self._open:
            reader = self._open[0]
            try:
                block = await reader.next_block()
            except DataLoss as error:
                await self._skip_lost(reader.range, error)
                continue
            except TopicNotFound as error:
                await self._skip_deleted(reader.range, error)
                continue
            if block is not None:
                self._next = block.first + len(block)
                return reader.range, block
            self._close_first()
        return None

    def _close_first(self) -> None:
        self._open.popleft()
        self._open_next()
        self._next = 0

    async def _skip_lost(self, found: Range, error: DataLoss) -> None:
        """Continue after messages that are not retained any more."""
        if self._options.fail_on_data_loss:
            raise error
        first = max(self._next, found.start)
        start = (await self._admin.bounds(found.topic, found.partition)).start
        if start <= first:
            raise error
        logger.warning("messages %d..%d of %s are not retained any more: skipped", first, start, found)
        self._open[0] = self._start(Range(found.topic, found.partition, min(start, found.end), found.end))

    async def _skip_deleted(self, found: Range, error: TopicNotFound) -> None:
        """Continue without a topic deleted after the batch was planned."""
        if self._options.fail_on_data_loss:
            raise error
        if await self._admin.leaders.is_deleted(found.topic):
            logger.warning("the topic of %s does not exist any more: skipped", found)
            self._close_first()
            return
        await anyio.sleep(LAST_PAUSE)
        self._open[0] = self._start(Range(found.topic, found.partition, max(self._next, found.start), found.end))
