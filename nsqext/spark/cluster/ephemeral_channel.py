"""Ephemeral channels: one for each reader, deleted by the server with its connection; and the names of channels."""

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

__all__ = ("MARK", "ephemeral_name", "open_ephemeral", "setup_mark")

MARK = ".setup"
"""Suffix of the channel that exists while an anchor channel is being created."""
_DIGEST = 8

_PREFIX = "nsqext_spark"
_EPHEMERAL = "#ephemeral"
_MSG_TIMEOUT = 60.0
_BUFFER_SIZE = 65536
_BUFFER_TIMEOUT = 0.01


def ephemeral_name(prefix: str | None = None) -> str:
    """Return a unique name of an ephemeral channel.

    Args:
        prefix: first part of the name; cut where the name would be too long.
    """
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
) -> tuple[Connection, Negotiated]:
    """Connect to a leader and subscribe to a channel with RDY 0.

    SUB creates the channel: one that is created over HTTP and never subscribed to is never deleted. The start position
    of SUB_ADVANCED makes servers ignore the partition (captured: sub_advanced_offset_partition), so the channel is
    moved afterwards.

    Args:
        options: how to connect.
        leader: the node.
        topic: the topic.
        partition: the partition.
        meta: meta of the topic; decides extend support and order.
        channel: name of the channel.

    Raises:
        NsqError: the node refused or did not answer; nothing stays open.
    """
    request = IdentifyRequest(
        extend_support=meta.extend_support,
        msg_timeout=_MSG_TIMEOUT,
        # the messages are stored already: large pieces cost a fifth less CPU than those of the server's default buffer
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
            error.hint = "the topic accepts registered channels only: use readMode=channel with one of them"
        raise error.at(topic=topic, partition=partition, node=str(leader.tcp)) from error.__cause__
    except BaseException:
        if connection is not None:
            connection.close()
        raise
    return connection, negotiated
