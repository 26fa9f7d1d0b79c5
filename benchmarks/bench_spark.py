"""Rows per second through Spark: ``python -m benchmarks.bench_spark``.

Batch and streaming reads of 1 KiB messages, compared with the client alone and with Spark's source ``rate-micro-batch``
with rows of the same size; and writes compared with the client alone. All alternate in one run, on a cluster in a
separate process, or on the cluster of ``--lookupd``. CPU is that of all Python processes (the client, and Spark's
workers), on Linux only. The fixed cost of a job is measured with jobs of very few rows.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from statistics import median
from uuid import uuid4

import pyarrow as pa
from anyio.from_thread import BlockingPortal, start_blocking_portal
from attrs import define, field, frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import nsqext
from benchmarks.report import table, write_section
from benchmarks.servers import redesigned_cluster
from nsqext.errors import NsqError
from nsqext.spark import register
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.options import SinkOptions
from nsqext.spark.write.publisher import publish_rows
from nsqext.spark.write.row_ids import ContentIds
from nsqext.sync import Admin, Producer

BODY = b"x" * 1024
PARTITIONS = (1, 2, 4)
SHAPES = ((1, 1), (1, 4), (1, 64), (1, 254), (10, 4), (50, 4))
"""Topics, and partitions of each."""
_SMALL_BODY = b"x" * 200
_BATCH = 1000
_IN_FLIGHT = 1000

ALONE = ("client alone", "client publishes")
JOBS = ("batch read", "batch write")
READ = (ALONE[0], JOBS[0], "streaming read", "rate-micro-batch")
WRITE = (ALONE[1], JOBS[1])

_number = count(1)


@frozen
class Figures:
    """Rows per second, and microseconds of CPU per row."""

    rate: float
    cpu: float


@define
class Bench:
    """Environment and results of the measurements.

    Attributes:
        spark: a session.
        portal: event loop of the client.
        lookupd: lookup address.
        rows: messages of one measurement.
        folder: folder for checkpoints.
        found: figures of all rounds, by name of the measurement and number of partitions.
    """

    spark: SparkSession
    portal: BlockingPortal
    lookupd: str
    rows: int
    folder: Path
    found: dict[tuple[str, int], list[Figures]] = field(factory=dict)

    def note(self, what: str, partitions: int, figures: Figures) -> None:
        """Record figures."""
        self.found.setdefault((what, partitions), []).append(figures)

    # the client alone

    def consume(self, topic: str) -> Figures:
        """Consume a topic with the client."""
        return self._alone(_consume, self.lookupd, topic, self.rows)

    def publish(self, topic: str) -> Figures:
        """Publish to a topic with the client."""
        return self._alone(_publish, self.lookupd, topic, self.rows)

    def _alone(self, function: Callable[..., object], *arguments: object) -> Figures:
        seconds, cpu = time.perf_counter(), time.process_time()
        self.portal.call(function, *arguments)
        return self._figures(time.perf_counter() - seconds, time.process_time() - cpu)

    # Spark

    def read(self, topic: str, **options: str) -> Figures:
        """Read a topic in one job."""
        rows = self.spark.read.format("nsqext").options(lookupd=self.lookupd, subscribe=topic, **options).load()
        return self._job(lambda: rows.write.format("noop").mode("overwrite").save())

    def stream(self, topic: str) -> Figures:
        """Read a topic in one micro-batch."""
        options = {"subscribe": topic, "channel": f"bench_{next(_number)}", "startingOffsets": "earliest"}
        rows = self.spark.readStream.format("nsqext").options(lookupd=self.lookupd, **options).load()
        return self._micro_batch(rows)

    def rate(self, partitions: int) -> Figures:
        """Generate rows of the same size with Spark's own source, in one micro-batch."""
        options = {"rowsPerBatch": self.rows, "numPartitions": partitions}
        rows = self.spark.readStream.format("rate-micro-batch").options(**options).load()
        value = f.concat(f.lit(BODY[:-20]), f.lpad(f.col("value").cast("string"), 20, "0").cast("binary"))
        return self._micro_batch(rows.select(value.alias("value"), "timestamp"))

    def start_reading(self, topic: str, partitions: int) -> Figures:
        """Read a message of each partition."""
        return self.read(topic, endingOffsets=json.dumps({topic: dict.fromkeys(map(str, range(partitions)), 1)}))

    def write(self, topic: str, partitions: int, rows: int | None = None) -> Figures:
        """Publish in one job, with as many tasks as the topic has partitions."""
        numbers = self.spark.range(0, self.rows if rows is None else rows, 1, partitions)
        found = numbers.select(f.lit(BODY).alias("value"))
        writer = found.write.format("nsqext").mode("append").options(lookupd=self.lookupd, topic=topic)
        return self._job(writer.save)

    def _micro_batch(self, rows: DataFrame) -> Figures:
        writer = rows.writeStream.format("noop").option("checkpointLocation", str(self.folder / str(next(_number))))
        cpu = worker_cpu(self.spark)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        done = [batch for batch in query.recentProgress if batch.numInputRows]
        seconds = sum(batch.durationMs["triggerExecution"] for batch in done) / 1000
        if not self.rows <= sum(batch.numInputRows for batch in done) <= self.rows + max(PARTITIONS):
            raise SystemExit(f"a stream read {done}")
        return self._figures(seconds, worker_cpu(self.spark) - cpu)

    def _job(self, run: Callable[[], None]) -> Figures:
        seconds, cpu = time.perf_counter(), worker_cpu(self.spark)
        run()
        return self._figures(time.perf_counter() - seconds, worker_cpu(self.spark) - cpu)

    def _figures(self, seconds: float, cpu: float) -> Figures:
        return Figures(self.rows / seconds, cpu / self.rows * 1e6)


