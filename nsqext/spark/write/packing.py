"""Values and ids of a record batch as the items of a batch command, without an object for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from attrs import frozen

from nsqext.client.producer.packed import PackedMessages
from nsqext.errors import InvalidHeader
from nsqext.protocol.client.commands import HEADER_LENGTH, TRACE_SIZE
from nsqext.protocol.headers import MAX_HEADER_BYTES, encode_headers
from nsqext.spark.write.row_ids import TASK_SUFFIX

if TYPE_CHECKING:
    import numpy.typing as npt

    from nsqext.client.producer.packed import Verb
    from nsqext.spark.write.row_ids import BatchIds

    Sizes = npt.NDArray[np.int64]


@frozen(eq=False)
class PackedRows:
    """Rows of a batch in their order; a slice of them are `PackedMessages`."""

    verb: Verb
    ends: Sizes  #: bytes up to the end of each row
    _data: pa.Buffer
    _first: int  # byte of the buffer
    _largest: Sizes  # bytes of body and header of each row

    @classmethod
    def of_bodies(cls, values: pa.Array) -> Self:
        values = _binary(values)
        sizes = _sizes(values)
        return cls._of("MPUB", _heads([("size", ">u4")], sizes), [], values, sizes)

    @classmethod
    def with_traces(cls, values: pa.Array, ids: BatchIds) -> Self:
        values = _binary(values)
        sizes = _sizes(values)
        heads = _heads([("size", ">u4"), ("trace", ">u8")], sizes + TRACE_SIZE, ids.trace_ids)
        return cls._of("MPUB_TRACE", heads, [], values, sizes)

    @classmethod
    def with_headers(cls, values: pa.Array, ids: BatchIds, name: str) -> Self | None:
        """Return rows with their ids in a header; None if that header is invalid."""
        try:
            begin = encode_headers({name: ids.prefix})[: -len('"}')]
            end = b'"}'
            if ids.task is not None:
                end = b'",' + encode_headers({f"{name}{TASK_SUFFIX}": ids.task})[len("{") :]
        except InvalidHeader:
            return None
        values, own = _binary(values), _binary(ids.ends)
        headers = _sizes(own) + len(begin) + len(end)
        sizes = _sizes(values) + headers
        if headers.max() > MAX_HEADER_BYTES:
            return None
        heads = _heads([("size", ">u4"), ("header", ">u2")], sizes + HEADER_LENGTH, headers)
        parts = [_constant(begin), own, _constant(end)]
        return cls._of("MPUB_EXT", heads, parts, values, sizes)

    @classmethod
    def _of(cls, verb: Verb, heads: pa.Array, parts: list[Any], values: pa.Array, largest: Sizes) -> Self:
        items = pc.binary_join_element_wise(heads, *parts, values, _constant(b""))
        _, offsets, data = items.buffers()
        edges = np.frombuffer(offsets, np.int64)[items.offset : items.offset + len(items) + 1]
        return cls(verb, edges[1:] - edges[0], data, int(edges[0]), largest)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, rows: slice) -> PackedMessages:
        start, stop, _ = rows.indices(len(self))
        begin = self._first + (int(self.ends[start - 1]) if start else 0)
        data = memoryview(self._data)[begin : self._first + int(self.ends[stop - 1])]
        return PackedMessages(self.verb, [data], stop - start, int(self._largest[start:stop].max()))


def _binary(array: pa.Array) -> pa.Array:
    if pa.types.is_string(array.type):
        array = array.cast(pa.binary())
    return array.cast(pa.large_binary())


def _constant(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.large_binary())


def _sizes(array: pa.Array) -> Sizes:
    sizes: Sizes = pc.binary_length(array).to_numpy()
    return sizes


def _heads(fields: list[tuple[str, str]], *columns: npt.NDArray[Any]) -> pa.Array:
    """Return what precedes each message, of big-endian numbers."""
    heads = np.empty(len(columns[0]), fields)
    for (name, _), column in zip(fields, columns, strict=True):
        heads[name] = column
    kind = pa.binary(heads.itemsize)
    fixed = pa.FixedSizeBinaryArray.from_buffers(kind, len(heads), [None, pa.py_buffer(heads.tobytes())])
    return fixed.cast(pa.large_binary())
