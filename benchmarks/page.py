"""The page of benchmarks, which is of one run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import define

from benchmarks.report import table

__all__ = ("PAGE", "Outcome", "Run", "install", "page")

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs" / "reference" / "benchmarks.md"
_PICTURES = _ROOT / "docs" / "pictures"
_RESULTS = _ROOT / "benchmarks" / "results"

_HEAD = """# Benchmarks

`make bench` measures this page in one run; all figures are of this run. Each is the median of its rounds; the variants
of a table take turns within a round, so that other load on the machine affects all of them. Compare ratios, because
machines differ. On an idle machine, a client that waits for every response also pays for waking a sleeping core, and
ratios of CPU time are closer to one. Rows, peers and servers that are missing were not given or not installed.
"""


@define
class Outcome:
    """What came of a section.

    Attributes:
        title: its heading.
        text: the section; empty if it is drawn later or has failed.
        rounds: its rounds; 0 if it has none.
        seconds: how long it took.
        load: load average of a minute before it.
        failure: why there is no section; empty otherwise.
    """

    title: str
    text: str
    rounds: int
    seconds: float
    load: float
    failure: str = ""


@define
class Run:
    """What is the same for all sections.

    Attributes:
        commit: of this tree.
        changed: whether files differ from the commit.
        began: date and time of the start.
        ended: of the end; empty before.
        machine: its description.
        versions: by name.
        quick: whether the run only tests the benchmarks.
    """

    commit: str
    changed: bool
    began: str
    machine: str
    versions: Mapping[str, str]
    quick: bool = False
    ended: str = ""


def page(run: Run, outcomes: Sequence[Outcome], waiting: Sequence[str] = ()) -> str:
    """Return the page: its head, the sections, and how each was measured.

    Args:
        run: what the head says.
        outcomes: sections that were measured.
        waiting: titles of those that were not.
    """
    commit = f"`{run.commit}`" + (" with changes that are not committed" if run.changed else "")
    facts = [
        ["commit", commit],
        ["measured", f"{run.began} to {run.ended or '(unfinished)'}"],
        ["machine", run.machine],
    ]
    facts += [[name, number] for name, number in run.versions.items()]
    head = _HEAD + ("\n**A trial of the benchmarks with few messages: no figure counts.**\n" if run.quick else "")
    parts = [f"{head}\n{table(('', ''), facts).replace('---:', '---')}"]
    parts += [f"## {one.title}\n\n{one.text}" for one in outcomes if one.text]
    parts += [f"## {one.title}\n\nFailed: {one.failure}\n" for one in outcomes if one.failure]
    parts += [f"## {title}\n\nNot measured.\n" for title in waiting]
    rows = [
        [one.title, str(one.rounds or ""), f"{one.seconds:.0f}", f"{one.load:.1f}", "failed" if one.failure else ""]
        for one in outcomes
    ]
    how = table(("section", "rounds", "seconds", "load average before", ""), rows)
    parts.append(f"## How each section was measured\n\n{how}")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def install(folder: Path) -> None:
    """Put the page, the results and the pictures of a run in the place of those of an earlier one."""
    for target, source, pattern in (
        (_RESULTS, folder / "results", "*.json"),
        (_PICTURES, folder / "pictures", "bench-*.svg"),
        (_PICTURES, folder / "pictures", "speed.svg"),
    ):
        for old in target.glob(pattern):
            old.unlink()
        for new in source.glob(pattern):
            shutil.copy(new, target / new.name)
    written = PAGE.with_suffix(".new")
    shutil.copy(folder / "page.md", written)
    written.replace(PAGE)
