"""Ids of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.spark.write import row_id as identity
from nsqext.spark.write.row_id import Origin, trace_id_of

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

    patch.setattr(identity, "TaskContext", Tasks)


def test_a_stream_goes_by_query_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context(sql_streaming_queryId="q-1", streaming_sql_batchId="12"))
    assert Origin.of_query("job").row_id(7) == "q-1/12/3/7"


def test_a_batch_goes_by_its_job_even_inside_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context(sql_streaming_queryId="q-1", streaming_sql_batchId="12"))
    assert Origin.of_job("job").row_id(0) == "job/0/3/0"


def test_without_a_query_the_job_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    within(monkeypatch, Context())
    assert Origin.of_query("job") == Origin("job", 0, 3)
    within(monkeypatch, None)
    assert Origin.of_query("job") == Origin("job", 0, 0)


def test_hashes_stay_what_they_are() -> None:
    """What is in topics already has to be found again."""
    assert trace_id_of("q/4/2/0") == 1_856_934_742_360_255_897
    hashes = {trace_id_of(f"q/0/0/{row}") for row in range(10_000)}
    assert len(hashes) == 10_000
    assert all(0 < value < 2**64 for value in hashes)
