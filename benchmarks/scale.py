"""Clients of 10,000 partitions on 200 nodes, in virtual time: ``python -m benchmarks.scale``, or ``make scale``.

Producers and consumers with their real lookup cache, merge of answers, connection pool and subscriptions run on the
simulated network of `nsqext.testing`. Nodes and lookup nodes are small stand-ins: they accept every command of a
partition that they lead, and refuse the others. A client process publishes to all topics and consumes its share of
them. The table shows what the lookup service receives, and how long partitions stand still, when the clients start,
while they are idle, when one node is lost, and when a tenth of the nodes is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any
from urllib.parse import parse_qs

import anyio
import httpx
from attrs import define, field

from benchmarks.report import table, write_section
from nsqext import Consumer, Lookup, NsqError, Producer
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.options import LookupOptions
from nsqext.protocol.frames import HEARTBEAT, encode_frame
from nsqext.testing.simulation.network import Network, NetworkOptions, current_host
from nsqext.testing.simulation.private_parts import SimulatedLoop
from nsqext.testing.simulation.seams import SimulatedClock, simulated_machine

_OK = encode_frame(0, b"OK")
_GRANTED = json.dumps({"max_rdy_count": 2500, "version": "0.3.7-HA.1.13.0", "msg_timeout": 60_000}).encode()
_NOT_LEADER = encode_frame(1, b"E_FAILED_ON_NOT_LEADER")
_HEARTBEAT_FRAME = encode_frame(0, HEARTBEAT)
_HEARTBEAT = 30.0
_LOOKUP_LATENCY = 0.002
_FAILOVER = 3.0
"""Seconds after which the lookup service names new leaders for the partitions of a lost node."""
_PROBE = 0.25
"""Seconds between two publishes to each partition of a lost node, by each client process."""


@define
class World:
    """The cluster: the leader of each partition, and what the lookup service received.

    Attributes:
        leaders: node of each partition, by topic and partition.
        lost: nodes that are down.
        requests: requests for a topic by lookup node and second.
        subscribed: connections that are subscribed, by topic and partition.
        connections: connections that nodes accepted, by second.
        transports: open connections of the nodes.
    """

    topics: int
    partitions: int
    ports: dict[str, int] = field(factory=dict)
    leaders: dict[tuple[str, int], str] = field(factory=dict)
    lost: set[str] = field(factory=set)
    requests: Counter[int] = field(factory=Counter)
    connections: Counter[int] = field(factory=Counter)
    transports: set[Any] = field(factory=set)
    subscribed: dict[tuple[str, int], set[NodeProtocol]] = field(factory=dict)

    def lookup(self, topic: str) -> dict[str, Any]:
        """Return the response of a lookup node."""
        partitions = {
            str(partition): {
                "broadcast_address": "127.0.0.1",
                "hostname": self.leaders[topic, partition],
                "tcp_port": self.ports[self.leaders[topic, partition]],
                "http_port": 1,
                "version": "0.3.7-HA",
            }
            for partition in range(self.partitions)
        }
        meta = {"partition_num": self.partitions, "replica": 2, "extend_support": False, "ordered": False}
        return {"channels": ["ch"], "meta": meta, "partitions": partitions, "producers": list(partitions.values())}


class NodeProtocol(asyncio.Protocol):
    """A connection of a node."""

    def __init__(self, world: World, node: str, loop: SimulatedLoop) -> None:
        self._world = world
        self._node = node
        self._loop = loop
        self._buffer = b""
        self._place: tuple[str, int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._world.transports.add(self._transport)
        self._world.connections[int(self._loop.time())] += 1
        self._loop.call_later(_HEARTBEAT, self._heartbeat)

    def _heartbeat(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_HEARTBEAT_FRAME)
            self._loop.call_later(_HEARTBEAT, self._heartbeat)

    def connection_lost(self, _: Exception | None) -> None:
        self._world.transports.discard(self._transport)
        if self._place is not None:
            self._world.subscribed[self._place].discard(self)

    def data_received(self, data: bytes) -> None:
        buffer = (self._buffer + data).removeprefix(b"  V2")
        out = []
        while b"\n" in buffer:
            line, _, rest = buffer.partition(b"\n")
            words = line.split()
            name = words[0] if words else b""
            if name in (b"IDENTIFY", b"PUB"):
                size = int.from_bytes(rest[:4], "big")
                if len(rest) < 4 + size:
                    break
                rest = rest[4 + size :]
            if name == b"IDENTIFY":
                out.append(encode_frame(0, _GRANTED))
            elif name == b"PUB":
                out.append(_OK if self._leads(words[1], words[2]) else _NOT_LEADER)
            elif name.startswith(b"SUB"):
                out.append(self._subscribe(words[1], words[3]))
            elif name == b"CLS":
                out.append(encode_frame(0, b"CLOSE_WAIT"))
            buffer = rest
        self._buffer = buffer
        if out:
            self._transport.write(b"".join(out))

    def _leads(self, topic: bytes, partition: bytes) -> bool:
        return self._world.leaders.get((topic.decode(), int(partition))) == self._node

    def _subscribe(self, topic: bytes, partition: bytes) -> bytes:
        if not self._leads(topic, partition):
            return _NOT_LEADER
        self._place = topic.decode(), int(partition)
        self._world.subscribed.setdefault(self._place, set()).add(self)
        return _OK


class LookupTransport(httpx.AsyncBaseTransport):
    """The lookup nodes, as a transport of httpx."""

    def __init__(self, world: World, nodes: list[str], loop: SimulatedLoop) -> None:
        self._world = world
        self._nodes = nodes
        self._loop = loop

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Respond after a short time."""
        await anyio.sleep(_LOOKUP_LATENCY)
        if request.url.path == "/listlookup":
            nodes = [
                {"ID": node, "NodeIP": node.partition(":")[0], "HttpPort": node.partition(":")[2], "Epoch": 1}
                for node in self._nodes
            ]
            return httpx.Response(200, json={"lookupdleader": nodes[0], "lookupdnodes": nodes})
        self._world.requests[int(self._loop.time())] += 1
        if request.url.path == "/topics":
            topics = sorted({topic for topic, _ in self._world.leaders})
            listed = [{"topic_name": topic, "extend_support": False} for topic in topics]
            return httpx.Response(200, json={"topics": topics, "meta_info": listed})
        topic = parse_qs(request.url.query.decode())["topic"][0]
        return httpx.Response(200, json=self._world.lookup(topic))


