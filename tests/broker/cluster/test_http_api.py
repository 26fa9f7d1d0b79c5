"""Both response formats, unknown routes, and restarts of the server."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from nsqext.broker.listeners import listen
from nsqext.http.api import Call, Form, HttpFault, HttpPanic, application, route
from nsqext.http.uvicorn_server import HttpGuard, HttpServer

V1 = {"Accept": "application/vnd.nsq; version=1.0"}


def refuse(call: Call) -> object:
    raise HttpFault(404, f'no "{call.arg("name", "MISSING_ARG_NAME")}"')


def panic(call: Call) -> object:
    raise HttpPanic


async def echo(call: Call) -> object:
    return {"body": (await call.body()).decode(), "mark": "<&>"}


APP = application(
    [
        route("GET", "/ping", lambda call: "OK", Form.TEXT),
        route("GET", "/value", lambda call: {"a": 1}, Form.NEGOTIATED),
        route("GET", "/text", lambda call: "OK", Form.NEGOTIATED),
        route("GET", "/fail", refuse, Form.NEGOTIATED),
        route("POST", "/nothing", lambda call: None),
        route("POST", "/fail1", refuse),
        route("POST", "/echo", echo),
        route("GET", "/panic", panic, Form.NEGOTIATED),
        route("GET", "/config/{opt}", lambda call: call.path["opt"]),
        route("PUT", "/config/{opt}", lambda call: None),
    ]
)


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://broker") as made:
        yield made


CASES = [
    ("GET", "/ping", {}, 200, "OK", "text/plain; charset=utf-8", None),
    (
        "GET",
        "/value",
        {},
        200,
        '{"status_code":200,"status_txt":"OK","data":{"a":1}}',
        "application/json; charset=utf-8",
        None,
    ),
    ("GET", "/value", V1, 200, '{"a":1}', "application/json; charset=utf-8", "nsq; version=1.0"),
    ("GET", "/text", {}, 200, "OK", "text/plain; charset=utf-8", None),
    ("GET", "/text", V1, 200, "OK", "text/plain; charset=utf-8", "nsq; version=1.0"),
    (
        "GET",
        "/fail?name=x",
        {},
        500,
        '{"status_code":500,"status_txt":"no \\"x\\"","data":null}',
        "application/json; charset=utf-8",
        None,
    ),
    ("GET", "/fail?name=x", V1, 404, '{"message":"no "x""}', "application/json; charset=utf-8", "nsq; version=1.0"),
    (
        "POST",
        "/fail1",
        {},
        400,
        '{"message":"MISSING_ARG_NAME"}',
        "application/json; charset=utf-8",
        "nsq; version=1.0",
    ),
    (
        "POST",
        "/fail1?name=%zz",
        {},
        400,
        '{"message":"INVALID_REQUEST"}',
        "application/json; charset=utf-8",
        "nsq; version=1.0",
    ),
    (
        "POST",
        "/fail1?a;b",
        {},
        400,
        '{"message":"INVALID_REQUEST"}',
        "application/json; charset=utf-8",
        "nsq; version=1.0",
    ),
    ("POST", "/nothing", {}, 200, "", None, "nsq; version=1.0"),
    ("GET", "/config/x", {}, 200, "x", "text/plain; charset=utf-8", "nsq; version=1.0"),
    ("GET", "/none", {}, 404, '{"message":"NOT_FOUND"}', "application/json; charset=utf-8", "nsq; version=1.0"),
    (
        "POST",
        "/ping",
        {},
        405,
        '{"message":"METHOD_NOT_ALLOWED"}',
        "application/json; charset=utf-8",
        "nsq; version=1.0",
    ),
    ("HEAD", "/ping", {}, 405, None, "application/json; charset=utf-8", "nsq; version=1.0"),
    ("OPTIONS", "/ping", {}, 200, "", None, None),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path", "headers", "status", "text", "kind", "mark"), CASES)
async def test_answers(
    method: str, path: str, headers: dict[str, str], status: int, text: str | None, kind: str | None, mark: str | None
) -> None:
    async with client() as http:
        answer = await http.request(method, path, headers=headers)
    assert answer.status_code == status
    if text is not None:
        assert answer.text == text
    assert answer.headers.get("content-type") == kind
    assert answer.headers.get("x-nsq-content-type") == mark


@pytest.mark.anyio
async def test_wrong_case_and_trailing_slash_are_redirected() -> None:
    async with client() as http:
        answer = await http.get("/Value/?a=1")
        assert (answer.status_code, answer.headers["location"]) == (301, "/value?a=1")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.text == '<a href="/value?a=1">Moved Permanently</a>.\n\n'
        answer = await http.post("/nothing/")
        assert (answer.status_code, answer.text, answer.headers.get("content-type")) == (307, "", None)
        assert (await http.get("/CONFIG/Some/")).headers["location"] == "/config/Some"
        assert (await http.get("/value/?a=<'&")).text.startswith('<a href="/value?a=%3C&#39;&amp;">')


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "methods"), [("/echo", "POST, OPTIONS"), ("/config/x", "GET, PUT, OPTIONS"), ("/ping", "GET, OPTIONS")]
)
async def test_a_wrong_method_gets_the_allowed_ones(path: str, methods: str) -> None:
    async with client() as http:
        answers = [await http.request(method, path) for method in ("DELETE", "OPTIONS")]
    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [(405, methods), (200, methods)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/value/"), ("HEAD", "/value/"), ("GET", "/config/"), ("GET", "/config/a/b")]
)
async def test_a_path_is_redirected_only_to_a_route_of_the_same_method(method: str, path: str) -> None:
    async with client() as http:
        assert (await http.request(method, path)).status_code == 404


async def ask(method: str, path: str) -> tuple[int, str | None]:
    """Return status and location of a response; the path is sent unchanged."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    await APP(scope, receive, send)
    location = dict(sent[0]["headers"]).get(b"location")
    return sent[0]["status"], location.decode() if location else None


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["//value", "/./value", "/a/../value", "/../value//"])
async def test_empty_parts_and_dots_of_a_path_are_redirected(path: str) -> None:
    assert await ask("GET", path) == (301, "/value")


