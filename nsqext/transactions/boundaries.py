"""Find out whether the first write of a transaction is committed together with its last write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final
from weakref import WeakSet

from nsqext.errors import InvalidSetting, InvalidState
from nsqext.transactions.round_trip import execute_at_once, is_on_psycopg
from nsqext.transactions.schema import SqlConnection, driver_of, execute, fetched, package_of

_SAVEPOINT: Final = "nsqext_handler"
_XID: Final = "SELECT txid_current_if_assigned()"
_FLAG: Final = "default_transaction_read_only"
# marks a transaction, without an effect in it: PostgreSQL reports to the client that the end of the transaction removes
# the mark, so that no statement has to ask
_MARK: Final = f"SELECT set_config('{_FLAG}', '{{flag}}', true), txid_current_if_assigned()"
_GUARDED: Final = "nsqext_transaction"  # key in ``Session.info`` of SQLAlchemy: the transaction of the handler
_ONE_TRANSACTION: Final = "a message and its effects have to be in one transaction"


class End(Enum):
    """Whether the transaction that was begun is still open."""

    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"  #: after a failed statement PostgreSQL refuses others, and a commit rolls back without an error


def check_outermost(connection: SqlConnection) -> None:
    """Raise `InvalidSetting` for a session of a thread or task, and for a transaction within a longer transaction."""
    if package_of(connection) != "sqlalchemy":
        return
    if hasattr(connection, "registry"):
        raise InvalidSetting(
            f"a scoped session is another session in each thread or task: {_ONE_TRANSACTION}",
            hint="give sessionmaker(engine).begin",
        )
    found = _blocking(connection)
    bind: Any = found.get_bind() if hasattr(found, "get_bind") else None
    if found.in_nested_transaction() or (hasattr(bind, "in_transaction") and bind.in_transaction()):
        raise InvalidSetting(
            f"begin opens a savepoint in a longer transaction: {_ONE_TRANSACTION} that is committed before the message "
            "is finished",
            hint="give a function that begins a transaction on a connection of its own, such as sessionmaker(engine)"
            ".begin",
        )


class OpenTransaction:
    """The transaction of a handler, recognized before and after the handler."""

    def __init__(self, connection: SqlConnection) -> None:
        self.connection = connection
        self._package = package_of(connection)
        self._driver: Any = None if self._package == "sqlalchemy" else connection
        self._mark: Any = None
        self._flag: str | None = None

    async def begin(self, write: str, values: Mapping[str, object]) -> bool:
        """Begin the transaction with a write, one round trip of psycopg; return whether a row was written."""
        if not is_on_psycopg(self.connection):
            return bool((await execute(self.connection, write, values)).rowcount)
        written, *_ = await self._begin_at_once((write,), values)
        return bool(written.command_tuples)

    async def begin_and_read(self, write: str, read: str, values: Mapping[str, object]) -> tuple[int | None] | None:
        """Begin the transaction with a write, then read a number, in one round trip of psycopg.

        Returns:
            The number; None if no row was written.
        """
        if is_on_psycopg(self.connection):
            written, rows = await self._begin_at_once((write, read), values)
            found = rows.get_value(0, 0)
            return (None if found is None else int(found),) if written.command_tuples else None
        if not await self.begin(write, values):
            return None
        ((number,),) = await fetched(await execute(self.connection, read, values))
        return (number,)

    async def _begin_at_once(self, statements: Sequence[str], values: Mapping[str, object]) -> list[Any]:
        """Begin with statements of psycopg, and mark its transaction; SQLAlchemy has an object for a transaction."""
        if self._package == "sqlalchemy":
            self._driver, results = await execute_at_once(self.connection, statements, values)
            return results
        if self._flag is None:
            self._flag = "off" if self._driver.pgconn.parameter_status(_FLAG.encode()) == b"on" else "on"
        marking = _MARK.format(flag=self._flag)
        _, (*results, mark) = await execute_at_once(self.connection, (*statements, marking), values)
        number = mark.get_value(0, 1)
        self._mark = (self._flag, None if number is None else int(number))
        return results

    async def guard(self) -> None:
        """Recognize the transaction from now on.

        Raises:
            InvalidSetting: no transaction is open: the first write was committed at once.
        """
        if self._driver is None:
            self._driver = driver_of(_blocking(self.connection))
        if _is_idle(self._driver):
            raise autocommit_error()
        if self._package == "sqlalchemy":
            self._mark = _blocking(self.connection).get_transaction()
            _guard(_blocking(self.connection), self._mark)
        elif self._package != "psycopg":
            await execute(self.connection, f"SAVEPOINT {_SAVEPOINT}", {})

    async def _is_marked(self) -> bool:
        """Return whether psycopg's transaction is still the transaction of `begin`."""
        flag, number = self._mark
        reported = self._driver.pgconn.parameter_status(_FLAG.encode())  # from PostgreSQL 14
        return reported == flag.encode() or await fetched(await execute(self.connection, _XID, {})) == [(number,)]

    async def end(self) -> End:
        """Return whether the transaction is still open; call it once.

        Raises:
            Exception: the database does not respond.
        """
        if self._package == "sqlalchemy":
            if _blocking(self.connection).get_transaction() is not self._mark:
                return End.ENDED
            if not self._mark.is_active:  # a flush has failed
                return End.FAILED
        if _is_idle(self._driver):
            return End.ENDED
        if _status(self._driver) == _IN_ERROR:
            return End.FAILED
        if self._package == "sqlalchemy":
            return End.OPEN
        if self._package == "psycopg":
            return End.OPEN if await self._is_marked() else End.ENDED
        from sqlite3 import OperationalError

        try:
            await execute(self.connection, f"RELEASE {_SAVEPOINT}", {})
        except OperationalError as error:
            if "no such savepoint" not in str(error):
                raise
            return End.ENDED
        return End.OPEN

    def release(self) -> None:
        """Allow other transactions of the session again."""
        if self._package == "sqlalchemy" and hasattr(_blocking(self.connection), "get_bind"):
            _blocking(self.connection).info.pop(_GUARDED, None)


