"""A task that waits for a response continues in the turn of the event loop that read it; cancellation works."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest

from nsqext.protocol.client.client_protocol import Reply
from nsqext.transport.event_loop import ResponseWaiter, Watch, watch_readable
from nsqext.waits import Turns, Waiters
from tests.conftest import WATCHING_LOOPS

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=list(WATCHING_LOOPS.values()), ids=list(WATCHING_LOOPS))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Event loops that keep a socket registered; others have no waiters."""
    return request.param


async def _waiting(sock: socket.socket, answer: Callable[[list[Reply]], None]) -> tuple[Watch, list[Reply]]:
    """Watch a socket; when it is readable, ``answer`` is called with the pending replies."""
    replies: list[Reply] = []

    def readable() -> None:
        sock.recv(100)
        answer(replies)

    watch = watch_readable(sock, readable)
    assert watch is not None
    return watch, replies


def _answer_all(replies: list[Reply]) -> None:
    for reply in replies:
        reply.data = b"OK"
        if reply.wake is not None:
            reply.wake()


async def test_waiters_continue_in_order_within_the_turn_that_set_them(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    seen: list[str] = []

    def answer(replies: list[Reply]) -> None:
        watch.turns.call_soon(lambda: seen.append("next turn"))
        _answer_all(replies)
        messages.wake()
        seen.append("set")

    messages = Waiters()
    watch, replies = await _waiting(near, answer)

    async def wait(name: str) -> None:
        reply = Reply()
        replies.append(reply)
        waiter = ResponseWaiter(watch.turns, reply)
        assert await waiter == b"OK"
        assert await waiter == b"OK"  # a response that was received is not waited for
        seen.append(name)

    async def handle() -> None:
        await messages.wait()
        seen.append("handler")

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, "first")
            tasks.start_soon(wait, "second")
            tasks.start_soon(handle)
            await anyio.wait_all_tasks_blocked()
            far.send(b"x")
    watch.end()
    assert seen == ["set", "first", "second", "handler", "next turn"]


async def test_with_many_sockets_only_what_waits_for_a_response_continues_in_the_same_turn(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    seen: list[str] = []

    def answer(replies: list[Reply]) -> None:
        messages.wake()
        _answer_all(replies)
        watch.turns.call_soon(lambda: seen.append("next turn"))

    messages = Waiters()
    watch, replies = await _waiting(near, answer)

    async def publish() -> None:
        replies.append(Reply())
        await ResponseWaiter(watch.turns, replies[-1])
        seen.append("response")

    async def handle() -> None:
        await messages.wait()
        seen.append("handler")

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            tasks.start_soon(handle)
            await anyio.wait_all_tasks_blocked()
            for fd in (1001, 1002, 1003):
                watch.turns.few_sockets(fd)
            far.send(b"x")
    watch.end()
    assert seen == ["response", "next turn", "handler"]


async def test_two_sockets_are_few() -> None:
    turns = Turns(cast("Any", anyio.lowlevel.current_token().native_token))
    assert [turns.few_sockets(fd) for fd in (1, 2, 1, 1, 2, 3, 2, 3, 1, 2, 3)] == [
        *(True, True, True, True, True, False, True, True, False, False, False)
    ]


async def test_a_waiter_that_is_set_continues_in_a_later_turn(pair: tuple[socket.socket, socket.socket]) -> None:
    watch, _ = await _waiting(pair[0], _answer_all)
    reply = Reply()
    seen: list[str] = []

    async def wait() -> None:
        await ResponseWaiter(watch.turns, reply)
        seen.append("waiter")

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            _answer_all([reply, reply])
            seen.append("task")
    watch.end()
    assert seen == ["task", "waiter"]


async def test_waiters_that_a_task_sets_continue_together_in_the_next_turn(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    watch, _ = await _waiting(pair[0], _answer_all)
    seen: list[str] = []

    async def wait(name: str) -> None:
        replies.append(Reply())
        await ResponseWaiter(watch.turns, replies[-1])
        seen.append(name)
        if name == "first":
            later.wake()  # a task that a woken task sets has its own turn

    async def wait_for_first() -> None:
        await later.wait()
        seen.append("later")

    replies: list[Reply] = []
    later = Waiters()
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for name in ("first", "second"):
                tasks.start_soon(wait, name)
            tasks.start_soon(wait_for_first)
            await anyio.wait_all_tasks_blocked()
            _answer_all(replies[:1])
            watch.turns.call_soon(lambda: seen.append("between"))
            _answer_all(replies[1:])
    watch.end()
    assert seen == ["first", "second", "between", "later"]


async def test_cancellation_reaches_a_waiter_and_its_scope(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    watch, _ = await _waiting(pair[0], _answer_all)
    reply = Reply()
    waiter = ResponseWaiter(watch.turns, reply)
    with anyio.fail_after(25):
        with anyio.move_on_after(0.01) as scope:
            await waiter
    assert scope.cancelled_caught
    waiter.set()  # the response is late, and no task waits for it
    assert waiter.done()
    assert waiter.cancelled()
    assert not waiter.cancel()
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    watch.end()


async def test_a_woken_waiter_may_cancel_the_next(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    watch, replies = await _waiting(near, _answer_all)
    ends: list[str] = []
    scope = anyio.CancelScope()

    async def wait(name: str) -> None:
        reply = Reply()
        replies.append(reply)
        await ResponseWaiter(watch.turns, reply)
        ends.append(name)
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        ends.append(f"{name} was not cancelled")

    with anyio.fail_after(25):
        with scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait, "first")
                tasks.start_soon(wait, "second")
                await anyio.wait_all_tasks_blocked()
                far.send(b"x")
    watch.end()
    assert scope.cancel_called
    assert not [end for end in ends if "not cancelled" in end]


async def test_an_exception_in_the_callback_delays_no_caller(pair: tuple[socket.socket, socket.socket]) -> None:
    near, _ = pair

    def readable() -> None:
        _answer_all([reply])
        raise InterruptedError("in the callback")

    watch = Watch(cast("Any", anyio.lowlevel.current_token().native_token), near.fileno(), readable)
    reply = Reply()
    went_on = anyio.Event()

    async def wait() -> None:
        await ResponseWaiter(watch.turns, reply)
        went_on.set()

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(InterruptedError):
                watch.readable()
            await went_on.wait()
