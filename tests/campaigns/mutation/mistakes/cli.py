"""Mistakes in the command line."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "check counts connections as consumers",
        "cli/admin/doctor.py",
        "len({(client.client_id, client.hostname) for client in stats.clients})",
        "len(stats.clients)",
    ),
    Mistake(
        "check accepts one consumer less",
        "cli/admin/doctor.py",
        "if consumers < min_consumers:",
        "if consumers < min_consumers - 1:",
    ),
    Mistake(
        "check of lag is off by one",
        "cli/admin/doctor.py",
        "stats.lag > max_lag",
        "stats.lag >= max_lag",
    ),
    Mistake(
        "a record's headers win over the options of pub",
        "cli/messages/pub.py",
        '{**(message.headers or {}), **given.get("headers", {})}',
        '{**given.get("headers", {}), **(message.headers or {})}',
    ),
    Mistake(
        "options of pub replace the headers of a record",
        "cli/messages/pub.py",
        '{**(message.headers or {}), **given.get("headers", {})}',
        'given.get("headers", {})',
    ),
    Mistake(
        "check without a healthy state exits with 0",
        "cli/admin/doctor.py",
        "    if problems:\n        raise SystemExit(1)\n\n\nasync def _check_nodes",
        "    if len(problems) > 1:\n        raise SystemExit(1)\n\n\nasync def _check_nodes",
    ),
    Mistake(
        "check ignores nodes that do not respond",
        "cli/admin/doctor.py",
        'return problems + [f"node {node} does not respond" for node in stats.unreachable]',
        "return problems",
    ),
    Mistake(
        "check ignores partitions without leader",
        "cli/admin/doctor.py",
        "for number in expected if number not in info.leaders]",
        "for number in expected if number in ()]",
    ),
    Mistake(
        "a channel is drained although a node did not answer",
        "cli/connection.py",
        "found.lag == 0 and not stats.unreachable",
        "found.lag == 0",
    ),
    Mistake(
        "an unknown lag is no problem",
        "cli/admin/lag.py",
        'elif record.get("unreachable"):',
        'elif record.get("missing"):',
    ),
    Mistake(
        "lag at the limit is a problem",
        "cli/admin/lag.py",
        'if record["lag"] > highest:',
        'if record["lag"] >= highest:',
    ),
    Mistake(
        "the shortest lag is first",
        "cli/admin/lag.py",
        '(-record["lag"]',
        '(record["lag"]',
    ),
    Mistake(
        "an unknown lag is below --max",
        "cli/admin/lag.py",
        'elif record.get("unreachable"):',
        'elif record.get("unreachable_nodes"):',
    ),
    Mistake(
        "a channel without statistics is not listed",
        "cli/admin/channel.py",
        "for name in names if name not in stats.channels]",
        "for name in names if name in stats.channels]",
    ),
    Mistake(
        "delete of a missing channel succeeds",
        "cli/admin/channel.py",
        "missing_ok=if_exists)",
        "missing_ok=True)",
    ),
    Mistake(
        "limit-consumers limits all",
        "cli/admin/channel.py",
        "ready, address_prefix=address_prefix)",
        "ready)",
    ),
    Mistake(
        "an empty column is a key",
        "cli/messages/pub.py",
        "(row[self.key_column] or None) if",
        "row[self.key_column] if",
    ),
    Mistake(
        "an empty column is a header",
        "cli/messages/pub.py",
        "for name in self.header_column or () if row[name]}",
        "for name in self.header_column or ()}",
    ),
    Mistake(
        "spaces at the end of a line are lost",
        "cli/messages/pub.py",
        'line.rstrip(b"\\r\\n")',
        "line.rstrip()",
    ),
    Mistake(
        "pub loses the delay",
        "cli/messages/pub.py",
        ', "delay": properties.delay}',
        "}",
    ),
    Mistake(
        "pub loses the partition",
        "cli/messages/pub.py",
        '{**given, "partition": properties.partition, ',
        "{**given, ",
    ),
    Mistake(
        "pub counts failed messages as published",
        "cli/messages/pub.py",
        '"published": count - failed',
        '"published": count',
    ),
    Mistake(
        "--until includes its time",
        "cli/messages/tail.py",
        'record["timestamp"] < self.before',
        'record["timestamp"] <= self.before',
    ),
    Mistake(
        "tail prints one message more than --count",
        "cli/messages/tail.py",
        "if shown == reading.count:",
        "if shown > reading.count > 0:",
    ),
    Mistake(
        "--key of tail matches every key",
        "cli/messages/tail.py",
        '(self.key is None or record["key"] == self.key)',
        '(self.key is None or record["key"] is not None)',
    ),
    Mistake(
        "--since seeks nanoseconds",
        "cli/messages/tail.py",
        'f"timestamp:{wanted.after // 1_000_000_000}"',
        'f"timestamp:{wanted.after}"',
    ),
    Mistake(
        "trace takes the first unfinished message for finished",
        "cli/messages/tail.py",
        "if offset >= part.end - channel.lag_bytes:",
        "if offset > part.end - channel.lag_bytes:",
    ),
    Mistake(
        "a keyed message is replayed to its recorded partition",
        "cli/files/replay.py",
        'plan.keep_partitions and entry.record.get("key") is None',
        "plan.keep_partitions",
    ),
    Mistake(
        "the progress is that of the first message of a publish",
        "cli/files/replay.py",
        "progress.save, due[-1]",
        "progress.save, due[0]",
    ),
    Mistake(
        "--speed 2 is half as fast",
        "cli/files/replay.py",
        "/ 1e9 / self._speed",
        "/ 1e9 * self._speed",
    ),
    Mistake(
        "a replay continues in the next file with the same publish",
        "cli/files/replay.py",
        "waiting.file == file and len(due)",
        "len(due)",
    ),
)
