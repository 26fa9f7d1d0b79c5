"""What a node without a coordinator says to its lookup nodes, and what it does when they fail."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import evolve

from nsqext.broker.lookupd.registration_client import RegistrationClient
from nsqext.protocol.lookupd_tcp import PeerInfo, encode_response
from nsqext.types import Address
from tests.support.fake_lookupd import answering, eventually, http, serving
from tests.support.nsqd_sessions import host, make_node, make_original

if TYPE_CHECKING:
    from anyio.abc import SocketStream

    from nsqext.broker.nsqd.node import Node

pytestmark = pytest.mark.anyio


class LookupNode:
    """A lookup node that records commands, and answers OK unless the test says otherwise."""

    def __init__(self, own: PeerInfo | None = None) -> None:
        self.own = own or PeerInfo("127.0.0.1", 4160, 1, "1.3.0", "h")
        self.down = False
        self.refused: dict[str, bytes] = {}  # by command: what is answered once before the connection is closed
        self.lines: list[list[str]] = []  # of each connection
        self.open = 0

    async def handle(self, stream: SocketStream) -> None:
        lines: list[str] = []
        self.lines.append(lines)
        self.open += 1
        received = BufferedByteReceiveStream(stream)
        try:
            if self.down:
                return
            assert await received.receive_exactly(4) == b"  V1"
            while True:
                line = (await received.receive_until(b"\n", 1000)).decode()
                lines.append(line)
                answer = self.refused.pop(line, b"OK")
                if line == "IDENTIFY":
                    await received.receive_exactly(int.from_bytes(await received.receive_exactly(4), "big"))
                    answer = self.own.encode()
                await stream.send(encode_response(answer))
                if answer.startswith(b"E_"):
                    return
        except anyio.IncompleteRead:
            return
        finally:
            self.open -= 1

    async def hears(self, *lines: str) -> None:
        """Wait until the last connection has received these commands last, besides PING."""

        def last() -> list[str]:
            return [line for line in self.lines[-1] if line != "PING"][-len(lines) :] if self.lines else []

        await eventually(lambda: last() == list(lines))


@asynccontextmanager
async def registered(
    node: Node, *lookups: LookupNode, interval: float = 600.0, partitions: bool = False
) -> AsyncIterator[RegistrationClient]:
    """Register a node at lookup nodes, from the first PING on which follows that, until the end of the context."""
    async with anyio.create_task_group() as tasks:

        async def serve(lookup: LookupNode, *, task_status: anyio.abc.TaskStatus[Address]) -> None:
            async with serving(lookup.handle) as address:
                task_status.started(address)
                await anyio.sleep_forever()

        node.switches.lookupd_addresses = [str(await tasks.start(serve, lookup)) for lookup in lookups]
        client = RegistrationClient(
            node, Address("127.0.0.1", 4150), Address("127.0.0.1", 4151), interval, partitions=partitions
        )
        async with anyio.create_task_group() as running:
            running.start_soon(client.run)
            await eventually(lambda: all(lookup.lines and "PING" in lookup.lines[0] for lookup in lookups))
            yield client
            running.cancel_scope.cancel()
        await eventually(lambda: not any(lookup.open for lookup in lookups))  # which ends the registrations
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("partitions", "place"), [(False, "{topic}"), (True, "{topic} 0")], ids=["original", "redesigned"]
)
async def test_topics_and_channels_are_registered_as_they_come_and_go(partitions: bool, place: str) -> None:
    node, lookup = make_node(clustered=False) if partitions else make_original(), LookupNode()
    host(node, "bare")
    host(node, "full").partition.channel("ch")
    bare, full, new = (place.format(topic=topic) for topic in ("bare", "full", "new"))
    async with registered(node, lookup, partitions=partitions):
        await lookup.hears("IDENTIFY", f"REGISTER {bare}", f"REGISTER {full} ch")
        hosted = node.create_topic("new")
        node.channel(hosted, "a")
        await lookup.hears(f"REGISTER {new}", f"REGISTER {new} a")
        hosted.partition.delete_channel("a")
        await lookup.hears(f"UNREGISTER {new} a")
        if not partitions:
            node.channel(hosted, "b")
            node.delete_topic("new")
            await lookup.hears("REGISTER new b", "UNREGISTER new b", "UNREGISTER new")
        assert lookup.lines[0].count("PING") == 1, "which is sent once in an interval, however much changes"
    assert len(lookup.lines) == 1


async def test_a_refused_command_ends_the_connection_and_the_next_registers_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    node, lookup = make_original(), LookupNode()
    async with registered(node, lookup):
        lookup.refused["REGISTER one"] = b"E_INVALID too many topics"
        node.create_topic("one")
        await eventually(lambda: not lookup.open)
        node.create_topic("two")
        await lookup.hears("IDENTIFY", "REGISTER one", "REGISTER two")
    assert "E_INVALID" in caplog.text
    assert "too many topics" in caplog.text


async def test_each_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node, lookup = make_original(), LookupNode()

    def logged() -> int:
        return caplog.text.count("retried every")

    async with registered(node, lookup, interval=0.01):
        for outage in (1, 2):
            await lookup.hears("IDENTIFY")
            lookup.down, tried = True, len(lookup.lines)
            lookup.refused["PING"] = b"E_INVALID stopping"
            await eventually(lambda tried=tried: len(lookup.lines) > tried + 2)  # type: ignore[misc]
            assert logged() == outage
            lookup.down = False
        await lookup.hears("IDENTIFY")
    assert logged() == 2


async def test_addresses_of_lookup_nodes_may_change() -> None:
    node, first, second = make_original(), LookupNode(), LookupNode()
    async with registered(node, first, second):
        node.switches.lookupd_addresses = node.switches.lookupd_addresses[1:]
        node.create_topic("t")
        await second.hears("REGISTER t")
        await eventually(lambda: (first.open, second.open) == (0, 1))


async def test_a_command_is_sent_after_the_thaw_of_a_frozen_node() -> None:
    node, lookup = make_original(), LookupNode()
    async with registered(node, lookup):
        node.faults.freeze()
        node.create_topic("t")
        node.create_topic("u")
        node.faults.thaw()
        await lookup.hears("REGISTER t", "REGISTER u")


@pytest.mark.parametrize(
    "useless",
    [b"", http(b"{}"), http(b"[]"), http(b"no JSON"), http(b'{"channels":null}'), http(b"{}", status="500 Error")],
)
async def test_a_lookup_node_without_an_answer_does_not_hide_the_channels_that_others_know(useless: bytes) -> None:
    node = make_original()
    channels = http(json.dumps({"channels": ["known", "passing#ephemeral"]}).encode())
    async with serving(answering(useless)) as broken, serving(answering(channels)) as working:
        own = PeerInfo("127.0.0.1", 4160, 1, "1.3.0", "h")
        lookups = [LookupNode(evolve(own, http_port=address.port)) for address in (broken, working)]
        async with registered(node, *lookups):
            hosted = node.create_topic("t")
            await lookups[1].hears("REGISTER t", "REGISTER t known")
            assert list(hosted.partition.channels) == ["known"]
