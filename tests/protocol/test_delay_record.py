"""The records of the topic of delayed messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import ProtocolError
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, decode_delay, encode_delay

_TEXT = st.text(max_size=20)


@given(
    st.builds(
        DelayedMessage,
        identity=_TEXT,
        topic=_TEXT,
        due=st.integers(0, 2**60),
        headers=st.none() | st.dictionaries(_TEXT, _TEXT, max_size=3),
        tag=st.none() | _TEXT,
        trace_id=st.none() | st.integers(0, 2**64 - 1),
        key=st.none() | st.binary(max_size=20),
        partition=st.none() | st.integers(0, 254),
    ),
    st.binary(max_size=50),
)
def test_a_message_survives_a_round_trip(record: DelayedMessage, body: bytes) -> None:
    assert decode_delay(encode_delay(record, body)) == (record, body)


def test_the_format_is_that_of_earlier_versions() -> None:
    data = b'{"nsqext":"delay","identity":"a","topic":"t","due":5,"key":"aw=="}\nbody\n'
    assert decode_delay(data) == (DelayedMessage(identity="a", topic="t", due=5, key=b"k"), b"body\n")
    assert decode_delay(b'{"nsqext":"cancel","identity":"a","time":7}\n') == (DelayCancel(identity="a", time=7), b"")


@pytest.mark.parametrize("data", [b"", b"hello", b"{}\nx", b'{"nsqext":"delay","identity":"a"}\n', b"\xff\n"])
def test_other_bodies_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a delayed message"):
        decode_delay(data)
