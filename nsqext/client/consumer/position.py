"""Positions in the queue of a partition."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Protocol, Self, runtime_checkable

from attrs import frozen

from nsqext.arguments import check_number
from nsqext.errors import InvalidInput

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.lookup.node_channels import LogBounds

_FUTURE = 365 * 24 * 3600.0


@frozen
class Position:
    """A position in the queue of a partition, from a class method."""

    #: unit of ``value``, in the words of the protocol
    kind: Literal["timestamp", "virtual_queue", "msgcount", "special"]
    value: int

    @classmethod
    def earliest(cls) -> Self:
        """Return the position of the oldest stored message."""
        return cls("msgcount", 0)

    @classmethod
    def latest(cls) -> Self:
        """Return the end of the queue."""
        return cls("special", -1)

    @classmethod
    def at(cls, moment: datetime | float) -> Self:
        """Return the position of the first message stored in the given second or later.

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
        """Return the position of the message at a byte offset of the queue, as in receipts, or of the next message."""
        return cls("virtual_queue", check_number("offset", offset, error=InvalidInput))

    @classmethod
    def message(cls, number: int) -> Self:
        """Return the position of the message with this number, counted from 1 over the life of the partition."""
        return cls("msgcount", check_number("number", number, error=InvalidInput))

    def __str__(self) -> str:
        return f"{self.kind}:{self.value}"

    def reached_by(self, message: Message) -> bool:
        """Return whether a message is at this position or later; True if unknown.

        Before it jumps, a server redelivers the record that it had read ahead (captured: channel_setoffset).
        """
        if self.kind == "virtual_queue":
            return message.offset < 0 or message.offset >= self.value
        if self.kind == "timestamp":
            return message.timestamp >= self.value * 1_000_000_000
        return True


@runtime_checkable
class StartPositions(Protocol):
    """Decides where partitions are read from, for example `nsqext.transactions.Positions`."""

    async def start_of(self, topic: str, channel: str, partition: int, log: LogBounds) -> Position | None:
        """Return where to read a partition from, before each subscription; None for the position of the channel.

        Raises:
            DataLoss: the log does not contain that position; the consumer ends.
            PartitionUnavailable: the position is not known now; the consumer tries again.
        """


def read_position(text: str) -> Position:
    """Parse ``earliest``, ``latest``, ``timestamp:SECONDS``, ``offset:BYTES`` or ``message:NUMBER``.

    Raises ValueError.
    """
    kind, _, number = text.partition(":")
    if text in ("earliest", "latest"):
        return Position.earliest() if text == "earliest" else Position.latest()
    if kind == "timestamp":
        return Position.at(float(number))
    if kind in ("offset", "message"):
        return (Position.offset if kind == "offset" else Position.message)(int(number))
    raise ValueError("write earliest, latest, timestamp:SECONDS, offset:BYTES or message:NUMBER")


def check_position(value: object) -> None:
    """Raise InvalidInput for another type."""
    if not isinstance(value, Position):
        raise InvalidInput(f"{value!r} is not a position", hint="give nsqext.Position.earliest(), for example")
