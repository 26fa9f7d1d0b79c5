"""The record of a message and the effects of its handler are committed together, or the connection is refused."""

from __future__ import annotations

import sqlite3
from asyncio import current_task
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from inspect import isawaitable
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiosqlite
import anyio
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import IntegrityError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from nsqext import Message
from nsqext.client.middleware import Handling
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.transactions import Inbox, Outbox, OutboxStore, Positions
from nsqext.transactions.boundaries import OpenTransaction
from nsqext.transactions.schema import package_of
from tests.support.messages import RecordingOwner, make_message
from tests.support.tables import table
from tests.transactions.databases import url_of
from tests.transactions.test_outbox import connect

if TYPE_CHECKING:
    from nsqext.transactions.handler_transaction import HandlerTransaction

Begin = Callable[[], Any]
Handler = Callable[[Any], Awaitable[None]]
Once = type[Inbox[Any]] | type[Positions[Any]]

NOT_AT_ONCE = "commits each statement at once"
NO_COMMIT = "does not commit at its end"
HIDDEN = "hides the error of its transaction"
SAVEPOINT = "savepoint in a longer transaction"
ENDED = "has committed or rolled back the transaction|begins another transaction|closed transaction"


class _Other(DeclarativeBase):
    pass


class _Row(_Other):
    __tablename__ = "rows"
    number: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture(params=[Inbox, Positions])
def once(request: pytest.FixtureRequest) -> Once:
    """Inbox and Positions."""
    found: Once = request.param
    return found


@pytest.fixture
def effects(database: str) -> Iterator[Callable[[], list[str]]]:
    """Create a table of effects; the function returns what is committed in it."""
    with closing(connect(database)) as connection:
        connection.execute("DROP TABLE IF EXISTS effects")
        connection.execute("CREATE TABLE effects (body TEXT UNIQUE)")
        connection.commit()

    def read() -> list[str]:
        with closing(connect(database)) as connection:
            return sorted(body for (body,) in connection.execute("SELECT body FROM effects").fetchall())

    yield read


# Ways to begin a transaction


async def add(connection: Any, body: str) -> None:
    """Have an effect."""
    words = f"INSERT INTO effects VALUES ('{body}')"  # noqa: S608
    found = connection.execute(text(words) if package_of(connection) == "sqlalchemy" else words)
    if isawaitable(found):
        await found


def forget(database: str) -> None:
    """Forget what was handled."""
    with closing(connect(database)) as connection:
        for one in ("nsqext_inbox", "nsqext_inbox_range", "nsqext_position"):
            connection.execute(f"DELETE FROM {one}")  # noqa: S608
        connection.commit()


async def end(connection: Any, how: str) -> None:
    """Commit or roll back in a handler."""
    found = getattr(connection, how)()
    if isawaitable(found):
        await found


def ways(database: str, *, autocommit: bool = False) -> dict[str, Begin]:
    """Return ways to begin a transaction, by names."""
    options: Any = {"poolclass": NullPool, **({"isolation_level": "AUTOCOMMIT"} if autocommit else {})}
    blocking, asynchronous = (
        create_engine(url_of(database, "sync"), **options),
        create_async_engine(url_of(database, "async"), **options),
    )

    @asynccontextmanager
    async def by_hand() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(asynchronous) as session:
            yield session
            await session.commit()

    return {
        "session": sessionmaker(blocking).begin,
        "connection": blocking.begin,
        "asynchronous session": async_sessionmaker(asynchronous).begin,
        "asynchronous connection": asynchronous.begin,
        "asynchronous session, committed by hand": by_hand,
        **(_sqlite_ways if database.startswith("sqlite") else _postgres_ways)(database, autocommit),
    }


def _postgres_ways(database: str, autocommit: bool) -> dict[str, Begin]:
    @asynccontextmanager
    async def asynchronous() -> AsyncIterator[Any]:
        async with await psycopg.AsyncConnection.connect(database, autocommit=autocommit) as connection:
            yield connection

    return {
        "driver": lambda: psycopg.connect(database, autocommit=autocommit),
        "asynchronous driver": asynchronous,
    }


def _sqlite_ways(database: str, autocommit: bool) -> dict[str, Begin]:
    path, level = database.removeprefix("sqlite:///"), None if autocommit else "DEFERRED"

    @contextmanager
    def blocking() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, isolation_level=level, check_same_thread=False)) as one, one:  # type: ignore[arg-type]
            yield one

    @asynccontextmanager
    async def asynchronous() -> AsyncIterator[Any]:
        async with aiosqlite.connect(path, isolation_level=level) as connection:
            yield connection
            await connection.commit()

    return {"driver": blocking, "asynchronous driver": asynchronous}


