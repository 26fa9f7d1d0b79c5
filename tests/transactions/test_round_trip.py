"""Statements of psycopg travel with the BEGIN that psycopg would have sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import anyio
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from nsqext.transactions.round_trip import execute_at_once
from tests.transactions.databases import url_of

_STATE = (
    "SELECT current_setting('transaction_isolation')",
    "SELECT current_setting('transaction_read_only')",
    "SELECT current_setting('transaction_deferrable')",
    "SELECT :word || CAST(now() AS text)",
)


@pytest.fixture
def connection(postgres: str) -> Iterator[psycopg.Connection[Any]]:
    """Connect with psycopg."""
    with closing(psycopg.connect(postgres)) as opened:
        yield opened


def run(connection: Any, *statements: str, **values: object) -> list[str]:
    """Return the first value of each statement."""
    _, results = anyio.run(execute_at_once, connection, statements, values)
    return [(result.get_value(0, 0) or b"").decode() for result in results]


def begin_time(connection: psycopg.Connection[Any]) -> str:
    """Return when the open transaction began."""
    ((text,),) = connection.execute("SELECT now()::text")
    return str(text)


def test_statements_are_in_the_transaction_that_they_begin(connection: psycopg.Connection[Any]) -> None:
    *state, began = run(connection, *_STATE, word="it's ")
    assert state == ["read committed", "off", "off"]
    assert began == f"it's {begin_time(connection)}"
    connection.rollback()


def test_options_of_a_connection_are_those_of_its_transaction(connection: psycopg.Connection[Any]) -> None:
    connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
    connection.read_only = connection.deferrable = True
    assert run(connection, *_STATE, word="")[:3] == ["serializable", "on", "on"]
    connection.rollback()
    connection.read_only = connection.deferrable = False
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert run(connection, *_STATE, word="")[:3] == ["repeatable read", "off", "off"]


def test_an_open_transaction_is_continued(connection: psycopg.Connection[Any]) -> None:
    """PostgreSQL warns of a second BEGIN."""
    notices: list[str | None] = []
    connection.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    began = begin_time(connection)
    assert run(connection, _STATE[-1], word="") == [began]
    assert notices == []


def test_a_connection_that_commits_each_statement_stays_so(postgres: str) -> None:
    with closing(psycopg.connect(postgres, autocommit=True)) as connection:
        run(connection, "SELECT 1")
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_the_first_error_is_raised(connection: psycopg.Connection[Any], wrong: int) -> None:
    statements = ["SELECT 1"] * 3
    statements[wrong] = "SELECT 1 / 0"
    with pytest.raises(psycopg.errors.DivisionByZero):
        run(connection, *statements)
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INERROR
    connection.rollback()
    assert run(connection, "SELECT 1") == ["1"]


def test_a_connection_in_pipeline_mode_is_used(connection: psycopg.Connection[Any]) -> None:
    with connection.pipeline():
        assert run(connection, "SELECT 1", "SELECT :word", word="two") == ["1", "two"]


@pytest.mark.anyio
async def test_an_asynchronous_connection_in_pipeline_mode_is_used(postgres: str) -> None:
    async with await psycopg.AsyncConnection.connect(postgres) as connection, connection.pipeline():
        _, results = await execute_at_once(connection, ("SELECT 1", "SELECT :word"), {"word": "two"})
        assert [result.get_value(0, 0) for result in results] == [b"1", b"two"]


def test_a_session_of_sqlalchemy_is_used(postgres: str) -> None:
    engine = create_engine(url_of(postgres, "sync"), poolclass=NullPool, isolation_level="SERIALIZABLE")
    with Session(engine) as session:
        assert run(session, _STATE[0]) == ["serializable"]
        assert session.connection().exec_driver_sql(_STATE[0]).scalar_one() == "serializable"


def test_values_are_sent_in_the_encoding_of_the_connection(postgres: str) -> None:
    with closing(psycopg.connect(f"{postgres} client_encoding=latin1")) as connection:
        _, (found,) = anyio.run(execute_at_once, connection, ["SELECT :word, length(:word)"], {"word": "\u00e9"})
        assert [found.get_value(0, column) for column in range(2)] == [b"\xe9", b"1"]
