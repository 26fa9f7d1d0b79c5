"""Ids of rows that do not change when a task or a batch is repeated, so that readers can remove duplicates.

The id is ``query/batch/partition/row``. For a stream, query is the id of the query, which its checkpoint stores, and
batch the number of the micro-batch; for a batch, they are a random number and 0. Partition is that of the task. The id
is stable if a repeated computation returns the rows in the same order and the same partitions.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Self

import numpy as np
from attrs import frozen

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

# properties of a task that name its query and micro-batch
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@frozen
class Origin:
    """Origin of rows."""

    query: str  # id of the streaming query; a random one for a batch
    batch: int  # number of the micro-batch; 0 for a batch
    partition: int  # number of the task's partition

    @classmethod
    def of_job(cls, job: str) -> Self:
        """Return the origin of the rows of the current task of a batch."""
        from pyspark import TaskContext  # nsqext.arrow has no Spark

        context = TaskContext.get()
        return cls(job, 0, context.partitionId() if context is not None else 0)

    @classmethod
    def of_query(cls, job: str) -> Self:
        """Return the origin of the rows of the current task of a micro-batch; of the job if Spark names no query."""
        from pyspark import TaskContext  # nsqext.arrow has no Spark

        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context is not None else None
        batch = context.getLocalProperty(_BATCH) if context is not None else None
        if context is None or query is None or batch is None:
            return cls.of_job(job)
        return cls(query, int(batch), context.partitionId())

    def row_id(self, row: int) -> str:
        """Return the id of a row, counted from 0."""
        return f"{self.query}/{self.batch}/{self.partition}/{row}"

    def row_ids(self, first: int, count: int) -> list[str]:
        """Return the ids of consecutive rows."""
        prefix = f"{self.query}/{self.batch}/{self.partition}/"
        return [f"{prefix}{row}" for row in range(first, first + count)]

    def trace_ids(self, first: int, count: int) -> list[int]:
        """Return 64-bit ids of consecutive rows, for topics without extend headers; never 0, which means no trace id.

        A hash of the origin, and of the row by SplitMix64, which gives different rows of a task different ids.
        """
        origin = f"{self.query}/{self.batch}/{self.partition}"
        seed = np.uint64(int.from_bytes(blake2b(origin.encode(), digest_size=8).digest(), "big"))
        # wraps around, as it must
        mixed = seed + np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GAMMA
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTORS[1]
        mixed ^= mixed >> np.uint64(31)
        mixed[mixed == 0] = 1
        found: list[int] = mixed.tolist()
        return found
