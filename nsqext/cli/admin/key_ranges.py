"""``nsqext key-ranges``: show the key range of each consumer of a key_failover channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import anyio
from attrs import asdict, frozen
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nsqext.admin import Admin, KeyRange
from nsqext.cli.command import Topic, command, examples
from nsqext.cli.connection import ServerAccess
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import ConnectionFailed, InvalidSetting, LookupFailed, OperationNotSupported, escaped
from nsqext.errors.server import BadChannel
from nsqext.protocol.names import check_channel, check_topic

_INTERVAL = 0.5  # seconds
_BARS = 10, 40
_OTHERS = 66  # terminal columns besides the bar
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@frozen
class PartitionRanges:
    """A channel on one partition."""

    partition: int
    node: str = ""  #: of the leader
    error: str = ""  #: why the ranges are unknown
    depth: int = 0
    replay: int = 0  #: messages that wait for the consumer of their key
    held_keys: int = 0  #: keys with messages in flight
    ranges: tuple[KeyRange, ...] = ()


async def look(admin: Admin, topic: str, channel: str) -> list[PartitionRanges]:
    """Return the ranges of every partition."""
    info = await admin.topic(topic)
    if info.generation == "original":
        raise OperationNotSupported("the original NSQ has no key ranges", topic=topic)
    numbers = range(info.meta.partition_num if info.meta else 0)
    try:
        stats = await admin.stats(topic, channel)
    except ConnectionFailed as error:
        return [PartitionRanges(number, error=str(error)) for number in numbers]
    parts = {part.partition: part for part in stats.partitions}
    if not stats.channels and parts.keys() >= set(numbers):
        raise BadChannel(f"no partition has the channel {channel}", topic=topic)
    found: list[PartitionRanges] = []
    for number in numbers:
        part = parts.get(number)
        if part is None:
            reason = "no response" if number in info.leaders else "no leader"
            found.append(PartitionRanges(number, str(info.leaders.get(number, "")), reason))
            continue
        node, one = str(part.node), part.channels.get(channel)
        if one is None:
            found.append(PartitionRanges(number, node, "no such channel"))
        elif one.clients and one.dispatch != "key_failover":
            raise InvalidSetting(
                f"the channel {channel} is not of type key_failover",
                topic=topic,
                partition=number,
                hint="create it with dispatch=key_failover, or start Consumer(dispatch='key_failover') first",
            )
        else:
            reason = "" if one.dispatch == "key_failover" else "no consumer, so the channel has no type yet"
            found.append(PartitionRanges(number, node, reason, one.depth, one.replay, one.held_keys, one.key_ranges))
    return found


@examples("nsqext key-ranges orders billing", "nsqext key-ranges orders billing --once --json")
@command
async def run(
    connection: ServerAccess,
    topic: Topic,
    channel: Annotated[str, Argument(help="The channel, of type key_failover.")],
    interval: Annotated[float, Option(min=0.05, help="Seconds between refreshes.")] = _INTERVAL,
    once: Annotated[bool, Option("--once", help="Print the ranges once and exit.")] = False,
) -> None:
    """Show ranges, rates and the replay set of a key_failover channel, until ^C."""
    check_topic(topic)
    check_channel(channel)
    if once and interval != _INTERVAL:
        raise InvalidSetting("--interval with --once would be ignored", hint="give one of them")
    console, name = Console(), f"{topic} / {channel}"

    def records(found: list[PartitionRanges]) -> list[dict[str, Any]]:
        return [{"topic": topic, "channel": channel, **asdict(one)} for one in found]

    async with connection.admin() as admin:
        found = await look(admin, topic, channel)
        with connection.live(lambda found: make_table(name, found, console.width), records) as show:
            show(found)
            while not once:
                with waits.waiting(None):
                    await anyio.sleep(interval)
                found = await _look_again(admin, topic, channel, found)
                show(found)


async def _look_again(
    admin: Admin, topic: str, channel: str, before: Sequence[PartitionRanges]
) -> list[PartitionRanges]:
    try:
        return await look(admin, topic, channel)
    except LookupFailed as error:
        return [PartitionRanges(one.partition, one.node, str(error)) for one in before]


def make_table(name: str, found: Sequence[PartitionRanges], width: int) -> Table:
    """Return a table with a line per range, and each partition's replay set."""
    table = Table(title=name, title_justify="left", show_footer=True, box=SIMPLE, pad_edge=False)
    size = min(max(width - _OTHERS, _BARS[0]), _BARS[1])
    consumers = sorted({line.client for one in found for line in one.ranges})
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
            table.add_row(str(one.partition), "", "", "", escape(one.error) or "no consumer", "", str(one.replay))
        for place, line in enumerate(one.ranges):
            consumer = escape(escaped(f"{line.client} (tag {line.tag})" if line.tag else line.client))
            colour = colours[line.client]
            table.add_row(
                "" if place else str(one.partition),
                f"[{colour}]{_bar(line.low, line.high, size)}[/]",
                f"{line.low:.3f}",
                f"{line.high:.3f}",
                f"[{colour}]{consumer}[/]",
                f"{line.rate:.1f}",
                str(line.waiting),
            )
        table.add_section()
    return table


def _bar(low: float, high: float, size: int) -> str:
    """Draw a range on the line from 0 to 1, at least one character wide."""
    first = min(int(low * size), size - 1)
    last = max(round(high * size), first + 1)
    return "·" * first + "█" * (last - first) + "·" * (size - last)
