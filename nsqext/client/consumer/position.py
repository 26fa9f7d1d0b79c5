"""Positions in the queue of a partition, and moving a channel to one.

The start position that SUB_ADVANCED takes makes the server ignore the partition word (captured:
sub_advanced_offset_partition), and SUB_ORDERED takes none. So a connection subscribes first and moves the channel over
HTTP before it sends RDY.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Self

import orjson
from attrs import frozen

from nsqext.errors import InvalidInput, LookupFailed, NsqError, PartitionUnavailable
from nsqext.lookup.http import LookupHttp
from nsqext.lookup.options import LookupOptions

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.types import Address

__all__ = ("Position", "channel_exists", "check_position", "move_channel", "read_position")

_FUTURE = 365 * 24 * 3600.0
_OPTIONS = LookupOptions(request_timeout=5.0)
_EMPTY = "commit log end of file"
_SHOWN = 200


@frozen
class Position:
    """A position in the queue of a partition; made by the class methods.

    Attributes:
        kind: the unit of ``value``, in the words of the protocol.
        value: a number.
    """

    kind: Literal["timestamp", "virtual_queue", "msgcount", "special"]
    value: int

    @classmethod
    def earliest(cls) -> Self:
        """Return the position of the oldest stored message."""
        return cls("msgcount", 0)

    @classmethod
    def latest(cls) -> Self:
        """Return the end of the queue, before the next message that is published."""
        return cls("special", -1)

    @classmethod
    def at(cls, moment: datetime | float) -> Self:
        """Return the position of the first message that was stored in the given second or later.

        Args:
            moment: a time, or seconds since 1970.

        Raises:
            InvalidInput: a time without zone, before 1970, or more than a year ahead.
        """
        if isinstance(moment, datetime):
            if moment.tzinfo is None:
                raise InvalidInput(f"{moment!r} has no time zone", hint="give one, for example datetime.UTC")
            moment = moment.timestamp()
        if not 0 <= moment <= time.time() + _FUTURE:
            raise InvalidInput(f"{moment!r} is not the time of a message in seconds since 1970")
        return cls("timestamp", int(moment))

    @classmethod
    def offset(cls, offset: int) -> Self:
        """Return the position of the message at a byte offset of the queue, or of the next one.

        Messages and receipts report offsets.
        """
        return cls("virtual_queue", _count(offset))

    @classmethod
    def message(cls, number: int) -> Self:
        """Return the position of the message with this number, counted from 1 over the life of the partition."""
        return cls("msgcount", _count(number))

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    def reached_by(self, message: Message) -> bool:
        """Return whether a message is at this position or later; True if it is unknown.

        A server delivers the record that it had read ahead once more before it jumps (captured: channel_setoffset).
        """
        if self.kind == "virtual_queue":
            return message.offset < 0 or message.offset >= self.value
        if self.kind == "timestamp":
            return message.timestamp >= self.value * 1_000_000_000
        return True


def _count(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{value!r} is not a position: it must be an integer of 0 or more")
    return value


def read_position(text: str) -> Position:
    """Parse ``earliest``, ``latest``, ``timestamp:SECONDS``, ``offset:BYTES`` or ``message:NUMBER``.

    Raises:
        ValueError: the text is none of these.
    """
    kind, _, number = text.partition(":")
    if text == "earliest":
        return Position.earliest()
    if text == "latest":
        return Position.latest()
    if kind == "timestamp":
        return Position.at(float(number))
    if kind == "offset":
        return Position.offset(int(number))
    if kind == "message":
        return Position.message(int(number))
    raise ValueError("write earliest, latest, timestamp:SECONDS, offset:BYTES or message:NUMBER")


def check_position(value: object) -> None:
    """Check that a value is a position.

    Raises:
        InvalidInput: it is not.
    """
    if not isinstance(value, Position):
        raise InvalidInput(f"{value!r} is not a position", hint="give nsqext.Position.earliest(), for example")


async def channel_exists(http: Address, topic: str, partition: int, channel: str) -> bool:
    """Return whether a node has a channel at a partition that it leads.

    Args:
        http: the node's HTTP address.
        topic: name of the topic.
        partition: the partition.
        channel: name of the channel.

    Raises:
        PartitionUnavailable: the node does not respond.
    """
    params = {"format": "json", "topic": topic, "partition": str(partition)}
    body = await _request("GET", http, "/stats", params, b"")
    try:
        data = orjson.loads(body)
        topics = data.get("data", data).get("topics") or ()
        return any(
            found.get("channel_name") == channel
            for entry in topics
            if entry.get("topic_name") == topic and str(entry.get("topic_partition", partition)) == str(partition)
            for found in entry.get("channels") or ()
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise PartitionUnavailable(
            f"the node's statistics cannot be read: {body[:_SHOWN]!r}", topic=topic, partition=partition, node=str(http)
        ) from error


async def move_channel(http: Address, topic: str, partition: int, channel: str, position: Position) -> None:
    """Move a channel to a position; the server forgets its messages in flight.

    Args:
        http: HTTP address of the partition's leader.
        topic: name of the topic.
        partition: the partition.
        channel: name of the channel; it has to exist.
        position: the position.

    Raises:
        PartitionUnavailable: the node cannot be reached, or refuses.
    """
    params = {"topic": topic, "partition": str(partition), "channel": channel}
    try:
        await _request("POST", http, "/channel/setoffset", params, str(position).encode())
    except NsqError as error:
        if _EMPTY in error.message:
            # the real server refuses to move a channel of an empty queue, which has only one position
            return
        raise error.at(topic=topic, partition=partition) from error.__cause__


async def _request(method: str, address: Address, path: str, params: dict[str, str], body: bytes) -> bytes:
    http = LookupHttp(_OPTIONS)
    try:
        status, answer = await http.fetch(address, path, params, method, body)
    except LookupFailed as error:
        raise PartitionUnavailable(
            f"no response to {path}: {error.message}", node=error.node, hint="is the node's HTTP side up?"
        ) from error
    finally:
        await http.aclose()
    if status != 200:
        raise PartitionUnavailable(f"{path} was refused with {status}: {answer[:_SHOWN]!r}", node=str(address))
    return answer
