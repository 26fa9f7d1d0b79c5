"""nsqlookupd's TCP protocol; the answers were recorded from the original program."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute
from anyio.streams.buffered import BufferedByteReceiveStream
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.lookupd.registry import LookupSession, LookupTcpServer, Registry
from nsqext.protocol.lookupd_tcp import PeerInfo
from tests.support.fake_lookupd import eventually
from tests.support.listeners import scarce_listener

OWN = PeerInfo("bc", 4160, 4161, "1.3.0", "vm")
NODE = {"version": "1.0", "tcp_port": 5150, "http_port": 5151, "hostname": "h", "broadcast_address": "b"}


def session() -> LookupSession:
    return LookupSession(Registry(lambda: 1_000), "127.0.0.1:99", OWN)


def identify(wanted: object) -> bytes:
    body = json.dumps(wanted).encode()
    return b"IDENTIFY\n" + struct.pack(">i", len(body)) + body


def answers(data: bytes) -> list[bytes]:
    found = []
    while data:
        (size,) = struct.unpack_from(">i", data)
        found.append(data[4 : 4 + size])
        data = data[4 + size :]
    return found


WHO = b'{"broadcast_address":"bc","hostname":"vm","http_port":4161,"tcp_port":4160,"version":"1.3.0"}'
CASES: list[tuple[bytes, list[bytes], bool]] = [
    (b"  V1PING \r\nPING\n", [b"OK", b"OK"], False),
    (b"  V2", [b"E_BAD_PROTOCOL"], True),
    (b"  V1FOO bar\n", [b"E_INVALID invalid command FOO"], True),
    (b"  V1\n", [b"E_INVALID invalid command "], True),
    (b"  V1REGISTER t\n", [b"E_INVALID client must IDENTIFY"], True),
    (b"  V1UNREGISTER t\n", [b"E_INVALID client must IDENTIFY"], True),
    (b"  V1IDENTIFY\n\0\0\0\3abc", [b"E_BAD_BODY IDENTIFY failed to decode JSON body"], True),
    (b"  V1IDENTIFY\n\xff\xff\xff\xff", [b"E_BAD_BODY IDENTIFY failed to read body"], True),
    (b"  V1" + identify(None), [b"E_BAD_BODY IDENTIFY missing fields"], True),
    (b"  V1" + identify([1]), [b"E_BAD_BODY IDENTIFY failed to decode JSON body"], True),
    (b"  V1" + identify(NODE | {"tcp_port": 0}), [b"E_BAD_BODY IDENTIFY missing fields"], True),
    (b"  V1" + identify(NODE | {"tcp_port": "x"}), [b"E_BAD_BODY IDENTIFY failed to decode JSON body"], True),
    (b"  V1" + identify(NODE) * 2, [WHO, b"E_INVALID cannot IDENTIFY again"], True),
    (b"  V1" + identify(NODE) + b"REGISTER\n", [WHO, b"E_INVALID REGISTER insufficient number of params"], True),
    (
        b"  V1" + identify(NODE) + b"REGISTER bad! c\n",
        [WHO, b"E_BAD_TOPIC REGISTER topic name 'bad!' is not valid"],
        True,
    ),
    (
        b"  V1" + identify(NODE) + b"REGISTER t bad!\n",
        [WHO, b"E_BAD_CHANNEL REGISTER channel name 'bad!' is not valid"],
        True,
    ),
    (b"  V1" + identify(NODE) + b"UNREGISTER nope c\n", [WHO, b"OK"], False),
    (b"  V1" + identify(NODE) + b"REGISTER t c\nPING\n", [WHO, b"OK", b"OK"], False),
]


@pytest.mark.parametrize(("data", "expected", "closes"), CASES)
def test_conversations(data: bytes, expected: list[bytes], closes: bool) -> None:
    made = session()
    assert answers(made.receive(data)) == expected
    assert made.closing is closes


@given(st.sampled_from(CASES), st.lists(st.integers(1, 20), max_size=30))
def test_any_chunks_give_the_same_answers(case: tuple[bytes, list[bytes], bool], sizes: list[int]) -> None:
    data, expected, _ = case
    made, got = session(), b""
    for size in [*sizes, len(data)]:
        if data and not made.closing:
            got += made.receive(data[:size])
            data = data[size:]
    assert answers(got) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_answered_or_waited_for(data: bytes) -> None:
    made = session()
    found = answers(made.receive(b"  V1" + data))
    assert made.closing or len(found) <= data.count(b"\n")
    assert [answer for answer in found if not answer.startswith((b"OK", b"E_", b"{"))] == []


def test_an_endless_line_is_cut_off() -> None:
    made = session()
    assert made.receive(b"  V1" + b"x" * 10_000) == b""
    made.receive(b"x" * 10_000)
    assert made.closing


def test_registrations_end_with_the_connection() -> None:
    made = session()
    registry = made.registry
    made.receive(b"  V1" + identify(NODE) + b"REGISTER t c\nREGISTER u\n")
    assert [found.key for found in registry.find("topic", "*")] == ["t", "u"]
    assert len(registry.producers("topic", "t")) == len(registry.producers("channel", "t", "c")) == 1
    made.end()
    assert registry.find("channel", "t", "*") != []
    assert registry.producers("topic", "t") == registry.producers("client") == []


def test_ephemeral_registrations_end_with_their_last_node() -> None:
    made = session()
    made.receive(b"  V1" + identify(NODE) + b"REGISTER e#ephemeral x#ephemeral\nREGISTER t c\n")
    made.receive(b"UNREGISTER e#ephemeral x#ephemeral\nUNREGISTER e#ephemeral\nUNREGISTER t\n")
    assert [found[1:] for found in made.registry.find("topic", "*")] == [("t", "")]
    assert [found[1:] for found in made.registry.find("channel", "*", "*")] == [("t", "c")]
    assert made.registry.producers("channel", "t", "c") == []


@pytest.mark.parametrize("partitions", [False, True], ids=["topics", "partitions"])
@pytest.mark.parametrize(
    ("line", "topics", "channels"),
    [
        ("UNREGISTER t 0 c", ["t 0", "t 1"], ["t 1 c"]),
        ("UNREGISTER t 0 none", ["t 0", "t 1"], ["t 0 c", "t 1 c"]),
        ("UNREGISTER t 0", ["t 1"], ["t 1 c"]),
        ("UNREGISTER none 0", ["t 0", "t 1"], ["t 0 c", "t 1 c"]),
    ],
)
def test_a_node_withdraws_what_it_names(line: str, topics: list[str], channels: list[str], partitions: bool) -> None:
    """Topics ``t 0`` and ``t 1`` are partitions of one, or two original topics."""

    def spell(text: str) -> str:
        return text if partitions else text.replace(" ", "-", 1)

    made = LookupSession(Registry(lambda: 1_000), "127.0.0.1:99", OWN, partitions)
    lines = ["REGISTER t 0 c", "REGISTER t 1 c", line]
    made.receive(b"  V1" + identify(NODE | {"version": "1-HA"}))
    for each in lines:
        verb, _, rest = each.partition(" ")
        assert answers(made.receive(f"{verb} {spell(rest)}\n".encode())) == [b"OK"]

    def held(category: str) -> list[str]:
        return sorted(
            " ".join((found.key, *found.subkey.split(":"))).strip()
            for found, producers in made.registry
            if found.category == category and producers
        )

    assert (held("topic"), held("channel")) == ([*map(spell, topics)], [*map(spell, channels)])


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Registry, tuple[str, int]]]:
    """Serve the protocol on a socket, for whose first connection there is no file descriptor."""
    registry, listener = Registry(lambda: 1_000), scarce_listener()
    server = LookupTcpServer(lambda remote: LookupSession(registry, remote, OWN))
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.serve, listener)
            yield registry, listener.getsockname()
            server.kill()


@pytest.mark.anyio
async def test_a_connection_that_is_reset_ends_its_registrations_only() -> None:
    async with served() as (registry, address):
        streams = [await anyio.connect_tcp(*address) for _ in range(2)]
        for stream in streams:
            await stream.send(b"  V1" + identify(NODE) + b"REGISTER t c\n")
            assert await BufferedByteReceiveStream(stream).receive_exactly(len(WHO) + 10)
        assert len(registry.producers("topic", "t")) == 2
        sock = streams[0].extra(SocketAttribute.raw_socket)  # noqa: S610 - no Django here
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await streams[0].aclose()
        await eventually(lambda: len(registry.producers("topic", "t")) == 1)
        await streams[1].send(b"PING\n")
        assert await streams[1].receive() == b"\0\0\0\2OK"
        await streams[1].aclose()


def test_ephemeral_channels_stay_when_only_the_topic_is_removed() -> None:
    made = session()
    made.receive(b"  V1" + identify(NODE) + b"REGISTER e#ephemeral x#ephemeral\nUNREGISTER e#ephemeral\n")
    assert made.registry.find("topic", "*") == []
    assert [found[1:] for found in made.registry.find("channel", "*", "*")] == [("e#ephemeral", "x#ephemeral")]
    assert made.registry.producers("channel", "*", "*") == []


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"Broadcast_Address":"U","TCP_PORT":1,"http_port":2,"version":"1"}', "U"),
        (b'{"broadcast_address":"\xff","tcp_port":1,"http_port":2,"version":"1"}', "\ufffd"),
        (b'{"broadcast_address":"\\ud800","tcp_port":1,"http_port":2,"version":"1"}', "\ufffd"),
        (b'{"remote_address":"lie:1","broadcast_address":"b","tcp_port":1,"http_port":2,"version":"1"}', "b"),
    ],
)
def test_identify_is_read_as_leniently_as_the_original_reads_it(body: bytes, shown: str) -> None:
    made = session()
    made.receive(b"  V1IDENTIFY\n" + struct.pack(">i", len(body)) + body)
    assert made.node is not None
    assert made.node.members["broadcast_address"] == shown
    assert made.node.members["remote_address"] == "127.0.0.1:99"


def test_only_a_ping_is_a_sign_of_life() -> None:
    made = session()
    made.receive(b"  V1" + identify(NODE))
    made.registry.wall = lambda: 5_000
    for line, seen in ((b"REGISTER t\n", 1_000), (b"UNREGISTER t\n", 1_000), (b"PING\n", 5_000)):
        made.receive(line)
        assert made.node is not None
        assert made.node.last_seen == seen
