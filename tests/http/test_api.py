"""The HTTP application of a server: both forms of answers, wrong routes, bounded bodies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from nsqext.http.api import Call, Form, HttpFault, HttpPanic, application, at_first_request, first_values, route
from nsqext.http.uvicorn_server import HttpServer, listen
from nsqext.types import Address
from tests.support.nsqd_sessions import V1

if TYPE_CHECKING:
    from starlette.applications import Starlette

pytestmark = pytest.mark.anyio

_JSON, _PLAIN, _FORM = "application/json; charset=utf-8", "text/plain; charset=utf-8", "nsq; version=1.0"


@pytest.fixture
def anyio_backend() -> str:
    """The servers run on asyncio."""
    return "asyncio"


def refuse(call: Call) -> object:
    raise HttpFault(404, f'no "{call.arg("name", "MISSING_ARG_NAME")}"')


def panic(call: Call) -> object:
    raise HttpPanic


def broken(call: Call) -> str:
    raise RuntimeError("broken")


async def echo(call: Call) -> object:
    return {"body": (await call.body(100_000, "TOO_BIG")).decode(), "mark": "<&>"}


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
        route("GET", "/broken", broken, Form.NEGOTIATED),
        route("GET", "/config/{opt}", lambda call: call.path["opt"]),
        route("PUT", "/config/{opt}", lambda call: None),
    ]
)


@asynccontextmanager
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(APP, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://broker") as made:
        yield made


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "text", "kind", "form"),
    [
        ("GET", "/ping", {}, 200, "OK", _PLAIN, None),
        ("GET", "/value", {}, 200, '{"status_code":200,"status_txt":"OK","data":{"a":1}}', _JSON, None),
        ("GET", "/value", V1, 200, '{"a":1}', _JSON, _FORM),
        ("GET", "/text", {}, 200, "OK", _PLAIN, None),
        ("GET", "/text", V1, 200, "OK", _PLAIN, _FORM),
        ("GET", "/fail?name=x", {}, 500, '{"status_code":500,"status_txt":"no \\"x\\"","data":null}', _JSON, None),
        ("GET", "/fail?name=x", V1, 404, '{"message":"no "x""}', _JSON, _FORM),
        ("POST", "/fail1", {}, 400, '{"message":"MISSING_ARG_NAME"}', _JSON, _FORM),
        ("POST", "/fail1?name=%zz", {}, 400, '{"message":"INVALID_REQUEST"}', _JSON, _FORM),
        ("POST", "/fail1?a;b", {}, 400, '{"message":"INVALID_REQUEST"}', _JSON, _FORM),
        ("POST", "/nothing", {}, 200, "", None, _FORM),
        ("POST", "/echo", {}, 200, '{"body":"","mark":"\\u003c\\u0026\\u003e"}', _JSON, _FORM),
        ("GET", "/config/x", {}, 200, "x", _PLAIN, _FORM),
        ("GET", "/none", {}, 404, '{"message":"NOT_FOUND"}', _JSON, _FORM),
        ("POST", "/ping", {}, 405, '{"message":"METHOD_NOT_ALLOWED"}', _JSON, _FORM),
        ("HEAD", "/ping", {}, 405, "", _JSON, _FORM),
        ("OPTIONS", "/ping", {}, 200, "", None, None),
        ("GET", "/panic", {}, 500, '{"message":"INTERNAL_ERROR"}', _JSON, _FORM),
        ("GET", "/broken", {}, 500, '{"message":"INTERNAL_ERROR"}', _JSON, _FORM),
    ],
)
async def test_answers(
    method: str, path: str, headers: dict[str, str], status: int, text: str, kind: str | None, form: str | None
) -> None:
    async with client() as http:
        answer = await http.request(method, path, headers=headers)
    assert (answer.status_code, answer.text if method != "HEAD" else "") == (status, text)
    assert (answer.headers.get("content-type"), answer.headers.get("x-nsq-content-type")) == (kind, form)


@pytest.mark.parametrize(
    ("path", "methods"), [("/echo", "POST, OPTIONS"), ("/config/x", "GET, PUT, OPTIONS"), ("/ping", "GET, OPTIONS")]
)
async def test_a_wrong_method_gets_the_allowed_ones(path: str, methods: str) -> None:
    async with client() as http:
        answers = [await http.request(method, path) for method in ("DELETE", "OPTIONS")]
    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [(405, methods), (200, methods)]


@pytest.mark.parametrize(
    ("method", "path", "status", "location"),
    [
        ("GET", "/Value/?a=1", 301, "/value?a=1"),
        ("GET", "/value/?a=%3C'&", 301, "/value?a=%3C'&"),
        ("GET", "/config/x/", 301, "/config/x"),
        ("GET", "/CONFIG/Opt", 301, "/config/Opt"),
        ("GET", "//ping", 301, "/ping"),
        ("GET", "/./value", 301, "/value"),
        ("GET", "/a/../value", 301, "/value"),
        ("GET", "/../value//", 301, "/value"),
        ("GET", "/config/%2e%2e/ping", 301, "/ping"),
        ("POST", "/nothing/", 307, "/nothing"),
        ("POST", "/ping/", 404, None),
        ("POST", "/value/", 404, None),
        ("GET", "/nothing/", 404, None),
        ("GET", "/config/", 404, None),
        ("GET", "/config/a/b", 404, None),
        ("HEAD", "/PING", 404, None),
        ("HEAD", "/value/", 404, None),
        ("OPTIONS", "*", 200, None),
        ("GET", "*", 404, None),
    ],
)
async def test_wrong_paths_are_redirected_to_a_route_of_the_same_method(
    method: str, path: str, status: int, location: str | None
) -> None:
    """The path is sent unchanged."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    raw, _, query = path.partition("?")
    scope = {"type": "http", "method": method, "path": raw.replace("%2e", "."), "raw_path": raw.encode()}
    await APP(scope | {"query_string": query.encode(), "headers": []}, receive, send)
    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], headers.get(b"location")) == (status, location and location.encode())
    body = b"".join(message.get("body", b"") for message in sent)
    if status == 301:
        escaped = (location or "").replace("&", "&amp;").replace("'", "&#39;")
        assert body.decode() == f'<a href="{escaped}">Moved Permanently</a>.\n\n'
        assert headers[b"content-type"] == b"text/html; charset=utf-8"
    elif status == 307:
        assert (body, headers.get(b"content-type")) == (b"", None)


