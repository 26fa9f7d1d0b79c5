"""Ephemeral channels: one for each reader, deleted by the server with its connection; and the names of channels."""

from __future__ import annotations

from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING

from attrs import evolve

from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.partition_reader import PartitionReader, SubscribeRequest
from nsqext.errors.server import ChannelNotRegistered
from nsqext.protocol.names import MAX_NAME_LENGTH

if TYPE_CHECKING:
    from nsqext.spark.cluster.node_http import Leader
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import TopicMeta

MARK = ".setup"  # suffix of the channel that exists while an anchor channel is being created
_DIGEST = 8

_PREFIX = "nsqext_spark"
_EPHEMERAL = "#ephemeral"
_READ_SIZE = 524288
_CONSUMER = ConsumerOptions(
    queue_position=True,
    msg_timeout=60.0,
    # the messages are stored already: large pieces cost a fifth less CPU than those of the server's default buffer
    output_buffer_size=65536,
    output_buffer_timeout=0.01,
)


def ephemeral_name(prefix: str | None = None) -> str:
    """Return a unique name of an ephemeral channel; its first part is cut where the name would be too long."""
    suffix = f"_{token_hex(8)}{_EPHEMERAL}"
    return f"{(prefix or _PREFIX)[: MAX_NAME_LENGTH - len(suffix)]}{suffix}"


def setup_mark(channel: str) -> str:
    """Return the name of the channel that exists while ``channel`` is being created."""
    room = MAX_NAME_LENGTH - len(MARK)
    if len(channel) <= room:
        return f"{channel}{MARK}"
    digest = blake2b(channel.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{channel[: room - _DIGEST]}{digest}{MARK}"


async def open_ephemeral(
    options: ConnectionOptions, leader: Leader, topic: str, partition: int, meta: TopicMeta, channel: str
) -> PartitionReader:
    """Connect to a leader and subscribe to a channel with RDY 0.

    SUB creates the channel: one that is created over HTTP and never subscribed to is never deleted. If the node refuses
    or does not answer, nothing stays open.
    """
    consumer = evolve(_CONSUMER, connection=options)
    request = SubscribeRequest(topic, channel, partition, leader.tcp, meta, None, consumer)
    try:
        return await PartitionReader.open(request, read_size=_READ_SIZE)
    except ChannelNotRegistered as error:
        error.hint = "the topic accepts registered channels only: use readMode=channel with one of them"
        raise
