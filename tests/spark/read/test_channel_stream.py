"""Batches that are consumed from a channel and finished when they are done."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from attrs import evolve

from nsqext import Admin
from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import InvalidInput, LookupFailed
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.spark.options import SourceOptions
from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from nsqext.spark.read import channel_batches, readers
from nsqext.spark.read.readers import NsqChannelReader
from nsqext.sync import Producer
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.support.spark_cluster import Servers

_DEADLINE = 15.0


@pytest.fixture(scope="module")
def original() -> Iterator[Cluster]:
    """The original NSQ on one node."""
    with Cluster(1, generation="original") as cluster:
        yield cluster


@pytest.fixture
def topic(original: Cluster, request: pytest.FixtureRequest) -> str:
    """A topic with a channel."""
    name = "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[-40:]
    original.create_topic(name, channels=["spark"])
    return name


def options(cluster: Cluster, topic: str, **given: str) -> dict[str, str]:
    return {
        "lookupd": ",".join(cluster.lookupd),
        "subscribe": topic,
        "channel": "spark",
        "readMode": "channel",
        **given,
    }


def reader(cluster: Cluster, topic: str, **given: str) -> NsqChannelReader:
    return NsqChannelReader(SourceOptions.parse(options(cluster, topic, **given), streaming=True))


def publish(cluster: Cluster, topic: str, count: int, first: int = 0) -> None:
    with Producer(cluster.lookupd) as producer:
        producer.publish_many(topic, [b"%d" % number for number in range(first, first + count)])


def values(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


def read_on(source: NsqChannelReader, start: dict[str, Any], count: int) -> tuple[list[int], dict[str, Any]]:
    """Read batches until ``count`` messages are received."""
    found: list[int] = []
    deadline = time.monotonic() + _DEADLINE
    while len(found) < count and time.monotonic() < deadline:
        batches, start = source.read(start)
        found += values(batches)
    return found, start


def test_a_batch_is_finished_when_spark_requests_the_next_one(original: Cluster, topic: str) -> None:
    publish(original, topic, 25)
    source = reader(original, topic, maxOffsetsPerTrigger="10")
    try:
        start = source.initialOffset()
        assert start == {"v": 1, "consumed": 0}
        found, end = read_on(source, start, 1)
        assert len(found) <= 10
        again, same = source.read(start)
        assert (found, end) == (values(again), same)
        _, end = read_on(source, end, 25 - end["consumed"])
        assert end["consumed"] == 25
        batches, same = source.read(end)
        assert (values(batches), same) == ([], end)
        publish(original, topic, 1, first=25)
        found, end = read_on(source, end, 1)
        assert (found, end["consumed"]) == ([25], 26)
        source.commit(end)
    finally:
        source.stop()
    late = reader(original, topic)
    try:
        batches, _ = late.read(end)
        assert values(batches) == []
    finally:
        late.stop()


def test_a_completed_batch_is_finished_when_the_query_ends(original: Cluster, topic: str) -> None:
    publish(original, topic, 10)
    source = reader(original, topic, maxOffsetsPerTrigger="5")
    found, middle = read_on(source, source.initialOffset(), 5)
    source.commit(middle)
    source.stop()
    late = reader(original, topic)
    try:
        others, _ = read_on(late, late.initialOffset(), 10 - len(found))
        assert sorted(found + others) == list(range(10))
    finally:
        late.stop()


def test_a_batch_is_read_as_soon_as_there_is_a_message(
    original: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_batches, "WAIT", 3600.0)
    source = reader(original, topic)
    try:
        start = source.initialOffset()
        for number in range(3):
            publish(original, topic, 1, number)
            batches, start = source.read(start)
            assert values(batches) == [number]
    finally:
        source.stop()


def test_several_topics_are_consumed_together(original: Cluster, topic: str) -> None:
    other = f"{topic}_2"
    original.create_topic(other, channels=["spark"])
    publish(original, topic, 10)
    publish(original, other, 10, 10)
    source = reader(original, f"{topic},{other}", maxOffsetsPerTrigger="4")
    try:
        found, end = read_on(source, source.initialOffset(), 20)
        source.commit(end)
    finally:
        source.stop()
    assert sorted(found) == list(range(20))


def test_messages_of_an_incomplete_batch_are_delivered_again(original: Cluster, topic: str) -> None:
    publish(original, topic, 10)
    source = reader(original, topic, maxOffsetsPerTrigger="5")
    found, middle = read_on(source, source.initialOffset(), 5)
    source.commit(middle)
    _, end = source.read(middle)
    source.stop()
    restarted = reader(original, topic)
    try:
        assert values(restarted.readBetweenOffsets(middle, end)) == []
        again, _ = read_on(restarted, end, 10 - len(found))
        assert sorted(found + again) == list(range(10))
    finally:
        restarted.stop()


def test_a_stopped_query_keeps_no_message(original: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def close_slowly(admin: Admin) -> None:
        await anyio.sleep(0.3)
        await close(admin)

    close = Admin.aclose
    monkeypatch.setattr(Admin, "aclose", close_slowly)
    publish(original, topic, 10)
    source = reader(original, topic)
    found, end, held = 0, source.initialOffset(), list[int]()
    while found < 10:  # a batch is finished when the next one is read
        batches, end = source.read(end)
        held = values(batches) or held
        found += len(held)
    source.stop()
    restarted = reader(original, topic)
    try:
        again, _ = read_on(restarted, end, len(held))
        assert sorted(again) == held
    finally:
        restarted.stop()


def test_messages_in_flight_are_touched() -> None:
    limits = evolve(ServerLimits.original(), msg_timeout=1.0)
    with Cluster(1, generation="original", options=ClusterOptions(limits=limits)) as cluster:
        cluster.create_topic("touched", channels=["spark"])
        publish(cluster, "touched", 3)
        source = reader(cluster, "touched")
        try:
            found, _ = read_on(source, source.initialOffset(), 3)
            assert sorted(found) == [0, 1, 2]
            held = list(source._opened()._original._held)
            before = [message.received for message in held]
            wait_for(lambda: all(message.received > old for message, old in zip(held, before, strict=True)))
        finally:
            source.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_available_now_excludes_later_messages(original: Cluster, topic: str) -> None:
    publish(original, topic, 8)
    source = reader(original, topic, maxOffsetsPerTrigger="5")
    try:
        source.prepareForTriggerAvailableNow()
        publish(original, topic, 4, first=100)
        found, end = read_on(source, source.initialOffset(), 8)
        assert sorted(found) == list(range(8))
        batches, same = source.read(end)
        assert (values(batches), same) == ([], end)
        # the query has ended, and holds no message back from its successor, although its process continues
        publish(original, topic, 4, first=200)
        late = reader(original, topic)
        try:
            assert sorted(read_on(late, end, 8)[0]) == [100, 101, 102, 103, 200, 201, 202, 203]
        finally:
            late.stop()
        batches, same = source.read(end)
        assert (values(batches), same) == ([], end)
    finally:
        source.stop()


def test_available_now_does_not_end_while_the_depth_is_unknown(
    original: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[int | None] = [None, 0]

    async def count(*_: object) -> int:
        found = results.pop(0) if len(results) > 1 else results[0]
        if found is None:
            raise LookupFailed("no node answers")
        return found

    monkeypatch.setattr(channel_batches, "unfinished_count", count)
    monkeypatch.setattr(channel_batches, "SETTLED", 0.02)
    source = reader(original, topic, readTimeoutMs="200")
    try:
        source.prepareForTriggerAvailableNow()
        results[:] = [None]
        with pytest.raises(LookupFailed, match="no node answers"):
            source.read(source.initialOffset())
        results[:] = [None, 0]
        assert values(source.read(source.initialOffset())[0]) == []
        assert results == [0]
    finally:
        source.stop()


@pytest.mark.parametrize("left", [0, 1, 3])
def test_available_now_warns_of_messages_that_it_does_not_receive(
    original: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    async def count(*_: object) -> int:
        return left

    monkeypatch.setattr(channel_batches, "unfinished_count", count)
    monkeypatch.setattr(channel_batches, "SETTLED", 0.02)
    source = reader(original, topic, readTimeoutMs="100")
    try:
        source.prepareForTriggerAvailableNow()
        assert values(source.read(source.initialOffset())[0]) == []
    finally:
        source.stop()
    assert (f"the channel spark has {left} unfinished messages" in caplog.text) == (left > 0)


def test_columns_of_a_consumed_channel(original: Cluster, topic: str) -> None:
    publish(original, topic, 1)
    source = reader(original, topic, includeHeaders="true")
    try:
        deadline = time.monotonic() + _DEADLINE
        rows: list[dict[str, object]] = []
        while not rows and time.monotonic() < deadline:
            batches, _ = source.read(source.initialOffset())
            rows = [row for batch in batches for row in batch.to_pylist()]
        (row,) = rows
        assert (row["value"], row["topic"], row["partition"], row["offset"]) == (b"0", topic, None, None)
        assert (row["queue_offset"], row["attempts"], row["headers"]) == (-1, 1, None)
    finally:
        source.stop()


def test_topics_of_the_redesigned_servers_can_be_consumed_too(servers: Servers) -> None:
    for ordered in (False, True):
        name = servers.make_topic("channel", 2, ordered=ordered)
        given = servers.options | {"subscribe": name, "channel": servers.channel, "readMode": "channel"}
        source = NsqChannelReader(SourceOptions.parse(given, streaming=True))
        try:
            start = source.initialOffset()
            for partition in (0, 1):
                servers.publish(name, [b"%d %d" % (partition, number) for number in range(5)], partition)
            found: list[tuple[int, bytes]] = []
            deadline = time.monotonic() + _DEADLINE
            while len(found) < 10 and time.monotonic() < deadline:
                batches, start = source.read(start)
                rows = [row for batch in batches for row in batch.to_pylist()]
                found += [(row["partition"], row["value"]) for row in rows]
            assert sorted(found) == [(partition, b"%d %d" % (partition, n)) for partition in (0, 1) for n in range(5)]
            source.prepareForTriggerAvailableNow()
            while (end := source.read(start)[1]) != start:
                start = end
        finally:
            source.stop()


def test_topics_whose_channels_are_registered_can_be_consumed() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("registered", channels=["spark"], register_channels=True)
        publish(cluster, "registered", 5)
        source = reader(cluster, "registered")
        try:
            assert read_on(source, source.initialOffset(), 5)[0] == list(range(5))
        finally:
            source.stop()


def scripted(monkeypatch: pytest.MonkeyPatch, *batches: int) -> tuple[NsqChannelReader, list[object]]:
    """Return a reader whose channel delivers batches of some sizes and then empty ones, and the channel's calls."""
    calls: list[object] = []
    sizes = list(batches)

    def take(number: int) -> list[object]:
        calls.append(number)
        return [None] * (sizes.pop(0) if sizes else 0)

    channel = SimpleNamespace(
        take=take,
        finish=calls.append,
        freeze=lambda: calls.append("freeze"),
        close=lambda: calls.append("close"),
    )
    monkeypatch.setattr(readers, "ChannelReader", lambda _: channel)
    monkeypatch.setattr(readers, "rows_of", lambda _, messages: [*messages])
    given = {"lookupd": "127.0.0.1:1", "subscribe": "t", "channel": "spark", "readMode": "channel"}
    return NsqChannelReader(SourceOptions.parse(given, streaming=True)), calls


