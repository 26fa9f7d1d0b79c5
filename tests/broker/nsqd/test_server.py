"""A node on real sockets."""

from __future__ import annotations

import gc
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from weakref import ref

import anyio
import httpx
import pytest
import trustme

from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.broker.fault_injection import NodeFaults, Rule
from nsqext.broker.nsqd.auth_server import query_auth
from nsqext.broker.nsqd.node import Hosted, Node
from nsqext.broker.nsqd.server import NsqdServer
from nsqext.broker.nsqd.session import Session
from nsqext.http import connections
from nsqext.http.given_transport import GivenTransport
from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.client.commands import identify
from nsqext.protocol.frames import HEARTBEAT
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from nsqext.protocol.tls_layer import TlsLayer
from nsqext.waits import chance
from tests.support.commands import multi_body
from tests.support.listeners import scarce_listener
from tests.support.nsqd_sessions import host, sized

if TYPE_CHECKING:
    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio


class _Peer:
    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self._parser = FrameParser()
        self._frames: list[tuple[int, bytes]] = []

    async def send(self, data: bytes) -> None:
        await self.stream.send(data)

    async def frame(self) -> tuple[int, bytes]:
        with anyio.fail_after(25):
            while not self._frames:
                frames = self._parser.feed(await self.stream.receive())
                self._frames += [frame for frame in frames if frame[1] != HEARTBEAT]
        return self._frames.pop(0)

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        await self.send(data)
        return await self.frame()

    async def wait_closed(self) -> None:
        with anyio.fail_after(25), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            while True:
                self._parser.feed(await self.stream.receive())


class _Running:
    def __init__(self, node: Node, server: NsqdServer) -> None:
        self.node = node
        self.server = server
        self._streams: list[SocketStream] = []

    async def connect(self, magic: bytes = b"  V2") -> _Peer:
        name, _, port = self.server.addresses["tcp"].rpartition(":")
        stream = await anyio.connect_tcp(name, int(port))
        self._streams.append(stream)
        await stream.send(magic)
        return _Peer(stream)

    async def close(self) -> None:
        for stream in self._streams:
            await stream.aclose()


@asynccontextmanager
async def _running(node: Node | None = None) -> AsyncIterator[_Running]:
    node = node or Node("n1", NodeOptions())
    host(node)
    server = NsqdServer(node)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        running = _Running(node, server)
        try:
            yield running
        finally:
            await running.close()
            server.stop()


async def _until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(25):
        while not condition():  # noqa: ASYNC110 - the node has no event
            await anyio.sleep(0.005)


async def test_a_fatal_error_is_read_before_the_connection_ends() -> None:
    async with _running() as running:
        peer = await running.connect()
        assert await peer.ask(b"BOGUS\n" + b"x" * 100_000) == (1, b"E_INVALID invalid command [[66 79 71 85 83]]")
        await peer.wait_closed()
        assert running.node.sessions == {}


async def test_a_client_that_closes_within_a_body_gets_an_error() -> None:
    async with _running() as running:
        peer = await running.connect()
        await peer.send(b"PUB t 0\n\0\0\0\5ab")
        await peer.stream.send_eof()
        assert await peer.frame() == (1, b"E_BAD_MESSAGE failed to read message body")
        await peer.wait_closed()


async def test_a_slow_reader_is_sent_no_more_than_it_reads() -> None:
    async with _running() as running:
        consumer, producer = await running.connect(), await running.connect()
        assert await consumer.ask(b"SUB t ch 0\n") == (0, b"OK")
        body = b"x" * 500_000
        for _ in range(100):
            assert await producer.ask(sized("PUB t 0", body)) == (0, b"OK")
        await consumer.send(b"RDY 100\n")
        channel = running.node.hosted["t", 0].partition.channels["ch"]
        await _until(lambda: channel.stats().in_flight_count > 0)
        assert channel.stats().in_flight_count < 100
        for _ in range(100):
            kind, data = await consumer.frame()
            assert (kind, data[26:]) == (2, body)
            await consumer.send(b"FIN " + data[10:26] + b"\n")
        await _until(lambda: channel.stats().depth == 0)


def _replicated(running: _Running) -> tuple[Hosted, anyio.Event, list[int]]:
    """Let publishes wait for an event; return the partition, the event, and the ids of what waited."""
    hosted, gate, seen = running.node.hosted["t", 0], anyio.Event(), list[int]()

    async def replicate(stored: Any) -> None:
        seen.append(stored.message_id)
        await gate.wait()

    hosted.replicate = replicate
    return hosted, gate, seen


