"""Delivered messages in all layouts."""

from __future__ import annotations

import pytest

from nsqext.errors import ProtocolError
from nsqext.protocol.messages import EXT_JSON, EXT_NONE, EXT_TAG, RawMessage, decode_into, message_id
from tests.support.message_frames import encode_message
from tests.support.tables import table

_HEAD = bytes.fromhex("18e9e85ed920b381 0003 0008000000000002 000000000000007b")
_HEADERS = {EXT_NONE: b"", EXT_TAG: b"canary", EXT_JSON: b'{"k":"v"}'}
_EXTEND = {
    EXT_NONE: b"\x00",
    EXT_TAG: b"\x02\x00\x06canary",
    EXT_JSON: b'\x04\x00\x09{"k":"v"}',
}
_DETAIL = bytes.fromhex("00000000000000ff 0000004c")


def _decoded(data: bytes, extend: bool, detail: bool) -> RawMessage:
    message = RawMessage()
    decode_into(message, data, extend, detail)
    return message


@pytest.mark.parametrize("version", [EXT_NONE, EXT_TAG, EXT_JSON])
@pytest.mark.parametrize("extend", [False, True])
@pytest.mark.parametrize("detail", [False, True])
@pytest.mark.parametrize("body", [b"", b"b", bytes(range(256)) * 10])
def test_every_shape_survives_a_round_trip(version: int, extend: bool, detail: bool, body: bytes) -> None:
    data = _HEAD + (_EXTEND[version] if extend else b"") + (_DETAIL if detail else b"") + body
    message = _decoded(data, extend, detail)
    assert message.timestamp == 0x18E9E85ED920B381
    assert message.attempts == 3
    assert message.id == _HEAD[10:]
    assert (message.internal_id, message.trace_id) == (2 << 50 | 2, 123)
    assert message.version == (version if extend else EXT_NONE)
    assert message.header == (_HEADERS[version] if extend else b"")
    assert (message.offset, message.size) == ((255, 76) if detail else (-1, 0))
    assert message.body == body
    assert encode_message(message, extend, detail) == data


def test_a_message_object_can_be_filled_again() -> None:
    message = RawMessage()
    decode_into(message, _HEAD + _EXTEND[EXT_JSON] + _DETAIL + b"first", True, True)
    decode_into(message, _HEAD + b"second")
    assert (message.version, message.header, message.offset, message.size, message.body) == (0, b"", -1, 0, b"second")


@table(
    ("data", "extend", "detail"),
    [
        (b"", False, False),
        (_HEAD[:25], False, False),
        (_HEAD, True, False),
        (_HEAD + b"\x04", True, False),
        (_HEAD + b"\x04\x00", True, False),
        (_HEAD + b"\x04\x00\x09{}", True, False),
        (_HEAD + b"\x04\xff\xff{}", True, False),
        (_HEAD + _DETAIL[:11], False, True),
        (_HEAD + b"\x00" + _DETAIL[:11], True, True),
        (_HEAD + _EXTEND[EXT_TAG] + _DETAIL[:3], True, True),
    ],
)
def test_data_that_is_too_short_for_its_shape_is_refused(data: bytes, extend: bool, detail: bool) -> None:
    with pytest.raises(ProtocolError, match=f"{len(data)}"):
        _decoded(data, extend, detail)


def test_message_ids() -> None:
    assert message_id(1 << 50 | 2, 5) == bytes.fromhex("0004000000000002 0000000000000005")
    assert message_id(7) == b"\x00" * 7 + b"\x07" + b"\x00" * 8
