"""Large messages, whose bodies are copied once, are decoded like all others, however they are received."""

from __future__ import annotations

from itertools import pairwise
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import ProtocolError
from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import LargeFrame, MessageData, encode_frame
from nsqext.protocol.messages import RawMessage, decode_into

_BODY = bytes(range(256)) * 300


def _data(*, header: bytes | None = None, extend: bool = False, detail: bool = False, body: bytes = _BODY) -> bytes:
    """Return the data of a message frame."""
    data = pack(">qH16s", 1_700_000_000_000_000_000, 3, b"0123456789abcdef")
    if extend:
        data += b"\0" if header is None else b"\4" + len(header).to_bytes(2, "big") + header
    return data + (pack(">QI", 77, 99) if detail else b"") + body


def _received(data: bytes, pieces: list[bytes]) -> MessageData:
    """Return the data of the message of a frame, as a consumer receives it."""
    parser = FrameParser()
    parser.splits = True
    messages: list[MessageData] = []
    for piece in pieces:
        assert parser.feed(piece, messages) == []
    (found,) = messages
    assert len(found) == len(data)
    return found


def _decoded(data: MessageData, extend: bool, detail: bool) -> RawMessage:
    message = RawMessage()
    decode_into(message, data, extend, detail)
    return message


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


@given(
    header=st.sampled_from([None, b"{}", b"h" * 4000, b"h" * 5000, b"h" * 65_000]),
    extend=st.booleans(),
    detail=st.booleans(),
    cuts=st.lists(st.one_of(st.integers(1, 60), st.integers(4090, 4110), st.integers(1, 76_000)), max_size=6),
)
def test_a_large_message_is_decoded_as_if_received_in_one_piece(
    header: bytes | None, extend: bool, detail: bool, cuts: list[int]
) -> None:
    data = _data(header=header, extend=extend, detail=detail)
    found = _received(data, _cut(encode_frame(2, data), cuts))
    assert type(found) is LargeFrame
    expected, message = _decoded(data, extend, detail), _decoded(found, extend, detail)
    for name in RawMessage.__slots__:
        assert getattr(message, name) == getattr(expected, name)
    assert message.body == _BODY
    assert {type(message.body), type(message.header)} == {bytes}


@pytest.mark.parametrize("first", [1, 4095, 4096, 4097])
def test_the_start_of_a_large_frame_has_the_same_size_whatever_its_pieces(first: int) -> None:
    data = bytes(range(256)) * 40
    frame = LargeFrame([memoryview(data)[:first], memoryview(data)[first:]], len(data))
    assert (frame.start(), frame.behind(0), frame.behind(5000)) == (data[:4096], data, data[5000:])


@pytest.mark.parametrize(("size", "kind"), [(65_506, bytes), (65_507, LargeFrame)])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_message_is_large_by_the_size_of_its_frame(size: int, kind: type, pieces: int) -> None:
    """A frame has a word for its type, and a message 26 bytes in front of the body."""
    data = _data(body=b"x" * size)
    frame = encode_frame(2, data)
    assert type(_received(data, _cut(frame, [1000] * (pieces - 1)))) is kind


def test_other_frames_of_the_same_read_keep_their_place() -> None:
    parser = FrameParser()
    parser.splits = True
    small, large = _data(body=b"small"), _data()
    messages: list[MessageData] = []
    sent = b"".join(encode_frame(2, data) for data in (small, large, small)) + encode_frame(0, b"OK")
    assert parser.feed(sent, messages) == [(0, b"OK")]
    assert [_decoded(data, False, False).body for data in messages] == [b"small", _BODY, b"small"]


@pytest.mark.parametrize("cuts", [[], [30], [5000]])
def test_a_large_message_that_is_too_short_for_its_header_is_refused(cuts: list[int]) -> None:
    data = _data(body=b"\4\xff\xff" + b"h" * 65_510)
    with pytest.raises(ProtocolError, match=r"extend header ends at byte \d+ of a message of 65539 bytes"):
        _decoded(_received(data, _cut(encode_frame(2, data), cuts)), True, False)
