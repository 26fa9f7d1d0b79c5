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
    Mistake(
        "set_channel sends the order as Python's text",
        "admin/channels.py",
        '"true" if ordered else "false"})',
        "str(ordered)})",
    ),
    Mistake(
        "set_channel forgets the rate if the order is given",
        "admin/channels.py",
        "        if rate_limit_kib is not None:\n",
        "        elif rate_limit_kib is not None:\n",
    ),
    Mistake(
        "limit_consumers limits all consumers",
        "admin/channels.py",
        '"client_prefix": address_prefix}',
        '"client_prefix": ""}',
    ),
    Mistake(
        "a message of another partition is finished",
        "admin/channels.py",
        "partition = number >> COUNTER_BITS",
        "partition = 0",
    ),
    Mistake(
        "empty_delayed leaves the delayed messages in memory",
        "admin/channels.py",
        'for action in ("finishmemdelayed", "emptydelayed"):',
        'for action in ("emptydelayed",):',
    ),
    Mistake(
        "delete_channel without missing_ok is silent",
        "admin/channels.py",
        "            if missing_ok:\n",
        "            if not missing_ok:\n",
    ),
    Mistake(
        "seek moves all partitions",
        "admin/channels.py",
        "move, partitions=partitions, operation",
        "move, partitions=None, operation",
    ),
    Mistake(
        "a channel that is registered already is an error",
        "admin/channels.py",
        'if "already registered" not in error.message:',
        'if "registered already" not in error.message:',
    ),
    Mistake(
        "a channel counts as paused if one partition is",
        "admin/stats.py",
        "paused=all(part.paused",
        "paused=any(part.paused",
    ),
    Mistake(
        "depth and lag are swapped",
        "admin/stats.py",
        '("depth", "in_flight", "deferred", "messages", "requeued", "timed_out", "lag")',
        '("depth", "in_flight", "deferred", "messages", "requeued", "timed_out")',
    ),
    Mistake(
        "nodes that did not answer are forgotten",
        "admin/stats.py",
        "generation_of(where), partitions, failed)",
        "generation_of(where), partitions)",
    ),
    Mistake(
        "the statistics of one channel are those of all",
        "admin/stats.py",
        "[_only(part, channel) for parts",
        "[_only(part, None) for parts",
    ),
    Mistake(
        "the leader is not the first replica",
        "admin/stats.py",
        "key=lambda address: (address != str(leader), address)",
        "key=lambda address: address",
    ),
    Mistake(
        "a node that does not respond counts as reachable",
        "admin/stats.py",
        "answered.get(info.tcp, False)",
        "answered.get(info.tcp, True)",
    ),
    Mistake(
        "a change is sent again to the nodes that have made it",
        "admin/requests.py",
        "                    done.add(number)\n",
        "",
    ),
    Mistake(
        "a change goes to every lookup node of the redesigned NSQ",
        "admin/requests.py",
        "for node in leaders or nodes:",
        "for node in nodes:",
    ),
    Mistake(
        "one failed lookup node fails a change",
        "admin/requests.py",
        "if len(errors) == len(nodes):",
        "if errors:",
    ),
    Mistake(
        "a deleted channel that a partition lacks is an error",
        "admin/requests.py",
        "if missing is not None and not changed:",
        "if missing is not None:",
    ),
    Mistake(
        "a channel that no partition has is emptied",
        "admin/requests.py",
        "if missing is not None and not changed:",
        "if missing is not None and changed:",
    ),
    Mistake(
        "peek returns the oldest first",
        "admin/admin.py",
        "(one.timestamp, one.offset), reverse=True)",
        "(one.timestamp, one.offset))",
    ),
    Mistake(
        "peek shows reserved headers",
        "admin/admin.py",
        "for name, value in headers.items() if not name.startswith(RESERVED_PREFIX)",
        "for name, value in headers.items()",
    ),
    Mistake(
        "set_topic does not wait for the number of replicas",
        "admin/topics.py",
        "shown = (meta.replica, meta.disable_channel_auto_create)",
        "shown = wanted",
    ),
    Mistake(
        "expand_topic leaves new partitions without channels",
        "admin/topics.py",
        "await self._complete(topic, EXPAND, params, channels)",
        "await self._complete(topic, EXPAND, params, ())",
    ),
    Mistake(
        "a topic is deleted at lookup only",
        "admin/topics.py",
        '            await requests.post(http_of(where, node), "/topic/delete", {"topic": topic})\n',
        "            pass\n",
    ),
    Mistake(
        "a leader moves although only its replica should",
        "admin/nodes.py",
        '"true" if leads else "false"',
        '"true"',
    ),
    Mistake(
        "an option of the first node is read",
        "admin/nodes.py",
        "if node == str(info.tcp):",
        "if info.tcp:",
    ),
)
