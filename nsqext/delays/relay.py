"""Keep delayed messages in a SQLite file, and publish them when they are due."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
from anyio import to_thread
from attrs import frozen

from nsqext.app.relay import Cancellation, Relay, lease_time, publish_timeout, refuses_message
from nsqext.arguments import check_time
from nsqext.client.producer.options import DELAY_TOPIC
from nsqext.errors import InvalidSetting, InvalidState, NsqError, ProtocolError
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, DelayRecord, decode_delay, encode_delay
from nsqext.protocol.messages import IDENTITY_HEADER
from nsqext.protocol.names import check_channel, check_topic
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from nsqext import MessageBatch, Producer
    from nsqext.app import App


T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS store (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS delayed (
    identity TEXT PRIMARY KEY,
    topic TEXT NOT NULL,
    due INTEGER NOT NULL,
    next INTEGER,  -- when it is due, in milliseconds since 1970; NULL when it was published or cancelled
    record BLOB NOT NULL,
    error TEXT NOT NULL DEFAULT '',
    state INTEGER NOT NULL DEFAULT 0,
    until REAL,  -- end of a lease or of a pause after a failure, in seconds of the machine's monotonic clock, and
    span REAL    -- its length: NULL without; an end that is farther away is from before the machine started
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS refused (
    number INTEGER PRIMARY KEY,
    received INTEGER NOT NULL,
    record BLOB NOT NULL,
    reason TEXT NOT NULL
);
"""
# columns that files of earlier versions lack
_ADDED = {
    "state": "ALTER TABLE delayed ADD COLUMN state INTEGER NOT NULL DEFAULT 0",
    "until": "ALTER TABLE delayed ADD COLUMN until REAL",
    "span": "ALTER TABLE delayed ADD COLUMN span REAL",
}
_INDEXES = """
DROP INDEX IF EXISTS delayed_next;
CREATE INDEX IF NOT EXISTS delayed_due ON delayed (next) WHERE next IS NOT NULL AND until IS NULL;
CREATE INDEX IF NOT EXISTS delayed_held ON delayed (until) WHERE until IS NOT NULL;
CREATE INDEX IF NOT EXISTS delayed_ended ON delayed (due) WHERE next IS NULL;
"""
_END = "next=NULL, record='', state=0, until=NULL"
_FREE = "until IS NOT NULL AND (until <= :clock OR until > :clock + span)"  # a lease or pause is over
_TAKE = f"""
UPDATE delayed SET until=:clock + :lease, span=:lease, state=:state WHERE identity IN (
    SELECT identity FROM (
        SELECT * FROM (SELECT identity, next FROM delayed WHERE next<=:due AND until IS NULL ORDER BY next LIMIT :count)
        UNION ALL SELECT identity, next FROM delayed WHERE next<=:due AND {_FREE}
    ) ORDER BY next LIMIT :count
) RETURNING identity, record
"""  # noqa: S608
_NEXT = f"""
SELECT min(next) FROM (
    SELECT min(next) AS next FROM delayed WHERE next IS NOT NULL AND until IS NULL
    UNION ALL
    SELECT min(CASE WHEN {_FREE} THEN next ELSE max(next, :now + 1000 * (until - :clock)) END)
    FROM delayed WHERE until IS NOT NULL
)
"""  # noqa: S608
# states of an unpublished message; ending: it was cancelled while a relay publishes it, and a failure is not repeated
_WAITING, _PUBLISHING, _ENDING = 0, 1, 2
_MOST_REFUSED = 1000  # refused records; older records are deleted
_BUSY = 30.0  # seconds that a transaction waits for other processes


@frozen
class WaitingMessage:
    """A waiting delayed message."""

    identity: str  #: unique among all delayed messages
    topic: str  #: where it is published
    due: float  #: seconds since 1970
    error: str = ""  #: why it could not be published when it was due
    publishing: bool = False  #: whether a relay publishes it now


