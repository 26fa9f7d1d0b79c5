"""Delayed messages in a SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple, Self

from attrs import frozen

from nsqext.app.relay import Cancellation, check_on_disk
from nsqext.arguments import check_flags
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.protocol.delay_record import DelayCancel, DelayRecord, encode_delay

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
# identities are forgotten a time after `due`, or after their end, which may be days later
_END = "next=NULL, record='', state=0, until=NULL, due=max(due, :now)"
_FREE = "until IS NOT NULL AND (until <= :clock OR until > :clock + span)"  # a lease or pause is over
_TAKE = f"""
UPDATE delayed SET until=:clock + :lease, span=:lease, state=:state WHERE identity IN (
    SELECT identity FROM (
        SELECT * FROM (
            SELECT identity, next FROM delayed WHERE next<=:due AND until IS NULL {{0}} ORDER BY next LIMIT :count
        )
        UNION ALL SELECT identity, next FROM delayed WHERE next<=:due AND {_FREE} {{0}}
    ) ORDER BY next LIMIT :count
) RETURNING identity, topic, record
"""  # noqa: S608
_NEXT = f"""
SELECT min(next) FROM (
    SELECT min(next) AS next FROM delayed WHERE next IS NOT NULL AND until IS NULL {{0}}
    UNION ALL
    SELECT min(CASE WHEN {_FREE} THEN next ELSE max(next, :now + 1000 * (until - :clock)) END)
    FROM delayed WHERE until IS NOT NULL {{0}}
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


class TakenMessage(NamedTuple):
    """A message that is due and that the caller publishes now."""

    identity: str  #: unique among all delayed messages
    topic: str  #: where it is published
    record: bytes  #: as it was received


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


class DelayStore:
    """Delayed messages in a SQLite file; thread-safe, shared by any number of processes of a machine.

    Data is on disk when a call returns. Identities of published and cancelled messages are kept for a time, so that a
    redelivered message is not published again. Leases of relays do not depend on the time of day.

    Args:
        path: the file; its folder must survive a restart of the machine.
        create: create a missing file.
        clock: monotonic seconds, the same for all processes of the machine.

    Raises:
        InvalidSetting: the file does not exist, cannot be opened, or is no store of delayed messages; ``:memory:`` and
            other names of databases that are no files.

    Attributes:
        name: name of this store among the stores of other machines.
    """

    def __init__(self, path: str | Path, *, create: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        check_flags(create=create)
        if not create and not Path(path).is_file():
            raise InvalidSetting(f"{path} does not exist", hint="name the file of a relay")
        self._lock = threading.Lock()
        self._clock = clock
        try:
            self._database = sqlite3.connect(
                path, timeout=_BUSY, isolation_level=None, check_same_thread=False, cached_statements=32
            )
            try:
                check_on_disk(self._database, str(path))
                self._check_tables(path, create=create)
                self.name: str = self._set_up()
            except BaseException:
                self._database.close()
                raise
        except sqlite3.Error as error:
            raise InvalidSetting(f"{path} cannot be used as a store of delayed messages: {error}") from error

    def _set_up(self) -> str:
        """Create what the file lacks; return the name of the store."""
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
            return str(run.execute("SELECT name FROM store").fetchone()[0])

    def _check_tables(self, path: str | Path, *, create: bool) -> None:
        """Raise InvalidSetting for the database of another program; another process may be creating the tables."""
        tables = {name for (name,) in self._database.execute("SELECT name FROM sqlite_master WHERE type='table'")}
        if not tables & {"store", "delayed"} if tables else not create:
            raise InvalidSetting(f"{path} is no store of delayed messages", hint="name the file of a relay")

    def close(self) -> None:
        """Close the file; later calls raise `InvalidState`."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Hold the lock; commit at the end, or roll back after an exception."""
        with self._lock:
            try:
                self._database.execute(begin)
            except sqlite3.ProgrammingError as error:
                raise InvalidState("the store of delayed messages is closed") from error
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # a full disk has rolled back already
                    self._database.execute("ROLLBACK")
                raise

    def _reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Read what is committed, without a wait for other processes that write."""
        return self._transaction("BEGIN")

    def add(self, records: Iterable[tuple[DelayRecord, bytes]]) -> None:
        """Store delayed messages with bodies, and cancellations, also of unknown messages; skip known identities."""
        with self._transaction() as run:
            for record, body in records:
                if isinstance(record, DelayCancel):
                    self._cancel(run, record.identity)
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
            return self._cancel(run, identity)

    def _cancel(self, run: sqlite3.Connection, identity: str) -> Cancellation:
        now = round(time.time() * 1000)  # not of the request: its message may be received later
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
        run.execute(f"UPDATE delayed SET {_END} WHERE identity=:identity", {"identity": identity, "now": now})  # noqa: S608
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
        with self._reading() as run:
            found = run.execute(
                "SELECT received, record, reason FROM refused ORDER BY number DESC LIMIT ?", (count,)
            ).fetchall()
        return [RefusedRecord(received / 1000, bytes(record), reason) for received, record, reason in found]

    def discard_refused(self) -> int:
        """Delete all refused records; return their number."""
        with self._transaction() as run:
            return run.execute("DELETE FROM refused").rowcount

    def take(
        self, published: Sequence[str], count: int, now: float, lease: float, without: Collection[str] = ()
    ) -> list[TakenMessage]:
        """Record published messages; return other messages that are due.

        Args:
            published: identities of the published messages.
            count: how many messages are returned, at most.
            now: seconds since 1970.
            lease: seconds until they are returned again, unless they are recorded as published or failed before.
            without: topics that are left out.
        """
        with self._transaction() as run:
            due = int(now * 1000)
            ended = [{"identity": identity, "now": due} for identity in published]
            run.executemany(f"UPDATE delayed SET {_END}, error='' WHERE identity=:identity", ended)  # noqa: S608
            values = {
                "clock": self._clock(),
                "due": due,
                "now": due,
                "lease": lease,
                "count": count,
                "state": _PUBLISHING,
                "ending": _ENDING,
            }
            # the relay that published it was killed or does not respond
            run.execute(f"UPDATE delayed SET {_END} WHERE state=:ending AND {_FREE}", values)  # noqa: S608
            left_out, topics = _left_out(without)
            taken = run.execute(_TAKE.format(left_out), {**values, **topics})
            return [TakenMessage(*row) for row in taken]

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
            ended = {"identity": identity, "state": _ENDING, "now": int(now * 1000)}
            run.execute(f"UPDATE delayed SET {_END} WHERE identity=:identity AND state=:state", ended)  # noqa: S608
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
        before = max(before, 0.0)  # identities may be kept for ever
        with self._transaction() as run:
            return run.execute("DELETE FROM delayed WHERE next IS NULL AND due<?", (int(before * 1000),)).rowcount

    def next_due(self, now: float, without: Collection[str] = ()) -> float | None:
        """Return when to publish the next message, in seconds since 1970 as ``now``; None if no message waits.

        Args:
            now: seconds since 1970.
            without: topics that are left out.
        """
        left_out, topics = _left_out(without)
        with self._reading() as run:
            values = {"now": now * 1000, "clock": self._clock()}
            found: float | None = run.execute(_NEXT.format(left_out), {**values, **topics}).fetchone()[0]
        return None if found is None else found / 1000

    def count(self) -> int:
        """Return how many messages wait."""
        with self._reading() as run:
            return int(run.execute("SELECT count(*) FROM delayed WHERE next IS NOT NULL").fetchone()[0])

    def summary(self, now: float) -> DelaySummary:
        """Return the numbers of the store; ``now`` is in seconds since 1970."""
        with self._reading() as run:
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
        with self._reading() as run:
            found = run.execute(
                "SELECT identity, topic, due, error, state FROM delayed "
                "WHERE next IS NOT NULL AND (? IS NULL OR topic=?) ORDER BY due LIMIT ?",
                (topic, topic, count),
            ).fetchall()
        return [
            WaitingMessage(identity, where, due / 1000, error, state != _WAITING)
            for identity, where, due, error, state in found
        ]


def _left_out(topics: Collection[str]) -> tuple[str, dict[str, str]]:
    """Return a condition that leaves out topics, and its values."""
    values = {f"topic{number}": topic for number, topic in enumerate(sorted(topics))}
    listed = ", ".join(f":{name}" for name in values)
    return f"AND topic NOT IN ({listed})" if values else "", values
