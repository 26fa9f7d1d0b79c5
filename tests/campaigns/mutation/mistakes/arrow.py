"""Mistakes in Arrow."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "times are cut to seconds",
        "arrow.py",
        "str(int(value.timestamp() * 1000))",
        "str(int(value.timestamp()) * 1000)",
    ),
    Mistake(
        "a time without a zone is local",
        "arrow.py",
        "        if value.tzinfo is None:\n",
        "        if False:\n",
    ),
    Mistake(
        "the read timeout is in seconds",
        "arrow.py",
        "round(value * 1000)",
        "round(value)",
    ),
    Mistake(
        "consume ends before all messages of the start",
        "arrow.py",
        "            number += len(messages)\n",
        "",
    ),
    Mistake(
        "a reader is not closed",
        "arrow.py",
        "    finally:\n        reader.close()\n\n\ndef write",
        "    finally:\n        pass\n\n\ndef write",
    ),
    Mistake(
        "until_empty follows new messages",
        "arrow.py",
        "            reader.freeze()\n",
        "            pass\n",
    ),
    Mistake(
        "max_messages has no effect",
        "arrow.py",
        'given["max_offsets_per_trigger"] = given.pop("max_messages")',
        'given.pop("max_messages")',
    ),
)
