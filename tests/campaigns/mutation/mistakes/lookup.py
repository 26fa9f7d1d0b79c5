"""Mistakes in the lookup client."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a leader of an equal epoch replaces the known one",
        "lookup/partition_map.py",
        "best.epoch > last.epoch",
        "best.epoch >= last.epoch",
    ),
)
