"""Ids of rows that are the same when a task or a batch is run again, so that readers can tell what came twice.

The id is ``query/batch/partition/row``: of a stream, the query's id, which its checkpoint keeps, and the number of the
micro-batch; of a batch, a random number and 0; then the number of the task's partition, and of the row in it. It stays
the same as long as the rows come in the same order and the same partitions when they are computed again.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Self

from attrs import frozen
from pyspark import TaskContext

__all__ = ("Origin", "trace_id_of")

# how Spark tells tasks which micro-batch they work for
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@frozen
class Origin:
    """Where rows come from.

    Attributes:
        query: id of the streaming query; of a batch, a random one.
        batch: number of the micro-batch; 0 of a batch.
        partition: number of the task's partition.
    """

    query: str
    batch: int
    partition: int

    @classmethod
    def of_job(cls, job: str) -> Self:
        """Return the origin of the rows of this task, which belongs to a batch."""
        context = TaskContext.get()
        return cls(job, 0, context.partitionId() if context is not None else 0)

    @classmethod
    def of_query(cls, job: str) -> Self:
        """Return the origin of the rows of this task, which belongs to a micro-batch.

        Args:
            job: stands for the query where Spark does not tell which one it is.
        """
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context is not None else None
        batch = context.getLocalProperty(_BATCH) if context is not None else None
        if context is None or query is None or batch is None:
            return cls.of_job(job)
        return cls(query, int(batch), context.partitionId())

    def row_id(self, row: int) -> str:
        """Return the id of a row, counted from 0."""
        return f"{self.query}/{self.batch}/{self.partition}/{row}"


def trace_id_of(row_id: str) -> int:
    """Return the 64-bit hash of an id, for topics that take no headers; never 0, which stands for no trace id."""
    return int.from_bytes(blake2b(row_id.encode(), digest_size=8).digest(), "big") or 1
