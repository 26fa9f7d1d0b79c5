"""Topics as a batch: what is planned, and what tasks read. Planning is tested without Spark."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import datasource
from pyspark.sql.datasource import InputPartition

from nsqext.broker import Cluster
from nsqext.broker.options import ClusterOptions
from nsqext.errors import DataLoss, InvalidPartition, InvalidSetting, RangeIncomplete, TopicNotFound
from nsqext.partitions import LeaderLocator, leaders
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.options import SourceOptions
from nsqext.spark.pyspark_features import HAS_PUSHDOWN
from nsqext.spark.read import batch_plan, range_reader
from nsqext.spark.read.batch_plan import plan, read_ranges
from nsqext.spark.read.offsets import Range
from nsqext.spark.read.readers import FilterPruning, NsqPushdownReader, NsqReader, TaskRanges
from nsqext.sync import Producer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from nsqext.partitions import Leader
    from nsqext.types import TopicMeta
    from tests.support.spark_cluster import Servers

COUNT = 100

needs_pushdown = pytest.mark.skipif(not HAS_PUSHDOWN, reason="PySpark 4.0 does not push filters down")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of this file."""
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def topic(cluster: Cluster) -> str:
    """A topic of three partitions: 100 messages, 50, and none."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, 3, channels=["other"])
    with Producer(cluster.lookupd) as producer:
        for partition, count in ((0, COUNT), (1, COUNT // 2)):
            producer.publish_many(name, [b"%d" % number for number in range(count)], partition=partition)
    return name


def options(cluster: Cluster, topic: str, **given: object) -> SourceOptions:
    """Options of a batch over a topic."""
    texts = {name: str(value) for name, value in given.items()}
    if not {"assign", "subscribePattern"} & texts.keys():
        texts["subscribe"] = topic
    return SourceOptions.parse({"lookupd": ",".join(cluster.lookupd), "readTimeoutMs": "5000"} | texts)


def planned(options: SourceOptions, *filters: datasource.Filter) -> list[tuple[int, int, int]]:
    """Return the ranges of a batch, by partition."""
    pruning = FilterPruning()
    pruning.take(filters)
    return [(found.partition, found.start, found.end) for found in portal.call(plan, options, pruning)]


def numbers(batches: Iterator[pa.RecordBatch]) -> list[int]:
    """Return the offsets of rows, whose bodies say the same."""
    table = pa.Table.from_batches(list(batches))
    found: list[int] = table.column("offset").to_pylist()
    assert table.column("value").to_pylist() == [b"%d" % number for number in found]
    return found


# Planning


@pytest.mark.parametrize(
    ("given", "ranges"),
    [
        ({}, [(0, 0, 100), (1, 0, 50), (2, 0, 0)]),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, [(0, 0, 100), (1, 0, 50), (2, 0, 0)]),
        ({"startingOffsets": '{"T": {"0": 90, "1": -2, "2": 0}}'}, [(0, 90, 100), (1, 0, 50), (2, 0, 0)]),
        ({"endingOffsets": '{"T": {"0": 90, "1": -1, "2": 0}}'}, [(0, 0, 90), (1, 0, 50), (2, 0, 0)]),
        ({"assign": '{"T": [1]}'}, [(1, 0, 50)]),
        ({"subscribePattern": "T"}, [(0, 0, 100), (1, 0, 50), (2, 0, 0)]),
        ({"assign": '{"T": [1]}', "startingOffsets": '{"T": {"1": 50}}'}, [(1, 50, 50)]),
    ],
)
def test_where_partitions_begin_and_end(
    cluster: Cluster, topic: str, given: dict[str, str], ranges: list[tuple[int, int, int]]
) -> None:
    texts = {name: value.replace("T", topic) for name, value in given.items()}
    assert planned(options(cluster, topic, **texts)) == ranges


@needs_pushdown
@pytest.mark.parametrize(
    ("filters", "ranges"),
    [
        (lambda: [datasource.EqualTo(("topic",), "T")], [(0, 0, 100), (1, 0, 50), (2, 0, 0)]),
        (lambda: [datasource.EqualTo(("topic",), "other")], []),
        (lambda: [datasource.In(("partition",), (1, 7))], [(1, 0, 50)]),
        (
            lambda: [datasource.GreaterThanOrEqual(("offset",), 40), datasource.LessThan(("offset",), 60)],
            [(0, 40, 60), (1, 40, 50), (2, 0, 0)],
        ),
        (lambda: [datasource.EqualTo(("partition",), 0), datasource.EqualTo(("offset",), 1000)], [(0, 100, 100)]),
        (lambda: [datasource.EqualTo(("partition",), 0), datasource.LessThan(("offset",), -3)], [(0, 0, 0)]),
        (
            lambda: [datasource.GreaterThan(("offset",), 40), datasource.LessThan(("offset",), -3)],
            [(0, 0, 0), (1, 0, 0), (2, 0, 0)],
        ),
        (
            lambda: [datasource.GreaterThan(("timestamp",), datetime(2100, 1, 1, tzinfo=UTC))],
            [(0, 100, 100), (1, 50, 50), (2, 0, 0)],
        ),
        (
            lambda: [datasource.LessThan(("timestamp",), datetime(2001, 1, 1, tzinfo=UTC))],
            [(0, 0, 0), (1, 0, 0), (2, 0, 0)],
        ),
        (
            lambda: [datasource.GreaterThan(("timestamp",), datetime(2001, 1, 1, tzinfo=UTC))],
            [(0, 0, 100), (1, 0, 50), (2, 0, 0)],
        ),
    ],
)
def test_filters_skip_partitions_that_cannot_match(
    cluster: Cluster, topic: str, filters: Callable[[], list[Any]], ranges: list[tuple[int, int, int]]
) -> None:
    named = [
        datasource.EqualTo(found.attribute, topic) if getattr(found, "value", None) == "T" else found
        for found in filters()
    ]
    found = planned(options(cluster, topic), *named)
    assert [one for one in found if one[1] < one[2]] == [one for one in ranges if one[1] < one[2]]
    assert [one[0] for one in found] == [one[0] for one in ranges]


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"assign": '{"T": [0, 3]}'}, InvalidPartition, "does not exist: the topic has 3 .*partition 3"),
        ({"assign": '{"no_such_topic": [0]}'}, TopicNotFound, "no_such_topic"),
        ({"subscribePattern": "no_such_.*"}, TopicNotFound, "no topic matches subscribePattern='no_such_"),
        ({"startingOffsets": '{"T": {"0": 5}}'}, InvalidSetting, "startingOffsets has no offset .*partition 1"),
        (
            {"assign": '{"T": [0]}', "endingOffsets": '{"T": {"0": 5, "1": 5}}'},
            InvalidSetting,
            "not read .*partition 1",
        ),
        ({"startingOffsetsByTimestamp": '{"T": {"0": 5}}'}, InvalidSetting, "no time for this partition .*partition 1"),
        ({"endingOffsetsByTimestamp": "{}"}, InvalidSetting, "no time for this partition .*partition 0"),
        (
            {"assign": '{"T": [0]}', "startingOffsets": '{"T": {"0": 101}}'},
            InvalidSetting,
            "startingOffsets is 101.*ends at 100",
        ),
        (
            {"assign": '{"T": [0]}', "endingOffsets": '{"T": {"0": 101}}'},
            InvalidSetting,
            "endingOffsets is 101.*ends at 100",
        ),
        (
            {"assign": '{"T": [0]}', "startingOffsets": '{"T": {"0": 9}}', "endingOffsets": '{"T": {"0": 8}}'},
            InvalidSetting,
            "startingOffsets is 9, after endingOffsets, 8 .*partition 0",
        ),
    ],
)
def test_invalid_reads_raise(
    cluster: Cluster, topic: str, given: dict[str, str], kind: type[Exception], text: str
) -> None:
    texts = {name: value.replace("T", topic) for name, value in given.items()}
    with pytest.raises(kind, match=text):
        planned(options(cluster, topic, **texts))


@needs_pushdown
def test_a_partition_without_a_number_is_an_error_although_filters_exclude_it(cluster: Cluster, topic: str) -> None:
    given = options(cluster, topic, startingOffsets=f'{{"{topic}": {{"0": 5}}}}')
    with pytest.raises(InvalidSetting, match=r"startingOffsets has no offset .*partition 1"):
        planned(given, datasource.EqualTo(("partition",), 0))


def test_a_batch_has_to_begin_somewhere(cluster: Cluster) -> None:
    for text in ("latest", '{"t": {"0": -1}}'):
        with pytest.raises(InvalidSetting, match="cannot be latest"):
            NsqReader(options(cluster, "t", startingOffsets=text))
    with pytest.raises(InvalidSetting, match="cannot be earliest"):
        NsqReader(options(cluster, "t", endingOffsets="earliest"))


def test_ranges_are_cut_and_can_be_sent(cluster: Cluster, topic: str) -> None:
    reader = NsqReader(options(cluster, topic, minPartitions=4, maxRecordsPerPartition=40))
    pieces = reader.partitions()
    assert [str(piece.value).replace(topic, "") for piece in pieces] == [
        "[0] 0..37",
        "[0] 37..75",
        "[0] 75..100, [1] 0..12",
        "[1] 12..50",
    ]
    again, sent = pickle.loads(pickle.dumps((reader, pieces)))  # noqa: S301
    assert [piece.ranges for piece in sent] == [piece.ranges for piece in pieces]
    assert [number for piece in sent for number in numbers(again.read(piece))] == [*range(100), *range(50)]


def test_nothing_to_read(cluster: Cluster, topic: str) -> None:
    """Spark gives a partition of its own to readers that have none."""
    reader = NsqReader(options(cluster, topic, assign=f'{{"{topic}": [2]}}'))
    assert reader.partitions() == []
    assert list(reader.read(None)) == []
    assert list(reader.read(InputPartition(None))) == []


def test_topics_that_grow_while_they_are_read(cluster: Cluster) -> None:
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, channels=["other"])
    with Producer(cluster.lookupd) as producer:
        producer.publish_many(name, [b"%d" % number for number in range(10)])
        reader = NsqReader(options(cluster, name))
        (piece,) = reader.partitions()
        producer.publish_many(name, [b"%d" % number for number in range(10, 20)])
    assert numbers(reader.read(piece)) == list(range(10))


def test_a_start_behind_the_end_is_an_empty_read_if_lost_data_is_accepted(cluster: Cluster, topic: str) -> None:
    start = f'{{"{topic}": {{"0": {COUNT + 20}, "1": 40, "2": 7}}}}'
    with pytest.raises(InvalidSetting, match=f"startingOffsets is {COUNT + 20}, but the partition ends at {COUNT}"):
        planned(options(cluster, topic, startingOffsets=start))
    reader = NsqReader(options(cluster, topic, startingOffsets=start, failOnDataLoss="false"))
    assert [number for piece in reader.partitions() for number in numbers(reader.read(piece))] == [*range(40, 50)]
    end = f'{{"{topic}": {{"0": 30, "1": -1, "2": -1}}}}'
    with pytest.raises(InvalidSetting, match="startingOffsets is 60, after endingOffsets, 30"):  # not behind the log
        contradiction = start.replace(str(COUNT + 20), "60")
        planned(options(cluster, topic, startingOffsets=contradiction, endingOffsets=end, failOnDataLoss="false"))


# Time


def test_rows_of_a_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges are wider than the time, because servers' clocks differ; rows are not."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, channels=["other"])
    edges: list[int] = []
    with Producer(cluster.lookupd) as producer:
        for piece in range(3):
            producer.publish_many(name, [b"%d" % number for number in range(10 * piece, 10 * piece + 10)])
            time.sleep(0.03)
            edges.append(int(time.time() * 1000))
            time.sleep(0.03)
    for skew, count in ((3_600_000, 30), (5, 10), (0, 10)):
        monkeypatch.setattr(batch_plan, "SKEW_MS", skew)
        ((_, start, end),) = planned(options(cluster, name, startingTimestamp=edges[0], endingTimestamp=edges[1]))
        assert end - start == count
        for given, expected in (
            ({"startingTimestamp": edges[0]}, range(10, 30)),
            ({"endingTimestamp": edges[1]}, range(20)),
            ({"startingTimestamp": edges[0], "endingTimestamp": edges[1]}, range(10, 20)),
            ({"startingTimestamp": edges[2]}, range(0)),
            ({"endingTimestamp": 1}, range(0)),
        ):
            reader = NsqReader(options(cluster, name, **given))
            found = [number for piece in reader.partitions() for number in _numbers(reader, piece)]
            assert found == list(expected)


def _numbers(reader: NsqReader, piece: TaskRanges) -> list[int]:
    return [number for batch in reader.read(piece) for number in batch.column("offset").to_pylist()]


# Messages that are gone


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[Cluster, str, int, int]]:
    """A cluster that has dropped the oldest messages of a topic: it, the topic, the first message and the end."""
    with Cluster(nodes=1, options=ClusterOptions(memory_bound=400_000)) as cluster:
        name = f"t_{token_hex(4)}"
        cluster.create_topic(name, channels=["other"])
        access = options(cluster, name).client
        with Producer(cluster.lookupd) as producer:
            for number in range(0, 3000, 500):
                producer.publish_many(name, [b"%d" % one for one in range(number, number + 500)])
                portal.call(_finish, access, name, number + 500)
        yield cluster, name, portal.call(_start, access, name), 3000


async def _finish(access: Any, topic: str, count: int) -> None:
    async with SourceAdmin(access) as admin:
        await admin.move_anchor(topic, 0, "other", count)


async def _start(access: Any, topic: str) -> int:
    async with SourceAdmin(access) as admin:
        return (await admin.bounds(topic, 0)).start


def test_a_start_before_the_first_retained_message(small: tuple[Cluster, str, int, int]) -> None:
    cluster, name, start, end = small
    assert start > 0
    asked = {"startingOffsets": f'{{"{name}": {{"0": {start - 1}}}}}'}
    with pytest.raises(DataLoss, match=rf"startingOffsets is {start - 1}, but the first retained message is {start}"):
        planned(options(cluster, name, **asked))
    assert planned(options(cluster, name, **asked, failOnDataLoss="false")) == [(0, start, end)]
    assert planned(options(cluster, name)) == [(0, start, end)]


def test_messages_that_are_removed_during_a_read(
    small: tuple[Cluster, str, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    cluster, name, start, end = small
    gone = Range(name, 0, start - 5, end)
    with pytest.raises(
        DataLoss, match=f"message {start - 5} is not retained any more; the first retained message is {start}"
    ):
        list(read_ranges(options(cluster, name), [gone]))
    lenient = options(cluster, name, failOnDataLoss="false")
    assert numbers(read_ranges(lenient, [gone])) == list(range(start, end))
    assert f"messages {start - 5}..{start} of {gone} are not retained any more: skipped" in caplog.text
    assert list(read_ranges(lenient, [Range(name, 0, start - 5, start - 2)])) == []


def test_a_topic_that_is_deleted_before_it_is_read(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Range("deleted_topic", 0, 0, 10)
    with pytest.raises(TopicNotFound, match="deleted_topic"):
        list(read_ranges(options(cluster, topic), [gone]))
    monkeypatch.setattr(leaders, "DELETED_AFTER", 0.1)
    monkeypatch.setattr(range_reader, "LAST_PAUSE", 0.05)
    lenient = options(cluster, topic, failOnDataLoss="false")
    assert numbers(read_ranges(lenient, [gone, Range(topic, 0, 0, COUNT)])) == list(range(COUNT))
    assert f"the topic of {gone} does not exist any more: skipped" in caplog.text


def test_a_topic_is_not_deleted_while_lookup_learns_it(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted nsqlookupd knows its topics only after their nodes have registered again."""
    refuse_first_look(monkeypatch)
    lenient = options(cluster, topic, failOnDataLoss="false")
    assert numbers(read_ranges(lenient, [Range(topic, 0, 5, COUNT)])) == list(range(5, COUNT))


