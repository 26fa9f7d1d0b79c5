"""`nsqext outbox`: how its options reach the store and the relay."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from nsqext import transactions
from nsqext.cli import main
from nsqext.errors import InvalidState
from nsqext.transactions import Outbox, OutboxStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def database(tmp_path: Path) -> str:
    """An outbox with two messages for each of two topics; their identities are numbers, the first is set aside."""
    path = tmp_path / "outbox"
    url = f"sqlite:///{path}"
    with OutboxStore(url, create=True) as store, closing(sqlite3.connect(path)) as connection:
        for number in range(4):
            Outbox().add(connection, "orders" if number < 2 else "audit", b"x", identity=str(number))
        connection.commit()
        store.refuse(store.rows(range(16), [], 1)[0].sequence, "too large")
    return url


def outbox(line: str, database: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, list[dict[str, Any]]]:
    """Run a command; return its exit code, and the records that it prints."""
    with pytest.raises(SystemExit) as end:
        main(["outbox", *line.split(), "--database", database])
    return end.value.code, [json.loads(one) for one in capsys.readouterr().out.splitlines()]


def test_a_relay_gets_its_limits(
    database: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = []

    def make(store: OutboxStore, **limits: Any) -> None:
        given.append(limits)
        raise InvalidState("made")

    monkeypatch.setattr(transactions, "OutboxRelay", make)
    for words in ("", "--batch 7 --poll 2.5"):
        assert outbox(f"relay --lookupd 127.0.0.1:1 {words}", database, capsys)[0] != 0
    assert given == [{"batch": 500, "poll": 0.5}, {"batch": 7, "poll": 2.5}]


def test_nothing_is_deleted_without_a_confirmation(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outbox("status --discard 0", database, capsys) == (2, [])
    with OutboxStore(database) as store:
        assert store.summary(0.0).refused == 1


def test_the_status_is_that_after_a_retry(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, (record,) = outbox("status --retry --yes", database, capsys)
    assert (code, record["retried"], record["refused"], record["reason"]) == (0, 1, 0, "")


def test_the_first_messages_of_a_topic_are_listed(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words, identities in (
        ("", ["0", "1", "2", "3"]),
        ("--limit 3", ["0", "1", "2"]),
        ("--topic audit", ["2", "3"]),
        ("--topic audit --limit 1", ["2"]),
    ):
        code, records = outbox(f"list {words}", database, capsys)
        assert (code, [one["identity"] for one in records]) == (0, identities)
    assert [(one["topic"], one["error"], one["publishing"]) for one in outbox("list", database, capsys)[1]][:2] == [
        ("orders", "too large", False),
        ("orders", "", False),
    ]


def test_any_message_that_is_not_cancelled_is_a_failure(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, records = outbox("cancel 1 5 2 --topic orders --yes", database, capsys)
    assert (code, [one["cancelled"] for one in records]) == (1, [True, False, False])
    assert outbox("cancel 5 2 --yes", database, capsys)[0] == 1
    code, records = outbox("cancel 0 3 --yes", database, capsys)
    assert (code, [one["result"] for one in records]) == (0, ["cancelled", "cancelled"])
