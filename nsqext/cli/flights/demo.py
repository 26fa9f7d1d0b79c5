"""``nsqext demo``: a real day of flights through a cluster, and an account of what arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console

from nsqext import NsqError
from nsqext.cli.command import examples
from nsqext.cli.flights.journey import CHANNEL, Journey, Outcome, travel
from nsqext.cli.flights.report import make_progress, show_tables, show_verdict
from nsqext.cli.flights.rows import CANARY, FLIGHTS, Columns, Flight, find_flights, read_flights
from nsqext.cli.flights.temporary_topic import TopicPlan, fresh_name, temporary_topic
from nsqext.client.tasks import first_error
from nsqext.errors import InvalidSetting

__all__ = ("run",)


_Lookupd = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a running nsqlookupd (HTTP), or several with commas; else an own cluster."),
]
_Csv = Annotated[Path | None, typer.Option(help="Another CSV file, with a line of column names.")]
_Keys = Annotated[
    list[str] | None,
    typer.Option(help="Column of the key; of several, the first with a value. (default: tailnum, flight)"),
]
_Tag = Annotated[str | None, typer.Option(help="Column that decides about the tag. (default: carrier)")]
_Value = Annotated[str | None, typer.Option(help="Rows with this value there get the tag. (default: AA)")]
_Headers = Annotated[
    str | None, typer.Option(help="Columns that become headers, with commas. (default: carrier,origin,dest)")
]
_Partitions = Annotated[int, typer.Option(min=1, max=254, help="Partitions of the topic.")]
_Nodes = Annotated[int | None, typer.Option(min=1, max=32, help="Nodes of the own cluster. (default: 3)")]


@examples("nsqext demo", "nsqext demo --lookupd 127.0.0.1:4161 --partitions 8")
def run(
    lookupd: _Lookupd = None,
    csv: _Csv = None,
    key_column: _Keys = None,
    tag_column: _Tag = None,
    tag_value: _Value = None,
    header_columns: _Headers = None,
    partitions: _Partitions = 4,
    nodes: _Nodes = None,
) -> None:
    """Publish and consume a day of flights, with headers, keys and a canary tag for the second consumer.

    Ends with 1 if a message was lost, duplicated or received by the wrong consumer, or differs from what was published.
    """
    if lookupd is not None and nodes is not None:
        raise InvalidSetting("--nodes is for a cluster of its own", hint="leave it out with --lookupd")
    columns = _columns(key_column, tag_column, tag_value, header_columns)
    path = csv or find_flights()
    flights = read_flights(path, columns)
    console = Console()
    keyed = sum(flight.key is not None for flight in flights)
    canaries = sum(flight.tag is not None for flight in flights)
    text = f"{path.name}: {len(flights)} rows, {keyed} with a key, {canaries} with the tag {CANARY}"
    console.print(text, highlight=False)
    with _flat_errors():
        if lookupd is None:
            outcome = _on_own_cluster(flights, partitions, nodes or 3, console)
        else:
            outcome = anyio.run(_on_running_cluster, flights, partitions, lookupd, console)
    show_tables(console, outcome.tally, partitions)
    if not show_verdict(console, outcome.tally, outcome.publishing, outcome.all_in):
        raise typer.Exit(1)


def _columns(keys: list[str] | None, tag: str | None, value: str | None, headers: str | None) -> Columns:
    if tag is not None and value is None:
        raise InvalidSetting("--tag-column needs --tag-value", hint="say which rows get the tag")
    named = tuple(name.strip() for name in (headers or "").split(",") if name.strip())
    return Columns(
        keys=tuple(keys) if keys else FLIGHTS.keys,
        headers=FLIGHTS.headers if headers is None else named,
        tag=tag or FLIGHTS.tag,
        tag_value=FLIGHTS.tag_value if value is None else value,
        required=frozenset((*(keys or ()), *named, *([tag] if tag else ()))),
    )


@contextmanager
def _flat_errors() -> Iterator[None]:
    """Let the first of the errors of several tasks stand for all of them."""
    try:
        yield
    except BaseExceptionGroup as group:
        matching, rest = group.split(NsqError)
        if matching is None or rest is not None:
            raise
        raise first_error(matching) from None


def _on_own_cluster(flights: Sequence[Flight], partitions: int, nodes: int, console: Console) -> Outcome:
    from nsqext.broker import Cluster

    with Cluster(nodes=nodes) as cluster:
        cluster.create_topic("flights", partitions=partitions, extend=True, channels=[CHANNEL])
        console.print(f"cluster of {nodes} nodes, lookup at {', '.join(cluster.lookupd)}", highlight=False)
        with make_progress(console) as progress:
            return anyio.run(travel, Journey(flights, "flights", cluster.lookupd, progress))


async def _on_running_cluster(flights: Sequence[Flight], partitions: int, lookupd: str, console: Console) -> Outcome:
    plan = TopicPlan(fresh_name("nsqext_demo"), partitions, extend=True, channels=(CHANNEL,))
    console.print(f"topic {plan.name} at {lookupd}, deleted in the end", highlight=False)
    with make_progress(console) as progress:
        writable = progress.add_task("partitions ready (up to 75 s)", total=partitions)
        async with temporary_topic(lookupd, plan):
            progress.advance(writable, partitions)
            return await travel(Journey(flights, plan.name, lookupd, progress))
