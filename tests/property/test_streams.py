"""Streams: chunk sizes do not matter, both roles match, and hostile bytes raise documented errors."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import NsqError, ProtocolError, ServerError
from nsqext.protocol.client.client_protocol import ClientProtocol, FrameParser, Reply
from nsqext.protocol.client.commands import NOP
from nsqext.protocol.frames import HEARTBEAT, encode_frame
from nsqext.protocol.lookupd_tcp import LookupdCommandParser
from nsqext.protocol.messages import RawMessage, decode_into
from nsqext.protocol.record import decode_record
from nsqext.protocol.server.command_parser import MAX_LINE, BatchReader, CommandTarget
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.protocol.server.request_error import RequestError
from tests.support.command_reader import OpenRules, read_commands, write_command
from tests.support.strategies import (
    COMMANDS,
    FRAMES,
    SMALL,
    hostile,
    pieces_of,
)

# Pieces


@given(st.data(), FRAMES, st.binary(max_size=20))
def test_frames_do_not_depend_on_the_pieces(data: st.DataObject, frames: list[tuple[int, bytes]], rest: bytes) -> None:
    stream = b"".join(encode_frame(kind, payload) for kind, payload in frames) + rest
    whole, cut = FrameParser(), FrameParser()
    expected = whole.feed(stream)
    assert [frame for piece in data.draw(pieces_of(stream)) for frame in cut.feed(piece)] == expected
    assert (whole.error is None) == (cut.error is None)
    assert expected[: len(frames)] == frames


@given(st.data(), FRAMES)
def test_one_frame_at_a_time_gives_the_same_frames(data: st.DataObject, frames: list[tuple[int, bytes]]) -> None:
    parser, found = FrameParser(), []
    parser.single = True
    for piece in data.draw(pieces_of(b"".join(encode_frame(kind, payload) for kind, payload in frames))):
        chunk = piece
        while got := parser.feed(chunk):
            assert len(got) == 1
            found += got
            chunk = b""
    assert found == frames
    assert parser.take_rest() == b""


@given(st.data(), st.lists(COMMANDS, max_size=8))
def test_commands_of_the_client_role_are_parsed_by_the_server_role(data: st.DataObject, written: list[bytes]) -> None:
    reading = read_commands(data.draw(pieces_of(b"".join(written))))
    assert reading.error is None
    assert reading.rest == b""
    assert [write_command(command) for command in reading.commands] == written


@given(
    st.data(),
    st.lists(COMMANDS, max_size=3),
    hostile(b"PUB t\n", b"MPUB_EXT t\n\x00\x00\x00\x60", b"TOUCH ", b"FIN "),
)
def test_commands_do_not_depend_on_the_pieces(data: st.DataObject, written: list[bytes], rest: bytes) -> None:
    stream = b"".join(written) + rest
    raw_ids = data.draw(st.booleans())
    whole = read_commands([stream], OpenRules(SMALL), raw_ids=raw_ids)
    cut = read_commands(data.draw(pieces_of(stream)), OpenRules(SMALL), raw_ids=raw_ids)
    assert cut.commands == whole.commands
    assert str(cut.error) == str(whole.error)


# Hostile bytes


@given(st.data(), hostile(b"\x00\x00\x00\x06\x00\x00\x00\x00OK", b"HTTP/1.1", b"\x00\x00\x00", b"\x7f\xff\xff\xff"))
def test_any_bytes_are_frames_or_an_error_of_the_peer(data: st.DataObject, stream: bytes) -> None:
    parser, arrived, handed_out = FrameParser(), 0, 0
    for piece in data.draw(pieces_of(stream)):
        arrived += len(piece)
        for kind, payload in parser.feed(piece):
            assert kind in (0, 1, 2)
            handed_out += 8 + len(payload)
        assert parser.error is None or isinstance(parser.error, ProtocolError)
        assert parser.buffered + handed_out <= arrived


_PEER_BYTES = st.lists(
    st.sampled_from([encode_frame(1, code + b" x") for code in (b"E_FIN_FAILED", b"E_REQ_FAILED", b"E_TOUCH_FAILED")])
    | st.builds(
        encode_frame,
        st.integers(0, 2),
        st.sampled_from([HEARTBEAT, b"OK", b"E_FIN_FAILED x", b"E_INVALID x", b"E_PUB_FAILED "])
        | st.binary(max_size=30),
    )
    | st.binary(max_size=10),
    max_size=8,
).map(b"".join)


@given(st.data(), _PEER_BYTES, st.integers(0, 4), st.booleans())
def test_any_bytes_leave_the_client_role_in_order(
    data: st.DataObject, stream: bytes, waiting: int, ahead: bool
) -> None:
    client, replies = ClientProtocol("n:1"), [Reply() for _ in range(waiting)]
    client.read_ahead(ahead)
    for reply in replies:
        client.expect(reply)
    for piece in data.draw(pieces_of(stream)):
        assert all(isinstance(message, bytes) for message in client.receive_data(piece))
    assert client.out == [NOP] * client.heartbeats
    assert all(isinstance(notice, ServerError) for notice in client.notices)
    assert [reply.done for reply in replies] == sorted((reply.done for reply in replies), reverse=True)
    if client.error is not None:
        assert isinstance(client.error, NsqError)
        assert all(reply.done for reply in replies)
        assert client.waiting == 0


@given(
    hostile(b"PUB t\n\x00\x00\x00\x03", b"MPUB t\n\x00\x00\x00\x30\x00\x00\x00\x02", b"\n\r\n", b"REQ ", b"IDENTIFY\n"),
    st.booleans(),
)
def test_any_bytes_are_commands_or_an_error(stream: bytes, raw_ids: bool) -> None:
    reading = read_commands([stream], OpenRules(SMALL), raw_ids=raw_ids)
    assert all(command.words for command in reading.commands)
    assert sum(reading.sizes) <= len(stream)


@given(st.data(), hostile(b"  V1PING\n", b"  V1IDENTIFY\n\x00\x00\x00\x02{}", b"  V1"))
def test_any_bytes_are_commands_of_a_node_or_an_error(data: st.DataObject, stream: bytes) -> None:
    outcomes = []
    for pieces in ([stream], data.draw(pieces_of(stream))):
        parser, found = LookupdCommandParser(), list[object]()
        try:
            for piece in pieces:
                parser.receive(piece)
                while (command := parser.next_command()) is not None:
                    found.append(command)
        except RequestError as error:
            found.append(str(error))
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]


# Memory


@pytest.mark.parametrize(
    "stream",
    [
        b"PUB t\n\x7f\xff\xff\xff",
        b"PUB t\n\x00\x0f\xff\xff",
        b"MPUB t\n\x00\x4f\xff\xff\x00\x0f\xff\xf0\x00\x0f\xff\xff",
        b"IDENTIFY\n\x00\x4f\xff\xff",
        b"FIN " + b"x" * (MAX_LINE // 2),
    ],
)
def test_announced_sizes_take_no_memory_on_the_servers_side(stream: bytes) -> None:
    tracemalloc.start()
    try:
        reading = read_commands([stream, b"x" * 100])
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
    assert not reading.commands


def test_announced_sizes_take_no_memory_anywhere() -> None:
    head = bytes(10) + bytes(16)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_into(RawMessage(), head + b"\x04\xff\xff", extend=True)
        with pytest.raises(ProtocolError):
            decode_record(b"\xff\xff\xff\xff" + bytes(26) + b"x")
        BatchReader(b"MPUB", ServerLimits(), CommandTarget("t")).read(b"\x00\x0f\xff\xf0\x00\x0f\xff\xff", 0)
        lookup = LookupdCommandParser()
        lookup.receive(b"  V1IDENTIFY\n\x00\x4f\xff\xff")
        assert lookup.next_command() is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
