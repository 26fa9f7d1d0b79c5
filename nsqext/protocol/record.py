"""Records of a partition's queue on disk (extend header note; captured: disk_records).

::

    [4B length][8B time stamp ns][2B attempts, high 4 bits flags][8B internal id][8B trace id]
    [1B version][2B length][header]   only with flags; version 0 ends after its byte
    [body]
"""

from __future__ import annotations

from struct import Struct
from struct import error as _StructError

import msgspec

from nsqext.errors import ProtocolError

COUNTER_BITS = 50
"""An internal id is ``partition << COUNTER_BITS | counter`` (captured in partition_ids)."""

EXTEND_FLAG = 0xA000
MAX_ATTEMPTS = 4000
"""A larger stored number has flags; flags except `EXTEND_FLAG` are reserved."""

_HEAD = Struct(">IqHQQ")
_U16 = Struct(">H")
RECORD_OVERHEAD = _HEAD.size
"""Bytes of a record without extend part and body, with its length word."""


class Record(msgspec.Struct, gc=False):
    """A stored message; untracked by the garbage collector, which would stop a broker with millions."""

    timestamp: int
    internal_id: int
    trace_id: int
    body: bytes
    version: int = 0
    header: bytes = b""
    attempts: int = 0
    extend: bool = False


def raw_size(body: int, header: int, extend: bool, version: int = 0) -> int:
    """Return a record's size, as in trace replies and SUB_ADVANCED."""
    return RECORD_OVERHEAD + body + ((3 + header if version else 1) if extend else 0)


def encode_record(record: Record) -> bytes:
    """Return the bytes of a record with its length word."""
    attempts = min(record.attempts, MAX_ATTEMPTS)
    tail = record.body
    if record.extend:
        attempts |= EXTEND_FLAG
        extend = bytes((record.version,))
        if record.version:
            extend += _U16.pack(len(record.header)) + record.header
        tail = extend + record.body
    length = RECORD_OVERHEAD - 4 + len(tail)
    return _HEAD.pack(length, record.timestamp, attempts, record.internal_id, record.trace_id) + tail


def decode_record(data: bytes, position: int = 0) -> tuple[Record, int]:
    """Return the record at a position and its end; raises `ProtocolError` unless it is whole."""
    try:
        length, timestamp, attempts, internal_id, trace_id = _HEAD.unpack_from(data, position)
        stop = position + 4 + length
        start = position + RECORD_OVERHEAD
        record = Record(timestamp, internal_id, trace_id, b"", attempts=attempts)
        if attempts > MAX_ATTEMPTS:
            record.attempts, record.extend = attempts & 0x0FFF, attempts & 0xF000 == EXTEND_FLAG
        if record.extend:
            record.version, start = data[start], start + 1
            if record.version:
                size = _U16.unpack_from(data, start)[0]
                record.header, start = data[start + 2 : start + 2 + size], start + 2 + size
    except (_StructError, IndexError) as error:
        raise ProtocolError(f"record at byte {position} is cut off after {len(data) - position} bytes") from error
    if not start <= stop <= len(data):
        raise ProtocolError(f"record at byte {position} has length {length}; {len(data) - position - 4} bytes follow")
    record.body = data[start:stop]
    return record, stop
