"""The store of an outbox: leases of its parts, reads, and transactions."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from nsqext.errors import InvalidSetting
from nsqext.transactions import OutboxStore
from nsqext.transactions.outages import outage_of
from tests.support.kept_connections import fill_disk, free_disk, kept_connections
from tests.transactions.relays import END_OTHERS, fill, on_postgresql, one_database
from tests.transactions.test_outbox import connect

pytestmark = pytest.mark.anyio
_SECONDS = 40


def test_a_renewal_extends_the_lease_and_reports_a_part_that_is_lost(database: str) -> None:
    with OutboxStore(database) as store:
        held = store.lease("first", 10, now=100.0)
        assert store.renew("first", held, 20, now=100.0)
        assert store.lease("second", 10, now=115.0) == []
        assert len(store.lease("second", 10, now=121.0)) == 16
        assert not store.renew("first", held, 10, now=121.0)


def test_leases_end_by_the_clock_of_the_database(database: str) -> None:
    with OutboxStore(database) as store:
        before = time.time()
        store.lease("first", 50)
        with closing(store.connect()) as connection:
            ends = connection.execute("SELECT DISTINCT until FROM nsqext_outbox_shard").fetchall()
    assert before - 1 < ends[0][0] - 50 < time.time() + 1  # SQLite's clock has milliseconds
    assert len(ends) == 1


def test_a_clock_that_is_set_back_does_not_keep_the_parts_of_a_killed_relay(database: str) -> None:
    with OutboxStore(database) as store:
        store.lease("killed", 60, now=time.time() + 3600)
        assert store.summary(0.0).relays == 0
        assert store.lease("other", 60, now=time.time() + 3598) == []
        assert len(store.lease("other", 60)) == 16
        assert store.summary(0.0).relays == 1


def test_a_file_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="does not exist"):
        OutboxStore(f"sqlite:///{tmp_path}/misspelt.db")
    assert not list(tmp_path.iterdir())


def test_a_relay_that_leaves_returns_its_own_parts(database: str) -> None:
    with OutboxStore(database) as store:
        for owner in ("first", "second", "first", "second"):
            held = store.lease(owner, 10, now=100.0)
        store.leave("first")
        assert store.renew("second", held, 10, now=101.0)
        assert len(held) == 8
        assert len(store.lease("second", 10, now=101.0)) == 16


@on_postgresql
def test_a_lease_does_not_wait_for_parts_that_another_relay_leases_now(database: str) -> None:
    with OutboxStore(f"{database} options='-c lock_timeout=1000'") as store, psycopg.connect(database) as other:
        other.execute("SELECT shard FROM nsqext_outbox_shard WHERE shard < 8 FOR UPDATE")
        assert store.lease("first", 10) == [*range(8, 16)]


def test_no_part_is_left_without_a_relay(database: str) -> None:
    with OutboxStore(database) as store:
        for _ in range(2):
            parts = [store.lease(owner, 10, now=100.0) for owner in ("first", "second", "third")]
    assert sorted(map(len, parts)) == [4, 6, 6]
    assert sorted(part for held in parts for part in held) == [*range(16)]


def test_a_renewal_reports_one_lost_part_of_several(database: str) -> None:
    with OutboxStore(database) as store:
        held = store.lease("first", 10, now=100.0)
        assert store.lease("second", 10, now=100.0) == []
        kept = store.lease("first", 10, now=101.0)
        assert len(kept) == 8
        assert not store.renew("first", held, 10, now=101.0)
        assert store.renew("first", kept[1:], 10, now=101.0)


def test_a_relay_that_leases_again_runs_for_longer(database: str) -> None:
    with OutboxStore(database) as store:
        for now, running in ((100.0, 0), (None, 1)):  # by the clock of the database
            store.lease("first", 10.0, now=now)
            assert store.summary(now=100.0).relays == running


def test_a_renewal_keeps_the_relay_among_those_that_run(database: str) -> None:
    with OutboxStore(database) as store:
        held = store.lease("first", 10, now=100.0)
        assert store.summary(now=100.0).relays == 0  # by the clock of the database, the lease has ended
        assert store.renew("first", held, 30)
        assert store.summary(now=100.0).relays == 1


def test_a_read_is_bound_by_count_and_bytes(database: str) -> None:
    fill(database, "t", 10, 1000)
    with OutboxStore(database) as store:
        for count, size, expected in ((4, 1 << 20, 4), (500, 3500, 3), (500, 1, 1), (500, 10_000, 10)):
            assert len(store.rows(range(16), [], count, size)) == expected
        found = store.rows(range(16), [], 500)
    assert [row.body.split()[0] for row in found] == [b"%d" % number for number in range(10)]


def test_messages_of_other_parts_are_not_read_and_all_that_were_published_are_deleted(database: str) -> None:
    fill(database, "t", 510, 10)
    with OutboxStore(database) as store:
        parts = [[row.sequence for row in store.rows([part], [], 1000)] for part in range(16)]
        published = [sequence for part in parts for sequence in part]
        assert len({*published}) == len(published) == 510
        store.delete(published)
        assert store.summary(0.0).waiting == 0


def test_messages_are_read_in_the_order_of_their_numbers_whatever_the_clock_was(database: str) -> None:
    fill(database, "t", 5, 10)
    with closing(connect(database)) as connection:
        connection.execute("UPDATE nsqext_outbox SET added = 1000 - sequence")
        connection.commit()
    with OutboxStore(database) as store:
        found = store.rows(range(16), [], 500)
        assert store.summary(1000.0).age == found[-1].sequence
    assert [row.body.split()[0] for row in found] == [b"%d" % number for number in range(5)]


@on_postgresql
def test_a_call_behind_a_lost_connection_is_a_transaction(database: str) -> None:
    """A call of two statements, of which the second fails."""
    fill(database, "t", 1, 10)
    with OutboxStore(database) as store:
        (row,) = store.rows(range(16), [], 10)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(END_OTHERS)
        sequences: list[Any] = [row.sequence, *range(10**6, 10**6 + 499), "no number"]
        with pytest.raises(psycopg.DataError):
            store.delete(sequences)
        assert store.summary(0.0).waiting == 1


@on_postgresql
def test_a_call_to_a_server_that_is_frozen_ends_and_the_next_one_connects_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host acknowledges what is sent: a relay waited without an end, and said that it was ready."""
    monkeypatch.setattr("nsqext.transactions.silence.SILENCE", 0.5)
    with OutboxStore(database) as store, closing(store.connect()) as other:
        with connect(database) as locking:
            locking.execute("LOCK TABLE nsqext_outbox_shard")
            with pytest.raises(psycopg.OperationalError, match="has not responded"):
                other.execute("SELECT count(*) FROM nsqext_outbox_shard")
            with pytest.raises(psycopg.OperationalError, match="has not responded") as silent:
                store.lease("first", 10)
        assert outage_of(silent.value) == "the connection is lost"
        assert len(store.lease("first", 10)) == 16


@one_database
def test_an_error_that_has_rolled_back_already_is_raised(database: str) -> None:
    """As that of a full disk."""
    fill(database, "t", 1, 10)
    with kept_connections() as opened, OutboxStore(database) as store:
        (row,) = store.rows(range(16), [], 10)
        fill_disk(opened[0])
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            store.refuse(row.sequence, "x" * 1_000_000)
        free_disk(opened[0])
        assert (store.summary(0.0).waiting, store.summary(0.0).refused) == (1, 0)


def test_a_store_that_cannot_be_opened_closes_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[Any] = []

    for file, text in ((tmp_path / "empty", "outbox sql"), (":memory:", "is not a file")):

        def connect(store: OutboxStore, file: Path | str = file) -> Any:
            connections.append(sqlite3.connect(file, isolation_level=None))
            return connections[-1]

        monkeypatch.setattr(OutboxStore, "connect", connect)
        with pytest.raises(InvalidSetting, match=text):
            OutboxStore(f"sqlite:///{tmp_path}")
        with pytest.raises(sqlite3.ProgrammingError):
            connections[-1].execute("SELECT 1")
