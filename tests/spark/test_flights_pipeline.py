"""The flights pipeline of the examples: its parts, and all of it with the flights of a few days."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from attrs import evolve
from rich.console import Console
from rich.progress import Progress

from examples.flights_pipeline import check, flights
from examples.flights_pipeline.__main__ import arguments, show
from examples.flights_pipeline.pipeline import PAGE, PICTURE, Report, Setting, Times, redraw, run
from examples.flights_pipeline.stream import ARCHIVE, Flow, Locations, Streams
from tests.support.spark_queries import after_slow_starts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.spark_cluster import Servers

ROWS = 5000


@pytest.fixture(scope="module", autouse=True)
def _file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A file of the first days of the year, the later ones first: the whole one takes seconds to read."""
    with zipfile.ZipFile(flights.flights_file()) as whole, whole.open(whole.namelist()[0]) as lines:
        names, *days = islice(lines, 1 + 2 * ROWS)
    small = tmp_path_factory.mktemp("flights") / "flights.csv.zip"
    with zipfile.ZipFile(small, "w") as archive:
        archive.writestr("flights.csv", b"".join([names, *days[ROWS:], *days[:ROWS]]))
    with pytest.MonkeyPatch.context() as patch:
        for module in (check, flights):
            patch.setattr(module, "flights_file", lambda: small)
        yield


@pytest.fixture(scope="module")
def some() -> list[flights.Flight]:
    """The first flights of the year."""
    return flights.read_flights(ROWS)


@pytest.fixture(scope="module")
def published(some: list[flights.Flight]) -> pd.DataFrame:
    """The same as a table."""
    return check.read_table({flight.number for flight in some})


def test_flights_are_ordered_by_schedule(some: list[flights.Flight]) -> None:
    times = [str(flight.columns["time_hour"]) for flight in some]
    assert times == sorted(times)
    assert (times[0], len(some)) == ("2013-01-01T10:00:00Z", ROWS)


def test_a_flight_with_an_unknown_aircraft_uses_its_number_as_key() -> None:
    flight = flights.Flight(1, {"tailnum": None, "carrier": "AA", "flight": 791})
    assert flight.key == "AA791"


def test_received_rows_are_compared_one_by_one(published: pd.DataFrame) -> None:
    assert check.check_arrivals(published.copy(), published) == check.Arrivals(ROWS, 0, 0, 0)
    changed = published.copy()
    changed.loc[5, "dest"] = "XXX"
    changed.loc[6, "tailnum"] = None
    changed = changed.drop(7)
    assert check.check_arrivals(pd.concat([changed, changed[:3]]), published) == check.Arrivals(ROWS + 2, 1, 3, 2)


def test_figures_that_are_missing_or_wrong_are_counted(published: pd.DataFrame) -> None:
    expected = check.expected_delays(published)
    wrong = expected[1:].copy()
    wrong.loc[5, "delay"] += 1
    assert check.count_differences(expected, expected) == 0
    assert check.count_differences(wrong, expected) == 2


def test_hours_are_in_the_time_zone_of_new_york(published: pd.DataFrame) -> None:
    day = check.by_airline_and_hour(check.expected_delays(published)).set_index(["airline", "hour"])
    counts = published.groupby(["airline", "hour"]).size()
    assert day["flights"].to_dict() == counts.to_dict()


GOOD = Report(
    published=ROWS,
    times=Times(publishing=0.5, streaming=10.0),
    arrivals=check.Arrivals(ROWS, 0, 0, 0),
    flow=Flow(read=2 * ROWS, late=0),
    delays=900,
    differences=0,
    picture=Path("delays.png"),
)


def test_the_table_shows_rates_and_success() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    show(GOOD, console)
    text = console.export_text()
    assert "│ flights published                          │  5,000 │   10,000 │" in text
    assert "│ messages read by the streams               │ 10,000 │    1,000 │" in text
    assert text.endswith("figures equal, nothing lost or altered\n")


@pytest.mark.parametrize(
    "report",
    [
        evolve(GOOD, arrivals=check.Arrivals(ROWS - 1, 1, 0, 0)),
        evolve(GOOD, arrivals=check.Arrivals(ROWS + 1, 0, 1, 0)),
        evolve(GOOD, arrivals=check.Arrivals(ROWS, 0, 0, 1)),
        evolve(GOOD, flow=Flow(2 * ROWS, 1)),
        evolve(GOOD, differences=1),
    ],
)
def test_any_violation_fails_the_run(report: Report) -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    show(report, console)
    assert not report.good
    assert console.export_text().endswith("figures differ, or messages were lost or altered\n")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(["--rows", "10", "--lookupd", "127.0.0.1:4161"])
    assert (given.rows, given.lookupd, given.partitions, given.live) == (10, "127.0.0.1:4161", 4, 0.0)
    assert [arguments(words).live for words in (["--live"], ["--live", "5"])] == [60.0, 5.0]
    with pytest.raises(SystemExit):
        arguments(["--rows", "0"])
    assert "--rows is at least 1" in capsys.readouterr().err


def test_everything_arrives_once_and_the_figures_are_those_of_the_file(
    spark: SparkSession,
    servers: Servers,
    some: list[flights.Flight],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The streams run while flights are published."""
    monkeypatch.setattr("examples.flights_pipeline.pipeline._PATIENCE", 90.0)
    few = some[:500]
    with Progress(disable=True) as progress:

        def run_all() -> Report:
            return run(spark, Setting(servers.lookupd, 3, tmp_path / token_hex(4), live=1.0), few, progress)

        report = after_slow_starts(run_all)
    assert report.arrivals == check.Arrivals(len(few), 0, 0, 0)
    assert (report.published, report.flow.late, report.differences) == (len(few), 0, 0)
    assert report.delays == len({(flight.columns["carrier"], flight.columns["time_hour"]) for flight in few})
    assert report.good
    assert report.picture.read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_redrawn_once_there_are_delays(spark: SparkSession, tmp_path: Path) -> None:
    streams = Streams(spark, Locations("", "", "", tmp_path))
    redraw(streams)
    assert list(tmp_path.iterdir()) == []
    rows = spark.sql("SELECT 'AA' carrier, 'American' airline, timestamp'2013-01-01 10:00:00' time_hour, 3L flights")
    rows = rows.selectExpr("*", "0L cancelled", "30L delay").repartition(1)
    rows.write.parquet(str(tmp_path / ARCHIVE))
    (tmp_path / ARCHIVE / "_spark_metadata").mkdir()
    file = next((tmp_path / ARCHIVE).glob("*.parquet"))
    entry = {"path": file.as_uri(), "size": file.stat().st_size, "isDir": False, "modificationTime": 0}
    entry |= {"blockReplication": 1, "blockSize": 1 << 20, "action": "add"}
    (tmp_path / ARCHIVE / "_spark_metadata" / "0").write_text(f"v1\n{json.dumps(entry)}")
    redraw(streams)
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
    assert PICTURE in (tmp_path / PAGE).read_text()