def test_available_now_ends_with_the_first_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls = scripted(monkeypatch, 2, 1, 0, 5)
    source.prepareForTriggerAvailableNow()
    start, counts = source.initialOffset(), list[int]()
    for _ in range(5):
        rows, start = source.read(start)
        counts.append(len(list(rows)))
    assert (counts, start) == ([2, 1, 0, 0, 0], {"v": 1, "consumed": 3})
    assert calls == ["freeze", 0, 2, 3, "close"]


@pytest.mark.parametrize("sent", [False, True])
def test_a_query_continues_after_an_empty_batch(monkeypatch: pytest.MonkeyPatch, sent: bool) -> None:
    """Also in a process to which its reader was sent."""
    source, calls = scripted(monkeypatch)
    source = pickle.loads(pickle.dumps(source)) if sent else source  # noqa: S301
    source.commit({"v": 1, "consumed": 7})
    for number in (7, 7):
        _, end = source.read({"v": 1, "consumed": number})
        assert end == {"v": 1, "consumed": 7}
    source.commit({"v": 1, "consumed": 8})
    source.stop()
    source.stop()
    assert calls == [7, 7, 8, "close"]


def test_offsets_of_the_other_mode_are_refused(original: Cluster) -> None:
    with pytest.raises(InvalidInput, match="a checkpoint belongs to one readMode"):
        reader(original, "any").read({"v": 1, "topics": {"any": {"0": 5}}})


@pytest.mark.skipif(not HAS_READ_LIMITS, reason="readMode=channel needs PySpark 4.2")
def test_a_query_over_the_original_nsq(spark: SparkSession, original: Cluster, topic: str, tmp_path: Path) -> None:
    publish(original, topic, 30)

    def start() -> StreamingQuery:
        frame = spark.readStream.format("nsqext").options(**options(original, topic, maxOffsetsPerTrigger="20")).load()
        return (
            frame.writeStream.format("parquet")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )

    for first in (30, 60):
        run_to_end(start)
        publish(original, topic, 30, first)
    rows = Counter(int(row.value) for row in spark.read.parquet(str(tmp_path / "rows")).select("value").collect())
    assert rows == Counter(range(60))
