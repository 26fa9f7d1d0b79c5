"""Values and ids of a batch as items of a command."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from nsqext.protocol.headers import MAX_HEADER_BYTES, encode_headers
from nsqext.spark.write.packing import PackedRows
from nsqext.spark.write.row_ids import BatchIds, ContentIds, NumberedIds
from tests.support.commands import ext_body, multi_body, trace_body

VALUES = ["a", "ü" * 300, "c", "c", "d"]
BODIES = [value.encode() for value in VALUES]


def _ids(kind: Any, values: pa.Array) -> BatchIds:
    ids: BatchIds = kind("q/1", 2).of_batch({"value": values}, 0)
    return ids


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("numbering", [NumberedIds, ContentIds])
def test_rows_of_a_part_of_an_array_are_packed(kind: pa.DataType, numbering: Any) -> None:
    values = pa.array(["before", *VALUES, "behind"], pa.string()).cast(kind)[1:-1]
    ids = _ids(numbering, values)
    headers = [encode_headers(ids.headers_of("n", index)) for index in range(len(VALUES))]
    traces = ids.trace_ids.tolist()
    bodies, traced = PackedRows.of_bodies(values), PackedRows.with_traces(values, ids)
    headed = PackedRows.with_headers(values, ids, "n")
    assert headed is not None
    for start, stop in ((0, 5), (0, 1), (1, 4), (4, 5)):
        rows = slice(start, stop)
        expected = {
            bodies: BODIES,
            traced: list(map(trace_body, traces, BODIES)),
            headed: list(map(ext_body, headers, BODIES)),
        }
        for packed, items in expected.items():
            messages = packed[rows]
            assert b"".join(messages.items) == multi_body(items[rows])[4:]
            assert len(messages) == stop - start
            assert packed.ends[stop - 1] == sum(4 + len(item) for item in items[:stop])
        assert headed[rows].largest == max(map(len, map(bytes.__add__, headers[rows], BODIES[rows])))


@pytest.mark.parametrize(("name", "job"), [("##n", "q"), ("a b", "q"), ("n", "q" * 60_000)])
def test_headers_that_are_invalid_are_not_packed(name: str, job: str) -> None:
    values = pa.array([b"a"])
    assert PackedRows.with_headers(values, NumberedIds(job).of_batch({"value": values}, 0), name) is None


def test_headers_of_the_largest_size_are_packed() -> None:
    values = pa.array([b"a"])
    room = MAX_HEADER_BYTES - len(encode_headers({"n": "/0/0/0"}))
    for job, packed in (("q" * room, True), ("q" * (room + 1), False)):
        ids = NumberedIds(job).of_batch({"value": values}, 0)
        assert (PackedRows.with_headers(values, ids, "n") is not None) is packed


def test_no_trace_id_is_0() -> None:
    assert BatchIds("", pa.array, np.zeros(1, np.uint64)).trace_ids.tolist() == [1]
