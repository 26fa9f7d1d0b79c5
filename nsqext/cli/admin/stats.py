"""``nsqext stats`` and ``nsqext top``: depth, lag, messages and consumers of topics and channels."""

from __future__ import annotations

import os
import re
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
from attrs import define

from nsqext.cli.admin.channel import channel_record, lacking, stopped_on, table_columns
from nsqext.cli.command import command, examples
from nsqext.cli.connection import ServerAccess, make_table
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidInput, InvalidSetting, NsqError, escaped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType
    from rich.live import Live

    from nsqext.admin import Admin, TopicStats

COLUMNS = ("topic", "channel", "depth", "in_flight", "deferred", "lag", "messages", "per_second", "consumers", "paused")

INTERVAL = 2.0
"""Seconds between refreshes, by default."""


def check_watched(*, watch: bool, interval: float, count: int = 0) -> None:
    """Raise InvalidSetting for options that only --watch uses."""
    if not watch and (count or interval != INTERVAL):
        name = "--count" if count else "--interval"
        raise InvalidSetting(f"{name} without --watch would be ignored", hint="give --watch")


def stats_records(found: Mapping[str, TopicStats], rates: Rates) -> list[dict[str, Any]]:
    """Return a record for each channel, and for each topic without channels."""
    records: list[dict[str, Any]] = []
    counts: list[dict[object, int]] = []
    for name, topic in found.items():
        lacks = lacking(topic)
        parts = {part.node if part.partition is None else part.partition: part for part in topic.partitions}
        if not topic.channels:
            record: dict[str, Any] = {"topic": name, "channel": None, "messages": topic.messages, "consumers": 0}
            records.append(record | {"paused": topic.paused} | lacks)
            counts.append({key: part.messages for key, part in parts.items()})
        for channel in topic.channels.values():
            record = channel_record(name, channel)
            record["paused"] = record["paused"] or topic.paused
            records.append(record | stopped_on(topic, channel.name) | lacks)
            opened = {key: part.channels.get(channel.name) for key, part in parts.items()}
            counts.append({key: one.messages for key, one in opened.items() if one is not None})
    return rates.add(records, counts)


def stats_table(columns: tuple[str, ...], records: Sequence[Mapping[str, Any]], title: str = "") -> RenderableType:
    """Return a table of records with the columns of `table_columns`."""
    found: RenderableType = make_table(table_columns(columns, records), records, title)
    return found


