"""The first micro-batch of a query over many partitions: ``python -m benchmarks.bench_spark_first``.

The cluster runs in a separate process. First without Spark: a planner plans the batch, and one task after the other
reads it, with the CPU of both processes and the number of requests. Then the first micro-batch of a query of Spark, in
a session that has run one before; its planner's CPU is not in the figures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define

from benchmarks.bench_spark import local_session, worker_cpu
from benchmarks.report import table
from benchmarks.servers import cluster_process, cpu_of
from nsqext import Producer
from nsqext.lookup.responses import LookupHttp
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.range_reader import TaskReader
from nsqext.spark.read.readers import tasks_of
from nsqext.spark.read.stream_planner import StreamPlanner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TOPIC = "first"
_MESSAGES = 10
_BODY = b"x" * 200


@define
class Step:
    """Seconds, CPU seconds of both processes, and requests of a part of the micro-batch."""

    seconds: float = 0.0
    own: float = 0.0
    cluster: float = 0.0
    requests: int = 0


@contextmanager
def measured(step: Step, pid: int, asked: Counter[str]) -> Iterator[None]:
    """Measure what runs inside."""
    before, own, cluster = time.perf_counter(), time.process_time(), cpu_of(pid)
    requests = asked.total()
    yield
    step.seconds = time.perf_counter() - before
    step.own, step.cluster = time.process_time() - own, cpu_of(pid) - cluster
    step.requests = asked.total() - requests


async def without_spark(lookupd: str, pid: int, channel: str) -> dict[str, Step]:
    """Plan and read the first micro-batch of a new query."""
    asked: Counter[str] = Counter()
    fetch = LookupHttp.fetch

    async def count(http: LookupHttp, address: Any, path: str, *given: Any, **named: Any) -> tuple[int, bytes]:
        asked[path] += 1
        return await fetch(http, address, path, *given, **named)

    given = {"lookupd": lookupd, "subscribe": _TOPIC, "channel": channel, "startingOffsets": "earliest"}
    options = SourceOptions.parse(given, streaming=True)
    steps = {name: Step() for name in ("start", "plan", "read")}
    planner = StreamPlanner(options, SourceAdmin(options.client))
    LookupHttp.fetch = count  # type: ignore[assignment, method-assign]
    try:
        with measured(steps["start"], pid, asked):
            begin = await planner.initial()
        with measured(steps["plan"], pid, asked):
            last = planner.last
            end = await planner.latest(begin, None, None, last)
            ranges = await planner.ranges(begin, end, last, planner.last)
        with measured(steps["read"], pid, asked):
            for task in tasks_of(options, ranges, planner.planned_of(ranges)):
                async with TaskReader(options, task.ranges, task.planned) as reader:
                    while await reader.next_block() is not None:
                        pass
    finally:
        LookupHttp.fetch = fetch  # type: ignore[method-assign]
        await planner.aclose()
    total = Step(*(sum(getattr(step, name) for step in steps.values()) for name in Step.__annotations__))
    return {**steps, "together": total}


def with_spark(spark: SparkSession, lookupd: str, pid: int, channel: str, folder: str) -> list[str]:
    """Run the first micro-batch of a new query; return a line of the table."""
    given = {"lookupd": lookupd, "subscribe": _TOPIC, "channel": channel, "startingOffsets": "earliest"}
    rows = spark.readStream.format("nsqext").options(**given).load()
    own, cluster = worker_cpu(spark), cpu_of(pid)
    query = (
        rows.writeStream.format("noop").option("checkpointLocation", f"{folder}/{channel}").trigger(once=True).start()
    )
    query.awaitTermination()
    (batch,) = [found for found in query.recentProgress if found.numInputRows]
    spent = batch.durationMs
    seconds = [spent[name] / 1000 for name in ("triggerExecution", "latestOffset", "addBatch")]
    return [f"{found:.2f}" for found in (*seconds, worker_cpu(spark) - own, cpu_of(pid) - cluster)]


async def fill(lookupd: str, partitions: int) -> None:
    """Publish some messages to each partition."""
    async with Producer(lookupd) as producer:
        for partition in range(partitions):
            await producer.publish_many(_TOPIC, [_BODY] * _MESSAGES, partition=partition)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spark", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    with cluster_process(f"{_TOPIC}:{given.partitions}") as (pid, lookupd), tempfile.TemporaryDirectory() as folder:
        anyio.run(fill, lookupd, given.partitions)
        found = [
            anyio.run(partial(without_spark, lookupd, pid, f"alone_{number}")) for number in range(given.rounds + 1)
        ]
        lines = []
        for name in found[0]:
            # the first round fills caches
            steps = [steps[name] for steps in found[1:]]
            seconds = [f"{median(getattr(step, each) for step in steps):.2f}" for each in ("seconds", "own", "cluster")]
            lines.append([name, *seconds, str(steps[-1].requests)])
        print(f"{given.partitions} partitions, without Spark:\n")
        print(table(("", "seconds", "CPU here", "CPU of the cluster", "HTTP requests"), lines), flush=True)
        if given.spark:
            spark = local_session()
            lines = [
                [str(number), *with_spark(spark, lookupd, pid, f"spark_{number}", folder)]
                for number in range(given.rounds + 1)
            ]
            spark.stop()
            print("Spark, each round a new query; round 0 starts the processes:\n")
            heads = ("round", "first micro-batch", "latestOffset", "addBatch", "CPU of the tasks", "CPU of the cluster")
            print(table(heads, lines))


if __name__ == "__main__":
    main()
