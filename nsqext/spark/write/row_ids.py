"""Ids of rows, by which readers remove rows that were published more than once.

A failed task and an interrupted micro-batch run again, maybe with their rows in other tasks. The id of a row therefore
follows the row: ``query/batch/hash`` has the id of the query, which its checkpoint stores, the number of the
micro-batch, and a hash of content and position, if any. Equal rows are numbered: ``query/batch/hash-1`` is the second
of its task.

Equal rows of different tasks without a position have the same id. On topics with extend headers they have a second
header, run and task, by which `dedupe` numbers the equal rows of each run: a complete run has each row once. 64-bit
trace ids, on topics without extend headers, have no room for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import pyarrow as pa
from attrs import define, field, frozen

if TYPE_CHECKING:
    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

# properties of a task with its query and micro-batch
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"

_DIGITS = 16  # of a hash
_RUN_DIGITS = 12

POSITIONS = ("offset", "queue_offset", "message_id")
"""Columns of a read that identify a row's message; they are not published."""
_HASHED = ("value", "topic", "key", "partition", "headers", "header", "trace_id", "tag", *POSITIONS)

TASK_SUFFIX = "_task"
"""Suffix of the id's header for the header with a row's run and task."""


@frozen
class BatchIds:
    """Ids of consecutive rows, made when a topic needs texts or trace ids."""

    prefix: str  #: begin of each text
    _ends: Callable[[], pa.Array]
    _seeds: Hashes  # of the trace ids
    task: str | None = None  #: run and task, where an id may occur in several tasks
    ambiguous: bool = False  #: whether equal rows exist, and other tasks may have them as well

    @cached_property
    def ends(self) -> pa.Array:
        """The rest of each text, in ASCII without characters that JSON escapes."""
        return self._ends()

    @cached_property
    def texts(self) -> list[str]:
        return list(map(self.prefix.__add__, self.ends.to_pylist()))

    @cached_property
    def trace_ids(self) -> Hashes:
        """The ids for other topics; never 0, which means no trace id."""
        found = mixed(self._seeds)
        found[found == 0] = 1
        return found

    def headers_of(self, name: str, index: int) -> dict[str, str]:
        """Return the headers that identify a row."""
        if self.task is None:
            return {name: self.texts[index]}
        return {name: self.texts[index], f"{name}{TASK_SUFFIX}": self.task}


class RowIds(Protocol):
    """Gives ids to the rows of a task, in their order."""

    @property
    def partition(self) -> int | None:
        """Number of the task's partition; None without Spark."""

    def of_batch(self, columns: Mapping[str, pa.Array], first: int) -> BatchIds:
        """Return the ids of the next rows; ``first`` is the number of the first row."""

    def of_description(self, row: int, content: bytes) -> BatchIds:
        """Return the id of the description of a row that cannot be published."""


def row_name(row: int, partition: int | None) -> str:
    return f"row {row}" if partition is None else f"row {row} of Spark partition {partition}"


