"""Tests of an app without a server: what `deliver` calls, and what is recorded of publishes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from attrs import evolve
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.pool import NullPool

from nsqext import App, ExtFilter, Message, MessageBatch, OutgoingMessage, Receipt, Reject
from nsqext.broker import Cluster
from nsqext.errors import BatchFailed, InvalidBody, InvalidInput, InvalidName, InvalidSetting, InvalidState
from nsqext.middleware import CallNext, Handling, Middleware, Publishing, SendNext
from nsqext.transactions import Inbox, OutboxStore, Positions, schema_sql

pytestmark = pytest.mark.anyio

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox[AsyncSession]:
    """An inbox in a file."""
    OutboxStore(f"sqlite:///{tmp_path}/t.db", create=True).close()
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/t.db", poolclass=NullPool)
    return Inbox(async_sessionmaker(engine).begin)


class Skips(Middleware):
    """Finishes messages without calling their handler."""

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        return "skipped"


@pytest.mark.parametrize("queue_position", [False, True])
async def test_messages_of_two_tests_are_different_for_an_inbox(
    inbox: Inbox[AsyncSession], *, queue_position: bool
) -> None:
    app = App(NOWHERE, middleware=[inbox], queue_position=queue_position)
    seen: list[Message] = []

    @app.handler("orders", "billing")
    async def bill(message: Message) -> None:
        seen.append(message)
        if message.body == b"bad":
            raise Reject("bad")

    for body in (b"one", b"bad", b"two"):
        async with app.test() as test:
            if body == b"bad":
                with pytest.raises(Reject):
                    await test.deliver("orders", body)
            else:
                await test.deliver("orders", body)
    assert [message.body for message in seen] == [b"one", b"bad", b"two"]
    assert all(0 <= time.time_ns() - message.timestamp < 600e9 for message in seen)
    assert len({message.id for message in seen}) == 3
    assert len({message.offset for message in seen}) == (3 if queue_position else 1)
    assert all((message.offset >= 0) is queue_position for message in seen)


async def test_a_message_that_an_inbox_has_handled_is_expected_to_be_skipped(inbox: Inbox[AsyncSession]) -> None:
    app = App(NOWHERE, middleware=[inbox])

    @app.handler("orders", "billing")
    async def bill(body: bytes) -> bytes:
        return body

    headers = {"nsqext_id": "17"}
    async with app.test() as test:
        assert await test.deliver("orders", b"one", headers=headers) == [b"one"]
        with pytest.raises(InvalidState, match=r"bill of channel billing was not called.*handled=False"):
            await test.deliver("orders", b"one", headers=headers)
        assert await test.deliver("orders", b"one", headers=headers, handled=False) == [None]
        with pytest.raises(InvalidState, match="was called, despite handled=False"):
            await test.deliver("orders", b"two", handled=False)


async def test_a_batch_handler_that_middleware_does_not_call_is_an_error() -> None:
    app = App(NOWHERE)

    @app.batch_handler("orders", "skipped", middleware=[Skips()])
    @app.batch_handler("orders", "called")
    async def write(batch: MessageBatch) -> int:
        return len(batch)

    async with app.test() as test:
        assert await test.deliver("orders", b"one", channel="called") == [1]
        assert await test.deliver("orders", b"one", channel="skipped", handled=False) == ["skipped"]
        with pytest.raises(InvalidState, match="was not called"):
            await test.deliver("orders", b"one")


async def test_an_app_whose_test_could_not_begin_is_tested_again() -> None:
    app, begun, ended = App("127.0.0.1:1"), list[int](), list[type[BaseException] | None]()

    @app.lifespan
    async def sees_how_it_ends(_: App) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            ended.append(type(error))
            raise
        ended.append(None)

    @app.lifespan
    async def fails_once(_: App) -> AsyncIterator[None]:
        begun.append(1)
        if len(begun) == 1:
            raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        async with app.test():
            raise AssertionError("it began")
    assert len(ended) == 1
    with pytest.raises(KeyError):
        async with app.test():
            assert len(begun) == 2
            with pytest.raises(InvalidState, match="test"):
                async with app.test():
                    raise AssertionError("it began")
            raise KeyError
    assert ended[1:] == [KeyError]


async def test_an_app_is_tested_again_after_a_lifespan_that_fails_at_its_end_too() -> None:
    """The next test was refused: the app was being tested already."""
    app, failing = App("127.0.0.1:1"), [True]

    @app.lifespan
    async def ends_badly(_: App) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if failing:
                raise OSError("cannot be closed")

    @app.lifespan
    async def begins_badly(_: App) -> AsyncIterator[None]:
        if failing:
            raise ZeroDivisionError
        yield

    test = app.test()
    with pytest.raises(OSError, match="cannot be closed"):
        async with test:
            raise AssertionError("it began")
    failing.clear()
    async with test:
        assert test.published == []


async def test_middleware_of_several_handlers_is_started_once() -> None:
    class Starting(Middleware):
        started = 0

        async def start(self) -> None:
            self.started += 1

    one, other = Starting(), Starting()
    app = App(NOWHERE, middleware=[one])
    app.handler("orders", "a", middleware=[one, other])(print)
    with pytest.raises(InvalidSetting):
        await app.test("127.0.0.1:99999").__aenter__()
    async with app.test():  # the other has not begun
        assert (one.started, other.started) == (1, 1)


async def test_a_publish_is_recorded_with_all_that_was_given() -> None:
    app = App(NOWHERE)
    headers = {"user": "42"}
    async with app.test() as test:
        await app.producer.publish("orders", b"one", key="k", headers=headers, tag="blue", trace_id=7)
        await app.producer.publish("orders", b"later", delay=60.0, partition=2)
        with pytest.raises(InvalidBody):
            await app.producer.publish("orders", b"x" * (2 << 20))
        await app.producer.publish_many("orders", [b"two", OutgoingMessage(b"three", key="own")], key="all")
    first, later, two, three = test.published
    assert (first.topic, first.body, first.key, first.headers) == ("orders", b"one", "k", headers)
    assert (first.tag, first.trace_id, first.partition, first.delay) == ("blue", 7, None, None)
    assert (later.delay, later.key, later.headers, later.partition) == (60.0, None, {}, 2)
    assert (two.key, three.key) == ("all", "own")


async def test_a_publish_is_recorded_as_middleware_sends_it() -> None:
    class Redacts(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
            publishing.messages = [evolve(one, body=b"***") for one in publishing.messages]
            return await send_next(publishing)

    app = App(NOWHERE, middleware=[Redacts()])
    async with app.test() as test:
        await app.publish("orders", b"4711")
    assert [one.body for one in test.published] == [b"***"]


async def test_middleware_sees_the_receipts_of_a_publish_with_an_address() -> None:
    ports: list[int] = []

    class Ports(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
            receipts = await send_next(publishing)
            assert receipts == publishing.receipts
            ports.extend(int(receipt.node.rpartition(":")[2]) for receipt in publishing.receipts)
            return receipts

    app = App(NOWHERE, middleware=[Ports()])
    async with app.test():
        assert (await app.publish("copies", b"1", partition=3)).partition == 3
    assert ports == [4150]


async def test_a_publish_that_the_producer_of_the_app_would_refuse_is_an_error() -> None:
    app = App(NOWHERE, key_tags=16, max_message_size=100)
    async with app.test() as test:
        for wrong in ({"partition": -1}, {"key": "k", "partition": 1}, {"key": ""}, {"key": "k", "tag": "blue"}):
            with pytest.raises(InvalidInput):
                await app.publish("orders", b"one", **cast("Any", wrong))
        with pytest.raises(InvalidInput, match="key and partition were both given"):
            await app.producer.publish_many("orders", [b"one"], key="k", partition=1)
        for body in (b"x" * 101, OutgoingMessage(b"one"), [OutgoingMessage(b"one")]):
            with pytest.raises(InvalidBody):
                await app.publish("orders", body)
        assert test.published == []


async def test_a_handler_receives_the_partitions_of_its_setting() -> None:
    app, received = App(NOWHERE), list[tuple[str, int | None]]()

    def add(name: str, *partitions: int) -> None:
        @app.handler("orders", "billing", partitions=partitions)
        async def handle(message: Message) -> None:
            received.append((name, message.partition))

    add("first", 0, 1)
    add("second", 2)
    async with app.test() as test:
        await test.deliver("orders", b"one")
        await test.deliver("orders", b"two", partition=2)
        assert received == [("first", 0), ("second", 2)]
        with pytest.raises(InvalidInput, match="no handler receives messages of partition 3"):
            await test.deliver("orders", b"three", partition=3)
        with pytest.raises(InvalidBody, match="cannot be empty"):
            await test.deliver("orders", b"")


async def test_a_message_without_attempts_left_reaches_no_handler() -> None:
    app = App(NOWHERE, max_attempts=3, dead_letter="dead")

    @app.handler("orders", "billing")
    async def bill(message: Message) -> int:
        return message.attempts

    async with app.test() as test:
        assert await test.deliver("orders", b"one", attempts=3) == [3]
        with pytest.raises(InvalidInput, match="no handler of channel billing receives the message"):
            await test.deliver("orders", b"one", attempts=4)


@pytest.mark.parametrize("skipped", [False, True])
async def test_an_ordered_message_is_handled_without_attempts_left_unless_it_may_be_rejected(*, skipped: bool) -> None:
    app = App(NOWHERE, ordered=True, max_attempts=3, dead_letter="dead", reject_ordered=skipped)

    @app.handler("orders", "billing")
    async def bill(message: Message) -> int:
        return message.attempts

    async with app.test() as test:
        with pytest.raises(InvalidInput, match="it has max_attempts=3") if skipped else nullcontext():
            assert await test.deliver("orders", b"one", attempts=4) == [4]


async def test_a_handler_that_stops_the_app_in_a_test_does_not_stop_its_next_run() -> None:
    """The app of the next test ended at once."""
    app = App(NOWHERE)

    @app.handler("orders", "billing")
    async def bill(message: Message) -> None:
        app.stop()

    with Cluster(1) as cluster, anyio.fail_after(25):
        cluster.create_topic("orders", channels=["billing"])
        async with app.test() as test:
            await test.deliver("orders", b"one")
        async with app.test(cluster.lookupd):
            assert app.health().ready
            await app.publish("orders", b"one")
            await app.wait()


@pytest.mark.parametrize("lookupd", ["", [], None])
def test_a_test_on_a_cluster_without_addresses_is_refused(lookupd: Any) -> None:
    """It called no server, and recorded publishes that nothing had stored."""
    with pytest.raises(InvalidSetting, match="has no address of a test cluster"):
        App(NOWHERE).test(lookupd)


async def test_a_result_is_published_with_all_parts_of_an_outgoing_message() -> None:
    app = App(NOWHERE)
    results = [
        OutgoingMessage(b"one", headers={"user": "42"}, tag="canary", trace_id=7, key="k"),
        OutgoingMessage(b"two", header=b'{"user":"43"}'),
        [],
        None,
    ]

    @app.publisher("copies")
    @app.publisher("bills")
    @app.handler("orders", "ch")
    async def bill(number: int) -> object:
        return results[number]

    async with app.test() as test:
        for number in range(len(results)):
            await test.deliver("orders", number)
    bills, copies = ([one.message for one in test.published if one.topic == topic] for topic in ("bills", "copies"))
    full, raw, empty = bills
    assert copies == bills
    assert (full.body, full.headers, full.tag, full.trace_id, full.key) == (b"one", {"user": "42"}, "canary", 7, "k")
    assert (raw.body, raw.header) == (b"two", b'{"user":"43"}')
    assert empty.body == b"[]"


async def test_publishers_with_which_the_app_does_not_start_are_refused() -> None:
    app = App(NOWHERE)

    @app.publisher("bills")
    @app.batch_handler("orders", "billing")
    async def bill(batch: MessageBatch) -> None:
        raise AssertionError

    with pytest.raises(InvalidSetting, match=r"the publisher .* is not a handler"):
        async with app.test():
            raise AssertionError


async def test_a_topic_or_channel_without_a_handler_names_the_likely_one() -> None:
    app = App(NOWHERE)

    @app.handler(["orders", "refunds"], "billing")
    async def bill(body: bytes) -> None:
        raise AssertionError

    async with app.test() as test:
        with pytest.raises(InvalidInput, match=r"did you mean 'orders'\? topics with handlers: orders, refunds"):
            await test.deliver("order", b"one")
        with pytest.raises(InvalidInput, match=r"did you mean 'billing'\? channels with handlers: billing"):
            await test.deliver("orders", b"one", channel="biling")


async def test_a_handler_receives_the_tags_that_servers_would_send_it() -> None:
    app, received, tags = App("127.0.0.1:1"), list[str](), list[str | None]()

    def add(channel: str, tag: str | None) -> None:
        @app.handler("orders", channel, tag=tag)
        async def handle(message: Message) -> None:
            received.append(f"{channel} {tag}")
            tags.append(message.tag)

    for channel, tag in (("billing", "canary"), ("billing", None), ("audit", "canary"), ("mail", None)):
        add(channel, tag)
    async with app.test() as test:
        await test.deliver("orders", b"1", tag="canary")
        assert received == ["billing canary", "audit canary", "mail None"]
        assert tags == ["canary"] * 3
        await test.deliver("orders", b"2", tag="blue")
        await test.deliver("orders", b"3")
        assert received[3:] == ["billing None", "mail None"] * 2
        with pytest.raises(InvalidInput, match=r"receives a message without a tag .*: tags of handlers: canary"):
            await test.deliver("orders", b"4", channel="audit")


async def test_positions_see_messages_in_order(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.executescript(schema_sql("sqlite"))

    @contextmanager
    def begin() -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(tmp_path / "db", isolation_level=None, check_same_thread=False)) as connection:
            connection.execute("BEGIN")
            yield connection
            connection.execute("COMMIT")

    positions = Positions(begin)
    app = App("127.0.0.1:1")

    @app.handler("orders", "billing", ordered=True, start=positions, middleware=[positions])
    async def handle(message: Message) -> bytes:
        if message.body == b"failing":
            raise Reject("no")
        return message.body

    @app.handler("orders", "audit", ordered=True)
    @app.handler("mails", "billing", ordered=True)
    async def other(message: Message) -> None:
        """Take an offset."""

    async with app.test() as test:
        deliver = partial(test.deliver, "orders", channel="billing")
        assert await deliver(b"1") == [b"1"]
        await test.deliver("mails", b"x")
        assert await deliver(b"2", partition=1) == [b"2"]
        with pytest.raises(Reject):
            await deliver(b"failing")
        await test.deliver("orders", b"x", channel="audit")
        assert await deliver(b"3") == [b"3"]


async def test_a_handler_receives_what_its_filter_matches() -> None:
    app, received = App("127.0.0.1:1"), list[str]()

    def add(channel: str, wanted: ExtFilter | None) -> None:
        @app.handler("orders", channel, ext_filter=wanted)
        async def handle(message: Message) -> None:
            received.append(channel)

    for channel, inverse in (("eu", False), ("others", True)):
        add(channel, ExtFilter(3, "region", "eu-*", inverse=inverse))
    add("all", None)
    async with app.test() as test:
        await test.deliver("orders", b"1", headers={"region": "eu-west"})
        await test.deliver("orders", b"2", headers={"region": "us"})
        await test.deliver("orders", b"3")
        assert received == ["eu", "all", "others", "all", "others", "all"]
        with pytest.raises(InvalidInput, match=r"no handler receives a message with these headers .*ExtFilter\(type=3"):
            await test.deliver("orders", b"4", channel="eu")


@pytest.mark.filterwarnings("ignore:coroutine 'Message.requeue' was never awaited:RuntimeWarning")
async def test_a_handler_that_does_not_await_its_requeue_fails() -> None:
    app = App("127.0.0.1:1")

    @app.handler("orders", "billing")
    async def handle(message: Message) -> None:
        message.requeue(1.0)  # type: ignore[unused-coroutine]

    @app.handler("refunds", "billing")
    async def forget(message: Message) -> object:
        return message.touch()

    async with app.test() as test:
        for topic in ("orders", "refunds"):
            with pytest.raises(InvalidState, match="did not await it"):
                await test.deliver(topic, b"1")


@pytest.mark.parametrize("wrong", [0, -1, "2", True])
async def test_wait_published_waits_for_a_publish(wrong: Any) -> None:
    """With 0 it returned at once, and the test passed without a publish."""
    async with App(NOWHERE).test() as test:
        with pytest.raises(InvalidInput, match=f"count={wrong!r} is not a positive number"):
            await test.wait_published("invoices", wrong)
        with pytest.raises(InvalidName):
            await test.wait_published("the invoices")


async def test_wait_published_in_another_event_loop_is_refused() -> None:
    """It waited forever: nothing woke that event loop."""

    def wait_in_a_thread() -> None:
        with pytest.raises(InvalidState, match="another event loop runs the test"):
            anyio.run(test.wait_published, "invoices")

    async with App(NOWHERE).test() as test:
        await anyio.to_thread.run_sync(wait_in_a_thread)


async def test_wait_published_ends_with_the_test() -> None:
    app = App(NOWHERE)
    async with anyio.create_task_group() as tasks, app.test() as test:
        raised: list[str] = []

        async def wait() -> None:
            with pytest.raises(InvalidState, match="the test has ended with 1 of 2 publishes") as caught:
                await test.wait_published("invoices", 2)
            raised.append(str(caught.value))

        await app.publish("invoices", b"one")
        tasks.start_soon(wait)
        await anyio.lowlevel.checkpoint()
    assert len(raised) == 1
    assert len(await test.wait_published("invoices")) == 1


async def test_a_test_on_a_cluster_that_lacks_the_topic_of_a_handler_does_not_begin() -> None:
    """It began, and passed although the handler could not be called."""
    app, patterns, called = App(NOWHERE, start_timeout=0.3), App(NOWHERE, start_timeout=0.3), anyio.Event()

    @app.handler("orders", "ch")
    async def take(message: Message) -> None:
        called.set()

    patterns.handler("orders.*", "ch")(take)
    with Cluster(1) as cluster, anyio.fail_after(25):
        for _ in range(2):
            with pytest.raises(InvalidState, match="would receive nothing: orders/ch: no partition is connected"):
                async with app.test(cluster.lookupd):
                    raise NotImplementedError
        async with patterns.test(cluster.lookupd):
            pass  # its topics may be created later
        cluster.create_topic("orders", channels=["ch"])
        app = App(NOWHERE)
        app.handler("orders", "ch")(take)
        async with app.test(cluster.lookupd) as test:
            await app.publish("orders", b"one")
            await called.wait()
        assert len(test.published) == 1


async def test_wait_published_ends_with_the_app() -> None:
    """It waited for ever, although nothing could be published any more."""
    with Cluster(1) as cluster:
        cluster.create_topic("invoices", channels=["ch"])
        app = App(NOWHERE)
        async with app.test(cluster.lookupd) as test:
            await app.publish("invoices", b"one")
            app.stop()
            with pytest.raises(InvalidState, match=r"the app has ended with 1 of 2 publishes \(topic invoices\)"):
                await test.wait_published("invoices", 2)
            assert len(await test.wait_published("invoices")) == 1
        failing = App(NOWHERE)

        @failing.lifespan
        async def relay(app: App) -> AsyncIterator[None]:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fail)
                yield

        async def fail() -> None:
            await published.wait()
            raise ValueError("the relay has failed")

        published = anyio.Event()
        with pytest.raises(ValueError, match="the relay has failed"):
            async with failing.test(cluster.lookupd) as test:
                published.set()
                with pytest.raises(InvalidState, match="the app has ended"):
                    await test.wait_published("invoices")


async def test_a_test_that_is_entered_again_begins_without_publishes() -> None:
    app = App(NOWHERE)
    test = app.test()
    for number in range(2):
        async with test:
            assert test.published == []
            await app.publish("invoices", [number])
        assert [one.decode(list) for one in test.published] == [[number]]


@pytest.mark.parametrize(("choice", "name"), [({"key": "ann"}, "key="), ({"partition": 1}, "partition=")])
async def test_what_needs_lookup_fails_in_a_test_of_an_app_without_it(choice: Any, name: str) -> None:
    """Such a publish of the app always fails; its tests passed."""
    app = App(nsqd=NOWHERE)
    async with app.test() as test:
        with pytest.raises(InvalidSetting, match=f"{name} needs the partitions of a topic.*: give the app lookupd="):
            await app.publish("invoices", b"one", **choice)
        await app.publish("invoices", b"two")
        assert len(test.published) == 1


async def test_a_header_that_is_passed_on_is_recorded_as_it_is_stored() -> None:
    """Such messages had neither headers nor tag nor key, and tests that look for none passed."""
    app = App(NOWHERE)

    @app.publisher("copies")
    @app.handler("orders", "copy")
    async def copy(message: Message) -> OutgoingMessage:
        return OutgoingMessage(message.body, header=message.header)

    async with app.test() as test:
        await test.deliver("orders", b"one", headers={"user": "ann"}, tag=None, key="k")
        (copied,) = test.published
        assert (copied.headers, copied.tag, copied.key) == ({"user": "ann"}, None, "k")
        await app.publish("copies", b"two", header=b'{"##client_dispatch_tag":"canary"}', key="of the route")
        assert (test.published[1].headers, test.published[1].tag, test.published[1].key) == (
            {},
            "canary",
            "of the route",
        )


async def test_the_stored_messages_of_a_batch_that_failed_are_recorded() -> None:
    """None was, and a test that expects no publish passed."""
    with Cluster(2) as cluster:
        cluster.create_topic("orders", 2, channels=["billing"])
        app = App(NOWHERE, on_unknown="raise")
        async with app.test(cluster.lookupd) as test:
            batch = [OutgoingMessage(b"%d" % number, key=f"k{number}") for number in range(20)]
            await app.producer.publish_many("orders", batch)
            assert len(test.published) == 20
            cluster.faults.cut(cluster.leader("orders", 0))
            with pytest.raises(BatchFailed) as caught:
                await app.producer.publish_many("orders", batch)
            stored = [b"%d" % at for at, one in enumerate(caught.value.outcomes) if isinstance(one, Receipt)]
            assert 0 < len(stored) < 20
            assert [one.body for one in test.published[20:]] == stored


async def test_an_app_with_addresses_of_nsqd_is_tested_on_a_cluster(cluster: Cluster) -> None:
    cluster.create_topic("from_nsqd", channels=["ch"])
    app = App(nsqd="127.0.0.1:1")

    @app.handler("from_nsqd", "ch")
    async def copy(body: bytes) -> None:
        await app.publish("copies", body)

    cluster.create_topic("copies", channels=["ch"])
    with anyio.fail_after(20):
        async with app.test(cluster.lookupd) as test:
            await app.publish("from_nsqd", b"one")
            assert [one.body for one in await test.wait_published("copies")] == [b"one"]


async def test_the_error_of_a_lifespan_fails_a_test_although_another_one_hides_it() -> None:
    """As it ends the app."""
    app = App(NOWHERE)

    @app.lifespan
    async def hides(app: App) -> AsyncIterator[None]:
        with suppress(ValueError):
            yield

    @app.lifespan
    async def fails(app: App) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if broken:
                raise ValueError("of the lifespan")

    test = app.test()
    for broken in (True, False):
        with pytest.raises(ValueError, match="of the lifespan") if broken else nullcontext():
            async with test:
                pass
    broken = True
    with pytest.raises(KeyError):
        async with test:
            raise KeyError