async def _consume(lookupd: str, topic: str, rows: int) -> None:
    channel = f"bench_{next(_number)}#ephemeral"
    consumer = nsqext.Consumer(
        topic, channel, lookupd=lookupd, max_in_flight=_IN_FLIGHT, start=nsqext.Position.earliest()
    )
    taken = 0

    @consumer.handler
    async def handle(_: nsqext.Message) -> None:
        nonlocal taken
        taken += 1
        if taken == rows:
            consumer.stop()

    await consumer.serve()


async def _publish(lookupd: str, topic: str, rows: int) -> None:
    async with nsqext.Producer(lookupd=lookupd) as producer:
        for first in range(1, rows + 1, _BATCH):
            # with trace ids, as the sink does it
            drafts = [nsqext.OutgoingMessage(BODY, trace_id=number) for number in range(first, first + _BATCH)]
            await producer.publish_many(topic, drafts)


def worker_cpu(spark: SparkSession) -> float:
    """Return the CPU seconds of all processes that Spark's JVM has started; Linux only, 0 elsewhere."""
    if spark._jvm is None or not Path("/proc/self/stat").exists():
        return 0.0
    jvm = int(spark._jvm.java.lang.ProcessHandle.current().pid())
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(words[1])
        # including its children that have ended
        used[pid] = sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    return sum(seconds for pid, seconds in used.items() if _descends(pid, jvm, parents))


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


@contextmanager
def topic(bench: Bench, partitions: int) -> Iterator[str]:
    """Yield a topic, and delete it at the end."""
    name = f"bench_{token_hex(4)}"
    with Admin(bench.lookupd) as admin:
        admin.create_topic(name, partitions=partitions, channels=["keep"], multipart=True, wait=150)
        try:
            yield name
        finally:
            with suppress(NsqError):  # a busy cluster may answer late
                admin.delete_topic(name)


def measure(bench: Bench, rounds: int) -> None:
    """Run all measurements alternately."""
    with ExitStack() as stack:
        full = {partitions: stack.enter_context(topic(bench, partitions)) for partitions in PARTITIONS}
        for name in full.values():
            bench.publish(name)
        # starts the workers
        bench.read(full[2])
        bench.stream(full[2])
        with topic(bench, 2) as empty:
            bench.write(empty, 2)
        for _ in range(rounds):
            for partitions, name in full.items():
                bench.note("client alone", partitions, bench.consume(name))
                bench.note("batch read", partitions, bench.read(name))
                bench.note("streaming read", partitions, bench.stream(name))
                bench.note("rate-micro-batch", partitions, bench.rate(partitions))
                with topic(bench, partitions) as empty:
                    bench.note("client publishes", partitions, bench.publish(empty))
                with topic(bench, partitions) as empty:
                    bench.note("batch write", partitions, bench.write(empty, partitions))
                    bench.note("start of batch write", partitions, bench.write(empty, partitions, partitions))
                bench.note("start of batch read", partitions, bench.start_reading(name, partitions))


