"""The rate of a task that writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from nsqext.spark.options import SinkOptions
from nsqext.spark.write import publisher
from nsqext.spark.write.publisher import paced, publish_rows
from nsqext.spark.write.row_ids import NumberedIds
from nsqext.spark.write.row_mapper import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import pytest

    from tests.support.spark_cluster import Servers


class Clock:
    """A clock that only waits move, and the work between chunks."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.waits.append(seconds)
        self.now += seconds


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(1, 500), st.floats(0, 3))
def test_the_rate_is_not_exceeded(counts: list[int], rate: int, work: float) -> None:
    clock = Clock()
    sent = 0
    for chunk in paced([Chunk(count=count) for count in counts], rate, clock.time, clock.sleep):
        assert sent <= (clock.now - 100.0) * rate + 1e-6, "the next chunk waits until the earlier ones are due"
        sent += chunk.count
        clock.now += work
    assert sent == sum(counts)


def test_time_without_rows_is_not_saved_up() -> None:
    clock = Clock()
    chunks = paced([Chunk(count=10) for _ in range(3)], 10, clock.time, clock.sleep)
    next(chunks)
    clock.now += 60.0
    next(chunks)
    next(chunks)
    assert clock.waits == [1.0]


def test_a_writer_that_is_fast_enough_does_not_wait() -> None:
    clock = Clock()
    for _ in paced([Chunk(count=10) for _ in range(3)], 10, clock.time, clock.sleep):
        clock.now += 2.0
    assert clock.waits == []


def test_a_task_publishes_at_the_rate_of_the_option(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[float, int]] = []

    def watched(chunks: Iterable[Chunk], rate: float) -> Iterator[Chunk]:
        for chunk in chunks:
            found.append((rate, chunk.count))
            yield chunk

    monkeypatch.setattr(publisher, "paced", watched)
    topic = servers.make_topic("paced", 1)
    options = SinkOptions.parse({**servers.options, "topic": topic, "maxRowsPerSecond": "40"})
    batch = pa.record_batch({"value": pa.array([b"%d" % number for number in range(100)])})
    assert publish_rows(options, ("value",), NumberedIds("job"), iter([batch]))[topic, 0] == 100
    assert found == [(40, 40), (40, 40), (40, 20)], "no chunk has more than the rows of a second"