async def test_publishes_wait_for_replicas_in_order_while_deliveries_continue() -> None:
    async with _running() as running:
        hosted, gate, seen = _replicated(running)
        peer = await running.connect()
        assert await peer.ask(b"SUB t ch 0\nRDY 5\n") == (0, b"OK")
        await peer.send(sized("PUB t 0", b"a") + sized("PUB t 0", b"b") + b"NOP\n")
        await _until(lambda: seen)
        assert hosted.waiting == 31
        assert hosted.partition.readable == 0
        gate.set()
        frames = [await peer.frame() for _ in range(4)]
        assert [data[26:] or data for _, data in frames] == [b"OK", b"a", b"OK", b"b"]
        assert seen == [2, 3]
        assert hosted.waiting == 0


@pytest.mark.parametrize("delayed", [False, True], ids=["bytes at once", "bytes delayed"])
async def test_no_command_overtakes_a_publish_that_waits(delayed: bool) -> None:
    async with _running() as running:
        _, gate, seen = _replicated(running)
        if delayed:
            running.node.faults.add(Rule("delay", "in"))
        peer = await running.connect()
        await peer.send(sized("PUB t 0", b"a"))
        await _until(lambda: seen)
        await peer.send(sized("PUB other 0", b"b"))
        with anyio.move_on_after(0.05) as overtaken:
            await peer.frame()
        assert overtaken.cancelled_caught
        gate.set()
        assert await peer.frame() == (0, b"OK")
        assert (await peer.frame())[1].startswith(b"E_TOPIC_NOT_EXIST")


async def test_a_lead_that_is_lost_while_a_publish_is_replicated() -> None:
    """A single message is refused as by a node that never led, a batch is not (source: protocol_v2.go)."""
    async with _running() as running:
        hosted = running.node.hosted["t", 0]
        leads = True

        async def replicate(_: Any) -> None:
            hosted.leader = leads
            raise RequestError("E_FAILED_ON_NOT_WRITABLE", "", fatal=False)

        hosted.replicate = replicate
        peer = await running.connect()
        single, batch = sized("PUB t 0", b"a"), sized("MPUB t 0", multi_body([b"a"]))
        for keeps, command, code in (
            (True, single, b"E_FAILED_ON_NOT_WRITABLE "),
            (False, single, b"E_FAILED_ON_NOT_LEADER "),
            (False, batch, b"E_FAILED_ON_NOT_WRITABLE "),
        ):
            hosted.leader, leads = True, keeps
            assert await peer.ask(command) == (1, code)
        assert running.node.publish_failed == 3
        hosted.leader = True
        assert await peer.ask(b"SUB t ch 0\n") == (0, b"OK"), "the connection stays open"


async def test_a_stop_closes_everything_at_once() -> None:
    async with _running() as running:
        peer = await running.connect()
        assert await peer.ask(sized("PUB t 0", b"a")) == (0, b"OK")
        running.server.stop()
        await peer.wait_closed()
        assert running.node.sessions == {}


async def test_a_drain_closes_consumers_and_refuses_publishes() -> None:
    async with _running() as running:
        consumer, producer = await running.connect(), await running.connect()
        assert await consumer.ask(b"SUB t ch 0\n") == (0, b"OK")
        assert await producer.ask(sized("PUB t 0", b"a")) == (0, b"OK")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running.server.drain)
            await consumer.wait_closed()
            assert await producer.ask(sized("PUB t 0", b"a")) == (1, b"E_PUB_FAILED exiting")
            await producer.wait_closed()


async def test_an_address_in_use_is_an_error_and_closes_all_sockets() -> None:
    async with _running() as running:
        with pytest.raises(OSError, match="in use"):
            await NsqdServer(Node("n2"), running.server.addresses["tcp"]).serve()


async def test_the_sockets_of_a_node_are_closed_if_one_of_its_addresses_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        server = NsqdServer(Node("n1"), http=f"127.0.0.1:{used.getsockname()[1]}")
        with pytest.raises(OSError, match="in use"):
            await server.serve()
    with pytest.raises(OSError, match="connect"):
        await anyio.connect_tcp("127.0.0.1", int(server.addresses["tcp"].rpartition(":")[2]))


