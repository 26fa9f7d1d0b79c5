"""Rows of a CSV file, as the demo publishes them; by default a real day of flights."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import orjson
from attrs import frozen

from nsqext.errors import InvalidSetting

__all__ = ("CANARY", "FLIGHTS", "Columns", "Flight", "find_flights", "read_flights")

CANARY = "canary"
"""Tag of the selected rows."""

_FILE = "flights-2013-01-01.csv"
_MISSING = ("", "NA")
_NOT_IN_HEADER_NAMES = re.compile(r"[^0-9a-zA-Z_.-]")


@frozen
class Columns:
    """Mapping from columns of a file to keys, headers and tags.

    Attributes:
        keys: columns of the key; the first with a value (neither empty nor ``NA``) counts. A row without a value is
            published without a key.
        headers: columns that are published as extend headers.
        tag: column that selects the rows with the tag, or None.
        tag_value: value of the column ``tag`` in rows with the tag.
        required: columns that the user named; all others may be missing in the file.
    """

    keys: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    tag: str | None = None
    tag_value: str = ""
    required: frozenset[str] = frozenset()

    def fit(self, names: Sequence[str], path: Path) -> Columns:
        """Return the mapping without the columns that the file does not have.

        Raises:
            InvalidSetting: a required column is missing.
        """
        missing = sorted(self.required.difference(names))
        if missing:
            raise InvalidSetting(f"{path} has no column {missing[0]!r}", hint=f"its columns: {', '.join(names)}")
        return Columns(
            keys=tuple(name for name in self.keys if name in names),
            headers=tuple(name for name in self.headers if name in names),
            tag=self.tag if self.tag in names else None,
            tag_value=self.tag_value,
        )


FLIGHTS = Columns(keys=("tailnum", "flight"), headers=("carrier", "origin", "dest"), tag="carrier", tag_value="AA")
"""The key is the aircraft (the flight number if the tail number is unknown); American Airlines has the tag."""


@frozen
class Flight:
    """One row to publish.

    Attributes:
        number: 1 for the first row; published as the trace id, which identifies the row when it is received.
        body: the row as a JSON object.
        headers: extend headers.
        key: partition key, or None.
        tag: tag, or None.
    """

    number: int
    body: bytes
    headers: Mapping[str, str]
    key: str | None = None
    tag: str | None = None


def find_flights() -> Path:
    """Return the path of the flights: package data if installed, ``examples/data`` in a source checkout.

    Raises:
        InvalidSetting: neither file exists.
    """
    here = Path(__file__)
    for folder in (here.parent / "data", here.parents[3] / "examples" / "data"):
        if (folder / _FILE).is_file():
            return folder / _FILE
    raise InvalidSetting(f"{_FILE} is not part of this installation", hint="give a file of your own with --csv")


def read_flights(path: Path, columns: Columns) -> list[Flight]:
    """Read a CSV file whose first line names the columns.

    Characters that header names may not contain are replaced by underscores.

    Raises:
        InvalidSetting: the file cannot be read, is not valid CSV, has no rows, or lacks a required column.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names) or not names:
                raise InvalidSetting(f"the first line of {path} must contain the column names, each only once")
            flights = list(_flights(rows, names, columns.fit(names, path), path))
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidSetting(f"{path} is not a CSV file in UTF-8: {error}") from error
    if not flights:
        raise InvalidSetting(f"{path} has no rows")
    return flights


def _flights(rows: Iterator[list[str]], names: list[str], columns: Columns, path: Path) -> Iterator[Flight]:
    number = 0
    for cells in rows:
        if not cells:
            continue
        number += 1
        if len(cells) != len(names):
            raise InvalidSetting(f"row {number} of {path} has {len(cells)} cells, but there are {len(names)} columns")
        row = dict(zip(names, cells, strict=True))
        yield Flight(
            number=number,
            body=orjson.dumps(row),
            headers={_NOT_IN_HEADER_NAMES.sub("_", name): row[name] for name in columns.headers},
            key=next((row[name] for name in columns.keys if row[name] not in _MISSING), None),
            tag=CANARY if columns.tag is not None and row[columns.tag] == columns.tag_value else None,
        )
