"""The page of Spark's options and columns lists exactly the existing ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

import attrs
import pytest

from tests.support.programs import ROOT

pytest.importorskip("pyspark", exc_type=ImportError)

from nsqext.spark import options, schema
from nsqext.spark.option_values import ALL_COLUMNS

_PAGE = (ROOT / "docs" / "reference" / "spark.md").read_text(encoding="utf-8")
_SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", _PAGE, re.MULTILINE | re.DOTALL))


def rows(section: str) -> dict[str, list[str]]:
    """Return the rows of a section's table by their first cell."""
    lines = re.findall(r"^\| `(\S+)` \|(.*)\|$", _SECTIONS[section], re.MULTILINE)
    return {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in lines}


def names(found: Iterable[options._Option]) -> set[str]:
    """Return the options' names."""
    return {option.name for option in found}


def test_options_to_read() -> None:
    page = rows("Options to read")
    assert page.keys() == names(options._SOURCE)
    assert {name for name, cells in page.items() if cells[0] == "no"} == set(options._STREAM_ONLY)
    assert {name for name, cells in page.items() if cells[1] == "no"} == set(options._BATCH_ONLY)


def test_options_to_write() -> None:
    assert rows("Options to write").keys() == names(options._SINK)


def test_defaults() -> None:
    given = {**rows("Options to read"), **rows("Options to write")}
    shown = {name: cells[-2].strip("`") for name, cells in given.items()}
    found = {**_defaults(options.SourceOptions, options._SOURCE), **_defaults(options.SinkOptions, options._SINK)}
    assert {name: shown[name] for name in found} == found


def _defaults(kind: type[attrs.AttrsInstance], known: Iterable[options._Option]) -> dict[str, str]:
    """Return the defaults of options that have one, as they are written."""
    defaults = {member.name: member.default for member in attrs.fields(kind)}
    found = {option.name: defaults.get(option.member, attrs.NOTHING) for option in known}
    plain = {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str))}
    return {
        name: f"{round(value * 1000)}" if isinstance(value, float) else str(value).lower()
        for name, value in plain.items()
    }


def test_options_that_a_mode_ignores_are_listed() -> None:
    sentence = re.search(r"`readMode=channel` cannot be combined with (.*?)\.", _SECTIONS["Options to read"], re.DOTALL)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(options._OFFSET_ONLY)


def test_columns_that_are_read() -> None:
    kinds = {name: cells[0] for name, cells in rows("Columns that are read").items()}
    assert kinds == {found.name: found.dataType.simpleString() for found in schema.read_schema(ALL_COLUMNS)}


def test_columns_that_are_written() -> None:
    kinds = {name: cells[0] for name, cells in rows("Columns that are written").items()}
    assert kinds == {
        name: wanted.replace("map<string, string>", "map<string,string>")
        for name, (_, wanted) in schema._WRITABLE.items()
    }
