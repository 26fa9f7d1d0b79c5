"""Records on disk."""

from __future__ import annotations

import pytest

from nsqext.errors import ProtocolError
from nsqext.protocol.record import RECORD_OVERHEAD, Record, decode_record, encode_record, raw_size

_PLAIN = Record(1795230183000000000, 2, 9, b"body")
_JSON = Record(1795230183000000000, 2, 9, b"body", 4, b'{"k":"v"}', 3, True)
_TAG = Record(1795230183000000000, 2, 9, b"body", 2, b"tagA", 0, True)
_NO_EXT = Record(1795230183000000000, 2, 9, b"body", extend=True)


@pytest.mark.parametrize("record", [_PLAIN, _JSON, _TAG, _NO_EXT, Record(0, 0, 0, b"")])
def test_records_survive_a_round_trip(record: Record) -> None:
    data = encode_record(record)
    assert len(data) == raw_size(len(record.body), len(record.header), record.extend, record.version)
    assert decode_record(b"xx" + data + b"yy", 2) == (record, 2 + len(data))


def test_sizes_are_announced_by_servers() -> None:
    assert RECORD_OVERHEAD == 30
    assert raw_size(4, 0, extend=False) == 34
    assert raw_size(4, 0, extend=True) == 35
    assert raw_size(4, 11, extend=True, version=4) == 48


def test_flags_and_attempts_share_a_word() -> None:
    data = encode_record(_JSON)
    assert data[12:14] == b"\xa0\x03"
    assert encode_record(_PLAIN)[12:14] == b"\x00\x00"
    assert decode_record(encode_record(Record(0, 1, 0, b"b", attempts=9999)))[0].attempts == 4000
    assert decode_record(encode_record(Record(0, 1, 0, b"b", attempts=9999, extend=True)))[0].attempts == 4000


@pytest.mark.parametrize("field", [b"\x0f\xa1", b"\xb0\x00", b"\x9f\xff", b"\x0f\xff"])
def test_reserved_flags_mean_no_extend_part(field: bytes) -> None:
    data = encode_record(_PLAIN)
    record, stop = decode_record(data[:12] + field + data[14:])
    assert (record.extend, record.body, stop) == (False, b"body", len(data))
    assert record.attempts == int.from_bytes(field) & 0x0FFF


def test_records_from_before_an_upgrade_have_no_extend_part() -> None:
    data = encode_record(_PLAIN) + encode_record(_JSON)
    first, position = decode_record(data)
    second, stop = decode_record(data, position)
    assert (first.extend, second.extend) == (False, True)
    assert stop == len(data)


@pytest.mark.parametrize("record", [_PLAIN, _JSON, _NO_EXT])
def test_a_torn_tail_is_refused_at_every_byte(record: Record) -> None:
    data = encode_record(record)
    for size in range(len(data)):
        with pytest.raises(ProtocolError, match="record at byte 0"):
            decode_record(data[:size])


@pytest.mark.parametrize("length", [0, 25, 26 + 11, 0x7FFFFFFF, 0xFFFFFFFF])
def test_an_impossible_length_is_refused(length: int) -> None:
    data = encode_record(_JSON)
    with pytest.raises(ProtocolError, match=f"has length {length};"):
        decode_record(length.to_bytes(4) + data[4:])
