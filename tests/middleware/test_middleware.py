"""Middleware around publishes and handlers, and the included middleware."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import anyio
import pytest
from attrs import evolve

from nsqext import (
    App,
    Consumer,
    ConsumerSettings,
    Finish,
    Message,
    MessageBatch,
    OutgoingMessage,
    Producer,
    Reject,
    Requeue,
)
from nsqext.client.middleware import surround_batch_handler, surround_handler
from nsqext.errors import InvalidSetting, InvalidState, ReceiptsMissing
from nsqext.middleware import (
    CallNext,
    Decompress,
    Deduplicate,
    HandlerTimeout,
    Handling,
    Middleware,
    Publishing,
    RateLimit,
    SendNext,
)
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext import Receipt
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

CALM: ConsumerSettings = {"backoff": "off", "requeue_delay": 0.01, "requeue_jitter": 0}


class Trail(Middleware):
    """Records the order of calls, and adds a header to published messages."""

    def __init__(self, name: str, events: list[str]) -> None:
        self._name = name
        self._events = events

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        self._events.append(f"{self._name} publishes {len(publishing.messages)}")
        publishing.messages = [
            evolve(message, headers={**(message.headers or {}), self._name: "seen"}) for message in publishing.messages
        ]
        receipts = await send_next(publishing)
        assert receipts == publishing.receipts
        return receipts

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        self._events.append(f"{self._name} before {handling.channel}")
        try:
            return await call_next(handling)
        finally:
            self._events.append(f"{self._name} after")


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A fresh topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, extend=True, channels=["ch"])
    return name


async def test_the_first_middleware_is_the_outermost(cluster: Cluster, topic: str) -> None:
    events: list[str] = []
    middleware = [Trail("outer", events), Trail("inner", events)]
    async with Producer(cluster.lookupd, middleware=middleware) as producer:
        receipt = await producer.publish(topic, b"one", trace_id=7, partition=0)
        assert (receipt.topic, receipt.trace_id) == (topic, 7)
        assert len(await producer.publish_many(topic, [b"two", b"three"])) == 2
    assert events == ["outer publishes 1", "inner publishes 1", "outer publishes 2", "inner publishes 2"]
    events.clear()
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=middleware, **CALM)
    bodies: list[str] = []

    @consumer.handler
    async def handle(body: str, message: Message) -> None:
        assert dict(message.headers) == {"outer": "seen", "inner": "seen"}
        bodies.append(body)
        if len(bodies) == 3:
            consumer.stop()

    with anyio.fail_after(25):
        await consumer.serve()
    assert bodies == ["one", "two", "three"]
    assert events == ["outer before ch", "inner before ch", "inner after", "outer after"] * 3


class Switched(Trail):
    """Middleware that can be switched off; ``error`` is raised instead of an answer."""

    enabled = False
    error: Exception | None = None

    def is_enabled(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.enabled


async def test_publishes_and_messages_pass_by_middleware_while_none_is_enabled(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[str] = []
    first, second = middleware = [Switched("first", events), Switched("second", events)]
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=middleware, **CALM)
    bodies: list[bytes] = []
    handled = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal handled
        bodies.append(message.body)
        handled.set()
        handled = anyio.Event()

    async def pass_on(body: bytes) -> list[str]:
        events.clear()
        done = handled
        await producer.publish(topic, body)
        await done.wait()
        return events.copy()

    both = [f"{name} publishes 1" for name in ("first", "second")]
    around = ["first before ch", "second before ch", "second after", "first after"]
    with anyio.fail_after(25):
        async with Producer(cluster.lookupd, middleware=middleware) as producer, consumer:
            assert await pass_on(b"off") == []
            second.enabled = True
            assert sorted(await pass_on(b"on")) == sorted(both + around)
            second.enabled = False
            assert await pass_on(b"off again") == []
            first.error = ValueError("broken")
            assert not caplog.records
            assert sorted(await pass_on(b"broken")) == sorted(both + around)
    assert bodies == [b"off", b"on", b"off again", b"broken"]
    assert {(record.name, str((record.exc_info or (None, None))[1])) for record in caplog.records} == {
        ("nsqext.middleware", "broken")
    }


async def test_middleware_that_is_always_enabled_is_called_beside_one_that_is_not(cluster: Cluster, topic: str) -> None:
    events: list[str] = []
    async with Producer(cluster.lookupd, middleware=[Switched("off", events), Trail("on", events)]) as producer:
        await producer.publish(topic, b"x")
    assert events == ["off publishes 1", "on publishes 1"]


async def test_absent_middleware_costs_nothing(cluster: Cluster, topic: str) -> None:
    app = App(cluster.lookupd)

    @app.handler(topic, "ch")
    async def handle(message: Message) -> None: ...

    assert type(app.producer) is Producer
    assert type(app.consumers[0]) is Consumer
    assert app.handler_of(app.specs[0]) is handle
    assert surround_handler((Middleware(),), handle, "ch") is handle

    async def handle_batch(batch: MessageBatch) -> None: ...

    assert surround_batch_handler((Middleware(),), handle_batch, "ch") is handle_batch


async def test_a_handler_that_runs_too_long_is_cancelled_and_its_message_requeued(cluster: Cluster, topic: str) -> None:
    app = App(cluster.lookupd, middleware=[HandlerTimeout(0.05)], **CALM)
    events: list[str] = []

    @app.handler(topic, "ch")
    async def handle(message: Message) -> None:
        if message.attempts == 2:
            events.append("second attempt")
            app.stop()
            return
        try:
            await anyio.sleep_forever()
        finally:
            events.append("cancelled")

    async with Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"x")
    with anyio.fail_after(25):
        await app.serve()
    assert events == ["cancelled", "second attempt"]


async def call(middleware: Middleware, message: Message, handle: Callable[[Message], object] = repr) -> object:
    """Call a handler through one middleware."""

    async def handler(message: Message) -> object:
        return handle(message)

    return await surround_handler((middleware,), handler, "ch")(message)


async def test_timeouts_raise_and_quick_handlers_return() -> None:
    message = make_message(RecordingOwner())
    assert await call(HandlerTimeout(5.0), message, lambda message: message.body) == b"body"

    async def slow(message: Message) -> None:
        await anyio.sleep_forever()

    with anyio.fail_after(25), pytest.raises(TimeoutError, match=r"longer than 0.01 s"):
        await surround_handler((HandlerTimeout(0.01),), slow, "ch")(message)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of middleware, which take no time, while its clock stands at 100 s."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(round(seconds, 6))

    monkeypatch.setattr("nsqext.middleware._clock", lambda: 100.0)
    # not of anyio itself: the thread of the cluster sleeps too
    monkeypatch.setattr("nsqext.middleware.anyio", SimpleNamespace(sleep=sleep))
    return found


async def test_handlers_begin_at_the_limited_rate(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    limit = RateLimit(10, burst=2)
    message = make_message(RecordingOwner())
    for _ in range(4):
        await call(limit, message)
    assert pauses == [0.1, 0.2]
    monkeypatch.setattr("nsqext.middleware._clock", lambda: 110.0)
    for _ in range(3):
        await call(limit, message)
    assert pauses == [0.1, 0.2, 0.1]


async def test_handlers_that_wait_at_the_same_time_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, may_begin = list[float](), anyio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 6))
        await may_begin.wait()

    monkeypatch.setattr("nsqext.middleware._clock", lambda: 100.0)
    monkeypatch.setattr("nsqext.middleware.anyio", SimpleNamespace(sleep=sleep))
    limit = RateLimit(10)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(call, limit, make_message(RecordingOwner()))
        await anyio.wait_all_tasks_blocked()
        may_begin.set()
    assert pauses == [0.1, 0.2, 0.3]


async def test_a_wait_that_is_cancelled_uses_up_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a HandlerTimeout around it, calls that had waited too long moved the next turn away, until none was made."""
    monkeypatch.setattr("nsqext.middleware._clock", lambda: 100.0)
    limit, message, pauses = RateLimit(10), make_message(RecordingOwner()), list[float]()
    await call(limit, message)
    for _ in range(3):
        with anyio.move_on_after(0):
            await call(limit, message)

    async def sleep(seconds: float) -> None:
        pauses.append(round(seconds, 6))

    monkeypatch.setattr("nsqext.middleware.anyio", SimpleNamespace(sleep=sleep))
    await call(limit, message)
    assert pauses == [0.1]


