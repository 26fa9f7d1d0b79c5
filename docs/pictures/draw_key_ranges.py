"""Draws how key ranges move, from a real run: ``python -m docs.pictures.draw_key_ranges`` writes key-ranges.svg here.

Three consumers come and go as in the Key_Failover note, on an embedded cluster with real traffic; the ranges are those
that the broker tells in its statistics.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import anyio
import matplotlib as mpl
import matplotlib.pyplot as plt
from anyio import create_task_group
from attrs import define, field

from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.admin import Admin, KeyRange
from nsqext.broker import Cluster
from nsqext.key_ranges import position_of

STEP = 4.0
"""Seconds between two events."""
TOPIC, CHANNEL = "orders", "billing"
COLOURS = ("#4477aa", "#cc6677", "#ddaa33")
EVENTS = ("C1 joins", "C2 joins", "C3 joins", "C1 leaves", "C2 leaves")


@define
class Record:
    """What was seen in the run: times in seconds since its beginning."""

    looks: list[tuple[float, tuple[KeyRange, ...]]] = field(factory=list)
    events: list[float] = field(factory=list)
    names: dict[str, int] = field(factory=dict)


async def consume(cluster: Cluster, stop: anyio.Event) -> None:
    """Consume until the stop."""
    consumer = Consumer(TOPIC, CHANNEL, lookupd=cluster.lookupd, dispatch="key_failover")

    @consumer.handler
    async def handle(_: Message) -> None:
        await anyio.lowlevel.checkpoint()

    async with create_task_group() as tasks:
        tasks.start_soon(consumer.serve)
        await stop.wait()
        consumer.stop()


async def publish(cluster: Cluster) -> None:
    """Publish for ever; keys of the upper half of the hash space are twice as frequent."""
    chance = random.Random(5)
    keys = [f"key-{number}" for number in range(2000)]
    weights = [1 + (position_of(key.encode()) >> 31) for key in keys]
    async with Producer(cluster.lookupd) as producer:
        while True:
            drawn = chance.choices(keys, weights, k=40)
            await producer.publish_many(TOPIC, [OutgoingMessage(b"x", key=key) for key in drawn])
            await anyio.sleep(0.04)


async def look(cluster: Cluster, record: Record, started: float) -> None:
    """Write down the ranges, ten times a second."""
    async with Admin(cluster.lookupd) as admin:
        while True:
            (part,) = (await admin.stats(TOPIC, CHANNEL)).partitions
            ranges = part.channels[CHANNEL].key_ranges
            for line in ranges:
                record.names.setdefault(line.client, len(record.names))
            record.looks.append((time.monotonic() - started, ranges))
            await anyio.sleep(0.1)


async def observe(cluster: Cluster) -> Record:
    """Let three consumers come and go."""
    record, started = Record(), time.monotonic()
    async with create_task_group() as tasks:
        tasks.start_soon(publish, cluster)
        tasks.start_soon(look, cluster, record, started)
        stops = [anyio.Event() for _ in range(3)]
        for event in EVENTS:
            record.events.append(time.monotonic() - started)
            if event.endswith("joins"):
                tasks.start_soon(consume, cluster, stops[int(event[1]) - 1])
            else:
                stops[int(event[1]) - 1].set()
            await anyio.sleep(STEP)
        record.events.append(time.monotonic() - started)
        tasks.cancel_scope.cancel()
    return record


def blocks(record: Record) -> dict[tuple[int, float, float], list[float]]:
    """Return begin and end of each range by consumer, low and high."""
    found: dict[tuple[int, float, float], list[float]] = {}
    times = [moment for moment, _ in record.looks] + [record.events[-1]]
    for (moment, lines), end in zip(record.looks, times[1:], strict=True):
        for line in lines:
            found.setdefault((record.names[line.client], line.low, line.high), [moment, end])[1] = end
    return found


def draw(record: Record, path: Path) -> None:
    """Draw ranges and rates over time."""
    mpl.rcParams.update({"svg.hashsalt": "nsqext", "svg.fonttype": "none", "font.size": 9})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure, (ranges, rates) = plt.subplots(2, 1, figsize=(8, 5.5), sharex=True, height_ratios=(3, 1.4))
    for (number, low, high), (begin, end) in blocks(record).items():
        ranges.bar(begin, high - low, end - begin, low, align="edge", color=COLOURS[number], lw=0)
        where = (begin + end) / 2, (low + high) / 2
        ranges.text(*where, f"C{number + 1}", color="white", weight="bold", ha="center", va="center")
    for consumer, number in record.names.items():
        points = [(moment, line.rate) for moment, lines in record.looks for line in lines if line.client == consumer]
        rates.plot(*zip(*points, strict=True), color=COLOURS[number])
        moment, rate = points[len(points) * 17 // 20]
        rates.text(moment, rate + 30, f"C{number + 1}", color=COLOURS[number], weight="bold")
    for place, event in enumerate(EVENTS):
        ranges.text(record.events[place], 1.02, f"T{place}\n{event}", va="bottom")
        rates.axvline(record.events[place], color="0.3", lw=0.6, ls=":")
    ranges.set(ylim=(0, 1), yticks=(0, 0.25, 0.5, 0.75, 1), ylabel="hash of the key")
    rates.set(
        ylim=(0, 1.15 * rates.get_ylim()[1]),
        xlim=(0, record.events[-1]),
        ylabel="messages/s\n(last 10 s)",
        xlabel="seconds",
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run and draw."""
    with Cluster(nodes=1) as cluster:
        cluster.create_topic(TOPIC, extend=True, channels=[CHANNEL])
        record = anyio.run(observe, cluster)
    draw(record, Path(__file__).with_name("key-ranges.svg"))


if __name__ == "__main__":
    main()
