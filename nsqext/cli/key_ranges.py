"""``nsqext key-ranges``: which consumer of a key_failover channel serves which keys, as they come and go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import anyio
import attrs
import httpx
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from nsqext.cli.common import Connection, connected, examples, perform, printable
from nsqext.cli.key_ranges_watch import PartitionKeys, RangeWatch
from nsqext.lookup.metadata import MetadataCache
from nsqext.protocol.names import check_channel, check_topic

__all__ = ("make_table", "run")

_BARS = 10, 40
_OTHERS = 66  # columns of a terminal that everything but the bar takes
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@examples("nsqext key-ranges orders billing", "nsqext key-ranges orders billing --once --json")
@connected
def run(
    connection: Connection,
    topic: Annotated[str, typer.Argument(help="The topic.")],
    channel: Annotated[str, typer.Argument(help="The channel, of type key_failover.")],
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Show ranges, rates and the replay set of a key_failover channel, until ^C."""
    check_topic(topic)
    check_channel(channel)
    perform(lambda: _show(connection, topic, channel, interval, once=once))


async def _show(connection: Connection, topic: str, channel: str, interval: float, *, once: bool) -> None:
    console = Console()
    directory = MetadataCache(lookupd=connection.lookupd())
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as web:
        watch = RangeWatch(directory, web, topic, channel)
        name = f"{topic} / {channel}"
        try:
            if not connection.for_people:
                while True:
                    for found in await watch.look():
                        connection.show({"topic": topic, "channel": channel, **attrs.asdict(found)}, "")
                    if once:
                        return
                    await anyio.sleep(interval)
            table = make_table(name, await watch.look(), console.width)
            if once:
                console.print(table)
                return
            with Live(table, console=console, auto_refresh=False) as live:
                while True:
                    live.update(make_table(name, await watch.look(), console.width), refresh=True)
                    await anyio.sleep(interval)
        finally:
            await directory.aclose()


def make_table(name: str, found: Sequence[PartitionKeys], width: int) -> Table:
    """Return the table: a line for each range, and the replay set of each partition."""
    table = Table(title=name, title_justify="left", show_footer=True, box=SIMPLE, pad_edge=False)
    size = min(max(width - _OTHERS, _BARS[0]), _BARS[1])
    consumers = sorted({line.consumer for one in found for line in one.ranges})
    colours = {consumer: _COLOURS[place % len(_COLOURS)] for place, consumer in enumerate(consumers)}
    lines = [line for one in found for line in one.ranges]
    table.add_column("part", justify="right")
    table.add_column("keys", width=size)
    table.add_column("from", justify="right")
    table.add_column("to", justify="right")
    table.add_column("consumer", footer=f"{len(consumers)} in all")
    table.add_column("msg/s", justify="right", footer=f"{sum(line.rate for line in lines):.1f}")
    table.add_column("waiting", justify="right", footer=str(sum(one.replay for one in found)))
    for one in found:
        if one.error or not one.ranges:
            table.add_row(str(one.partition), "", "", "", one.error or "no consumer", "", str(one.replay))
        for place, line in enumerate(one.ranges):
            who = escape(printable(f"{line.consumer} (tag {line.tag})" if line.tag else line.consumer))
            colour = colours[line.consumer]
            table.add_row(
                "" if place else str(one.partition),
                f"[{colour}]{_bar(line.low, line.high, size)}[/]",
                f"{line.low:.3f}",
                f"{line.high:.3f}",
                f"[{colour}]{who}[/]",
                f"{line.rate:.1f}",
                str(line.waiting),
            )
        table.add_section()
    return table


def _bar(low: float, high: float, size: int) -> str:
    """Draw where a range lies on the line from 0 to 1; even a narrow one is to be seen."""
    first = min(int(low * size), size - 1)
    last = max(round(high * size), first + 1)
    return "·" * first + "█" * (last - first) + "·" * (size - last)
