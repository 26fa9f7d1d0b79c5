"""Frames: parsing them from a stream, and invalid streams."""

from __future__ import annotations

import tracemalloc

import pytest

from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import HEARTBEAT, OK, FrameType, MessageData, encode_frame
from tests.support.tables import table

_TWO = encode_frame(FrameType.RESPONSE, OK) + encode_frame(FrameType.MESSAGE, b"x" * 300)


def test_a_frame_has_size_type_and_data() -> None:
    assert encode_frame(FrameType.ERROR, b"E_INVALID ") == b"\x00\x00\x00\x0e\x00\x00\x00\x01E_INVALID "
    assert encode_frame(FrameType.RESPONSE, b"") == b"\x00\x00\x00\x04\x00\x00\x00\x00"


def test_data_is_copied() -> None:
    parser = FrameParser()
    parser.feed(_TWO[:5])
    frames = parser.feed(_TWO[5:])
    assert [type(data) for _, data in frames] == [bytes, bytes]


def test_frames_are_returned_one_at_a_time_where_a_layer_may_begin() -> None:
    parser = FrameParser()
    parser.single = True
    assert parser.feed(_TWO + b"rest") == [(0, OK)]
    assert parser.feed(b"") == [(2, b"x" * 300)]
    assert parser.feed(b"") == []
    assert parser.take_rest() == b"rest"
    assert parser.buffered == 0
    assert parser.feed(_TWO) == [(0, OK)]


@table(
    ("data", "text"),
    [
        (b"\x00\x00\x00\x03\x00\x00\x00\x00", "frame size 3 is not within 4..100"),
        (
            b"\x00\x00\x00\x65\x00\x00\x00\x02",
            "101 bytes is larger than max_frame_size, 100: raise max_frame_size: .* sends such a message again",
        ),
        (b"\xff\xff\xff\xff\x00\x00\x00\x00", "frame of 4294967295 bytes"),
        (b"\x00\x00\x00\x04\x00\x00\x00\x03", "frame type 3 is unknown"),
        (b"\x00\x00\x00\x04\xff\xff\xff\xff", "frame type -1 is unknown"),
        (b"HTTP/1.1 400 Bad Request\r\n", "responds with HTTP.*give the TCP address"),
        (b"\x00\x00\x00\x0eE_BAD_PROTOCOL", "frame type 1163870785 is unknown"),
        (b"SSH-2.0-OpenSSH_9\r\n", "frame size"),
    ],
)
@pytest.mark.parametrize("cut", [15, 100])
def test_an_invalid_frame_ends_the_reading(data: bytes, text: str, cut: int) -> None:
    parser = FrameParser(max_frame_size=100)
    good = encode_frame(0, OK)
    sent = good + data + good
    assert [*parser.feed(sent[:cut]), *parser.feed(sent[cut:])] == [(0, OK)]
    assert parser.error is not None
    with pytest.raises(type(parser.error), match=text):
        raise parser.error
    assert parser.feed(good) == []
    assert parser.buffered == 0


def test_the_largest_frame_is_accepted() -> None:
    parser = FrameParser(max_frame_size=104)
    assert parser.feed(encode_frame(2, b"x" * 100)) == [(2, b"x" * 100)]
    assert parser.error is None


def test_an_announced_size_allocates_no_memory() -> None:
    parser = FrameParser(max_frame_size=0xFFFFFFFF)
    tracemalloc.start()
    try:
        assert parser.feed(b"\xff\xff\xff\xff\x00\x00\x00\x02" + b"x" * 1000) == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert parser.buffered == 1008


def test_heartbeats_are_responses() -> None:
    assert FrameParser().feed(encode_frame(0, HEARTBEAT)) == [(FrameType.RESPONSE, b"_heartbeat_")]


@pytest.mark.parametrize("kind", [0, 2])
def test_a_large_frame_is_read_by_itself(kind: int) -> None:
    parser, data = FrameParser(), encode_frame(kind, bytes(range(250)) * 4000)
    messages: list[MessageData] = []
    frames = parser.feed(encode_frame(0, OK) + data[:5000], messages)
    position, reads = 5000, 0
    while parser.wanted:
        assert parser.wanted <= max(65536, position)
        chunk = data[position : position + parser.wanted]
        position, reads = position + len(chunk), reads + 1
        frames += parser.feed(chunk, messages)
    assert reads <= 6
    assert (position, parser.buffered) == (len(data), 0)
    assert frames[0] == (0, OK)
    found: list[MessageData] = messages if kind == 2 else [payload for _, payload in frames[1:]]
    assert found == [data[8:]]
    assert type(found[0]) is bytes


def test_a_read_beyond_a_large_frame_returns_the_next_one_too() -> None:
    parser, data = FrameParser(), encode_frame(2, b"x" * 100_000)
    parser.feed(data[:3])
    parser.feed(data[3:5000])
    assert parser.feed(data[5000:] + _TWO) == [(2, b"x" * 100_000), (0, OK), (2, b"x" * 300)]
    assert (parser.wanted, parser.buffered) == (0, 0)


@pytest.mark.parametrize("cut", [3, 8, 9, 150])
@pytest.mark.parametrize("more", [b"", _TWO[:5], _TWO, _TWO * 40])
def test_what_follows_the_rest_of_a_frame_is_parsed_as_if_received_with_it(cut: int, more: bytes) -> None:
    parser, data = FrameParser(), encode_frame(2, bytes(range(200)))
    messages: list[MessageData] = []
    frames = parser.feed(_TWO + data[:cut], messages) + parser.feed(data[cut:] + more, messages)
    whole = _TWO + data + more
    expected: list[MessageData] = []
    assert frames == FrameParser().feed(whole, expected)
    assert messages == expected
    assert {type(payload) for payload in messages} == {bytes}


def test_pieces_of_one_byte_take_no_more_memory_than_their_bytes() -> None:
    parser, data = FrameParser(), encode_frame(2, bytes(60_000))
    tracemalloc.start()
    try:
        for position in range(50_000):
            parser.feed(data[position : position + 1])
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert parser.feed(data[50_000:]) == [(2, bytes(60_000))]
