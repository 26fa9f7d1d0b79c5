"""A query's requests: bounds of partitions by count, offset and time, and channels.

Each reader has an ephemeral channel, which the server deletes with the connection.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING, Self

import anyio
from attrs import evolve, field, frozen

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.errors import InvalidPartition, InvalidState, NsqError, PartitionUnavailable
from nsqext.errors.server import ChannelNotRegistered
from nsqext.partitions import LeaderLocator, PartitionReader, SubscribeRequest
from nsqext.protocol.names import MAX_NAME_LENGTH
from nsqext.waits import Doubling, gather

if TYPE_CHECKING:
    from nsqext.admin import PartitionStats
    from nsqext.partitions import ChannelPosition, Leader, MessagePosition
    from nsqext.spark.cluster.client_config import ClientConfig
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import TopicMeta

MARK = ".setup"
"""Suffix of the channel that exists during the creation of an anchor channel."""
QUERY_MARK = ".begin"
"""Suffix of the channel that exists, at one partition, during the creation of all anchor channels of a new query."""
_DIGEST = 8

_PREFIX = "nsqext_spark"
_EPHEMERAL = "#ephemeral"
_READ_SIZE = 524288
_CONSUMER = ConsumerOptions(
    queue_position=True,
    msg_timeout=60.0,
    # the messages are stored: large pieces cost a fifth less CPU than the server's default buffer
    output_buffer_size=65536,
    output_buffer_timeout=0.01,
)


def ephemeral_name(prefix: str | None = None) -> str:
    """Return a unique name of an ephemeral channel; a long prefix is cut."""
    suffix = f"_{token_hex(8)}{_EPHEMERAL}"
    return f"{(prefix or _PREFIX)[: MAX_NAME_LENGTH - len(suffix)]}{suffix}"


def setup_mark(channel: str, suffix: str = MARK) -> str:
    room = MAX_NAME_LENGTH - len(suffix)
    if len(channel) <= room:
        return f"{channel}{suffix}"
    digest = blake2b(channel.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{channel[: room - _DIGEST]}{digest}{suffix}"


async def open_ephemeral(
    options: ConnectionOptions, leader: Leader, topic: str, partition: int, meta: TopicMeta, channel: str
) -> PartitionReader:
    """Connect to a leader and subscribe to a channel with RDY 0; after an error nothing stays open.

    SUB creates the channel: the server never deletes a channel created over HTTP without subscribers.
    """
    consumer = evolve(_CONSUMER, connection=options)
    request = SubscribeRequest(topic, channel, partition, leader.tcp, meta, options=consumer)
    try:
        return await PartitionReader.open(request, read_size=_READ_SIZE)
    except ChannelNotRegistered as error:
        error.hint = "the topic accepts registered channels only: use readMode=channel with a registered channel"
        raise


MOVE: float = 2.0
"""Seconds until a missing move is requested again."""
# seconds until written messages are readable. The real server shows messages to channels when it flushes its write
# buffer; a last message larger than the buffer waits for a timer, up to 6.0 s with bodies of 200,000 bytes (measured)
_SETTLE = 8.0
_MANY_TOPICS = 4  # topics of a query at a node from which on one request gets all topics of the node
LED: float = 1.0
"""Seconds for which a node's first retained messages are not requested again."""
_MISSING = 5.0  # seconds for which a channel that did not exist is not looked for again before it is created
_SOON = 0.005  # seconds until an ephemeral channel is opened, which makes the server flush its write buffer


@frozen
class Bounds:
    start: int  #: first retained message, from 0
    end: int  #: behind the last committed message
    end_offset: int  #: byte offset there, larger with uncommitted messages
    #: of the partition, each with the messages before its position, or some more while messages are published
    channels: Mapping[str, int] = field(factory=dict)
    start_offset: int = 0  #: byte offset of the first retained message