def autocommit_error() -> InvalidSetting:
    """Return the error where each statement is a transaction."""
    return InvalidSetting(
        f"the connection of begin commits each statement at once: {_ONE_TRANSACTION}",
        hint='leave out autocommit=True, isolation_level="AUTOCOMMIT" or isolation_level=None, or begin a transaction '
        "in the function that is given as begin",
    )


def no_transaction_error(found: object) -> InvalidSetting:
    """Return the error where ``begin`` returns something else."""
    return InvalidSetting(
        f"begin returned a {type(found).__name__}, which is no context manager",
        hint="give a function that opens a transaction, such as sessionmaker(engine).begin",
    )


def uncommitted_error() -> InvalidSetting:
    """Return the error where the end of a transaction is a rollback."""
    return InvalidSetting(
        "begin does not commit at its end: the effects of handlers would be lost",
        hint="give a context manager that commits at its end, such as sessionmaker(engine).begin, or your own context "
        "manager with: async with aiosqlite.connect(path) as connection: yield connection; await connection.commit()",
    )


def hidden_error() -> InvalidSetting:
    """Return the error where the end of a transaction hides an error."""
    return InvalidSetting(
        "begin hides the error of its transaction: a message would be finished although its commit failed",
        hint="raise the error again behind the rollback: except Exception: await session.rollback(); raise",
    )


def end_error(end: End, topic: str) -> InvalidState:
    """Return the error where a transaction cannot be committed behind its handler."""
    if end is End.FAILED:
        return InvalidState(
            "a statement of the handler has failed, and the handler has returned: its transaction cannot be committed",
            topic=topic,
            hint="let the error of the database pass, or execute the statement in a savepoint (session.begin_nested())",
        )
    return InvalidState(
        f"the handler has committed or rolled back the transaction of its message: {_ONE_TRANSACTION}",
        topic=topic,
        hint="leave out commit() and rollback() in the handler; a savepoint (session.begin_nested()) undoes a part",
    )


def finished_error(topic: str) -> InvalidState:
    """Return the error where a message was finished before the commit of its transaction."""
    return InvalidState(
        "the handler has finished its message before its transaction was committed: had the commit failed, its effects "
        "would be lost",
        topic=topic,
        hint="leave out finish(): the message is finished after the commit",
    )


_IDLE, _IN_ERROR = 0, 3  # libpq's numbers for no transaction, and for a transaction with a failed statement


def _is_idle(driver: Any) -> bool:
    """Return whether a connection of a known driver has no open transaction."""
    if hasattr(driver, "in_transaction"):  # sqlite3, aiosqlite
        return not driver.in_transaction
    if hasattr(driver, "is_in_transaction"):  # asyncpg
        return not driver.is_in_transaction()
    return bool(_status(driver) == _IDLE)


def _status(driver: Any) -> int | None:
    """Return libpq's number for the state of a transaction; None with drivers that do not use libpq."""
    return getattr(getattr(driver, "info", None), "transaction_status", None)


def _blocking(connection: Any) -> Any:
    """Return the blocking session or connection of SQLAlchemy below an asynchronous session."""
    for name in ("sync_session", "sync_connection"):
        connection = getattr(connection, name, connection)
    return connection


_listening: WeakSet[type] = WeakSet()  # classes of sessions: each `sessionmaker` has its own


def _guard(session: Any, transaction: object) -> None:
    """Refuse other transactions of a session, until `OpenTransaction.release`."""
    if not hasattr(session, "get_bind"):
        return
    if type(session) not in _listening:
        from sqlalchemy import event

        _listening.add(type(session))
        event.listen(type(session), "after_begin", _refuse_other)
    session.info[_GUARDED] = transaction


def _refuse_other(session: Any, transaction: Any, _: object) -> None:
    """Refuse a second database, whose commit may fail alone, and statements after the handler's commit or rollback."""
    own = session.info.get(_GUARDED)
    if own is None or transaction.nested or (session.twophase and transaction is own):
        return
    if transaction is not own:
        raise InvalidState(
            f"the handler has ended the transaction of its message, and begins another transaction: {_ONE_TRANSACTION}",
            hint="leave out commit() and rollback() in the handler",
        )
    raise InvalidState(
        f"the session of the handler writes to a second database: {_ONE_TRANSACTION}",
        hint="use one database, or twophase=True with a database that has prepared transactions",
    )
