"""Handle each message once: its identity and the effects of its handler are committed together.

What a channel has handled of partitions is kept as ranges of their logs: few rows, however many messages.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from secrets import token_hex
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar
from zlib import crc32

from anyio import CancelScope, to_thread

from nsqext.arguments import check_time
from nsqext.client.consumer.message import Finish
from nsqext.client.middleware import Middleware
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.protocol.headers import IDENTITY_HEADER
from nsqext.protocol.names import MAX_IDENTITY, is_storable
from nsqext.transactions.boundaries import (
    End,
    OpenTransaction,
    autocommit_error,
    check_outermost,
    end_error,
    uncommitted_error,
)
from nsqext.transactions.schema import (
    OF_PARTITION,
    ChannelPartition,
    SqlConnection,
    execute,
    fetched,
    is_postgresql,
    missing_table,
)

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import CallNext, Handling


logger: logging.Logger = logging.getLogger("nsqext.transactions")

S = TypeVar("S", bound=SqlConnection)

Statement = tuple[str, Mapping[str, object]]
"""SQL and the values of its parameters."""

Begin = Callable[[], AbstractAsyncContextManager[S] | AbstractContextManager[S]]
"""Opens a transaction, and commits it at the end or rolls it back after an exception."""


class _RolledBack(Exception):
    """Ends the first transaction of a check."""


class HandlerTransaction(Middleware, Generic[S]):
    """What `Inbox` and `Positions` share.

    Args:
        begin: see there.
    """

    _tables: ClassVar[tuple[str, ...]]

    def __init__(self, begin: Begin[S]) -> None:
        self._begin = begin
        self._session: ContextVar[S] = ContextVar("nsqext_session")
        self._checked = False
        self.skipped: int = 0
        """Messages that were handled before, and skipped."""

    def session(self) -> S:
        """Return the session of the message that is being handled: ``Annotated[AsyncSession, Depends(inbox.session)]``.

        Raises:
            InvalidState: no message is being handled.
        """
        found = self._session.get(None)
        if found is None:
            raise InvalidState("no message is being handled", hint="call it in a handler with this middleware")
        return found

    async def start(self) -> None:
        """Check the tables and ``begin``, see `check`; a warning is logged if the database does not respond.

        Raises:
            InvalidSetting: as for `check`.
        """
        if self._checked:
            return
        try:
            await self.check()
        except (InvalidInput, InvalidSetting):
            raise
        except Exception as error:
            logger.warning("%s cannot check its database yet: %s", type(self).__name__, error)

    async def _check_tables(self) -> None:
        for table in self._tables:
            try:
                await self._read(f"SELECT 1 FROM {table} WHERE 1 = 0")  # noqa: S608
            except Exception as error:
                await self._read("SELECT 1")  # raises if the database does not respond
                raise missing_table(type(self).__name__, table, error) from error

    async def _read(self, sql: str) -> None:
        async with self._transaction() as session:
            check_outermost(session)
            await execute(session, sql, {})

    async def check(self) -> None:
        """Check that the tables exist, and that ``begin`` commits at its end and rolls back after an exception.

        The start of an app or consumer does so too. A row is written in three transactions and removed.

        Raises:
            InvalidSetting: a table is missing, or ``begin`` does not, or opens a savepoint in a longer transaction.
            Exception: those of the database.
        """
        await self._check_tables()
        name = token_hex(8)
        with suppress(_RolledBack):
            async with self._transaction() as session:
                check_outermost(session)
                await self._write_probe(session, name)
                raise _RolledBack
        async with self._transaction() as session:
            stayed = await self._remove_probe(session, name)
            if not stayed:
                await self._write_probe(session, name)
        if stayed:
            raise autocommit_error()
        async with self._transaction() as session:
            committed = await self._remove_probe(session, name)
        if not committed:
            raise uncommitted_error()
        self._checked = True

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler in a transaction, unless the message was handled before.

        Raises:
            InvalidInput: the handler receives batches.
            InvalidSetting: ``begin`` opens no transaction that is committed or rolled back at its end.
            InvalidState: the handler has ended its transaction; the message is handled again.
            Exception: that of the handler, or of the database; nothing is committed then.
        """
        if handling.batch:
            raise InvalidInput(
                f"{type(self).__name__} cannot be used with batches", hint="use a handler of single messages"
            )
        if not self._checked:
            await self.check()
        undo: list[Statement] = []
        try:
            return await self._handle(handling, call_next, undo)
        finally:
            if undo:
                await self._undo(undo[0])

    async def _handle(self, handling: Handling, call_next: CallNext, undo: list[Statement]) -> object:
        """Call the handler in a transaction; add what removes the record of a message that may be committed alone."""
        finish: Finish | None = None
        result: object = None
        async with self._transaction() as session:
            check_outermost(session)
            removal = await self._record(session, handling.channel, handling.message)
            if removal is None:
                self.skipped += 1
                return None
            undo.append(removal)
            opened = await OpenTransaction.of(session)
            undo.clear()
            token = self._session.set(session)
            try:
                result = await call_next(handling)
            except Finish as signal:  # the message is done: commit
                finish = signal
            except Exception as error:
                end = await opened.end()
                if end is not End.OPEN:
                    undo.append(removal)
                if end is End.ENDED:
                    raise end_error(end, handling.message.topic) from error
                raise
            finally:
                opened.release()
                self._session.reset(token)
            end = await opened.end()
            if end is not End.OPEN:
                undo.append(removal)
                raise end_error(end, handling.message.topic)
        if finish is not None:
            raise finish
        return result

    async def _undo(self, removal: Statement) -> None:
        """Remove the record of a message, so that it is handled again."""
        try:
            with CancelScope(shield=True):
                async with self._transaction() as session:
                    await execute(session, *removal)
        except Exception:
            logger.exception("a message may be skipped although its handler has failed")

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[S]:
        """Open a transaction; one of a blocking connection begins and ends in a thread."""
        manager = self._begin()
        if isinstance(manager, AbstractAsyncContextManager):
            async with manager as session:
                yield session
            return
        session = await to_thread.run_sync(manager.__enter__)
        try:
            yield session
        except BaseException as error:
            with CancelScope(shield=True):
                await to_thread.run_sync(manager.__exit__, type(error), error, error.__traceback__)
            raise
        with CancelScope(shield=True):
            await to_thread.run_sync(manager.__exit__, None, None, None)

    @abstractmethod
    async def _record(self, session: S, channel: str, message: Message) -> Statement | None:
        """Record a message in the transaction; return what removes the record, None if it was handled before."""

    @abstractmethod
    async def _write_probe(self, session: S, name: str) -> None:
        """Write a row that stands for no message."""

    @abstractmethod
    async def _remove_probe(self, session: S, name: str) -> bool:
        """Remove that row; return whether there was one."""


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
_CLOCKS = 5_000_000_000
"""Nanoseconds by which the clocks of leaders may differ: a later message may have an earlier time by so much."""

