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
