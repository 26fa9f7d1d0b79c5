"""``nsqext stats``: depth, lag, messages and consumers of topics and channels."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from nsqext.cli.admin.channel import channel_record
from nsqext.cli.command import command, examples
from nsqext.cli.connection import Connection
from nsqext.cli.output import make_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.admin import Admin, TopicStats

COLUMNS = (
    "topic",
    "channel",
    "depth",
    "in_flight",
    "deferred",
    "lag",
    "messages",
    "per_second",
    "consumers",
    "paused",
)


def stats_records(found: Mapping[str, TopicStats], rates: Rates) -> list[dict[str, Any]]:
    """Return a record for each channel, and for each topic that has none."""
    records: list[dict[str, Any]] = []
    for name, topic in found.items():
        unreachable = {"unreachable": [str(node) for node in topic.unreachable]} if topic.unreachable else {}
        if not topic.channels:
            record: dict[str, Any] = {"topic": name, "channel": None, "messages": topic.messages, "consumers": 0}
            records.append(record | {"paused": topic.paused} | unreachable)
        for channel in topic.channels.values():
            record = channel_record(name, channel)
            record["paused"] = record["paused"] or topic.paused
            records.append(record | unreachable)
    return rates.add(records)


class Rates:
    """Rates of messages between successive samples."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str | None], int] = {}
        self._at = 0.0

    def add(self, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add ``per_second`` to the records, from the second sample on."""
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        last, self._last = self._last, {}
        for record in records:
            key = (record["topic"], record["channel"])
            self._last[key] = record["messages"]
            if key in last and elapsed > 0:
                record["per_second"] = round(max(record["messages"] - last[key], 0) / elapsed, 1)
        return records


async def look(admin: Admin, topic: str | None, channel: str | None = None) -> dict[str, TopicStats]:
    """Return the statistics of one topic or of all."""
    return await admin.all_stats() if topic is None else {topic: await admin.stats(topic, channel)}


@examples(
    "nsqext stats",
    "nsqext stats orders billing --watch",
    "nsqext stats --json | jq 'select(.lag > 1000) | .channel'",
)
@command
async def run(
    connection: Connection,
    topic: Annotated[str | None, typer.Argument(help="The topic. (default: all)")] = None,
    channel: Annotated[str | None, typer.Argument(help="The channel. (default: all)")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Repeat until ^C, with rates.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between refreshes.")] = 2.0,
    count: Annotated[int, typer.Option(min=0, help="--watch: number of refreshes; 0 for no limit.")] = 0,
) -> None:
    """Show depth, lag, messages and consumers of topics and channels."""
    rates, number = Rates(), 0
    async with connection.admin() as admin:
        if not watch:
            connection.table(COLUMNS, stats_records(await look(admin, topic, channel), rates))
            return
        timed = partial(map, lambda record: {"time": time.time(), **record})
        with connection.live(partial(make_table, COLUMNS), timed) as show:
            while True:
                show(stats_records(await look(admin, topic, channel), rates))
                number += 1
                if number == count:
                    return
                await anyio.sleep(interval)