_IDLE = 1_000_000_000
"""Nanoseconds without a message after which ranges are kept apart."""
_APART = 3600.0
"""Seconds for which they are."""


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

    async def add(self, session: SqlConnection, channel: str, message: Message, now: float) -> Statement | None:
        """Record a message; return what removes the record, None if it was handled before."""
        await self._check(session)
        values = {
            **ChannelPartition(message.topic, channel, message.partition)._asdict(),
            "first": message.offset,
            "next": message.offset + message.size,
            "stored": message.timestamp,
            "handled": now,
        }
        # first: it waits for a transaction that handles the message, or that merges the range of it
        if not (await execute(session, _INSERT_RANGE, values)).rowcount:
            return None
        ((newest,),) = await fetched(await execute(session, _COVERING, values))
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
        await execute(session, _REPLACED, values)
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


_INSERT = """
INSERT INTO nsqext_inbox (channel, identity, handled) VALUES (:channel, :identity, :handled) ON CONFLICT DO NOTHING
"""
_DIGEST = "sha256:"
"""Begins identities that stand for those that a database cannot store."""
_REMOVE = "DELETE FROM nsqext_inbox WHERE channel = :channel AND identity = :identity AND handled = :handled"
_FORGET = "DELETE FROM nsqext_inbox WHERE handled < :before"
_PROBE = "#probe"
"""In place of a channel: no channel has this name."""
_REMOVE_PROBE = "DELETE FROM nsqext_inbox WHERE channel = :channel AND identity = :identity"
_KEEP_PROBE = 3600.0
"""Seconds for which other processes keep it."""
_FORGET_EVERY = 600.0
"""Seconds between two removals of old identities."""
_MERGE_EVERY = 200
"""Messages of a partition between two merges of its ranges, in one process."""