@pytest.mark.anyio
async def test_options_of_the_server() -> None:
    assert await ask("OPTIONS", "*") == (200, None)
    assert (await ask("GET", "*"))[0] == 404


@pytest.mark.anyio
async def test_requests_that_crash_the_real_handler_get_the_second_format() -> None:
    async with client() as http:
        answer = await http.get("/panic")
    assert (answer.status_code, answer.text) == (500, '{"message":"INTERNAL_ERROR"}')
    assert answer.headers["x-nsq-content-type"] == "nsq; version=1.0"


REDIRECTS = [
    ("GET", "/Value/?a=1", 301, "/value?a=1"),
    ("GET", "/config/x/", 301, "/config/x"),
    ("GET", "/CONFIG/Opt", 301, "/config/Opt"),
    ("GET", "//ping", 301, "/ping"),
    ("GET", "/config/%2e%2e/ping", 301, "/ping"),
    ("POST", "/nothing/", 307, "/nothing"),
    ("POST", "/ping/", 404, None),
    ("GET", "/nothing/", 404, None),
    ("GET", "/config/", 404, None),
    ("HEAD", "/PING", 404, None),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "path", "status", "location"), REDIRECTS)
async def test_wrong_paths_are_redirected_to_a_route_of_the_same_method(
    method: str, path: str, status: int, location: str | None
) -> None:
    async with client() as http:
        answer = await http.request(method, httpx.URL("http://broker", raw_path=path.encode()))
    assert (answer.status_code, answer.headers.get("location")) == (status, location)
    if status == 301:
        assert answer.text == f'<a href="{location}">Moved Permanently</a>.\n\n'
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    elif status == 307:
        assert answer.text == ""


@pytest.mark.anyio
async def test_json_escapes_as_the_servers_do() -> None:
    async with client() as http:
        answer = await http.post("/echo", content=b"hi")
    assert answer.text == '{"body":"hi","mark":"\\u003c\\u0026\\u003e"}'


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["stop", "kill", "cancel"])
async def test_a_server_ends_and_frees_its_port(how: str) -> None:
    listener = listen("127.0.0.1:0")
    host, port = listener.getsockname()
    server = HttpServer(APP)
    async with anyio.create_task_group() as group, httpx.AsyncClient(base_url=f"http://{host}:{port}") as http:
        await group.start(server.serve, listener)
        assert (await http.get("/ping")).text == "OK"
        if how == "cancel":
            group.cancel_scope.cancel()
        else:
            getattr(server, how)()
    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection((host, port), 1).close()


