"""Tables of benchmarks, and the folder in which a run of all benchmarks collects their sections and results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ("OUTPUT", "output", "section_file", "table", "write_section")

OUTPUT = "NSQEXT_BENCH_OUTPUT"
"""Name of the environment variable with the folder, which `benchmarks.run` sets."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with right-aligned figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def output(kind: str) -> Path | None:
    """Return a folder of the run: ``sections``, ``results``, ``pictures``; None if a benchmark runs alone."""
    folder = os.environ.get(OUTPUT)
    return Path(folder) / kind if folder else None


def section_file(title: str) -> str:
    """Return the name of the file of a section."""
    return f"{title.replace(':', '').replace(' ', '_')}.md"


def write_section(title: str, text: str) -> None:
    """Give a section to the run; alone, a benchmark only prints, so that all of the page is of one run."""
    if folder := output("sections"):
        (folder / section_file(title)).write_text(f"{text.strip()}\n", encoding="utf-8")
