"""Print results: text and tables at a terminal, lines of JSON elsewhere."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
import typer

from nsqext.arguments import is_number


def print_record(record: Mapping[str, Any], text: str, *, json: bool) -> None:
    """Print a result as a line of JSON, or as text with control characters escaped."""
    if not json:
        print("\n".join(map(printable, text.split("\n"))), flush=True)
        return
    line = orjson.dumps(record, default=str).decode()
    if sys.stdout.isatty() and not line.isprintable():
        line = "".join(one if one.isprintable() else _json_escape(one) for one in line)
    print(line, flush=True)


def _json_escape(character: str) -> str:
    """Return the JSON escape of a control character."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def printable(text: str) -> str:
    r"""Replace control characters and separators by escapes such as \x1b, which terminals do not interpret."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape", "replace").decode() for one in text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def make_table(columns: Sequence[str], records: Iterable[Mapping[str, Any]], title: str = "") -> Any:
    """Return a table for a terminal; numbers are right-aligned."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    rows = [[record.get(column) for column in columns] for record in records]
    table = Table(title=title or None, title_justify="left", box=SIMPLE, pad_edge=False)
    for place, column in enumerate(columns):
        number = any(is_number(row[place], -math.inf) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, (list, tuple)):
        return printable(", ".join(map(str, value)))
    return printable(str(value))


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation at a terminal; elsewhere continue without a question."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)