async def test_a_node_forgets_a_client_that_has_left() -> None:
    async with _running() as running:
        peer = await running.connect()
        await peer.ask(sized("PUB t 0", b"x"))
        left = ref(next(iter(running.node.sessions.values())))
        await peer.stream.aclose()
        await _until(lambda: (gc.collect(), left())[1] is None)


async def test_faults_on_the_wire() -> None:
    faults = NodeFaults()
    async with _running(Node("n1", NodeOptions(), faults)) as running:
        faults.add(Rule("delay", "out", seconds=0.05))
        peer = await running.connect()
        start = anyio.current_time()
        assert await peer.ask(sized("PUB t 0", b"a")) == (0, b"OK")
        assert anyio.current_time() - start >= 0.04
        wrong = await running.connect()
        assert (await wrong.ask(b"nothing\n"))[0] == 1
        await wrong.wait_closed()
        faults.heal()
        faults.add(Rule("cut", "out", left=1))
        await peer.send(sized("PUB t 0", b"a"))
        with anyio.fail_after(25):
            assert await peer.stream.receive() == b"\0\0\0\x06\0"
        await peer.wait_closed()
        faults.heal()
        faults.refuse()
        refused = await running.connect(b"")
        await refused.wait_closed()


async def test_output_that_was_held_is_sent_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node("n1", NodeOptions(limits=ServerLimits(max_output_buffer_timeout=600.0)))
    async with _running(node) as running:
        consumers = [await running.connect() for _ in range(4)]
        producer = await running.connect()
        timeouts = (600_000, 300, 500, 600_000)
        for consumer, timeout in zip(consumers, timeouts, strict=True):
            await consumer.send(identify(b'{"output_buffer_timeout":%d,"output_buffer_size":16384}' % timeout))
            assert await consumer.frame() == (0, b"OK")
            assert await consumer.ask(b"SUB t ch%d 0\nRDY 5\n" % id(consumer)) == (0, b"OK")
        monkeypatch.setattr(node, "tick", lambda: None)  # which sends late output, too
        start = anyio.current_time()
        assert await producer.ask(sized("PUB t 0", b"a")) == (0, b"OK")
        await consumers[1].frame()
        assert anyio.current_time() - start >= 0.25
        await consumers[2].frame()
        assert anyio.current_time() - start >= 0.45


async def test_tls_snappy_inside_and_commands_before_it_are_refused() -> None:
    authority = trustme.CA()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_side)
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(client_side)
    options = NodeOptions(limits=ServerLimits(tls=True, tls_required=True), tls=server_side)
    async with _running(Node("n1", options)) as running:
        refused = await running.connect()
        assert await refused.ask(sized("PUB t 0", b"a")) == (
            1,
            b"E_INVALID cannot PUB in current state (TLS required)",
        )
        peer = await running.connect()
        kind, reply = await peer.ask(identify(b'{"feature_negotiation":true,"tls_v1":true}'))
        assert (kind, b'"tls_v1":true' in reply) == (0, True)
        tls = TlsLayer(client_side, "localhost")
        received = b""
        await peer.send(tls.pending())
        with anyio.fail_after(25):
            while not (tls.ready and received):
                received += tls.decode(await peer.stream.receive())
                pending = tls.pending()
                if pending:
                    await peer.send(pending)
            assert received == b"\0\0\0\x06\0\0\0\0OK"
            await peer.send(tls.encode(sized("PUB t 0", b"secret")))
            assert tls.decode(await peer.stream.receive()) == b"\0\0\0\x06\0\0\0\0OK"
            await peer.send(tls.encode(identify(b'{"feature_negotiation":false}')))
            assert tls.decode(await peer.stream.receive()) == b"\0\0\0\x06\0\0\0\0OK"
            encrypted = [client for client in running.node.sessions.values() if client.has_layer(TlsLayer)]
            assert [client.settings.tls for client in encrypted] == [False]