class SourceAdmin:
    """Finds bounds of partitions; creates, moves and deletes anchor channels; raises the errors of `LeaderLocator`."""

    def __init__(self, config: ClientConfig, *, first_contact: float | None = None) -> None:
        options = config.consumer()
        self.connection: ConnectionOptions = options.connection
        self.leaders: LeaderLocator = LeaderLocator(
            config.lookupd, options.lookup, timeout=config.timeout, first_contact=first_contact
        )
        self._starts: dict[tuple[str, int, int], int] = {}
        self._set_up: set[tuple[str, int, str]] = set()
        self._missing: dict[tuple[str, int, str], float] = {}  # when `anchor_count` found no channel
        # statistics for `first_retained`, with the time of the request
        self._led: dict[tuple[Leader, str], tuple[float, dict[tuple[str, int], PartitionStats]]] = {}
        self._led_lock = anyio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self.leaders.aclose()

    async def partitions_to_read(self, topic: str, wanted: Iterable[int] | None) -> list[int]:
        """Return the wanted partitions, which must exist, or all."""
        existing = await self.leaders.partitions(topic)
        chosen = sorted(existing if wanted is None else wanted)
        for partition in chosen:
            if partition not in existing:
                raise InvalidPartition(
                    f"the option assign names a partition that does not exist: the topic has {len(existing)}",
                    topic=topic,
                    partition=partition,
                )
        return chosen

    # Bounds

    async def bounds(self, topic: str, partition: int, patience: float = _SETTLE) -> Bounds:
        """Return the bounds of a partition.

        The end includes every message acknowledged before the call, and no message that a leader change could remove.
        After ``patience`` seconds it may exclude unreadable messages: of a hanging publish and, for some seconds, large
        messages.
        """
        return await self.leaders.ask(topic, partition, self._bounds_at, patience)

    async def _bounds_at(self, leader: Leader, topic: str, partition: int, patience: float) -> Bounds:
        stats = await self.leaders.nodes.stats(leader, topic, partition)
        if stats.committed < stats.messages:
            stats = await self._settled(leader, topic, partition, stats.messages, patience)
        return await self._bounds(leader, topic, partition, stats)

    async def survey(self, keys: Iterable[tuple[str, int]], patience: float = _SETTLE) -> dict[tuple[str, int], Bounds]:
        """Return the bounds of several partitions, see `bounds`, with one request per node and topic where possible."""
        wanted = list(keys)

        async def bounds_of(key: tuple[str, int]) -> Bounds:
            leader, stats = led.get(key, (None, None))
            if leader is not None and stats is not None and stats.committed >= stats.messages:
                with suppress(NsqError):
                    return await self._bounds(leader, *key, stats)
            return await self.bounds(*key, patience)

        led = await self._stats(wanted)
        return await gather(wanted, bounds_of)

    async def _stats(self, keys: Iterable[tuple[str, int]]) -> dict[tuple[str, int], tuple[Leader, PartitionStats]]:
        """Return the statistics of the partitions whose last known leaders return them, see `survey`."""
        wanted: dict[Leader, dict[str, list[int]]] = {}
        for topic, partition in keys:
            with suppress(NsqError):
                leader, _ = await self.leaders.leader(topic, partition)
                wanted.setdefault(leader, {}).setdefault(topic, []).append(partition)
        requests: list[tuple[Leader, str | None]] = []
        for leader, topics in wanted.items():
            requests += [(leader, topic) for topic in topics] if len(topics) < _MANY_TOPICS else [(leader, None)]
        found: dict[tuple[str, int], tuple[Leader, PartitionStats]] = {}

        async def ask(request: tuple[Leader, str | None]) -> None:
            leader, topic = request
            topics = wanted[leader] if topic is None else {topic: wanted[leader][topic]}
            with suppress(NsqError):
                led = await self.leaders.nodes.led(leader, topic)
                asked = [(name, partition) for name, partitions in topics.items() for partition in partitions]
                found.update({key: (leader, led[key]) for key in asked if key in led})

        await gather(requests, ask)
        return found

    async def _bounds(self, leader: Leader, topic: str, partition: int, stats: PartitionStats) -> Bounds:
        start = await self._start(leader, topic, partition, stats)
        positions = {name: channel.messages - channel.depth for name, channel in stats.channels.items()}
        return Bounds(min(start, stats.committed), stats.committed, stats.end or 0, positions, stats.start)

    async def _settled(
        self, leader: Leader, topic: str, partition: int, wanted: int, patience: float
    ) -> PartitionStats:
        """Wait until written messages are committed or removed.

        A channel with a waiting consumer makes the server flush its write buffer, and report what is committed.
        """
        stats = await self._poll(leader, topic, partition, wanted, _SOON)
        if stats.committed >= min(wanted, stats.messages):
            return stats
        _, meta = await self.leaders.leader(topic, partition)
        options = self.connection
        reader = await open_ephemeral(options, leader, topic, partition, meta, ephemeral_name())
        try:
            return await self._poll(leader, topic, partition, wanted, patience)
        finally:
            reader.end()

    async def _poll(self, leader: Leader, topic: str, partition: int, wanted: int, seconds: float) -> PartitionStats:
        """Ask until ``wanted`` messages are committed, fewer are written, or the time is over."""
        pauses, deadline = Doubling(0.001, 0.1), anyio.current_time() + seconds
        while True:
            stats = await self.leaders.nodes.stats(leader, topic, partition)
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
            nodes = self.leaders.nodes
            found = await nodes.message(leader, topic, partition, "virtual_offset", stats.start)
            self._starts[key] = found.count
        return self._starts[key]

    async def first_retained(self, leader: Leader, topic: str, partition: int) -> int:
        """Return the number of a leader's first retained message, at most a second old."""
        async with self._led_lock:
            since, led = self._led.get((leader, topic), (float("-inf"), {}))
            if anyio.current_time() - since > LED or (topic, partition) not in led:
                now = anyio.current_time()
                led = await self.leaders.nodes.led(leader, topic)
                self._led[leader, topic] = now, led
        stats = led.get((topic, partition)) or await self.leaders.nodes.stats(leader, topic, partition)
        return await self._start(leader, topic, partition, stats)

    async def count_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return how many messages precede the first message since this time; all without such a message."""
        return await self.count_since(topic, partition, timestamp_ms * 1_000_000)

    async def count_since(self, topic: str, partition: int, timestamp: int) -> int:
        bounds = await self.bounds(topic, partition)

        async def search(leader: Leader, topic: str, partition: int) -> int:
            low, high = bounds.start, bounds.end
            while low < high:
                middle = (low + high) // 2
                found = await self.leaders.nodes.message(leader, topic, partition, "count", middle + 1)
                if found.timestamp < timestamp:
                    low = max(middle, found.count) + 1
                else:
                    high = middle
            return low

        return await self.leaders.ask(topic, partition, search)

    async def message(self, topic: str, partition: int, count: int) -> MessagePosition:
        """Return the position of the committed message ``count``, from 0, or of the first retained message."""
        return await self.leaders.ask(topic, partition, self.leaders.nodes.message, "count", count + 1)

    async def count_before(self, topic: str, partition: int, offset: int) -> int:
        """Return the number of messages that end at or before a byte offset."""
        # the first message at or after the offset
        found = await self.leaders.ask(topic, partition, self.leaders.nodes.message, "virtual_offset", offset)
        return found.count if found.offset == offset else found.count - 1

    # Anchors

    async def position(self, topic: str, partition: int, channel: str) -> ChannelPosition | None:
        """Return a channel's position; None if it does not exist."""
        return await self.leaders.ask(topic, partition, self.leaders.nodes.position, channel)

    async def anchor_count(
        self, topic: str, partition: int, channel: str, listed: Container[str] | None = None
    ) -> int | None:
        """Return the number of messages before an anchor; None if missing or incompletely created.

        Args:
            listed: the partition's channels in `Bounds` of just now, which save requests.
        """
        key = topic, partition, channel
        if listed is not None and setup_mark(channel) not in listed:
            self._set_up.add(key)
        missing = listed is not None and channel not in listed
        position = None if missing else await self.position(topic, partition, channel)
        if position is None:
            self._set_up.discard(key)
            self._missing[key] = anyio.current_time()
            return None
        if key not in self._set_up:
            if await self.position(topic, partition, setup_mark(channel)) is not None:
                return None
            self._set_up.add(key)
        return position.count

    async def create_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        """Create a durable channel behind ``count`` messages; an existing channel keeps its position.

        A second channel marks an incomplete creation: `anchor_count` returns None, and the next call completes it.
        """
        mark = setup_mark(channel)
        missing = self._missing.pop((topic, partition, channel), float("-inf"))
        if anyio.current_time() - missing > _MISSING and await self.anchor_count(topic, partition, channel) is not None:
            return
        nodes = self.leaders.nodes
        for name in (mark, channel):
            await self.leaders.ask(topic, partition, nodes.change_channel, "create", name)
        await self._move(topic, partition, channel, count)
        await self.leaders.ask(topic, partition, nodes.change_channel, "delete", mark)
        self._set_up.add((topic, partition, channel))

    async def create_anchors(self, counts: Mapping[tuple[str, int], int], channel: str) -> None:
        """Create the anchors of a query that has none, see `create_anchor`, or complete an earlier creation.

        A channel at one partition marks an incomplete creation, see `is_incomplete`.
        """
        nodes, mark = self.leaders.nodes, setup_mark(channel, QUERY_MARK)
        before = await self._stats(counts)
        # after the mark, to know the channels of an earlier creation
        marked = [key for key, (_, stats) in before.items() if mark in stats.channels] or [min(counts)]
        await gather(marked, lambda key: self.leaders.ask(*key, nodes.change_channel, "create", mark))
        await gather(counts, lambda key: self.leaders.ask(*key, nodes.change_channel, "create", channel))
        new = {key for key, (_, stats) in before.items() if channel not in stats.channels}
        await self._place({key: count for key, count in counts.items() if key in new}, channel)
        await gather(counts.keys() - new, lambda key: self._move(*key, channel, counts[key]))
        await gather(marked, lambda key: self.leaders.ask(*key, nodes.change_channel, "delete", mark))
        self._set_up |= {(*key, channel) for key in counts}

    @staticmethod
    def is_incomplete(found: Mapping[tuple[str, int], Bounds], channel: str) -> bool:
        """Return whether `create_anchors` was interrupted: positions of anchors are no starts then."""
        mark = setup_mark(channel, QUERY_MARK)
        return any(mark in bounds.channels for bounds in found.values())

    async def _place(self, counts: Mapping[tuple[str, int], int], channel: str) -> None:
        """Move new channels behind ``counts`` messages, and wait until they are there.

        A new channel is at the end, and statistics never show it before its position: what they show at its place is
        there.
        """
        nodes = self.leaders.nodes

        async def elsewhere(keys: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
            stats = await self._stats(keys)
            return [
                key
                for key in keys
                if key not in stats
                or (found := stats[key][1].channels.get(channel)) is None
                or found.messages - found.depth != counts[key]
            ]

        left = await elsewhere(counts)
        await gather(left, lambda key: self.leaders.ask(*key, nodes.move, channel, counts[key]))
        pauses = Doubling(0.001, 0.1)
        until = anyio.current_time() + MOVE
        while True:
            left = await elsewhere(left)
            if not left or anyio.current_time() >= until:
                break
            await anyio.sleep(pauses.next())
        await gather(left, lambda key: self._move(*key, channel, counts[key]))

    async def move_anchor(
        self, topic: str, partition: int, channel: str, count: int, *, backwards: bool = False
    ) -> None:
        """Move an anchor behind ``count`` messages, from further ahead only ``backwards``; wait until it is there."""
        position = await self.position(topic, partition, channel)
        if position is None:
            raise InvalidState(
                f"the anchor channel {channel} does not exist any more",
                topic=topic,
                partition=partition,
                hint="it was deleted on the server; messages may have been removed since then",
            )
        if position.count < count or (backwards and position.count != count):
            await self._move(topic, partition, channel, count)

    async def push_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        """Move an anchor that was just behind ``count`` messages there, without waiting."""
        try:
            leader, _ = await self.leaders.leader(topic, partition)
            await self.leaders.nodes.move(leader, topic, partition, channel, count)
        except NsqError:  # moves it at a new leader, or reports that it is missing
            await self.move_anchor(topic, partition, channel, count)

    async def delete_anchor(self, topic: str, partition: int, channel: str) -> None:
        for name in (channel, setup_mark(channel)):
            if await self.position(topic, partition, name) is not None:
                await self.leaders.ask(topic, partition, self.leaders.nodes.change_channel, "delete", name)

    async def _move(self, topic: str, partition: int, channel: str, count: int) -> None:
        async def move(leader: Leader, topic: str, partition: int) -> None:
            await self.leaders.nodes.move(leader, topic, partition, channel, count)
            await self.wait_for_move(leader, topic, partition, channel, count)

        await self.leaders.ask(topic, partition, move)

    async def wait_for_move(
        self, leader: Leader, topic: str, partition: int, channel: str, count: int, timeout: float = MOVE
    ) -> ChannelPosition:
        """Wait until a leader has moved a channel behind ``count`` messages; return its position."""
        position, pauses = None, Doubling(0.001, 0.1)
        with anyio.move_on_after(timeout):
            while True:
                position = await self.leaders.nodes.position(leader, topic, partition, channel)
                if position is not None and position.count == count:
                    return position
                await anyio.sleep(pauses.next())
        found = (
            "does not exist" if position is None else f"is at {position.count}; the partition ends at {position.end}"
        )
        raise PartitionUnavailable(
            f"the channel {channel} was moved to {count}, but {found}",
            topic=topic,
            partition=partition,
            node=str(leader.http),
        )
