"""``nsqext demo``: publish and consume a day of flights, and check what was received."""

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
from nsqext.cli.flights.demo_run import CHANNEL, DemoOutcome, DemoRun, run_demo
from nsqext.cli.flights.report import make_progress, show_tables, show_violations
from nsqext.cli.flights.rows import CANARY, FLIGHTS, Columns, Flight, find_flights, read_flights
from nsqext.cli.flights.temporary_topic import TopicPlan, fresh_name, temporary_topic
from nsqext.client.tasks import first_error
from nsqext.errors import InvalidSetting

__all__ = ("run",)


_Lookupd = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of nsqlookupd (HTTP), or several with commas. (default: start a cluster)"),
]
_Csv = Annotated[Path | None, typer.Option(help="CSV file to publish; its first line names the columns.")]
_Keys = Annotated[
    list[str] | None,
    typer.Option(help="Column of the key; if repeated, the first with a value. (default: tailnum, flight)"),
]
_Tag = Annotated[str | None, typer.Option(help="Column that selects the rows to tag. (default: carrier)")]
_Value = Annotated[str | None, typer.Option(help="Value of --tag-column in the rows to tag. (default: AA)")]
_Headers = Annotated[
    str | None, typer.Option(help="Columns to send as headers, with commas. (default: carrier,origin,dest)")
]
_Partitions = Annotated[int, typer.Option(min=1, max=254, help="Partitions of the topic.")]
_Nodes = Annotated[int | None, typer.Option(min=1, max=32, help="Nodes of the started cluster. (default: 3)")]


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

    Exits with 1 if a message is lost, duplicated, altered, out of order or received by the wrong consumer.
    """
    if lookupd is not None and nodes is not None:
        raise InvalidSetting("--nodes has no effect on the cluster of --lookupd", hint="give only one of them")
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
    show_tables(console, outcome.results, partitions)
    if not show_violations(console, outcome):
        raise typer.Exit(1)


def _columns(keys: list[str] | None, tag: str | None, value: str | None, headers: str | None) -> Columns:
    if tag is not None and value is None:
        raise InvalidSetting("--tag-column needs --tag-value", hint="give the value of the rows to tag")
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
    """Replace a group of errors by its first error."""
    try:
        yield
    except BaseExceptionGroup as group:
        matching, rest = group.split(NsqError)
        if matching is None or rest is not None:
            raise
        raise first_error(matching) from None


def _on_own_cluster(flights: Sequence[Flight], partitions: int, nodes: int, console: Console) -> DemoOutcome:
    from nsqext.broker import Cluster

    with Cluster(nodes=nodes) as cluster:
        cluster.create_topic("flights", partitions=partitions, extend=True, channels=[CHANNEL])
        console.print(f"cluster of {nodes} nodes, lookup at {', '.join(cluster.lookupd)}", highlight=False)
        with make_progress(console) as progress:
            return anyio.run(run_demo, DemoRun(flights, "flights", cluster.lookupd, progress))


async def _on_running_cluster(
    flights: Sequence[Flight], partitions: int, lookupd: str, console: Console
) -> DemoOutcome:
    plan = TopicPlan(fresh_name("nsqext_demo"), partitions, extend=True, channels=(CHANNEL,))
    console.print(f"topic {plan.name} at {lookupd}, deleted at the end", highlight=False)
    with make_progress(console) as progress:
        writable = progress.add_task("partitions ready (up to 2 min)", total=partitions)
        async with temporary_topic(lookupd, plan):
            progress.advance(writable, partitions)
            return await run_demo(DemoRun(flights, plan.name, lookupd, progress))