@pytest.mark.parametrize("make", [lambda: HandlerTimeout(25), lambda: RateLimit(1000), Deduplicate, Decompress])
async def test_the_result_of_a_handler_is_returned(make: Callable[[], Middleware]) -> None:
    assert await call(make(), make_message(RecordingOwner()), lambda message: message.body) == b"body"


async def test_messages_are_deduplicated(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("nsqext.middleware._clock", lambda: now)
    handled: list[int] = []
    unique = Deduplicate(2, seconds=10)

    def handle(message: Message) -> None:
        handled.append(message.internal_id)
        if message.internal_id == 9 and handled.count(9) == 1:
            raise Requeue

    async def deliver(*numbers: int) -> list[int]:
        handled.clear()
        for number in numbers:
            await call(unique, make_message(RecordingOwner(), number), handle)
        return list(handled)

    assert await deliver(1, 2, 1, 2) == [1, 2]
    assert await deliver(3, 2, 1) == [3, 1]  # 1 was outside of the window
    now += 10
    assert await deliver(3, 1) == [], "it is the last moment"
    now += 1
    assert await deliver(3, 4, 3, 1) == [3, 4, 1]  # 3 is handled again, and is newer than 1 then
    with pytest.raises(Requeue):
        await deliver(9)
    handled.append(9)
    assert await call(unique, make_message(RecordingOwner(), 9), handle) is None  # a failed message is handled again
    assert handled == [9, 9, 9]
    for signal in (Finish(), None):  # a handler may finish its message by itself, too
        message = make_message(RecordingOwner(), 10)

        async def finish(message: Message, signal: Finish | None = signal) -> None:
            handled.append(message.internal_id)
            if signal is not None:
                raise signal
            await message.finish()

        with pytest.raises(Finish) if signal else nullcontext():
            await surround_handler([unique], finish, "ch")(message)
        assert await call(unique, make_message(RecordingOwner(), 10), handle) is None
        unique = Deduplicate()
    assert handled == [9, 9, 9, 10, 10]
    by_trace = Deduplicate(1, key=lambda message: message.trace_id or None)
    for _ in range(2):
        await call(by_trace, make_message(RecordingOwner(), 1), handle)
    assert len(handled) == 7
    handled.clear()
    for channel, timestamp in (("ch", 0), ("ch", 1), ("other", 0), ("ch", 0)):  # a topic that is created again

        async def requeue_first(message: Message) -> None:
            handled.append(message.internal_id)
            if len(handled) == 1:
                await message.requeue()

        again = make_message(RecordingOwner(), 11, timestamp=timestamp)
        await surround_handler([unique], requeue_first, channel)(again)
    assert handled == [11] * 4


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", bytes), (None, bytes)]
)
async def test_bodies_are_decompressed_once(encoding: str | None, compress: Callable[[bytes], bytes]) -> None:
    headers = {"user": "42"} | ({} if encoding is None else {"content-encoding": encoding})
    message = make_message(RecordingOwner(), body=compress(b"one coffee"), headers=headers)
    for _ in range(2):  # a message that waits in a lane is handled again as the same object
        assert await call(Decompress(), message, lambda message: message.body) == b"one coffee"
    assert message.headers["user"] == "42"
    assert ("content-encoding" in message.headers) == (encoding == "br")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"no gzip", "not valid gzip"),
        (gzip.compress(bytes(2000), mtime=0), "1000 are allowed"),
        (gzip.compress(b"x" * 100, mtime=0)[:-9], "cut off"),
    ],
    ids=["no gzip", "too large", "truncated"],
)
async def test_bodies_that_cannot_be_decompressed_are_rejected(body: bytes, reason: str) -> None:
    message = make_message(RecordingOwner(), body=body, headers={"content-encoding": "gzip"})
    with pytest.raises(Reject, match=reason):
        await call(Decompress(max_size=1000), message)


