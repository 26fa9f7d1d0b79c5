"""``nsqext demo``."""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import anyio
import orjson
from attrs import define, field, frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nsqext import Admin, Consumer, Producer
from nsqext.cli.command import examples, perform
from nsqext.cli.parameters import Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting, InvalidState, MessageNotInFlight
from nsqext.types import Receipt

if TYPE_CHECKING:
    from nsqext import Message

CANARY = "canary"
"""Tag of the flights of American Airlines."""

_FILE = "flights-2013-01-01.csv"
_CHANNEL = "departures"
_PUBLISHERS = 64
IDLE_TIMEOUT: float = 20.0
"""Seconds without a message until missing messages count as lost."""
_DUPLICATES_WAIT = 0.5  # seconds to wait for duplicates after the last flight

_Lookupd = Annotated[
    str | None, Option(help="HOST:PORT of nsqlookupd (HTTP), or several with commas. (default: start a cluster)")
]
_Partitions = Annotated[int, Option(min=1, max=254, help="Partitions of the topic.")]
_Nodes = Annotated[int | None, Option(min=1, max=32, help="Nodes of the started cluster. (default: 3)")]


@examples("nsqext demo", "nsqext demo --lookupd 127.0.0.1:4161 --partitions 8")
def run(lookupd: _Lookupd = None, partitions: _Partitions = 4, nodes: _Nodes = None) -> None:
    """Publish and consume a day of flights, with headers, keys and a canary tag for the second consumer.

    Exits with 1 if a message is lost, duplicated, altered, out of order, or received by the wrong consumer.
    """
    if lookupd is not None and nodes is not None:
        raise InvalidSetting("--nodes has no effect on the cluster of --lookupd", hint="give only one of them")
    console, check = Console(), FlightCheck(read_flights())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        if lookupd is None:
            _on_own_cluster(check, partitions, nodes or 3, progress)
        else:
            perform(partial(_on_running_cluster, check, partitions, lookupd, progress))
    if not _show(console, check):
        raise SystemExit(1)


def _on_own_cluster(check: FlightCheck, partitions: int, nodes: int, progress: Progress) -> None:
    from nsqext.broker import Cluster

    with Cluster(nodes=nodes) as cluster:
        cluster.create_topic("flights", partitions=partitions, extend=True, channels=[_CHANNEL])
        progress.console.print(f"cluster of {nodes} nodes, lookup at {', '.join(cluster.lookupd)}", highlight=False)
        perform(partial(_publish_and_consume, check, "flights", cluster.lookupd, progress))


async def _on_running_cluster(check: FlightCheck, partitions: int, lookupd: str, progress: Progress) -> None:
    topic = f"nsqext_demo_{token_hex(4)}"
    progress.console.print(f"topic {topic} at {lookupd}, deleted at the end", highlight=False)
    async with Admin(lookupd) as admin:
        try:
            responses = waits.waiting(f"a response of lookup at {lookupd}, or for the partitions of {topic}")
            line = progress.add_task("partitions ready (up to 2 min)", total=partitions)
            with responses:
                await admin.create_topic(
                    topic, partitions=partitions, extend=True, multipart=True, channels=[_CHANNEL], wait=150
                )
            progress.advance(line, partitions)
            await _publish_and_consume(check, topic, lookupd, progress)
        finally:
            with anyio.CancelScope(shield=True), waits.waiting(f"{topic} to be deleted"):
                await admin.delete_topic(topic, missing_ok=True)


async def _publish_and_consume(
    check: FlightCheck, topic: str, lookupd: str | Sequence[str], progress: Progress
) -> None:
    """Subscribe, then publish: a tagged message without its consumer would go to another consumer."""
    count = len(check.flights)

    def wait() -> str:
        return f"messages of {topic}: {len(check.receipts)} of {count} stored, {len(check.deliveries)} received"

    async with AsyncExitStack() as stack:
        stack.enter_context(waits.waiting(wait))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        consumers = []
        received = progress.add_task("received", total=count)
        for tag in (CANARY, None):
            consumer = Consumer(topic, _CHANNEL, lookupd=lookupd, tag=tag, queue_position=True, start_timeout=30)
            consumers.append(await stack.enter_async_context(consumer))
            tasks.start_soon(_consume, consumer, tag, check, partial(progress.advance, received))
        producer = await stack.enter_async_context(Producer(lookupd))
        published = progress.add_task("published", total=count)
        await _publish_all(producer, topic, check, partial(progress.advance, published))
        arrived, seen = time.monotonic(), 0
        while not check.complete and time.monotonic() < arrived + IDLE_TIMEOUT:
            if check.received.total() > seen:
                arrived, seen = time.monotonic(), check.received.total()
            await anyio.sleep(0.01)
        await anyio.sleep(_DUPLICATES_WAIT)
        for consumer in consumers:
            consumer.stop()


