"""The benchmarks of the documentation: pictures and page show the committed numbers, and the simulation of many nodes
runs."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from benchmarks.bench_check import BASELINE, TOLERANCE, beside_others
from benchmarks.curves.__main__ import CURVES
from benchmarks.curves.curve import RESULTS
from benchmarks.page import PAGE, Outcome, Run, page
from benchmarks.paths import ROWS
from benchmarks.scale import simulate
from benchmarks.sections import SECTIONS, Section, fitting
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


def test_every_path_is_in_its_section() -> None:
    costs = {(name, client): 1.0 for name in ROWS for client in ("nsqext", "raw")}
    text = beside_others(costs)
    assert [name for name in ROWS if f"\n| {name} |" not in f"\n{text}"] == []


def test_the_page_shows_nothing_but_its_run() -> None:
    run = Run("abc", True, "2026-11-29 19:00 UTC", "2 cores", {"nsqd": "1.3.0"}, ended="2026-11-29 19:50 UTC")
    measured = Outcome("Client", "| a | 1 |", 3, 40.0, 0.2)
    failed = Outcome("Broker", "", 5, 12.0, 1.5, "exit status 1: it does not start")
    text = page(run, [measured, failed], ["Scale"])
    assert "`abc` with changes that are not committed" in text
    assert "2026-11-29 19:00 UTC to 2026-11-29 19:50 UTC" in text
    assert "| nsqd | 1.3.0 |" in text
    assert "## Client\n\n| a | 1 |\n" in text
    assert "## Broker\n\nFailed: exit status 1: it does not start\n" in text
    assert "## Scale\n\nNot measured.\n" in text
    assert "| Client | 3 | 40 | 0.2 |  |" in text


def test_a_run_has_as_many_rounds_as_fit_into_its_time() -> None:
    sections = [Section("one", "one", 10, 5, rounds=5), Section("two", "two", 10, 5, rounds=2)]
    assert fitting(sections, 0) == 1
    assert fitting(sections, 40) == 2
    assert fitting(sections, 45) == 3
    assert fitting(sections, 1000) == 5


def test_each_section_is_a_program() -> None:
    programs = {file.stem for file in (ROOT / "benchmarks").glob("*.py")} | {"curves"}
    assert [section.title for section in SECTIONS if section.module not in programs] == []
    assert len({section.title for section in SECTIONS}) == len(SECTIONS)
    named = {name for section in SECTIONS if section.module == "curves" for name in section.words}
    assert named == set(CURVES)


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
