"""What a query has to know of topics, and where its anchor channels stand: asked from the leaders, whoever they are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import anyio
from attrs import frozen
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from nsqext.errors import (
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    NsqError,
    PartitionUnavailable,
    TopicNotFound,
)
from nsqext.lookup.client import LookupClient, failure
from nsqext.lookup.table import PartitionTable
from nsqext.protocol.names import MAX_NAME_LENGTH
from nsqext.spark.nodes import Leader, Nodes
from nsqext.spark.scratch import open_scratch, scratch_name

if TYPE_CHECKING:
    from nsqext.lookup.table import TopicView
    from nsqext.spark.nodes import ChannelPlace, PartitionStats
    from nsqext.spark.options import Access
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import TopicMeta

__all__ = ("Admin", "Bounds", "Leader", "persist")

T = TypeVar("T")

_FIRST_PAUSE = 0.02
_LAST_PAUSE = 0.5
_SETTLE = 8.0
"""Seconds that messages which were written when somebody asked for the end may take to be seen.

The real server shows messages to channels when its write buffer is written out. One that is larger than the buffer and
comes last is shown by a timer only: up to 6.0 s later with bodies of 200,000 bytes (measured), to consumers as well.
"""
_SOON = 0.005
"""Seconds after which a channel of our own has to make the server write out what it has buffered."""
_MOVE = 2.0
"""Seconds after which a move that has not happened is asked for again."""
_MARK = ".setup"


@frozen
class Bounds:
    """What of a partition can be read: counts of messages.

    Attributes:
        start: number of the first message that is kept, counted from 0.
        end: number behind the last one that is stored for good.
    """

    start: int
    end: int


def _worth_retrying(error: BaseException) -> bool:
    return isinstance(error, NsqError) and error.retryable and not isinstance(error, TopicNotFound)


async def persist(timeout: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """Try until it works, for so many seconds.

    Raises:
        NsqError: the last error, or the first that another try would not change.
    """
    retrying = AsyncRetrying(
        sleep=anyio.sleep,
        retry=retry_if_exception(_worth_retrying),
        stop=stop_after_delay(timeout),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE, max=_LAST_PAUSE),
        reraise=True,
    )

    async def run() -> T:  # tenacity awaits coroutine functions only
        return await attempt()

    return await retrying(run)


class Admin:
    """Asks lookup nodes and leaders; a change of leader, or a node that is silent, is waited for.

    What all methods raise: `TopicNotFound` for a topic that there is not, `InvalidPartition` for a partition that the
    topic does not have, `PartitionUnavailable` or `LookupFailed` where nobody answered within the access's timeout.
    Cancellation is safe at any time.

    Args:
        access: how the servers are reached.

    Attributes:
        options: how connections to nodes are made.
        nodes: asks a node, once.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self.options: ConnectionOptions = access.transport()
        self._lookup = LookupClient(access.lookupd, access.lookup())
        self._tables: dict[str, PartitionTable] = {}
        self._stale: set[str] = set()
        self._starts: dict[tuple[str, int, int], int] = {}
        self._standing: set[tuple[str, int, str]] = set()
        self.nodes: Nodes = Nodes(self._lookup.http)

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._lookup.aclose()

    # Who leads what

    async def partitions(self, topic: str) -> dict[int, Leader]:
        """Return the leaders of all partitions, as lookup knows them now; never of some of them only."""
        return await persist(self._access.timeout, lambda: self._partitions(topic))

    async def _partitions(self, topic: str) -> dict[int, Leader]:
        view = await self._look(topic)
        return {partition: _leader(view, partition) for partition in range(view.partition_num)}

    async def meta(self, topic: str) -> TopicMeta:
        """Return the meta of a topic, as lookup knows it now."""
        return (await persist(self._access.timeout, lambda: self._look(topic))).meta

    async def leader(self, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        """Return the leader of a partition, and the meta of the topic, as they were known last; asks once.

        After `distrust` lookup is asked again.
        """
        table = self._tables.get(topic)
        known = table is not None and partition in table.view.leaders and topic not in self._stale
        view = table.view if table is not None and known else await self._look(topic)
        if not 0 <= partition < view.partition_num:
            raise InvalidPartition(
                f"the topic has {view.partition_num} partitions, counted from 0", topic=topic, partition=partition
            )
        return _leader(view, partition), view.meta

    def distrust(self, topic: str, partition: int, leader: Leader | None = None) -> None:
        """Note that what is known of a topic led to an error: the next who needs it asks lookup."""
        self._stale.add(topic)
        if leader is not None and topic in self._tables:
            self._tables[topic].suspect(partition, leader.tcp)

    async def _look(self, topic: str) -> TopicView:
        answers = await self._lookup.lookup(topic, "r")
        table = self._tables.setdefault(topic, PartitionTable(topic, "r"))
        table.merge(answers)
        if not any(answer.found for answer in answers) and not table.view.leaders:
            del self._tables[topic]
            raise failure([answer.error for answer in answers if answer.error is not None], topic)
        if table.view.nodes and not table.view.partition_num:
            raise InvalidSetting(
                "this is the original NSQ, which has no partitions to read again", hint="give readMode=channel"
            ).at(topic=topic)
        self._stale.discard(topic)
        return table.view

    async def _on_leader(self, topic: str, partition: int, ask: Callable[[Leader], Awaitable[T]]) -> T:
        async def attempt() -> T:
            leader, _ = await self.leader(topic, partition)
            try:
                return await ask(leader)
            except NsqError:
                self.distrust(topic, partition, leader)
                raise

        return await persist(self._access.timeout, attempt)

    # Where partitions begin and end

    async def bounds(self, topic: str, partition: int, patience: float = _SETTLE) -> Bounds:
        """Return which messages can be read.

        The end holds everything whose publishing was acknowledged before the call, and nothing that a change of leader
        could take back: what channels may read. The count that a leader gives for the partition itself holds messages
        that are on their way to the replicas, too.
        Args:
            topic: the topic.
            partition: the partition.
            patience: seconds after which the end may be without messages that a leader has written and shows to no
                channel: those whose publishing hangs, and, for some seconds, large ones.
        """

        async def ask(leader: Leader) -> Bounds:
            stats = await self.nodes.stats(leader, topic, partition)
            end = stats.committed
            if end < stats.written:
                end = await self._settled(leader, topic, partition, stats.written, patience)
            start = await self._start(leader, topic, partition, stats, end)
            return Bounds(min(start, end), end)

        return await self._on_leader(topic, partition, ask)

    async def _settled(self, leader: Leader, topic: str, partition: int, wanted: int, patience: float) -> int:
        """Wait until what is written is stored for good, or taken back.

        A channel with a consumer that waits makes the server write out what it has buffered; others see that later, and
        without any channel nothing tells what is stored.
        """
        stats = await self._poll(leader, topic, partition, wanted, _SOON)
        if stats.committed >= min(wanted, stats.written):
            return stats.committed
        _, meta = await self.leader(topic, partition)
        connection, _ = await open_scratch(self.options, leader, topic, partition, meta, scratch_name())
        try:
            return (await self._poll(leader, topic, partition, wanted, patience)).committed
        finally:
            connection.close()

    async def _poll(self, leader: Leader, topic: str, partition: int, wanted: int, seconds: float) -> PartitionStats:
        """Ask for so long at most until so much is stored for good, or less is written."""
        pause, deadline = 0.001, anyio.current_time() + seconds
        while True:
            stats = await self.nodes.stats(leader, topic, partition)
            if stats.committed >= min(wanted, stats.written) or anyio.current_time() >= deadline:
                return stats
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.1)

    async def _start(self, leader: Leader, topic: str, partition: int, stats: PartitionStats, end: int) -> int:
        if not stats.start_offset:
            return 0
        if stats.start_offset >= stats.end_offset:
            return end
        key = topic, partition, stats.start_offset
        if key not in self._starts:
            found = await self.nodes.message(leader, topic, partition, "virtual_offset", stats.start_offset)
            self._starts[key] = found.count
        return self._starts[key]

    async def start(self, leader: Leader, topic: str, partition: int) -> int:
        """Return the number of the first message that a leader keeps; asks once.

        Raises:
            PartitionUnavailable: no usable answer.
        """
        stats = await self.nodes.stats(leader, topic, partition)
        return await self._start(leader, topic, partition, stats, stats.committed)

    async def count_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return how many messages lie before the first one of this time or later; the end where there is none.

        Args:
            topic: the topic.
            partition: the partition.
            timestamp_ms: milliseconds since 1970.
        """
        bounds = await self.bounds(topic, partition)
        wanted = timestamp_ms * 1_000_000

        async def ask(leader: Leader) -> int:
            low, high = bounds.start, bounds.end
            while low < high:
                middle = (low + high) // 2
                found = await self.nodes.message(leader, topic, partition, "count", middle + 1)
                if found.timestamp < wanted:
                    low = max(middle, found.count) + 1
                else:
                    high = middle
            return low

        return await self._on_leader(topic, partition, ask)

    # Channels

    async def place(self, topic: str, partition: int, channel: str) -> ChannelPlace | None:
        """Return where a channel stands; None where there is no such channel."""
        return await self._on_leader(
            topic, partition, lambda leader: self.nodes.place(leader, topic, partition, channel)
        )

    async def anchor_count(self, topic: str, partition: int, channel: str) -> int | None:
        """Return how many messages a channel has behind it; None where there is no such channel, or no finished one."""
        place = await self.place(topic, partition, channel)
        key = topic, partition, channel
        if place is None:
            self._standing.discard(key)
            return None
        if key not in self._standing:
            if await self.place(topic, partition, _mark(channel)) is not None:
                return None
            self._standing.add(key)
        return place.count

    async def create_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        """Make a durable channel behind so many messages; one that exists stays where it is.

        A second channel marks the time between making and moving it: a process that ends in that time leaves an anchor
        that `anchor_count` does not know, and that is put to its place by the next call.

        Raises:
            ChannelNotRegistered: the topic takes registered channels only.
        """
        mark = _mark(channel)
        if await self.anchor_count(topic, partition, channel) is not None:
            return
        for name in (mark, channel):
            await self._on_leader(
                topic,
                partition,
                lambda leader, name=name: self.nodes.create_channel(leader, topic, partition, name),  # type: ignore[misc]
            )
        await self._move(topic, partition, channel, count)
        await self._on_leader(
            topic, partition, lambda leader: self.nodes.delete_channel(leader, topic, partition, mark)
        )

    async def move_anchor(
        self, topic: str, partition: int, channel: str, count: int, *, backwards: bool = False
    ) -> None:
        """Let a channel stand behind so many messages; returns when it does.

        Args:
            topic: the topic.
            partition: the partition.
            channel: the channel.
            count: messages before its place.
            backwards: move it back, too; otherwise one that is further on stays.

        Raises:
            InvalidState: there is no such channel.
        """
        place = await self.place(topic, partition, channel)
        if place is None:
            raise InvalidState(
                f"the channel {channel} is gone",
                topic=topic,
                partition=partition,
                hint="somebody has deleted it; messages may have been cleaned away since",
            )
        if place.count < count or (backwards and place.count != count):
            await self._move(topic, partition, channel, count)

    async def delete_anchor(self, topic: str, partition: int, channel: str) -> None:
        """Delete a channel; nothing happens where there is none."""
        for name in (channel, _mark(channel)):
            if await self.place(topic, partition, name) is not None:
                await self._on_leader(
                    topic,
                    partition,
                    lambda leader, name=name: self.nodes.delete_channel(leader, topic, partition, name),  # type: ignore[misc]
                )

    async def _move(self, topic: str, partition: int, channel: str, count: int) -> None:
        async def ask(leader: Leader) -> None:
            await self.nodes.move(leader, topic, partition, channel, count)
            await self.arrive(leader, topic, partition, channel, count)

        await self._on_leader(topic, partition, ask)

    async def arrive(
        self, leader: Leader, topic: str, partition: int, channel: str, count: int, patience: float = _MOVE
    ) -> ChannelPlace:
        """Wait until a channel that was moved stands where it was moved to, for so many seconds.

        Raises:
            PartitionUnavailable: it does not, soon.
        """
        place, pause = None, 0.001
        with anyio.move_on_after(patience):
            while True:
                place = await self.nodes.place(leader, topic, partition, channel)
                if place is not None and place.count == count:
                    return place
                await anyio.sleep(pause)
                pause = min(2 * pause, 0.1)
        stands = "is gone" if place is None else f"stands at {place.count}, and the partition ends at {place.end}"
        raise PartitionUnavailable(
            f"the channel {channel} was moved to {count}, and {stands}",
            topic=topic,
            partition=partition,
            node=str(leader.http),
        )


def _mark(channel: str) -> str:
    return f"{channel[: MAX_NAME_LENGTH - len(_MARK)]}{_MARK}"


def _leader(view: TopicView, partition: int) -> Leader:
    tcp = view.leaders.get(partition)
    http = view.http.get(tcp) if tcp is not None else None
    if tcp is None or http is None:
        raise PartitionUnavailable(
            "lookup names no leader" if tcp is None else "lookup does not tell the leader's HTTP address",
            topic=view.topic,
            partition=partition,
        )
    return Leader(tcp, http)
