"""The pipeline from end to end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anyio.from_thread import BlockingPortal, start_blocking_portal
from attrs import frozen
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from rich.progress import Progress, TaskID

from examples.flights_pipeline.check import (
    Arrivals,
    by_airline_and_hour,
    check_arrivals,
    count_differences,
    expected_delays,
    read_table,
)
from examples.flights_pipeline.flights import Flight
from examples.flights_pipeline.picture import draw
from examples.flights_pipeline.publish import publish_closing_word, publish_flights
from examples.flights_pipeline.stream import ARCHIVE, DELAYS, DEPARTURES, Flow, Locations, Streams, wait_for
from nsqext.cli.flights.temporary_topic import TopicPlan, fresh_name, temporary_topic

__all__ = ("Report", "Setting", "Times", "run")

PICTURE = "delays.png"


@frozen
class Setting:
    """Where the pipeline runs.

    Attributes:
        lookupd: lookup addresses of the cluster.
        partitions: of the topic of flights.
        folder: for Parquet files, checkpoints and the picture.
    """

    lookupd: Sequence[str]
    partitions: int
    folder: Path


@frozen
class Times:
    """Seconds in which the flights were published, and from the start of the first stream to the end of the last."""

    publishing: float
    streaming: float


@frozen
class Report:
    """How it went.

    Attributes:
        published: number of flights.
        times: how long it took.
        arrivals: the flights in Parquet, compared with the published ones.
        flow: what the streams did.
        delays: number of delays, one for each airline and scheduled hour.
        differences: how many of them are not what pandas computes.
        picture: the heat map.
    """

    published: int
    times: Times
    arrivals: Arrivals
    flow: Flow
    delays: int
    differences: int
    picture: Path

    @property
    def good(self) -> bool:
        """Whether everything arrived once, and every figure is right."""
        arrivals = self.arrivals
        wrong = (arrivals.lost, arrivals.duplicated, arrivals.altered, self.flow.late, self.differences)
        return not any(wrong) and arrivals.rows == self.published


def run(session: SparkSession, setting: Setting, flights: Sequence[Flight], progress: Progress) -> Report:
    """Publish flights, run the streams, and check the results.

    Args:
        session: knows the source ``nsqext``.
        setting: where.
        flights: in the order of their scheduled departure.
        progress: shows how far it is.

    Raises:
        NsqError: the cluster refuses something, or does not answer.
        StreamingQueryException: a stream failed.
    """
    plan = TopicPlan(fresh_name("flights"), setting.partitions, extend=True, channels=(DEPARTURES, DELAYS))
    other = TopicPlan(fresh_name("delays"), extend=True, channels=(ARCHIVE,))
    streams = Streams(session, Locations(",".join(setting.lookupd), plan.name, other.name, setting.folder))
    with (
        start_blocking_portal() as portal,
        _topic(portal, setting.lookupd, plan, progress),
        _topic(portal, setting.lookupd, other, progress),
    ):
        task = progress.add_task("flights published", total=len(flights))
        publishing = portal.call(
            publish_flights, setting.lookupd, plan.name, flights, lambda count: progress.advance(task, count)
        )
        began = time.perf_counter()
        flow = _flow([streams.departures(), streams.delays()], progress, len(flights))
        portal.call(publish_closing_word, setting.lookupd, plan.name, flights[-1])
        # the second run continues where the first one ended
        flow += _flow([streams.delays()], progress, 1)
        flow += _flow([streams.archive()], progress, None)
        streaming = time.perf_counter() - began
    return _report(streams, flights, setting.folder / PICTURE, Times(publishing, streaming), flow)


@contextmanager
def _topic(portal: BlockingPortal, lookupd: Sequence[str], plan: TopicPlan, progress: Progress) -> Iterator[str]:
    """Make a topic, and delete it in the end."""
    task = progress.add_task(f"topic {plan.name}: partitions ready", total=plan.partitions)
    with portal.wrap_async_context_manager(temporary_topic(lookupd, plan)) as name:
        progress.advance(task, plan.partitions)
        yield name


def _flow(queries: Sequence[StreamingQuery], progress: Progress, total: int | None) -> Flow:
    """Let streams run to their end."""
    tasks: dict[str | None, TaskID] = {
        query.name: progress.add_task(f"stream {query.name}: messages read", total=total) for query in queries
    }
    flow = wait_for(queries, lambda query, read: progress.update(tasks[query.name], completed=read))
    if total is None:
        for task in tasks.values():
            progress.update(task, total=flow.read)
    return flow


def _report(streams: Streams, flights: Sequence[Flight], picture: Path, times: Times, flow: Flow) -> Report:
    published = read_table({flight.number for flight in flights})
    delays = streams.table(ARCHIVE).toPandas()
    draw(by_airline_and_hour(delays), picture)
    return Report(
        published=len(flights),
        times=times,
        arrivals=check_arrivals(streams.table(DEPARTURES).toPandas(), published),
        flow=flow,
        delays=len(delays),
        differences=count_differences(delays, expected_delays(published)),
        picture=picture,
    )