class Inbox(HandlerTransaction[S]):
    """A middleware that opens a transaction around each call of a handler, and skips messages that were handled before.

    The identity of the message is written in the transaction of the handler: both are committed, or neither is. A
    message whose identity is there is finished without a call. The handler takes the session of the transaction from
    `session`, and must neither commit it nor finish the message; the middleware commits before the message is finished.

    The identity is the header ``nsqext_id`` (that of an outbox, of a relay of delayed messages, or of the Spark sink).
    On topics without headers, ``identity`` reads it from the body. Without one, it is the place in the log of the
    partition where the consumer receives offsets (``queue_position``, or an ordered topic), and otherwise the id of the
    message; a message that was published twice has two of these.

    Identities are kept for a time. Places in a log are joined to ranges: what the table contains of a partition depends
    on the messages in flight, and on those that the channel does not handle, and not on how many were handled.

    The tables are those of `nsqext.transactions.schema_sql`. They are in the database of the effects: an effect
    elsewhere is not undone by a rollback.

    Args:
        begin: opens a transaction, and commits it at the end or rolls it back after an exception:
            ``async_sessionmaker(engine).begin`` or ``sessionmaker(engine).begin`` of SQLAlchemy, ``pool.connection`` of
            psycopg's pools, or another function that returns a context manager. Blocking connections are used in
            threads.
        keep: seconds for which identities are kept; longer than any message is delivered again after it was handled.
        identity: returns the identity of a message within its topic, for example the number of an order in its body;
            None for the identity above.

    Raises:
        InvalidSetting: a time that is not valid.
    """

    _tables = ("nsqext_inbox", "nsqext_inbox_range")

    def __init__(
        self, begin: Begin[S], *, keep: float = 14 * 86_400.0, identity: Callable[[Message], str | None] | None = None
    ) -> None:
        super().__init__(begin)
        check_time("keep", keep, zero=False)
        self._keep = keep
        self._identity = identity
        self._forgotten = float("-inf")
        self._ranges = HandledRanges()
        self._unmerged: Counter[ChannelPartition] = Counter()

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler in a transaction, unless the message was handled before.

        Raises:
            InvalidInput: the handler receives batches.
            Exception: that of the handler, or of the database; nothing is committed then.
        """
        try:
            return await super().handle(handling, call_next)
        finally:
            first = handling.messages[0]
            key = ChannelPartition(first.topic, handling.channel, first.partition)
            if self._unmerged[key] >= _MERGE_EVERY:
                self._unmerged[key] = 0
                await self._merge(key)

    async def _merge(self, key: ChannelPartition) -> None:
        try:
            async with self._transaction() as session:
                await self._ranges.merge(session, key)
        except Exception as error:  # the message that was handled is committed
            logger.warning(
                "what was handled is not merged: %s", error, extra={"topic": key.topic, "channel": key.channel}
            )

    async def _record(self, session: S, channel: str, message: Message) -> Statement | None:
        now = time.time()
        if now - self._forgotten > _FORGET_EVERY:
            self._forgotten = now
            await execute(session, _FORGET, {"before": now - self._keep})
            await self._ranges.forget(session, now - self._keep)
        given = None if self._identity is None else self._identity(message)
        if given is None:
            given = message.header_value(IDENTITY_HEADER)
        if given is None and message.offset >= 0:
            self._unmerged[ChannelPartition(message.topic, channel, message.partition)] += 1
            return await self._ranges.add(session, channel, message, now)
        identity = f"{message.topic}/{message.id.hex() if given is None else _storable(str(given))}"
        values = {"channel": channel, "identity": identity, "handled": now}
        found: Any = await execute(session, _INSERT, values)
        return (_REMOVE, values) if found.rowcount else None

    async def _write_probe(self, session: S, name: str) -> None:
        await execute(session, _INSERT, {"channel": _PROBE, "identity": name, "handled": time.time() + _KEEP_PROBE})

    async def _remove_probe(self, session: S, name: str) -> bool:
        found: Any = await execute(session, _REMOVE_PROBE, {"channel": _PROBE, "identity": name})
        return bool(found.rowcount)


def _storable(identity: str) -> str:
    """Return an identity, or its digest where it is too long for an index, or has characters that are not stored.

    An identity that begins as a digest does is replaced too, so that no other message has its digest.
    """
    if len(identity) <= MAX_IDENTITY and is_storable(identity) and not identity.startswith(_DIGEST):
        return identity
    return _DIGEST + sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