def measure_shapes(bench: Bench, rounds: int) -> dict[tuple[int, int], Figures]:
    """Read the same number of small messages from increasing numbers of partitions and topics; return medians."""
    found: dict[tuple[int, int], Figures] = {}
    for topics, partitions in SHAPES:
        with ExitStack() as stack:
            names = [stack.enter_context(topic(bench, partitions)) for _ in range(topics)]
            share = bench.rows // (topics * partitions)
            for name in names:
                bench.portal.call(_spread, bench.lookupd, name, partitions, share)
            read = ",".join(names)
            bench.read(read)  # starts the workers
            runs = [bench.read(read) for _ in range(rounds)]
        found[topics, partitions] = Figures(median(run.rate for run in runs), median(run.cpu for run in runs))
        print(f"{topics} topics of {partitions} partitions: {found[topics, partitions]}", flush=True)
    return found


async def _spread(lookupd: str, name: str, partitions: int, count: int) -> None:
    async with nsqext.Producer(lookupd=lookupd) as producer:
        for partition in range(partitions):
            for first in range(0, count, _BATCH):
                bodies = [_SMALL_BODY] * min(_BATCH, count - first)
                await producer.publish_many(name, bodies, partition=partition)


def measure_sink(lookupd: str, rows: int, rounds: int) -> str:
    """Publish small rows with the sink, without Spark, and with the client alone; return a table.

    The client gets the same ids as columns, and as an object for each message.
    """
    batches = [
        pa.RecordBatch.from_pydict(
            {"value": [b"%d " % number + _SMALL_BODY for number in range(first, first + 10_000)]}
        )
        for first in range(0, rows, 10_000)
    ]
    lines: list[list[str]] = []
    for kind, extend in (("trace ids", False), ("headers", True)):
        found: dict[str, list[float]] = {}
        with Admin(lookupd) as admin:
            name = f"bench_{token_hex(4)}"
            admin.create_topic(name, partitions=2, channels=["keep"], extend=extend, wait=150)
            for number in range(rounds + 1):
                for how in _SINKS:
                    cpu = time.process_time()
                    how(lookupd, name, batches, extend)
                    if number:  # the first round fills caches
                        found.setdefault(how.__name__, []).append((time.process_time() - cpu) / rows * 1e6)
            admin.delete_topic(name)
        sink, columns, objects = (median(each) for each in found.values())
        lines.append([kind, *(f"{cpu:.2f}" for cpu in (sink, columns, objects)), f"{sink / columns:.2f}"])
        print(lines[-1], found, flush=True)
    return table(("ids", "sink", "client, columns", "client, objects", "sink / client, columns"), lines)


def _sink(lookupd: str, topic: str, batches: list[pa.RecordBatch], extend: bool) -> None:
    ids = ContentIds(f"{uuid4()}/{next(_number)}", 3, "0123456789ab")
    publish_rows(SinkOptions(ClientConfig((lookupd,)), topic), ("value",), ids, iter(batches))


def _columns(lookupd: str, topic: str, batches: list[pa.RecordBatch], extend: bool) -> None:
    _publish_with_ids(lookupd, topic, batches, extend, as_objects=False)


def _objects(lookupd: str, topic: str, batches: list[pa.RecordBatch], extend: bool) -> None:
    _publish_with_ids(lookupd, topic, batches, extend, as_objects=True)


_SINKS = (_sink, _columns, _objects)


def _publish_with_ids(
    lookupd: str, topic: str, batches: list[pa.RecordBatch], extend: bool, *, as_objects: bool
) -> None:
    prefix, step = f"{uuid4()}/{next(_number)}", 4000  # as many as the sink's chunks of 1 MiB have
    with Producer(lookupd=lookupd) as producer:
        for batch in batches:
            bodies = batch.column(0).to_numpy(zero_copy_only=False).tolist()
            for first in range(0, len(bodies), step):
                part = bodies[first : first + step]
                numbers = range(first + 1, first + 1 + len(part))
                texts = [f"{prefix}/{number:016x}" for number in numbers] if extend else []
                task = ["0123456789ab/3"] * len(texts)
                if as_objects:
                    made = [
                        nsqext.OutgoingMessage(body, {"nsqext_id": text, "nsqext_id_task": "0123456789ab/3"})
                        for body, text in zip(part, texts, strict=False)
                    ]
                    made = made or [
                        nsqext.OutgoingMessage(body, trace_id=number)
                        for body, number in zip(part, numbers, strict=True)
                    ]
                    producer.publish_many(topic, made)
                elif extend:
                    producer.publish_many(topic, part, headers={"nsqext_id": texts, "nsqext_id_task": task})
                else:
                    producer.publish_many(topic, part, trace_ids=list(numbers))


