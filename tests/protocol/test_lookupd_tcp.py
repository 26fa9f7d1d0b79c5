"""Both roles of nsqlookupd's TCP protocol."""

from __future__ import annotations

import pytest

from nsqext.errors import ProtocolError
from nsqext.protocol.lookupd_tcp import (
    MAGIC,
    NO_PARTITION,
    PING,
    LookupdCommand,
    LookupdCommandParser,
    PeerInfo,
    encode_response,
    identify,
    register,
    response_size,
    unregister,
)
from nsqext.protocol.server.request_error import RequestError
from tests.support.tables import table

_PEER = PeerInfo("10.0.0.1", 4150, 4151, "1.3.0", "host", "zone", "region")
_NEW_PEER = PeerInfo("10.0.0.1", 4150, 4151, "0.3.7-HA.1.9.9")


def _identify(body: bytes) -> bytes:
    return b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body


def _parser(*, partitions: bool = False, identified: bool = True) -> LookupdCommandParser:
    parser = LookupdCommandParser(partitions=partitions)
    parser.receive(MAGIC)
    peer = _NEW_PEER if partitions else _PEER
    if identified:
        parser.receive(identify(peer))
        assert parser.next_command() == LookupdCommand("IDENTIFY", peer=peer)
    return parser


def _refused(data: bytes, *, partitions: bool = False, identified: bool = True) -> str:
    parser = _parser(partitions=partitions, identified=identified)
    parser.receive(data)
    with pytest.raises(RequestError) as caught:
        parser.next_command()
    assert caught.value.fatal
    return str(caught.value)


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_nsqd_registers_topics_and_channels(piece: int) -> None:
    stream = (
        MAGIC + PING + identify(_PEER) + b"REGISTER t \r\n"
        + register("t", "c") + b"UNREGISTER t c extra \r\n" + unregister("t#ephemeral")
    )  # fmt: skip
    parser, found = LookupdCommandParser(), []
    for start in range(0, len(stream), piece):
        parser.receive(stream[start : start + piece])
        while (command := parser.next_command()) is not None:
            found.append(command)
    assert found == [
        LookupdCommand("PING"),
        LookupdCommand("IDENTIFY", peer=_PEER),
        LookupdCommand("REGISTER", "t"),
        LookupdCommand("REGISTER", "t", "c"),
        LookupdCommand("UNREGISTER", "t", "c"),
        LookupdCommand("UNREGISTER", "t#ephemeral"),
    ]
    assert parser.peer == _PEER


def test_the_redesigned_generation_names_the_partition() -> None:
    parser = _parser(partitions=True)
    parser.receive(register("t", "c", 3) + unregister("t", partition=0))
    assert parser.next_command() == LookupdCommand("REGISTER", "t", "c", 3)
    assert parser.next_command() == LookupdCommand("UNREGISTER", "t", "", 0)
    for bad in ("-1", "255", "x", "٣", "99999999999999999999", "+-1"):
        text = _refused(f"REGISTER t {bad}\n".encode(), partitions=True)
        assert text == f"E_BAD_PARTITIONID REGISTER partition id '{bad}' is not valid"
    assert _refused(b"REGISTER t\n", partitions=True) == "E_INVALID REGISTER insufficient number of params"


@table(
    ("data", "text"),
    [
        (b"BOGUS x\n", "E_INVALID invalid command BOGUS"),
        (b"\n", "E_INVALID invalid command "),
        (b"REGISTER\n", "E_INVALID REGISTER insufficient number of params"),
        (b"REGISTER bad!\n", "E_BAD_TOPIC REGISTER topic name 'bad!' is not valid"),
        (b"REGISTER  t\n", "E_BAD_TOPIC REGISTER topic name '' is not valid"),
        (b"UNREGISTER t b@d\n", "E_BAD_CHANNEL UNREGISTER channel name 'b@d' is not valid"),
        (b"IDENTIFY\n", "E_INVALID cannot IDENTIFY again"),
        (b"x" * 16384, "E_INVALID command line too long"),
    ],
)
def test_bad_commands_are_refused(data: bytes, text: str) -> None:
    assert _refused(data) == text


@table(
    ("data", "text"),
    [
        (register("t"), "E_INVALID client must IDENTIFY"),
        (b"IDENTIFY\n\xff\xff\xff\xff", "E_BAD_BODY IDENTIFY failed to read body"),
        (b"IDENTIFY\n\x7f\xff\xff\xff", "E_BAD_BODY IDENTIFY failed to read body"),
        (_identify(b"{"), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (_identify(b""), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (_identify(b'{"tcp_port":"1"}'), "E_BAD_BODY IDENTIFY failed to decode JSON body"),
        (_identify(b"{}"), "E_BAD_BODY IDENTIFY missing fields"),
        (identify(PeerInfo("h", 1, 0, "v")), "E_BAD_BODY IDENTIFY missing fields"),
    ],
)
def test_a_bad_identify_is_refused(data: bytes, text: str) -> None:
    assert _refused(data, identified=False) == text


def test_other_magic_bytes_are_refused() -> None:
    parser = LookupdCommandParser()
    parser.receive(b"  V")
    assert parser.next_command() is None
    parser.receive(b"2")
    with pytest.raises(RequestError) as caught:
        parser.next_command()
    assert encode_response(str(caught.value).encode()) == b"\x00\x00\x00\x0eE_BAD_PROTOCOL"


def test_a_response_has_a_size_and_no_frame_type() -> None:
    assert encode_response(b"OK") == b"\x00\x00\x00\x02OK"
    assert [response_size(encode_response(bytes(size))[:4]) for size in (0, 2, 1000)] == [0, 2, 1000]
    assert PeerInfo.decode(_PEER.encode()) == _PEER
    with pytest.raises(ProtocolError, match="invalid response to IDENTIFY"):
        PeerInfo.decode(b"OK")


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff", b"\x00\x50\x00\x01", b"HTTP"])
def test_a_response_of_invalid_size_is_refused(size: bytes) -> None:
    with pytest.raises(ProtocolError, match="may not be nsqlookupd"):
        response_size(size)


def test_an_nsqd_of_the_original_generation_may_leave_out_the_partition() -> None:
    parser = LookupdCommandParser(partitions=True)
    parser.receive(MAGIC + identify(_PEER) + register("t") + register("t", "c") + register("t", "c", 3))
    assert [parser.next_command() for _ in range(4)] == [
        LookupdCommand("IDENTIFY", peer=_PEER),
        LookupdCommand("REGISTER", "t", "", NO_PARTITION),
        LookupdCommand("REGISTER", "t", "c", NO_PARTITION),
        LookupdCommand("REGISTER", "t", "c", 3),
    ]
    parser = LookupdCommandParser(partitions=True)
    parser.receive(MAGIC + identify(_NEW_PEER) + register("t", "c"))
    parser.next_command()
    with pytest.raises(RequestError, match="E_BAD_PARTITIONID REGISTER partition id 'c' is not valid"):
        parser.next_command()


def test_a_response_to_identify_is_written_as_the_real_server_writes_it() -> None:
    own = PeerInfo(broadcast_address="h", tcp_port=4160, http_port=4161, version="1.3.0", hostname="")
    assert own.encode() == (
        b'{"broadcast_address":"h","hostname":"","http_port":4161,"tcp_port":4160,"version":"1.3.0"}'
    )
