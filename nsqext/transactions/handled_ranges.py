"""What a channel has handled of partitions, kept as ranges of their logs: few rows, however many messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from nsqext.errors import InvalidSetting
from nsqext.transactions.schema import OF_PARTITION, ChannelPartition, execute, fetched, is_postgresql

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.transactions.boundaries import OpenTransaction
    from nsqext.transactions.schema import SqlConnection, Statement


logger: logging.Logger = logging.getLogger("nsqext.transactions")

_INSERT_RANGE = """
INSERT INTO nsqext_inbox_range (topic, channel, partition, first, next, stored, handled)
VALUES (:topic, :channel, :partition, :first, :next, :stored, :handled) ON CONFLICT DO NOTHING
"""
_COVERING = f"""
SELECT max(stored) FROM nsqext_inbox_range
WHERE {OF_PARTITION} AND first <= :first AND next > :first AND NOT (first = :first AND stored = :stored)
"""  # noqa: S608
_REPLACED = f"""
DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} AND stored <= (
    SELECT max(stored) FROM nsqext_inbox_range WHERE {OF_PARTITION} AND next > :first AND stored < :stored
)
"""  # noqa: S608
_TAKE = f"DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} RETURNING first, next, stored, handled"  # noqa: S608
_REMOVE_RANGE = f"""
DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} AND first = :first AND stored = :stored AND handled = :handled
"""  # noqa: S608
_FORGET_RANGES = "DELETE FROM nsqext_inbox_range WHERE handled < :before"
# nanoseconds by which the clocks of leaders may differ: a later message may have an earlier time by so much
_CLOCKS = 5_000_000_000

_IDLE = 1_000_000_000  # nanoseconds without a message after which ranges are kept apart
_APART = 3600.0  # seconds for which they are


class HandledRange(NamedTuple):
    """A part of a log of which every message was handled.

    Attributes:
        first: offset of its first message.
        next: offset behind its last message.
        stored: when the newest of its messages was stored, in nanoseconds since 1970.
        handled: when a message of it was handled last, in seconds since 1970.
    """

    first: int
    next: int
    stored: int
    handled: float


def merged(ranges: Iterable[HandledRange], now: float) -> list[HandledRange]:
    """Return ranges as few as possible: one is joined with that behind it, unless they may be of different logs.

    When a log begins again, a message of it may touch a range of the older one, while messages before it are in flight.
    Joined, the range would seem to contain these. So ranges between which the partition was idle are kept apart for a
    time.

    Args:
        ranges: of one partition.
        now: seconds since 1970.
    """
    found: list[HandledRange] = []
    for one in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and one.next <= last.next and one.stored <= last.stored:
            one = HandledRange(last.first, last.next, last.stored, max(last.handled, one.handled))
            found.pop()
        elif last is not None and one.first == last.next and _are_of_one_log(last, one, now):
            one = HandledRange(last.first, one.next, max(last.stored, one.stored), max(last.handled, one.handled))
            found.pop()
        found.append(one)
    return found


def _are_of_one_log(one: HandledRange, behind: HandledRange, now: float) -> bool:
    pause = behind.stored - one.stored
    return -_CLOCKS <= pause <= _IDLE or (pause > 0 and behind.handled < now - _APART)


class HandledRanges:
    """The ranges in the table ``nsqext_inbox_range``.

    A message is recorded as a range of its own, in the transaction of its handler; `merge` joins those that touch each
    other. So the table has as many rows as there are messages since the last merge, times without messages in the last
    hour, and gaps: messages in flight, and those that the channel does not handle. Nothing is concluded from a gap: a
    message in it was not handled.

    A log whose offsets begin again (a topic that was created again, a leader that lost its last messages) is known by
    the time of its messages: one that is newer than the range around it is not in it. What was handled of the older
    log is deleted then.
    """

    def __init__(self) -> None:
        self._checked = False

    async def add(self, opened: OpenTransaction, channel: str, message: Message, now: float) -> Statement | None:
        """Begin a transaction with the record of a message; return what removes it, None if it was handled before."""
        await self._check(opened.connection)
        values = {
            **ChannelPartition(message.topic, channel, message.partition)._asdict(),
            "first": message.offset,
            "next": message.offset + message.size,
            "stored": message.timestamp,
            "handled": now,
        }
        # first: it waits for a transaction that handles the message, or that merges the range of it
        found = await opened.begin_and_read(_INSERT_RANGE, _COVERING, values)
        if found is None:
            return None
        (newest,) = found
        if newest is None:
            return _REMOVE_RANGE, values
        if newest >= message.timestamp:
            return None
        logger.warning(
            "byte %d of the log holds a newer message than the one that was handled: was the topic created again? "
            "What was handled of the older log is forgotten",
            message.offset,
            extra={"topic": message.topic, "partition": message.partition, "channel": channel},
        )
        await execute(opened.connection, _REPLACED, values)
        return _REMOVE_RANGE, values

    async def merge(self, session: SqlConnection, key: ChannelPartition) -> None:
        """Join the ranges of a partition, in a transaction of its own, unless another process does it now."""
        values = key._asdict()
        if is_postgresql(session):
            lock = "SELECT pg_try_advisory_xact_lock(:number)"
            number = crc32(repr(tuple(key)).encode())
            ((free,),) = await fetched(await execute(session, lock, {"number": number}))
            if not free:
                return
        rows = await fetched(await execute(session, _TAKE, values))
        for one in merged((HandledRange(*row) for row in rows), time.time()):
            await execute(session, _INSERT_RANGE, {**values, **one._asdict()})

    async def forget(self, session: SqlConnection, before: float) -> None:
        """Delete ranges of which no message was handled since a time in seconds since 1970."""
        await execute(session, _FORGET_RANGES, {"before": before})

    async def _check(self, session: SqlConnection) -> None:
        if self._checked:
            return
        if is_postgresql(session):
            ((level,),) = await fetched(await execute(session, "SHOW transaction_isolation", {}))
            if level == "repeatable read":
                raise InvalidSetting(
                    "an inbox cannot be used with the isolation level repeatable read: a message may be handled twice",
                    hint="use read committed, the default of PostgreSQL, or serializable",
                )
        self._checked = True