async def _publish_all(producer: Producer, topic: str, check: FlightCheck, advance: Callable[[], None]) -> None:
    flights = iter(check.flights)

    async def publish() -> None:
        for one in flights:
            check.receipts[one.number] = await producer.publish(
                topic, one.body, headers=one.headers, tag=one.tag, trace_id=one.number, key=one.key
            )
            advance()

    async with anyio.create_task_group() as tasks:
        for _ in range(_PUBLISHERS):
            tasks.start_soon(publish)


async def _consume(consumer: Consumer, tag: str | None, check: FlightCheck, advance: Callable[[], None]) -> None:
    async for message in consumer:
        check.add(tag, message)
        advance()
        try:
            await message.finish()
        except MessageNotInFlight:
            check.wrong["not finished"] += 1


def _show(console: Console, check: FlightCheck) -> bool:
    partitions = Table("partition", "leader", f"tag {CANARY}", "without tag", title="Received", title_justify="left")
    for number in sorted({partition for partition, _ in check.received if partition is not None}):
        leaders = {str(receipt.node) for receipt in check.receipts.values() if receipt.partition == number}
        counts = (str(check.received[number, tag]) for tag in (CANARY, None))
        partitions.add_row(str(number), ", ".join(sorted(leaders)), *counts)
    violations = check.violations()
    table = Table("messages", "count", title="Violations", title_justify="left")
    for kind, count in violations.items():
        table.add_row(kind, f"[{'red' if count else 'green'}]{count}[/]")
    console.print(partitions, table)
    good = not any(violations.values())
    result = "[green]no violations[/]" if good else "[red]violations found[/]"
    console.print(f"{len(check.flights)} flights: {result}")
    return good


@frozen
class Flight:
    """A flight to publish."""

    number: int  #: from 1; the trace id, which identifies a received flight
    body: bytes
    headers: Mapping[str, str]
    key: str  #: the aircraft, or the flight number for an unknown tail number
    tag: str | None


def read_flights() -> list[Flight]:
    """Return the flights of the package, or of ``examples/data`` in a source checkout."""
    here = Path(__file__)
    for folder in (here.parent / "data", here.parents[3] / "examples" / "data"):
        path = folder / _FILE
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                return [_flight(number, row) for number, row in enumerate(csv.DictReader(file), 1)]
    raise InvalidState(f"{_FILE} is not part of this installation", hint="install the wheel, or run a checkout")


def _flight(number: int, row: dict[str, str]) -> Flight:
    headers = {name: row[name] for name in ("carrier", "origin", "dest")}
    key = row["flight"] if row["tailnum"] in ("", "NA") else row["tailnum"]
    return Flight(number, orjson.dumps(row), headers, key, CANARY if row["carrier"] == "AA" else None)


@define
class FlightCheck:
    """Receipts and received messages of one run."""

    flights: Sequence[Flight]
    receipts: dict[int, Receipt] = field(factory=dict)
    deliveries: Counter[int] = field(factory=Counter)
    #: by partition and the consumer's tag
    received: Counter[tuple[int | None, str | None]] = field(factory=Counter)
    wrong: Counter[str] = field(factory=Counter)  #: by kind of violation
    _positions: dict[int, tuple[int | None, ...]] = field(factory=dict, init=False)
    _last: dict[tuple[str | None, str], int] = field(factory=dict, init=False)

    def add(self, consumer_tag: str | None, message: Message) -> None:
        self.received[message.partition, consumer_tag] += 1
        number = message.trace_id
        flight = self.flights[number - 1] if 0 < number <= len(self.flights) else None
        if flight is None or (message.body, message.headers, message.tag) != (flight.body, flight.headers, flight.tag):
            self.wrong["altered"] += 1
            return
        self.deliveries[number] += 1
        self._positions[number] = (message.partition, message.internal_id, message.offset, message.size)
        self.wrong["received by the wrong consumer"] += flight.tag != consumer_tag
        self.wrong["out of order"] += self._last.get((consumer_tag, flight.key), 0) > number
        self._last[consumer_tag, flight.key] = number

    @property
    def complete(self) -> bool:
        return len(self.deliveries) == len(self.flights)

    def violations(self) -> dict[str, int]:
        """Count messages by kind of violation; all 0 in a good run."""
        count, received = len(self.flights), len(self.deliveries)
        moved = sum(
            self._positions.get(number, found) != found
            for number, one in self.receipts.items()
            for found in [(one.partition, one.message_id, one.offset, one.size)]
        )
        kinds = ("received by the wrong consumer", "out of order", "altered", "not finished")
        return {
            "lost": count - received,
            "duplicated": self.deliveries.total() - received,
            **{kind: self.wrong[kind] for kind in kinds},
            "at another position than in the receipt": moved,
            "not acknowledged": count - len(self.receipts),
        }
