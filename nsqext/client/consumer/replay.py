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
    from collections.abc import Mapping, Sequence

    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.producer import Producer
    from nsqext.transport.settings import ConnectionSettings

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
        PartitionUnavailable: not all partitions are connected: dead letters may remain.
        NsqError: a message was not published, or the topic cannot be consumed.
    """
    lookup = lookupd if isinstance(lookupd, Lookup) else Lookup(lookupd)
    async with republisher(lookup, **connection) as producer:
        await _check_topic(producer, topic)
        ends = await _ends(lookup, topic)
        async with Consumer(
            topic,
            channel,
            lookup,
            max_in_flight=max(1, len(ends)),  # a partition that waits for its turn counts as one without dead letters
            start=Position.earliest(),
            queue_position=True,
            decompress=False,
            **connection,
        ) as consumer:
            count = await _replay(producer, consumer, ends, idle)
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


async def _ends(lookup: Lookup, topic: str) -> dict[int | None, int]:
    """Return where partitions end now, as byte offsets; without those whose leader does not respond."""
    view = await lookup.metadata.resolve(topic, "r")
    ends: dict[int | None, int] = {}
    for partition, leader in view.leaders.items():
        http = view.http.get(leader)
        if http is not None:
            with suppress(PartitionUnavailable):
                ends[partition] = (await lookup.metadata.channels.log_bounds(http, topic, partition)).end
    return ends


async def _replay(producer: Producer, consumer: Consumer, ends: Mapping[int | None, int], idle: float) -> int:
    """Publish the dead letters before the ends of partitions, until none of them arrives for ``idle`` seconds.

    Returns their number.
    """
    count = 0
    kept: set[tuple[int | None, bytes]] = set()  # partitions and ids of dead letters that stay in flight
    refused: list[NsqError] = []
    end = anyio.current_time() + idle
    while len(refused) < _MOST_REFUSED:
        with anyio.move_on_after(end - anyio.current_time()) as scope:
            message = await anext(consumer)
        if scope.cancelled_caught:
            break
        place = message.partition, message.id
        if place in kept:  # it has timed out, and is in flight again
            continue
        if message.offset >= ends.get(message.partition, inf):
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
        if place in kept:
            consumer.max_in_flight += 1  # for the dead letters behind it
    if refused:
        first = refused[0]
        unread = ", and the rest was not read" if len(refused) == _MOST_REFUSED else ""
        numbers = f"{len(refused)} of {count + len(refused)} dead letters were not replayed{unread}"
        first.message = f"{numbers}; {first.message}"
        raise first
    return count


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
        raise PartitionUnavailable(
            f"dead letters of partitions {sorted(missing)} may remain: the consumer is not connected to their leaders",
            topic=topic,
            hint=f"replayed: {count}; replay the rest when the partitions have leaders",
        )
