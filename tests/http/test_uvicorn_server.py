"""How an HTTP server begins, ends, and waits for file descriptors, over real sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trustme
from attrs import define, field

from nsqext.errors import InvalidSetting
from nsqext.http.api import Call, application, route
from nsqext.http.uvicorn_server import HttpGuard, HttpServer, listen
from nsqext.types import Address
from tests.support.listeners import scarce_listener

pytestmark = pytest.mark.anyio

REQUEST = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    """The servers run on asyncio."""
    return "asyncio"


@define
class Running:
    """A server whose requests wait for ``answer``."""

    address: tuple[str, int]
    server: HttpServer
    requested: anyio.Event = field(factory=anyio.Event)
    answer: anyio.Event = field(factory=anyio.Event)
    cancelled: anyio.Event = field(factory=anyio.Event)
    ended: anyio.Event = field(factory=anyio.Event)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer when the test says so."""
        self.requested.set()
        try:
            await self.answer.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"OK"})


@asynccontextmanager
async def running(
    listener: socket.socket | None = None,
    guard: HttpGuard | None = None,
    tls: ssl.SSLContext | None = None,
    gate: Callable[[], Awaitable[None]] | None = None,
    seen: Callable[[Any], None] = lambda scope: None,
) -> AsyncIterator[tuple[Running, anyio.abc.TaskGroup]]:
    """Serve until the test stops the server, or cancels the tasks."""
    listener = listener or listen(Address("127.0.0.1", 0))
    found: Running | None = None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert found is not None
        seen(scope)
        await found.app(scope, receive, send)

    found = Running(listener.getsockname(), HttpServer(app, guard=guard, tls=tls, gate=gate))

    async def serve(*, task_status: Any) -> None:
        try:
            await found.server.serve(listener, task_status=task_status)
        finally:
            found.ended.set()

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            await tasks.start(serve)
            await anyio.lowlevel.checkpoint()
            yield found, tasks
            found.server.kill()


async def rest_of(stream: anyio.abc.SocketStream) -> bytes:
    """Return what is received until the connection ends, in either way."""
    found = b""
    while True:
        try:
            found += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return found


async def answer_of(stream: anyio.abc.ByteStream) -> bytes:
    """Return an answer of the application."""
    found = b""
    while not found.endswith(b"OK"):
        found += await stream.receive()
    return found


async def test_a_server_that_stops_answers_running_requests_and_accepts_no_others() -> None:
    async with running() as (found, _):
        async with await anyio.connect_tcp(*found.address) as idle, await anyio.connect_tcp(*found.address) as stream:
            await stream.send(REQUEST)
            await found.requested.wait()
            found.server.stop()
            assert await rest_of(idle) == b"", "a connection without a request is closed at once"
            with pytest.raises(OSError, match="connect"):
                await anyio.connect_tcp(*found.address)
            found.answer.set()
            assert (await rest_of(stream)).endswith(b"OK")
        await found.ended.wait()


def stop_and_cancel(found: Running, tasks: anyio.abc.TaskGroup) -> None:
    """Cancel a server that waits for the answer of its running request."""
    found.server.stop()

    async def cancel() -> None:
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    tasks.start_soon(cancel)


