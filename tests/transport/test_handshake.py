"""Opening a connection: layers separate and combined, refusals, silent peers, cancellation at any await."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import trustme
from attrs import evolve

from nsqext import Producer
from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import (
    ConnectionFailed,
    NegotiationFailed,
    NsqError,
    ProtocolError,
    RequestTimeout,
)
from nsqext.errors.server import AuthFailed, AuthRequired
from nsqext.protocol.client.commands import sub
from nsqext.protocol.identify import IdentifyRequest
from nsqext.transport import handshake
from nsqext.transport.handshake import open_connection, subscribe
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.auth_server import auth_server
from tests.support.fake_nsqd import REDESIGNED, Peer, error, obey, ok, scripted_node

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def secured(authority: trustme.CA) -> Iterator[Cluster]:
    """A node with TLS, compression and AUTH."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    with auth_server("open-sesame") as address:
        options = ClusterOptions(tls=context, auth_addresses=(address,))
        with Cluster(1, options=options) as cluster:
            cluster.create_topic("t", channels=["ch"])
            yield cluster


def _trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("compression", [{}, {"snappy": True}, {"deflate_level": 3}], ids=["none", "snappy", "deflate"])
async def test_layers_alone_and_combined(
    secured: Cluster, authority: trustme.CA, tls: bool, compression: dict[str, Any]
) -> None:
    with anyio.fail_after(25):
        async with Producer(
            secured.lookupd,
            timeout=20,
            auth_secret="open-sesame",
            tls=_trusting(authority) if tls else None,
            tls_hostname="localhost" if tls else None,
            **compression,
        ) as producer:
            for body in (b"x", b"y" * 300_000, b"z"):
                assert (await producer.publish("t", body)).topic == "t"
            async with anyio.create_task_group() as tasks:
                for _ in range(40):
                    tasks.start_soon(producer.publish, "t", b"together" * 100)
            assert len(await producer.publish_many("t", [b"many" * 50] * 500)) == 500


@pytest.mark.parametrize("compression", [{"snappy": True}, {"deflate_level": 3}], ids=["snappy", "deflate"])
async def test_a_body_larger_than_the_limit_when_unpacked_ends_the_connection(
    secured: Cluster, compression: dict[str, Any]
) -> None:
    options = ConnectionOptions(auth_secret="open-sesame", max_decompressed_size=10, **compression)
    address = secured.nodes["n1"].tcp.rpartition(":")
    with anyio.fail_after(25), pytest.raises(ProtocolError, match="unpacks to more than 10 bytes at once"):
        await open_connection(Address(address[0], int(address[2])), options)


async def test_an_untrusted_certificate_is_reported_at_once(secured: Cluster) -> None:
    with anyio.fail_after(25):
        async with Producer(secured.lookupd, auth_secret="open-sesame", tls=True) as producer:
            with pytest.raises(NegotiationFailed, match="certificate"):
                await producer.publish("t", b"x")


async def test_a_certificate_for_another_host_is_refused(secured: Cluster, authority: trustme.CA) -> None:
    options = ConnectionOptions(auth_secret="open-sesame", tls=_trusting(authority), tls_hostname="elsewhere.example")
    address = secured.nodes["n1"].tcp.rpartition(":")
    with anyio.fail_after(25), pytest.raises(NegotiationFailed, match="elsewhere"):
        await open_connection(Address(address[0], int(address[2])), options)


async def test_a_node_is_told_why_its_certificate_is_refused(authority: trustme.CA) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    def serve() -> str:
        with server.accept()[0] as sock:
            sock.recv(4096)
            sock.sendall(ok(b'{"tls_v1":true}'))
            with pytest.raises(ssl.SSLError) as refused:
                context.wrap_socket(sock, server_side=True)
            return refused.value.reason

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        told = threads.submit(serve)
        with pytest.raises(NegotiationFailed, match="certificate"):
            await open_connection(Address(*server.getsockname()), ConnectionOptions(tls=True))
        assert told.result(25) == "TLSV1_ALERT_UNKNOWN_CA"


@pytest.mark.parametrize(("secret", "kind"), [(None, AuthRequired), ("wrong", AuthFailed)])
async def test_a_secret_that_is_missing_or_wrong(secured: Cluster, secret: str | None, kind: type[NsqError]) -> None:
    with anyio.fail_after(25):
        async with Producer(secured.lookupd, auth_secret=secret) as producer:
            with pytest.raises(kind) as caught:
                await producer.publish("t", b"x")
    assert "wrong" not in str(caught.value)
    assert "wrong" not in repr(producer.settings)


