"""The server role of a connection without sockets: bytes in, bytes out."""

from __future__ import annotations

import itertools
import ssl
from collections.abc import Callable
from struct import pack
from typing import TYPE_CHECKING

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.nsqd.commands import REDESIGNED
from nsqext.errors import NsqError
from nsqext.protocol.frames import HEARTBEAT, FrameType
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.tls_layer import TlsLayer
from tests.support.commands import multi_body
from tests.support.nsqd_sessions import Client, Clock, host, make_node, make_original, sized
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node


def test_a_wrong_magic_is_refused_without_text() -> None:
    client = Client(make_node(), magic=False)
    assert client.ask(b"GET ") == "!E_BAD_PROTOCOL"
    assert not client.open


def test_a_new_client_has_a_minute_for_the_magic() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node, magic=False)
    client.send(b"  ")
    clock.seconds += 61
    node.tick()
    assert not client.open


def test_a_client_is_silent_from_the_magic_on() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node, magic=False)
    clock.seconds += 50
    client.send(b"  V2")
    for _ in range(2):
        clock.seconds += 44
        node.tick()
        assert client.open
    clock.seconds += 3
    node.tick()
    node.tick()
    assert not client.open


def test_a_late_heartbeat_does_not_delay_the_next() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node)
    assert client.ask(sized("IDENTIFY", b'{"heartbeat_interval":1000}')) == "OK"
    for seconds in (1.2, 0.8):
        clock.seconds += seconds
        node.tick()
        assert client.receive() == [(0, HEARTBEAT)]


def test_a_client_that_is_about_to_be_closed_gets_no_heartbeat() -> None:
    clock = Clock()
    node = make_node(clock)
    client, other = Client(node), Client(node)
    client.session.closing = True
    clock.seconds += 31
    node.tick()
    assert (client.receive(), [data for _, data in other.receive()]) == ([], [HEARTBEAT])


def test_too_many_clients_get_an_error_and_are_closed() -> None:
    node = make_node(limits=ServerLimits(max_connections=1))
    first, second = Client(node), Client(node, magic=False)
    assert first.open
    assert second.ask(b"  V2") == "!too much client connections"
    assert not second.open


