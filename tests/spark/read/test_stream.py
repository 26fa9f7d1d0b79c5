"""Micro-batches that a planner derives from the state of the servers."""

from __future__ import annotations

import logging
import pickle

import anyio
import pytest
from pyspark.sql.datasource import InputPartition

from nsqext.errors import DataLoss, InvalidSetting, InvalidState, PartitionUnavailable, TopicNotFound
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.offsets import Offsets, Range, dump, load
from nsqext.spark.read.readers import NsqStreamReader, TaskRanges
from nsqext.spark.read.stream_planner import StreamPlanner
from tests.support.spark_admin import FakeAdmin, Log

anyio_only = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


BASE = {"lookupd": "127.0.0.1:1", "channel": "spark", "startingOffsets": "earliest"}


def options(**given: str) -> SourceOptions:
    return SourceOptions.parse({**BASE, "subscribe": "orders", **given}, streaming=True)


def two() -> FakeAdmin:
    return FakeAdmin({("orders", 0): Log(0, 50), ("orders", 1): Log(0, 30)})


def batches(servers: FakeAdmin, **given: str) -> StreamPlanner:
    return StreamPlanner(options(**given), servers.admin)


@anyio_only
async def test_a_query_from_its_beginning_to_its_end() -> None:
    servers = two()
    planner = batches(servers)
    start = await planner.initial()
    end = await planner.latest(start, None)
    asked = servers.asked
    assert (await planner.initial(), servers.asked) == (start, asked), "Spark asks twice"
    assert await planner.ranges(start, end) == [Range("orders", 0, 0, 50), Range("orders", 1, 0, 30)]
    servers.logs["orders", 0].end = 60
    more = await planner.latest(end, None)
    await planner.commit(end)
    assert [log.anchor for log in servers.logs.values()] == [50, 30]
    assert await planner.ranges(end, more) == [Range("orders", 0, 50, 60)]
    report = planner.report()
    assert report is not None
    assert load(report) == {("orders", 0): 60, ("orders", 1): 30}
    assert report["metrics"]["messagesBehind"] == 0
    await planner.aclose()
    assert servers.closed


@anyio_only
@pytest.mark.parametrize(
    "given", [{"subscribe": "orders"}, {"subscribePattern": "ord.*"}, {"assign": '{"orders": [1]}'}]
)
async def test_a_checkpoint_of_other_topics_is_refused(given: dict[str, str]) -> None:
    chosen = {**BASE, **given, "failOnDataLoss": "false"}
    planner = StreamPlanner(SourceOptions.parse(chosen, streaming=True), two().admin)
    with pytest.raises(InvalidSetting, match="the checkpoint is of a query of bills"):
        await planner.latest({("bills", 0): 7}, None)
    with pytest.raises(InvalidSetting, match="the checkpoint is of a query of bills"):
        await planner.ranges({}, {("bills", 0): 7})
    await planner.latest({("bills", 0): 7, ("orders", 0): 3}, None)


@anyio_only
async def test_the_end_that_is_frozen_before_the_query_begins() -> None:
    """Spark asks for that first, when a new query has no anchors yet."""
    servers = two()
    planner = batches(servers, startingOffsets="latest")
    await planner.freeze()
    servers.logs["orders", 0].end += 5
    start = await planner.initial()
    assert start == {("orders", 0): 55, ("orders", 1): 30}
    servers.logs["orders", 1].end += 5
    assert await planner.latest(start, None) == start


@anyio_only
async def test_a_frozen_query_ends_where_it_was_frozen() -> None:
    servers = two()
    planner = batches(servers)
    await planner.freeze()
    servers.logs["orders", 0].end += 5
    servers.logs["orders", 2] = Log(0, 5)
    start, steps = await planner.initial(), 0
    servers.logs["orders", 3] = Log(0, 5)
    while (end := await planner.latest(start, 30)) != start:
        start, steps = end, steps + 1
    # partitions that were created in between begin with the query
    assert (start, steps) == ({("orders", 0): 50, ("orders", 1): 30, ("orders", 2): 0}, 3)
    assert await planner.latest(start, None) == start


@anyio_only
@pytest.mark.parametrize("strict", ["true", "false"])
async def test_a_query_that_is_frozen_while_a_new_leader_knows_a_shorter_log(strict: str) -> None:
    """The query failed with DataLoss, or read the messages behind that end again."""
    servers = FakeAdmin({("orders", 0): Log(0, 45, anchor=40), ("orders", 1): Log(0, 30, anchor=30)})
    planner, start = batches(servers, failOnDataLoss=strict), {("orders", 0): 50, ("orders", 1): 30}
    await planner.freeze()
    servers.logs["orders", 0].end = 55
    assert await planner.latest(start, None) == start