def test_a_range_that_was_refused_long_ago_is_looked_up_again(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All open ranges were refused when the task began; the second one is needed after the first one was read."""
    refuse_first_look(monkeypatch)
    monkeypatch.setattr(leaders, "DELETED_AFTER", 0.01)
    lenient = options(cluster, topic, failOnDataLoss="false")
    found = numbers(read_ranges(lenient, [Range(topic, 0, 0, COUNT), Range(topic, 1, 0, COUNT // 2)]))
    assert found == [*range(COUNT), *range(COUNT // 2)]


def refuse_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first look-up of each partition fail."""
    refused: set[int] = set()
    resolve = LeaderLocator.leader

    async def leader(locator: LeaderLocator, topic: str, partition: int) -> tuple[Leader, TopicMeta]:
        if partition not in refused:
            refused.add(partition)
            raise TopicNotFound("the lookup service does not know the topic", topic=topic)
        return await resolve(locator, topic, partition)

    monkeypatch.setattr(LeaderLocator, "leader", leader)
    monkeypatch.setattr(range_reader, "LAST_PAUSE", 0.05)


def test_a_range_behind_the_end_is_never_short(cluster: Cluster, topic: str) -> None:
    """A plan never contains one; it is read completely or not at all."""
    impatient = options(cluster, topic, readTimeoutMs=600)
    with pytest.raises(RangeIncomplete, match=r"message 100 of the range 90\.\.101"):
        list(read_ranges(impatient, [Range(topic, 0, 90, 101)]))


# With Spark


@pytest.fixture(scope="module")
def written(servers: Servers) -> dict[str, str]:
    """Topics of each kind, of two partitions with 300 messages each."""
    found = {
        "plain": servers.make_topic("plain", 2),
        "extend": servers.make_topic("extend", 2, extend=True),
        "ordered": servers.make_topic("ordered", 2, ordered=True),
    }
    for topic in found.values():
        for partition in range(2):
            servers.publish(topic, [_body(topic, partition, number) for number in range(300)], partition)
    return found


def _body(topic: str, partition: int, number: int) -> bytes:
    return f"{topic} {partition} {number}".encode()


def _load(spark: SparkSession, servers: Servers, **given: object) -> DataFrame:
    texts = {name: str(value) for name, value in given.items()}
    return spark.read.format("nsqext").options(**servers.options, **texts).load()


def test_spark_reads_every_message_once(spark: SparkSession, servers: Servers, written: dict[str, str]) -> None:
    rows = (
        _load(spark, servers, subscribe=",".join(written.values()), minPartitions=8)
        .select("topic", "partition", "offset", "value", "queue_offset", "attempts")
        .collect()
    )
    found = sorted((row.topic, row.partition, row.offset, bytes(row.value)) for row in rows)
    assert found == sorted(
        (topic, partition, servers.first + number, _body(topic, partition, number))
        for topic in written.values()
        for partition in range(2)
        for number in range(300)
    )
    places = sorted((row.topic, row.partition, row.offset, row.queue_offset) for row in rows)
    grows = [one[3] < other[3] for one, other in itertools.pairwise(places) if one[:2] == other[:2]]
    assert len(grows) == 6 * 299
    assert all(grows)


def test_spark_reads_nothing(spark: SparkSession, servers: Servers, written: dict[str, str]) -> None:
    topic = written["plain"]
    ends = f'{{"{topic}": {{"0": {servers.first}, "1": {servers.first}}}}}'
    given = {"startingOffsets": ends, "endingOffsets": ends}
    assert _load(spark, servers, subscribe=topic, **given).collect() == []


def test_spark_shows_errors_of_plans(spark: SparkSession, servers: Servers, written: dict[str, str]) -> None:
    with pytest.raises(AnalysisException, match=r"TopicNotFound.*no_such_topic"):
        _load(spark, servers, subscribe="no_such_topic").count()
    with pytest.raises(AnalysisException, match=r"InvalidPartition.*partition 7"):
        _load(spark, servers, assign=f'{{"{written["plain"]}": [7]}}').count()


@needs_pushdown
def test_pushed_filters_change_no_result(spark: SparkSession, servers: Servers, written: dict[str, str]) -> None:
    """The same rows with and without; with them, tasks read only what can match."""
    topics = ",".join(written.values())
    first = servers.first
    middle = _load(spark, servers, subscribe=written["plain"]).where(f"partition = 0 and offset = {first + 150}").head()
    assert middle is not None
    condition = (
        f"topic in ('{written['plain']}', '{written['extend']}') and partition = 0 and offset < {first + 160} "
        f"and timestamp <= timestamp'{middle.timestamp.isoformat()}' and cast(value as string) like '%5'"
    )
    expected = _load(spark, servers, subscribe=topics).where(condition).collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        rows = _load(spark, servers, subscribe=topics).where(condition)
        found = rows.collect()
        tasks = rows.rdd.getNumPartitions()
        last = _load(spark, servers, subscribe=topics).where(f"partition = 1 and offset >= {first + 299}").collect()
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    assert sorted(found) == sorted(expected)
    assert 10 <= len(found) <= 32
    assert tasks <= 2
    assert sorted((row.topic, row.offset) for row in last) == sorted((topic, first + 299) for topic in written.values())


@needs_pushdown
def test_a_reader_that_accepts_filters(cluster: Cluster, topic: str) -> None:
    reader = NsqPushdownReader(options(cluster, topic))
    rest = [datasource.EqualTo(("tag",), "x")]
    assert list(reader.pushFilters([datasource.EqualTo(("partition",), 1), *rest])) == rest
    again = pickle.loads(pickle.dumps(reader))  # noqa: S301
    assert [str(piece.value) for piece in again.partitions()] == [f"{topic}[1] 0..50"]
