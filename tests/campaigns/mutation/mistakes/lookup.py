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
    Mistake(
        "lag lacks messages in flight of the original NSQ",
        "lookup/node_stats.py",
        "depth + in_flight + deferred if partition",
        "depth + deferred if partition",
    ),
    Mistake(
        "lag lacks the delayed queue on disk",
        "lookup/node_stats.py",
        "else depth + on_disk",
        "else depth",
    ),
    Mistake(
        "deferred messages lack the delayed queue",
        "lookup/node_stats.py",
        "in_memory + on_disk",
        "in_memory",
    ),
    Mistake(
        "the tag of a client is empty text",
        "lookup/node_stats.py",
        'tag=_text(data["desired_tag"]) if data.get("desired_tag") else None',
        'tag=_text(data.get("desired_tag", ""))',
    ),
    Mistake(
        "requeued and timed out messages are swapped",
        "lookup/node_stats.py",
        'requeued=int(data.get("requeue_count", 0)),\n        timed_out=int(data.get("timeout_count", 0)),',
        'requeued=int(data.get("timeout_count", 0)),\n        timed_out=int(data.get("requeue_count", 0)),',
    ),
)
