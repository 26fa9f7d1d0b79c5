"""The records of the topic of delayed messages."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.delays import DelayStore
from nsqext.errors import ProtocolError
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, decode_delay, encode_delay

_TEXT = st.text(max_size=20)
_NAME = st.from_regex("[a-z0-9_.-]{1,20}", fullmatch=True)


@given(
    st.builds(
        DelayedMessage,
        identity=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200),
        topic=_NAME,
        due=st.integers(0, 253_402_300_799_999),
        headers=st.none() | st.dictionaries(_NAME, _TEXT, max_size=3),
        tag=st.none() | st.from_regex("[a-z0-9_-]{1,20}", fullmatch=True),
        trace_id=st.none() | st.integers(0, 2**64 - 1),
        key=st.none() | st.binary(min_size=1, max_size=20),
        partition=st.none() | st.integers(0, 254),
    ),
    st.binary(min_size=1, max_size=50),
)
def test_a_message_survives_a_round_trip(record: DelayedMessage, body: bytes) -> None:
    assert decode_delay(encode_delay(record, body)) == (record, body)


def test_the_format_is_that_of_earlier_versions() -> None:
    data = b'{"nsqext":"delay","identity":"a","topic":"t","due":5,"key":"aw=="}\nbody\n'
    assert decode_delay(data) == (DelayedMessage(identity="a", topic="t", due=5, key=b"k"), b"body\n")
    assert decode_delay(b'{"nsqext":"cancel","identity":"a","time":7}\n') == (DelayCancel(identity="a", time=7), b"")


_DEEP = b'{"nsqext":"delay","identity":"a","topic":"t","due":1,"x":' + 100_000 * b"[" + 100_000 * b"]" + b"}\nx"


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"{}\nx", b'{"nsqext":"delay","identity":"a"}\n', b"\xff\n", pytest.param(_DEEP, id="deep")]
)
def test_other_bodies_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a delayed message"):
        decode_delay(data)


_NUMBER = st.integers(-(2**70), 2**70) | st.integers(2**63 - 2, 2**63 + 2) | st.floats() | st.sampled_from([2**53, "1"])
_ANY = _NUMBER | st.text(max_size=300) | st.none() | st.booleans() | st.dictionaries(_TEXT, _TEXT, max_size=2)


@given(
    st.fixed_dictionaries(
        {"nsqext": st.sampled_from(["delay", "cancel", "else"])},
        optional={
            "identity": _TEXT | _ANY,
            "topic": _NAME | _ANY,
            "due": _NUMBER,
            "time": _NUMBER,
            "headers": st.none() | st.dictionaries(_TEXT, _TEXT, max_size=2) | _ANY,
            "tag": _NAME | _ANY,
            "trace_id": _ANY,
            "key": st.sampled_from(["", "aw==", "not base64"]) | _ANY,
            "partition": _ANY,
        },
    ),
    st.binary(max_size=5),
)
def test_a_store_keeps_and_lists_every_record_that_is_not_refused(record: dict[str, object], body: bytes) -> None:
    """Records that other programs publish to the topic."""
    data = json.dumps(record).encode() + b"\n" + body
    with TemporaryDirectory() as folder, DelayStore(Path(folder) / "store") as store:
        try:
            found = decode_delay(data)
        except ProtocolError as error:
            store.refuse([(data, error.message)])
            assert store.refused()[0].record == data
            return
        store.add([found])
        for waiting in store.waiting():
            assert datetime.fromtimestamp(waiting.due, UTC).year >= 1970
        for *_, taken in store.take([], 9, 1e12, 1.0):
            assert decode_delay(taken) == found


@given(st.binary(max_size=80))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    for start in (b"", b'{"nsqext":"delay",', b'{"nsqext":"cancel","identity":"a","time":'):
        try:
            decode_delay(start + data)
        except ProtocolError as error:
            assert "not a delayed message" in str(error)


def test_times_of_cancellations_and_keys_are_checked() -> None:
    for data in (
        encode_delay(DelayCancel(identity="a", time=-1)),
        encode_delay(DelayedMessage(identity="a", topic="t", due=1, key=b""), b"body"),
    ):
        with pytest.raises(ProtocolError, match=r"not a delayed message: (the time -1|its key is empty)"):
            decode_delay(data)