@pytest.mark.parametrize(
    "end",
    [
        lambda found, _: found.server.stop(),
        lambda found, _: found.server.kill(),
        lambda _, tasks: tasks.cancel_scope.cancel(),
        stop_and_cancel,
    ],
    ids=["stop, after a second", "kill", "cancellation", "stop, and cancellation within its second"],
)
async def test_the_end_of_a_server_closes_its_connections_and_cancels_requests(
    end: Callable[[Running, anyio.abc.TaskGroup], object], caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as (found, tasks):
        stream = await anyio.connect_tcp(*found.address)
        await stream.send(REQUEST)
        await found.requested.wait()
        end(found, tasks)
        with anyio.CancelScope(shield=True), anyio.fail_after(25):
            assert await rest_of(stream) == b""
            await found.cancelled.wait()
            await found.ended.wait()
            await stream.aclose()
    assert not [record for record in caplog.records if record.exc_info], "the end is no error"


async def test_a_server_that_is_killed_accepts_nothing_from_then_on() -> None:
    async with running() as (found, _):
        found.server.kill()
        with pytest.raises(ConnectionRefusedError), socket.create_connection(found.address, 25):
            pass


async def test_requests_over_tls_name_the_address_of_their_connection_as_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    authority, clients = trustme.CA(), list[str]()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with running(tls=context, seen=lambda scope: clients.append(scope["client"][0])) as (found, _):
        found.answer.set()
        async with await anyio.connect_tcp(
            *found.address, ssl_context=trusting, tls_standard_compatible=False
        ) as stream:
            await stream.send(REQUEST.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 10.0.0.1\r\n\r\n"))
            assert (await answer_of(stream)).startswith(b"HTTP/1.1 200")
    assert clients == ["127.0.0.1"]
    assert not [record for record in caplog.records if record.name == "uvicorn.access"]


async def test_a_connection_waits_while_there_is_no_file_descriptor() -> None:
    listener = scarce_listener()
    async with running(listener) as (found, _):
        found.answer.set()
        async with await anyio.connect_tcp(*found.address) as stream:
            await stream.send(REQUEST)
            assert await answer_of(stream) == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"
    assert listener.refused == 1


async def test_a_request_waits_at_the_gate_of_a_frozen_node() -> None:
    thawed, waiting = anyio.Event(), anyio.Event()

    async def gate() -> None:
        waiting.set()
        await thawed.wait()

    async with running(gate=gate) as (found, _):
        found.answer.set()
        async with await anyio.connect_tcp(*found.address) as stream:
            await stream.send(REQUEST)
            await waiting.wait()
            await anyio.wait_all_tasks_blocked()
            assert not found.requested.is_set()
            thawed.set()
            assert (await answer_of(stream)).endswith(b"OK")


async def test_a_connection_that_is_accepted_while_the_server_is_killed_is_closed() -> None:
    class Last(socket.socket):
        """A listening socket whose first connection is accepted when the server is killed."""

        def accept(self) -> tuple[socket.socket, Any]:
            accepted = super().accept()
            accepted_socks.append(accepted[0])
            asyncio.get_running_loop().call_soon(found.server.kill)
            return accepted

    accepted_socks: list[socket.socket] = []
    listener = Last()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    async with running(listener) as (found, _):
        async with await anyio.connect_tcp(*found.address):
            await found.ended.wait()
        assert [sock.fileno() for sock in accepted_socks] == [-1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_without_file_descriptors_the_loop_does_not_spin(number: int) -> None:
    class Loop:
        def __init__(self) -> None:
            self.reading = True
            self.later: list[tuple[float, Any]] = []

        def remove_reader(self, listener: Any) -> None:
            self.reading = False

        def add_reader(self, listener: Any, *callback: Any) -> None:
            self.reading = True

        def call_later(self, delay: float, *callback: Any) -> None:
            self.later.append((delay, callback))

    loop = Loop()
    with scarce_listener() as listener:
        listener.number = number
        server = HttpServer(None)._server
        server._listener, server._loop = listener, loop
        server._accept(listener)
        assert (listener.refused, loop.reading) == (1, False)
        delay, (callback, *arguments) = loop.later[0]
        assert delay >= 0.05
        callback(*arguments)
        assert loop.reading


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_accepted_while_the_server_closes_is_dropped(turns: int) -> None:
    async with running() as (found, _):
        await anyio.wait_all_tasks_blocked()
        with socket.create_connection(found.address) as late:
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            found.server.kill()
            late.setblocking(False)
            await anyio.wait_readable(late)
            with suppress(ConnectionResetError):
                assert late.recv(1) == b""


async def test_clients_that_disconnect_within_a_body_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(application([route("POST", "/", Call.body)]))
    listener = listen(Address("127.0.0.1", 0))
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve, listener)
        with socket.create_connection(listener.getsockname()) as leaving:
            leaving.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
            await anyio.wait_all_tasks_blocked()
        server.stop()
    assert caplog.text == ""


async def test_a_guarded_server_refuses_other_hosts() -> None:
    async with running(guard=HttpGuard()) as (found, _):
        async with await anyio.connect_tcp(*found.address) as stream:
            await stream.send(REQUEST)
            answer = await stream.receive()
        assert answer.startswith(b"HTTP/1.1 403")
        assert not found.requested.is_set()


def test_a_listening_socket_never_blocks_and_a_port_in_use_is_named() -> None:
    with listen(Address("127.0.0.1", 0)) as listener:
        assert not listener.getblocking()
        with listen(Address("::1", 0)) as other:
            assert (listener.family, other.family) == (socket.AF_INET, socket.AF_INET6)
        port = listener.getsockname()[1]
        with pytest.raises(InvalidSetting, match=f"cannot listen on 127.0.0.1:{port}: .*in use.*another port, or 0"):
            listen(Address("127.0.0.1", port))
