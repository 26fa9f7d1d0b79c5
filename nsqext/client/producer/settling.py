"""Settle publishes with unknown outcome: look for the messages in the partition's log.

With ``on_unknown="settle"`` every message has its own trace id, which identifies it in the log; receipts have offsets.
The search begins at the last offset acknowledged before the publish was sent, on a separate ephemeral channel.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import anyio
from attrs import evolve, field, mutable

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.position import Position
from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader, SubscribeRequest
from nsqext.client.producer.request import Known, SentTo
from nsqext.errors import ConnectionLost, DataLoss, DeliveryUnknown, NsqError, PartitionUnavailable, ServerError
from nsqext.lookup.leaders import leader_of
from nsqext.protocol.client.commands import fin
from nsqext.protocol.messages import RawMessage
from nsqext.types import Receipt
from nsqext.waits import Doubling

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from nsqext.client.producer.connection_pool import PooledConnection
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.request import PublishRequest
    from nsqext.client.producer.route import Target
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.protocol.frames import MessageData
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.producer")

_clock = time.monotonic

GRACE: float = 0.5
"""Seconds until a leader that has ended a connection itself, as at its exit, has executed or dropped its commands."""
TICK: float = 0.25
"""Seconds between looks at a search that receives nothing."""
STALL: float = 2.0
"""Seconds without progress until the channel is opened again, because a server may lose the move of a channel."""
_READY = 2000
_CONSUMER = ConsumerOptions(queue_position=True, msg_timeout=60.0, output_buffer_timeout=0.01)


class LogSearch:
    """Reads a partition's log from a record to its end.

    Each connection reads the last known record again. Another record in its place means that the topic was created
    again: the new log is read from its start.
    """

    def __init__(
        self, metadata: MetadataCache, connection: ConnectionOptions, topic: str, partition: int, since: Receipt | None
    ) -> None:
        self.found: dict[int, Receipt] = {}  #: by trace id
        self.node: str = ""  #: the leader that responded last
        self.error: NsqError | None = None  #: why the last pass ended early
        self._metadata = metadata
        self._options = evolve(_CONSUMER, connection=connection)
        self._topic = topic
        self._partition = partition
        self._last = since  # acknowledged record to begin with; None for the first retained record
        self._checked = False
        self._replaced = False
        self._next = 0
        self._end = 0
        self._wanted: set[int] = set()
        self._progress = 0.0
        self._raw = RawMessage()

    async def run(self, wanted: Collection[int]) -> None:
        """Read until all wanted trace ids are found, or to the end; raises DataLoss.

        Server errors are retried without limit; the caller cancels. Nothing is added to ``wanted`` while connections
        that sent its messages are open.
        """
        self._wanted = set(wanted)
        await self._read_to_end()
        if self._wanted:
            await anyio.sleep(GRACE)
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
        """Read with one connection to the end; raises DataLoss."""
        leader = leader_of(view, self._partition)
        http = leader.http
        start, self._end, _ = await self._metadata.channels.log_bounds(http, self._topic, self._partition)
        self.node = str(leader.tcp)
        self._next = self._begin(start)
        if self._next >= self._end:
            return
        channel = f"nsqext_settle_{os.urandom(8).hex()}#ephemeral"
        request = SubscribeRequest(self._topic, channel, self._partition, leader.tcp, view.meta, options=self._options)
        reader = await PartitionReader.open(request)
        try:
            position = str(Position.offset(self._next))
            await self._metadata.channels.move(http, self._topic, self._partition, channel, position)
            await self._read(reader, http)
        finally:
            reader.end()

    def _begin(self, start: int) -> int:
        """Return the offset to begin with, at a log that begins at ``start``; the end if nothing is new."""
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
        self._progress = _clock()
        reader.set_ready(min(_READY, reader.max_ready))
        reader.flush()
        ended: NsqError | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, reader, http)
            try:
                await reader.read(partial(self._deliver, reader))
            except NsqError as error:
                ended = error  # a task group would wrap it
            tasks.cancel_scope.cancel()
        if ended is not None and not self._complete:
            raise ended

    @property
    def _complete(self) -> bool:
        return not self._wanted or self._next >= self._end

    async def _watch(self, reader: PartitionReader, http: Address) -> None:
        """Answer heartbeats until the end is reached; follow an end that an undone write moves back."""
        try:
            while not self._complete:
                await anyio.sleep(TICK)
                reader.tick()
                if _clock() - self._progress > STALL:
                    raise ConnectionLost(f"no record at byte {self._next} was received for {STALL:g} s")
                bounds = await self._metadata.channels.log_bounds(http, self._topic, self._partition)
                self._end = min(self._end, bounds.end)
                if self._end < self._next:
                    raise _replaced(f"it ends at byte {self._end}")
            reader.end()
        except NsqError as error:
            reader.fail(error)

    def _deliver(self, reader: PartitionReader, frames: list[MessageData]) -> None:
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
            reader.end()
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


_PAUSE = 0.5  # seconds between searches for a publish that the server may still execute
# seconds until the connection to a former leader, which no longer executes publishes, is reset: the kernel may transmit
# the command later, when this node leads again
_FORMER_LEADER = 2.0


@mutable
class _Searches:
    """Searches of a partition, one at a time."""

    lock: anyio.Lock = field(factory=anyio.Lock)  #: held by the searching task
    #: by publish, the wanted trace ids, and the record before it
    waiting: dict[PublishRequest, tuple[Sequence[int], Known | None]] = field(factory=dict)
    latest: LogSearch | None = None  #: the search that began last
    searched: frozenset[PublishRequest] = frozenset()  #: its publishes


class Settler:
    """Finds out whether publishes of unknown outcome were stored."""

    def __init__(self, options: ProducerOptions, metadata: MetadataCache) -> None:
        self._options = options
        self._metadata = metadata  # released after the last call
        self._acknowledged: dict[tuple[str, int | None], Known] = {}
        self._count = count()
        self._searches: defaultdict[tuple[str, int], _Searches] = defaultdict(_Searches)

    def sending(self, request: PublishRequest, target: Target, connection: PooledConnection) -> None:
        """Remember where a request is sent."""
        since = self._acknowledged.get((request.topic, target.partition))
        request.sent_to = SentTo(target.partition, target.node.node, connection, since)

    def stored(self, receipts: Iterable[Receipt]) -> None:
        """Remember the last acknowledged message of each partition.

        Not the largest offset: a topic that is created again begins with offset 0.
        """
        for receipt in receipts:
            if receipt.offset is not None:
                self._acknowledged[receipt.topic, receipt.partition] = Known(next(self._count), receipt)

    async def settle(self, request: PublishRequest, unknown: DeliveryUnknown) -> list[Receipt] | None:
        """Look for a request's messages in the log; return their receipts, None if they will never be stored.

        Cancellation ends the search. Raises DeliveryUnknown.
        """
        sent, ids = request.sent_to, [trace for trace in request.trace_ids if trace]
        if sent is None or sent.partition is None or len(ids) < request.count:
            raise unknown
        searches = self._searches[request.topic, sent.partition]
        searches.waiting[request] = ids, sent.since
        reason = f"still unknown after {self._options.settle_timeout:g} s"
        refused = isinstance(unknown.__cause__, ServerError)
        moved_at: float | None = None  # time of the first search at another leader
        try:
            with anyio.move_on_after(self._options.settle_timeout):
                while True:
                    given_up = moved_at is not None and _clock() - moved_at > _FORMER_LEADER
                    if given_up:
                        sent.connection.close()
                    ended = refused or given_up or sent.connection.finished
                    search = await self._search(searches, request, sent.partition)
                    receipts = [search.found[trace] for trace in ids if trace in search.found]
                    if len(receipts) == len(ids):
                        return receipts
                    if not receipts and ended:
                        return None
                    if search.node != sent.node and moved_at is None:
                        moved_at = _clock()
                        sent.connection.fail(ConnectionLost("the leader has changed, and a response is missing"))
                    await anyio.sleep(_PAUSE)
        except DataLoss as error:
            reason = error.message
        finally:
            searches.waiting.pop(request, None)
        raise _still_unknown(unknown, reason, searches.latest) from unknown

    async def _search(self, searches: _Searches, request: PublishRequest, partition: int) -> LogSearch:
        """Return a search for a request that begins after this call; waiting publishes share it."""
        searches.searched -= {request}
        async with searches.lock:
            if searches.latest is not None and request in searches.searched:
                return searches.latest
            waiting = dict(searches.waiting)
            starts = [since for _, since in waiting.values()]
            since = None if None in starts else min(filter(None, starts)).receipt
            connection = self._options.connection
            search = searches.latest = LogSearch(self._metadata, connection, request.topic, partition, since)
            searches.searched = frozenset()
            await search.run([trace for ids, _ in waiting.values() for trace in ids])
            searches.searched = frozenset(waiting)
            return search


def _still_unknown(unknown: DeliveryUnknown, reason: str, search: LogSearch | None) -> DeliveryUnknown:
    error = None if search is None else search.error
    detail = "" if error is None else f"; last error of the search: {error.message}"
    still = DeliveryUnknown(f"{unknown.message}; {reason}{detail}", hint=unknown.hint, **unknown.where)
    still.attempts = unknown.attempts
    return still