async def test_bytes_that_are_no_tls_end_the_connection() -> None:
    authority = trustme.CA()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_side)
    options = NodeOptions(limits=ServerLimits(tls=True), tls=server_side)
    async with _running(Node("n1", options)) as running:
        peer = await running.connect()
        await peer.ask(identify(b'{"feature_negotiation":true,"tls_v1":true}'))
        await peer.send(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
        await peer.wait_closed()


class _AuthServer:
    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []
        self.hosts: list[str] = []
        self.grants: list[dict[str, Any]] = [
            {"topic": "^t$", "channels": ["^$", "^ok"], "permissions": ["publish", "subscribe"]}
        ]
        self.ttl = 1000
        self.identity = "me"
        self.posted: list[tuple[str, bytes]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.posted.append((request.headers["content-type"], request.content))
            values = {name: found[0] for name, found in json.loads(request.content).items()}
        else:
            values = dict(request.url.params)
        self.asked.append(values)
        self.hosts.append(request.url.netloc.decode())
        secret = values["secret"]
        if secret == "bad":
            return httpx.Response(403)
        grants = self.grants if secret == "good" else []
        answer = {"ttl": self.ttl, "identity": self.identity, "identity_url": "", "authorizations": grants}
        return httpx.Response(200, json=answer)


@pytest.fixture
def auth_server(monkeypatch: pytest.MonkeyPatch) -> _AuthServer:
    """An auth server that answers every HTTP request of a node."""
    server = _AuthServer()
    monkeypatch.setattr(connections, "Connections", lambda _: GivenTransport(httpx.MockTransport(server)))
    return server


async def test_auth(auth_server: _AuthServer) -> None:
    node = Node("n1", NodeOptions(limits=ServerLimits(auth=True), auth_addresses=("127.0.0.1:1",)))
    async with _running(node) as running:

        async def one(data: bytes) -> list[tuple[int, bytes]]:
            peer = await running.connect()
            await peer.send(data)
            frames = [await peer.frame()]
            if frames[0][0] == 0:
                frames.append(await peer.frame())
            return frames

        good = sized("AUTH", b"good")
        identity = (0, b'{"identity":"me","identity_url":"","permission_count":1}')
        assert await one(sized("PUB t 0", b"x")) == [(1, b"E_AUTH_FIRST AUTH required before PUB")]
        assert await one(b"SUB t ok 0\n") == [(1, b"E_AUTH_FIRST AUTH required before SUB")]
        assert await one(good + sized("PUB t 0", b"x")) == [identity, (0, b"OK")]
        assert await one(good + b"SUB t ok1 0\n") == [identity, (0, b"OK")]
        denied = (1, b'E_UNAUTHORIZED AUTH failed for SUB on "t" "denied"')
        assert await one(good + b"SUB t denied 0\n") == [identity, denied]
        assert await one(good + good) == [identity, (1, b"E_INVALID AUTH Already set")]
        assert await one(sized("AUTH", b"bad")) == [(1, b"E_AUTH_FAILED AUTH failed")]
        assert await one(sized("AUTH", b"none")) == [(1, b"E_UNAUTHORIZED AUTH No authorizations found")]
        asked = [("remote_ip", "127.0.0.1"), ("secret", "good"), ("tls", "false")]  # in the real servers' order
        assert list(auth_server.asked[0].items()) == asked


def _heard_now(node: Node, now: float) -> None:
    """Keep the first client connected after the clock has jumped."""
    session = node.sessions[1]
    assert isinstance(session, Session)
    session.heard = now


async def test_expired_authorizations_are_requested_again(auth_server: _AuthServer) -> None:
    now = [100.0]
    limits = ServerLimits(auth=True)
    node = Node("n1", NodeOptions(limits=limits, auth_addresses=("127.0.0.1:1",), clock=lambda: now[0]))
    async with _running(node) as running:
        peer = await running.connect()
        await peer.ask(sized("AUTH", b"good"))
        now[0] += 2000
        _heard_now(node, now[0])
        for _ in range(2):
            assert await peer.ask(sized("PUB t 0", b"x")) == (0, b"OK")
        assert len(auth_server.asked) == 2, "what was renewed counts as long as the first answer"
        now[0] += 2000
        _heard_now(node, now[0])
        auth_server.grants = [{"topic": "other", "channels": [".*"], "permissions": ["publish"]}]
        assert await peer.ask(sized("PUB t 0", b"x")) == (1, b'E_UNAUTHORIZED AUTH failed for PUB on "t" ""')


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("command", [sized("PUB t", b"x"), sized("MPUB t", multi_body([b"x"])), b"SUB t c\n"])
async def test_a_client_whose_authorizations_are_all_withdrawn_is_not_authorized(
    auth_server: _AuthServer, original: bool, command: bytes
) -> None:
    """As both real servers: AUTH is required before the first answer of the auth server only."""
    now = [100.0]
    limits = ServerLimits.original(auth=True) if original else ServerLimits(auth=True)
    options = NodeOptions(limits=limits, clustered=not original, auth_addresses=("127.0.0.1:1",), clock=lambda: now[0])
    async with _running(Node("n1", options)) as running:
        peer = await running.connect()
        await peer.ask(sized("AUTH", b"good"))
        now[0] += 2000
        _heard_now(running.node, now[0])
        auth_server.grants = []
        verb = command.partition(b" ")[0].decode()
        named = verb if original or verb == "SUB" else "PUB"
        channel = "c" if verb == "SUB" else ""
        assert await peer.ask(command) == (1, f'E_UNAUTHORIZED AUTH failed for {named} on "t" "{channel}"'.encode())


async def test_the_original_posts_json_and_escapes_values(auth_server: _AuthServer) -> None:
    limits = ServerLimits.original(auth=True)
    options = NodeOptions(limits=limits, clustered=False, auth_addresses=("127.0.0.1:1",), auth_method="post")
    auth_server.identity = 'a"<b>'
    async with _running(Node("n1", options)) as running:
        peer = await running.connect()
        identity = b'{"identity":"a\\"\\u003cb\\u003e","identity_url":"","permission_count":1}'
        assert await peer.ask(sized("AUTH", b"good")) == (0, identity)
        assert await peer.ask(sized("PUB t", b"x")) == (0, b"OK")
        refused = await running.connect()
        assert await refused.ask(sized("AUTH", b"\xff&")) == (1, b"E_UNAUTHORIZED AUTH no authorizations found")
    assert auth_server.posted[0] == (
        "application/json",
        b'{"common_name":[""],"remote_ip":["127.0.0.1"],"secret":["good"],"tls":["false"]}',
    )
    assert '"secret":["\ufffd\\u0026"]'.encode() in auth_server.posted[1][1]


async def test_the_original_asks_its_auth_servers_in_a_circle(
    auth_server: _AuthServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chance, "randrange", lambda count: count - 2)
    addresses = tuple(f"127.0.0.1:{port}" for port in (1, 2, 3, 4))
    options = NodeOptions(limits=ServerLimits.original(auth=True), clustered=False, auth_addresses=addresses)
    assert await query_auth(options, b"bad", "127.0.0.1:5", tls=True, common_name="billing") is None
    assert auth_server.hosts == ["127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:1", "127.0.0.1:2"]
    assert list(auth_server.asked[0].values()) == ["billing", "127.0.0.1", "bad", "true"]


async def test_a_silent_connection_is_closed_and_a_frozen_node_accepts_later() -> None:
    faults = NodeFaults()
    async with _running(Node("n1", NodeOptions(client_timeout=0.1), faults)) as running:
        silent = await running.connect(b"")
        await silent.wait_closed()
        faults.freeze()
        peer = await running.connect()
        await peer.send(sized("PUB t 0", b"a"))
        await anyio.wait_all_tasks_blocked()
        faults.thaw()
        assert await peer.frame() == (0, b"OK")


async def test_what_no_client_caused_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _running() as running:
        consumers = [await running.connect() for _ in range(2)]
        for consumer in consumers:
            assert await consumer.ask(b"SUB t ch 0\nRDY 1\n") == (0, b"OK")
        ticked = anyio.Event()
        monkeypatch.setattr(running.node, "tick", ticked.set)
        monkeypatch.setattr(running.node, "seconds_to_tick", lambda: 3600.0)
        await ticked.wait()  # further ticks, which send late output, too, do not come
        partition = running.node.hosted["t", 0].partition
        partition.commit(partition.put([NewMessage(b"m")]))
        async with anyio.create_task_group() as tasks:

            async def receive(consumer: _Peer) -> None:
                assert (await consumer.frame())[1].endswith(b"m")
                tasks.cancel_scope.cancel()

            for consumer in consumers:
                tasks.start_soon(receive, consumer)


async def test_a_connection_waits_while_there_is_no_file_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.broker.nsqd.server.listen", lambda _: scarce_listener())
    async with _running() as running:
        peer = await running.connect()
        assert await peer.ask(sized("PUB t 0", b"x")) == (0, b"OK")
