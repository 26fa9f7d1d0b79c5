"""Handled messages of a channel, kept as ranges of the logs of partitions: few rows, however many messages."""

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
# the key of the table begins with `next`: what is before the message is not read
_COVERING = f"""
SELECT max(stored) FROM nsqext_inbox_range
WHERE {OF_PARTITION} AND next > :first AND first <= :first AND NOT (next = :next AND stored = :stored)
"""  # noqa: S608
_REPLACED = f"""
DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} AND stored <= (
    SELECT max(stored) FROM nsqext_inbox_range WHERE {OF_PARTITION} AND next > :first AND stored < :stored
)
"""  # noqa: S608
_TAKE = f"DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} RETURNING first, next, stored, handled"  # noqa: S608
_REMOVE_RANGE = f"""
DELETE FROM nsqext_inbox_range WHERE {OF_PARTITION} AND next = :next AND stored = :stored AND handled = :handled
"""  # noqa: S608
_FORGET_RANGES = "DELETE FROM nsqext_inbox_range WHERE handled < :before"
_CLOCKS = 5_000_000_000  # nanoseconds by which the clocks of leaders may differ

_IDLE = 1_000_000_000  # nanoseconds without a message after which ranges are kept apart
_APART = 3600.0  # seconds for which ranges are kept apart


class HandledRange(NamedTuple):
    """A part of a log of which every message was handled.

    Attributes:
        first: offset of its first message.
        next: offset behind its last message.
        stored: when its newest message was stored, in nanoseconds since 1970.
        handled: when a message was handled last, in seconds since 1970.
    """

    first: int
    next: int
    stored: int
    handled: float


def merged(ranges: Iterable[HandledRange], now: float) -> list[HandledRange]:
    """Join ranges of a partition that touch each other, unless they may be of different logs.

    When a log begins again, its message may touch a range of the older log, while messages before it are in flight:
    the joined range would contain them. So ranges between which the partition was idle are kept apart for a time.

    Args:
        ranges: ranges of one partition.
        now: seconds since 1970.
    """
    found: list[HandledRange] = []
    for part in sorted(ranges):
        last = found[-1] if found else None
        if last is not None and part.next <= last.next and part.stored <= last.stored:
            part = HandledRange(last.first, last.next, last.stored, max(last.handled, part.handled))
            found.pop()
        elif last is not None and part.first == last.next and _are_of_one_log(last, part, now):
            part = HandledRange(last.first, part.next, max(last.stored, part.stored), max(last.handled, part.handled))
            found.pop()
        found.append(part)
    return found


def _are_of_one_log(before: HandledRange, behind: HandledRange, now: float) -> bool:
    pause = behind.stored - before.stored
    return -_CLOCKS <= pause <= _IDLE or (pause > 0 and behind.handled < now - _APART)


class HandledRanges:
    """The ranges in the table ``nsqext_inbox_range``.

    A message is recorded as its own range, in the transaction of its handler; `merge` joins ranges. The table has a row
    for each message since the last merge, each time without messages in the last hour, and each gap: messages in flight
    or not handled by the channel.

    When the offsets of a log begin again (a topic that was created again, a leader that lost its last messages), a
    message is newer than the range around it, and was not handled. The ranges of the older log are deleted then.
    """

    def __init__(self) -> None:
        self._checked = False

    async def add(self, opened: OpenTransaction, channel: str, message: Message, now: float) -> Statement | None:
        """Begin a transaction with the record of a message; return what removes it, None if it was handled before.

        Raises:
            InvalidSetting: the isolation level is repeatable read.
        """
        await self._check(opened.connection)
        values = {
            **ChannelPartition(message.topic, channel, message.partition)._asdict(),
            "first": message.offset,
            "next": message.offset + message.size,
            "stored": message.timestamp,
            "handled": now,
        }
        # the insert waits for a transaction that handles the message, or that merges its range
        found = await opened.begin_and_read(_INSERT_RANGE, _COVERING, values)
        if found is None:
            return None
        (newest,) = found
        if newest is None:
            return _REMOVE_RANGE, values
        if newest >= message.timestamp:
            return None
        logger.warning(
            "byte %d of the log holds a newer message than the handled message: was the topic created again? "
            "What was handled of the older log is forgotten",
            message.offset,
            extra={"topic": message.topic, "partition": message.partition, "channel": channel},
        )
        await execute(opened.connection, _REPLACED, values)
        return _REMOVE_RANGE, values

    async def merge(self, session: SqlConnection, key: ChannelPartition) -> None:
        """Join the ranges of a partition, in a transaction of its own, unless another process joins them now."""
        values = key._asdict()
        if is_postgresql(session):
            lock = "SELECT pg_try_advisory_xact_lock(:number)"
            number = crc32(repr(tuple(key)).encode())
            ((free,),) = await fetched(await execute(session, lock, {"number": number}))
            if not free:
                return
        rows = await fetched(await execute(session, _TAKE, values))
        for part in merged((HandledRange(*row) for row in rows), time.time()):
            await execute(session, _INSERT_RANGE, {**values, **part._asdict()})

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
