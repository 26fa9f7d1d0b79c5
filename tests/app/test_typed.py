"""Typed handlers, publishers, routers and tests of an app, called directly and on a cluster."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from secrets import token_hex
from typing import Annotated, Any

import anyio
import attrs
import msgspec
import pydantic
import pytest
from attrs import frozen

from nsqext import App, Consumer, ConsumerSettings, Message, OutgoingMessage, Producer, Reject, Requeue, Router
from nsqext.app import Depends, Header, Headers, Key, Tag
from nsqext.broker import Cluster
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.middleware import CallNext, Handling, Middleware

pytestmark = pytest.mark.anyio

DEAD: ConsumerSettings = {
    "backoff": "off",
    "dead_letter": "dead",
    "max_attempts": 5,
    "requeue_delay": 0.01,
    "requeue_jitter": 0.0,
}


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@frozen
class Item:
    name: str
    size: Size = Size.SMALL


@frozen
class Order:
    id: int
    items: list[Item] = attrs.field(factory=list)
    at: datetime | None = None


class Invoice(pydantic.BaseModel):
    order: int
    total: float = 0.0


class Struct(msgspec.Struct):
    id: int


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node."""
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("dead", channels=["ch"], extend=True)
        yield cluster


@pytest.fixture
def topics(cluster: Cluster) -> tuple[str, str]:
    """Two fresh topics with the channel ``ch``."""
    names = (f"a_{token_hex(4)}", f"b_{token_hex(4)}")
    for name in names:
        cluster.create_topic(name, channels=["ch"], extend=True)
    return names


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, "é".encode(), "é"),
        (dict, b'{"a": 1}', {"a": 1}),
        (list[int], b"[1, 2]", [1, 2]),
        (int | None, b"null", None),
        (list, b"[1.5]", [1.5]),
        (Any, b"[123456789012345678901]", [123456789012345678901]),
        (Order, b'{"id": 1}', Order(1)),
        (
            Order,
            b'{"id": 1, "items": [{"name": "tea", "size": "l"}], "at": "2026-01-02T03:04:05Z", "new": 1}',
            Order(1, [Item("tea", Size.LARGE)], datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ),
        (list[Order], b'[{"id": 1}]', [Order(1)]),
        (Struct, b'{"id": 1}', Struct(1)),
        (Invoice, b'{"order": 1}', Invoice(order=1)),
        (list[Invoice], b'[{"order": 1}]', [Invoice(order=1)]),
    ],
)
async def test_bodies_are_decoded_by_annotation(kind: Any, body: bytes, value: object) -> None:
    app = App("127.0.0.1:1")

    async def handle(body: object) -> object:
        return body

    handle.__annotations__["body"] = kind
    app.handler("orders", "ch")(handle)
    async with app.test() as test:
        assert await test.deliver("orders", body) == [value]
        assert await test.deliver("orders", value) == [value]  # encoded and decoded


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        (Order, b'{"id": "1"}', r"not a valid Order: Expected `int`, got `str` - at `\$.id`"),
        (Order, b'{"id": 1, "items": [{}]}', r"missing required field `name` - at `\$.items\[0\]`"),
        (Order, b"{", "Input data was truncated"),
        (Invoice, b'{"order": "secret text"}', "valid integer.* - at `order`"),
        (str, b"\xff", "not a valid str: 'utf-8' codec"),
        (dict, b"{", "not a valid dict"),
    ],
)
async def test_a_body_that_does_not_decode_is_treated_as_its_handler_says(kind: type, body: bytes, reason: str) -> None:
    app = App("127.0.0.1:1")

    async def handle(body: object) -> None:
        pytest.fail("it is not called")

    handle.__annotations__["body"] = kind
    app.handler("orders", "kept")(handle)
    app.handler("orders", "dropped", max_attempts=3, dead_letter="dead")(handle)
    async with app.test() as test:
        with pytest.raises(Reject, match=reason) as caught:
            await test.deliver("orders", body, channel="dropped")
        assert "secret text" not in str(caught.value)
        with pytest.raises(Requeue) as requeue:
            await test.deliver("orders", body, channel="kept")
    assert (requeue.value.delay, requeue.value.backoff) == (900.0, False)


