"""Publishes over HTTP: the outcome for each kind of response, without a server, and what HTTP refuses."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import Producer, sync
from nsqext.broker import Cluster
from nsqext.client.producer import http_connection as module
from nsqext.client.producer.http_connection import HttpConnection, open_http_connection
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    DeliveryUnknown,
    InvalidSetting,
    NegotiationFailed,
    NotSent,
    NsqError,
    ProtocolError,
    RequestTimeout,
)
from nsqext.http.client import HttpReply, HttpRequestFailed
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.connections import pub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nsqext.protocol.identify import Negotiated

pytestmark = pytest.mark.anyio

_ADDRESS = Address("n", 4151)


class Client:
    """Answers each request with the next answer; waits while it is held."""

    def __init__(self, *answers: HttpReply | HttpRequestFailed) -> None:
        self.answers = list(answers)
        self.urls: list[str] = []
        self.closed = self.ended = 0
        self.hold: anyio.Event | None = None

    async def request(self, method: str, url: str, **_: Any) -> HttpReply:
        self.urls.append(f"{method} {url}")
        if self.hold is not None:
            await self.hold.wait()
        self.ended += 1
        answer = self.answers.pop(0)
        if isinstance(answer, HttpRequestFailed):
            raise answer
        return answer

    async def aclose(self) -> None:
        self.closed += 1


def _reply(content: bytes, status: int = 200) -> HttpReply:
    return HttpReply(status, content, {})


def _failure(reason: str, *, sent: bool = True, cause: BaseException | None = None) -> HttpRequestFailed:
    failure = HttpRequestFailed(cast("Any", reason), "a text", sent=sent)
    failure.__cause__ = cause
    return failure


@asynccontextmanager
async def _connected(client: Client) -> AsyncIterator[HttpConnection]:
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "HttpClient", lambda *_, **__: client)
                connection = HttpConnection(_ADDRESS, "n:4151", ConnectionOptions(), cast("Any", tasks.start_soon))
            yield connection
            tasks.cancel_scope.cancel()


async def test_the_response_to_a_publish() -> None:
    client = Client(_reply(b"OK"))
    async with _connected(client) as connection:
        announced: list[bool] = []
        connection.on_request = lambda: announced.append(connection.busy)
        connection.received_at = 0.0
        answer = connection.request(pub(b"x"), time.monotonic() + 5.0)
        assert (connection.busy, connection.in_flight, announced) == (True, 1, [False])
        assert await answer == b"OK"
        assert (connection.busy, connection.in_flight, connection.usable) == (False, 0, True)
        assert connection.received_at > 0.0
    (url,) = client.urls
    assert url.startswith("POST http://n:4151/mpub?topic=t")


@pytest.mark.parametrize(
    ("failure", "kind", "usable"),
    [
        (_failure("failed"), ConnectionLost, False),
        (_failure("failed", cause=TimeoutError()), RequestTimeout, False),
        (_failure("failed", sent=False), ConnectionFailed, False),
        (_failure("compressed"), DeliveryUnknown, True),
        (_failure("too long"), DeliveryUnknown, True),
        (_failure("untrusted", sent=False), NegotiationFailed, False),
        (_failure("invalid", sent=False), NegotiationFailed, False),
    ],
)
async def test_a_publish_without_a_response_ends_the_connection(
    failure: HttpRequestFailed, kind: type[NsqError], usable: bool
) -> None:
    client = Client(failure, _reply(b"OK"))
    async with _connected(client) as connection:
        with pytest.raises(kind, match="a text") as caught:
            await connection.request(pub(b"x"))
        assert (type(caught.value), caught.value.node) == (kind, "n:4151")
        assert connection.usable is usable
        if usable:
            assert await connection.request(pub(b"y")) == b"OK"
        else:
            with pytest.raises(NotSent, match="not sent: a text"):
                await connection.request(pub(b"y"))
            assert len(client.urls) == 1


async def test_requests_wait_for_their_turn_and_are_not_sent_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS", 2)
    client = Client(*[_reply(b"OK")] * 9)
    client.hold = anyio.Event()
    async with _connected(client) as connection:
        answers = []
        for number in range(3):
            answers.append(connection.request(pub(b"%d" % number)))
            await anyio.wait_all_tasks_blocked()
        late = connection.request(pub(b"late"), time.monotonic() + 0.01)
        await anyio.wait_all_tasks_blocked()
        assert (len(client.urls), connection.in_flight) == (2, 4)
        with pytest.raises(NotSent, match="not sent before the timeout: 2 requests are in flight"):
            await late
        client.hold.set()
        assert [await answer for answer in answers] == [b"OK"] * 3
        await connection.drain()
        assert (len(client.urls), connection.in_flight) == (3, 0)


async def test_a_caller_whose_time_is_over_learns_whether_its_publish_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REQUESTS", 2)
    client = Client(*[_reply(b"OK")] * 3)
    client.hold = anyio.Event()
    async with _connected(client) as connection:
        posted, cancelled, waits = [connection.request(pub(b"x"), time.monotonic() + 0.01) for _ in range(3)]
        early = connection.request(pub(b"early"), time.monotonic() + 30)
        await anyio.wait_all_tasks_blocked()
        await anyio.sleep(0.02)
        with pytest.raises(RequestTimeout, match="no response before the timeout"):
            await posted
        for publish in (cancelled, early):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await publish
            assert scope.cancelled_caught
        with pytest.raises(NotSent, match="2 requests are in flight"), anyio.CancelScope() as scope:
            scope.cancel()
            await waits
        client.hold.set()
        await connection.drain()
        assert len(client.urls) == 3


async def test_a_cancelled_publish_is_sent_whole() -> None:
    client = Client(_reply(b"OK"))
    client.hold = anyio.Event()
    async with _connected(client) as connection:

        async def publish() -> None:
            await connection.request(pub(b"x"))

        async with anyio.create_task_group() as callers:
            callers.start_soon(publish)
            await anyio.wait_all_tasks_blocked()
            callers.cancel_scope.cancel()
        assert (connection.in_flight, connection.usable) == (1, True)
        client.hold.set()
        await connection.drain()
        assert (client.ended, connection.in_flight) == (1, 0)


async def test_a_connection_that_is_closed_awaits_its_responses() -> None:
    client = Client(_reply(b"OK"))
    client.hold = anyio.Event()
    async with _connected(client) as connection:
        answer = connection.request(pub(b"x"))
        await anyio.wait_all_tasks_blocked()
        connection.close()
        await anyio.wait_all_tasks_blocked()
        assert (connection.usable, client.closed) == (False, 0)
        with pytest.raises(NotSent, match="the connection is closed"):
            await connection.request(pub(b"y"))
        client.hold.set()
        assert await answer == b"OK"
        await anyio.wait_all_tasks_blocked()
        assert client.closed == 1


async def test_a_request_that_is_cut_off_has_an_unknown_outcome() -> None:
    client = Client()
    client.hold = anyio.Event()
    async with anyio.create_task_group() as callers:
        errors: list[NsqError] = []

        async def publish() -> None:
            try:
                await connection.request(pub(b"x"))
            except NsqError as error:
                errors.append(error)

        async with _connected(client) as connection:
            callers.start_soon(publish)
            await anyio.wait_all_tasks_blocked()
    assert [type(error) for error in errors] == [ConnectionLost]
    assert connection.in_flight == 0


async def _opened(client: Client, **options: Any) -> tuple[HttpConnection, Negotiated]:
    """Open a connection whose requests a client of the test answers."""
    async with anyio.create_task_group() as tasks:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "HttpClient", lambda *_, **__: client)
            given = ConnectionOptions(**options), cast("Any", tasks.start_soon)
            try:
                return await open_http_connection(_ADDRESS, "n:4151", *given)
            except NsqError as error:
                failure = error
    raise failure  # alone, not in a group


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (_failure("failed"), ConnectionFailed, "a text"),
        (_failure("untrusted"), NegotiationFailed, "a text"),
        (_reply(b"<html>", 404), ProtocolError, "HTTP status 404: <html>"),
        (_reply(b"x" * 90, 404), ProtocolError, f"HTTP status 404: {'x' * 80} .node"),
        (_reply(b"[]"), ProtocolError, "HTTP status 200"),
        (_reply(b'{"a": 1}'), ProtocolError, "HTTP status 200"),
        (_reply(b"down", 500), ConnectionFailed, "HTTP status 500: down"),
        (_reply(b"down", 499), ProtocolError, "HTTP status 499: down"),
    ],
)
async def test_what_is_no_nsqd(answer: HttpReply | HttpRequestFailed, kind: type[NsqError], text: str) -> None:
    client = Client(answer)
    with pytest.raises(kind, match=text) as caught:
        await _opened(client)
    assert (type(caught.value), caught.value.node, client.closed) == (kind, "n:4151", 1)


@pytest.mark.parametrize("content", [b'{"version": "1.3.0"}', b'{"data": {"version": "1.3.0"}, "status_code": 200}'])
async def test_the_version_of_a_node(content: bytes) -> None:
    client = Client(_reply(content))
    connection, found = await _opened(client)
    assert (found.version, connection.usable, client.closed) == ("1.3.0", True, 0)
    assert client.urls == ["GET http://n:4151/info"]


async def test_a_node_that_does_not_answer() -> None:
    client = Client(_reply(b"{}"))
    client.hold = anyio.Event()
    with pytest.raises(ConnectionFailed, match=r"no response for 0\.01 s"):
        await _opened(client, connect_timeout=0.01)
    assert client.closed == 1


# Settings


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"on_unknown": "settle"}, "needs TCP"),
        ({"snappy": True}, "snappy has no effect with transport='http'"),
        ({"deflate_level": 1}, "deflate_level has no effect"),
        ({"auth_secret": "x"}, "auth_secret has no effect"),
        ({"heartbeat_interval": 10.0}, "heartbeat_interval has no effect"),
        ({"tls": True}, "tls has no effect with transport='http' without https"),
        ({"transport": "udp"}, "'udp' is neither 'tcp' nor 'http'"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Producer("127.0.0.1:4161", **{"transport": "http", **settings})


def test_addresses_are_those_of_http() -> None:
    producer = Producer(nsqd="https://gateway/nsq, node", transport="http", tls=True)
    assert "nsqd='https://gateway:443/nsq,node:4151'" in repr(producer)
    with pytest.raises(InvalidSetting, match="is not an address"):
        Producer(nsqd="https://gateway/nsq")


def test_blocking_producers_publish_over_http() -> None:
    with Cluster(nodes=1) as cluster, sync.Producer(cluster.lookupd, transport="http") as producer:
        cluster.create_topic("orders", channels=["ch"])
        offsets = [producer.publish("orders", b"hi", trace_id=7).offset for _ in range(5)]
        assert offsets == [0, 32, 64, 96, 128]