def _conversation(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    node = make_node()
    host(node)
    client = Client(node, magic=False)
    frames = []
    for piece in pieces:
        client.send(piece)
        frames += client.receive()
    return [(kind, data[8:] if kind == 2 else data) for kind, data in frames]


# messages are delivered when what was received together has been run
_TOGETHER = (
    b"  V2SUB t ch 0\nRDY 5\n",
    sized("PUB t 0", b"one\nPUB"),
    sized("MPUB t", multi_body([b"two", b"three"])),
    b"FIN \0\0\0\0\0\0\0\x02" + bytes(8) + b"\n",
    b"REQ \0\0\0\0\0\0\0\x0a" + b"\n" * 8 + b" 0\n" + b"NOP\r\n" + b"BOGUS a b\n" + sized("PUB t 0", b"never"),
)
_BYTES = b"".join(_TOGETHER)
_ENDS = list(itertools.accumulate(map(len, _TOGETHER)))


@given(st.lists(st.integers(0, len(_BYTES)), max_size=12))
def test_any_chunking_gives_the_same_answers(cuts: list[int]) -> None:
    places = sorted([0, *cuts, *_ENDS])
    frames = _conversation([_BYTES[start:stop] for start, stop in itertools.pairwise(places)])
    assert frames == _conversation(list(_TOGETHER))
    assert frames[-1] == (1, b"E_INVALID invalid command [[66 79 71 85 83] [97] [98]]")


def _serves(node: Node) -> bool:
    """Return whether another client of the node can publish."""
    other = Client(node, "127.0.0.1:2000")
    other.send(sized("PUB t 0", b"x"))
    return other.receive() == [(0, b"OK")]


@given(st.binary(max_size=200))
def test_no_bytes_break_a_session(data: bytes) -> None:
    node = make_node()
    host(node)
    client = Client(node)
    client.send(data)
    client.receive()
    assert _serves(node)


_WORDS = st.sampled_from(
    [b"t", b"x", b"ch", b"0", b"-1", b"9", b"", b"a!", b"virtual_queue:1", b"special:-1", b"\xff", b"5"]
)

_VERBS = st.sampled_from(sorted(REDESIGNED.commands)) | st.just(b"DPUB") | st.binary(max_size=6)

_BODIES = st.binary(max_size=30) | st.sampled_from(
    [
        b'{"extend_support":true}',
        b'{"feature_negotiation":true,"snappy":true}',
        multi_body([b"a", b"\0\x02{}b"]),
        b"\0\x02{}b",
    ]
)


@given(st.lists(st.tuples(_VERBS, st.lists(_WORDS, max_size=5), st.none() | _BODIES), max_size=8))
def test_no_commands_break_a_session(commands: list[tuple[bytes, list[bytes], bytes | None]]) -> None:
    node = make_node()
    host(node)
    host(node, "x", extend=True)
    client = Client(node)
    for verb, words, body in commands:
        data = b" ".join([verb, *words]) + b"\n" + (b"" if body is None else pack(">I", len(body)) + body)
        try:
            client.session.receive(data)
        except NsqError:
            break  # bytes that do not belong to the negotiated layer
        client.session.step()
        client.session.take()
    client.session.end()
    assert _serves(node)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("layer", [SnappyLayer(), DeflateLayer(6)])
def test_bytes_behind_the_command_that_switches_compression_on_are_lost(
    original: bool, layer: SnappyLayer | DeflateLayer
) -> None:
    name = "snappy" if isinstance(layer, SnappyLayer) else "deflate"
    limits = ServerLimits.original() if original else ServerLimits()
    identify = sized("IDENTIFY", b'{"feature_negotiation":true,"%s":true}' % name.encode())
    for lost in (b"BOGUS\n", type(layer)().encode(b"BOGUS\n"), bytes(40)):
        client = Client(make_node(limits=limits, clustered=not original))
        client.send(identify + lost)
        assert client.session.closing is False
        client.send(type(layer)().encode(b"NOP\nBOGUS\n"))
        assert client.session.closing is True


@pytest.mark.parametrize("layer", [SnappyLayer(), DeflateLayer(6)])
def test_compressed_commands_may_arrive_with_the_end_of_the_tls_handshake(layer: SnappyLayer | DeflateLayer) -> None:
    authority = trustme.CA()
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("localhost").configure_cert(server_side)
    authority.configure_trust(client_side)
    node = make_node(limits=ServerLimits(tls=True), tls=server_side)
    published = host(node)
    client, tls = Client(node), TlsLayer(client_side, "localhost")
    name = b"snappy" if isinstance(layer, SnappyLayer) else b"deflate"
    client.send(sized("IDENTIFY", b'{"feature_negotiation":true,"tls_v1":true,"%b":true}' % name))
    client.writes()
    while not tls.ready:
        client.send(tls.pending())
        tls.decode(b"".join(client.writes()))
    client.send(tls.pending() + tls.encode(layer.encode(sized("PUB t 0", b"early"))))
    assert (client.open, published.partition.readable) == (True, 1)


def test_heartbeats_are_sent_and_three_missed_ones_end_the_connection() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node)
    client.send(sized("IDENTIFY", b'{"heartbeat_interval":1000}'))
    assert client.receive() == [(0, b"OK")]
    for _ in range(2):
        clock.seconds += 1
        node.tick()
        assert client.receive() == [(0, HEARTBEAT)]
    client.send(b"NOP\n")
    clock.seconds += 2.9
    node.tick()
    assert client.open
    clock.seconds += 0.2
    node.tick()  # sends the heartbeat that was due before
    node.tick()
    assert not client.open


@pytest.mark.anyio
@pytest.mark.parametrize("limits", [ServerLimits(), ServerLimits.original()], ids=["redesigned", "original"])
async def test_a_client_whose_command_waits_is_not_silent(limits: ServerLimits) -> None:
    clock = Clock()
    node = make_node(clock, limits=limits)
    hosted = host(node)

    async def replicate(_: object) -> None:
        clock.seconds += 3600
        for _ in range(2):  # the first sends the heartbeat that was due before
            node.tick()

    hosted.replicate = replicate
    client = Client(node)
    client.session.receive(sized("PUB t", b"x"))
    waiting = client.session.step()
    assert waiting is not None
    await waiting
    client.session.command_done()
    assert client.open
    assert [data for _, data in client.receive()] == [HEARTBEAT, HEARTBEAT, b"OK"]
    node.tick()
    assert client.open, "its silence begins when its command is done"


def test_a_node_without_cluster_creates_topics_on_command() -> None:
    node = make_node(clustered=False)
    client = Client(node)
    assert client.ask(b"INTERNAL_CREATE_TOPIC new 1 true\n") == "OK"
    assert node.hosted["new", 1].partition.extend


