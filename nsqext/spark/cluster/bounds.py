"""The first and the last message that can be read of a partition: by count, byte offset and time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from nsqext.errors import NsqError
from nsqext.spark.cluster.ephemeral_channel import ephemeral_name, open_ephemeral
from nsqext.waits import Doubling, gather

if TYPE_CHECKING:
    from nsqext.admin import PartitionStats
    from nsqext.spark.cluster.leader_locator import LeaderLocator
    from nsqext.spark.cluster.node_http import Leader, MessagePosition

_SETTLE = 8.0
"""Seconds to wait until messages that are written become readable.

The real server shows messages to channels when it flushes its write buffer. A last message that is larger than the
buffer is shown by a timer only: up to 6.0 s later with bodies of 200,000 bytes (measured), to consumers as well.
"""
_MANY_TOPICS = 4
"""Topics of a query at one node from which on one request for all topics of the node replaces one for each."""
_SOON = 0.005  # seconds after which an ephemeral channel is opened to make the server flush its write buffer


@frozen
class Bounds:
    """The readable messages of a partition, as counts."""

    start: int  # number of the first retained message, counted from 0
    end: int  # number after the last committed one
    end_offset: int  # byte offset after it; larger where a leader has written messages that are not committed


class PartitionBounds:
    """Finds the bounds of partitions; every method raises what `LeaderLocator` raises."""

    def __init__(self, leaders: LeaderLocator) -> None:
        self._leaders = leaders  # finds and asks leaders; not closed by this object
        self._starts: dict[tuple[str, int, int], int] = {}

    async def of(self, topic: str, partition: int, patience: float = _SETTLE) -> Bounds:
        """Return the bounds of a partition.

        The end includes every message whose publish was acknowledged before the call, and no message that a leader
        change could remove: it is what channels may read. The count that a leader reports for the partition itself
        includes messages that are not replicated yet. After ``patience`` seconds the end may exclude messages that are
        written but not readable: those of a publish that hangs and, for some seconds, large ones.
        """
        return await self._leaders.ask(topic, partition, self._of, patience)

    async def _of(self, leader: Leader, topic: str, partition: int, patience: float) -> Bounds:
        stats = await self._leaders.nodes.stats(leader, topic, partition)
        if stats.committed < stats.messages:
            stats = await self._settled(leader, topic, partition, stats.messages, patience)
        return await self._bounds(leader, topic, partition, stats)

    async def survey(self, keys: Iterable[tuple[str, int]], patience: float = _SETTLE) -> dict[tuple[str, int], Bounds]:
        """Return the bounds of several partitions; see `of`.

        Each node is asked once for all partitions of a topic that it leads, or, if it leads some topics, once for all
        of them. Partitions for which that answer is not sufficient are asked for one by one.
        """
        wanted = list(keys)
        led: dict[Leader, dict[str, list[int]]] = {}
        for topic, partition in wanted:
            with suppress(NsqError):  # a partition without a known leader is asked for below
                leader, _ = await self._leaders.leader(topic, partition)
                led.setdefault(leader, {}).setdefault(topic, []).append(partition)
        requests: list[tuple[Leader, str | None]] = []
        for leader, topics in led.items():
            requests += [(leader, topic) for topic in topics] if len(topics) < _MANY_TOPICS else [(leader, None)]
        found: dict[tuple[str, int], Bounds] = {}

        async def ask(request: tuple[Leader, str | None]) -> None:
            leader, topic = request
            topics = led[leader] if topic is None else {topic: led[leader][topic]}
            with suppress(NsqError):
                stats_by_key = await self._leaders.nodes.led(leader, topic)
                for key in [(name, partition) for name, partitions in topics.items() for partition in partitions]:
                    stats = stats_by_key.get(key)
                    if stats is not None and stats.committed >= stats.messages:
                        found[key] = await self._bounds(leader, *key, stats)

        await gather(requests, ask)
        missing = [key for key in wanted if key not in found]
        found |= await gather(missing, lambda key: self.of(*key, patience))
        return {key: found[key] for key in wanted}

    async def _bounds(self, leader: Leader, topic: str, partition: int, stats: PartitionStats) -> Bounds:
        start = await self._start(leader, topic, partition, stats)
        return Bounds(min(start, stats.committed), stats.committed, stats.end or 0)

    async def _settled(
        self, leader: Leader, topic: str, partition: int, wanted: int, patience: float
    ) -> PartitionStats:
        """Wait until written messages are committed or removed.

        A channel with a waiting consumer makes the server flush its write buffer. Other channels see the messages
        later, and without any channel the server does not report what is committed.
        """
        stats = await self._poll(leader, topic, partition, wanted, _SOON)
        if stats.committed >= min(wanted, stats.messages):
            return stats
        _, meta = await self._leaders.leader(topic, partition)
        options = self._leaders.connection
        reader = await open_ephemeral(options, leader, topic, partition, meta, ephemeral_name())
        try:
            return await self._poll(leader, topic, partition, wanted, patience)
        finally:
            reader.abort()

    async def _poll(self, leader: Leader, topic: str, partition: int, wanted: int, seconds: float) -> PartitionStats:
        """Ask until ``wanted`` messages are committed, fewer are written, or the time is over."""
        pauses, deadline = Doubling(0.001, 0.1), anyio.current_time() + seconds
        while True:
            stats = await self._leaders.nodes.stats(leader, topic, partition)
            if stats.committed >= min(wanted, stats.messages) or anyio.current_time() >= deadline:
                return stats
            await anyio.sleep(pauses.next())

    async def _start(self, leader: Leader, topic: str, partition: int, stats: PartitionStats) -> int:
        if not stats.start:
            return 0
        if stats.start >= (stats.end or 0):
            return stats.committed
        key = topic, partition, stats.start
        if key not in self._starts:
            nodes = self._leaders.nodes
            found = await nodes.message(leader, topic, partition, "virtual_offset", stats.start)
            self._starts[key] = found.count
        return self._starts[key]

    async def start(self, leader: Leader, topic: str, partition: int) -> int:
        """Return the number of the first message that a leader retains; asks once."""
        stats = await self._leaders.nodes.stats(leader, topic, partition)
        return await self._start(leader, topic, partition, stats)

    async def count_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return the number of messages before the first one with this time or later; the end if there is none."""
        return await self.count_since(topic, partition, timestamp_ms * 1_000_000)

    async def count_since(self, topic: str, partition: int, timestamp: int) -> int:
        """Do the same for a time in nanoseconds since 1970."""
        bounds = await self.of(topic, partition)

        async def search(leader: Leader, topic: str, partition: int) -> int:
            low, high = bounds.start, bounds.end
            while low < high:
                middle = (low + high) // 2
                found = await self._leaders.nodes.message(leader, topic, partition, "count", middle + 1)
                if found.timestamp < timestamp:
                    low = max(middle, found.count) + 1
                else:
                    high = middle
            return low

        return await self._leaders.ask(topic, partition, search)

    async def message(self, topic: str, partition: int, count: int) -> MessagePosition:
        """Return the position of a committed message, counted from 0, or of the first one that is retained."""
        return await self._leaders.ask(topic, partition, self._leaders.nodes.message, "count", count + 1)

    async def count_before(self, topic: str, partition: int, offset: int) -> int:
        """Return the number of messages that end at or before a byte offset, that of the last message at most."""
        # the first message that begins at the offset or after it
        found = await self._leaders.ask(topic, partition, self._leaders.nodes.message, "virtual_offset", offset)
        return found.count if found.offset == offset else found.count - 1
