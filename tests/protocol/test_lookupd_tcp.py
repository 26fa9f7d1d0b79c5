"""nsqlookupd's TCP protocol, both roles."""

from __future__ import annotations

import pytest

from nsqext.errors import ProtocolError
from nsqext.errors.server import InvalidCommand
from nsqext.protocol.client import commands
from nsqext.protocol.lookupd_tcp import (
    LookupCommand,
    LookupCommandParser,
    LookupReplyParser,
    PeerInfo,
    encode_reply,
    read_reply,
)
from nsqext.protocol.server.command_parser import MAX_LINE
from nsqext.protocol.server.request_error import Fault

_PEER = PeerInfo("10.0.0.1", 4150, 4151, "1.3.0", "host", "zone", "region")


def _greeted(*, partitions: bool = False, identified: bool = True) -> LookupCommandParser:
    parser = LookupCommandParser(partitions=partitions)
    parser.receive(commands.MAGIC_LOOKUP)
    if identified:
        parser.receive(commands.identify(_PEER.encode()))
        assert parser.next_command() == LookupCommand("IDENTIFY", peer=_PEER)
    return parser


def _refused(data: bytes, *, partitions: bool = False, identified: bool = True) -> str:
    parser = _greeted(partitions=partitions, identified=identified)
    parser.receive(data)
    with pytest.raises(Fault) as caught:
        parser.next_command()
    assert caught.value.fatal
    return str(caught.value)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_a_node_announces_itself(piece: int) -> None:
    stream = (
        commands.MAGIC_LOOKUP + commands.ping() + commands.identify(_PEER.encode()) + commands.register("t")
        + commands.register("t", "c") + b"UNREGISTER t c extra \r\n" + commands.unregister("t#ephemeral")
    )  # fmt: skip
    parser, found = LookupCommandParser(), []
    for start in range(0, len(stream), piece):
        parser.receive(stream[start : start + piece])
        while (command := parser.next_command()) is not None:
            found.append(command)
    assert found == [
        LookupCommand("PING"),
        LookupCommand("IDENTIFY", peer=_PEER),
        LookupCommand("REGISTER", "t"),
        LookupCommand("REGISTER", "t", "c"),
        LookupCommand("UNREGISTER", "t", "c"),
        LookupCommand("UNREGISTER", "t#ephemeral"),
    ]
    assert parser.peer == _PEER


def test_redesigned_nodes_name_the_partition() -> None:
    parser = _greeted(partitions=True)
    parser.receive(commands.register("t", "c", 3) + commands.unregister("t", partition=0))
    assert parser.next_command() == LookupCommand("REGISTER", "t", "c", 3)
    assert parser.next_command() == LookupCommand("UNREGISTER", "t", "", 0)
    for bad in ("-1", "255", "x", "٣", "99999999999999999999"):
        text = _refused(f"REGISTER t {bad}\n".encode(), partitions=True)
        assert text == f"E_BAD_PARTITIONID REGISTER partition id '{bad}' is not valid"
    assert _refused(b"REGISTER t\n", partitions=True) == "E_INVALID REGISTER insufficient number of params"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"BOGUS x\n", "E_INVALID invalid command BOGUS"),
        (b"\n", "E_INVALID invalid command "),
        (b"REGISTER\n", "E_INVALID REGISTER insufficient number of params"),
        (b"REGISTER bad!\n", "E_BAD_TOPIC REGISTER topic name 'bad!' is not valid"),
        (b"REGISTER  t\n", "E_BAD_TOPIC REGISTER topic name '' is not valid"),
        (b"UNREGISTER t b@d\n", "E_BAD_CHANNEL UNREGISTER channel name 'b@d' is not valid"),
        (b"IDENTIFY\n", "E_INVALID cannot IDENTIFY again"),
        (b"x" * MAX_LINE, " command line too long"),
    ],
)
def test_bad_commands_are_refused(data: bytes, text: str) -> None:
    assert _refused(data) == text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (commands.register("t"), "E_INVALID client must IDENTIFY"),
        (b"IDENTIFY\n\xff\xff\xff\xff", "E_BAD_BODY IDENTIFY invalid body size -1"),
        (b"IDENTIFY\n\x7f\xff\xff\xff", "E_BAD_BODY IDENTIFY invalid body size 2147483647"),
        (commands.identify(b"{"), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (commands.identify(b""), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (commands.identify(b'{"tcp_port":"1"}'), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (commands.identify(b"{}"), "E_BAD_BODY IDENTIFY missing fields"),
        (commands.identify(PeerInfo("h", 1, 0, "v").encode()), "E_BAD_BODY IDENTIFY missing fields"),
    ],
)
def test_bad_introductions_are_refused(data: bytes, text: str) -> None:
    assert _refused(data, identified=False) == text


def test_another_protocol_is_refused() -> None:
    parser = LookupCommandParser()
    parser.receive(b"  V")
    assert parser.next_command() is None
    parser.receive(b"2")
    with pytest.raises(Fault) as caught:
        parser.next_command()
    assert encode_reply(str(caught.value).encode()) == b"\x00\x00\x00\x0eE_BAD_PROTOCOL"


@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_answers_have_a_size_and_no_type(piece: int) -> None:
    stream = encode_reply(b"OK") + encode_reply(b"") + encode_reply(_PEER.encode())
    assert stream.startswith(b"\x00\x00\x00\x02OK\x00\x00\x00\x00")
    parser = LookupReplyParser()
    found = [reply for start in range(0, len(stream), piece) for reply in parser.feed(stream[start : start + piece])]
    assert found == [b"OK", b"", _PEER.encode()]
    assert PeerInfo.decode(found[2]) == _PEER


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x65", b"HTTP"])
def test_an_answer_of_impossible_size_ends_the_reading(size: bytes) -> None:
    parser = LookupReplyParser(max_size=100)
    assert parser.feed(encode_reply(b"OK") + size) == [b"OK"]
    assert isinstance(parser.error, ProtocolError)
    assert "may not be nsqlookupd" in str(parser.error)
    assert parser.feed(encode_reply(b"OK")) == []


def test_errors_are_told_from_answers() -> None:
    assert read_reply(b"OK") == b"OK"
    with pytest.raises(InvalidCommand, match=r"client must IDENTIFY \(node n:4160\)"):
        read_reply(b"E_INVALID client must IDENTIFY", "n:4160")
    with pytest.raises(ProtocolError, match="cannot be read"):
        PeerInfo.decode(b"OK")