NAMES = (
    "session",
    "connection",
    "asynchronous session",
    "asynchronous connection",
    "asynchronous session, committed by hand",
    "driver",
    "asynchronous driver",
)


async def handle(middleware: HandlerTransaction[Any], handler: Handler) -> None:
    """Handle a message."""
    message = make_message(RecordingOwner(in_order=True), offset=100)

    async def call(_: Handling) -> None:
        await handler(middleware.session())

    await middleware.handle(Handling([message], "ch"), call)


# Each way, with what a handler does


@table("name", NAMES)
def test_effects_and_message_are_committed_together(
    database: str, once: Once, effects: Callable[[], list[str]], name: str
) -> None:
    """Neither after an error, both after a return, and a second delivery is skipped."""

    async def scene() -> None:
        middleware, body = once(ways(database)[name]), f"{once.__name__} {name}"
        forget(database)

        async def fail(session: Any) -> None:
            await add(session, body)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await handle(middleware, fail)
        assert body not in effects()
        await handle(middleware, lambda session: add(session, body))
        assert body in effects()
        await handle(middleware, fail)
        assert middleware.skipped == 1

    anyio.run(scene)


@table("name", NAMES)
def test_a_connection_that_commits_each_statement_is_refused(
    database: str, once: Once, effects: Callable[[], list[str]], name: str
) -> None:
    """The handler failed once, and its message was taken for a handled one."""

    async def scene() -> None:
        way = ways(database, autocommit=True)[name]
        middleware = once(way)
        with pytest.raises(InvalidSetting, match=NOT_AT_ONCE):
            await handle(middleware, lambda session: add(session, name))
        chosen = [ways(database)[name]]
        middleware = once(lambda: chosen[0]())
        await middleware.check()
        chosen[0] = way  # another connection than those that were checked
        for _ in range(2):
            with pytest.raises(InvalidSetting, match=NOT_AT_ONCE):
                await handle(middleware, lambda session: add(session, name))
        assert effects() == []

    anyio.run(scene)


@pytest.mark.filterwarnings("ignore:coroutine 'Message.requeue' was never awaited:RuntimeWarning")
def test_a_message_that_its_handler_requeues_is_handled_again(
    database: str, once: Once, effects: Callable[[], list[str]]
) -> None:
    async def scene() -> None:
        middleware = once(ways(database)["asynchronous session"])

        async def call(act: Callable[[Message], Awaitable[object]]) -> None:
            message = make_message(RecordingOwner(in_order=True), 77, offset=7777)

            async def handler(_: Handling) -> object:
                await add(middleware.session(), f"{once.__name__} {act.__name__}")
                return await act(message)

            await middleware.handle(Handling([message], "requeues"), handler)

        async def forgets(message: Message) -> None:
            message.requeue()  # type: ignore[unused-coroutine]

        async def returns(message: Message) -> object:
            return message.touch()

        async def finishes(message: Message) -> None:
            await message.finish()

        await call(Message.requeue)
        for act in (forgets, returns):
            with pytest.raises(InvalidState, match="did not await it"):
                await call(act)
        assert effects() == []
        with pytest.raises(InvalidState, match="has finished its message before its transaction was committed"):
            await call(finishes)  # the message is gone: its effect stays
        assert (effects(), middleware.skipped) == ([f"{once.__name__} finishes"], 0)

    anyio.run(scene)


@table(("name", "how"), [(name, how) for name in NAMES for how in ("commit", "rollback")])
def test_a_handler_that_ends_its_transaction_is_refused(
    database: str, once: Once, effects: Callable[[], list[str]], name: str, how: str
) -> None:
    """What follows the commit is lost if it fails: the message must be handled again, however often."""

    async def scene() -> None:
        middleware = once(ways(database)[name])

        async def returns(session: Any) -> None:
            await add(session, f"{once.__name__} {name} {how} {next(numbers)}")
            await end(session, how)

        async def fails(session: Any) -> None:
            await returns(session)
            raise ZeroDivisionError

        async def continues(session: Any) -> None:
            await returns(session)
            await add(session, f"{once.__name__} {name} {how} behind")

        for handler in (continues, returns, fails, continues, returns):
            # SQLAlchemy itself refuses the second transaction of sessionmaker.begin
            with pytest.raises((InvalidState, InvalidRequestError), match=ENDED):
                await handle(middleware, handler)
        assert middleware.skipped == 0
        assert not [body for body in effects() if body.endswith("behind")]

    numbers = count()
    anyio.run(scene)


