"""Mutants that change nothing that a caller could observe, each with the reason; they are not put in.

``equivalent.txt`` lists them: ``@ MODULE``, ``# REASON``, and lines ``OPERATOR: CODE``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.campaigns.mutation.operators import Mutant

__all__ = ("EQUIVALENT", "reason_of")


def _listed(text: str) -> dict[tuple[str, str, str], str]:
    found: dict[tuple[str, str, str], str] = {}
    module = reason = ""
    for line in text.splitlines():
        if line.startswith("@ "):
            module = line[2:]
        elif line.startswith("# "):
            reason = line[2:]
        else:
            operator, _, code = line.partition(": ")
            found[module, operator, code] = reason
    return found


EQUIVALENT: dict[tuple[str, str, str], str] = _listed(Path(__file__).with_suffix(".txt").read_text("utf-8"))
"""Module, operator and line of code -> why nothing differs."""


def reason_of(mutant: Mutant) -> str | None:
    """Return why a mutant has no effect, or None."""
    return EQUIVALENT.get((mutant.module, mutant.operator, mutant.text))