async def test_parameters() -> None:
    app = App("127.0.0.1:1")
    events: list[str] = []

    async def database(message: Message, tag: Tag) -> AsyncIterator[str]:
        events.append("open")
        try:
            yield f"db of {message.topic} {tag}"
        finally:
            events.append("close")

    def cursor(db: Annotated[str, Depends(database)]) -> str:
        return f"cursor of {db}"

    async def user(headers: Headers) -> str:
        return str(headers["user"])

    @app.handler("orders", "ch")
    async def handle(
        message: Message,
        /,
        order: Order,
        key: Key,
        headers: Headers,
        db: Annotated[str, Depends(database)],
        *,
        cursor: Annotated[str, Depends(cursor)],
        user: Annotated[str, Depends(user)],
        count: Annotated[int, Header("count")],
        other: Annotated[str, Header()] = "none",
        ratio: Annotated[float | None, Header()] = None,
        flag: bool = True,
    ) -> tuple[object, ...]:
        events.append("handle")
        return message.attempts, order.id, key, dict(headers), db, cursor, user, count, other, ratio, flag

    headers = {"user": "ann", "count": "3"}
    async with app.test() as test:
        found = await test.deliver("orders", Order(1), headers=headers, tag="blue", key="k", attempts=2)
        assert found == [
            (2, 1, "k", headers, "db of orders blue", "cursor of db of orders blue", "ann", 3, "none", None, True)
        ]
        assert events == ["open", "handle", "close"]
        with pytest.raises(Requeue):
            await test.deliver("orders", Order(1), headers={"user": "ann"})
        with pytest.raises(Requeue):
            await test.deliver("orders", Order(1), headers={"user": "ann", "count": "many"})


async def test_a_dependency_that_catches_the_error_of_a_handler_does_not_finish_its_message() -> None:
    app = App("127.0.0.1:1")
    rolled_back: list[str] = []

    async def session() -> AsyncIterator[str]:
        try:
            yield "session"
        except RuntimeError:
            rolled_back.append("session")

    def connection() -> Iterator[str]:
        try:
            yield "connection"
        except RuntimeError:
            rolled_back.append("connection")

    @app.handler("orders", "one")
    async def asynchronous(message: Message, own: Annotated[str, Depends(session)]) -> None:
        raise RuntimeError("the card was declined")

    @app.handler("orders", "two")
    def blocking(message: Message, own: Annotated[str, Depends(connection)]) -> None:
        raise RuntimeError("the card was declined")

    async with app.test() as test:
        for channel in ("one", "two"):
            with pytest.raises(RuntimeError, match="declined"):
                await test.deliver("orders", b"x", channel=channel)
    assert rolled_back == ["session", "connection"]


async def test_dependencies_are_called_after_the_body_was_decoded_and_not_after_an_error() -> None:
    app = App("127.0.0.1:1", **DEAD | {"dead_letter": None})
    events: list[str] = []

    def number() -> int:
        events.append("number")
        return 1

    def double(value: Annotated[int, Depends(number)]) -> int:
        return 2 * value

    async def session() -> AsyncIterator[str]:
        events.append("open")
        yield "session"
        events.append("close")

    @app.handler("plain", "ch")
    async def plain(order: Order, two: Annotated[int, Depends(double)], one: Annotated[int, Depends(number)]) -> object:
        return order.id, two, one

    def user(session: Annotated[str, Depends(session)]) -> str:
        return f"user of {session}"

    @app.handler("nested", "ch")
    async def nested(order: Order, *, user: Annotated[str, Depends(user)]) -> object:
        events.append("handle")
        return user

    async with app.test() as test:
        assert await test.deliver("plain", Order(7)) == [(7, 2, 1)]
        assert await test.deliver("nested", Order(7)) == ["user of session"]
        assert events == ["number", "open", "handle", "close"]
        for topic in ("plain", "nested"):
            with pytest.raises(Requeue):
                await test.deliver(topic, b"{")
        assert events == ["number", "open", "handle", "close"]


def needs_itself(again: Annotated[int, Depends(lambda: 1)]) -> int:
    return again


needs_itself.__annotations__["again"] = Annotated[int, Depends(needs_itself)]


class Unknown:
    """A type without decoder."""


