"""Ids of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

from nsqext.spark.write.row_mapper import Origin

if TYPE_CHECKING:
    import pytest


class Context:
    """What a task knows about itself."""

    def __init__(self, **properties: str) -> None:
        self._properties = {name.replace("_", "."): value for name, value in properties.items()}

    def partitionId(self) -> int:
        return 3

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


def within(patch: pytest.MonkeyPatch, context: Context | None) -> None:
    class Tasks:
        @staticmethod
        def get() -> Context | None:
            return context

    patch.setattr(pyspark, "TaskContext", Tasks)


def test_a_stream_is_identified_by_query_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context(sql_streaming_queryId="q-1", streaming_sql_batchId="12"))
    assert Origin.of_query("job").row_id(7) == "q-1/12/3/7"


def test_a_batch_is_identified_by_its_job_even_inside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context(sql_streaming_queryId="q-1", streaming_sql_batchId="12"))
    assert Origin.of_job("job").row_id(0) == "job/0/3/0"


def test_without_a_query_the_job_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context())
    assert Origin.of_query("job") == Origin("job", 0, 3)
    within(monkeypatch, None)
    assert Origin.of_query("job") == Origin("job", 0, 0)


def test_trace_ids_are_stable() -> None:
    """Readers compare them with ids that are stored already."""
    origin = Origin("q", 4, 2)
    assert origin.trace_ids(0, 2) == [7283112620283451876, 8343906478703436467]
    assert origin.trace_ids(1, 1) == origin.trace_ids(0, 2)[1:]
    hashes = set(origin.trace_ids(0, 10_000)) | set(Origin("q", 4, 3).trace_ids(0, 10_000))
    assert len(hashes) == 20_000
    assert all(0 < value < 2**64 for value in hashes)


def test_ids_of_many_rows() -> None:
    origin = Origin("q", 4, 2)
    assert origin.row_ids(7, 3) == [origin.row_id(row) for row in (7, 8, 9)]
