"""The inbox: the effects of a handler are committed once for each message."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from random import Random
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from nsqext import App, Consumer, Finish, Message, Producer
from nsqext.app import Depends
from nsqext.client.middleware import Handling
from nsqext.delays import DelayRelay, DelayStore
from nsqext.delays.relay import publish_record
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.middleware import Deduplicate
from nsqext.protocol.delay_record import DelayedMessage, encode_delay
from nsqext.transactions import Inbox, Outbox, Positions
from tests.support.consumers import eventually
from tests.support.messages import RecordingOwner, make_message
from tests.transactions.databases import url_of
from tests.transactions.test_outbox import received, relay_until_empty

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio
_SECONDS = 25


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with extend support."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, extend=True, channels=["ch"])
    return name


@pytest.fixture
async def sessions(database: str) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    """Sessions of a database with an empty table of effects."""
    engine = create_async_engine(url_of(database, "async"))
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE IF EXISTS effects"))
        await connection.execute(text("CREATE TABLE effects (body TEXT)"))
    yield async_sessionmaker(engine)
    await engine.dispose()


async def effects(sessions: async_sessionmaker[AsyncSession]) -> list[str]:
    async with sessions() as session:
        return list((await session.execute(text("SELECT body FROM effects ORDER BY body"))).scalars())


async def note(session: AsyncSession, message: Message) -> None:
    await session.execute(text("INSERT INTO effects VALUES (:body)"), {"body": message.body.decode()})


async def test_a_message_that_was_published_twice_has_its_effect_once(
    cluster: Cluster, topic: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    inbox = Inbox(sessions.begin)
    app = App(cluster.lookupd, middleware=[inbox])
    calls: list[bytes] = []

    @app.handler(topic, "ch")
    async def handle(message: Message, session: Annotated[AsyncSession, Depends(inbox.session)]) -> None:
        calls.append(message.body)
        await note(session, message)

    async with app:
        for body, identity in ((b"one", "1"), (b"one", "1"), (b"two", "2"), (b"one", "1")):
            await app.producer.publish(topic, body, headers={"nsqext_id": identity})
        await eventually(lambda: len(calls) + inbox.skipped == 4, _SECONDS)
    assert sorted(calls) == [b"one", b"two"]
    assert await effects(sessions) == ["one", "two"]


async def test_a_delayed_message_that_a_relay_published_twice_has_its_effect_once(
    cluster: Cluster, topic: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    """A relay that is killed between the publish and the record of it publishes again."""
    inbox = Inbox(sessions.begin)
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=[inbox])

    @consumer.handler
    async def handle(message: Message) -> None:
        await note(inbox.session(), message)

    record = encode_delay(DelayedMessage(identity="a-1", topic=topic, due=0, headers={"a": "b"}), b"one")
    async with consumer, Producer(cluster.lookupd) as producer:
        await publish_record(producer, record)
        await publish_record(producer, record)
        await eventually(lambda: consumer.statistics().finished == 2, _SECONDS)
    assert inbox.skipped == 1
    assert await effects(sessions) == ["one"]


async def test_a_handler_that_fails_leaves_neither_effect_nor_identity(
    cluster: Cluster, topic: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    inbox = Inbox(sessions.begin)
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=[inbox], requeue_delay=0.0, backoff="off")
    attempts: list[int] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        await note(inbox.session(), message)
        if message.attempts < 3:
            raise ValueError("once more")
        raise Finish

    async with consumer, Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"one", headers={"nsqext_id": "1"})
        await eventually(lambda: attempts == [1, 2, 3], _SECONDS)
        await eventually(lambda: consumer.statistics().in_flight == 0, _SECONDS)
    assert await effects(sessions) == ["one"]
    with pytest.raises(InvalidState, match="no message is being handled"):
        inbox.session()


async def test_results_are_published_with_the_effects(
    cluster: Cluster, topic: str, database: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    results = f"{topic}_results"
    cluster.create_topic(results, extend=True, channels=["ch"])
    inbox, outbox = Inbox(sessions.begin), Outbox()
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=[inbox], requeue_delay=0.0, backoff="off")
    failures = iter([True, False])

    @consumer.handler
    async def handle(message: Message) -> None:
        await outbox.add_async(inbox.session(), results, b"result of " + message.body)
        if next(failures):
            raise ValueError("once more")

    async with consumer, Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"one")
        await eventually(lambda: consumer.statistics().finished == 1, _SECONDS)
    (relay,) = await relay_until_empty(cluster, database)
    assert relay.statistics().published == 1
    assert [message.body for message in await received(cluster, results, 1)] == [b"result of one"]


async def test_an_identity_in_the_body_is_that_of_a_message_without_headers(
    cluster: Cluster, database: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    plain = f"t_{token_hex(4)}"
    cluster.create_topic(plain, channels=["ch"])
    inbox = Inbox(sessions.begin, identity=lambda message: message.body.decode().partition(" ")[0])
    consumer = Consumer(plain, "ch", cluster.lookupd, middleware=[inbox])
    outbox = Outbox()

    @consumer.handler
    async def handle(message: Message) -> None:
        await note(inbox.session(), message)

    async with sessions.begin() as session:
        for body in (b"17 paid", b"18 paid"):
            number = body.decode().partition(" ")[0]
            assert await outbox.add_async(session, plain, body, identity=number) == number
    await relay_until_empty(cluster, database)
    async with consumer, Producer(cluster.lookupd) as producer:
        await producer.publish(plain, b"17 paid")
        await eventually(lambda: consumer.statistics().finished == 3, _SECONDS)
    assert inbox.skipped == 1
    assert await effects(sessions) == ["17 paid", "18 paid"]
    with pytest.raises(InvalidInput, match="identity='' is not text of 1 to 200"):
        async with sessions.begin() as session:
            await outbox.add_async(session, plain, b"19", identity="")


async def test_identities_that_a_database_cannot_store_are_digests(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    """Messages of other programs: the database refused them at each delivery."""
    calls: list[str] = []
    inbox = Inbox(sessions.begin)

    async def handle(handling: Handling) -> None:
        calls.append(str(handling.message.headers["nsqext_id"]))

    chance = Random(7)
    foreign = ["a\0b", "a\0c", "".join(chance.choices("0123456789abcdef", k=8000)), "x" * 201, "fine", "sha256:1"]

    async def handle_any(_: Handling) -> None:
        """Do nothing."""

    foreign.append("sha256:" + sha256(b"a\0b").hexdigest())
    for _ in range(2):
        for number, identity in enumerate(foreign):
            message = make_message(RecordingOwner(), number, headers={"nsqext_id": identity})
            await inbox.handle(Handling([message], "ch"), handle)
    assert calls == foreign
    assert inbox.skipped == len(foreign)
    async with sessions() as session:
        stored = list((await session.execute(text("SELECT identity FROM nsqext_inbox"))).scalars())
    assert max(map(len, stored)) < 300
    assert len({*stored}) == len(foreign)
    surrogate = Inbox(sessions.begin, identity=lambda message: message.body.decode(errors="surrogateescape"))
    for _ in range(2):
        await surrogate.handle(Handling([make_message(RecordingOwner(), body=b"\xff")], "ch"), handle_any)
    assert surrogate.skipped == 1


async def test_each_channel_handles_a_message(sessions: async_sessionmaker[AsyncSession]) -> None:
    calls: list[str] = []
    inbox = Inbox(sessions.begin)

    async def handle(handling: Handling) -> None:
        calls.append(handling.channel)

    message = make_message(RecordingOwner(), headers={"nsqext_id": "1"})
    for channel in ("ch", "other", "ch", "other"):
        await inbox.handle(Handling([message], channel), handle)
    assert calls == ["ch", "other"]


@pytest.mark.parametrize("kind", [Inbox, Deduplicate])
async def test_a_topic_that_is_created_again_has_new_messages_with_the_old_ids(
    cluster: Cluster, sessions: async_sessionmaker[AsyncSession], kind: type[Inbox[AsyncSession] | Deduplicate]
) -> None:
    """They were skipped, and lost."""
    name, middleware = f"t_{token_hex(4)}", Inbox(sessions.begin) if kind is Inbox else Deduplicate()
    handled: list[tuple[bytes, bytes]] = []
    for body in (b"old", b"new"):
        cluster.create_topic(name, channels=["ch"])
        consumer = Consumer(name, "ch", cluster.lookupd, middleware=[middleware])

        @consumer.handler
        async def handle(message: Message) -> None:
            handled.append((message.body, message.id))

        async with Producer(cluster.lookupd) as producer, consumer:
            await producer.publish(name, body)
            await eventually(lambda: consumer.statistics().finished == 1, _SECONDS)  # noqa: B023
        await anyio.to_thread.run_sync(cluster.delete_topic, name)
    assert [body for body, _ in handled] == [b"old", b"new"]
    assert handled[0][1] == handled[1][1]


async def test_an_identity_of_the_program_goes_before_the_header(sessions: async_sessionmaker[AsyncSession]) -> None:
    inbox = Inbox(sessions.begin, identity=lambda message: "17")

    async def handle(handling: Handling) -> None:
        await note(inbox.session(), handling.message)

    for number in range(2):
        message = make_message(RecordingOwner(), number, headers={"nsqext_id": str(number)})
        await inbox.handle(Handling([message], "ch"), handle)
    assert (inbox.skipped, await effects(sessions)) == (1, ["body"])


async def test_what_is_no_identity_is_not_shared_by_messages(sessions: async_sessionmaker[AsyncSession]) -> None:
    async def handle(handling: Handling) -> None:
        await note(inbox.session(), handling.message)

    given: list[Any] = ["", b"17", 17]
    for identity in given:
        inbox = Inbox(sessions.begin, identity=lambda message, identity=identity: identity)  # type: ignore[misc]
        with pytest.raises(InvalidInput, match="which is no identity of a message"):
            await inbox.handle(Handling([make_message(RecordingOwner())], "ch"), handle)
    inbox = Inbox(sessions.begin)
    for number in range(2):
        message = make_message(RecordingOwner(), 5000 + number, headers={"nsqext_id": ""})
        await inbox.handle(Handling([message], "empty"), handle)
    assert await effects(sessions) == ["body", "body"]


async def test_a_coroutine_function_is_no_identity() -> None:
    async def identity(message: Message) -> str:
        return "17"

    with pytest.raises(InvalidSetting, match=r"identity=.* is a coroutine function"):
        Inbox[Any](nullcontext, identity=identity)  # type: ignore[arg-type]


async def test_identities_are_not_forgotten_at_once() -> None:
    with pytest.raises(InvalidSetting, match="keep=0"):
        Inbox[Any](nullcontext, keep=0)


async def test_the_signal_that_a_message_is_done_commits_and_is_seen_by_outer_middleware(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    inbox = Inbox(sessions.begin)

    async def finish(handling: Handling) -> None:
        await note(inbox.session(), handling.message)
        raise Finish

    with pytest.raises(Finish):
        await inbox.handle(Handling([make_message(RecordingOwner())], "ch"), finish)
    with pytest.raises(InvalidState, match="no message is being handled"):
        inbox.session()
    assert await effects(sessions) == ["body"]


async def test_a_task_that_runs_longer_than_its_handler_has_no_session(
    sessions: async_sessionmaker[AsyncSession],
) -> None:
    """It began a transaction that nothing commits."""
    inbox, ended, errors = Inbox(sessions.begin), anyio.Event(), list[str]()

    async def later() -> None:
        await ended.wait()
        with pytest.raises(InvalidState, match="no message is being handled") as caught:
            inbox.session()
        errors.append(str(caught.value))

    async with anyio.create_task_group() as tasks:

        async def start(handling: Handling) -> None:
            await note(inbox.session(), handling.message)
            tasks.start_soon(later)

        await inbox.handle(Handling([make_message(RecordingOwner(), 5100)], "ch"), start)
        ended.set()
    assert (len(errors), await effects(sessions)) == (1, ["body"])


async def test_old_identities_are_removed(sessions: async_sessionmaker[AsyncSession]) -> None:
    async def handle(_: Any) -> None:
        """Do nothing."""

    message = make_message(RecordingOwner())
    async with sessions.begin() as session:
        await session.execute(text("INSERT INTO nsqext_inbox VALUES ('ch', 'old', 1.0)"))
    await Inbox(sessions.begin).handle(Handling([message], "ch"), handle)
    async with sessions() as session:
        left = list((await session.execute(text("SELECT identity FROM nsqext_inbox"))).scalars())
    assert left == [f"{message.topic}/{message.id.hex()}@{message.timestamp}"]


async def test_two_workers_do_not_handle_a_message_at_once(
    database: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    if database.startswith("sqlite"):
        return  # one writer at a time: the second waits for the file
    inbox = Inbox(sessions.begin)
    running, most, calls = 0, 0, 0

    async def handle(handling: Handling) -> None:
        nonlocal running, most, calls
        running, calls = running + 1, calls + 1
        most = max(most, running)
        await anyio.sleep(0.05)
        running -= 1

    message = make_message(RecordingOwner())
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(inbox.handle, Handling([message], "ch"), handle)
    assert (most, calls, inbox.skipped) == (1, 1, 2)


@pytest.mark.parametrize("kind", [Inbox, Positions])
async def test_missing_tables_are_named_at_the_start_with_the_command_that_creates_them(
    kind: type[Inbox[AsyncSession]] | type[Positions[AsyncSession]], database: str, tmp_path: Path
) -> None:
    url = url_of(f"sqlite:///{tmp_path}/empty.db" if database.startswith("sqlite") else database, "async")
    engine = create_async_engine(url, poolclass=NullPool)
    if engine.dialect.name == "postgresql":  # a schema without tables
        event.listen(engine.sync_engine, "connect", _use_empty_schema)
    reason = r"cannot be read: .*(no such table|does not exist).*: create the tables.*nsqext outbox sql"
    with pytest.raises(InvalidSetting, match=rf"needs the table nsqext_\w+, which {reason}"):
        await kind(async_sessionmaker(engine).begin).start()


@pytest.mark.parametrize("kind", [Inbox, Positions])
async def test_an_outage_during_the_check_of_the_tables_is_no_missing_table(
    kind: type[Inbox[AsyncSession]] | type[Positions[AsyncSession]], sessions: async_sessionmaker[AsyncSession]
) -> None:
    """Too many connections, for example: an app that starts a second later works."""
    failures = [OperationalError("SELECT 1", {}, sqlite3.OperationalError("database is locked"))]

    @asynccontextmanager
    async def begin() -> AsyncIterator[AsyncSession]:
        async with sessions.begin() as session:
            if failures:
                raise failures.pop()
            yield session

    subject = kind(begin)
    with pytest.raises(OperationalError, match="locked"):
        await subject.check()
    await subject.check()


@pytest.mark.parametrize("kind", [Inbox, Positions])
async def test_checks_of_two_processes_do_not_find_each_others_rows(
    kind: type[Inbox[AsyncSession]] | type[Positions[AsyncSession]], sessions: async_sessionmaker[AsyncSession]
) -> None:
    other = kind(sessions.begin)

    @asynccontextmanager
    async def begin() -> AsyncIterator[AsyncSession]:
        async with sessions.begin() as session:
            yield session
        await other.check()

    await kind(begin).check()


def _use_empty_schema(connection: Any, _: object) -> None:
    connection.cursor().execute("SET search_path TO pg_temp")
    connection.commit()


async def test_an_app_and_a_consumer_without_the_tables_do_not_start(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/empty.db", poolclass=NullPool)
    inbox = Inbox(async_sessionmaker(engine).begin)
    app = App(cluster.lookupd, middleware=[inbox])
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=[inbox])

    @app.handler(topic, "ch")
    @consumer.handler
    async def handle(body: bytes) -> None:
        raise AssertionError(body)

    for run in (app.start, consumer.start, app.test().__aenter__):
        with pytest.raises(InvalidSetting, match="nsqext outbox sql"):
            await run()


async def test_a_database_that_does_not_respond_at_the_start_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = create_async_engine("postgresql+psycopg://nsqext@/nsqext?host=/nowhere", poolclass=NullPool)
    await Inbox(async_sessionmaker(engine).begin).start()
    assert "Inbox cannot check its database yet" in caplog.text


async def test_identities_are_kept_for_their_time(sessions: async_sessionmaker[AsyncSession]) -> None:
    async def handle(_: Handling) -> None:
        """Do nothing."""

    async with sessions.begin() as session:
        for name, age in (("old", 120.0), ("kept", 60.0)):
            values = {"name": name, "handled": time.time() - age}
            await session.execute(text("INSERT INTO nsqext_inbox VALUES ('ch', :name, :handled)"), values)
    message = make_message(RecordingOwner())
    await Inbox(sessions.begin, keep=90.0, identity=lambda _: "new").handle(Handling([message], "ch"), handle)
    async with sessions() as session:
        left = [row[0] for row in await session.execute(text("SELECT identity FROM nsqext_inbox"))]
    assert sorted(left) == ["kept", f"{message.topic}/new"]


async def test_handlers_whose_messages_it_cannot_record_are_refused(
    sessions: async_sessionmaker[AsyncSession], tmp_path: Path
) -> None:
    """Delayed messages were requeued for ever; a message that was requeued later was skipped."""
    app = App("127.0.0.1:1", middleware=[Inbox(sessions.begin)])
    with (
        DelayStore(tmp_path / "delayed") as store,
        pytest.raises(InvalidSetting, match="Inbox cannot be used with batches"),
    ):
        DelayRelay(store).attach(app)
    consumer = Consumer("orders", "ch", "127.0.0.1:1", middleware=[Inbox(sessions.begin)])
    for register in (app.handler("orders", "ch", auto_finish=False), consumer.handler(auto_finish=False)):
        with pytest.raises(InvalidSetting, match="Inbox cannot be used with auto_finish=False"):
            register(print)
    with pytest.raises(InvalidSetting, match="Inbox cannot be used with batches"):
        consumer.batch_handler()(print)
    with pytest.raises(InvalidSetting, match="Inbox cannot be used with iteration"):
        await consumer.__aenter__()
    with pytest.raises(InvalidSetting, match="Deduplicate cannot be used with a transaction around it"):
        app.handler("orders", "ch", middleware=[Deduplicate()])(print)  # it would finish what was not committed
    App("127.0.0.1:1", middleware=[Deduplicate(), Inbox(sessions.begin)]).handler("orders", "ch")(print)
