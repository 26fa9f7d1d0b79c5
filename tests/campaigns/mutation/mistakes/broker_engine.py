"""Mistakes in the engine of the broker."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "with fsync=interval, full files are not synced",
        "broker/engine/storage/segments.py",
        'if self._out is not None and self._options.fsync != "never":',
        'if self._out is not None and self._options.fsync == "always":',
    ),
)