# Batches


async def call_batch(
    middleware: Middleware, messages: Sequence[Message], handle: Callable[[MessageBatch], object] = repr
) -> object:
    """Call a batch handler through one middleware."""

    async def handler(batch: MessageBatch) -> object:
        return handle(batch)

    return await surround_batch_handler((middleware,), handler, "ch")(MessageBatch(messages))


def make_batch(*numbers: int, **members: Any) -> list[Message]:
    """Return messages of one batch."""
    return [make_message(RecordingOwner(), number, **members) for number in numbers]


@pytest.mark.parametrize("client", ["app", "consumer"])
async def test_middleware_surrounds_batch_handlers(cluster: Cluster, topic: str, client: str) -> None:
    events: list[str] = []
    sizes: list[int] = []
    middleware = (Trail("outer", events), Trail("inner", events))
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [b"one", b"two"])
    app = App(cluster.lookupd, middleware=middleware[:1], **CALM)
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=middleware, **CALM)

    async def handle(batch: MessageBatch) -> None:
        sizes.append(len(batch))
        if sum(sizes) == 2:
            app.stop()
            consumer.stop()

    with anyio.fail_after(25):
        if client == "app":
            app.batch_handler(topic, "ch", max_count=2, max_wait=5.0, middleware=middleware[1:])(handle)
            await app.serve()
        else:
            consumer.batch_handler(max_count=2, max_wait=5.0)(handle)
            await consumer.serve()
    assert events == ["outer before ch", "inner before ch", "inner after", "outer after"] * len(sizes)


