"""Reads and writes of Spark by number of rows and partitions, in one run: ``python -m benchmarks.bench_spark_scale``.

For each size: the client publishes and consumes a topic, Spark reads it in one batch, and writes as many rows in one
job. Each has its own topic. The figures of a row of the table are measured one after the other; other load on the
machine affects the figures, and their ratios less. With ``--results``, a run that ended early continues with the sizes
that the file lacks.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import orjson
from anyio.from_thread import start_blocking_portal
from pyspark.sql import functions as f

import nsqext
from benchmarks.bench_spark import Bench, Figures, local_session, topic
from benchmarks.report import table, write_section
from benchmarks.servers import redesigned_cluster
from benchmarks.versions import node_version

ROWS = (200_000, 2_000_000)
PARTITIONS = (4, 254)
_BODY = b"x" * 200
_CHUNK = 4000  # as many messages as the sink's chunks of 1 MiB have
_TASKS = 4

WAYS = ("client publishes", "Spark writes", "client consumes", "Spark reads")


class ScaleBench(Bench):
    """The measurements of small messages."""

    def publish_small(self, topic: str, partitions: int) -> Figures:
        """Publish with the client, with trace ids as the sink does."""
        chunk = min(_CHUNK, max(self.rows // (2 * partitions), 1))
        return self._alone(_publish_small, self.lookupd, topic, self.rows, chunk)

    def write_small(self, topic: str) -> Figures:
        """Publish in one job of few tasks."""
        rows = self.spark.range(0, self.rows, 1, _TASKS).select(f.lit(_BODY).alias("value"))
        writer = rows.write.format("nsqext").mode("append").options(lookupd=self.lookupd, topic=topic)
        return self._job(writer.save)


async def _publish_small(lookupd: str, topic: str, rows: int, chunk: int) -> None:
    async with nsqext.Producer(lookupd=lookupd) as producer:
        for first in range(1, rows + 1, chunk):
            numbers = range(first, min(first + chunk, rows + 1))
            await producer.publish_many(topic, [_BODY] * len(numbers), trace_ids=list(numbers))


def measure(
    bench: ScaleBench, sizes: Sequence[int], results: Path | None
) -> tuple[dict[tuple[int, int], dict[str, Figures]], list[float]]:
    """Measure each size that the results lack; return figures by rows and partitions, and load averages."""
    found: dict[tuple[int, int], dict[str, Figures]] = {}
    loads: list[float] = []
    if results is not None and results.exists():
        stored = orjson.loads(results.read_bytes())
        loads = stored["loads"]
        for rows, partitions, figures in stored["sizes"]:
            found[rows, partitions] = {way: Figures(*pair) for way, pair in figures.items()}
    with topic(bench, 2) as name:  # starts the workers
        bench.rows = 1000
        bench.publish_small(name, 2)
        bench.read(name)
        bench.write_small(name)
    for partitions in PARTITIONS:
        for bench.rows in sizes:
            if (bench.rows, partitions) in found:
                continue
            loads.append(os.getloadavg()[0])
            with topic(bench, partitions) as name:
                published = bench.publish_small(name, partitions)
                consumed, read = bench.consume(name), bench.read(name)
                written = bench.write_small(name)
            figures = dict(zip(WAYS, (published, written, consumed, read), strict=True))
            found[bench.rows, partitions] = figures
            loads.append(os.getloadavg()[0])
            print(bench.rows, partitions, figures, loads[-2:], flush=True)
            if results is not None:
                stored = [
                    [*size, {way: [figures.rate, figures.cpu] for way, figures in each.items()}]
                    for size, each in found.items()
                ]
                results.write_bytes(orjson.dumps({"loads": loads, "sizes": stored}))
    return found, loads


def report(found: dict[tuple[int, int], dict[str, Figures]]) -> str:
    """Return the tables: rates, and CPU as multiples of the client's."""
    rates: list[list[str]] = []
    costs: list[list[str]] = []
    for (rows, partitions), figures in found.items():
        size = [f"{rows:,}", str(partitions)]
        rates.append(size + [f"{figures[way].rate:,.0f}" for way in WAYS])
        cpu = [figures[way].cpu for way in WAYS]
        ratios = [f"{cpu[1] / cpu[0]:.1f}", f"{cpu[3] / cpu[2]:.1f}"]
        costs.append(size + [f"{each:.1f}" for each in cpu] + ratios)
    head = ("rows", "partitions", *WAYS)
    return (
        f"Rows a second:\n\n{table(head, rates)}\n"
        f"µs of Python's CPU per row:\n\n{table((*head, 'written / published', 'read / consumed'), costs)}"
    )


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", metavar="HOST:PORT", help="a cluster that runs already")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="sizes of the topics")
    parser.add_argument("--results", metavar="FILE", type=Path, help="where figures are kept until all are measured")
    given = parser.parse_args()
    session = local_session()
    with ExitStack() as stack:
        where = redesigned_cluster() if given.lookupd is None else nullcontext(given.lookupd)
        lookupd = stack.enter_context(where).removeprefix("http://")
        portal = stack.enter_context(start_blocking_portal())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = "one node of `nsqext`" if given.lookupd is None else f"the real cluster, nsqd {node_version(lookupd)}"
        found, loads = measure(ScaleBench(session, portal, lookupd, 0, Path(folder)), given.rows, given.results)
        text = report(found)
        session.stop()
    print(text)
    write_section(
        "Spark by rows and partitions",
        f"Messages of 200 bytes on {server}; `local[*]`, written by {_TASKS} tasks. Each size once, the client and "
        "Spark one after the other on a topic of its own. Rates and CPU include planning and the start of a job's "
        "tasks. Servers, Java, Python and other programs share the cores (load averages of "
        f"{min(loads):.0f} to {max(loads):.0f}): compare the ratios to the client.\n\n{text}",
    )


if __name__ == "__main__":
    main()
