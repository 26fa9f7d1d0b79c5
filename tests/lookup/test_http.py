"""One request over real sockets: every failure ends in time and names its reason."""

from __future__ import annotations

import gc
import gzip
import logging
import ssl
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
import trustme
from anyio.streams.tls import TLSStream

from nsqext.errors import ConnectionFailed, InvalidState, LookupFailed, LookupUnreachable, NotLookupd
from nsqext.lookup.options import LookupOptions, LookupUrl
from nsqext.lookup.responses import LookupHttp
from nsqext.types import Address
from tests.support.fake_lookupd import Handler, answering, eventually, http, serving

if TYPE_CHECKING:
    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio
HURRIED = LookupOptions(request_timeout=0.2)


async def ask(address: Address, options: LookupOptions | None = None) -> object:
    """Send one request with a new client."""
    client = LookupHttp(options or LookupOptions())
    try:
        return await client.ask(address, "/lookup", {"topic": "a#ephemeral"})
    finally:
        await client.aclose()


async def test_a_request_and_its_response() -> None:
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
        (b"\x00\x00\x00\x12\x00\x00\x00\x01E_BAD_PROTOCOL", "the response is not HTTP.*nsqlookupd's HTTP side"),
        (b"", "no response: Server disconnected"),
        (http(b"<html>Hello</html>"), "b'<html>Hello</html>'.*nsqlookupd's HTTP side"),
        (http(b"", "Location: http://elsewhere/", status="302 Found"), "responded 302"),
        (http(gzip.compress(b"{}", mtime=0), "Content-Encoding: gzip"), "compressed, which was not requested"),
        (http(b" " * 2000), "longer than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b" " * 300_000, "longer than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "no response"),
    ],
)
async def test_unusable_responses(payload: bytes, text: str) -> None:
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
async def test_slow_responses_time_out(handler: Handler) -> None:
    async with serving(handler) as address:
        with anyio.fail_after(25), pytest.raises(LookupFailed, match=r"no response within 0\.2 s"):
            await ask(address, HURRIED)


async def test_a_refused_connection(closed_address: Address) -> None:
    with pytest.raises(LookupFailed, match=r"no response: .*check that the node runs"):
        await ask(closed_address)


async def test_a_connection_that_is_reset_while_it_is_made() -> None:
    """uvloop's transport has no socket any more by the time anyio asks the socket for the peer's address."""

    def respond(request: httpx.Request) -> httpx.Response:
        gone: Any = None
        gone.getpeername()
        raise AssertionError

    with pytest.raises(LookupUnreachable, match="the connection was reset"):
        await LookupHttp(LookupOptions(), httpx.MockTransport(respond)).ask(Address("n", 1), "/lookup", {})


async def test_a_bug_of_a_transport_is_not_a_failed_lookup() -> None:
    def respond(request: httpx.Request) -> httpx.Response:
        bug: Any = request
        return httpx.Response(bug.no_such_member)

    with pytest.raises(AttributeError, match="no_such_member"):
        await LookupHttp(LookupOptions(), httpx.MockTransport(respond)).ask(Address("n", 1), "/lookup", {})


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64])
async def test_unknown_hosts(host: str) -> None:
    with pytest.raises(LookupFailed, match="no response"):
        await ask(Address(host, 4161), HURRIED)


async def test_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, closed_address: Address
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://{closed_address}")
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


async def test_after_closing_no_request_is_sent() -> None:
    client = LookupHttp(LookupOptions())
    await client.aclose()
    await client.aclose()
    with pytest.raises(InvalidState, match="closed"):
        await client.ask(Address("127.0.0.1", 1), "/lookup", {})


class _Transport(httpx.MockTransport):
    closed = False

    async def aclose(self) -> None:
        self.closed = True


async def test_a_given_transport_is_used_and_not_closed() -> None:
    transport = _Transport(lambda request: httpx.Response(200, json={"path": request.url.path}))
    client = LookupHttp(LookupOptions(), transport)
    assert await client.ask(Address("n", 1), "/topics", {}) == {"path": "/topics"}
    assert await client.ask(LookupUrl("n", 1, "https", "/nsq"), "/topics", {}) == {"path": "/nsq/topics"}
    await client.aclose()
    assert not transport.closed


@pytest.mark.parametrize("kind", [httpx.ReadTimeout, httpx.CloseError, httpx.TransportError, httpx.RemoteProtocolError])
async def test_errors_of_a_given_transport(kind: type[httpx.TransportError]) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise kind("on purpose")

    with pytest.raises(LookupFailed):
        await LookupHttp(LookupOptions(), httpx.MockTransport(fail)).ask(Address("n", 1), "/lookup", {})


