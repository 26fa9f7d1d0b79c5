"""Output of the demo: progress while it runs, tables at its end."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from nsqext.cli.flights.demo_run import DemoOutcome
from nsqext.cli.flights.results import DemoResults

__all__ = ("make_progress", "show_tables", "show_violations")


def make_progress(console: Console) -> Progress:
    """Return a progress display with a line for each task."""
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def show_tables(console: Console, results: DemoResults, partitions: int) -> None:
    """Print the numbers of receipts and received messages, by partition, then by consumer and tag."""
    console.print(_by_partition(results, partitions))
    console.print(_by_consumer(results))


def _by_partition(results: DemoResults, partitions: int) -> Table:
    table = Table(title="By partition", title_justify="left", show_footer=True)
    lines = results.partitions(partitions)
    table.add_column("partition", footer="all")
    table.add_column("leader")
    table.add_column("receipts", justify="right", footer=str(sum(line.receipts for line in lines)))
    table.add_column("received", justify="right", footer=str(sum(line.received for line in lines)))
    table.add_column("last offset", justify="right")
    for line in lines:
        offset = "none" if line.last_offset < 0 else str(line.last_offset)
        table.add_row(
            str(line.partition), ", ".join(line.nodes) or "unknown", str(line.receipts), str(line.received), offset
        )
    return table


def _by_consumer(results: DemoResults) -> Table:
    tags = sorted({flight.tag for flight in results.flights}, key=lambda tag: tag or "")
    consumers = list(results.consumers.values())
    table = Table(title="By consumer and tag", title_justify="left", show_footer=True)
    table.add_column("consumer", footer="all")
    for tag in tags:
        count = sum(consumer.received[tag] for consumer in consumers)
        table.add_column(f"tag {tag}" if tag else "without tag", justify="right", footer=str(count))
    table.add_column("received", justify="right", footer=str(sum(consumer.total for consumer in consumers)))
    table.add_column("expected", justify="right", footer=str(len(results.flights)))
    for consumer in consumers:
        counts = [str(consumer.received[tag]) for tag in tags]
        table.add_row(consumer.name, *counts, str(consumer.total), str(consumer.expected))
    return table


def show_violations(console: Console, outcome: DemoOutcome) -> bool:
    """Print the number of violations by kind, and the rates; return whether there are no violations."""
    results, violations = outcome.results, outcome.results.violations()
    table = Table(title="Violations", title_justify="left")
    table.add_column("messages")
    table.add_column("count", justify="right")
    for kind, count in violations.items():
        table.add_row(kind, f"[{'red' if count else 'green'}]{count}[/]")
    console.print(table)
    for verb, count, seconds in (
        ("published", results.acknowledged, outcome.publish_seconds),
        ("received and finished", results.total, outcome.receive_seconds),
    ):
        console.print(f"{verb} {count:,} in {seconds:.2f} s, {_rate(count, seconds)}")
    good = not any(violations.values())
    console.print("[green]no violations[/]" if good else "[red]violations found[/]")
    return good


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "at once"
