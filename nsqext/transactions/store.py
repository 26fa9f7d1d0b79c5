"""The outbox for relays, which lease its parts, read and delete; and for operators."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from attrs import frozen

from nsqext.app.relay import Cancellation, check_on_disk
from nsqext.arguments import check_flags
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.transactions.address import parse_address
from nsqext.transactions.outages import outage_of
from nsqext.transactions.schema import DIALECTS, SHARDS, Dialect, columns_of, prepared, statements_of

_BUSY = 30.0  # seconds that a transaction waits for locks of others
LONGEST_LEASE: float = 60.0
"""Seconds of a relay's lease, at most; one that ends later is from before the clock of the database was set back."""
# a server that vanished without a word is noticed in half a minute; the system would wait for 15 minutes, or for ever
# while nothing is sent. Seconds, tcp_user_timeout milliseconds
_SILENCE = {
    **{"keepalives_idle": 15, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000},
    "connect_timeout": 30,
}
_DRIFT = 5.0  # seconds by which that clock may be set back while leases last
_ENDED = "(until < :now OR until > :latest)"
_FREE = f"SELECT shard FROM nsqext_outbox_shard WHERE {_ENDED} ORDER BY shard LIMIT :count"  # noqa: S608
MOST_BYTES = 16 << 20
"""Bytes of bodies that a relay reads at once."""
_READ_ONLY = "25006"  # SQLSTATE of a read-only server
_PUBLISHING = "UPDATE nsqext_outbox_relay SET publishing = :publishing WHERE owner = :owner RETURNING owner"
# SQLite keeps the text that another program writes in place of bytes
_COLUMNS = "sequence, identity, topic, CAST(key AS {0}), tag, headers, trace_context, CAST(body AS {0})"
_TABLES = ("nsqext_outbox", "nsqext_outbox_shard", "nsqext_outbox_relay")
_LAST_ERROR = "SELECT error FROM nsqext_outbox WHERE error IS NOT NULL ORDER BY sequence DESC LIMIT 1"
_CREATE = "create its tables: nsqext outbox sql"
_IN_MEMORY = ":memory:"
_NO_COLUMN = "42703"  # SQLSTATE


@frozen
class OutboxRow:
    """A message of the outbox; see `nsqext.transactions.Outbox.add`."""

    sequence: int
    identity: str
    topic: str
    key: bytes | None
    tag: str | None
    headers: str | None
    trace_context: str | None
    body: bytes


@frozen
class OutboxMessage:
    """A message in an outbox.

    Attributes:
        identity: unique among the messages of its topic.
        topic: name of its topic.
        added: when it was added, in seconds since 1970.
        error: why it was set aside; empty otherwise.
        publishing: whether a relay publishes it now.
    """

    identity: str
    topic: str
    added: float
    error: str
    publishing: bool


@frozen
class OutboxSummary:
    """Numbers of an outbox.

    Attributes:
        waiting: messages that will be published.
        refused: messages that cannot be published, and wait for an operator.
        age: seconds for which the oldest message waits; None without waiting messages.
        relays: running relays.
        reason: why the refused message that was added last was set aside; empty without such messages.
    """

    waiting: int
    refused: int
    age: float | None
    relays: int
    reason: str = ""


