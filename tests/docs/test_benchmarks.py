"""The benchmarks of the documentation: pictures and page show the committed numbers, and the simulation of many nodes
runs."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from benchmarks.bench_check import BASELINE, TOLERANCE
from benchmarks.curves.curve import RESULTS
from benchmarks.paths import ROWS
from benchmarks.report import PAGE
from benchmarks.scale import simulate
from tests.support.programs import ROOT
from tests.support.tables import table

if TYPE_CHECKING:
    import pytest

_CURVES = sorted(path.stem for path in RESULTS.glob("*.json") if path.stem != "client")


@table("name", _CURVES)
def test_a_curve_is_on_the_page(name: str) -> None:
    """``python -m docs.pictures.draw_benchmarks`` writes page and picture."""
    measured = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    page = PAGE.read_text(encoding="utf-8")
    assert f"### {measured['title']}\n" in page
    assert measured["limit"] in page
    if name != "start":
        picture = f"bench-{name.replace('_', '-')}.svg"
        assert f"../pictures/{picture}" in page
        assert (ROOT / "docs" / "pictures" / picture).is_file()


def test_the_baseline_names_every_ratio() -> None:
    assert list(json.loads(BASELINE.read_text(encoding="utf-8"))) == list(ROWS)
    assert {row.group for row in ROWS.values()} == set(TOLERANCE)


def test_every_path_is_on_the_page() -> None:
    """``python -m benchmarks.bench_check --page`` writes it."""
    page = PAGE.read_text(encoding="utf-8").partition("\n## Every path\n")[2]
    assert [name for name in ROWS if f"\n| {name} |" not in page] == []


def test_lost_nodes_cause_a_bounded_number_of_lookups(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    topics, processes, lookups = 40, 2, 2
    scale = simulate(5, topics, 2, processes, lookups, idle=61.0)
    phases = {phase.name: phase for phase in scale.phases}
    assert phases["start"].connects == topics * 2
    idle = phases["idle for 61 s"]
    assert 0 < idle.requests <= 3 * lookups * topics * (processes + 1)
    for name in ("one node lost", "2 nodes lost"):
        lost = phases[name]
        assert lost.peak <= processes * lookups * 2 * 33  # refreshes of 32 topics at once and 32 a second
        assert lost.publish is not None
        assert lost.consume is not None
        assert max(lost.publish, lost.consume) < 30
