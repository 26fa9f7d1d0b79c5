"""Publishes over HTTP to nodes that fail, and what HTTP refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal
from urllib.parse import parse_qs

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from anyio.lowlevel import checkpoint
from attrs import define, field

from nsqext import Consumer, DeliveryUnknown, OutgoingMessage, Producer, PublishFailed, sync
from nsqext.broker import Cluster
from nsqext.errors import ConnectionFailed, InvalidSetting, NsqError, ProtocolError
from nsqext.errors.server import PubFailed, Unauthorized
from tests.support.machine_pauses import repeated_if_paused
from tests.support.messages import finish_all

pytestmark = pytest.mark.anyio

INFO = b'{"version":"1.3.0"}'
OK = b"OK"


@define
class Node:
    """A scripted HTTP server.

    Attributes:
        answers: responses to the next publishes: status and body, or None to close the connection; then 200 and OK.
        requests: path, query and body of the publishes that were received whole.
        most: most requests at the same time.
        hold: responses wait for it.
        slow: whether bodies are read only after ``hold``.
    """

    answers: list[tuple[int, bytes] | None] = field(factory=list)
    requests: list[tuple[str, dict[str, list[str]], bytes]] = field(factory=list)
    most: int = 0
    hold: anyio.Event | None = None
    slow: bool = False
    address: str = ""
    received: anyio.Event = field(factory=anyio.Event)
    _pending: int = 0

    @property
    def bodies(self) -> list[bytes]:
        """The messages of requests that each have one."""
        return [body[8:] if path == "/mpub" else body for path, _, body in self.requests]

    async def serve(self, stream: SocketStream) -> None:
        data = b""
        async with stream:
            while True:
                while b"\r\n\r\n" not in data:
                    try:
                        data += await stream.receive()
                    except (anyio.EndOfStream, anyio.BrokenResourceError):
                        return
                head, _, data = data.partition(b"\r\n\r\n")
                first, *lines = head.decode().split("\r\n")
                size = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
                target = first.split(" ")[1]
                if target == "/info":
                    await self._respond(stream, 200, INFO)
                    continue
                self.received.set()
                if self.slow and self.hold is not None:
                    await self.hold.wait()
                while len(data) < size:
                    data += await stream.receive()
                body, data = data[:size], data[size:]
                path, _, query = target.partition("?")
                self.requests.append((path, parse_qs(query), body))
                self._pending += 1
                self.most = max(self.most, self._pending)
                if self.hold is not None and not self.slow:
                    await self.hold.wait()
                self._pending -= 1
                answer = self.answers.pop(0) if self.answers else (200, OK)
                if answer is None:
                    return
                await self._respond(stream, *answer)

    async def _respond(self, stream: SocketStream, status: int, body: bytes) -> None:
        await stream.send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


@asynccontextmanager
async def http_node(*answers: tuple[int, bytes] | None) -> AsyncIterator[Node]:
    """Run a scripted node."""
    node = Node(list(answers))
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - not Django's
        node.address = f"127.0.0.1:{port}"
        tasks.start_soon(listener.serve, node.serve)
        yield node
        tasks.cancel_scope.cancel()


def producer_of(node: Node, **settings: Any) -> Producer:
    return Producer(nsqd=node.address, transport="http", **{"retry_wait": 0.001, **settings})


async def test_a_publish_is_sent_again_when_its_response_is_lost() -> None:
    async with http_node(None) as node, producer_of(node) as producer:
        receipt = await producer.publish("orders", b"hi")
        assert (receipt.node, node.bodies, producer.statistics().retries) == (node.address, [b"hi", b"hi"], 1)


@pytest.mark.parametrize("on_unknown", ["retry", "raise"])
@repeated_if_paused(0.1)
async def test_a_node_that_cannot_be_reached_has_stored_nothing(on_unknown: Literal["retry", "raise"]) -> None:
    async with Producer(nsqd="127.0.0.1:1", transport="http", timeout=0.2, on_unknown=on_unknown) as producer:
        with pytest.raises(PublishFailed, match=r"not stored within 0\.2 s") as caught:
            await producer.publish("orders", b"hi")
    assert not caught.value.maybe_stored
    assert isinstance(caught.value.attempts[0], ConnectionFailed)


async def test_a_cancelled_publish_is_sent_whole() -> None:
    body = b"x" * (4 << 20)
    async with http_node() as node, producer_of(node, max_message_size=8 << 20) as producer:
        node.hold, node.slow = anyio.Event(), True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.publish, "orders", body)
            await node.received.wait()
            tasks.cancel_scope.cancel()
        node.hold.set()
        await producer.publish("orders", b"next")
        with anyio.fail_after(25):
            while len(node.requests) < 2:  # noqa: ASYNC110 - no event of a foreign task
                await anyio.sleep(0.01)
    assert sorted(map(len, node.bodies)) == [4, len(body)]


async def test_closing_waits_for_responses() -> None:
    stored: list[object] = []

    async def publish(producer: Producer) -> None:
        stored.append(await producer.publish("orders", b"hi"))

    async with http_node() as node, anyio.create_task_group() as tasks:
        node.hold = anyio.Event()
        producer = await producer_of(node).start()
        tasks.start_soon(publish, producer)
        await node.received.wait()
        tasks.start_soon(producer.aclose)
        await anyio.wait_all_tasks_blocked()
        assert stored == []
        node.hold.set()
    assert len(stored) == 1


REFUSALS: list[tuple[tuple[int, bytes], type[NsqError]]] = [
    ((403, b"not from there"), Unauthorized),
    ((404, b"<html>"), ProtocolError),
    ((302, b""), ProtocolError),
]


@pytest.mark.parametrize(("answer", "kind"), REFUSALS)
async def test_a_proxy_that_refuses_is_not_asked_again(answer: tuple[int, bytes], kind: type[NsqError]) -> None:
    async with http_node(answer) as node, producer_of(node) as producer:
        with pytest.raises(kind) as caught:
            await producer.publish("orders", b"hi")
        assert (caught.value.topic, caught.value.node) == ("orders", node.address)
        assert len(node.requests) == 1


async def test_an_error_of_a_proxy_is_an_unknown_outcome() -> None:
    async with http_node((502, b"bad gateway")) as node, producer_of(node, on_unknown="raise") as producer:
        with pytest.raises(DeliveryUnknown) as caught:
            await producer.publish("orders", b"hi")
        assert isinstance(caught.value.attempts[-1], PubFailed)
    async with http_node((502, b"bad gateway")) as node, producer_of(node) as producer:
        await producer.publish("orders", b"hi")
        assert node.bodies == [b"hi", b"hi"]


async def test_a_response_that_is_not_understood_is_an_unknown_outcome() -> None:
    async with http_node((200, b"<html>")) as node, producer_of(node) as producer:
        with pytest.raises(DeliveryUnknown, match="do not match"):
            await producer.publish("orders", b"hi")


async def test_a_key_keeps_its_order_while_publishes_fail() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", extend=True, channels=["ch"])
        async with Producer(cluster.lookupd, transport="http") as producer:
            async with anyio.create_task_group() as tasks:
                for number in range(20):
                    tasks.start_soon(_keyed, producer, number)
                    await checkpoint()
            batch = [OutgoingMessage(b"%d" % number, key="k") for number in range(20, 40)]
            await producer.publish_many("orders", batch)
        async with Consumer("orders", "ch", cluster.lookupd) as consumer:
            bodies = [message.body for message in await finish_all(consumer, 40)]
    assert bodies == [b"%d" % number for number in range(40)]


async def _keyed(producer: Producer, number: int) -> None:
    await producer.publish("orders", b"%d" % number, key="k")


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