@table(
    ("make", "sent", "refusal"),
    [
        (make_node, b"IDENTIFY\n\0", "E_BAD_BODY IDENTIFY failed to read body size"),
        (make_node, b"IDENTIFY\n\0\0\0\x14{", "E_BAD_BODY IDENTIFY failed to read body"),
        (make_node, b"AUTH\n", "E_BAD_BODY AUTH failed to read body size"),
        (make_node, b"AUTH\n\0\0\0\5a", "E_BAD_BODY AUTH failed to read body"),
        (make_node, b"PUB t 0\n\0\0", "E_BAD_BODY failed to read body size"),
        (make_node, b"PUB t 0\n\0\0\0\5ab", "E_BAD_MESSAGE failed to read message body"),
        (make_node, b"MPUB t 0\n\0\0\0\x14\0", "E_BAD_BODY MPUB failed to read message count"),
        (make_node, b"MPUB t 0\n\0\0\0\x14\0\0\0\2\0\0\0\1a", "E_BAD_MESSAGE MPUB failed to read message(1) body size"),
        (make_node, b"MPUB t 0\n\0\0\0\x14\0\0\0\2\0\0\0\5a", "E_BAD_MESSAGE MPUB failed to read message body"),
        (make_original, b"IDENTIFY\n\0\0", "E_BAD_BODY IDENTIFY failed to read body size"),
        (make_original, b"IDENTIFY\n\0\0\0\5{}", "E_BAD_BODY IDENTIFY failed to read body"),
        (make_original, b"AUTH\n", "E_BAD_BODY AUTH failed to read body size"),
        (make_original, b"AUTH\n\0\0\0\4a", "E_BAD_BODY AUTH failed to read body"),
        (make_original, b"PUB t\n\0\0", "E_BAD_MESSAGE PUB failed to read message body size"),
        (make_original, b"PUB t\n\0\0\0\5ab", "E_BAD_MESSAGE PUB failed to read message body"),
        (make_original, b"DPUB t 1\n", "E_BAD_MESSAGE DPUB failed to read message body size"),
        (make_original, b"DPUB t 1\n\0\0\0\4a", "E_BAD_MESSAGE DPUB failed to read message body"),
        (make_original, b"MPUB t\n\0\0", "E_BAD_BODY MPUB failed to read body size"),
        (make_original, b"MPUB t\n\0\0\0\x20\0\0", "E_BAD_BODY MPUB failed to read message count"),
        (
            make_original,
            b"MPUB t\n\0\0\0\x20\0\0\0\2\0\0\0\1a\0",
            "E_BAD_MESSAGE MPUB failed to read message(1) body size",
        ),
        (make_original, b"MPUB t\n\0\0\0\x20\0\0\0\2\0\0\0\5a", "E_BAD_MESSAGE MPUB failed to read message body"),
    ],
)
def test_a_body_that_is_cut_off_is_refused(make: Callable[[], Node], sent: bytes, refusal: str) -> None:
    node = make()
    host(node)
    client = Client(node)
    client.send(sent)
    client.session.eof_received()
    assert client.receive() == [(FrameType.ERROR, refusal.encode())]
    assert not client.open


@pytest.mark.parametrize("sent", [b"", b"PUB t", b"NOP\n", b"FIN 1234"])
def test_no_error_without_a_truncated_body(sent: bytes) -> None:
    client = Client(make_node())
    client.send(sent)
    client.session.eof_received()
    assert client.receive() == []


def test_one_turn_of_a_connection_runs_a_bounded_number_of_commands() -> None:
    node = make_node()
    host(node)
    client = Client(node)
    command = sized("PUB t", b"x")
    client.session.receive(command * 5000)
    turns, answered = 0, 0
    while client.session.pending or not turns:
        assert client.session.step() is None
        turns += 1
        more = len(client.receive())
        assert more <= 256
        answered += more
    assert (answered, turns) == (5000, 20)


def test_commands_wait_while_replies_are_not_read() -> None:
    node = make_node(max_unsent=10_000)
    host(node)
    client = Client(node)
    client.ask(b"SUB t ch\n")
    client.session.receive(b"FIN 0123456789abcdef\n" * 2000)
    assert client.session.step() is None
    assert client.session.pending
    assert client.session.output.size < 10_000 + 300
    received = 0
    while client.session.pending:
        received += len(client.receive())
        client.session.step()
    assert received + len(client.receive()) == 2000
