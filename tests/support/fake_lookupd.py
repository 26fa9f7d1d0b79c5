"""Lookup nodes for tests: responses as values and as JSON, a mocked HTTP transport, servers on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import respx
from anyio import TypedAttributeProvider
from anyio.abc import SocketAttribute, SocketStream

from nsqext.errors import LookupFailed, TopicNotFound
from nsqext.lookup.responses import LookupAnswer, NodeInfo
from nsqext.types import Address, TopicMeta

DATA = Path(__file__).parents[1] / "lookup" / "data"


def recorded(file: str) -> list[dict[str, Any]]:
    """Return the recorded responses of a server: path, Accept header, status and body."""
    answers: list[dict[str, Any]] = orjson.loads((DATA / file).read_bytes())
    return answers


def node(name: str) -> NodeInfo:
    """Return a node ``n1`` with its usual ports."""
    return NodeInfo(tcp(name), Address(name, 4151))


def tcp(name: str) -> Address:
    """Return a node's TCP address."""
    return Address(name, 4150)


def listing(
    source: str,
    partitions: Mapping[int, str] | None = None,
    *,
    num: int = 0,
    nodes: Sequence[str] = (),
    epoch: int = 0,
    extend: bool = False,
) -> LookupAnswer:
    """Return the response of a lookup node that finds the topic."""
    meta = TopicMeta(partition_num=num, replica=1, extend_support=extend) if num else None
    leaders = {partition: node(name) for partition, name in (partitions or {}).items()}
    return LookupAnswer(Address(source, 4161), epoch, meta, leaders, tuple(map(node, nodes)))


def failed(source: str) -> LookupAnswer:
    """Return the result for a lookup node that did not respond."""
    return LookupAnswer(Address(source, 4161), error=LookupFailed("no answer"))


def unknown(source: str) -> LookupAnswer:
    """Return the response of a lookup node that does not find the topic."""
    return LookupAnswer(Address(source, 4161), error=TopicNotFound("unknown"))


def lookup_json(
    partitions: Mapping[int, str] | None = None,
    *,
    num: int = 0,
    nodes: Sequence[str] = (),
    extend: bool = False,
) -> dict[str, Any]:
    """Return the data of ``/lookup`` in the format of the redesigned server.

    Leaders are ``host:port`` of redesigned nodes, ``nodes`` of original ones without partitions.
    """
    leaders = {str(key): node_json(name) for key, name in (partitions or {}).items()}
    producers = {node["broadcast_address"] + str(node["tcp_port"]): node for node in leaders.values()}
    return {
        "channels": ["ch"] if leaders or nodes else [],
        "meta": {
            "disable_channel_auto_create": False,
            "extend_support": extend,
            "multi_part": False,
            "ordered": False,
            "partition_num": num,
            "replica": 1 if num else 0,
        },
        "partitions": leaders,
        "producers": [*producers.values(), *(node_json(name, "1.3.0") for name in nodes)],
    }


def node_json(address: str, version: str = "0.3.7-HA.1.13.0") -> dict[str, Any]:
    """Return a node in the format of lookup."""
    host, _, port = address.rpartition(":")
    return {
        "broadcast_address": host,
        "hostname": host,
        "tcp_port": int(port),
        "http_port": int(port) + 1,
        "version": version,
    }


def list_json(*addresses: str, leader: str = "", epochs: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the data of ``/listlookup``."""
    nodes = [
        {
            "ID": address,
            "NodeIP": address.rpartition(":")[0],
            "TcpPort": "4160",
            "HttpPort": address.rpartition(":")[2],
            "RpcPort": "4260",
            "Epoch": (epochs or {}).get(address, 0),
        }
        for address in addresses
    ]
    first = next((node for node in nodes if node["ID"] == leader), {})
    return {"lookupdleader": first, "lookupdnodes": nodes}


Handler = Callable[[SocketStream], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Address]:
    """Run a server that calls a handler for each connection and closes it; yield the server's address."""

    async def handle(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                await handler(stream)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield _address(listener)
        tasks.cancel_scope.cancel()


def answering(payload: bytes) -> Handler:
    """Return a handler that sends these bytes as the response to a request and closes."""

    async def handle(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(payload)

    return handle


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return the bytes of an HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def _address(listener: TypedAttributeProvider) -> Address:
    return Address("127.0.0.1", int(listener.extra(SocketAttribute.local_port)))  # noqa: S610 - no Django here


class LookupNodes:
    """Lookup nodes behind a mocked HTTP transport (respx): set their responses, inspect the requests."""

    def __init__(self) -> None:
        self.router = respx.MockRouter(assert_all_called=False)
        self.transport = httpx.MockTransport(self.router.async_handler)

    def lists(self, name: str, *listed: str, **options: Any) -> respx.Route:
        """Set the response to listlookup; without listed nodes, that of the original NSQ."""
        answer = httpx.Response(200, json=list_json(*listed, **options)) if listed else not_found()
        return self.route(name, "/listlookup", answer)

    def finds(self, name: str, answer: Any) -> respx.Route:
        """Set the response to lookup: data, a response, an exception or a function."""
        return self.route(name, "/lookup", answer)

    def route(self, name: str, path: str, answer: Any, method: str = "GET") -> respx.Route:
        """Set the response to a path."""
        host, _, port = name.rpartition(":")
        route = self.router.route(method=method, host=host.strip("[]"), port=int(port), path=path)
        if isinstance(answer, (httpx.Response, dict)):
            response = answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)
            return route.mock(side_effect=lambda request: _again(response))
        return route.mock(side_effect=answer)


class Held:
    """A response that waits until ``open`` is set; ``asked`` is set by the request."""

    def __init__(self, response: httpx.Response) -> None:
        self.asked, self.open = anyio.Event(), anyio.Event()
        self._response = response

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        """Respond when the test says so."""
        self.asked.set()
        await self.open.wait()
        return _again(self._response)


def _again(response: httpx.Response) -> httpx.Response:
    return httpx.Response(response.status_code, headers=response.headers, content=response.content)


def not_found(text: str = "NOT_FOUND") -> httpx.Response:
    """Return a 404 in the format of NSQ."""
    return httpx.Response(404, json={"message": text})


async def eventually(condition: Callable[[], bool], within: float = 20.0) -> None:
    """Wait until a condition holds; fail after ``within`` seconds. It is tested less often the longer that takes."""
    pause = 0.001
    with anyio.fail_after(within):
        while not condition():
            await anyio.sleep(pause)
            pause = min(1.2 * pause, 0.02)