@table(("name", "how"), [(name, how) for name in NAMES for how in ("waits", "fails", "returns")])
def test_a_handler_that_commits_and_is_cancelled_handles_its_message_again(
    database: str, once: Once, effects: Callable[[], list[str]], name: str, how: str
) -> None:
    """What it would have written behind the commit was lost."""

    async def scene() -> None:
        middleware, calls, scope = once(ways(database)[name]), list[Any](), anyio.CancelScope()

        async def commits(session: Any) -> None:
            await end(session, "commit")
            with suppress(InvalidState, InvalidRequestError):  # SQLAlchemy refuses another transaction
                await add(session, f"{once.__name__} {name} {how}")
            scope.cancel()
            if how == "fails":
                raise ZeroDivisionError
            if how == "waits":
                await anyio.sleep_forever()

        async def note(session: Any) -> None:
            calls.append(session)

        with scope, suppress(InvalidState, InvalidRequestError):
            await handle(middleware, commits)
        await handle(middleware, note)
        assert (len(calls), middleware.skipped) == (1, 0)

    forget(database)
    anyio.run(scene)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_a_cancellation_is_not_replaced_by_an_error_of_the_database(
    database: str, once: Once, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: OpenTransaction) -> None:
        raise ZeroDivisionError("the connection is lost")

    async def scene() -> None:
        middleware, scope = once(ways(database)["asynchronous session"]), anyio.CancelScope()
        await middleware.check()
        monkeypatch.setattr(OpenTransaction, "end", fail)

        async def wait(_: Any) -> None:
            scope.cancel()
            await anyio.sleep_forever()

        with scope:
            await handle(middleware, wait)
        assert scope.cancelled_caught

    anyio.run(scene)


class _FullDisk(sqlite3.Connection):
    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        if statement.startswith("RELEASE"):
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(statement, *values)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_an_error_of_the_disk_is_not_the_end_of_a_transaction(database: str, once: Once) -> None:
    path = database.removeprefix("sqlite:///")

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(path, check_same_thread=False, factory=_FullDisk)) as one, one:
            yield one

    async def nothing(_: Any) -> None:
        """Do nothing."""

    with pytest.raises(sqlite3.OperationalError, match="disk"):
        anyio.run(handle, once(begin), nothing)


@pytest.mark.parametrize("identity", [None, lambda _: "one"], ids=["range", "identity"])
def test_a_handler_that_rolls_back_leaves_the_record_of_another_process(
    database: str, effects: Callable[[], list[str]], identity: Any
) -> None:
    """It has handled the redelivery meanwhile, and a third delivery has no effect."""

    async def scene() -> None:
        first, second = (Inbox(ways(database)["asynchronous session"], identity=identity) for _ in range(2))

        async def rolls_back(session: Any) -> None:
            await end(session, "rollback")
            await handle(second, lambda other: add(other, "once"))
            raise ZeroDivisionError

        with pytest.raises((InvalidState, InvalidRequestError), match=ENDED):
            await handle(first, rolls_back)
        await handle(first, rolls_back)
        assert (first.skipped, effects()) == (1, ["once"])

    anyio.run(scene)


@table("name", NAMES)
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_an_error_that_the_handler_hides_is_found(
    database: str, once: Once, effects: Callable[[], list[str]], name: str
) -> None:
    """PostgreSQL responds to COMMIT with a rollback then, and no driver raises."""

    async def scene() -> None:
        middleware = once(ways(database)[name])

        async def hide(session: Any) -> None:
            await add(session, "twice")
            with suppress(IntegrityError, psycopg.IntegrityError):
                await add(session, "twice")

        for _ in range(2):
            with pytest.raises(InvalidState, match="a statement of the handler has failed"):
                await handle(middleware, hide)
        assert (effects(), middleware.skipped) == ([], 0)

    anyio.run(scene)


def test_the_error_of_a_flush_is_that_of_the_handler(database: str, once: Once) -> None:
    """SQLAlchemy rolls back after it, and the message was not handled."""
    engine = create_engine(url_of(database, "sync"), poolclass=NullPool)
    _Other.metadata.create_all(engine)

    async def write(session: Session) -> None:
        for _ in range(2):
            session.add(_Row(number=1))
            session.flush()
            session.expunge_all()

    for _ in range(2):
        with pytest.raises(IntegrityError):
            anyio.run(handle, once(sessionmaker(engine).begin), write)
    _Other.metadata.drop_all(engine)


