"""Mistakes in administration."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a channel counts as missing although a node did not answer",
        "admin/channels.py",
        "return not stats.unreachable and channel not in stats.channels",
        "return channel not in stats.channels",
    ),
    Mistake(
        "a channel that lookup lists counts as missing",
        "admin/channels.py",
        "        if channel in channels:\n            return False\n",
        "",
    ),
    Mistake(
        "a deleted channel stays in lookup",
        "admin/channels.py",
        "if where.meta.disable_channel_auto_create or where.nodes:\n"
        '            await requests.change_lookup("/channel/delete"',
        'if where.meta.disable_channel_auto_create:\n            await requests.change_lookup("/channel/delete"',
    ),
    Mistake(
        "lag lacks messages in flight of the original NSQ",
        "admin/stats.py",
        "depth + in_flight + deferred if partition",
        "depth + deferred if partition",
    ),
    Mistake(
        "lag lacks the delayed queue on disk",
        "admin/stats.py",
        "else depth + on_disk",
        "else depth",
    ),
    Mistake(
        "deferred messages lack the delayed queue",
        "admin/stats.py",
        'int(data.get("deferred_count", 0)) + on_disk',
        'int(data.get("deferred_count", 0))',
    ),
    Mistake(
        "the tag of a client is empty text",
        "admin/stats.py",
        'tag=_text(data["desired_tag"]) if data.get("desired_tag") else None',
        'tag=_text(data.get("desired_tag", ""))',
    ),
    Mistake(
        "requeued and timed out messages are swapped",
        "admin/stats.py",
        'requeued=int(data.get("requeue_count", 0)),\n        timed_out=int(data.get("timeout_count", 0)),',
        'requeued=int(data.get("timeout_count", 0)),\n        timed_out=int(data.get("requeue_count", 0)),',
    ),
    Mistake(
        "partitions are sorted by node",
        "admin/stats.py",
        "key=lambda one: (one.partition is None, one.partition or 0, one.node)",
        "key=lambda one: one.node",
    ),
    Mistake(
        "deliver_delayed refuses 0 hours",
        "admin/channels.py",
        '"within_hours", within_hours, 0, _MAX_HOURS, InvalidInput)',
        '"within_hours", within_hours, 1, _MAX_HOURS, InvalidInput)',
    ),
)
