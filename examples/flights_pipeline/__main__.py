"""Run the pipeline: ``python -m examples.flights_pipeline``.

On a cluster of its own, in this process; with ``--lookupd HOST:PORT`` on that one, with two topics that are deleted at
the end. The exit code is 1 if a flight is lost or duplicated, or a figure differs from the figure of pandas.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.errors import PySparkRuntimeError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights_pipeline.flights import read_flights
from examples.flights_pipeline.pipeline import PAGE, Report, Setting, run
from examples.flights_pipeline.stream import make_session
from nsqext.broker import Cluster

_LIVE_ROWS = 60_000
"""Two months: one day for each second of the minute that a live run takes."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights_pipeline", description=__doc__)
    parser.add_argument("--lookupd", metavar="HOST:PORT", help="a running nsqlookupd (HTTP), or several with commas")
    parser.add_argument("--master", default="local[*]", help="of Spark; default: local[*]")
    parser.add_argument(
        "--rows", type=int, metavar="N", help="only the first N flights of the year (default: all; 60,000 with --live)"
    )
    parser.add_argument(
        "--live",
        type=float,
        nargs="?",
        const=60.0,
        default=0.0,
        metavar="SECONDS",
        help="publish for this many seconds (default: 60) while the streams run and the picture is redrawn",
    )
    parser.add_argument("--partitions", type=int, default=4, metavar="N", help="of the topic of flights (default: 4)")
    parser.add_argument(
        "--out", type=Path, default=Path("build/flights"), metavar="FOLDER", help="default: build/flights"
    )
    given = parser.parse_args(words)
    if (given.rows is not None and given.rows < 1) or not 1 <= given.partitions <= 254 or given.live < 0:
        parser.error("--rows is at least 1, --partitions 1 to 254, --live at least 0")
    if given.live and given.rows is None:
        given.rows = _LIVE_ROWS
    return given


@contextmanager
def cluster(lookupd: str | None, console: Console) -> Iterator[list[str]]:
    """Return the lookup addresses of the given cluster, or start one."""
    if lookupd is not None:
        yield lookupd.split(",")
        return
    with Cluster(nodes=3) as own:
        console.print(f"cluster of 3 nodes, lookup at {own.lookupd[0]}", highlight=False)
        yield own.lookupd


def show(report: Report, console: Console) -> None:
    """Print the results."""
    table = Table(title="A year of flights" if report.published > 300_000 else "Flights", title_justify="left")
    table.add_column("what")
    table.add_column("count", justify="right")
    table.add_column("a second", justify="right")
    times = report.times
    table.add_row("flights published", f"{report.published:,}", f"{report.published / times.publishing:,.0f}")
    table.add_row("messages read by the streams", f"{report.flow.read:,}", f"{report.flow.read / times.streaming:,.0f}")
    table.add_row("flights in Parquet", f"{report.arrivals.rows:,}", "")
    table.add_row("delays, by airline and scheduled hour", f"{report.delays:,}", "", end_section=True)
    wrong = {
        "lost": report.arrivals.lost,
        "duplicated": report.arrivals.duplicated,
        "altered": report.arrivals.altered,
        "too late to be counted": report.flow.late,
        "figures that are not those of the CSV file": report.differences,
    }
    for what, count in wrong.items():
        table.add_row(what, f"[{'red' if count else 'green'}]{count:,}[/]", "")
    console.print(table)
    console.print(f"picture: {report.picture}", highlight=False, soft_wrap=True)
    good, bad = "figures equal, nothing lost or altered", "figures differ, or messages were lost or altered"
    console.print(f"[green]{good}[/]" if report.good else f"[red]{bad}[/]")


def main() -> int:
    """Run the pipeline; returns 0 if the figures are equal and nothing was lost or altered."""
    given = arguments()
    console = Console()
    try:
        session = make_session(given.master)
    except PySparkRuntimeError as error:
        console.print(f"Spark does not start; it needs Java 17 or later, in JAVA_HOME or on the PATH\n{error}")
        return 1
    folder = given.out / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    columns = (SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), BarColumn())
    with (
        cluster(given.lookupd, console) as lookupd,
        Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress,
    ):
        flights = read_flights(given.rows)
        if given.live:
            console.print(f"picture: file://{(folder / PAGE).absolute()}", highlight=False, soft_wrap=True)
        report = run(session, Setting(lookupd, given.partitions, folder, given.live), flights, progress)
    show(report, console)
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