@table("name", [name for name in NAMES if "driver" not in name])
def test_a_savepoint_that_the_handler_rolls_back_is_allowed(
    database: str, once: Once, effects: Callable[[], list[str]], name: str
) -> None:
    async def scene() -> None:
        middleware, body = once(ways(database)[name]), f"{once.__name__} {name}"
        forget(database)

        async def undo_a_part(session: Any) -> None:
            await add(session, body)
            savepoint = session.begin_nested()
            if isawaitable(savepoint):
                savepoint = await savepoint
            await add(session, f"{body} undone")
            await end(savepoint, "rollback")

        await handle(middleware, undo_a_part)
        assert [one for one in effects() if one.startswith(body)] == [body]

    anyio.run(scene)


# Other ways that part them


@table(
    ("name", "text"),
    [
        ("commits nothing", NO_COMMIT),
        ("savepoint of a session", SAVEPOINT),
        ("session in a longer transaction", SAVEPOINT),
        ("commits after errors too", NOT_AT_ONCE),
        ("session of a thread", "another session in each thread"),
        ("session of a task", "another session in each thread or task"),
        ("hides errors", HIDDEN),
        ("hides errors, asynchronous", HIDDEN),
    ],
)
def test_a_way_to_begin_that_does_not_commit_is_refused(database: str, once: Once, name: str, text: str) -> None:
    """An inbox of ``aiosqlite.connect`` finished each message and lost its effects."""
    blocking = create_engine(url_of(database, "sync"), poolclass=NullPool)
    outer = blocking.connect()

    @contextmanager
    def without_commit() -> Iterator[Session]:
        with Session(blocking) as session:
            yield session

    @contextmanager
    def nested() -> Iterator[Session]:
        with Session(blocking) as session, session.begin(), session.begin_nested():
            yield session

    @contextmanager
    def longer() -> Iterator[Session]:
        if not outer.in_transaction():
            outer.begin()
        with Session(outer) as session, session.begin():
            yield session

    @contextmanager
    def swallowing() -> Iterator[Session]:
        with Session(blocking) as session:
            try:
                yield session
            except Exception:
                session.commit()
                raise
            session.commit()

    scoped = scoped_session(sessionmaker(blocking))

    @contextmanager
    def of_a_thread() -> Iterator[Any]:
        with scoped.begin():
            yield scoped
        scoped.remove()

    of_tasks = async_scoped_session(
        async_sessionmaker(create_async_engine(url_of(database, "async"), poolclass=NullPool)), current_task
    )

    @asynccontextmanager
    async def of_a_task() -> AsyncIterator[Any]:
        async with of_tasks.begin():
            yield of_tasks
        await of_tasks.remove()

    @contextmanager
    def hiding() -> Iterator[Session]:
        with Session(blocking) as session:
            try:
                yield session
                session.commit()
            except Exception:
                session.rollback()

    @asynccontextmanager
    async def hiding_asynchronously() -> AsyncIterator[Session]:
        with hiding() as session:
            yield session

    begin: Begin = {
        "commits nothing": without_commit,
        "savepoint of a session": nested,
        "session in a longer transaction": longer,
        "commits after errors too": swallowing,
        "session of a thread": of_a_thread,
        "session of a task": of_a_task,
        "hides errors": hiding,
        "hides errors, asynchronous": hiding_asynchronously,
    }[name]
    calls: list[Any] = []

    async def note(session: Any) -> None:
        calls.append(session)

    middleware = once(begin)
    with pytest.raises(InvalidSetting, match=text):
        anyio.run(handle, middleware, note)
    if text not in (NO_COMMIT, NOT_AT_ONCE, HIDDEN):  # each message looks for the others too
        chosen: list[Begin] = [sessionmaker(blocking).begin]
        middleware = once(lambda: chosen[0]())
        anyio.run(middleware.check)
        chosen[0] = begin
    with pytest.raises(InvalidSetting, match=text):
        anyio.run(handle, middleware, note)
    assert calls == []
    outer.close()
    blocking.dispose()