class ClientProcess:
    """A process: one lookup cache, one producer for all topics, and consumers of its share of the topics."""

    def __init__(self, number: int, world: World, topics: list[str], nodes: list[str], loop: SimulatedLoop) -> None:
        self.name = f"client{number}"
        self._topics = topics
        self._lookup = Lookup(nodes)
        self._lookup.metadata = MetadataCache(
            nodes, options=LookupOptions(), transport=LookupTransport(world, nodes, loop)
        )
        self.producer = Producer(self._lookup, timeout=30.0)
        self.consumers: list[Consumer] = []

    async def start(self) -> None:
        """Open the producer and all consumers."""
        current_host.set(self.name)
        await self.producer.start()
        for topic in self._topics:
            consumer = Consumer(topic, "ch", lookupd=self._lookup, max_in_flight=1000)
            self.consumers.append(consumer)
        async with anyio.create_task_group() as tasks:
            for consumer in self.consumers:
                tasks.start_soon(consumer.start)

    async def publish_until_stored(self, topic: str, partition: int, stored: Callable[[], None]) -> None:
        """Publish to a partition until one message is stored."""
        current_host.set(self.name)
        while True:
            try:
                await self.producer.publish(topic, b"x", partition=partition)
            except NsqError:
                await anyio.sleep(_PROBE)
            else:
                stored()
                return

    async def aclose(self) -> None:
        """Close all."""
        async with anyio.create_task_group() as tasks:
            for consumer in self.consumers:
                tasks.start_soon(consumer.aclose)
        await self.producer.aclose()


@define
class Phase:
    """Figures of a part of the run: seconds and counts are virtual, CPU is real and includes the simulation."""

    name: str
    seconds: float
    requests: int
    peak: int
    connects: int
    publish: float | None = None
    consume: float | None = None
    cpu: float = 0.0


