"""A curve, its measurement, and the file with its numbers."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any

from attrs import asdict, define, field

from benchmarks.report import output

__all__ = ("RESULTS", "Curve", "Measure", "Measured", "load", "measure")

RESULTS = Path(__file__).parents[1] / "results"
"""Numbers of the run that the page shows."""

Measure = Callable[[], float]
Points = Mapping[tuple[str, float], Measure]
"""Functions that measure the points of each series; the points alternate in each round."""


@define
class Curve:
    """A curve.

    Attributes:
        name: name of its file.
        title: heading in the documentation.
        x: independent quantity with its unit.
        y: measured quantity with its unit.
        limit: explanation of the limit: one or two sentences.
        points: starts servers for the points, and returns the points.
        digits: decimals in the table.
        note: method of the measurement.
    """

    name: str
    title: str
    x: str
    y: str
    limit: str
    points: Callable[[], AbstractContextManager[Points]]
    digits: int = 2
    note: str = ""
    any_nsqd: bool = False
    """Whether NSQEXT_BENCH_NSQD may name another nsqd program to measure against."""


@define
class Measured:
    """The numbers of a curve: medians of the rounds.

    Attributes:
        series: for each series, pairs of x and y.
        rounds: number of measurements of each point.
        when: date.
        machine: Python and cores.
    """

    name: str
    title: str
    x: str
    y: str
    limit: str
    note: str
    digits: int
    series: dict[str, list[tuple[float, float]]] = field(factory=dict)
    rounds: int = 0
    when: str = ""
    machine: str = ""


def measure(curve: Curve, rounds: int) -> Measured:
    """Measure a curve, and write its file in a run of all benchmarks."""
    found: dict[tuple[str, float], list[float]] = {}
    with curve.points() as points:
        for _ in range(rounds):
            for key, run in points.items():
                found.setdefault(key, []).append(run())
    server = "another nsqd" if os.environ.get("NSQEXT_BENCH_NSQD") else "`nsqext nsqd`"
    note = f"{curve.note} Server: {server}." if curve.any_nsqd else curve.note
    measured = Measured(curve.name, curve.title, curve.x, curve.y, curve.limit, note, curve.digits)
    for (series, x), values in found.items():
        measured.series.setdefault(series, []).append((x, round(median(values), 4)))
    measured.rounds = rounds
    measured.when = time.strftime("%Y-%m-%d", time.gmtime())
    measured.machine = f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores"
    if folder := output("results"):
        (folder / f"{curve.name}.json").write_text(json.dumps(asdict(measured), indent=1) + "\n", encoding="utf-8")
    return measured


def load(file: Path) -> Measured:
    """Return the numbers of a curve."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    found["series"] = {series: [(x, y) for x, y in points] for series, points in found["series"].items()}
    return Measured(**found)