def test_a_session_of_two_databases_is_refused(database: str, once: Once, tmp_path: Path) -> None:
    """One of two commits may fail."""
    first, second = [
        create_engine(url, poolclass=NullPool) for url in (url_of(database, "sync"), f"sqlite:///{tmp_path}/second.db")
    ]
    _Other.metadata.create_all(second)
    begin = sessionmaker(first, binds={_Other: second}).begin

    async def write(session: Session) -> None:
        session.add(_Row(number=1))
        session.flush()

    for _ in range(2):
        with pytest.raises(InvalidState, match="writes to a second database"):
            anyio.run(handle, once(begin), write)
    with second.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM rows")).scalar_one() == 0
    first.dispose()
    second.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_session_of_two_databases_with_two_phase_commits_is_allowed(database: str, once: Once) -> None:
    """The server of the tests has no prepared transactions: the commit is left out."""
    first, second = [create_engine(url_of(database, "sync"), poolclass=NullPool) for _ in range(2)]
    _Other.metadata.create_all(second)
    chosen: list[Begin] = [sessionmaker(first).begin]
    middleware = once(lambda: chosen[0]())
    anyio.run(middleware.check)  # a check commits too
    chosen[0] = sessionmaker(first, binds={_Other: second}, twophase=True).begin

    async def write(session: Session) -> None:
        session.add(_Row(number=1))
        session.flush()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        anyio.run(handle, middleware, write)

    @contextmanager
    def by_hand() -> Iterator[Session]:
        with Session(first, binds={_Other: second}, twophase=True) as session:
            yield session

    async def begin_again(session: Session) -> None:
        session.rollback()
        with pytest.raises(InvalidState, match="begins another transaction") as refused:
            await write(session)
        errors.append(refused.value)

    errors: list[InvalidState] = []
    chosen[0] = by_hand
    with pytest.raises(InvalidState, match="has committed or rolled back"):
        anyio.run(handle, middleware, begin_again)
    assert len(errors) == 1
    _Other.metadata.drop_all(second)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_server_that_only_reads_finishes_no_message(database: str, once: Once) -> None:
    """As a replica, and as a server after a failover."""
    options = f"{database} options='-c default_transaction_read_only=on'"
    calls: list[Any] = []

    async def note(session: Any) -> None:
        calls.append(session)

    with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
        anyio.run(handle, once(lambda: psycopg.connect(options)), note)
    assert calls == []


class _Traced(psycopg.AsyncConnection[Any]):
    """Counts the round trips of all of its connections."""

    path: Path

    @classmethod
    @asynccontextmanager
    async def opened(cls, database: str) -> AsyncIterator[_Traced]:
        with cls.path.open("ab") as file:
            async with await cls.connect(database) as connection:
                connection.pgconn.trace(file.fileno())
                yield connection
                await connection.commit()
                connection.pgconn.untrace()

    @classmethod
    def trips(cls) -> int:
        """Return how many there were since the last call."""
        found = cls.path.read_text(errors="replace").count("ReadyForQuery")
        cls.path.write_bytes(b"")
        return found


@pytest.fixture
def traced(tmp_path: Path) -> type[_Traced]:
    """Connections that are traced."""
    _Traced.path = tmp_path / "trace"
    _Traced.path.write_bytes(b"")
    return _Traced


async def _flip(session: Any) -> None:
    await session.execute("SET LOCAL default_transaction_read_only = off")


@pytest.mark.anyio
@pytest.mark.parametrize(("handler", "trips"), [(None, 0), (_flip, 2)], ids=["as it is", "mark removed"])
async def test_an_inbox_needs_no_round_trip_of_its_own(
    postgres: str, traced: type[_Traced], handler: Handler | None, trips: int
) -> None:
    """Only a handler that removes the mark of its transaction causes a question whether it is the same."""
    OutboxStore(postgres, create=True).close()
    with closing(connect(postgres)) as connection:
        for statement in (
            "DROP TABLE IF EXISTS effects",
            "CREATE TABLE effects (body TEXT)",
            "DELETE FROM nsqext_inbox",
        ):
            connection.execute(statement)
        connection.commit()
    names = iter(("old identities are removed", "one", "one"))
    middleware: Inbox[Any] = Inbox(lambda: traced.opened(postgres), identity=lambda message: next(names))

    async def handle_one(session: Any) -> None:
        await add(session, "one")
        if handler is not None:
            await handler(session)

    await handle(middleware, handle_one)
    traced.trips()
    async with traced.opened(postgres) as alone:
        await add(alone, "two")
    assert traced.trips() == len(("BEGIN", "INSERT", "COMMIT"))
    await handle(middleware, handle_one)
    assert (traced.trips() - 3, middleware.skipped) == (trips, 0)
    await handle(middleware, handle_one)
    assert middleware.skipped == 1


@pytest.mark.anyio
async def test_an_outbox_adds_with_one_statement(postgres: str, traced: type[_Traced]) -> None:
    """The notification of the relays is a part of it."""
    with OutboxStore(postgres, create=True):
        async with traced.opened(postgres) as connection:
            await connection.execute("SELECT 1")
            traced.trips()
            await Outbox().add_async(connection, "t", b"x")
            assert traced.trips() == 1
            await connection.rollback()