class Rates:
    """Rates of messages between successive samples."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str | None], Mapping[object, int]] = {}
        self._at = 0.0

    def add(self, records: list[dict[str, Any]], counts: Sequence[Mapping[object, int]]) -> list[dict[str, Any]]:
        """Add the rate since the last sample to the records, as ``per_second``; return them.

        Args:
            counts: the messages of each record by partition, or node of the original NSQ. A partition that one of the
                two samples lacks has no rate.
        """
        now = time.monotonic()
        elapsed, self._at = now - self._at, now
        last, self._last = self._last, {}
        for record, count in zip(records, counts, strict=True):
            key = (record["topic"], record["channel"])
            self._last[key] = count
            before = last.get(key, {})
            grown = [max(count[part] - before[part], 0) for part in count.keys() & before.keys()]
            if grown and elapsed > 0:
                record["per_second"] = round(sum(grown) / elapsed, 1)
        return records


async def look(admin: Admin, topic: str | None, channel: str | None = None) -> dict[str, TopicStats]:
    """Return the statistics of one topic or of all; raises InvalidInput if the topic has no such channel."""
    if topic is None:
        return await admin.all_stats(await admin.topics())
    found = await admin.stats(topic, channel)
    if channel is not None and found.complete and channel not in found.channels:
        raise InvalidInput(f"the topic has no channel {channel}", topic=topic)
    return {topic: found}


@examples(
    "nsqext stats", "nsqext stats orders billing --watch", "nsqext stats --json | jq 'select(.lag > 1000) | .channel'"
)
@command
async def run(
    connection: ServerAccess,
    topic: Annotated[str | None, Argument(help="The topic. (default: all)")] = None,
    channel: Annotated[str | None, Argument(help="The channel. (default: all)")] = None,
    watch: Annotated[bool, Option("--watch", help="Repeat until ^C, with rates.")] = False,
    interval: Annotated[float, Option(min=0.1, help="--watch: seconds between refreshes.")] = INTERVAL,
    count: Annotated[int, Option(min=0, help="--watch: number of refreshes; 0 for no limit.")] = 0,
) -> None:
    """Show depth, lag, messages and consumers of topics and channels."""
    check_watched(watch=watch, interval=interval, count=count)
    rates, number = Rates(), 0
    async with connection.admin() as admin:
        if not watch:
            records = stats_records(await look(admin, topic, channel), rates)
            connection.table(table_columns(COLUMNS, records), records)
            return
        timed = partial(map, lambda record: {"time": time.time(), **record})
        with connection.live(partial(stats_table, COLUMNS), timed) as show:
            while True:
                show(stats_records(await look(admin, topic, channel), rates))
                number += 1
                if number == count:
                    return
                with waits.waiting(None):
                    await anyio.sleep(interval)


KEYS = {
    "t": "topic",
    "c": "channel",
    "d": "depth",
    "f": "in_flight",
    "l": "lag",
    "m": "messages",
    "r": "per_second",
    "n": "consumers",
}
_SEQUENCE = re.compile(r"\x1b[O\[][0-9;]*[ -~]|\x1b[^O\[\x1b]")  # keys such as arrows, Home, F1 or Alt+X, not Escape
_MOST_TYPED = 64  # bytes of a read; a terminal sends all bytes of a key at once


@define
class View:
    """State of the table."""

    records: list[dict[str, Any]]
    column: str = "lag"  #: the column to sort by; numbers descending, text ascending
    reverse: bool = False
    error: str = ""  #: of the last sample

    def press(self, key: str) -> bool:
        """Handle a key; return False to quit."""
        if key in KEYS:
            self.reverse = not self.reverse if self.column == KEYS[key] else False
            self.column = KEYS[key]
        return key not in ("q", "\x1b", "\x04")

    def sorted(self) -> list[dict[str, Any]]:
        text = self.column in ("topic", "channel")
        default: Any = "" if text else 0
        return sorted(self.records, key=lambda record: record.get(self.column) or default, reverse=self.reverse is text)

    def render(self, height: int) -> RenderableType:
        """Return the table, cut to the terminal's height."""
        from rich.console import Group
        from rich.text import Text

        help_line = "  ".join(f"{key}: {column.replace('_', ' ')}" for key, column in KEYS.items())
        found = stats_table(COLUMNS, self.sorted()[: max(height - 6, 1)], f"sorted by {self.column.replace('_', ' ')}")
        return Group(found, Text(escaped(self.error), style="red"), Text(f"{help_line}  q: quit", style="dim"))


@contextmanager
def _single_keys(descriptor: int) -> Iterator[None]:
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@examples("nsqext top", "nsqext top orders --interval 0.5")
@command
async def top(
    connection: ServerAccess,
    topic: Annotated[str | None, Argument(help="The topic. (default: all)")] = None,
    interval: Annotated[float, Option(min=0.1, help="Seconds between refreshes.")] = 1.0,
) -> None:
    """Watch depth, lag, rates and consumers of channels in a table; q or ^C quits.

    Keys select the sort column: t topic, c channel, d depth, f in flight, l lag, m messages, r rate, n consumers; the
    same key again reverses the order. Needs a terminal; use `nsqext stats --watch` in pipes.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidSetting("top needs a terminal", hint="use nsqext stats --watch")
    from rich.live import Live

    view = View([])
    descriptor = sys.stdin.fileno()
    async with connection.admin() as admin:
        with waits.waiting(None), _single_keys(descriptor), Live(auto_refresh=False, screen=True) as live:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_refresh, view, live, admin, topic, interval)
                while True:
                    await anyio.wait_readable(descriptor)
                    typed = os.read(descriptor, _MOST_TYPED).decode(errors="replace")
                    if not typed or not all(map(view.press, _SEQUENCE.sub("", typed))):
                        break
                    live.update(view.render(live.console.height), refresh=True)
                tasks.cancel_scope.cancel()


async def _refresh(view: View, live: Live, admin: Admin, topic: str | None, interval: float) -> None:
    rates = Rates()
    while True:
        try:
            # `look` would ask lookup for each topic at every refresh, to name the partitions without a leader
            found = await admin.all_stats() if topic is None else await look(admin, topic)
            view.records = stats_records(found, rates)
            view.error = ""
        except NsqError as error:
            view.error = str(error)
        live.update(view.render(live.console.height), refresh=True)
        await anyio.sleep(interval)