class OutboxStore:
    """The outbox in a database; thread-safe. Every call is a transaction of its own.

    A connection that the database ended is replaced by the next call. A call raises the error of its driver while the
    database cannot be used; `nsqext.transactions.outages` lists the errors after which it can be used again.

    Args:
        database: ``postgresql://user@host/name`` (or another text that libpq accepts), or ``sqlite:///path``. The URLs
            of SQLAlchemy are accepted too.
        create: create missing tables.

    Raises:
        InvalidSetting: the database cannot be opened, is of another kind, or is not a file: SQLite's ``:memory:``, and
            without ``create`` a file that does not exist.
    """

    def __init__(self, database: str, *, create: bool = False) -> None:
        check_flags(create=create)
        self._address = parse_address(database)
        self.dialect: Dialect = self._address.dialect
        self._lock = threading.Lock()
        self._closed = False
        self._connection: Any = None
        path = self._address.target
        if self.dialect == "sqlite" and not create and path != _IN_MEMORY and not Path(path).exists():
            raise InvalidSetting(f"the database of the outbox {path!r} does not exist", hint=_CREATE)
        try:
            self._connection = self.connect()
        except Exception as error:
            shown = self.shown(error)
            raise InvalidSetting(
                f"the database of the outbox cannot be reached: {shown}", hint="check host, port, user and password"
            ) from None  # the driver's error may contain the password
        try:
            if self.dialect == "sqlite":
                check_on_disk(self._connection, self._address.target)
            if create:
                self._create()
            with self._transaction():
                for table in _TABLES:
                    self._run(f"SELECT {', '.join(columns_of(table))} FROM {table} WHERE 1 = 0", {})  # noqa: S608
        except InvalidSetting:
            self._connection.close()
            raise
        except Exception as error:
            self._connection.close()
            raise InvalidSetting(f"the outbox cannot be opened: {self.shown(error)}", hint=_hint(error)) from error

    def connect(self) -> Any:
        """Open a connection of the driver, in the mode in which each statement is a transaction.

        To PostgreSQL it ends when its host has been silent for 30 seconds, unless the address says otherwise, and when
        the server does not respond to a statement for a minute.
        """
        if self.dialect == "sqlite":
            return sqlite3.connect(self._address.target, timeout=_BUSY, isolation_level=None, check_same_thread=False)
        from psycopg.conninfo import conninfo_to_dict

        from nsqext.transactions.silence import bounded_connection

        given = {*conninfo_to_dict(self._address.target)}
        if "PGCONNECT_TIMEOUT" in os.environ:
            given.add("connect_timeout")
        silence: dict[str, Any] = {name: value for name, value in _SILENCE.items() if name not in given}
        return bounded_connection().connect(self._address.target, autocommit=True, **silence)

    def shown(self, error: BaseException) -> str:
        """Return the text of an error of the database, without the password."""
        reason = outage_of(error)
        return f"{self._address.shown(error)}{f' ({reason})' if reason else ''}".strip()

    def _create(self) -> None:
        for statement in statements_of(self.dialect):
            self._connection.execute(statement)

    def close(self) -> None:
        """Close the connection; later calls raise `InvalidState`."""
        with self._lock:
            self._closed = True
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._begin()
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException as error:
                self._roll_back(error)
                raise

    def _roll_back(self, error: BaseException) -> None:
        """Roll back after an error; the next call replaces the connection to a read-only server."""
        if self.dialect == "sqlite":
            if self._connection.in_transaction:  # a full disk has rolled back already
                self._connection.execute("ROLLBACK")
            return
        try:
            self._connection.execute("ROLLBACK")
        except Exception:  # the transaction is lost with its connection, which `_begin` replaces
            self._connection.close()
        if getattr(error, "sqlstate", None) == _READ_ONLY:
            self._connection.close()

    def _begin(self) -> None:
        if self._closed:
            raise InvalidState("the outbox was closed")
        begin = DIALECTS[self.dialect]["begin"].format(busy=round(_BUSY * 1000))
        try:
            self._connection.execute(begin)
        except Exception as error:
            if outage_of(error) is None or self.dialect == "sqlite":  # SQLite is busy
                raise
            self._connection.close()
            self._connection = self.connect()
            self._connection.execute(begin)

    def _run(self, sql: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        found = self._connection.execute(*prepared(self._connection, sql, values))
        return found.fetchall() if found.description is not None else []

    # Relays

    def _until(self, seconds: float, now: float | None) -> dict[str, float]:
        """Return now and the end of a lease by the clock of the database, because clocks of hosts differ."""
        if now is None:
            ((now,),) = self._run(f"SELECT {DIALECTS[self.dialect]['now']}", {})
        return {"now": now, "until": now + seconds, "latest": now + LONGEST_LEASE + _DRIFT}

    def lease(self, owner: str, seconds: float, now: float | None = None) -> list[int]:
        """Lease an equal share of the outbox for each running relay; return the numbers of its parts.

        The relay publishes nothing during the call. Others lease parts whose lease has ended.

        Args:
            owner: name of the relay.
            seconds: how long, by the clock of the database; `LONGEST_LEASE` at most.
            now: seconds since 1970; None for the clock of the database.
        """
        with self._transaction():
            values = {"owner": owner, **self._until(seconds, now)}
            self._run(f"DELETE FROM nsqext_outbox_relay WHERE {_ENDED}", values)  # noqa: S608
            self._run(
                "INSERT INTO nsqext_outbox_relay (owner, until) VALUES (:owner, :until) "
                "ON CONFLICT (owner) DO UPDATE SET until = excluded.until, publishing = excluded.publishing",
                values,
            )
            relays = self._run("SELECT count(*) FROM nsqext_outbox_relay", {})[0][0]
            own = self._run("SELECT count(*) FROM nsqext_outbox_shard WHERE owner = :owner", values)[0][0]
            share, unlocked = ceil(SHARDS / relays), DIALECTS[self.dialect]["unlocked"]
            self._run(
                "UPDATE nsqext_outbox_shard SET owner = '', until = 0 WHERE shard IN "
                "(SELECT shard FROM nsqext_outbox_shard WHERE owner = :owner ORDER BY shard DESC LIMIT :count)",
                {**values, "count": max(0, own - share)},
            )
            self._run(
                f"UPDATE nsqext_outbox_shard SET owner = :owner WHERE shard IN ({_FREE} {unlocked})",  # noqa: S608
                {**values, "count": max(0, share - own)},
            )
            self._run("UPDATE nsqext_outbox_shard SET until = :until WHERE owner = :owner", values)
            held = "SELECT shard FROM nsqext_outbox_shard WHERE owner = :owner ORDER BY shard"
            return [row[0] for row in self._run(held, values)]

    def renew(self, owner: str, shards: Collection[int], seconds: float, now: float | None = None) -> bool:
        """Lease the parts of `lease` for longer; return whether the relay still has all ``shards``."""
        with self._transaction():
            values = {"owner": owner, **self._until(seconds, now)}
            known = self._run(
                "UPDATE nsqext_outbox_relay SET until = :until WHERE owner = :owner RETURNING owner", values
            )
            held = self._run(
                "UPDATE nsqext_outbox_shard SET until = :until WHERE owner = :owner RETURNING shard", values
            )
        return bool(known) and {*shards} <= {shard for (shard,) in held}

    def leave(self, owner: str) -> None:
        """End the leases of a relay."""
        with self._transaction():
            self._run("UPDATE nsqext_outbox_shard SET owner = '', until = 0 WHERE owner = :owner", {"owner": owner})
            self._run("DELETE FROM nsqext_outbox_relay WHERE owner = :owner", {"owner": owner})

    def rows(
        self,
        shards: Collection[int],
        without: Collection[str],
        count: int,
        size: int = MOST_BYTES,
        owner: str | None = None,
        running: Collection[int] = (),
    ) -> list[OutboxRow]:
        """Return the first messages of parts of the outbox, in the order in which they were added.

        Args:
            shards: numbers of the parts.
            without: topics that are left out.
            count: messages at most.
            size: bytes of their bodies, at most; a longer body is returned alone.
            owner: the relay that publishes them until its next `lease`: a cancellation is too late. Without a lease,
                nothing is returned.
            running: sequences of messages that the relay publishes already.
        """
        parts, left_out = _named("s", sorted(shards)), _named("t", sorted(without))
        columns = _COLUMNS.format(DIALECTS[self.dialect]["bytes"])
        if not parts:
            return []
        others = " AND topic NOT IN " + _listed(left_out) if left_out else ""
        chosen = f"FROM nsqext_outbox WHERE error IS NULL AND shard IN {_listed(parts)}{others}"
        values: dict[str, object] = {**parts, **left_out, "count": count}
        with self._transaction():
            if owner is not None:
                self._lock_shards(parts)
            sizes = self._run(f"SELECT sequence, length(body) {chosen} ORDER BY sequence LIMIT :count", values)
            last = _last_within(sizes, size)
            if last is None:
                return []
            found = self._run(
                f"SELECT {columns} {chosen} AND sequence <= :last ORDER BY sequence LIMIT :count",
                {**values, "last": last},
            )
            if owner is not None:
                publishing = orjson.dumps([*running, *(row[0] for row in found)]).decode()
                if not self._run(_PUBLISHING, {"publishing": publishing, "owner": owner}):
                    return []
        return [OutboxRow(*row) for row in found]

    def _lock_shards(self, parts: Mapping[str, object]) -> None:
        """Wait for cancellations and reads of parts of the outbox, which then wait for this transaction."""
        locked = DIALECTS[self.dialect]["locked"]
        self._run(
            f"SELECT shard FROM nsqext_outbox_shard WHERE shard IN {_listed(parts)} ORDER BY shard {locked}",  # noqa: S608
            parts,
        )

    def delete(self, sequences: Sequence[int]) -> None:
        """Delete messages that were published."""
        with self._transaction():
            for first in range(0, len(sequences), 500):
                names = _named("n", sequences[first : first + 500])
                self._run(f"DELETE FROM nsqext_outbox WHERE sequence IN {_listed(names)}", names)  # noqa: S608

    def refuse(self, sequence: int, error: str) -> None:
        """Set aside a message that cannot be published."""
        with self._transaction():
            values = {"sequence": sequence, "error": error}
            self._run("UPDATE nsqext_outbox SET error = :error WHERE sequence = :sequence", values)

    # Operators

    def cancel(self, identity: str, topic: str | None = None) -> Cancellation:
        """Delete a message, so that it is not published, if no relay publishes it now.

        Args:
            identity: identity of the message.
            topic: its topic; None for the messages of this identity of all topics, of which `TOO_LATE` is returned
                rather than `CANCELLED`.
        """
        chosen = "SELECT sequence, shard FROM nsqext_outbox WHERE identity = :identity"
        with self._transaction():
            if topic is None:
                found = self._run(chosen, {"identity": identity})
            else:
                found = self._run(f"{chosen} AND topic = :topic", {"identity": identity, "topic": topic})
        results = {self._cancel(sequence, shard) for sequence, shard in found}
        return next(
            (result for result in (Cancellation.TOO_LATE, Cancellation.CANCELLED) if result in results),
            Cancellation.UNKNOWN,
        )

    def _cancel(self, sequence: int, shard: int) -> Cancellation:
        """Delete a message; while it is being published, only a repetition after a failure is cancelled."""
        with self._transaction():
            self._lock_shards({"s0": shard})
            publishing = self._publishing()
            if not self._run("DELETE FROM nsqext_outbox WHERE sequence = :n RETURNING sequence", {"n": sequence}):
                return Cancellation.UNKNOWN
        return Cancellation.TOO_LATE if sequence in publishing else Cancellation.CANCELLED

    def _publishing(self) -> set[int]:
        """Return the sequences of messages that relays publish now."""
        clock = DIALECTS[self.dialect]["now"]
        found = self._run(f"SELECT publishing FROM nsqext_outbox_relay WHERE until >= {clock}", {})  # noqa: S608
        return {sequence for (listed,) in found for sequence in orjson.loads(listed)}

    def waiting(self, topic: str | None = None, count: int = 1000) -> list[OutboxMessage]:
        """Return messages, in the order in which they were added.

        Args:
            topic: only messages of this topic.
            count: messages at most.
        """
        chosen = "SELECT sequence, identity, topic, added, error FROM nsqext_outbox"
        where = "" if topic is None else " WHERE topic = :topic"
        values = {"topic": topic, "count": count}
        with self._transaction():
            publishing = self._publishing()
            found = self._run(f"{chosen}{where} ORDER BY sequence LIMIT :count", values)
        return [
            OutboxMessage(identity, name, added, error or "", sequence in publishing)
            for sequence, identity, name, added, error in found
        ]

    def summary(self, now: float) -> OutboxSummary:
        """Return the numbers of the outbox; ``now`` is in seconds since 1970."""
        with self._transaction():
            waiting, oldest = self._run("SELECT count(*), min(added) FROM nsqext_outbox WHERE error IS NULL", {})[0]
            refused = self._run("SELECT count(*) FROM nsqext_outbox WHERE error IS NOT NULL", {})[0][0]
            reasons = self._run(_LAST_ERROR, {})
            clock = self._until(0.0, None)
            relays = self._run(f"SELECT count(*) FROM nsqext_outbox_relay WHERE NOT {_ENDED}", clock)[0][0]  # noqa: S608
        age = None if oldest is None else max(0.0, now - oldest)
        return OutboxSummary(waiting, refused, age, relays, reasons[0][0] if reasons else "")

    def retry_refused(self) -> int:
        """Publish the messages after all that were set aside; return their number."""
        with self._transaction():
            return len(
                self._run("UPDATE nsqext_outbox SET error = NULL WHERE error IS NOT NULL RETURNING sequence", {})
            )

    def discard_refused(self, before: float) -> int:
        """Delete messages that were set aside, added before a time in seconds since 1970; return their number."""
        sql = "DELETE FROM nsqext_outbox WHERE error IS NOT NULL AND added < :before RETURNING sequence"
        with self._transaction():
            return len(self._run(sql, {"before": before}))


def _last_within(sizes: Sequence[tuple[int, int]], limit: int) -> int | None:
    """Return the sequence of the last message up to which the bodies fit in a number of bytes; at least the first."""
    last, total = None, 0
    for sequence, size in sizes:
        total += size
        if last is not None and total > limit:
            break
        last = sequence
    return last


def _hint(error: Exception) -> str:
    """Return what to do when a table cannot be read."""
    if getattr(error, "sqlstate", None) != _NO_COLUMN and not str(error).startswith("no such column"):
        return _CREATE
    return (
        "its tables are of another version: add this column as nsqext outbox sql writes it, or drop the tables "
        "nsqext_outbox… when the outbox is empty, and create them again"
    )


def _named(letter: str, values: Sequence[object]) -> dict[str, object]:
    """Return values by names of parameters: the letter and a number."""
    return {f"{letter}{number}": value for number, value in enumerate(values)}


def _listed(names: Mapping[str, object]) -> str:
    """Return a list of parameters in SQL."""
    return f"({', '.join(f':{name}' for name in names)})"
