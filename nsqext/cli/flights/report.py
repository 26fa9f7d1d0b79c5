"""What the demo shows: progress while it runs, tables at its end."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from nsqext.cli.flights.tally import Tally

__all__ = ("make_progress", "show_tables", "show_verdict")


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


def show_tables(console: Console, tally: Tally, partitions: int) -> None:
    """Print what was stored and received, by partition, then by consumer and tag."""
    console.print(_by_partition(tally, partitions))
    console.print(_by_consumer(tally))


def _by_partition(tally: Tally, partitions: int) -> Table:
    table = Table(title="By partition", title_justify="left", show_footer=True)
    lines = tally.partitions(partitions)
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


def _by_consumer(tally: Tally) -> Table:
    tags = sorted({flight.tag for flight in tally.flights}, key=lambda tag: tag or "")
    sides = list(tally.sides.values())
    table = Table(title="By consumer and tag", title_justify="left", show_footer=True)
    table.add_column("consumer", footer="all")
    for tag in tags:
        count = sum(side.received[tag] for side in sides)
        table.add_column(f"tag {tag}" if tag else "without tag", justify="right", footer=str(count))
    table.add_column("received", justify="right", footer=str(sum(side.total for side in sides)))
    table.add_column("meant for it", justify="right", footer=str(len(tally.flights)))
    for side in sides:
        counts = [str(side.received[tag]) for tag in tags]
        table.add_row(side.name, *counts, str(side.total), str(side.expected))
    return table


def show_verdict(console: Console, tally: Tally, publishing: float, all_in: float) -> bool:
    """Print what may have gone wrong, each with its count, and the rates; returns whether all went well.

    Args:
        console: where to.
        tally: the book.
        publishing: seconds from the first publish to the last receipt.
        all_in: seconds from the first publish to the last arrival.
    """
    verdict = tally.verdict()
    table = Table(title="What may go wrong", title_justify="left")
    table.add_column("messages that were")
    table.add_column("count", justify="right")
    for what, count in verdict.items():
        table.add_row(what, f"[{'red' if count else 'green'}]{count}[/]")
    console.print(table)
    console.print(f"published {tally.confirmed:,} in {publishing:.2f} s, {_rate(tally.confirmed, publishing)}")
    console.print(f"received and finished {tally.total:,} after {all_in:.2f} s, {_rate(tally.total, all_in)}")
    good = not any(verdict.values())
    console.print("[green]all is well[/]" if good else "[red]something is wrong[/]")
    return good


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:,.0f}/s" if seconds > 0 else "at once"
