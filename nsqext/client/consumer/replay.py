"""Replay dead letters to their original topics."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Unpack

import anyio

from nsqext.client.consumer.consumer import Consumer
from nsqext.client.consumer.handlers.dead_letter import DEAD_LETTER_PREFIX, FIRST_ADDED, HEADER_OF_ORIGINAL
from nsqext.client.consumer.handlers.republish import republish, republisher
from nsqext.client.consumer.position import Position
from nsqext.errors import (
    InvalidInput,
    NsqError,
    OperationNotSupported,
    PartitionUnavailable,
    ServerError,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.lookup.lookup import Lookup
from nsqext.protocol.header_members import without_members

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.producer import Producer
    from nsqext.transport.settings import ConnectionSettings
    from nsqext.types import Address

_UNREADABLE = 60.0  # seconds without a dead letter after which a replay ends, although a server has stored more
_MOST_REFUSED = 100  # dead letters that cannot be published, after which a replay ends


async def replay_dead_letters(
    topic: str,
    *,
    lookupd: str | Sequence[str] | Lookup,
    channel: str = "replay",
    idle: float = 5.0,
    **connection: Unpack[ConnectionSettings],
) -> int:
    """Publish the messages of a dead letter topic to their original topics.

    Body, extend header and trace id are published as stored originally, without the headers of the dead letter. All
    channels of the topic receive the message, not only the channel where it failed. A dead letter is finished after its
    message was stored; an interrupted replay continues where it ended, and may publish a message twice. A dead letter
    that can never be published stays in the topic; the replay continues, and raises its error at the
    end, or after 100 of them.

    Dead letters that are stored after the replay began are left to the next one: a message that is rejected again is
    published once.

    Args:
        topic: the dead letter topic; on the redesigned NSQ, with extend support.
        lookupd: lookup addresses, or a shared lookup.
        channel: remembers what was replayed; a new channel begins with the oldest message.
        idle: seconds without a dead letter after which the replay ends.
        connection: settings of connections to nodes, for example ``tls``.

    Returns:
        The number of replayed messages.

    Raises:
        InvalidInput: messages without headers of a dead letter, or that are not valid; they stay in the topic.
        TopicNotFound: lookup does not know the topic, or the original topic of dead letters, which stay in the topic.
        OperationNotSupported: the topic is on the original NSQ, where dead letters have no headers.
        PartitionUnavailable: not all partitions are connected, or a node delivers nothing of what it has stored for a
            minute: dead letters may remain.
        NsqError: a message was not published, or the topic cannot be consumed.
    """
    lookup = lookupd if isinstance(lookupd, Lookup) else Lookup(lookupd)
    async with republisher(lookup, **connection) as producer:
        await _check_topic(producer, topic)
        stored = _Stored(lookup, topic, channel)
        partitions = await stored.begin()
        async with Consumer(
            topic,
            channel,
            lookup,
            max_in_flight=max(1, partitions),  # a partition that waits for its turn counts as one without dead letters
            start=Position.earliest(),
            queue_position=True,
            decompress=False,
            **connection,
        ) as consumer:
            count = await _replay(producer, consumer, stored, idle)
            check_complete(lookup, consumer, topic, count)
            return count


async def _check_topic(producer: Producer, topic: str) -> None:
    """Raise unless the topic is on the redesigned NSQ; a consumer would wait for it."""
    with suppress(TopicNotReady):  # it has no channel yet
        if not (await producer.meta(topic)).partition_num:
            raise OperationNotSupported(
                "dead letters on the original NSQ do not say where they were rejected",
                topic=topic,
                hint="consume them, and publish them where they belong",
            )


class _Stored:
    """The dead letters that are stored when a replay begins."""

    def __init__(self, lookup: Lookup, topic: str, channel: str) -> None:
        self._lookup = lookup
        self._topic = topic
        self._channel = channel
        self._ends: dict[int | None, int] = {}  # byte offsets, without partitions whose leader does not respond
        self._received: dict[int | None, int] = {}  # byte offsets behind the last received messages

    async def begin(self) -> int:
        """Ask where partitions end; return the number of those that respond."""
        for partition, http in await self._leaders():
            with suppress(PartitionUnavailable):
                bounds = await self._lookup.metadata.channels.log_bounds(http, self._topic, partition)
                self._ends[partition] = bounds.end
        return len(self._ends)

    async def _leaders(self) -> list[tuple[int, Address]]:
        view = await self._lookup.metadata.resolve(self._topic, "r")
        return [(partition, view.http[node]) for partition, node in view.leaders.items() if node in view.http]

    def has(self, message: Message) -> bool:
        """Return whether a received message is one of them."""
        partition = message.partition
        self._received[partition] = max(self._received.get(partition, 0), message.offset + message.size)
        return message.offset < self._ends.get(partition, inf)

    async def unreadable(self) -> list[int]:
        """Return the partitions with dead letters that the server does not deliver yet.

        A node of the redesigned NSQ delivers what it has flushed, which takes it seconds when it is busy.
        """
        found = []
        for partition, http in await self._leaders():
            if self._received.get(partition, 0) < self._ends.get(partition, 0):
                with suppress(PartitionUnavailable):
                    ask = self._lookup.metadata.channels.channel
                    channel = await ask(http, self._topic, partition, self._channel)
                    if channel is not None and channel.unreadable:
                        found.append(partition)
        return found


async def _replay(producer: Producer, consumer: Consumer, stored: _Stored, idle: float) -> int:
    """Publish the stored dead letters, until none of them arrives for ``idle`` seconds; return their number."""
    count = 0
    kept: set[tuple[int | None, bytes]] = set()  # partitions and ids of dead letters that stay in flight
    refused: list[NsqError] = []
    end = anyio.current_time() + idle
    last = end + _UNREADABLE
    while len(refused) < _MOST_REFUSED:
        with anyio.move_on_after(end - anyio.current_time()) as scope:
            message = await anext(consumer)
        if scope.cancelled_caught:
            if not (unreadable := await stored.unreadable()):
                break
            if end > last:
                raise _incomplete(
                    unreadable, consumer.topics[0], count, "their leaders do not deliver them yet", "later"
                )
            end = anyio.current_time() + idle
            continue
        place, is_stored = (message.partition, message.id), stored.has(message)
        if place in kept:  # it has timed out, and is in flight again
            continue
        if not is_stored:
            kept.add(place)
        else:
            try:
                await _publish(producer, message)
            except (InvalidInput, TopicNotFound, ServerError) as error:
                if error.retryable and not isinstance(error, TopicNotFound):
                    raise
                refused.append(error)
                kept.add(place)
            else:
                await message.finish()
                count += 1
            end = anyio.current_time() + idle
            last = end + _UNREADABLE
        if place in kept:
            consumer.max_in_flight += 1  # for the dead letters behind it
    if refused:
        raise _with_numbers(refused, count)
    return count


def _with_numbers(refused: list[NsqError], count: int) -> NsqError:
    first = refused[0]
    unread = ", and the rest was not read" if len(refused) == _MOST_REFUSED else ""
    numbers = f"{len(refused)} of {count + len(refused)} dead letters were not replayed{unread}"
    first.message = f"{numbers}; {first.message}"
    return first


async def _publish(producer: Producer, message: Message) -> None:
    """Publish a dead letter to the topic where it failed."""
    origin = message.header_value(DEAD_LETTER_PREFIX + "topic")
    if origin is None:
        raise InvalidInput(
            f"{message!r} is not a dead letter: it has no header {DEAD_LETTER_PREFIX}topic", topic=message.topic
        )
    header = without_members(message.header, FIRST_ADDED, DEAD_LETTER_PREFIX, original=HEADER_OF_ORIGINAL)
    await republish(producer, origin, message, header)


def check_complete(lookup: Lookup, consumer: Consumer, topic: str, count: int) -> None:
    """Raise unless the consumer is connected to all partitions of the topic."""
    found = lookup.metadata.cached(topic, "r")
    missing = set(range(found.partition_num if found is not None else 1))
    missing -= {connection.partition for connection in consumer.connections}
    if missing:
        reason = "the consumer is not connected to their leaders"
        raise _incomplete(missing, topic, count, reason, "when the partitions have leaders")


def _incomplete(partitions: Iterable[int], topic: str, count: int, reason: str, when: str) -> PartitionUnavailable:
    return PartitionUnavailable(
        f"dead letters of partitions {sorted(partitions)} may remain: {reason}",
        topic=topic,
        hint=f"replayed: {count}; replay the rest {when}",
    )
