"""Mistakes in the producer."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "on_unknown=raise holds for the first attempt only",
        "client/producer/sender.py",
        'self._options.on_unknown != "retry" and',
        'self._options.on_unknown != "retry" and self.count == 1 and',
    ),
)