@pytest.mark.parametrize(
    ("returned", "found"),
    [(None, "None"), ((), "0 receipts"), ((1, 2, 3), "3 receipts"), (iter(()), "<tuple_iterator")],
    ids=["nothing", "no receipts", "too many", "an iterator"],
)
async def test_a_publish_says_that_middleware_did_not_return_its_receipts(
    cluster: Cluster, topic: str, returned: Any, found: str
) -> None:
    """The message is stored: an IndexError or TypeError ended the program."""

    class Forgetful(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
            await send_next(publishing)
            publishing.messages = publishing.messages * 3
            return returned

    async with Producer(cluster.lookupd, middleware=[Forgetful()]) as producer:
        for publish in (
            lambda: producer.publish(topic, b"x"),
            lambda: producer.publish_many(topic, [b"x", b"y"]),
        ):
            with pytest.raises(ReceiptsMissing, match=f"middleware has returned {found}") as caught:
                await publish()
            assert (caught.value.topic, "return await send_next" in str(caught.value)) == (topic, True)


async def test_a_middleware_for_single_messages_fails_loudly_with_a_batch() -> None:
    class Single(Middleware):
        async def handle(self, handling: Handling, call_next: CallNext) -> object:
            assert handling.message.id
            return await call_next(handling)

    with pytest.raises(InvalidState, match=r"read handling\.messages"):
        await call_batch(Single(), make_batch(1, 2))
    with pytest.raises(TimeoutError):
        await surround_batch_handler((HandlerTimeout(0.01),), lambda batch: anyio.sleep_forever(), "ch")(
            MessageBatch(make_batch(1))
        )


async def test_middleware_finishes_a_message_that_it_does_not_pass_on_to_a_handler_that_answers_later() -> None:
    class Even(Middleware):
        async def handle(self, handling: Handling, call_next: CallNext) -> object:
            if handling.message.internal_id == 3:
                await handling.message.requeue()
            return None if handling.message.internal_id % 2 else await call_next(handling)

    owner, handled = RecordingOwner(), list[int]()

    async def handler(message: Message) -> None:
        handled.append(message.internal_id)

    surrounded = surround_handler([Even()], handler, "ch", auto_finish=False)
    assert surrounded.__qualname__ == handler.__qualname__, "warnings name it"
    for number in range(4):
        await surrounded(make_message(owner, number))
    assert (owner.commands, handled) == (["FIN 1", "REQ 3 0"], [0, 2])


async def test_the_messages_of_a_batch_count_towards_the_rate(pauses: list[float]) -> None:
    limit = RateLimit(10)
    for count in (5, 1, 2):
        await call_batch(limit, make_batch(*range(count)))
    assert pauses == [0.5, 0.6]


async def test_a_batch_that_middleware_has_emptied_calls_no_handler_and_stays_a_batch_of_the_consumer() -> None:
    class Nothing(Middleware):
        async def handle(self, handling: Handling, call_next: CallNext) -> object:
            handling.messages.clear()
            return await call_next(handling)

    handled: list[MessageBatch] = []
    await call_batch(Nothing(), batch := make_batch(1, 2), handled.append)
    assert (handled, len(batch)) == ([], 2)


async def test_a_batch_is_deduplicated_and_its_duplicates_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    unique = Deduplicate()
    handled: list[list[int]] = []

    def handle(batch: MessageBatch) -> None:
        handled.append([message.internal_id for message in batch])
        if handled[-1] == [4]:
            raise ValueError("broken")

    await call_batch(unique, make_batch(1, 2), handle)
    mixed = make_batch(1, 3, 2)
    await call_batch(unique, mixed, handle)
    assert handled == [[1, 2], [3]]
    assert [message.answered for message in mixed] == [True, False, True]
    for _ in range(2):  # a batch that failed is handled again; its duplicates are finished, not requeued
        failed = make_batch(4, 1)
        with pytest.raises(ValueError, match="broken"):
            await call_batch(unique, failed, handle)
        assert [message.answered for message in failed] == [False, True]
    await call_batch(unique, make_batch(1, 2), handle)
    assert handled == [[1, 2], [3], [4], [4]], "a batch of duplicates does not call the handler"


async def test_a_second_message_of_a_batch_has_the_outcome_of_the_batch() -> None:
    """It may be the redelivery of the first, whose answer the server ignores: it is not finished before the handler."""
    unique = Deduplicate(key=lambda message: message.internal_id % 10)
    handled: list[list[int]] = []
    batch = make_batch(1, 11, 2)
    await call_batch(unique, batch, lambda batch: handled.append([message.internal_id for message in batch]))
    assert handled == [[1, 2]]
    assert not any(message.answered for message in batch), "the consumer finishes all, or requeues all"


async def test_messages_of_two_topics_with_the_same_key_are_both_handled() -> None:
    """The second was finished without its handler, although it was never handled."""
    unique = Deduplicate(key=lambda message: message.header_value("order"))
    handled: list[str] = []
    for topic in ("orders", "payments", "orders"):
        owner = RecordingOwner()
        owner.topic = topic
        message = make_message(owner, headers={"order": "7"})
        await call(unique, message, lambda message: handled.append(message.topic))
    assert handled == ["orders", "payments"]


async def test_bodies_of_a_batch_that_cannot_be_decompressed_are_rejected_alone(cluster: Cluster, topic: str) -> None:
    headers = {"content-encoding": "gzip"}
    dead = f"{topic}-dead"
    cluster.create_topic(dead, extend=True, channels=["ch"])
    app = App(cluster.lookupd, backoff="off", max_attempts=5, dead_letter=dead, middleware=[Decompress()])
    seen: list[bytes] = []

    @app.batch_handler(topic, "ch", max_count=3, max_wait=5.0)
    async def handle(batch: MessageBatch) -> None:
        seen.extend(message.body for message in batch)

    async with Producer(cluster.lookupd) as producer:
        await producer.publish(topic, gzip.compress(b"one"), headers=headers)
        await producer.publish(topic, b"broken", headers=headers)
        await producer.publish(topic, b"plain")
    with anyio.fail_after(25):
        async with app, Consumer(dead, "ch", lookupd=cluster.lookupd) as letters:
            letter = await anext(letters)
            await letter.finish()
    assert letter.body == b"broken"
    assert letter.headers["dead-letter-error"].startswith("Reject: the body is not valid gzip")
    assert sorted(seen) == [b"one", b"plain"]


_GZIP = {"content-encoding": "gzip"}


@pytest.mark.parametrize("bad", [[], [b"bad"]], ids=["Deduplicate", "Decompress"])
async def test_what_waits_for_a_requeued_message_of_its_key_is_handled_behind_it(
    cluster: Cluster, topic: str, bad: list[bytes]
) -> None:
    """It was finished, although the handler that left it had not handled it."""
    handled: list[list[bytes]] = []
    settings: ConsumerSettings = {**CALM, "key": "##key", "initial_ready": 10}
    middleware: list[Middleware] = [Decompress()] if bad else [Deduplicate()]
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=middleware, **settings)

    @consumer.batch_handler(max_count=2 + len(bad), max_wait=20.0)
    async def handle(batch: MessageBatch) -> None:
        handled.append([message.body for message in batch])
        if len(handled) == 1:
            await batch[0].requeue()
        else:
            consumer.stop()

    first = [OutgoingMessage(body, key="k") for body in (b"1", b"2")]
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [*first, *(OutgoingMessage(body, _GZIP, key="k") for body in bad)])
    with anyio.fail_after(60):
        await consumer.serve(signals=False)
    assert handled == [[b"1", b"2"]] * 2