@pytest.mark.parametrize(
    ("name", "members"), [("TLS", {"tls": True}), ("snappy", {"snappy": True}), ("deflate", {"deflate_level": 1})]
)
async def test_a_layer_that_is_not_offered(name: str, members: dict[str, Any]) -> None:
    async with scripted_node(obey()) as node:
        with anyio.fail_after(25), pytest.raises(NegotiationFailed, match=f"does not offer {name}") as caught:
            await open_connection(node.address, ConnectionOptions(**members))
    assert caught.value.node == str(node)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", ProtocolError, "HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", ProtocolError, "frame size"),
        (ok(b"neither OK nor JSON"), ProtocolError, "IDENTIFY"),
        (error("E_BAD_BODY IDENTIFY failed"), NsqError, "E_BAD_BODY"),
        (b"", ConnectionFailed, r"closed the connection.*nsqd's TCP port\? If the node worked before, it is stopping"),
        (ok(b"{}")[:5], ConnectionFailed, "closed the connection"),
    ],
)
async def test_a_peer_that_is_not_nsqd_is_reported(answer: bytes, kind: type[NsqError], text: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.read_magic()
        await peer.expect("IDENTIFY")
        await peer.raw(answer)
        await peer.close()

    async with scripted_node(script, granted=None) as node:
        with anyio.fail_after(25), pytest.raises(kind, match=text) as caught:
            await open_connection(node.address, ConnectionOptions())
        assert caught.value.node == str(node)


async def test_members_of_identify() -> None:
    async with scripted_node() as node:
        request = IdentifyRequest(extend_support=True, desired_tag="canary")
        connection, negotiated = await open_connection(node.address, ConnectionOptions(heartbeat_interval=7.5), request)
        peer = await node.accept()
        connection.close()
        assert negotiated.version == REDESIGNED["version"]
        assert connection.heartbeat_interval == 7.5
        requested = {name: peer.identify[name] for name in ("heartbeat_interval", "extend_support", "desired_tag")}
        assert requested == {"heartbeat_interval": 7500, "extend_support": True, "desired_tag": "canary"}
        assert peer.identify.keys().isdisjoint({"topology_region", "topology_zone"})


async def test_the_options_name_the_client() -> None:
    options = ConnectionOptions(
        client_id="billing-1", hostname="h1", user_agent="billing/2.0", topology_region="eu", topology_zone="eu-1"
    )
    async with scripted_node() as node:
        connection, _ = await open_connection(node.address, options, IdentifyRequest(user_agent="replaced"))
        peer = await node.accept()
        connection.close()
        names = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")
        assert [peer.identify[name] for name in names] == ["billing-1", "h1", "billing/2.0", "eu", "eu-1"]


async def test_a_subscription_that_is_not_granted_with_ok_ends_the_connection() -> None:
    async with scripted_node() as node:
        connection, _ = await open_connection(node.address, ConnectionOptions())
        peer = await node.accept()
        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:

                async def answer() -> None:
                    await peer.expect("SUB")
                    await peer.answer(b"CLOSE_WAIT")

                tasks.start_soon(answer)
                with pytest.raises(ProtocolError, match="expected OK in response to SUB, received b'CLOSE_WAIT'"):
                    await subscribe(connection, sub("t", "ch"), 5.0)
        assert connection.closed


@pytest.mark.parametrize("end", ["refused", "silent", "cancelled", "no nsqd"])
async def test_a_connection_that_is_not_opened_leaves_no_socket(
    end: str, closed_address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[socket.socket] = []

    def make(*arguments: Any) -> socket.socket:
        made.append(socket.socket(*arguments))
        return made[-1]

    monkeypatch.setattr(handshake, "make_socket", make)

    async def script(peer: Peer) -> None:
        if end == "no nsqd":
            await peer.raw(b"SSH-2.0-OpenSSH_9.2\r\n")
        await peer.read_magic()
        await peer.expect("IDENTIFY")
        await peer.expect_end()

    async with scripted_node(script, granted=None) as node:
        address = closed_address if end == "refused" else node.address
        options = ConnectionOptions(connect_timeout=0.1 if end == "silent" else 20)
        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:

                async def fail() -> None:
                    with pytest.raises(NsqError):
                        await open_connection(address, options)

                tasks.start_soon(fail)
                if end == "cancelled":
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
        assert [sock.fileno() for sock in made] == [-1]


async def test_a_cancelled_connect_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    async def connect(sock: socket.socket, _: object) -> None:
        made.append(sock)
        await anyio.sleep_forever()

    monkeypatch.setattr(handshake, "_connect", connect)
    with anyio.move_on_after(0.01):
        await handshake.connect(Address("127.0.0.1", 1), 20)
    assert [sock.fileno() for sock in made] == [-1]


async def test_a_node_that_requires_auth_is_not_used_without_a_secret() -> None:
    async with scripted_node(granted={**REDESIGNED, "auth_required": True}) as node:
        with anyio.fail_after(25), pytest.raises(AuthRequired, match=r"requires AUTH .*: set auth_secret"):
            await open_connection(node.address, ConnectionOptions())


async def test_a_secret_is_sent_to_a_node_that_does_not_require_it() -> None:
    async with scripted_node() as node, anyio.create_task_group() as tasks:

        async def connect() -> None:
            connection, _ = await open_connection(node.address, ConnectionOptions(auth_secret="hush"))
            connection.close()

        tasks.start_soon(connect)
        peer = await node.accept()
        assert (await peer.expect("AUTH")).body == b"hush"
        await peer.answer(b"{}")


@pytest.mark.parametrize("turns", range(12))
async def test_cancelling_anywhere_closes_the_socket(secured: Cluster, authority: trustme.CA, turns: int) -> None:
    host, _, port = secured.nodes["n1"].tcp.rpartition(":")
    options = ConnectionOptions(
        tls=_trusting(authority), tls_hostname="localhost", snappy=True, auth_secret="open-sesame"
    )

    async def connect() -> None:
        connection, _ = await open_connection(Address(host, int(port)), evolve(options))
        connection.close()

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect)
            for _ in range(turns):
                await anyio.sleep(0.0005)
            tasks.cancel_scope.cancel()
        await connect()


async def test_a_node_that_does_not_respond_to_a_subscription() -> None:
    async with scripted_node() as node:
        connection, _ = await open_connection(node.address, ConnectionOptions())
        with anyio.fail_after(25):
            with pytest.raises(RequestTimeout, match=r"no response to SUB_ORDERED within 0\.1 s"):
                await subscribe(connection, sub("t", "ch", 0, verb="SUB_ORDERED"), 0.1)
        connection.close()