@anyio_only
async def test_a_frozen_query_that_is_bounded_by_bytes() -> None:
    servers = FakeAdmin({("orders", 0): Log(0, 50, size=100), ("orders", 1): Log(0, 30, size=100)})
    planner = batches(servers)
    await planner.freeze()
    servers.logs["orders", 0].end += 500
    start, steps = await planner.initial(), 0
    while (end := await planner.latest(start, None, 3000)) != start:
        start, steps = end, steps + 1
    assert (start, steps) == ({("orders", 0): 50, ("orders", 1): 30}, 3)


@anyio_only
async def test_a_logged_batch_is_planned_again_by_a_new_process() -> None:
    servers = two()
    first = batches(servers)
    start = await first.initial()
    end = await first.latest(start, 10)
    planned = await first.ranges(start, end)
    servers.logs["orders", 0].end += 10
    second = batches(servers)
    assert await second.initial() == start
    assert await second.ranges(start, end) == planned


@anyio_only
@pytest.mark.parametrize(("before", "end"), [(45, 50), (0, 1)])
async def test_a_new_leader_receives_the_end_of_the_log_late(before: int, end: int) -> None:
    servers = two()
    servers.logs["orders", 0] = Log(0, before, anchor=0)
    planner = batches(servers, readTimeoutMs="20000")
    found: list[Range] = []

    async def plan() -> None:
        found.extend(await planner.ranges({}, {("orders", 0): end, ("orders", 1): 30}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(plan)
        while servers.asked < 4:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        servers.logs["orders", 0].end = end
    assert found == [Range("orders", 0, 0, end), Range("orders", 1, 0, 30)]


@anyio_only
async def test_messages_that_become_readable_late_are_not_lost() -> None:
    servers = two()
    planner = batches(servers)
    servers.logs["orders", 0].late = 5
    start = await planner.latest(await planner.initial(), None)
    assert start == {("orders", 0): 50, ("orders", 1): 30}, "the first batch has everything that was acknowledged"
    assert await planner.latest(start, None) == start
    servers.logs["orders", 1].end, servers.logs["orders", 1].late = 40, 5
    assert await planner.latest({("orders", 0): 45, ("orders", 1): 30}, None) == {("orders", 0): 45, ("orders", 1): 35}
    await planner.freeze()
    assert await planner.latest({("orders", 0): 45, ("orders", 1): 30}, None) == {("orders", 0): 50, ("orders", 1): 40}


@anyio_only
async def test_a_topic_that_is_removed_and_added_again_continues() -> None:
    servers = two()
    servers.logs["bills", 0] = Log(0, 9)
    both = batches(servers, subscribe="orders,bills")
    read = await both.latest(await both.initial(), None)
    assert read == {("bills", 0): 9, ("orders", 0): 50, ("orders", 1): 30}
    servers.logs["bills", 0].end, servers.logs["orders", 1].end = 12, 31
    one = batches(servers)
    without = await one.latest(read, None)
    assert without == {("bills", 0): 9, ("orders", 0): 50, ("orders", 1): 31}
    assert await one.ranges(read, without) == [Range("orders", 1, 30, 31)]
    assert await one.latest(without, None) == without, "there is nothing new"
    both = batches(servers, subscribe="orders,bills")
    assert await both.ranges(without, await both.latest(without, None)) == [Range("bills", 0, 9, 12)]


@anyio_only
async def test_a_topic_that_was_deleted() -> None:
    servers = two()
    servers.logs["bills", 0] = Log(0, 9)
    for given in ({}, {"failOnDataLoss": "false"}):
        with pytest.raises(TopicNotFound, match="nothing"):
            await batches(servers, subscribe="orders,nothing", **given).initial()
    begun = await batches(servers, subscribe="orders,bills").initial()
    del servers.logs["bills", 0]
    with pytest.raises(TopicNotFound, match="bills"):
        await batches(servers, subscribe="orders,bills").latest(begun, None)
    lenient = batches(servers, subscribe="orders,bills", failOnDataLoss="false")
    end = await lenient.latest(begun, None)
    assert end == {("bills", 0): 0, ("orders", 0): 50, ("orders", 1): 30}
    with anyio.fail_after(5):  # the time out is a minute
        assert await lenient.ranges(begun, end) == [Range("orders", 0, 0, 50), Range("orders", 1, 0, 30)]
    servers.logs["bills", 0] = Log(0, 3)
    assert (await lenient.latest(end, None))["bills", 0] == 3


@anyio_only
async def test_a_stored_batch_of_a_deleted_topic_reads_nothing_of_it() -> None:
    planner = batches(two(), subscribe="orders,bills", failOnDataLoss="false", readTimeoutMs="1")
    stored: Offsets = {("bills", 0): 5, ("orders", 0): 3}
    assert await planner.ranges({("bills", 0): 0}, stored) == [Range("orders", 0, 0, 3)]


@anyio_only
async def test_a_batch_that_was_rolled_back(caplog: pytest.LogCaptureFixture) -> None:
    servers = two()
    servers.logs["orders", 0] = Log(0, 45, anchor=40)
    strict = batches(servers, readTimeoutMs="100")
    with pytest.raises(DataLoss, match="the batch ends at 50, but the partition has only 45"):
        await strict.ranges({("orders", 0): 40}, {("orders", 0): 50})
    assert "do not have all messages of the next batch: waiting, 0.1 s at most" in caplog.text
    assert servers.asked <= 6, servers.asked  # it pauses before it asks again
    lenient = batches(servers, readTimeoutMs="100", failOnDataLoss="false")
    assert await lenient.ranges({("orders", 0): 40}, {("orders", 0): 50}) == [Range("orders", 0, 40, 45)]


@anyio_only
async def test_a_partition_that_is_added_gets_its_anchor_before_its_batch_is_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", -1.0)  # partitions are looked up for each batch
    servers = two()
    planner = batches(servers)
    start = await planner.latest(await planner.initial(), None)
    servers.logs["orders", 2] = Log(0, 4)
    end = await planner.latest(start, 3)
    assert end == {("orders", 0): 50, ("orders", 1): 30, ("orders", 2): 3}
    assert servers.logs["orders", 2].anchor == 0
    assert await planner.ranges(start, end) == [Range("orders", 2, 0, 3)]


@anyio_only
async def test_a_partition_that_is_added_is_read_once_a_leader_serves_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", -1.0)  # partitions are looked up for each batch
    servers = two()
    planner = batches(servers)
    end = await planner.latest(await planner.initial(), None)
    before = dict(end)
    servers.logs["orders", 2] = Log(0, 4)
    servers.broken = {("orders", 2)}
    for number in range(1, 3):
        servers.logs["orders", 1].end += 1
        start, end = end, await planner.latest(end, None)
        assert end == {**before, ("orders", 1): before["orders", 1] + number}, "the others are read meanwhile"
        assert len(await planner.ranges(start, end)) == 1
    assert caplog.text.count("partition 2 is new, and no node serves it yet") == 1
    servers.broken.clear()
    assert (await planner.latest(end, None))["orders", 2] == 4
    servers.broken = {("orders", 2)}
    with pytest.raises(PartitionUnavailable):
        await planner.latest({**end, ("orders", 2): 4}, None)


@anyio_only
async def test_an_anchor_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", -1.0)
    servers = two()
    planner = batches(servers)
    start = await planner.latest(await planner.initial(), None)
    servers.logs["orders", 0].anchor = None
    with pytest.raises(DataLoss, match=r"the anchor channel does not exist: .*the option channel was changed"):
        await planner.latest(start, None)
    assert servers.logs["orders", 0].anchor is None
    servers.logs["orders", 0].end += 5
    lenient = batches(servers, failOnDataLoss="false")
    assert await lenient.latest(start, None) == {("orders", 0): 55, ("orders", 1): 30}
    assert servers.logs["orders", 0].anchor == 50


@anyio_only
async def test_a_topic_that_was_recreated() -> None:
    servers = two()
    planner = batches(servers, failOnDataLoss="false")
    start = await planner.latest(await planner.initial(), None)
    servers.logs["orders", 0] = Log(0, 7)
    back = await planner.latest(start, None)
    assert back == {("orders", 0): 0, ("orders", 1): 30}
    await planner.commit(start)
    assert servers.logs["orders", 0].anchor == 0
    assert await planner.ranges(start, back) == []
    assert await planner.latest(back, None) == {("orders", 0): 7, ("orders", 1): 30}


@anyio_only
async def test_a_logged_batch_of_a_topic_that_is_no_longer_subscribed_is_read() -> None:
    servers = two()
    planner = batches(servers)
    logged: Offsets = {("orders", 0): 50, ("orders", 1): 30, ("invoices", 0): 9}
    assert Range("invoices", 0, 4, 9) in await planner.ranges({("invoices", 0): 4}, logged)
    await planner.initial()
    start: Offsets = {("orders", 0): 1, ("orders", 1): 1, ("invoices", 0): 4}
    assert await planner.latest(start, 0) == start


@anyio_only
async def test_metrics_of_the_progress() -> None:
    servers = two()
    planner = batches(servers)
    assert planner.report() is None
    start = await planner.initial()
    end = await planner.latest(start, 20)
    report = planner.report()
    assert report is not None
    metrics = report["metrics"]
    assert metrics["messagesBehind"] == 60
    assert metrics["earliest"] == {"orders": {"0": 0, "1": 0}}
    assert metrics["behind"] == {"orders": {"0": 50 - end["orders", 0], "1": 30 - end["orders", 1]}}


@anyio_only
async def test_the_rate_of_publishing(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, now = two(), 10.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    planner = batches(servers)
    start, rates = await planner.initial(), list[float]()
    for published, seconds in ((0, 0.0), (10, 3.0), (7, 0.0), (0, 2.0), (0, 1.0), (-20, 1.0), (5, 10.0)):
        now += seconds
        servers.logs["orders", 0].end += published
        await planner.latest(start, 3)
        report = planner.report()
        assert report is not None
        rates.append(report["metrics"]["publishedPerSecond"])
    assert rates == [0.0, 3.3, 3.3, 0.0, 0.0, 0.0, 0.5]


@anyio_only
async def test_anchors_of_an_idle_query_are_at_the_end() -> None:
    """Spark commits a batch only when it plans the next one; a call of latestOffset shows that one is complete."""
    servers = two()
    planner = batches(servers)
    start = await planner.initial()
    end = await planner.latest(start, None)
    assert [log.anchor for log in servers.logs.values()] == [0, 0], "the batch may have to be read again"
    assert await planner.latest(end, None) == end
    assert [log.anchor for log in servers.logs.values()] == [50, 30]


@anyio_only
async def test_a_batch_waits_for_a_number_of_messages() -> None:
    servers = two()
    planner = batches(servers, minOffsetsPerTrigger="100", maxTriggerDelay="1h")
    start = await planner.latest(await planner.initial(), None)
    assert start == {("orders", 0): 50, ("orders", 1): 30}, "the first one does not wait"
    servers.logs["orders", 0].end = 149
    assert await planner.latest(start, None) == start
    assert await planner.latest(start, None, at_once=True) == {("orders", 0): 149, ("orders", 1): 30}
    servers.logs["orders", 0].end = 150
    assert await planner.latest(start, 60) == {("orders", 0): 110, ("orders", 1): 30}, "with a limit besides"
    start = await planner.latest(start, None)
    assert start == {("orders", 0): 150, ("orders", 1): 30}
    hasty = batches(servers, minOffsetsPerTrigger="1000", maxTriggerDelay="1ms")
    assert await hasty.latest(start, None) == start
    servers.logs["orders", 0].end = 170
    await anyio.sleep(0.002)
    assert await hasty.latest(start, None) == {("orders", 0): 170, ("orders", 1): 30}, "it is overdue"
    frozen = batches(servers, minOffsetsPerTrigger="1000", maxTriggerDelay="1h")
    await frozen.freeze()
    assert await frozen.latest(start, None) == {("orders", 0): 170, ("orders", 1): 30}


@anyio_only
async def test_new_topics_that_match_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.spark.read.anchor._TOPICS_INTERVAL", -1.0)
    servers = two()
    servers.logs["other", 0] = Log(0, 9)
    given = {"lookupd": "127.0.0.1:1", "channel": "spark", "subscribePattern": "ord.*", "startingOffsets": "earliest"}
    planner = StreamPlanner(SourceOptions.parse(given, streaming=True), servers.admin)
    start = await planner.initial()
    assert start == {("orders", 0): 0, ("orders", 1): 0}
    servers.logs["orders_eu", 0] = Log(0, 4)
    end = await planner.latest(start, None)
    assert end == {("orders", 0): 50, ("orders", 1): 30, ("orders_eu", 0): 4}
    assert servers.logs["orders_eu", 0].anchor == 0
    assert Range("orders_eu", 0, 0, 4) in await planner.ranges(start, end)


@anyio_only
async def test_an_idle_query_pauses_between_requests() -> None:
    servers = two()
    planner = batches(servers)
    start = await planner.latest(await planner.initial(), None)
    await planner.latest(start, None)
    before, began = servers.asked, anyio.current_time()
    for _ in range(3):
        await planner.latest(start, None)
    assert anyio.current_time() - began >= 0.55
    assert servers.asked == before + 6


@anyio_only
async def test_the_more_partitions_the_longer_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = two()
    planner = batches(servers)
    start = await planner.latest(await planner.initial(), None)
    monkeypatch.setattr("nsqext.spark.read.stream_planner._PAUSE_FACTOR", 1e9)
    await planner.latest(start, None)
    with anyio.move_on_after(0.5) as scope:
        await planner.latest(start, None)
    assert scope.cancelled_caught


@anyio_only
async def test_an_old_checkpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    servers = two()
    servers.logs["orders", 0].anchor = 20
    servers.logs["orders", 1].anchor = 20
    planner = batches(servers)
    with caplog.at_level(logging.WARNING, "nsqext.spark"):
        for _ in range(2):
            await planner.latest({("orders", 0): 10, ("orders", 1): 20}, None)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["topic orders, partition 0"]


def test_a_reader_can_be_sent_to_other_processes() -> None:
    reader = NsqStreamReader(options(maxOffsetsPerTrigger="5"))
    assert pickle.loads(pickle.dumps(reader)).getDefaultReadLimit().max_rows == 5  # noqa: S301
    assert reader.reportLatestOffset() is None
    reader.stop()
    by_size = NsqStreamReader(options(maxBytesPerTrigger="7"))
    assert pickle.loads(pickle.dumps(by_size)).getDefaultReadLimit().max_bytes == 7  # noqa: S301


def test_other_limits_are_refused() -> None:
    limits = pytest.importorskip("pyspark.sql.streaming.datasource", reason="PySpark 4.0 and 4.1 have no read limits")
    with pytest.raises(InvalidSetting, match="does not support ReadMaxFiles"):
        NsqStreamReader(options()).latestOffset({"v": 1, "topics": {}}, limits.ReadMaxFiles(1))


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    """Two partitions, which readers find."""
    servers = two()
    monkeypatch.setattr("nsqext.spark.read.readers.SourceAdmin", lambda *_, **__: servers.admin)
    return servers


def test_a_new_query_of_a_pyspark_that_passes_no_start(servers: FakeAdmin) -> None:
    """PySpark 4.0 and 4.1: the limit applies from the first batch on."""
    reader = NsqStreamReader(options(maxOffsetsPerTrigger="8"))
    first = reader.latestOffset()
    start = reader.initialOffset()
    assert (load(start), load(first)) == ({("orders", 0): 0, ("orders", 1): 0}, {("orders", 0): 5, ("orders", 1): 3})
    assert reader.latestOffset() == first, "the batch is not planned yet"
    reader.partitions(start, first)
    second = reader.latestOffset()
    reader.commit(first)
    assert load(second) == {("orders", 0): 10, ("orders", 1): 6}
    assert [log.anchor for log in servers.logs.values()] == [5, 3]
    reader.stop()
    assert servers.closed


def test_a_new_query_that_ends_with_what_was_published_before(servers: FakeAdmin) -> None:
    reader = NsqStreamReader(options())
    reader.prepareForTriggerAvailableNow()
    servers.logs["orders", 0].end = 60
    assert load(reader.latestOffset(reader.initialOffset())) == {("orders", 0): 50, ("orders", 1): 30}
    reader.stop()


def test_tasks_of_another_source_are_refused() -> None:
    reader = NsqStreamReader(options())
    assert list(reader.read(TaskRanges([]))) == []
    with pytest.raises(InvalidState, match="was not planned by this source"):
        reader.read(InputPartition(None))


def test_a_restarted_query_of_a_pyspark_that_passes_no_start(servers: FakeAdmin) -> None:
    """Spark plans the end of the checkpoint, and then a batch that was not completed; the anchors are before both."""
    stored = dump({("orders", 0): 20, ("orders", 1): 10})
    completed = NsqStreamReader(options(maxOffsetsPerTrigger="8"))
    start = completed.initialOffset()
    assert completed.partitions(stored, stored) == []
    assert load(completed.latestOffset()) == {("orders", 0): 25, ("orders", 1): 13}
    completed.stop()
    repeated = NsqStreamReader(options(maxOffsetsPerTrigger="8"))
    assert repeated.partitions(stored, stored) == []
    assert len(repeated.partitions(start, stored)) == 1
    assert load(repeated.latestOffset()) == {("orders", 0): 25, ("orders", 1): 13}
    repeated.stop()


def test_invalid_starts_raise_at_once() -> None:
    with pytest.raises(InvalidSetting, match="resetChannel cannot start at the latest"):
        NsqStreamReader(options(resetChannel="true", startingOffsets="latest"))
    with pytest.raises(InvalidSetting, match="startingOffsets"):
        NsqStreamReader(options(startingOffsets="somewhere"))