def scope_hash(text: str) -> np.uint64:
    """Return a hash of the query and batch of rows, or of the name of a column."""
    return np.uint64(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big"))


def mixed(numbers: Hashes) -> Hashes:
    """Return the numbers mixed by SplitMix64; different numbers stay different."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * _FACTORS[0]
    numbers = (numbers ^ (numbers >> np.uint64(27))) * _FACTORS[1]
    return numbers ^ (numbers >> np.uint64(31))


@frozen
class NumberedIds:
    """Ids of rows that are always written in the same order: ``job/0/0/row``."""

    job: str
    partition: int | None = None

    def of_batch(self, columns: Mapping[str, pa.Array], first: int) -> BatchIds:
        """Return the ids of rows; a repeated job repeats them if it has the same rows in the same order."""
        return self._of(first, len(next(iter(columns.values()))))

    def of_description(self, row: int, content: bytes) -> BatchIds:
        return self._of(row, 1)

    def _of(self, first: int, count: int) -> BatchIds:
        prefix = f"{self.job}/0/{self.partition or 0}"
        numbers = np.arange(first + 1, first + count + 1, dtype=np.uint64)
        rows = pa.array(np.arange(first, first + count))
        return BatchIds(f"{prefix}/", lambda: rows.cast(pa.string()), scope_hash(prefix) + numbers * _GAMMA)


@define(eq=False)
class ContentIds:
    scope: str  #: query and batch, with the task if its rows are never in another task
    partition: int
    run: str | None = None  #: of the batch, where another run may distribute the rows over other tasks
    _repeats: Repeats = field(factory=lambda: Repeats())
    _lock: Lock = field(factory=Lock)  # descriptions are made in another thread, while messages are published

    @classmethod
    def of_job(cls, run: str, job: str | None = None) -> Self:
        """Return the ids of the current task of a batch.

        Args:
            run: unique for each run of the batch.
            job: equal for each run; None for a batch that is run once.
        """
        from pyspark import TaskContext  # not on the driver

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        if job is None:
            return cls(f"{run}/{partition}", partition)
        return cls(f"{job}/0", partition, run[:_RUN_DIGITS])

    @classmethod
    def of_query(cls, run: str) -> Self:
        """Return the ids of the current task of a micro-batch; of a batch if Spark names no query."""
        from pyspark import TaskContext  # not on the driver

        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context is not None else None
        batch = context.getLocalProperty(_BATCH) if context is not None else None
        if context is None or query is None or batch is None:
            return cls.of_job(run)
        return cls(f"{query}/{batch}", context.partitionId(), run[:_RUN_DIGITS])

    def of_batch(self, columns: Mapping[str, pa.Array], first: int) -> BatchIds:
        return self._of(content_hashes(columns), shared=self.run is not None and not _have_positions(columns))

    def of_description(self, row: int, content: bytes) -> BatchIds:
        """Return the id of a description, from what it says about the row."""
        return self._of(content_hashes({"value": pa.array([content])}), shared=self.run is not None)

    def _of(self, hashes: Hashes, *, shared: bool) -> BatchIds:
        with self._lock:
            numbers = self._repeats.numbers(hashes)
        seeds = hashes ^ scope_hash(self.scope)
        if numbers:
            seeds[list(numbers)] += np.array(list(numbers.values()), np.uint64) * _GAMMA
        task = f"{self.run}/{self.partition}" if shared else None
        return BatchIds(
            f"{self.scope}/", lambda: _ends(hashes, numbers), seeds, task, ambiguous=shared and bool(numbers)
        )


def _ends(hashes: Hashes, numbers: Mapping[int, int]) -> pa.Array:
    digits = hashes.astype(">u8").tobytes().hex()
    edges = np.arange(0, len(digits) + 1, _DIGITS, dtype=np.int32)
    found = pa.StringArray.from_buffers(len(hashes), pa.py_buffer(edges), pa.py_buffer(digits.encode()))
    if not numbers:
        return found
    texts = found.to_pylist()
    for index, number in numbers.items():
        texts[index] += f"-{number}"
    return pa.array(texts, pa.string())


class Repeats:
    """Numbers the rows of equal content of a task; needs 8 bytes per row."""

    def __init__(self) -> None:
        self._seen: list[Hashes] = []  # sorted, each less than half as long as the previous
        self._counts: dict[int, int] = {}  # rows by hash, if several

    def numbers(self, hashes: Hashes) -> dict[int, int]:
        """Return by index the number of equal rows before rows that have equal rows."""
        found = np.sort(hashes)
        if not ((found[1:] == found[:-1]).any() or self._known(found).any()):
            self._add(found)
            return {}
        order = np.argsort(hashes, kind="stable")
        starts = np.flatnonzero(np.r_[True, found[1:] != found[:-1]][: len(found)])
        unique, ends = found[starts], np.r_[starts[1:], len(found)]
        known = self._known(unique)
        self._add(unique[~known])
        numbers: dict[int, int] = {}
        for index in np.flatnonzero(known | (ends - starts > 1)):
            content = int(unique[index])
            before = self._counts.get(content, int(known[index]))
            equal = order[starts[index] : ends[index]].tolist()
            self._counts[content] = before + len(equal)
            numbers.update((row, number) for number, row in enumerate(equal, before) if number)
        return numbers

    def _known(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        known = np.zeros(len(hashes), bool)
        for seen in self._seen:
            known |= seen[np.minimum(np.searchsorted(seen, hashes), len(seen) - 1)] == hashes
        return known

    def _add(self, hashes: Hashes) -> None:
        if len(hashes):
            self._seen.append(hashes)
        while len(self._seen) > 1 and len(self._seen[-2]) < 2 * len(self._seen[-1]):
            last = self._seen.pop()
            self._seen[-1] = np.sort(np.concatenate((self._seen[-1], last)))


def _have_positions(columns: Mapping[str, pa.Array]) -> bool:
    """Return whether each row has a position in a topic: rows of one message are in one task."""

    def has(*names: str) -> bool:
        return all(name in columns and not columns[name].null_count for name in names)

    return has("topic", "message_id") or has("topic", "partition", "offset")


def content_hashes(columns: Mapping[str, pa.Array]) -> Hashes:
    """Return a hash of each row's published content and position."""
    found: Hashes = np.zeros(len(next(iter(columns.values()))), np.uint64)
    for name in _HASHED:
        if name in columns:
            found = mixed((found * _GAMMA) ^ (_hashed(columns[name]) + scope_hash(name)))
    return found


def _hashed(array: pa.Array) -> Hashes:
    """Return a hash of each value; equal for text and its bytes."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_integer(array.type):
        numbers = array.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64)
        return _without_nulls(array, mixed(numbers))
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.large_binary())
    if pa.types.is_nested(array.type):  # headers: their order does not matter
        texts = [repr(sorted(map(repr, pairs or ()))).encode() for pairs in array.to_pylist()]
        return _without_nulls(array, _of_bytes(pa.array(texts, pa.large_binary())))
    return _without_nulls(array, _of_bytes(array))


def _of_bytes(array: pa.Array) -> Hashes:
    from pandas.util import hash_array  # comes with Spark; nsqext.arrow has no pandas

    hashes: Hashes = hash_array(array.to_numpy(zero_copy_only=False), categorize=False)
    return hashes


def _without_nulls(array: pa.Array, hashes: Hashes) -> Hashes:
    """Return the hashes; null gets a hash that no value has but by chance."""
    if array.null_count:
        hashes = np.where(array.is_null().to_numpy(zero_copy_only=False), _GAMMA, hashes)
    return hashes
