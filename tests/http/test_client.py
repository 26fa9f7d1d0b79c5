"""HTTP requests from one server to another."""

from __future__ import annotations

import logging
import ssl
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from nsqext.http import client as http_client
from nsqext.http.client import HttpClient, HttpRequestFailed
from tests.support.fake_lookupd import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio

CLOSED = "http://127.0.0.1:1/auth?secret=hunter2"


@pytest.mark.parametrize("url", [CLOSED, CLOSED.replace("http:", "https:")])
async def test_the_loop_runs_while_httpcore_and_certificates_are_loaded(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, loaded = threading.Event(), []

    def load(*_: object) -> ssl.SSLContext:
        assert served.wait(20), "the loop was blocked"
        loaded.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return loaded[-1]

    if url == CLOSED:
        monkeypatch.setattr(http_client, "sys", SimpleNamespace(modules={}))
        monkeypatch.setattr(http_client, "load_httpcore", load)
    monkeypatch.setattr(http_client, "system_certificates", load)
    client = HttpClient(5)

    async def ask() -> None:
        with pytest.raises(HttpRequestFailed):
            await client.request("GET", url)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        served.set()
    assert len(loaded) == 1
    await client.aclose()


async def test_a_client_that_is_closed_while_httpcore_is_loaded_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It connected after the close, and nothing closed the connection."""
    may_end = threading.Event()
    monkeypatch.setattr(http_client, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(http_client, "load_httpcore", lambda: may_end.wait(20))
    client = HttpClient(5)

    async def ask() -> None:
        with pytest.raises(HttpRequestFailed) as failed:
            await client.request("GET", CLOSED)
        assert (failed.value.reason, failed.value.sent) == ("closed", False)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        await client.aclose()
        may_end.set()


async def test_a_request_of_a_closed_client_is_not_sent() -> None:
    client = HttpClient(5)
    await client.aclose()
    with pytest.raises(HttpRequestFailed) as caught:
        await client.request("GET", CLOSED)
    assert (caught.value.reason, caught.value.sent) == ("closed", False)


@pytest.mark.parametrize("url", [CLOSED, "http://[bad/?secret=hunter2", "nothing://?secret=hunter2"])
async def test_a_failed_request_names_no_secret(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = HttpClient(5)
    with pytest.raises(HttpRequestFailed) as failed:
        await client.request("GET", url)
    await client.aclose()
    assert "hunter2" not in f"{failed.value!r} {caplog.text}"


async def _close_after_request(stream: SocketStream) -> None:
    await stream.receive()


async def test_a_failed_request_says_whether_it_may_have_been_sent() -> None:
    client, sent = HttpClient(5), list[bool]()
    async with serving(_close_after_request) as address:
        for url in (f"http://{address}/pub", CLOSED, "http://[bad/"):
            with pytest.raises(HttpRequestFailed) as failed:
                await client.request("POST", url, content=b"x")
            sent.append(failed.value.sent)
    await client.aclose()
    assert sent == [True, False, False]


class _Body(httpx.AsyncByteStream):
    """The body of a response: parts, then maybe an error."""

    def __init__(self, *parts: bytes, error: Exception | None = None) -> None:
        self._parts = parts
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize(
    ("error", "reason", "sent"),
    [
        (httpx.ConnectError("refused"), "unreachable", False),
        (httpx.WriteError("broken pipe"), "unreachable", True),
        (httpx.ReadError("reset"), "unreachable", True),
        (httpx.ReadTimeout("slow"), "unreachable", True),
        (httpx.RemoteProtocolError("Server disconnected"), "unreachable", True),
        (httpx.RemoteProtocolError("illegal status line"), "not HTTP", True),
        (httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED]"), "untrusted", False),
    ],
)
async def test_an_error_says_why_and_whether_the_request_was_sent(error: Exception, reason: str, sent: bool) -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/head":
            raise error
        return httpx.Response(200, stream=_Body(b"x", error=error))

    client = HttpClient(5, transport=httpx.MockTransport(respond))
    for path in ("head", "body"):
        with pytest.raises(HttpRequestFailed) as failed:
            await client.request("GET", f"http://n1/{path}")
        assert (failed.value.reason, failed.value.sent) == (reason, sent), path


async def test_a_body_without_a_length_is_bounded_and_earlier_bodies_do_not_count() -> None:
    bodies = {"/fits": (b"x" * 6, b"x" * 4), "/long": (b"x" * 6, b"x" * 6)}
    client = HttpClient(
        5,
        most=10,
        transport=httpx.MockTransport(lambda request: httpx.Response(200, stream=_Body(*bodies[request.url.path]))),
    )
    for _ in range(5):
        assert (await client.request("GET", "http://n1/fits")).content == b"x" * 10
    with pytest.raises(HttpRequestFailed, match="longer than 10 bytes"):
        await client.request("GET", "http://n1/long")


async def test_a_body_may_be_named_as_not_compressed() -> None:
    client = HttpClient(
        5,
        transport=httpx.MockTransport(
            lambda request: httpx.Response(
                200, headers={"Content-Encoding": request.url.path[1:]}, stream=httpx.ByteStream(b"x")
            )
        ),
    )
    assert (await client.request("GET", "http://n1/identity")).content == b"x"
    with pytest.raises(HttpRequestFailed, match="the response is compressed"):
        await client.request("GET", "http://n1/gzip")


def test_trio_can_be_imported_after_httpcore_was_imported_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trio", raising=False)
    seen: list[object] = []
    monkeypatch.setattr(http_client, "import_module", lambda name: seen.append((name, sys.modules.get("trio", 0))))
    http_client.load_httpcore(only_asyncio=True)
    assert seen == [("httpcore", None)]
    assert "trio" not in sys.modules


async def test_the_first_requests_over_tls_share_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[object] = []

    class Transport:
        async def send(self, *_: object) -> None:
            used.append(self)
            raise ValueError

        async def aclose(self) -> None: ...

    monkeypatch.setattr(http_client, "_make_transport", lambda context: Transport())
    client = HttpClient(5)

    async def ask() -> None:
        with pytest.raises(HttpRequestFailed):
            await client.request("GET", "https://n1/")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        tasks.start_soon(ask)
    assert len(used) == 2
    assert len(set(used)) == 1
