"""The flights pipeline of the examples: its parts, and all of it with the flights of a few days."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pytest
from rich.progress import Progress

from examples.flights_pipeline import check, flights
from examples.flights_pipeline.pipeline import Setting, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.spark.servers import Servers

ROWS = 5000


@pytest.fixture(scope="module")
def some() -> list[flights.Flight]:
    """The first flights of the year."""
    return flights.read_flights(ROWS)


@pytest.fixture(scope="module")
def published(some: list[flights.Flight]) -> pd.DataFrame:
    """The same as a table."""
    return check.read_table({flight.number for flight in some})


def test_flights_come_in_the_order_of_their_schedule(some: list[flights.Flight]) -> None:
    times = [str(flight.columns["time_hour"]) for flight in some]
    assert times == sorted(times)
    assert (times[0], len(some)) == ("2013-01-01T10:00:00Z", ROWS)


def test_a_flight_whose_aircraft_is_not_known_goes_by_its_number() -> None:
    flight = flights.Flight(1, {"tailnum": None, "carrier": "AA", "flight": 791})
    assert flight.key == "AA791"


def test_what_arrived_is_compared_row_by_row(published: pd.DataFrame) -> None:
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


def test_hours_are_those_of_new_york(published: pd.DataFrame) -> None:
    day = check.by_airline_and_hour(check.expected_delays(published)).set_index(["airline", "hour"])
    counts = published.groupby(["airline", "hour"]).size()
    assert day["flights"].to_dict() == counts.to_dict()


def test_everything_arrives_once_and_the_figures_are_those_of_the_file(
    spark: SparkSession, servers: Servers, some: list[flights.Flight], tmp_path: Path
) -> None:
    with Progress(disable=True) as progress:
        report = run(spark, Setting(servers.lookupd, 3, tmp_path), some, progress)
    assert report.arrivals == check.Arrivals(ROWS, 0, 0, 0)
    assert (report.published, report.flow.late, report.differences) == (ROWS, 0, 0)
    assert report.delays == len({(flight.columns["carrier"], flight.columns["time_hour"]) for flight in some})
    assert report.good
    assert report.picture.read_bytes().startswith(b"\x89PNG")