def make_batch_with_a_bad_body() -> list[Message]:
    """Return a good message, and a message that cannot be decompressed."""
    return [*make_batch(1), *make_batch(2, body=b"no gzip", headers=_GZIP)]


@pytest.mark.parametrize(
    "handle", [lambda batch: batch[0].requeue().close(), lambda batch: batch.requeue()], ids=["requeue", "result"]
)
async def test_a_bad_body_does_not_hide_that_a_handler_forgot_await(handle: Callable[[MessageBatch], object]) -> None:
    batch = make_batch_with_a_bad_body()
    with pytest.raises(InvalidState, match="await"):
        await call_batch(Decompress(), batch, handle)
    assert not any(message.answered for message in batch)


async def test_a_handler_that_finishes_its_batch_does_not_finish_a_bad_body() -> None:
    def handle(batch: MessageBatch) -> None:
        raise Finish

    batch = make_batch_with_a_bad_body()
    with pytest.raises(Reject, match="not valid gzip"):
        await call_batch(Decompress(), batch, handle)
    assert [message.answered for message in batch] == [True, False]


class _Awaited(Middleware):
    async def attach(self, client: object) -> None:  # type: ignore[override]
        raise AssertionError("awaited")


class _AlwaysTrue(Middleware):
    async def is_enabled(self) -> bool:  # type: ignore[override]
        raise AssertionError("awaited")


class _Transaction(Middleware):
    opens_transaction = True


@pytest.mark.parametrize(
    "make",
    [
        lambda: HandlerTimeout(0),
        lambda: RateLimit(-1),
        lambda: RateLimit(0),
        lambda: RateLimit(1, burst=0),
        lambda: Deduplicate(0),
        lambda: Deduplicate(seconds=0),
        lambda: Deduplicate(key=AsyncMock()),
        lambda: App("127.0.0.1:1", middleware=[Deduplicate()]).handler("t", "ch", auto_finish=False)(print),
        lambda: Consumer("t", "ch", "127.0.0.1:1", middleware=[Deduplicate()]).handler(auto_finish=False)(print),
        lambda: Decompress(max_size=0),
        lambda: App("127.0.0.1:1", middleware=[_Awaited()]),
        lambda: App("127.0.0.1:1", middleware=[_AlwaysTrue()]),
        lambda: App("127.0.0.1:1", middleware=[_Transaction(), Deduplicate()]).handler("t", "ch")(print),
        lambda: App("127.0.0.1:1", node_filter=AsyncMock()),
        lambda: App("127.0.0.1:1", middleware=[print]),  # type: ignore[list-item]
    ],
)
async def test_mistakes(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidSetting):
        make()