async def test_the_secret_is_a_bearer_token() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json={})

    async def authorization(address: Address, **options: Any) -> str | None:
        await LookupHttp(LookupOptions(**options), httpx.MockTransport(answer)).ask(address, "/lookup", {})
        found: str | None = requests[-1].headers.get("Authorization")
        return found

    assert await authorization(Address("127.0.0.1", 1), auth_secret="hush") == "Bearer hush"
    assert await authorization(LookupUrl("n", 1), auth_secret="hush") == "Bearer hush"
    assert await authorization(Address("n", 1), auth_secret="hush", auth_over_http=True) == "Bearer hush"
    assert await authorization(Address("n", 1), auth_secret="hush") is None
    assert await authorization(Address("127.0.0.1", 1)) is None
    assert "hush" not in repr(LookupOptions(auth_secret="hush"))


async def test_a_body_is_sent() -> None:
    client = LookupHttp(
        LookupOptions(),
        httpx.MockTransport(lambda request: httpx.Response(200, content=request.method.encode() + request.read())),
    )
    assert await client.fetch(Address("n", 1), "/x", {}, "POST", b"data") == (200, b"POSTdata")
    assert await client.fetch(Address("n", 1), "/x", {}) == (200, b"GET")


async def test_requests_are_not_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(answering(http(b"{}"))) as address:
        await ask(address, LookupOptions(auth_secret="hush"))
    assert caplog.records == []


async def test_https_with_a_path_prefix_and_a_ca(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    heads: list[bytes] = []

    async def handle(stream: SocketStream) -> None:
        with suppress(ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream):
            tls = await TLSStream.wrap(stream, server_side=True, ssl_context=context, standard_compatible=False)
            heads.append(await tls.receive())
            await tls.send(http(b'{"channels":[]}'))

    async with serving(handle) as plain:
        address = LookupUrl(plain.host, plain.port, "https", "/nsq")
        assert await ask(address, LookupOptions(ca=str(tmp_path / "ca.pem"), auth_secret="hush")) == {"channels": []}
        assert heads[0].startswith(b"GET /nsq/lookup?topic=a%23ephemeral HTTP/1.1\r\n")
        assert b"Authorization: Bearer hush" in heads[0]
        with pytest.raises(NotLookupd, match=r"certificate is not trusted: .*: give the CA certificates"):
            await ask(address)
    assert len(heads) == 1


async def test_responses_that_are_received_at_the_same_time_share_a_bound() -> None:
    """Each of them has an accepted size, but together they exceed the bound."""
    head, rest = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\n{" + b" " * 900, b" " * 98 + b"}"
    received, refused, finish = 0, 0, anyio.Event()

    async def handle(stream: SocketStream) -> None:
        """Leave the first four responses incomplete until the others have been refused."""
        nonlocal received
        await stream.receive()
        received += 1
        if received <= 4:
            await stream.send(head)
            await finish.wait()
            await stream.send(rest)
        else:
            await eventually(lambda: client._client._buffered > 3600)
            await stream.send(head + rest)

    client = LookupHttp(LookupOptions(max_answer_size=1000))

    async def ask_one(address: Address) -> None:
        nonlocal refused
        try:
            assert await client.ask(address, "/lookup", {}) == {}
        except LookupFailed as error:
            assert "at the same time are longer than 4000 bytes together" in error.message
            refused += 1

    def others_refused() -> bool:
        return refused == 4

    async with serving(handle) as address:
        for _ in range(2):  # the first round leaves no connection open
            received, refused, finish = 0, 0, anyio.Event()
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(ask_one, address)
                await eventually(others_refused)
                finish.set()
            assert refused == 4
    await client.aclose()


async def test_a_response_that_is_not_http_is_quoted_in_part() -> None:
    async with serving(answering(b"x" * 50_000 + b"\r\n\r\n")) as address:
        with pytest.raises(LookupFailed, match="the response is not HTTP") as caught:
            await ask(address)
    assert len(str(caught.value)) < 1000


async def test_the_http_side_of_a_node_without_a_usable_response(closed_address: Address) -> None:
    client = LookupHttp(LookupOptions())
    packed = http(gzip.compress(b"{}", mtime=0), "Content-Encoding: gzip")
    async with serving(answering(packed)) as other:
        for address, hint in (
            (closed_address, "check that the node runs"),
            (other, "check that the node's HTTP side can be reached"),
        ):
            with pytest.raises(ConnectionFailed, match="no response to /stats: ") as caught:
                await client.fetch_node(address, "/stats", {}, failure=ConnectionFailed)
            assert (caught.value.node, caught.value.hint) == (str(address), hint)
    await client.aclose()
