"""A node without sockets, clients of its sessions, and a clock that tests control."""

from __future__ import annotations

from struct import Struct

import httpx

from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.nsqd.node import Hosted, Node
from nsqext.broker.nsqd.server import application, dialect_of
from nsqext.broker.nsqd.session import Session
from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import FrameType
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import TopicMeta

__all__ = ("V1", "Client", "Clock", "host", "make_node", "make_original", "ready_client", "sized", "web")

V1 = {"Accept": "application/vnd.nsq; version=1.0"}
"""Headers of a request for the second form of an answer."""

_U32 = Struct(">I")


def sized(line: str, body: bytes) -> bytes:
    """Return a command with a body."""
    return line.encode() + b"\n" + _U32.pack(len(body)) + body


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        """Return seconds."""
        return self.seconds

    def wall(self) -> int:
        """Return nanoseconds since 1970."""
        return 1_700_000_000_000_000_000 + round(self.seconds * 1e9)


def make_node(clock: Clock | None = None, **options: object) -> Node:
    """Return a node with these options."""
    clock = clock or Clock()
    values: dict[str, object] = {"clock": clock.now, "wall": clock.wall, "machine_clock": clock.now} | options
    return Node("n1", NodeOptions(**values))  # type: ignore[arg-type]


def make_original(clock: Clock | None = None, **options: object) -> Node:
    """Return a node of the original generation; ``limits`` are those that differ from the usual ones."""
    limits = options.pop("limits", {})
    assert isinstance(limits, dict)
    return make_node(clock, limits=ServerLimits.original(**limits), clustered=False, **options)


def web(node: Node) -> httpx.AsyncClient:
    """Return a client of a node's HTTP routes."""
    addresses = {"tcp": "127.0.0.1:4150", "http": "127.0.0.1:4151", "https": "127.0.0.1:4152"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(application(node, addresses)), base_url="http://node")


def host(node: Node, topic: str = "t", partition: int = 0, *, extend: bool = False, ordered: bool = False) -> Hosted:
    """Make a node the leader of a partition."""
    meta = TopicMeta(partition + 1, 1, extend_support=extend, ordered=ordered)
    return node.host(topic, partition, meta)


class Client:
    """A client of a session: commands run immediately, frames are stored until they are read."""

    def __init__(self, node: Node, peer: str = "127.0.0.1:1000", *, magic: bool = True) -> None:
        self.session = Session(node, peer, dialect_of(node))
        self._parser = FrameParser()
        self._frames: list[tuple[int, bytes]] = []
        if magic:
            self.send(b"  V2")

    def send(self, data: bytes) -> None:
        """Send bytes and run their commands, which must not wait."""
        self.session.receive(data)
        assert self.session.step() is None
        while self.session.pending and self.session.has_room:
            assert self.session.step() is None

    def writes(self) -> list[bytes]:
        """Return the writes of the session."""
        found = []
        while self.session.output.urgent:
            found.append(self.session.take())
        return found

    def receive(self) -> list[tuple[int, bytes]]:
        """Return type and data of the received frames."""
        for data in self.writes():
            self._frames += self._parser.feed(data)
        frames, self._frames = self._frames, []
        return frames

    def ask(self, data: bytes) -> str:
        """Send bytes and return the data of the only response frame as text, with ``!`` before an error."""
        self.send(data)
        ((kind, answer),) = self.receive()
        return ("!" if kind == FrameType.ERROR else "") + answer.decode("utf-8", "surrogateescape")

    def messages(self) -> list[bytes]:
        """Return the data of the received message frames; other frames fail the test."""
        frames = self.receive()
        assert all(kind == FrameType.MESSAGE for kind, _ in frames), frames
        return [data for _, data in frames]

    @property
    def open(self) -> bool:
        """Whether the connection stays open."""
        return not (self.session.closing or self.session.closed)


def ready_client(node: Node, ready: int = 10, channel: str = "ch") -> Client:
    """Return a client that is subscribed and has sent RDY."""
    client = Client(node, f"127.0.0.1:{2000 + len(node.sessions)}")
    assert client.ask(f"SUB t {channel} 0\n".encode()) == "OK"
    client.send(b"RDY %d\n" % ready)
    return client