@frozen
class RefusedRecord:
    """A record of the topic of delayed messages that cannot be read."""

    received: float  #: seconds since 1970
    record: bytes  #: its body
    reason: str  #: why it was refused


@frozen
class DelaySummary:
    """Numbers of a store of delayed messages."""

    waiting: int  #: messages that will be published
    late: float | None  #: seconds since the first of them was due; None if none is due
    refused: int  #: records that cannot be read, and were set aside


@frozen
class DelayStatistics:
    """What a relay of delayed messages has done since it was made."""

    published: int  #: messages that were stored
    failed: int  #: failed attempts, which are repeated
    refused: int  #: records that cannot be read, and were set aside


class DelayStore:
    """Delayed messages in a SQLite file; thread-safe, shared by any number of processes of a machine.

    Data is on disk when a call returns. Identities of published and cancelled messages are kept for a time, so that a
    redelivered message is not published again. Leases of relays do not depend on the time of day.

    Args:
        path: the file; its folder must survive a restart of the machine.
        create: create a missing file.
        clock: monotonic seconds, the same for all processes of the machine.

    Raises:
        InvalidSetting: the file does not exist, cannot be opened, or is no store of delayed messages.

    Attributes:
        name: name of this store among the stores of other machines.
    """

    def __init__(self, path: str | Path, *, create: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        if not create and not Path(path).is_file():
            raise InvalidSetting(f"{path} does not exist", hint="name the file of a relay")
        self._lock = threading.Lock()
        self._clock = clock
        try:
            self._database = sqlite3.connect(
                path, timeout=_BUSY, isolation_level=None, check_same_thread=False, cached_statements=32
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_SCHEMA)
            with self._transaction() as run:
                columns = {column[1] for column in run.execute("PRAGMA table_info(delayed)")}
                for name, statement in _ADDED.items():
                    if name not in columns:
                        run.execute(statement)
            self._database.executescript(_INDEXES)
            with self._transaction() as run:
                run.execute("INSERT INTO store SELECT ? WHERE NOT EXISTS (SELECT * FROM store)", (token_hex(6),))
                self.name: str = run.execute("SELECT name FROM store").fetchone()[0]
        except sqlite3.Error as error:
            raise InvalidSetting(f"{path} cannot be used as a store of delayed messages: {error}") from error

    def close(self) -> None:
        """Close the file; later calls raise `InvalidState`."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the lock; commit at the end, or roll back after an exception."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
            except sqlite3.ProgrammingError as error:
                raise InvalidState("the store of delayed messages is closed") from error
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # a full disk has rolled back already
                    self._database.execute("ROLLBACK")
                raise

    def add(self, records: Iterable[tuple[DelayRecord, bytes]]) -> None:
        """Store delayed messages with bodies, and cancellations, also of unknown messages; skip known identities."""
        with self._transaction() as run:
            for record, body in records:
                if isinstance(record, DelayCancel):
                    self._cancel(run, record.identity, record.time)
                else:
                    values = (record.identity, record.topic, record.due, record.due, encode_delay(record, body))
                    run.execute(
                        "INSERT INTO delayed (identity, topic, due, next, record) VALUES (?, ?, ?, ?, ?) "
                        "ON CONFLICT DO NOTHING",
                        values,
                    )

    def cancel(self, identity: str) -> Cancellation:
        """Cancel a message; while it is being published, only a repetition after a failure is cancelled."""
        with self._transaction() as run:
            return self._cancel(run, identity, round(time.time() * 1000))

    def _cancel(self, run: sqlite3.Connection, identity: str, now: int) -> Cancellation:
        found = run.execute("SELECT state FROM delayed WHERE identity=? AND next IS NOT NULL", (identity,)).fetchone()
        if found is None:
            run.execute(
                "INSERT INTO delayed (identity, topic, due, record) VALUES (?, '', ?, '') ON CONFLICT DO NOTHING",
                (identity, now),
            )
            return Cancellation.UNKNOWN
        if found[0] != _WAITING:
            run.execute("UPDATE delayed SET state=? WHERE identity=?", (_ENDING, identity))
            return Cancellation.TOO_LATE
        run.execute(f"UPDATE delayed SET {_END} WHERE identity=?", (identity,))  # noqa: S608
        return Cancellation.CANCELLED

    def refuse(self, records: Sequence[tuple[bytes, str]]) -> None:
        """Keep the newest records that cannot be read, with reasons."""
        with self._transaction() as run:
            now = round(time.time() * 1000)
            values = [(now, record, reason) for record, reason in records]
            run.executemany("INSERT INTO refused (received, record, reason) VALUES (?, ?, ?)", values)
            run.execute("DELETE FROM refused WHERE number <= (SELECT max(number) FROM refused) - ?", (_MOST_REFUSED,))

    def refused(self, count: int = 1000) -> list[RefusedRecord]:
        """Return refused records, newest first; ``count`` at most."""
        with self._transaction() as run:
            found = run.execute(
                "SELECT received, record, reason FROM refused ORDER BY number DESC LIMIT ?", (count,)
            ).fetchall()
        return [RefusedRecord(received / 1000, bytes(record), reason) for received, record, reason in found]

    def discard_refused(self) -> int:
        """Delete all refused records; return their number."""
        with self._transaction() as run:
            return run.execute("DELETE FROM refused").rowcount

    def take(self, published: Sequence[str], count: int, now: float, lease: float) -> list[tuple[str, bytes]]:
        """Record published messages; return identities and records of other messages that are due.

        Args:
            published: identities of the published messages.
            count: how many messages are returned, at most.
            now: seconds since 1970.
            lease: seconds until they are returned again, unless they are recorded as published or failed before.
        """
        with self._transaction() as run:
            ended = [(identity,) for identity in published]
            run.executemany(f"UPDATE delayed SET {_END}, error='' WHERE identity=?", ended)  # noqa: S608
            values = {
                "clock": self._clock(),
                "due": int(now * 1000),
                "lease": lease,
                "count": count,
                "state": _PUBLISHING,
                "ending": _ENDING,
            }
            # the relay that published it was killed or does not respond
            run.execute(f"UPDATE delayed SET {_END} WHERE state=:ending AND {_FREE}", values)  # noqa: S608
            return run.execute(_TAKE, values).fetchall()

    def failed(self, identity: str, error: str, now: float, pause: float, *, alone: bool) -> None:
        """Record why a message was not published, and when to try again.

        Args:
            identity: the message.
            error: the reason.
            now: seconds since 1970.
            pause: seconds until another attempt.
            alone: whether the message is the reason; otherwise messages of its topic that are due until then wait too.
        """
        with self._transaction() as run:
            run.execute(f"UPDATE delayed SET {_END} WHERE identity=? AND state=?", (identity, _ENDING))  # noqa: S608
            values = (self._clock() + pause, pause, error, identity)
            run.execute(
                "UPDATE delayed SET until=?, span=?, error=?, state=0 WHERE identity=? AND next IS NOT NULL", values
            )
            if not alone:
                run.execute(
                    "UPDATE delayed SET until=?, span=?, error=? WHERE next<? AND state=0 AND topic="
                    "(SELECT topic FROM delayed WHERE identity=?)",
                    (*values[:3], round((now + pause) * 1000), identity),
                )

    def forget(self, before: float) -> int:
        """Forget published and cancelled messages that were due before a time; return how many."""
        with self._transaction() as run:
            return run.execute("DELETE FROM delayed WHERE next IS NULL AND due<?", (int(before * 1000),)).rowcount

    def next_due(self, now: float) -> float | None:
        """Return when to publish the next message, in seconds since 1970 as ``now``; None if no message waits."""
        with self._transaction() as run:
            values = {"now": now * 1000, "clock": self._clock()}
            found: float | None = run.execute(_NEXT, values).fetchone()[0]
        return None if found is None else found / 1000

    def count(self) -> int:
        """Return how many messages wait."""
        with self._transaction() as run:
            return int(run.execute("SELECT count(*) FROM delayed WHERE next IS NOT NULL").fetchone()[0])

    def summary(self, now: float) -> DelaySummary:
        """Return the numbers of the store; ``now`` is in seconds since 1970."""
        with self._transaction() as run:
            waiting, first = run.execute("SELECT count(*), min(due) FROM delayed WHERE next IS NOT NULL").fetchone()
            refused = run.execute("SELECT count(*) FROM refused").fetchone()[0]
        late = None if first is None or first / 1000 > now else now - first / 1000
        return DelaySummary(waiting, late, refused)

    def waiting(self, topic: str | None = None, count: int = 1000) -> list[WaitingMessage]:
        """Return waiting messages, first due first.

        Args:
            topic: only messages of this topic.
            count: messages at most.
        """
        with self._transaction() as run:
            found = run.execute(
                "SELECT identity, topic, due, error, state FROM delayed "
                "WHERE next IS NOT NULL AND (? IS NULL OR topic=?) ORDER BY due LIMIT ?",
                (topic, topic, count),
            ).fetchall()
        return [
            WaitingMessage(identity, where, due / 1000, error, state != _WAITING)
            for identity, where, due, error, state in found
        ]


logger: logging.Logger = logging.getLogger("nsqext.delays")

_AT_ONCE = 200  # messages taken from the store and published together
_IN_FLIGHT = 2000
_RETRY = 15.0  # seconds until another attempt to publish a message
_POLL = 1.0  # seconds between two checks of a store to which another process adds messages
_REOPEN = 1.0  # seconds until another attempt to use a store that failed
_FORGET = 600.0  # seconds between two removals of old identities


class DelayRelay(Relay):
    """Publishes the messages of ``publish(delay=…, via="relay")`` when they are due.

    It consumes the topic of delayed messages, and finishes them when they are stored. A message is published at least
    once: twice if the process is killed between the publish and its record. Any number of relays may run: relays of a
    machine share a store, relays of other machines have their own. While the store cannot be used, as on a full disk,
    received messages are requeued, a warning is logged, and the relay tries again every second.

    Args:
        store: the store, which the caller closes after the app.
        topic: topic of the delayed messages.
        channel: channel of all relays.
        keep: seconds for which identities of published and cancelled messages are known.

    Raises:
        InvalidName: a topic or channel that servers refuse.
        InvalidSetting: an invalid time.

    Attributes:
        channels: the channel of all relays, and the channel of this store, which receives every cancellation.
    """

    def __init__(
        self, store: DelayStore, *, topic: str = DELAY_TOPIC, channel: str = "relay", keep: float = 86_400.0
    ) -> None:
        self.topic: str = check_topic(topic)
        check_time("keep", keep)
        self.channels: tuple[str, str] = (check_channel(channel), check_channel(f"{channel}-cancel-{store.name}"))
        self._store = store
        self._keep = keep
        self._changed = Wakeup()
        self._publishing = 0
        self._published: list[str] = []  # identities of published messages that are not recorded in the store yet
        self._stored = self._failed = self._refused = 0

    def statistics(self) -> DelayStatistics:
        """Return what the relay has done since it was made."""
        return DelayStatistics(self._stored, self._failed, self._refused)

    def summary(self) -> DelaySummary:
        """Return what is in the store, from its file.

        Raises:
            InvalidState: the file cannot be read, or the store was closed.
        """
        try:
            return self._store.summary(time.time())
        except sqlite3.Error as error:
            raise InvalidState(f"the store of delayed messages cannot be read: {error}") from error

    def attach(self, app: App) -> None:
        """Add the handlers and the lifespan of the relay to an app.

        Raises:
            InvalidState: the app is running already.
        """
        super().attach(app)
        kinds: tuple[type[DelayRecord], ...] = DelayedMessage, DelayCancel
        for channel, kind in zip(self.channels, kinds, strict=True):
            register = app.batch_handler(self.topic, channel, max_wait=0.0, max_in_flight=_IN_FLIGHT)
            register(partial(self._add, kind=kind))

    async def run(self, producer: Producer) -> None:
        """Publish the messages of the store until cancelled; then record what was published."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._publish_due, producer)
                tasks.start_soon(self._forget_old)
        finally:
            published, self._published = self._published, []
            try:
                self._store.take(published, 0, 0.0, 0.0)
            except sqlite3.OperationalError as error:
                logger.warning("%d messages are published twice, because the store fails: %s", len(published), error)

    async def _in_store(self, call: Callable[..., T], *arguments: object) -> T:
        """Call the store in a thread, again while it cannot be used."""
        while True:
            try:
                return await to_thread.run_sync(partial(call, *arguments))
            except sqlite3.OperationalError as error:
                logger.warning("the store of delayed messages cannot be used: %s", error)
                await anyio.sleep(_REOPEN)

    async def _add(self, batch: MessageBatch, kind: type[DelayRecord]) -> None:
        records = []
        refused: list[tuple[bytes, str]] = []
        for message in batch:
            try:
                record = decode_delay(message.body)
            except ProtocolError as error:
                refused.append((message.body, error.message))
                continue
            if isinstance(record[0], kind):
                records.append(record)
        if refused and kind is DelayedMessage:  # both channels receive each record
            await to_thread.run_sync(self._store.refuse, refused)
            self._refused += len(refused)
            logger.error(
                "%d records of the topic are set aside: %s", len(refused), refused[-1][1], extra={"topic": self.topic}
            )
        if records:
            await to_thread.run_sync(self._store.add, records)
            self._changed.wake()

    async def _publish_due(self, producer: Producer) -> None:
        store, published = self._store, self._published
        lease = lease_time(publish_timeout(producer))
        async with anyio.create_task_group() as tasks:
            while True:
                count = len(published)
                free = _AT_ONCE - self._publishing
                taken = await self._in_store(store.take, published[:count], free, time.time(), lease)
                del published[:count]
                self._publishing += len(taken)
                for identity, data in taken:
                    tasks.start_soon(self._publish, producer, identity, data)
                if not taken:
                    await self._wait(await self._in_store(store.next_due, time.time()))

    async def _wait(self, due: float | None) -> None:
        """Wait for a change, or until the next message is due."""
        pause = _POLL
        if due is not None and self._publishing < _AT_ONCE:
            pause = min(_POLL, max(0.0, due - time.time()))
        with anyio.move_on_after(pause):
            await self._changed.wait()

    async def _publish(self, producer: Producer, identity: str, data: bytes) -> None:
        try:
            await publish_record(producer, data)
            self._published.append(identity)
            self._stored += 1
        except NsqError as error:
            logger.warning("a delayed message cannot be published, next attempt in %g s: %s", _RETRY, error)
            self._failed += 1
            failed = partial(self._store.failed, alone=refuses_message(error))
            await self._in_store(failed, identity, str(error), time.time(), _RETRY)
        finally:
            self._publishing -= 1
            self._changed.wake()

    async def _forget_old(self) -> None:
        while True:
            await self._in_store(self._store.forget, time.time() - self._keep)
            await anyio.sleep(_FORGET)


async def publish_record(producer: Producer, data: bytes) -> None:
    """Publish a stored message to its topic; with extend support, with its identity in a header."""
    record, body = decode_delay(data)
    if not isinstance(record, DelayedMessage):
        raise ProtocolError("not a delayed message")
    headers = record.headers
    if record.header is None and (await producer.meta(record.topic)).extend_support:
        headers = {IDENTITY_HEADER: record.identity, **(headers or {})}
    await producer.publish(
        record.topic,
        body,
        headers=headers,
        tag=record.tag,
        trace_id=record.trace_id,
        key=record.key,
        partition=record.partition,
        header=record.header,
    )