@pytest.mark.anyio
@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_accepted_while_the_server_closes_is_dropped(turns: int) -> None:
    listener = listen("127.0.0.1:0")
    server = HttpServer(APP)
    async with anyio.create_task_group() as group:
        await group.start(server.serve, listener)
        await anyio.wait_all_tasks_blocked()
        late = socket.create_connection(listener.getsockname())
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        server.kill()
    with late:
        late.setblocking(False)
        with anyio.fail_after(25):
            await anyio.wait_readable(late)
        with suppress(ConnectionResetError):
            assert late.recv(1) == b""


@pytest.mark.anyio
async def test_a_gate_delays_requests() -> None:
    gate = anyio.Event()
    listener = listen("127.0.0.1:0")
    server = HttpServer(APP, gate=gate.wait)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/ping"
    async with anyio.create_task_group() as group, httpx.AsyncClient() as http:
        await group.start(server.serve, listener)
        with pytest.raises(httpx.ReadTimeout):
            await http.get(url, timeout=httpx.Timeout(10, read=0.1))
        gate.set()
        assert (await http.get(url)).text == "OK"
        server.stop()


def test_listen_refuses_a_port_in_use() -> None:
    with listen("127.0.0.1:0") as taken, pytest.raises(OSError, match=r"in use"):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")


@asynccontextmanager
async def _served(app: Any, **options: Any) -> AsyncIterator[tuple[HttpServer, str]]:
    listener = listen("127.0.0.1:0")
    server = HttpServer(app, **options)
    async with anyio.create_task_group() as group:
        await group.start(server.serve, listener)
        yield server, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.kill()


@pytest.mark.anyio
async def test_a_body_without_an_end_is_refused_at_its_limit() -> None:
    async def bounded(call: Call) -> object:
        return len(await call.body(100_000, "TOO_BIG"))

    async with _served(application([route("POST", "/", bounded)])) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/", content=b"x" * 100_000)).text == "100000"
        answer = await http.post("/", content=b"x" * 100_001)
        assert (answer.status_code, answer.json()) == (413, {"message": "TOO_BIG"})
        async with await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2])) as stream:
            await stream.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(3):
                await stream.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
            with anyio.fail_after(25):
                assert (await stream.receive()).startswith(b"HTTP/1.1 413 ")


@pytest.mark.anyio
async def test_clients_that_disconnect_and_a_kill_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    started, release = anyio.Event(), anyio.Event()

    async def slow(call: Call) -> object:
        started.set()
        await release.wait()
        return "late"

    app = application([route("POST", "/", echo), route("GET", "/slow", slow)])
    async with _served(app) as (server, url):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
            await anyio.wait_all_tasks_blocked()
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
            with anyio.fail_after(25):
                await started.wait()
                server.kill()
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await stream.receive()
    assert caplog.text == ""


@pytest.mark.anyio
async def test_the_guard_of_a_server_refuses_foreign_pages() -> None:
    async with _served(APP, guard=HttpGuard()) as (_, url), httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/nothing")).status_code == 200
        foreign = await http.post("/nothing", headers={"Origin": "http://evil.example"})
        assert (foreign.status_code, "origin 'http://evil.example' is not" in foreign.text) == (403, True)
        assert (await http.get("/ping", headers={"Host": "evil.example"})).status_code == 403


@pytest.mark.anyio
async def test_without_file_descriptors_connections_wait_and_the_loop_does_not_spin() -> None:
    class Full:
        accepts = 0

        def accept(self) -> Any:
            self.accepts += 1
            raise OSError(errno.EMFILE, "too many open files")

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

    listener, loop = Full(), Loop()
    server = HttpServer(APP)._server
    server._listener, server._loop = listener, loop  # type: ignore[assignment]
    server._accept(listener)  # type: ignore[arg-type]
    assert (listener.accepts, loop.reading) == (1, False)
    delay, (callback, *arguments) = loop.later[0]
    assert delay >= 0.05
    callback(*arguments)
    assert loop.reading
