"""Frames as columns: the same fields that decoding one message gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import ProtocolError
from nsqext.protocol.messages import EXT_JSON, EXT_NONE, EXT_TAG, RawMessage, decode_into
from nsqext.spark.read.frames import MessageColumns, decode_frames, finish_commands, from_messages
from tests.support.message_frames import encode_message


@st.composite
def messages(draw: st.DrawFn) -> RawMessage:
    message = RawMessage()
    message.timestamp = draw(st.integers(min_value=0, max_value=2**63 - 1))
    message.attempts = draw(st.integers(min_value=0, max_value=2**16 - 1))
    message.id = draw(st.binary(min_size=16, max_size=16))
    message.version = draw(st.sampled_from([EXT_NONE, EXT_TAG, EXT_JSON]))
    message.header = draw(st.binary(max_size=300)) if message.version else b""
    message.offset = draw(st.integers(min_value=0, max_value=2**62))
    message.size = draw(st.integers(min_value=1, max_value=2**32 - 1))
    message.body = draw(st.binary(max_size=60))
    return message


def fields(found: MessageColumns, index: int) -> tuple[object, ...]:
    head = found.heads[index]
    part = b"\0" if found.headers is None else found.headers[index]
    assert len(part) == 1 if part[0] == EXT_NONE else int.from_bytes(part[1:3]) == len(part) - 3
    header = (part[0], part[3:])
    assert found.body_array().to_pylist() == found.bodies
    assert found.body_sizes().tolist() == [len(body) for body in found.bodies]
    numbers = (int(head["timestamp"]), int(head["attempts"]), int(head["offset"]), int(head["size"]))
    return (*numbers, head["id"].tobytes(), *header, found.bodies[index])


@given(st.lists(messages(), min_size=1, max_size=8), st.booleans())
def test_the_same_fields_as_of_single_messages(given: list[RawMessage], extend: bool) -> None:
    frames = [encode_message(message, extend, detail=True) for message in given]
    columns = decode_frames(frames, extend)
    expected: list[tuple[object, ...]] = []
    for frame in frames:
        one = RawMessage()
        decode_into(one, frame, extend, True)
        numbers = (one.timestamp, one.attempts, one.offset, one.size)
        expected.append((*numbers, one.id, one.version, one.header, one.body))
    assert [fields(columns, index) for index in range(len(columns))] == expected
    assert finish_commands(columns) == b"".join(b"FIN %b\n" % message.id for message in given)
    parts = [columns.part(0, 1), columns.part(1, len(columns))]
    joined = MessageColumns.joined(parts)
    assert [fields(joined, index) for index in range(len(joined))] == expected
    assert decode_frames(frames, extend, with_bodies=False).bodies == []


@given(messages(), st.booleans(), st.data())
def test_frames_that_are_too_short(message: RawMessage, extend: bool, data: st.DataObject) -> None:
    message.body = b""
    frame = encode_message(message, extend, detail=True)
    short = frame[: data.draw(st.integers(min_value=0, max_value=len(frame) - 1))]
    with pytest.raises(ProtocolError, match="too short for its parts"):
        decode_frames([frame, short], extend)


def test_deliveries_before_and_after_an_upgrade_of_the_topic() -> None:
    message = RawMessage()
    message.timestamp, message.attempts, message.id = 1, 1, bytes(16)
    message.version, message.header, message.offset, message.size, message.body = EXT_JSON, b"{}", 0, 9, b"x"
    plain = decode_frames([encode_message(message, False, detail=True)], False)
    assert MessageColumns.joined([plain, from_messages([message])]).headers == [b"\0", b"\4\0\2{}"]
