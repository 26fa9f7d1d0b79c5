"""``nsqext lag``: the unfinished messages of channels."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio

from nsqext.cli.admin.channel import channel_record, lacking, table_columns
from nsqext.cli.admin.stats import INTERVAL, check_watched, look, stats_table
from nsqext.cli.command import command, examples
from nsqext.cli.connection import ServerAccess
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nsqext.admin import TopicStats

_COLUMNS = ("topic", "channel", "lag", "in_flight", "deferred", "consumers")
# members of a record whose lag is not known, and the reasons that they give
_LACKS: Mapping[str, Callable[[list[Any]], str]] = {
    "unreachable": lambda nodes: f"no response of {', '.join(nodes)}",
    "missing": lambda partitions: f"no node reports partition {', '.join(map(str, partitions))}",
}


def lag_records(found: Mapping[str, TopicStats], channel: str | None = None) -> list[dict[str, Any]]:
    """Return a record per channel, longest lag first.

    What is not known of a topic is in its records, behind them in a record without lag if no node has reported a
    channel.
    """
    records: list[dict[str, Any]] = []
    unknown: list[dict[str, Any]] = []
    for name, topic in found.items():
        lacks = lacking(topic)
        for one in topic.channels.values():
            record = channel_record(name, one)
            records.append({column: record[column] for column in _COLUMNS} | lacks)
        if not topic.channels and not topic.complete:
            unknown.append({"topic": name, "channel": channel, "lag": None, **lacks})
    records.sort(key=lambda record: (-record["lag"], record["topic"], record["channel"]))
    return records + unknown


def excess(records: list[dict[str, Any]], highest: int | None) -> list[str]:
    """Return why each channel exceeds a limit."""
    if highest is None:
        return []
    problems = []
    for record in records:
        place = record["topic"] if record["channel"] is None else f"{record['topic']}/{record['channel']}"
        if record["lag"] is not None and record["lag"] > highest:
            problems.append(f"the lag of {place} is {record['lag']}, more than {highest}")
        elif record["lag"] is None or record.keys() & _LACKS.keys():
            reasons = [text(record[name]) for name, text in _LACKS.items() if name in record]
            problems.append(f"the lag of {place} is not known: {'; '.join(reasons) or 'no node has the topic'}")
    return problems


@examples("nsqext lag", "nsqext lag orders --max 1000", "nsqext lag orders --watch | jq .lag")
@command
async def run(
    connection: ServerAccess,
    topic: Annotated[str | None, Argument(help="The topic. (default: all)")] = None,
    channel: Annotated[str | None, Argument(help="The channel. (default: all)")] = None,
    highest: Annotated[int | None, Option("--max", min=0, help="Exit with 1 if the lag of a channel is above.")] = None,
    watch: Annotated[bool, Option("--watch", help="Repeat until ^C, or until a lag is above --max.")] = False,
    interval: Annotated[float, Option(min=0.1, help="--watch: seconds between refreshes.")] = INTERVAL,
) -> None:
    """Show the unfinished messages of channels, longest lag first.

    With --max, the exit code is 1 if a lag is above it, or unknown because a node does not respond or a partition has
    no leader.
    """
    check_watched(watch=watch, interval=interval)
    async with connection.admin() as admin:
        if not watch:
            records = lag_records(await look(admin, topic, channel), channel)
            connection.table(table_columns(_COLUMNS, records), records)
        else:
            timed = partial(map, lambda record: {"time": time.time(), **record})
            with connection.live(partial(stats_table, _COLUMNS), timed) as show:
                while True:
                    records = lag_records(await look(admin, topic, channel), channel)
                    show(records)
                    if excess(records, highest):
                        break
                    with waits.waiting(None):
                        await anyio.sleep(interval)
    problems = excess(records, highest)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        raise SystemExit(1)