async def test_a_body_without_an_end_is_refused_at_its_limit() -> None:
    listener = listen(Address("127.0.0.1", 0))
    address, server = listener.getsockname(), HttpServer(APP)
    async with anyio.create_task_group() as tasks, httpx.AsyncClient() as http:
        await tasks.start(server.serve, listener)
        url = f"http://127.0.0.1:{address[1]}/echo"
        assert len((await http.post(url, content=b"x" * 100_000)).json()["body"]) == 100_000
        answer = await http.post(url, content=b"x" * 100_001)
        assert (answer.status_code, answer.json()) == (413, {"message": "TOO_BIG"})
        async with await anyio.connect_tcp(*address) as stream:
            await stream.send(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            for _ in range(3):
                await stream.send(b"c350\r\n" + b"x" * 50_000 + b"\r\n")
            with anyio.fail_after(25):
                assert (await stream.receive()).startswith(b"HTTP/1.1 413 ")
        server.kill()


async def test_the_first_value_of_a_name_counts() -> None:
    assert first_values("a=1&b=&a=2") == {"a": "1", "b": ""}


async def test_an_application_is_made_once_by_its_first_request() -> None:
    made: list[Starlette] = []

    def make() -> Starlette:
        made.append(APP)
        return made[-1]

    app = at_first_request(make)
    assert made == []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as http:
        assert [(await http.get("/ping")).text for _ in range(2)] == ["OK", "OK"]
    assert len(made) == 1
