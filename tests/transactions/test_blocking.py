"""Inbox and positions with blocking connections: in blocking consumers, and on trio."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from nsqext import Consumer, Message, Producer, sync
from nsqext.client.middleware import Handling
from nsqext.transactions import Inbox, Positions
from tests.support.consumers import eventually
from tests.support.messages import RecordingOwner, make_message
from tests.transactions.databases import url_of

if TYPE_CHECKING:
    from nsqext.broker import Cluster

_SECONDS = 25
Sessions = sessionmaker[Session]
INSERT = text("INSERT INTO effects VALUES (:body)")


@pytest.fixture
def sessions(database: str) -> Iterator[Sessions]:
    """Blocking sessions of a database with an empty table of effects."""
    engine = create_engine(url_of(database, "sync"))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE IF EXISTS effects"))
        connection.execute(text("CREATE TABLE effects (body TEXT)"))
    yield sessionmaker(engine)
    engine.dispose()


def effects(sessions: Sessions) -> list[str]:
    with sessions() as session:
        return list(session.execute(text("SELECT body FROM effects ORDER BY body")).scalars())


def once(kind: str, sessions: Sessions) -> Inbox[Session] | Positions[Session]:
    return Positions(sessions.begin) if kind == "positions" else Inbox(sessions.begin)


def test_a_close_leaves_no_handler_with_a_connection(cluster: Cluster, topic: str, sessions: Sessions) -> None:
    """Its transaction was rolled back, and its further statements were executed in the transactions of others."""
    inbox = Inbox(sessions.begin)
    consumer = sync.Consumer(topic, "ch", cluster.lookupd, middleware=[inbox], close_timeout=0.01)
    handling, closing = threading.Event(), threading.Event()
    events: list[str] = []

    @consumer.handler
    def handle(message: Message) -> None:
        session = inbox.session()
        handling.set()
        assert closing.wait(_SECONDS)
        threading.Event().wait(0.3)  # beyond `close_timeout`
        session.execute(INSERT, {"body": message.body.decode()})
        events.append("handled")

    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(topic, b"paid")
    with consumer:
        assert handling.wait(_SECONDS)
        closing.set()
    events.append("closed")
    assert (events, effects(sessions)) == (["handled", "closed"], ["paid"])


@pytest.mark.parametrize("kind", ["inbox", "positions"])
def test_a_blocking_handler_has_its_effects_once(cluster: Cluster, topic: str, sessions: Sessions, kind: str) -> None:
    middleware = once(kind, sessions)
    settings: Any = {"start": middleware} if kind == "positions" else {}
    consumer = sync.Consumer(
        topic, "ch", cluster.lookupd, middleware=[middleware], requeue_delay=0.0, backoff="off", **settings
    )
    failures = [True]

    @consumer.handler
    def handle(message: Message) -> None:
        middleware.session().execute(INSERT, {"body": message.body.decode()})
        if failures:
            failures.pop()
            raise ValueError("the effect is rolled back")
        if message.body == b"last":
            consumer.stop()

    with sync.Producer(cluster.lookupd) as producer:
        for identity, body in (("1", b"one"), ("2", b"two"), ("3", b"last")):
            producer.publish(topic, body, headers={"nsqext_id": identity}, key="k")
        if kind == "inbox":
            producer.publish(topic, b"again", headers={"nsqext_id": "3"}, key="k")
    consumer.run()
    assert effects(sessions) == ["last", "one", "two"]


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("kind", ["inbox", "positions"])
@pytest.mark.anyio
async def test_blocking_connections_are_used_in_threads(
    cluster: Cluster, topic: str, sessions: Sessions, kind: str
) -> None:
    middleware = once(kind, sessions)
    settings: Any = {"start": middleware} if kind == "positions" else {}
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=[middleware], **settings)

    @consumer.handler
    async def handle(message: Message) -> None:
        await anyio.to_thread.run_sync(middleware.session().execute, INSERT, {"body": message.body.decode()})

    async with consumer, Producer(cluster.lookupd) as producer:
        for number in range(5):
            await producer.publish(topic, b"%d" % number, headers={"nsqext_id": str(number % 4)}, key="k")
        await eventually(lambda: consumer.statistics().finished == 5, _SECONDS)
    expected = ["0", "1", "2", "3"] if kind == "inbox" else ["0", "1", "2", "3", "4"]
    assert effects(sessions) == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("kind", ["inbox", "positions"])
@pytest.mark.anyio
async def test_a_commit_is_not_cancelled(sessions: Sessions, kind: str) -> None:
    """A consumer that stops while a blocking session commits has committed, or rolled back."""
    middleware = once(kind, sessions)
    message = make_message(RecordingOwner(in_order=True), offset=100)
    for body, fails in (("rolled back", True), ("committed", False)):
        with anyio.CancelScope() as scope, suppress(ValueError):

            async def handle(_: Handling, body: str = body, fails: bool = fails, scope: Any = scope) -> None:
                middleware.session().execute(INSERT, {"body": body})
                scope.cancel()
                if fails:
                    raise ValueError("the effect is rolled back")

            await middleware.handle(Handling([message], "ch"), handle)
        assert effects(sessions) == ([] if fails else ["committed"])


@pytest.mark.parametrize("kind", ["inbox", "positions"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.anyio
async def test_a_cancelled_handler_is_rolled_back(sessions: Sessions, kind: str) -> None:
    """A session whose end is not called keeps its connection and its locks."""
    ends: list[type[BaseException] | None] = []

    @contextmanager
    def begin() -> Iterator[Session]:
        try:
            with sessions.begin() as session:
                yield session
        except BaseException as error:
            ends.append(type(error))
            raise
        ends.append(None)

    middleware: Any = (Inbox if kind == "inbox" else Positions)(begin)
    await middleware.check()
    ends.clear()
    scope = anyio.CancelScope()

    async def handle(_: Handling) -> None:
        middleware.session().execute(INSERT, {"body": "cancelled"})
        scope.cancel()
        await anyio.sleep_forever()

    with scope:
        await middleware.handle(Handling([make_message(RecordingOwner(in_order=True), offset=100)], "ch"), handle)
    assert ends == [anyio.get_cancelled_exc_class()]
    assert effects(sessions) == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.anyio
async def test_a_session_that_is_used_for_each_message_can_begin_again(sessions: Sessions) -> None:
    with sessions() as session:

        @contextmanager
        def begin() -> Iterator[Session]:
            with session.begin():
                yield session

        inbox = Inbox(begin)

        async def handle(_: Handling) -> None:
            session.execute(INSERT, {"body": "x"})

        for number in range(2):
            await inbox.handle(Handling([make_message(RecordingOwner(), number)], "ch"), handle)
    assert effects(sessions) == ["x", "x"]
