"""Mistakes in the consumer."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a dead letter with an unknown outcome counts as stored",
        "client/consumer/handlers/failure_policy.py",
        "                await self._dead_letters(message, error)\n",
        "                try:\n                    await self._dead_letters(message, error)\n"
        "                except Exception as failure:\n"
        '                    if not getattr(failure, "maybe_stored", False):\n                        raise\n',
    ),
)