def report_shapes(rows: int, found: dict[tuple[int, int], Figures]) -> str:
    """Return a table."""
    lines = [
        [str(topics), str(partitions), f"{figures.rate:,.0f}", f"{figures.cpu:.1f}"]
        for (topics, partitions), figures in found.items()
    ]
    return table(("topics", "partitions of each", "rows a second", "µs of Python's CPU per row"), lines)


def report(bench: Bench) -> str:
    """Return the tables."""

    def cell(what: str, partitions: int, kind: str) -> float:
        return float(median(getattr(figures, kind) for figures in bench.found[what, partitions]))

    def costs(name: str, alone: str, start: str | None = None) -> list[str]:
        found = [cell(name, number, "cpu") - (cell(start, number, "cpu") if start else 0) for number in PARTITIONS]
        shares = [mine / cell(alone, number, "cpu") for mine, number in zip(found, PARTITIONS, strict=True)]
        return [f"{mine:.1f} ({share:.1f})" for mine, share in zip(found, shares, strict=True)]

    text = ""
    heads = [f"{number} partition{'s' if number > 1 else ''}" for number in PARTITIONS]
    for title, job, names in (("read", JOBS[0], READ), ("written", JOBS[1], WRITE)):
        rates = [[name, *(f"{cell(name, number, 'rate'):,.0f}" for number in PARTITIONS)] for name in names]
        text += table((f"rows {title} a second", *heads), rates) + "\n"
        lines = [[name, *costs(name, names[0])] for name in names if name in ALONE + JOBS]
        lines.append([f"{job}, without its start", *costs(job, names[0], f"start of {job}")])
        text += table(("µs of Python's CPU per row (times the client's)", *heads), lines) + "\n"
    return text


def local_session() -> SparkSession:
    """Return a quiet Spark session of this machine, with the data source."""
    session = (
        SparkSession.builder.master("local[*]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    register(session)
    return session


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=150_000, help="of one measurement; 200,000 fill the cluster")
    parser.add_argument("--lookupd", metavar="HOST:PORT", help="a cluster that runs already")
    parser.add_argument("--shapes", action="store_true", help="only reads of 1 to 254 partitions and 1 to 50 topics")
    parser.add_argument("--sink", action="store_true", help="only the sink's rows, without Spark")
    given = parser.parse_args()
    if given.sink:
        with redesigned_cluster() if given.lookupd is None else nullcontext(given.lookupd) as address:
            print(measure_sink(address.removeprefix("http://"), given.rows, given.rounds))
        return
    session = local_session()
    where = redesigned_cluster() if given.lookupd is None else nullcontext(given.lookupd)
    with where as address, start_blocking_portal() as portal, tempfile.TemporaryDirectory() as folder:
        bench = Bench(session, portal, address.removeprefix("http://"), given.rows, Path(folder))
        if given.shapes:
            print(report_shapes(given.rows, measure_shapes(bench, given.rounds)))
            session.stop()
            return
        measure(bench, given.rounds)
        session.stop()
    text = report(bench)
    print(text)
    server = "a cluster of one node of `nsqext`" if given.lookupd is None else "another cluster"
    write_section(
        "Spark",
        f"Messages of 1 KiB, {given.rows:,} in each measurement, {server}, {given.rounds} rounds, `local[*]`. Server, "
        f"Java and Python share the {os.cpu_count()} cores, so figures cannot grow with partitions beyond that. "
        "`rate-micro-batch` is Spark's own source, with rows of the same size, which are never in Python. CPU includes "
        "what it takes to plan a job and to start its tasks, however many rows there are; the last lines are without "
        "that. A streaming query reads with the same tasks, and starts a process more, to plan.\n\n"
        f"{text}",
    )


if __name__ == "__main__":
    main()
