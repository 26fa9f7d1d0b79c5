"""How a handler is called: which parameter receives what, and which handlers are refused, without a consumer."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Iterator
from typing import Annotated, Any, Optional

import anyio
import anyio.lowlevel
import attrs
import pytest

from nsqext import Message, Reject, Requeue
from nsqext.client.consumer.options import FailureOptions
from nsqext.client.consumer.typed.body import decode_body
from nsqext.client.consumer.typed.parameters import (
    CallPlan,
    Depends,
    Header,
    Headers,
    Key,
    Tag,
    message_handler,
    plan_call,
)
from nsqext.errors import InvalidSetting
from tests.support.messages import RecordingOwner, make_message

pytestmark = pytest.mark.anyio


@attrs.frozen
class Order:
    id: int


def received(body: bytes = b'{"id": 7}', **members: Any) -> Message:
    """Return a message of the key k with the headers user and count."""
    return make_message(RecordingOwner(), 1, body, headers={"user": "ann", "count": "3"}, key="k", tag="red", **members)


async def result(plan: CallPlan | None) -> object:
    """Return what a handler returns for a message."""
    assert plan is not None
    return await plan.handler(FailureOptions())(received())


async def test_parameters_in_any_order_and_of_any_kind() -> None:
    async def key_last(order: Order, key: Key) -> object:
        return order, key

    async def keyword_only(*, order: Order) -> object:
        return order

    async def keywords(order: Order, *, tag: Tag, key: Key) -> object:
        return order, tag, key

    async def default_between(order: Order, flag: bool = True, key: Key = None, *, more: int = 5) -> object:
        return order, flag, key, more

    async def default_behind(order: Order, key: Key = None, flag: bool = True) -> object:
        return order, key, flag

    async def defaults_between(order: Order, flag: bool = True, more: int = 2, key: Key = None, /) -> object:
        return order, flag, more, key

    async def defaults_before_two(
        order: Order, flag: bool = True, key: Key = None, more: int = 2, tag: Tag = None, /
    ) -> object:
        return order, flag, key, more, tag

    async def message_first(message, order: Order) -> object:  # type: ignore[no-untyped-def]
        return message.key, order

    async def message_last(order: Order, message: object) -> object:
        return order, message.key  # type: ignore[attr-defined]

    async def raw(body: bytes, headers: Headers) -> object:
        return body, dict(headers)

    seven = Order(7)
    assert await result(plan_call(key_last)) == (seven, "k")
    assert await result(plan_call(keyword_only)) == seven
    assert await result(plan_call(keywords)) == (seven, "red", "k")
    assert await result(plan_call(default_between)) == (seven, True, "k", 5)
    assert await result(plan_call(default_behind)) == (seven, "k", True)
    assert await result(plan_call(defaults_between)) == (seven, True, 2, "k")
    assert await result(plan_call(defaults_before_two)) == (seven, True, "k", 2, "red")
    assert await result(plan_call(message_first)) == ("k", seven)
    assert await result(plan_call(message_last)) == (seven, "k")
    assert await result(plan_call(raw)) == (b'{"id": 7}', {"user": "ann", "count": "3"})


async def test_what_receives_the_message_needs_no_plan() -> None:
    async def bare(anything) -> object:  # type: ignore[no-untyped-def]
        return anything

    async def message(one: Message) -> object:
        return one

    async def qualified(one: nsqext.Message) -> object:  # type: ignore[name-defined]  # noqa: F821
        return one

    async def anything(one: object) -> object:
        return one

    async def several(*all_of_them: object) -> object:
        return all_of_them[0]

    class Callable_:
        async def __call__(self, one: Message) -> object:
            return one

    one = received()
    for function in (bare, message, qualified, anything, several, Callable_()):
        assert plan_call(function) is None
        assert message_handler(function, FailureOptions()) is function
        assert await function(one) is one
    plan = plan_call(functools.partial(message, one))
    assert plan is not None, "it has no parameter left"


async def test_a_class_of_another_package_that_is_called_message_is_a_body() -> None:
    Own = attrs.make_class("Message", {"id": attrs.field(type=int)})

    async def handle(body: object) -> object:
        return body

    handle.__annotations__["body"] = Own
    assert await result(plan_call(handle)) == Own(7)
    handle.__annotations__["body"] = Message
    assert plan_call(handle) is None


async def test_types_that_are_visible_where_the_handler_is_defined() -> None:
    @attrs.frozen
    class Local:
        id: int

    async def handle(body: Local) -> object:
        return body

    class Handler:
        async def __call__(self, body: Local, key: Key) -> object:
            return body, key

        async def method(self, body: Local) -> object:
            return body

    async def bound(prefix: str, body: Local, flag: int = 1, key: Key = None) -> object:
        return prefix, body, flag, key

    assert await result(plan_call(handle)) == Local(7)
    assert await result(plan_call(Handler())) == (Local(7), "k")
    assert await result(plan_call(Handler().method)) == Local(7)
    assert await result(plan_call(functools.partial(functools.partial(bound, "a"), flag=2))) == ("a", Local(7), 2, "k")


async def test_headers_are_found_by_their_names_and_converted() -> None:
    async def named(one: Annotated[str, Header("user")], two: Annotated[int, Header("count")]) -> object:
        return one, two

    async def by_parameter(count: Annotated[float, Header()]) -> object:
        return count

    async def absent(
        a: Annotated[int | None, Header()],
        b: Annotated[str, Header()] = "b",
        c: Annotated[Optional[float], Header()] = 0.5,  # noqa: UP045
        count: Annotated[int | None, Header()] = None,
    ) -> object:
        return a, b, c, count

    async def required(other: Annotated[str, Header()]) -> None: ...

    async def number(user: Annotated[int, Header()]) -> None: ...

    assert await result(plan_call(named)) == ("ann", 3)
    found = await result(plan_call(by_parameter))
    assert (found, type(found)) == (3.0, float)
    other_client = received()
    other_client.header = b'{"count": 1e-7}'
    assert await message_handler(by_parameter, FailureOptions())(other_client) == 1e-7
    assert await result(plan_call(absent)) == (None, "b", 0.5, 3)
    for function, reason in (
        (required, "the header 'other' is missing"),
        (number, "the header 'user' is not a number"),
    ):
        handler = message_handler(function, FailureOptions(max_attempts=2, dead_letter="dead"))
        with pytest.raises(Reject, match=reason):
            await handler(received())


async def test_a_message_that_does_not_decode_waits_where_there_are_no_dead_letters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)

    async def handle(order: Order) -> None: ...

    with pytest.raises(Requeue) as caught:
        await message_handler(handle, FailureOptions(max_requeue_delay=20.0))(received(b"{"))
    assert (caught.value.delay, caught.value.backoff) == (20.0, False)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "is requeued for 20 s: the body is not a valid Order" in caplog.text


async def test_a_body_that_is_nested_too_deeply_does_not_decode() -> None:
    """Its handler failed: all connections were paused, and it was handled again, but for max_attempts without end."""

    async def handle(order: list[Any]) -> None: ...

    with pytest.raises(Reject, match="the body is not a valid list"):
        await message_handler(handle, FailureOptions(max_attempts=2, dead_letter="dead"))(received(b"[" * 100_000))
    with pytest.raises(ValueError, match="recursion"):
        decode_body(b"[" * 100_000, list)


@pytest.mark.parametrize("kind", ["plain", "coroutine", "generator", "async generator"])
async def test_a_dependency_of_each_kind_is_called_once_for_each_message(kind: str) -> None:
    events: list[str] = []

    def plain(key: Key) -> str:
        events.append("begin")
        return f"of {key}"

    async def coroutine(key: Key) -> str:
        return plain(key)

    def generator(key: Key) -> Iterator[str]:
        yield plain(key)
        events.append("end")

    async def async_generator(key: Key) -> Any:
        yield plain(key)
        events.append("end")

    function = {f.__name__.replace("_", " "): f for f in (plain, coroutine, generator, async_generator)}[kind]

    def other(value: Annotated[str, Depends(function)]) -> str:
        return f"other {value}"

    async def one(value: Annotated[str, Depends(function)]) -> str:
        events.append("handle")
        return value

    async def two(
        order: Order, *, value: Annotated[str, Depends(function)], more: Annotated[str, Depends(other)]
    ) -> object:
        events.append("handle")
        return order, value, more

    ends = ["end"] * ("generator" in kind)
    assert await result(plan_call(one)) == "of k"
    assert events == ["begin", "handle", *ends]
    events.clear()
    assert await result(plan_call(two)) == (Order(7), "of k", "other of k")
    assert events == ["begin", "handle", *ends]


@pytest.mark.parametrize("kind", ["generator", "async generator"])
async def test_a_dependency_may_be_an_object_whose_call_is_a_generator(kind: str) -> None:
    """The handler received the generator, which never ran."""
    events: list[str] = []

    class Resource:
        def __call__(self, key: Key) -> Iterator[str]:
            yield f"of {key}"
            events.append("end")

    class AsyncResource:
        async def __call__(self, key: Key) -> Any:
            yield f"of {key}"
            events.append("end")

    resource: Callable[..., Any] = Resource() if kind == "generator" else AsyncResource()

    async def handle(value: Annotated[str, Depends(resource)]) -> str:
        events.append("handle")
        return value

    assert await result(plan_call(handle)) == "of k"
    assert events == ["handle", "end"]


async def test_the_result_of_a_dependency_is_awaited_whatever_it_is() -> None:
    class Later:
        def __await__(self) -> Generator[Any, Any, str]:
            yield from anyio.lowlevel.checkpoint().__await__()
            return "later"

    async def handle(value: Annotated[str, Depends(Later)]) -> str:
        return value

    assert await result(plan_call(handle)) == "later"


async def test_a_dependency_may_ask_for_the_message_more_than_once() -> None:
    def same(one, other) -> bool:  # type: ignore[no-untyped-def]
        return one is other

    async def handle(found: Annotated[bool, Depends(same)]) -> bool:
        return found

    assert await result(plan_call(handle)) is True


def test_handlers_that_cannot_be_called() -> None:
    async def behind(message: Message, order) -> None: ...  # type: ignore[no-untyped-def]

    async def before(first, second, message: Message) -> None: ...  # type: ignore[no-untyped-def]

    async def keywords(order: Order, **others: str) -> None: ...

    async def lists(count: Annotated[list[int], Header()]) -> None: ...

    async def union(count: Annotated[int | str, Header()]) -> None: ...

    for function, reason in (
        (behind, r"the parameter order of the handler .*behind has no annotation, and message receives the message"),
        (before, r"the parameter second of the handler .*before has no annotation, and first receives the message"),
        (keywords, r"the handler .*keywords has a parameter \*others"),
        (lists, r"the header 'count' cannot be read as list\[int\]"),
        (union, r"the header 'count' cannot be read as int \| str"),
    ):
        with pytest.raises(InvalidSetting, match=reason):
            plan_call(function)


def test_a_marker_that_has_no_effect_is_refused() -> None:
    """The handler received the marker, the body or the message."""

    def stock() -> int:
        return 1

    async def default(order: Order, count: int = Depends(stock)) -> None: ...  # type: ignore[assignment]

    async def bare(order: Order, count=Depends(stock)) -> None: ...  # type: ignore[no-untyped-def]  # noqa: B008

    async def header_default(order: Order, user: str = Header("user")) -> None: ...  # type: ignore[assignment]

    async def uncalled(user: Annotated[str, Header]) -> None: ...

    async def uncalled_depends(count: Annotated[int, Depends]) -> None: ...

    for function, name in (
        (default, "count"),
        (bare, "count"),
        (header_default, "user"),
        (uncalled, "user"),
        (uncalled_depends, "count"),
    ):
        with pytest.raises(InvalidSetting, match=rf"the marker of the parameter '{name}' of .* has no effect"):
            plan_call(function)
