"""What the demo publishes: the rows of a CSV file, a real day of flights unless another file is given."""

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
"""The tag."""

_FILE = "flights-2013-01-01.csv"
_MISSING = ("", "NA")
_NO_HEADER_NAME = re.compile(r"[^0-9a-zA-Z_.-]")


@frozen
class Columns:
    """What becomes of the columns of a file.

    Attributes:
        keys: the first of them that has a value in a row (neither empty nor ``NA``) gives the key of the row; a row
            without any is published without key.
        headers: they become extend headers.
        tag: rows which have ``tag_value`` in this column carry the tag; None for no tags.
        tag_value: see there.
        required: columns that the user asked for by name; the others are left out where the file does not have them.
    """

    keys: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    tag: str | None = None
    tag_value: str = ""
    required: frozenset[str] = frozenset()

    def fit(self, names: Sequence[str], path: Path) -> Columns:
        """Return the columns that a file has.

        Raises:
            InvalidSetting: one that was asked for is not there.
        """
        missing = sorted(self.required.difference(names))
        if missing:
            raise InvalidSetting(f"{path} has no column {missing[0]!r}", hint=f"it has {', '.join(names)}")
        return Columns(
            keys=tuple(name for name in self.keys if name in names),
            headers=tuple(name for name in self.headers if name in names),
            tag=self.tag if self.tag in names else None,
            tag_value=self.tag_value,
        )


FLIGHTS = Columns(keys=("tailnum", "flight"), headers=("carrier", "origin", "dest"), tag="carrier", tag_value="AA")
"""Key is the aircraft (the flight number where its tail number is not known), canary is American Airlines."""


@frozen
class Flight:
    """One row, as it is published.

    Attributes:
        number: 1 for the first row; also the trace id, by which the row is known again.
        body: the row as a JSON object.
        headers: extend headers.
        key: what decides the partition; None where the row has none.
        tag: the tag, or None.
    """

    number: int
    body: bytes
    headers: Mapping[str, str]
    key: str | None = None
    tag: str | None = None


def find_flights() -> Path:
    """Return the file of the flights: package data of an installed package, examples/data of a source checkout.

    Raises:
        InvalidSetting: it is in neither place.
    """
    here = Path(__file__)
    for folder in (here.parent / "data", here.parents[3] / "examples" / "data"):
        if (folder / _FILE).is_file():
            return folder / _FILE
    raise InvalidSetting(f"{_FILE} is not part of this installation", hint="give a file of your own with --csv")


def read_flights(path: Path, columns: Columns) -> list[Flight]:
    """Read a CSV file whose first line names the columns.

    Characters of a column's name that no header name may have become underscores.

    Raises:
        InvalidSetting: the file cannot be read, is no table of a line of names and one row at least, or lacks a column.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names) or not names:
                raise InvalidSetting(f"the first line of {path} does not name the columns, each by a name of its own")
            flights = list(_flights(rows, names, columns.fit(names, path), path))
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidSetting(f"{path} is no CSV file in UTF-8: {error}") from error
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
            raise InvalidSetting(f"row {number} of {path} has {len(cells)} cells, the first line names {len(names)}")
        row = dict(zip(names, cells, strict=True))
        yield Flight(
            number=number,
            body=orjson.dumps(row),
            headers={_NO_HEADER_NAME.sub("_", name): row[name] for name in columns.headers},
            key=next((row[name] for name in columns.keys if row[name] not in _MISSING), None),
            tag=CANARY if columns.tag is not None and row[columns.tag] == columns.tag_value else None,
        )
