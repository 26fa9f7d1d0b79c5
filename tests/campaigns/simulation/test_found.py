"""What schedules have found in clients, each as a scenario of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Admin, BatchFailed, DeliveryUnknown, OutgoingMessage, Producer
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.testing.simulation import run_seed

if TYPE_CHECKING:
    from nsqext.testing import World


async def batch_waits_for_lookup(world: World) -> None:
    """Publish a batch while lookup is slow and the node does not respond."""
    await world.cluster.create_topic("orders", 1, extend=True, channels=["billing"])
    for running in world.cluster.runtime.lookupds.values():
        running.lookupd.delay = 1.5
    async with Producer(world.cluster.lookupd, timeout=4.0) as producer:
        world.cluster.freeze(world.cluster.leader("orders"))
        began = world.now
        with pytest.raises(BatchFailed):
            await producer.publish_many("orders", [OutgoingMessage(b"one", key="k"), OutgoingMessage(b"two")])
        assert 3.9 < world.now - began < 4.5
        world.cluster.thaw(world.cluster.leader("orders"))


def test_the_timeout_of_a_batch_includes_the_wait_for_lookup() -> None:
    """The timeout began when the topic was known: a batch took up to three times as long as ``timeout``."""
    run = run_seed(batch_waits_for_lookup, 1, ())
    assert run.error is None


async def server_ends_before_the_request(world: World) -> None:
    """Send a request to a server that ends its side of the connection first, and reads the request afterwards."""

    ended = anyio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        await reader.read(-1)
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    client = HttpClient(5.0)
    with pytest.raises(HttpRequestFailed, match="disconnected"):
        await client.request("POST", url, content=bytes(10**6))
    await client.aclose()
    await ended.wait()
    server.close()


def test_a_server_that_ends_a_connection_before_the_request_is_a_documented_error() -> None:
    """What seed 1012720 showed: a connection was closed twice, and AttributeError was raised."""
    assert run_seed(server_ends_before_the_request, 1, ()).error is None


async def node_is_out_of_reach(world: World) -> None:
    """Publish to a node that receives nothing until the publish has failed."""
    await world.cluster.create_topic("orders", 1, channels=["billing"])
    leader = world.cluster.leader("orders")
    async with Producer(world.cluster.lookupd, on_unknown="raise", timeout=4.0, request_timeout=1.0) as producer:
        await producer.publish("orders", b"before")
        for client in world.clients:
            world.network.block(client, leader)
        with pytest.raises(DeliveryUnknown):
            await producer.publish("orders", b"lost")
        for client in world.clients:
            world.network.unblock(client, leader)
        await anyio.sleep(5.0)
        await producer.publish("orders", b"after")
    async with Admin(world.cluster.lookupd) as admin:
        assert [message.body.encode() for message in await admin.peek("orders", count=3)] == [b"after", b"before"]


def test_a_connection_that_was_given_up_sends_nothing_later() -> None:
    """What seed 50039 showed: a publish was settled as not stored, and was stored 18 s later."""
    assert run_seed(node_is_out_of_reach, 1, ()).error is None
