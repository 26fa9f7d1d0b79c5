"""Mutants that change nothing that a caller could observe, each with the reason; they are not put in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.mutation.operators import Mutant

__all__ = ("EQUIVALENT", "reason_of")

EQUIVALENT: dict[tuple[str, str], str] = {}
"""Module and mutant (operator and code, as it is printed after the line) -> why nothing differs."""


def reason_of(mutant: Mutant) -> str | None:
    """Return why a mutant has no effect, or None."""
    return EQUIVALENT.get((mutant.module, f"{mutant.operator}: {mutant.before}"))
