"""The store of delayed messages."""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nsqext.delays import Cancellation, DelayRelay, DelayStore, WaitingMessage
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, decode_delay
from tests.support.kept_connections import kept_connections

LEASE = 60.0


CLOCK = [0.0]
"""The monotonic clock of `opened` stores; `identities` sets it."""


def opened(path: Path | str) -> DelayStore:
    """Open a store whose leases end by the times of the test."""
    return DelayStore(path, clock=lambda: CLOCK[0])


def message(identity: str, due: float, topic: str = "t") -> DelayedMessage:
    """Return a delayed message that is due at a time in seconds."""
    return DelayedMessage(identity=identity, topic=topic, due=round(due * 1000))


def identities(store: DelayStore, now: float, count: int = 100) -> list[str]:
    """Take what is due, and return its identities."""
    CLOCK[0] = now
    return sorted(identity for identity, *_ in store.take([], count, now, LEASE))


def test_messages_are_taken_when_due_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with DelayStore(path) as store:
        name = store.name
        store.add([(message("b", 20.0), b"B"), (message("a", 10.0), b"A\n")])
    with DelayStore(path) as store:
        assert store.name == name
        assert store.next_due(1.0) == 10.0
        assert store.take([], 9, 9.999, LEASE) == []
        ((identity, _, data),) = store.take([], 9, 10.0, LEASE)
        assert (identity, decode_delay(data)[1]) == ("a", b"A\n")
        assert store.take(["a"], 9, 10.0, LEASE) == []
        assert store.waiting() == [WaitingMessage("b", "t", 20.0)]
        assert identities(store, 100.0) == ["b"]


def test_a_message_that_was_taken_is_taken_again_after_the_lease(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path) as one, opened(path) as other:
        one.add([(message(str(number), 1.0), b"x") for number in range(5)])
        taken = identities(one, 1.0, 3)
        assert len(taken) == 3
        assert not {*identities(other, 2.0)} & {*taken}
        assert {*identities(other, 1.0 + LEASE)} == {*taken}


HOUR = 3600.0


@pytest.mark.parametrize("set_by", [5 * HOUR, 30.0, -30.0, -5 * HOUR])
def test_a_clock_that_is_set_changes_no_lease(set_by: float, tmp_path: Path) -> None:
    """A relay published what another one was publishing, or what a killed one had leased waited for hours."""
    start = 10 * HOUR
    with opened(tmp_path / "store") as store:
        store.add([(message("a", HOUR), b"")])
        CLOCK[0] = 7.0
        assert [identity for identity, *_ in store.take([], 9, start, LEASE)] == ["a"]
        CLOCK[0] += LEASE - 1.0
        assert store.take([], 9, start + set_by, LEASE) == []
        assert store.next_due(start + set_by) == pytest.approx(start + set_by + 1.0)
        CLOCK[0] += 1.5
        assert store.next_due(start + set_by) == HOUR
        assert [identity for identity, *_ in store.take([], 9, start + set_by, LEASE)] == ["a"]
        store.failed("a", "no leader", start, 10.0, alone=False)
        CLOCK[0] += 9.0
        assert store.take([], 9, start + set_by, LEASE) == []
        CLOCK[0] += 1.5
        assert len(store.take([], 9, start + set_by, LEASE)) == 1


