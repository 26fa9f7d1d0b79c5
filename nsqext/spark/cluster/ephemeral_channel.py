"""Scratch channels: a reader's own place in a partition, which goes away with its connection; and names of channels."""

from __future__ import annotations

from hashlib import blake2b
from secrets import token_hex
from typing import TYPE_CHECKING

from nsqext.errors import NsqError
from nsqext.errors.server import ChannelNotRegistered
from nsqext.protocol.client.commands import sub
from nsqext.protocol.identify import IdentifyRequest
from nsqext.protocol.names import MAX_NAME_LENGTH
from nsqext.transport.handshake import open_connection, subscribe

if TYPE_CHECKING:
    from nsqext.protocol.identify import Negotiated
    from nsqext.spark.cluster.node_http import Leader
    from nsqext.transport.connection import Connection
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import TopicMeta

__all__ = ("MARK", "mark_of", "open_scratch", "scratch_name")

MARK = ".setup"
"""What the names of channels end with which say that another one is being made."""
_DIGEST = 8

_PREFIX = "nsqext_spark"
_EPHEMERAL = "#ephemeral"
_MSG_TIMEOUT = 60.0
_BUFFER_SIZE = 65536
_BUFFER_TIMEOUT = 0.01


def scratch_name(prefix: str | None = None) -> str:
    """Return the name of a channel that nobody else has.

    Args:
        prefix: what it begins with, as far as there is room.
    """
    suffix = f"_{token_hex(8)}{_EPHEMERAL}"
    return f"{(prefix or _PREFIX)[: MAX_NAME_LENGTH - len(suffix)]}{suffix}"


def mark_of(channel: str) -> str:
    """Return the name of the channel which says that a channel is being made; each channel has one of its own."""
    room = MAX_NAME_LENGTH - len(MARK)
    if len(channel) <= room:
        return f"{channel}{MARK}"
    digest = blake2b(channel.encode(), digest_size=_DIGEST // 2).hexdigest()
    return f"{channel[: room - _DIGEST]}{digest}{MARK}"


async def open_scratch(
    options: ConnectionOptions, leader: Leader, topic: str, partition: int, meta: TopicMeta, channel: str
) -> tuple[Connection, Negotiated]:
    """Connect to a leader and subscribe to a channel, which asks for no message yet.

    The channel is made by subscribing: one that is made over HTTP and that nobody subscribes to would stay for ever.
    The start position that SUB_ADVANCED takes makes servers ignore the partition (captured:
    sub_advanced_offset_partition), so the channel is moved afterwards.

    Args:
        options: how to connect.
        leader: the node.
        topic: the topic.
        partition: the partition.
        meta: the topic's meta; decides extend support and order.
        channel: name of the channel.

    Raises:
        NsqError: it did not work; nothing stays open.
    """
    request = IdentifyRequest(
        extend_support=meta.extend_support,
        msg_timeout=_MSG_TIMEOUT,
        # a range is there already: large pieces cost a fifth less here than those of the server's own buffer
        output_buffer_size=_BUFFER_SIZE,
        output_buffer_timeout=_BUFFER_TIMEOUT,
    )
    connection = None
    try:
        connection, negotiated = await open_connection(leader.tcp, options, request)
        verb = "SUB_ORDERED" if meta.ordered else "SUB_ADVANCED"
        await subscribe(connection, sub(topic, channel, partition, verb=verb), options.request_timeout)
    except NsqError as error:
        if connection is not None:
            connection.close()
        if isinstance(error, ChannelNotRegistered):
            error.hint = "the topic takes registered channels only: give readMode=channel with one of them"
        raise error.at(topic=topic, partition=partition, node=str(leader.tcp)) from error.__cause__
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection, negotiated
