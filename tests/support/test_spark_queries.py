"""Streaming queries that are started again."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from attrs import define
from pyspark.errors import StreamingQueryException

from tests.support import spark_queries
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

SLOW = "org.apache.spark.SparkException: Python worker failed to connect back."


@define
class FakeQuery:
    """A query that fails with a text, if there is one."""

    failure: str

    def awaitTermination(self, timeout: int | None) -> bool:
        if self.failure:
            raise StreamingQueryException(message=self.failure)
        return True


@pytest.mark.parametrize(
    ("failures", "starts"),
    [([""], 1), ([SLOW, ""], 2), ([SLOW, SLOW, SLOW, ""], 4), (["DataLoss", ""], 1), ([SLOW, "DataLoss", ""], 2)],
)
def test_only_a_slow_start_is_repeated(failures: list[str], starts: int) -> None:
    queries = [cast("StreamingQuery", FakeQuery(failure)) for failure in failures]
    started = iter(queries)
    failure = failures[starts - 1]
    if failure:
        with pytest.raises(StreamingQueryException, match=failure):
            run_to_end(lambda: next(started))
    else:
        assert run_to_end(lambda: next(started)) is queries[starts - 1]
    assert list(started) == queries[starts:]


def test_starts_are_repeated_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_queries, "STARTS", -1.0)
    with pytest.raises(StreamingQueryException, match="failed to connect back"):
        run_to_end(lambda: cast("StreamingQuery", FakeQuery(SLOW)))
