"""Statements of psycopg in one round trip with the BEGIN of their transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyio import to_thread

from nsqext.transactions.schema import (
    SqlConnection,
    dialect_of,
    driver_of,
    is_asynchronous,
    package_of,
    prepared,
    psycopg_sql,
)

# libpq's numbers for no pipeline mode, no transaction, and two kinds of results
_OFF, _IDLE, _COMMAND, _ROWS = 0, 0, 1, 2


def is_on_psycopg(connection: SqlConnection) -> bool:
    """Return whether a connection is psycopg's, or SQLAlchemy's on psycopg."""
    package = package_of(connection)
    return package == "psycopg" or (package == "sqlalchemy" and dialect_of(connection).driver == "psycopg")


async def execute_at_once(
    connection: SqlConnection, statements: Sequence[str], values: Mapping[str, object]
) -> tuple[Any, list[Any]]:
    """Execute statements, each with its own snapshot, behind the BEGIN of a transaction that has not begun.

    Args:
        connection: see `is_on_psycopg`.
        statements: SQL with named parameters.
        values: the parameters of all statements.

    Returns:
        Psycopg's connection, and the result of each statement.

    Raises:
        Exception: the error of the first statement that failed; the transaction has failed then.
    """
    driver: Any = connection
    if hasattr(connection, "run_sync"):
        driver = await connection.run_sync(driver_of)
    elif package_of(connection) == "sqlalchemy" or not is_asynchronous(connection):
        return await to_thread.run_sync(_execute_blocking, connection, statements, values)
    if driver.pgconn.pipeline_status != _OFF:
        async with driver.pipeline():
            cursors = [await driver.execute(*prepared(driver, sql, values)) for sql in statements]
        return driver, [cursor.pgresult for cursor in cursors]
    from psycopg import AsyncClientCursor, generators

    query = _query(driver, AsyncClientCursor(driver), statements, values)
    async with driver.lock:
        driver.pgconn.send_query(query)
        results = await driver.wait(generators.execute(driver.pgconn))
    return driver, _checked(driver, results, len(statements))


def _execute_blocking(
    connection: Any, statements: Sequence[str], values: Mapping[str, object]
) -> tuple[Any, list[Any]]:
    driver = driver_of(connection) if package_of(connection) == "sqlalchemy" else connection
    if driver.pgconn.pipeline_status != _OFF:
        with driver.pipeline():
            cursors = [driver.execute(*prepared(driver, sql, values)) for sql in statements]
        return driver, [cursor.pgresult for cursor in cursors]
    from psycopg import ClientCursor, generators

    query = _query(driver, ClientCursor(driver), statements, values)
    with driver.lock:
        driver.pgconn.send_query(query)
        results = driver.wait(generators.execute(driver.pgconn))
    return driver, _checked(driver, results, len(statements))


def _query(driver: Any, cursor: Any, statements: Sequence[str], values: Mapping[str, object]) -> bytes:
    """Return the text of statements with their values, behind BEGIN where psycopg would send it."""
    begin = "" if driver.autocommit or driver.pgconn.transaction_status != _IDLE else f"{_begin(driver)};"
    text: str = begin + cursor.mogrify(psycopg_sql(";".join(statements)), values)
    return text.encode(driver.info.encoding)


def _begin(driver: Any) -> str:
    """Return how a connection begins its transactions."""
    words = ["BEGIN"]
    if driver.isolation_level is not None:
        words.append(f"ISOLATION LEVEL {driver.isolation_level.name.replace('_', ' ')}")
    if driver.read_only is not None:
        words.append("READ ONLY" if driver.read_only else "READ WRITE")
    if driver.deferrable is not None:
        words.append("DEFERRABLE" if driver.deferrable else "NOT DEFERRABLE")
    return " ".join(words)


def _checked(driver: Any, results: Sequence[Any], count: int) -> list[Any]:
    """Return the results of the statements, without the result of BEGIN."""
    for result in results:
        if result.status not in (_COMMAND, _ROWS):
            from psycopg.errors import error_from_result

            raise error_from_result(result, driver.info.encoding)
    return [*results[-count:]]
