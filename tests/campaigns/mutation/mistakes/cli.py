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
)