async def test_handlers_that_cannot_be_called() -> None:
    app = App("127.0.0.1:1")

    async def two(first: Order, second: Item) -> None: ...

    async def unknown(body: Unknown) -> None: ...

    async def missing(body: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    async def several(body: Order, *bodies: Order) -> None: ...

    async def circular(value: Annotated[int, Depends(needs_itself)]) -> None: ...

    async def header(value: Annotated[Order, Header()]) -> None: ...

    def takes_body(body: Order) -> int:
        return body.id

    async def below(value: Annotated[int, Depends(takes_body)]) -> None: ...

    handlers: list[tuple[Callable[..., Awaitable[object]], str]] = [
        (two, "two parameters for the body: 'first' and 'second'"),
        (unknown, "cannot be decoded as Unknown"),
        (missing, "annotation of the handler .*missing is unknown"),
        (several, "has a parameter \\*bodies"),
        (circular, "depends on itself"),
        (header, "headers are str, int or float"),
        (below, "dependencies may have"),
    ]
    for function, reason in handlers:
        with pytest.raises(InvalidSetting, match=reason):
            app.handler("orders", "ch")(function)
    assert app.specs == []
    assert app.consumers == ()


async def test_results_are_published_before_the_message_is_finished(cluster: Cluster, topics: tuple[str, str]) -> None:
    first, second = topics
    app = App(cluster.lookupd, **DEAD)
    done = anyio.Event()
    received: list[tuple[int, str | None]] = []

    @app.publisher(second)
    @app.handler(first, "ch")
    async def bill(order: Order) -> Invoice | OutgoingMessage | None:
        if order.id == 3:
            return None
        return Invoice(order=order.id) if order.id == 1 else OutgoingMessage(b'{"order": 2}', key="k")

    @app.handler(second, "ch")
    async def take(invoice: Invoice, key: Key) -> None:
        received.append((invoice.order, key))
        if len(received) == 2:
            done.set()

    with anyio.fail_after(25):
        async with app:
            for number in (3, 1, 2):
                await app.publish(first, Order(number))
            await done.wait()
    assert sorted(received) == [(1, None), (2, "k")]


async def test_a_bad_body_becomes_a_dead_letter_once(cluster: Cluster, topics: tuple[str, str]) -> None:
    consumer = Consumer(topics[0], "ch", lookupd=cluster.lookupd, **DEAD)
    handled: list[Order] = []

    @consumer.handler
    async def handle(order: Order) -> None:
        handled.append(order)
        consumer.stop()

    with anyio.fail_after(25):
        async with Producer(cluster.lookupd) as producer:
            await producer.publish(topics[0], b'{"id": null}', headers={"user": "42"})
            await producer.publish(topics[0], b'{"id": 7}')
        await consumer.serve()
        async with Consumer("dead", "ch", lookupd=cluster.lookupd) as letters:
            letter = await anext(letters)
            await letter.finish()
    assert handled == [Order(7)]
    assert (letter.body, letter.headers["dead-letter-attempts"], letter.headers["user"]) == (b'{"id": null}', "1", "42")
    assert "Expected `int`, got `null` - at `$.id`" in letter.headers["dead-letter-error"]


class Shout(Middleware):
    """Changes the bodies and results of handlers."""

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        handling.message.body = handling.message.body.upper()
        return f"{await call_next(handling)}!"


async def test_routers_with_lifespans_and_middleware() -> None:
    router, inner = Router(), Router()
    events: list[str] = []

    @inner.lifespan
    async def lifespan(app: App) -> AsyncIterator[None]:
        events.append("open")
        yield
        events.append("close")

    @inner.publisher("shouts")
    @inner.handler("words", "ch", middleware=[Shout()])
    async def handle(word: str) -> str:
        return word

    router.include_router(inner)
    app = App("127.0.0.1:1")
    app.include_router(router)
    with pytest.raises(InvalidSetting, match="itself"):
        router.include_router(router)
    for _ in range(2):
        async with app.test() as test:
            assert await test.deliver("words", "hello", channel="ch") == ["HELLO!"]
            assert [(one.topic, one.decode(str)) for one in test.published] == [("shouts", "HELLO")]
            with pytest.raises(InvalidInput, match="no handler of words/other"):
                await test.deliver("words", "hello", channel="other")
    assert events == ["open", "close"] * 2


async def test_an_app_on_a_test_cluster(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App("lookup.invalid:4161")

    @app.publisher(topics[1])
    @app.handler(topics[0], "ch")
    async def bill(order: Order) -> Invoice:
        return Invoice(order=order.id)

    for number in (1, 2):
        with anyio.fail_after(25):
            async with app.test(cluster.lookupd) as test:
                await app.publish(topics[0], Order(number))
                published = await test.wait_published(topics[1])
                with pytest.raises(InvalidState, match="without a cluster"):
                    await test.deliver(topics[0], Order(number))
        assert published[0].decode(Invoice) == Invoice(order=number)


async def test_values_that_cannot_be_encoded_or_published() -> None:
    app = App("127.0.0.1:1")

    @app.handler("orders", "ch")
    async def handle(message: Message) -> None: ...

    async with app.test() as test:
        with pytest.raises(InvalidInput, match="a Unknown cannot be encoded"):
            await test.deliver("orders", Unknown())
        for buffer in (bytearray(b"x"), memoryview(b"x")):  # as drivers of databases return them
            with pytest.raises(InvalidInput, match="would be encoded as text of JSON: give bytes"):
                await app.publish("orders", buffer)
        with pytest.raises(InvalidInput, match="a str cannot be encoded"):
            await app.publish("orders", "\ud800")
