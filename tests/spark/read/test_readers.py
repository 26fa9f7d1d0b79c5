"""What readers ask of a planner and of servers, without either."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import anyio
import pyarrow as pa
import pytest

from nsqext.errors import InvalidState
from nsqext.spark.options import SourceOptions
from nsqext.spark.pyspark_features import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from nsqext.spark.read import batch_plan, readers
from nsqext.spark.read.arrow import RowFormat
from nsqext.spark.read.batch_plan import SKEW_MS, Pruning, plan, read_within
from nsqext.spark.read.channel_batches import rows_of
from nsqext.spark.read.offsets import Key, Offsets, Range, dump
from nsqext.spark.read.planner_lock import PlannerLock
from nsqext.spark.read.readers import NsqStreamReader
from tests.support.spark_admin import FakeAdmin, Log

STREAM = {"channel": "readers", "startingOffsets": "earliest"}


def options(streaming: bool = False, **given: str) -> SourceOptions:
    return SourceOptions.parse({"lookupd": "127.0.0.1:1", "subscribe": "t", **given}, streaming=streaming)


class Planner:
    """The planner of a stream, which notes how batches are limited."""

    last: Mapping[Key, Any] = {}

    def __init__(self, *_: object) -> None:
        self.limits: list[tuple[int | None, int | None, bool]] = []
        self.committed: list[Offsets] = []

    async def latest(
        self, start: Offsets, rows: int | None, size: int | None, last: object, *, at_once: bool
    ) -> Offsets:
        self.limits.append((rows, size, at_once))
        return start

    async def commit(self, end: Offsets) -> None:
        self.committed.append(end)

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    planner = Planner()
    monkeypatch.setattr(readers, "StreamPlanner", lambda *_: planner)
    monkeypatch.setattr(readers, "SourceAdmin", lambda *_, **__: None)
    return planner


def test_the_limit_of_spark_reaches_the_planner(planner: Planner) -> None:
    reader = NsqStreamReader(options(True, **STREAM))
    for limit in (ReadMaxRows(7), ReadMaxBytes(5000), ReadAllAvailable(), ReadMinRows(3)):
        reader.latestOffset(dump({("t", 0): 1}), limit)
    assert planner.limits == [(7, None, False), (None, 5000, False), (None, None, True), (None, None, False)]


def test_a_stopped_query_leaves_its_channel_to_another_one(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "is_planner", lambda: True)
    given = options(True, **STREAM)
    reader = NsqStreamReader(given)
    reader.commit(dump({("t", 0): 1}))
    assert planner.committed == [{("t", 0): 1}]
    reader.stop()
    lock = PlannerLock(given)
    lock.acquire(patience=0)
    lock.release()


def test_a_query_that_was_refused_the_lock_is_refused_again(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark may call another method of the same reader."""

    class Impatient(PlannerLock):
        def acquire(self, patience: float = 0.0) -> None:
            super().acquire(patience)

    monkeypatch.setattr(readers, "is_planner", lambda: True)
    monkeypatch.setattr(readers, "PlannerLock", Impatient)
    given = options(True, **STREAM)
    lock, reader = PlannerLock(given), NsqStreamReader(given)
    lock.acquire()
    try:
        for _ in range(2):
            with pytest.raises(InvalidState, match="another stream on this machine"):
                reader.commit(dump({("t", 0): 1}))
    finally:
        lock.release()
    assert planner.committed == []


TIMES = [1_700_000_000_000_000 + at for at in (-1, 0, 999, 1000, 1_999_999, 2_000_000)]
"""In microseconds."""


@pytest.mark.parametrize("columns", ["offset", "offset,timestamp"])
def test_the_starting_time_is_read_and_the_ending_time_is_not(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(given: SourceOptions, ranges: object) -> Iterator[pa.RecordBatch]:
        moments = pa.array(TIMES, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
        rows = pa.record_batch({"offset": pa.array(range(len(TIMES))), "timestamp": moments})
        yield rows.select(list(given.columns))

    monkeypatch.setattr(batch_plan, "read_ranges", read)
    times = {"startingTimestamp": "1700000000000", "endingTimestamp": "1700000002000"}
    (batch,) = read_within(options(False, columns=columns, **times), [Range("t", 0, 0, 6)])
    assert batch.schema.names == columns.split(",")
    assert batch.column("offset").to_pylist() == [1, 2, 3, 4]


def test_the_later_of_two_starting_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeAdmin({("t", 0): Log(0, 50)}, {5_000 - SKEW_MS: 3, 9_000 - SKEW_MS: 20})

    class Opened:
        async def __aenter__(self) -> FakeAdmin:
            return servers

        async def __aexit__(self, *_: object) -> None:
            """Nothing is open."""

    monkeypatch.setattr(batch_plan, "SourceAdmin", lambda *_, **__: Opened())
    for option, filtered in (("5000", 9_000), ("9000", 5_000)):
        found = anyio.run(plan, options(startingTimestamp=option), Pruning(since=filtered))
        assert found == [Range("t", 0, 20, 50)]


def test_rows_of_a_channel_have_their_topics() -> None:
    """Both topics have a partition 0."""
    sent = []
    for topic in ("one", "two"):
        stored = {"timestamp": 1, "attempts": 1, "id": bytes(16), "offset": -1, "size": 0, "version": 0, "header": b""}
        sent.append(SimpleNamespace(**stored, body=topic.encode(), topic=topic, partition=0))
    found: Any = rows_of(options(True, channel="readers", columns="topic,value"), sent)  # type: ignore[arg-type]
    assert [row for batch in found for row in batch.to_pylist()] == [
        {"topic": "one", "value": b"one"},
        {"topic": "two", "value": b"two"},
    ]


def test_a_body_beside_its_stored_header_stays_compressed() -> None:
    assert not RowFormat.of(options(columns="value,header")).decompress
    assert RowFormat.of(options(columns="value")).decompress
