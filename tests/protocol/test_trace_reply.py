"""Replies with trace."""

from __future__ import annotations

import pytest

from nsqext.errors import ProtocolError
from nsqext.protocol.frames import TRACE_REPLY_SIZE, decode_trace_reply, encode_trace_reply


def test_a_trace_reply_has_thirty_bytes() -> None:
    data = encode_trace_reply(2, 123, 117, 76)
    assert data == bytes.fromhex("4f4b0000000000000002000000000000007b00000000000000750000004c")
    assert len(data) == TRACE_REPLY_SIZE == 30
    assert decode_trace_reply(data, 123) == (2, 123, 117, 76)


@pytest.mark.parametrize("data", [b"", b"OK", b"OK" + bytes(27), b"OK" + bytes(29), b"KO" + bytes(28)])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected OK and 28 bytes"):
        decode_trace_reply(data, 0)


def test_another_trace_id_is_refused() -> None:
    for received in (7, 0):
        with pytest.raises(ProtocolError, match=f"received the trace id {received} .* with 8"):
            decode_trace_reply(encode_trace_reply(1, received, 2, 3), 8)
