"""Compares the results with the CSV file: pandas computes the same figures without NSQ and Spark."""

from __future__ import annotations

from collections.abc import Set

import pandas as pd
from attrs import frozen

from examples.flights_pipeline.flights import airlines_file, flights_file

__all__ = ("Arrivals", "by_airline_and_hour", "check_arrivals", "count_differences", "expected_delays", "read_table")

_NUMBERS = "Int64"
_TIME = "datetime64[us]"


@frozen
class Arrivals:
    """Comparison of received rows with published ones.

    Attributes:
        rows: number of received rows.
        lost: published, but not received.
        duplicated: received more than once.
        altered: received with other contents.
    """

    rows: int
    lost: int
    duplicated: int
    altered: int


def read_table(numbers: Set[int]) -> pd.DataFrame:
    """Read flights from the CSV file, by their numbers (1 for the first), with the airlines' names."""
    flights = pd.read_csv(flights_file())
    flights.insert(0, "number", range(1, len(flights) + 1))
    airlines = pd.read_csv(airlines_file()).rename(columns={"name": "airline"})
    return _typed(flights[flights["number"].isin(numbers)].merge(airlines, on="carrier", how="left"))


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """Give the columns of a table one type, for each source: numbers that may be missing, times in UTC, text."""
    types = {name: _NUMBERS for name in table if pd.api.types.is_numeric_dtype(table[name])}
    table = table.astype(types)
    times = pd.to_datetime(table["time_hour"], utc=True).dt.tz_localize(None).astype(_TIME)
    return table.assign(time_hour=times)


def check_arrivals(arrived: pd.DataFrame, published: pd.DataFrame) -> Arrivals:
    """Compare received rows with published ones, by number, then column by column."""
    columns = list(published)
    once = arrived.drop_duplicates("number")
    both = published.merge(_typed(once[columns]), on="number", suffixes=("", "_arrived"))
    differs = pd.Series(data=False, index=both.index)
    for name in columns[1:]:
        one, other = both[name], both[f"{name}_arrived"]
        differs |= ~((one == other).fillna(value=False) | (one.isna() & other.isna()))
    known = once["number"].isin(published["number"])
    return Arrivals(
        rows=len(arrived),
        lost=len(published) - int(known.sum()),
        duplicated=len(arrived) - len(once),
        altered=int(differs.sum()) + int((~known).sum()),
    )


def expected_delays(published: pd.DataFrame) -> pd.DataFrame:
    """Add up flights, cancelled flights and minutes of delay by airline and scheduled hour."""
    hours = published.assign(cancelled=published["dep_time"].isna()).groupby(["carrier", "airline", "time_hour"])
    sums = hours.agg(flights=("number", "size"), cancelled=("cancelled", "sum"), delay=("dep_delay", "sum"))
    return sums.reset_index()


def count_differences(delays: pd.DataFrame, expected: pd.DataFrame) -> int:
    """Return how many figures differ between two tables of delays, missing and surplus ones included."""
    keys = ["carrier", "airline", "time_hour"]
    both = expected.merge(_typed(delays), on=keys, how="outer", suffixes=("", "_found"), indicator=True)
    equal = both["_merge"] == "both"
    for name in ("flights", "cancelled", "delay"):
        equal &= (both[name] == both[f"{name}_found"]).fillna(value=False).astype(bool)
    return int((~equal).sum())


def by_airline_and_hour(delays: pd.DataFrame) -> pd.DataFrame:
    """Add up a table of delays once more: by airline and by hour of the day in New York, with the mean delay."""
    local = delays["time_hour"].dt.tz_localize("UTC").dt.tz_convert("America/New_York").dt.hour
    day = (
        delays.assign(hour=local).groupby(["airline", "hour"], as_index=False)[["flights", "cancelled", "delay"]].sum()
    )
    departed = day["flights"] - day["cancelled"]
    return day.assign(departed=departed, mean=(day["delay"] / departed.where(departed > 0)).astype("Float64"))
