"""The part of a page that a program writes, between two marks."""

from __future__ import annotations

from pathlib import Path

__all__ = ("with_section",)


def with_section(page: Path, text: str, name: str = "table") -> str:
    """Return the page with the text between its marks ``begin`` and ``end``."""
    begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->\n"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
