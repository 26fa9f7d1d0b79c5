"""One question over real sockets: every way in which it can fail ends in time and says what came."""

from __future__ import annotations

import gc
import gzip
from typing import TYPE_CHECKING

import anyio
import httpx
import pytest

from nsqext.errors import InvalidState, LookupFailed
from nsqext.lookup.http import LookupHttp
from nsqext.lookup.options import LookupOptions
from nsqext.types import Address
from tests.support.fake_lookupd import Handler, answering, http, serving

if TYPE_CHECKING:
    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio
HURRIED = LookupOptions(request_timeout=0.2)


async def ask(address: Address, options: LookupOptions | None = None) -> object:
    """Ask one question with a client of its own."""
    client = LookupHttp(options or LookupOptions())
    try:
        return await client.ask(address, "/lookup", {"topic": "a#ephemeral"})
    finally:
        await client.aclose()


async def test_an_answer_and_the_question() -> None:
    asked: list[bytes] = []

    async def handle(stream: SocketStream) -> None:
        asked.append(await stream.receive())
        await stream.send(http(b'{"channels":[]}'))

    async with serving(handle) as address:
        assert await ask(address) == {"channels": []}
    head = asked[0].decode().split("\r\n")
    assert head[0] == "GET /lookup?topic=a%23ephemeral HTTP/1.1"
    assert "Accept: application/vnd.nsq; version=1.0" in head
    assert "Accept-Encoding: identity" in head


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"\x00\x00\x00\x12\x00\x00\x00\x01E_BAD_PROTOCOL", "does not speak HTTP.*nsqlookupd's HTTP side"),
        (b"", "no answer: Server disconnected"),
        (http(b"<html>Hello</html>"), "b'<html>Hello</html>'.*nsqlookupd's HTTP side"),
        (http(b"", "Location: http://elsewhere/", status="302 Found"), "answers 302"),
        (http(gzip.compress(b"{}", mtime=0), "Content-Encoding: gzip"), "compressed, which was not asked for"),
        (http(b" " * 2000), "longer than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b" " * 300_000, "longer than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "no answer"),
    ],
)
async def test_answers_that_cannot_be_used(payload: bytes, text: str) -> None:
    async with serving(answering(payload)) as address:
        with pytest.raises(LookupFailed, match=text) as caught:
            await ask(address, LookupOptions(max_answer_size=1000))
        assert caught.value.node == str(address)


async def _hang(stream: SocketStream) -> None:
    await anyio.sleep_forever()


async def _drip(stream: SocketStream) -> None:
    await stream.receive()
    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        await stream.send(b" ")
        await anyio.sleep(0.01)


@pytest.mark.parametrize("handler", [_hang, _drip])
async def test_slow_answers_are_given_up(handler: Handler) -> None:
    async with serving(handler) as address:
        with anyio.fail_after(5), pytest.raises(LookupFailed, match=r"no answer within 0\.2 s"):
            await ask(address, HURRIED)


async def test_nobody_listens(nobody: Address) -> None:
    with pytest.raises(LookupFailed, match=r"no answer: .*is the node up"):
        await ask(nobody)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64])
async def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(LookupFailed, match="no answer"):
        await ask(Address(host, 4161), HURRIED)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch, nobody: Address) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{nobody}")
    async with serving(answering(http(b"{}"))) as address:
        assert await ask(address) == {}


async def test_cancelling_leaves_nothing_open() -> None:
    async with serving(_hang) as address:
        client = LookupHttp(LookupOptions())
        with anyio.move_on_after(0.05) as scope:
            await client.ask(address, "/lookup", {})
        assert scope.cancelled_caught
        await client.aclose()
        gc.collect()


async def test_after_closing_nothing_is_asked() -> None:
    client = LookupHttp(LookupOptions())
    await client.aclose()
    await client.aclose()
    with pytest.raises(InvalidState, match="closed"):
        await client.ask(Address("127.0.0.1", 1), "/lookup", {})


async def test_a_given_client_is_used_and_not_closed() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"path": request.url.path}))
    async with httpx.AsyncClient(transport=transport) as given:
        client = LookupHttp(LookupOptions(), given)
        assert await client.ask(Address("n", 1), "/topics", {}) == {"path": "/topics"}
        await client.aclose()
        assert not given.is_closed
    with pytest.raises(InvalidState):
        await LookupHttp(LookupOptions(), given).ask(Address("n", 1), "/topics", {})


async def test_a_secret_is_sent_as_bearer_token() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as given:
        for options in (LookupOptions(auth_secret="hush"), LookupOptions()):
            await LookupHttp(options, given).ask(Address("n", 1), "/lookup", {})
    assert asked[0].headers["Authorization"] == "Bearer hush"
    assert "Authorization" not in asked[1].headers
    assert "hush" not in repr(LookupOptions(auth_secret="hush"))


async def test_a_body_is_sent_along() -> None:
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, content=request.method.encode() + request.read())
    )
    async with httpx.AsyncClient(transport=transport) as given:
        client = LookupHttp(LookupOptions(), given)
        assert await client.fetch(Address("n", 1), "/x", {}, "POST", b"data") == (200, b"POSTdata")
        assert await client.fetch(Address("n", 1), "/x", {}) == (200, b"GET")
