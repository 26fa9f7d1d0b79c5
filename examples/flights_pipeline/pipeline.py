"""The pipeline from end to end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex

from anyio.from_thread import start_blocking_portal
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
from examples.flights_pipeline.publish import publish_closing_message, publish_flights
from examples.flights_pipeline.stream import (
    ARCHIVE,
    DELAYS,
    DEPARTURES,
    Flow,
    Locations,
    Streams,
    flow_of,
    read_by,
    wait_for,
)
from nsqext.sync import Admin

__all__ = ("PAGE", "PICTURE", "Report", "Setting", "Times", "redraw", "run")

PICTURE = "delays.png"
PAGE = "delays.html"
_EVERY = 2.0
"""Seconds between micro-batches, and between pictures, of a live run."""
_PATIENCE = 30.0
"""Seconds after the last message in which a live stream must have read everything; otherwise the check fails."""


@frozen
class Setting:
    """Settings of a run.

    Attributes:
        lookupd: lookup addresses of the cluster.
        partitions: of the topic of flights.
        folder: for Parquet files, checkpoints and the picture.
        live: seconds in which the flights are published while the streams run and the picture is redrawn; 0 publishes
            them first.
    """

    lookupd: Sequence[str]
    partitions: int
    folder: Path
    live: float = 0.0


@frozen
class Times:
    """Seconds in which the flights were published, and from the start of the first stream to the end of the last."""

    publishing: float
    streaming: float


@frozen
class Report:
    """Results of a run.

    Attributes:
        published: number of flights.
        times: duration of its parts.
        arrivals: the flights in Parquet, compared with the published ones.
        flow: figures of the streams.
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
        """Whether every flight was received once, and every figure is right."""
        arrivals = self.arrivals
        wrong = (arrivals.lost, arrivals.duplicated, arrivals.altered, self.flow.late, self.differences)
        return not any(wrong) and arrivals.rows == self.published


def run(session: SparkSession, setting: Setting, flights: Sequence[Flight], progress: Progress) -> Report:
    """Publish flights, run the streams, and check the results.

    Args:
        session: knows the source ``nsqext``.
        setting: settings of the run.
        flights: in the order of their scheduled departure.
        progress: shows the progress.

    Raises:
        NsqError: the cluster refuses a request, or does not answer.
        StreamingQueryException: a stream failed.
    """
    topic, delays = f"flights_{token_hex(4)}", f"delays_{token_hex(4)}"
    locations = Locations(",".join(setting.lookupd), topic, delays, setting.folder)
    with (
        start_blocking_portal() as portal,
        Admin(lookupd=setting.lookupd) as admin,
        _topic(admin, topic, setting.partitions, (DEPARTURES, DELAYS), progress),
        _topic(admin, delays, 1, (ARCHIVE,), progress),
    ):
        task = progress.add_task("flights published", total=len(flights))
        advance = partial(progress.advance, task)
        publish = partial(portal.call, publish_flights, setting.lookupd, topic, flights, advance, setting.live)
        close = partial(portal.call, publish_closing_message, setting.lookupd, topic, flights[-1])
        streams = Streams(session, locations, _EVERY if setting.live else None)
        mode = _live if setting.live else _one_by_one
        times, flow = mode(streams, flights, progress, publish, close)
    return _report(streams, flights, setting.folder / PICTURE, times, flow)


def _one_by_one(
    streams: Streams,
    flights: Sequence[Flight],
    progress: Progress,
    publish: Callable[[], float],
    close: Callable[[], None],
) -> tuple[Times, Flow]:
    """Publish everything, then run each stream to the end of its topic."""
    publishing = publish()
    began = time.perf_counter()
    flow = _flow([streams.departures(), streams.delays()], progress, len(flights))
    close()
    # the second run continues where the first one ended
    flow += _flow([streams.delays()], progress, 1)
    flow += _flow([streams.archive()], progress, None)
    return Times(publishing, time.perf_counter() - began), flow


def _live(
    streams: Streams,
    flights: Sequence[Flight],
    progress: Progress,
    publish: Callable[[], float],
    close: Callable[[], None],
) -> tuple[Times, Flow]:
    """Publish while the streams run, and redraw the picture until they have read everything."""
    queries: list[StreamingQuery] = []
    try:
        for start in (streams.departures, streams.delays, streams.archive):
            queries.append(start())
            # one after another: Spark gives the process that plans a stream 10 seconds to start, on a busy machine too
            queries[-1].processAllAvailable()
        return _feed(streams, queries, flights, progress, publish, close)
    finally:
        for query in queries:
            query.stop()


def _feed(
    streams: Streams,
    queries: Sequence[StreamingQuery],
    flights: Sequence[Flight],
    progress: Progress,
    publish: Callable[[], float],
    close: Callable[[], None],
) -> tuple[Times, Flow]:
    departures, delays, archive = queries
    tasks = [progress.add_task(f"stream {query.name}: messages read", total=None) for query in queries]
    began = time.perf_counter()

    def feed() -> float:
        seconds = publish()
        _read_all(departures, len(flights))
        _read_all(delays, len(flights))
        close()
        _read_all(delays, len(flights) + 1)
        _read_all(archive, len({(flight.columns["carrier"], flight.columns["time_hour"]) for flight in flights}))
        return seconds

    with ThreadPoolExecutor(1) as threads:
        fed = threads.submit(feed)
        while not wait([fed], _EVERY).done:
            redraw(streams)
            for task, query in zip(tasks, queries, strict=True):
                progress.update(task, completed=read_by(query))
    return Times(fed.result(), time.perf_counter() - began), flow_of(queries)


def _read_all(query: StreamingQuery, count: int) -> None:
    """Wait until a running stream has read ``count`` messages.

    A server may deliver a message some seconds after it is stored.
    """
    until = time.monotonic() + _PATIENCE
    query.processAllAvailable()
    while read_by(query) < count and time.monotonic() < until:
        query.processAllAvailable()


@contextmanager
def _topic(admin: Admin, name: str, partitions: int, channels: Sequence[str], progress: Progress) -> Iterator[None]:
    """Create a topic, and delete it at the end."""
    task = progress.add_task(f"topic {name}: partitions ready", total=partitions)
    try:
        admin.create_topic(name, partitions=partitions, extend=True, multipart=True, channels=channels, wait=150)
        progress.advance(task, partitions)
        yield
    finally:
        admin.delete_topic(name, missing_ok=True)


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


def redraw(streams: Streams) -> None:
    """Draw the delays that are archived so far, and a page that loads the picture again every second."""
    rows, folder = streams.archived(), streams.folder
    delays = None if rows is None else rows.toPandas()
    if delays is None or delays.empty:
        return
    draw(by_airline_and_hour(delays), folder / f"new-{PICTURE}")
    (folder / f"new-{PICTURE}").replace(folder / PICTURE)
    (folder / PAGE).write_text(f'<meta http-equiv="refresh" content="1"><img src="{PICTURE}">', encoding="utf-8")


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