def test_a_lease_ends_when_the_machine_starts_again(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        store.add([(message("a", 1.0), b"")])
        CLOCK[0] = 1000.0
        assert len(store.take([], 9, 2.0, LEASE)) == 1
        CLOCK[0] = 5.0  # begins again
        assert store.next_due(2.0) == 1.0
        assert len(store.take([], 9, 2.0, LEASE)) == 1


def test_no_message_is_early_although_its_lease_is_over(tmp_path: Path) -> None:
    """The clock was set forward, and is right again."""
    with opened(tmp_path / "store") as store:
        store.add([(message("a", 5 * HOUR), b"")])
        assert identities(store, 6 * HOUR) == ["a"]
        store.failed("a", "no leader", 6 * HOUR, 1.0, alone=True)
        CLOCK[0] += LEASE
        assert store.next_due(HOUR) == 5 * HOUR
        assert store.take([], 9, HOUR, LEASE) == []


def test_failures_postpone_the_topic_unless_the_message_is_the_reason(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        store.add([(message("a", 1.0), b""), (message("b", 2.0), b""), (message("c", 2.0, "other"), b"")])
        assert identities(store, 1.0) == ["a"]
        store.failed("a", "no leader", 1.0, 49.0, alone=False)
        assert [one.error for one in store.waiting("t")] == ["no leader"] * 2
        assert identities(store, 10.0) == ["c"]
        store.take(["c"], 0, 10.0, LEASE)
        assert identities(store, 50.0) == ["a", "b"]
        store.failed("a", "too large", 50.0, 30.0, alone=True)
        assert identities(store, 79.0) == []
        assert identities(store, 80.0) == ["a"]


def test_topics_are_left_out(tmp_path: Path) -> None:
    with DelayStore(tmp_path / "store", clock=lambda: 0.0) as store:
        for number, topic in enumerate("tuv", 1):
            store.add([(DelayedMessage(identity=topic, topic=topic, due=1000 * number), b"x")])
        assert store.next_due(9.0, {"t", "u"}) == 3.0
        assert store.next_due(9.0, ["t", "u", "v"]) is None
        assert sorted(identity for identity, *_ in store.take([], 9, 9.0, -1.0, {"t"})) == ["u", "v"]
        found = store.take([], 9, 9.0, 5.0, ["u"])
        assert sorted(one.identity for one in found) == ["t", "v"], "also if a lease is over"
        assert store.next_due(9.0, {"u"}) == 14.0
        assert store.next_due(9.0, {"t", "u", "v"}) is None


def test_a_failure_changes_neither_messages_that_are_published_now_nor_later_messages(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        store.add([(message("a", 1.0), b""), (message("now", 2.0), b""), (message("later", 13.001), b"")])
        assert identities(store, 3.0) == ["a", "now"]
        store.failed("a", "no leader", 3.0, 10.0, alone=False)
        assert {one.identity: (one.error, one.publishing) for one in store.waiting()} == {
            "a": ("no leader", False),
            "now": ("", True),
            "later": ("", False),
        }


def test_messages_are_listed_and_taken_in_the_order_of_their_times(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        store.add([(message(str(number), float(number)), b"") for number in (3, 1, 2)])
        assert [one.identity for one in store.waiting(count=2)] == ["1", "2"]
        assert [identities(store, 10.0, 1) for _ in range(3)] == [["1"], ["2"], ["3"]]


def test_a_cancelled_message_leaves_no_body_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with opened(path) as store:
        store.add([(message("a", 1.0), b"secret")])
        store.cancel("a")
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT identity, record FROM delayed").fetchall() == [("a", "")]


def test_two_openings_of_a_file_have_one_name(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as one, opened(tmp_path / "store") as other:
        assert one.name == other.name
    with closing(sqlite3.connect(tmp_path / "store")) as file:
        assert file.execute("SELECT count(*) FROM store").fetchone() == (1,)


def test_messages_are_cancelled_before_and_after_they_are_added(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        assert store.cancel("early") is Cancellation.UNKNOWN
        store.add([(message("early", 1.0), b""), (message("late", 1.0), b""), (message("other", 1.0), b"")])
        assert store.cancel("late") is Cancellation.CANCELLED
        assert store.cancel("late") is Cancellation.UNKNOWN
        store.add([(DelayCancel(identity="other", time=5), b"")])
        assert (store.count(), store.waiting(), store.next_due(1.0)) == (0, [], None)
        assert identities(store, 100.0) == []


def test_a_message_that_is_being_published_is_not_cancelled_and_not_repeated(tmp_path: Path) -> None:
    """The store was empty, the answer was that it is cancelled, and the message was delivered after an outage."""
    with opened(tmp_path / "store") as store:
        store.add([(message(name, 1.0), b"x") for name in ("fails", "passes", "dies", "repeats")])
        assert identities(store, 1.0) == ["dies", "fails", "passes", "repeats"]
        assert {one.publishing for one in store.waiting()} == {True}
        store.add([(DelayCancel(identity="fails", time=5), b"")])
        for name in ("passes", "dies"):
            assert store.cancel(name) is Cancellation.TOO_LATE
            assert store.cancel(name) is Cancellation.TOO_LATE
        store.failed("fails", "no leader", 1.0, 8.0, alone=False)
        store.failed("repeats", "no leader", 1.0, 8.0, alone=False)
        store.take(["passes"], 0, 1.0, LEASE)
        assert {one.identity: one.publishing for one in store.waiting()} == {"dies": True, "repeats": False}
        assert identities(store, 1.0 + LEASE) == ["repeats"]
        assert store.cancel("dies") is Cancellation.UNKNOWN
        store.add([(message("fails", 1.0), b"x"), (message("dies", 1.0), b"x")])
        assert store.count() == 1


def test_a_file_of_an_earlier_version_is_used(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with closing(sqlite3.connect(path)) as old:
        old.execute(
            "CREATE TABLE delayed (identity TEXT PRIMARY KEY, topic TEXT NOT NULL, due INTEGER NOT NULL, "
            "next INTEGER, record BLOB NOT NULL, error TEXT NOT NULL DEFAULT '') WITHOUT ROWID"
        )
        old.execute("INSERT INTO delayed (identity, topic, due, next, record) VALUES ('a', 't', 1000, 1000, 'x')")
        old.commit()
    for _ in range(2):
        with DelayStore(path) as store:
            assert store.waiting() == [WaitingMessage("a", "t", 1.0)]
    with DelayStore(path) as store:
        assert identities(store, 1.0) == ["a"]


def test_a_call_that_returned_is_on_disk(tmp_path: Path) -> None:
    """With synchronous=NORMAL a machine that loses power loses the last transactions."""
    with kept_connections() as opened, DelayStore(tmp_path / "store"):
        (connection,) = opened
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_records_that_are_set_aside_are_kept_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.delays.store._MOST_REFUSED", 3)
    with opened(tmp_path / "store") as store:
        store.refuse([(b"%d" % number, f"reason {number}") for number in range(5)])
        assert [(one.record, one.reason) for one in store.refused()] == [
            (b"%d" % number, f"reason {number}") for number in (4, 3, 2)
        ]
        assert all(abs(one.received - time.time()) < HOUR for one in store.refused())
        assert store.count() == 0


def test_identities_are_known_until_they_are_forgotten(tmp_path: Path) -> None:
    with opened(tmp_path / "store") as store:
        for now, count in ((1.0, 1), (2.0, 0)):
            store.add([(message("a", 1.0), b"")])
            taken = identities(store, now)
            assert len(taken) == count
            store.take(taken, 0, now, LEASE)
        assert store.forget(1.0) == 0
        assert store.forget(1.5) == 1
        store.add([(message("a", 1.0), b"")])
        assert store.count() == 1
        assert store.forget(-inf) == 0, "as with keep=inf"


def test_a_cancellation_of_an_unknown_message_is_kept_from_its_time(tmp_path: Path) -> None:
    """Servers may deliver the message later, and it was published."""
    with opened(tmp_path / "store") as store:
        store.cancel("early")
        assert store.forget(time.time() - 60.0) == 0
        store.add([(message("early", 1.0), b"x")])
        assert store.count() == 0


def test_an_identity_is_kept_from_the_end_of_its_message_that_was_late(tmp_path: Path) -> None:
    """A relay did not run for days: a cancellation was forgotten before its message was received."""
    with DelayStore(tmp_path / "store") as store:
        now = time.time()
        store.add([(DelayCancel(identity="a", time=0), b""), (message("b", 10.0), b"B")])
        assert store.take(["b"], 9, now, LEASE) == []
        assert store.forget(now - 60.0) == 0
        store.add([(message("a", 20.0), b"A"), (message("b", 10.0), b"B")])
        assert store.count() == 0
        assert store.forget(now + 60.0) == 2


def test_an_identity_is_kept_from_the_time_at_which_its_cancelled_message_was_due(tmp_path: Path) -> None:
    with DelayStore(tmp_path / "store") as store:
        now = time.time()
        store.add([(message("a", now + HOUR), b"x")])
        assert store.cancel("a") is Cancellation.CANCELLED
        assert store.forget(now + 60.0) == 0
        assert store.forget(now + HOUR + 1.0) == 1


def test_a_call_that_fails_changes_nothing_and_the_next_one_is_a_transaction(tmp_path: Path) -> None:
    with DelayStore(tmp_path / "store") as store:
        wrong = DelayedMessage(identity=["no text"], topic="t", due=1)  # type: ignore[arg-type]
        with pytest.raises(sqlite3.Error):
            store.add([(message("a", 1.0), b"x"), (wrong, b"x")])
        assert store.count() == 0
        store.add([(message("b", 1.0), b"x")])
        assert store.count() == 1


def test_threads_have_transactions_of_their_own(tmp_path: Path) -> None:
    with DelayStore(tmp_path / "store") as store, ThreadPoolExecutor(4) as threads:
        assert len([*threads.map(lambda number: store.add([(message(str(number), 1.0), b"x")]), range(200))]) == 200
        assert store.count() == 200


def test_a_call_waits_for_the_transaction_of_another_process(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with (
        kept_connections() as opened,
        DelayStore(path) as store,
        closing(sqlite3.connect(path, check_same_thread=False)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        end = threading.Timer(0.05, other.commit)
        end.start()
        store.add([(message("a", 1.0), b"x")])
        end.join()
        assert store.count() == 1
        assert opened[0].execute("PRAGMA busy_timeout").fetchone() == (30_000,), "milliseconds"


def test_what_only_reads_does_not_wait_for_another_process_that_writes(tmp_path: Path) -> None:
    """A page of waiting messages waited for 30 s, with an error."""
    path = tmp_path / "store"
    with DelayStore(path) as store, closing(sqlite3.connect(path)) as other:
        store.add([(message("a", 1.0), b"x")])
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM delayed")
        assert [one.identity for one in store.waiting()] == ["a"]
        assert (store.count(), store.next_due(0.0), store.summary(0.0).waiting, store.refused()) == (1, 1.0, 1, [])


def test_a_transaction_has_its_lock_before_it_reads(tmp_path: Path) -> None:
    """SQLite ends a transaction that has read, and writes after another one, with an error at once."""
    path = tmp_path / "store"
    attempts: list[str] = []

    def attempt(statement: str) -> None:
        if not statement.startswith("BEGIN"):
            try:
                other.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                attempts.append(str(error))
            else:
                other.rollback()
                attempts.append("not locked")

    with kept_connections() as opened, DelayStore(path) as store, closing(sqlite3.connect(path, timeout=0)) as other:
        opened[0].set_trace_callback(attempt)
        assert store.take([], 1, now=1.0, lease=1.0) == []
        opened[0].set_trace_callback(None)
    assert attempts[0] == "database is locked"


def test_a_store_that_has_to_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="does not exist"):
        DelayStore(tmp_path / "store", create=False)
    assert not (tmp_path / "store").exists()
    with DelayStore(tmp_path / "store") as store:
        name = store.name
    with pytest.raises(InvalidState):
        store.count()
    with DelayStore(tmp_path / "store", create=False) as store:
        assert store.name == name
        with pytest.raises(InvalidSetting, match="keep"):
            DelayRelay(store, keep=-1.0)


@pytest.mark.parametrize("create", [True, False])
def test_the_database_of_another_program_stays_as_it_is(create: bool, tmp_path: Path) -> None:
    """A mistyped path got the tables of a store, without messages."""
    with closing(sqlite3.connect(tmp_path / "shop")) as shop:
        shop.execute("CREATE TABLE orders (number INTEGER)")
        shop.commit()
    before = (tmp_path / "shop").read_bytes()
    with pytest.raises(InvalidSetting, match="is no store of delayed messages"):
        DelayStore(tmp_path / "shop", create=create)
    assert (tmp_path / "shop").read_bytes() == before


@pytest.mark.parametrize("name", ["", ":memory:"])
def test_a_store_that_would_be_lost_with_its_process_is_refused(name: str) -> None:
    with kept_connections() as opened, pytest.raises(InvalidSetting, match="is not a file"):
        DelayStore(name)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")


def test_another_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to look like one: " * 50)
    with pytest.raises(InvalidSetting, match="cannot be used"):
        DelayStore(tmp_path / "text")
    with pytest.raises(InvalidSetting):
        DelayStore(tmp_path / "missing" / "store")


class Stores(RuleBasedStateMachine):
    """A store against a dictionary."""

    names = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self._folder = TemporaryDirectory()
        self.store = opened(Path(self._folder.name) / "store")
        self.now = 0.0
        self.waiting: dict[str, float] = {}
        self.ended: set[str] = set()
        self.publishing: set[str] = set()
        self.late: set[str] = set()

    @rule(name=names, delay=st.integers(0, 20))
    def add(self, name: str, delay: int) -> None:
        self.store.add([(message(name, self.now + delay), b"x")])
        if name not in self.ended:
            self.waiting.setdefault(name, self.now + delay)

    @rule(name=names)
    def cancel(self, name: str) -> None:
        result = self.store.cancel(name)
        if name in self.publishing:
            assert result is Cancellation.TOO_LATE
            self.late.add(name)
            return
        assert result is (Cancellation.CANCELLED if name in self.waiting else Cancellation.UNKNOWN)
        self.waiting.pop(name, None)
        self.ended.add(name)

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(published=st.booleans())
    def take(self, published: bool) -> None:
        for name in [name for name in self.late if self.waiting[name] <= self.now]:
            self._end(name)
        due = sorted(name for name, at in self.waiting.items() if at <= self.now)
        assert identities(self.store, self.now) == due
        if published:
            self.store.take(due, 0, self.now, LEASE)
        for name in due:
            if published:
                self._end(name)
            else:
                self.waiting[name] = self.now + LEASE
                self.publishing.add(name)

    @precondition(lambda self: self.publishing)
    @rule(number=st.integers(0, 3))
    def fail(self, number: int) -> None:
        name = sorted(self.publishing)[number % len(self.publishing)]
        CLOCK[0] = self.now
        self.store.failed(name, "no leader", self.now, 10.0, alone=True)
        if name in self.late:
            self._end(name)
            return
        self.publishing.discard(name)
        self.waiting[name] = self.now + 10

    def _end(self, name: str) -> None:
        del self.waiting[name]
        self.publishing.discard(name)
        self.late.discard(name)
        self.ended.add(name)

    @precondition(lambda self: self.ended)
    @rule()
    def forget(self) -> None:
        self.store.forget(float("1e12"))
        self.ended.clear()

    @invariant()
    def next_is_the_first(self) -> None:
        CLOCK[0] = self.now
        found, expected = self.store.next_due(self.now), min(self.waiting.values(), default=None)
        assert (found and max(found, self.now)) == (expected and max(expected, self.now))
        assert self.store.count() == len(self.waiting)

    def teardown(self) -> None:
        self.store.close()
        self._folder.cleanup()


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_store_is_used_again_after_a_failed_commit(tmp_path: Path) -> None:
    """A full disk may fail there."""

    def refuse_commits(action: int, name: str | None, *_: object) -> int:
        refused = action == sqlite3.SQLITE_TRANSACTION and name == "COMMIT"
        return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK

    with kept_connections() as opened, DelayStore(tmp_path / "store") as store:
        opened[0].set_authorizer(refuse_commits)
        with pytest.raises(sqlite3.DatabaseError, match="not authorized"):
            store.cancel("one")
        opened[0].set_authorizer(None)
        assert store.cancel("one") is Cancellation.UNKNOWN
        assert store.count() == 0
