"""Write results of benchmarks into the documentation."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ("table", "write_section")

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks.md"
_HEAD = """# Benchmarks

`make bench` measures and writes this page. Each figure is the median of its rounds; the variants of a table alternate
within a round, so that other load on the machine affects all of them. Compare ratios, because the machines are shared.
On an idle machine, a client that waits for every response also pays for waking a sleeping core, and ratios of CPU time
are closer to one.
"""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with right-aligned figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_section(title: str, text: str) -> None:
    """Write a section to the page; replace the one with the same title."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else _HEAD
    head, *sections = page.split("\n## ")
    machine = f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores"
    measured = f"Measured {time.strftime('%Y-%m-%d', time.gmtime())} on {machine}.\n"
    kept = [section for section in sections if not section.startswith(f"{title}\n")]
    kept.append(f"{title}\n\n{text.strip()}\n\n{measured}")
    kept.sort()
    parts = [part.rstrip() + "\n" for part in (head, *kept)]
    PAGE.write_text("\n## ".join(parts), encoding="utf-8")