class Scale:
    """The run.

    Args:
        nodes: number of nodes.
        topics: number of topics.
        partitions: of each topic.
        processes: client processes.
        lookups: lookup nodes.
        loop: the simulated event loop.
    """

    def __init__(
        self, nodes: int, topics: int, partitions: int, processes: int, lookups: int, loop: SimulatedLoop
    ) -> None:
        self.world = World(topics, partitions)
        self.names = [f"n{number}" for number in range(nodes)]
        self.topics = [f"t{number}" for number in range(topics)]
        self.phases: list[Phase] = []
        self._servers: list[asyncio.Server] = []
        self._loop = loop
        self._random = Random(7)
        addresses = [f"127.0.0.1:{number + 1}" for number in range(lookups)]
        self.processes = [
            ClientProcess(number, self.world, self.topics[number::processes], addresses, loop)
            for number in range(processes)
        ]

    async def run(self, idle: float) -> None:
        """Start everything, wait, and lose nodes."""
        await self._start_nodes()
        await self._phase("start", self._start)
        await self._phase("first publish to each partition", self._publish_everywhere)
        await self._phase(f"idle for {idle:g} s", lambda: anyio.sleep(idle))
        await self._phase("one node lost", lambda: self._lose(1))
        many = max(2, len(self.names) // 10)
        await self._phase(f"{many} nodes lost", lambda: self._lose(many))
        await self._phase("closing", self._close)

    async def _start_nodes(self) -> None:
        for name in self.names:
            server = await self._loop.create_server(
                lambda name=name: NodeProtocol(self.world, name, self._loop),
                "127.0.0.1",
                0,
            )
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
            self._loop.network.name_port(port, name)
            self.world.ports[name] = port
        places = [(topic, partition) for topic in self.topics for partition in range(self.world.partitions)]
        for number, place in enumerate(places):
            self.world.leaders[place] = self.names[number % len(self.names)]

    async def _phase(self, name: str, work: Callable[[], Awaitable[tuple[float, float] | None]]) -> None:
        world, began, cpu = self.world, self._loop.time(), time.process_time()
        world.requests.clear()
        world.connections.clear()
        stalls = await work()
        publish, consume = stalls or (None, None)
        self.phases.append(
            Phase(
                name,
                self._loop.time() - began,
                world.requests.total(),
                max(world.requests.values(), default=0),
                world.connections.total(),
                publish,
                consume,
                time.process_time() - cpu,
            )
        )
        print(f"{name}: {self.phases[-1]}", flush=True)

    async def _start(self) -> None:
        async with anyio.create_task_group() as tasks:
            for process in self.processes:
                tasks.start_soon(process.start)
        while self._consumed() < len(self.world.leaders):  # noqa: ASYNC110 - nothing wakes the run
            await anyio.sleep(0.05)

    def _consumed(self) -> int:
        return sum(bool(connections) for connections in self.world.subscribed.values())

    async def _publish_everywhere(self) -> None:
        async def publish(process: ClientProcess) -> None:
            for topic in self.topics:
                for partition in range(self.world.partitions):
                    await process.publish_until_stored(topic, partition, lambda: None)

        async with anyio.create_task_group() as tasks:
            for process in self.processes:
                tasks.start_soon(publish, process)

    async def _lose(self, count: int) -> tuple[float, float]:
        """Kill nodes; return the seconds from the election until every partition has stored and delivered a message."""
        world, network = self.world, self._loop.network
        alive = [name for name in self.names if name not in world.lost]
        dead = set(self._random.sample(alive, count))
        world.lost |= dead
        left = [name for name in alive if name not in dead]
        places = [place for place, leader in world.leaders.items() if leader in dead]
        for name in dead:
            network.kill_host(name)
            del network.listeners[world.ports[name]]
        waiting = {(process.name, place) for process in self.processes for place in places}
        ended = {"publish": 0.0}

        def stored(key: tuple[str, tuple[str, int]]) -> None:
            waiting.discard(key)
            ended["publish"] = self._loop.time()

        async with anyio.create_task_group() as tasks:
            for process in self.processes:
                for place in places:
                    key = (process.name, place)
                    tasks.start_soon(process.publish_until_stored, *place, lambda key=key: stored(key))
            await anyio.sleep(_FAILOVER)
            for number, place in enumerate(places):
                world.subscribed[place] = set()
                world.leaders[place] = left[number % len(left)]
            moved = self._loop.time()
            while not all(world.subscribed.get(place) for place in places):  # noqa: ASYNC110
                await anyio.sleep(0.05)
            consumed = self._loop.time()
        return ended["publish"] - moved, consumed - moved

    async def _close(self) -> None:
        async with anyio.create_task_group() as tasks:
            for process in self.processes:
                tasks.start_soon(process.aclose)
        for server in self._servers:
            server.close()
        for transport in tuple(self.world.transports):
            transport.abort()
        await anyio.sleep(0.01)


def simulate(nodes: int, topics: int, partitions: int, processes: int, lookups: int, idle: float) -> Scale:
    """Run all phases; return the measured figures."""
    options = NetworkOptions(split=0.0, partial=0.0, spike=0.0, late=0.0, latency=(0.0001, 0.0005))
    network = Network(Random(1), options)
    with simulated_machine(network, SimulatedClock(network), 1):
        loop = SimulatedLoop(network, 10**9)
        try:
            scale = Scale(nodes, topics, partitions, processes, lookups, loop)
            loop.run_until_complete(scale.run(idle))
            return scale
        finally:
            loop.close()


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=100, help="of each topic")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--lookups", type=int, default=3)
    parser.add_argument("--idle", type=float, default=120.0, help="seconds")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    scale = simulate(given.nodes, given.topics, given.partitions, given.processes, given.lookups, given.idle)
    rows = [
        [
            phase.name,
            f"{phase.seconds:.1f}",
            f"{phase.requests:,}",
            f"{phase.peak:,}",
            f"{phase.connects:,}",
            "" if phase.publish is None else f"{phase.publish:.2f}",
            "" if phase.consume is None else f"{phase.consume:.2f}",
        ]
        for phase in scale.phases
    ]
    head = ("", "seconds", "lookup requests", "most in a second", "connections made")
    text = table((*head, "s until all publish", "s until all consume"), rows)
    print(text)
    total = given.topics * given.partitions
    write_section(
        "Scale",
        f"{total:,} partitions ({given.topics} topics) on {given.nodes} nodes, {given.lookups} lookup nodes, "
        f"{given.processes} client processes: each publishes to all partitions, and consumes its share of the topics. "
        f"Virtual time; the lookup service names new leaders {_FAILOVER:g} s after a node is lost, and the last two "
        f"columns count from then. `python -m benchmarks.scale`.\n\n{text}",
    )


if __name__ == "__main__":
    main()
