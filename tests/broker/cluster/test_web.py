"""The two answer forms, wrong routes, and a server that comes and goes."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

from nsqext.broker.listening import listen
from nsqext.broker.serving import HttpServer
from nsqext.broker.web import Call, Form, HttpFault, application, route

V1 = {"Accept": "application/vnd.nsq; version=1.0"}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The cluster's own loop is asyncio's."""
    return "asyncio"


def refuse(call: Call) -> object:
    raise HttpFault(404, f'no "{call.arg("name", "MISSING_ARG_NAME")}"')


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
        route("GET", "/config/{opt}", lambda call: call.path["opt"]),
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
        assert (await http.post("/nothing/")).status_code == 307


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
async def test_a_gate_holds_requests_back() -> None:
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


def test_listen_refuses_a_taken_port() -> None:
    with listen("127.0.0.1:0") as taken, pytest.raises(OSError, match=r"in use"):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")
