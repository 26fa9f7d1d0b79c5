"""``nsqext import``: publish the messages of a file."""

from __future__ import annotations

from hashlib import file_digest
from itertools import islice
from pathlib import Path
from typing import Annotated

from anyio.to_thread import run_sync

from nsqext.cli.command import command, examples
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.files.replay import Plan, Progress, ReadableEntries, publish_entries
from nsqext.cli.files.tables import entries_of, format_of
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidInput


def _content(file: Path) -> str:
    """Return a text by which a file is recognized: the progress of another one would leave out its first messages."""
    with file.open("rb") as opened:
        checksum = file_digest(opened, "sha256").hexdigest()
    return f"from {file.stat().st_size} bytes with the checksum {checksum[:16]}"


@examples("nsqext import orders.parquet orders_copy", "nsqext import orders.csv orders_copy --keep-partitions")
@command
async def run(
    connection: ServerAccess,
    file: Annotated[Path, Argument(help="FILE.parquet, FILE.csv or FILE.jsonl.")],
    topic: Annotated[str, Argument(help="The topic to publish to.")],
    keep_partitions: Annotated[
        bool, Option("--keep-partitions", help="Publish messages without key to their partition of the file.")
    ] = False,
    batch: Annotated[int, Option(min=1, help="Messages in one publish.")] = 500,
) -> None:
    """Publish the messages of a file of `nsqext export` in its order, with headers, tags, keys and trace ids.

    Extend header and body are published byte for byte. A killed import continues when it is run again, from
    FILE.TOPIC.progress, unless the file has changed: no message is lost, and at most one batch is published twice.
    """
    format_of(file)
    if not file.is_file():
        raise InvalidInput(f"{file} is not a file", hint="nsqext export writes such files")
    target = f"{topic} at {connection.cluster()}, {await run_sync(_content, file)}"
    progress = Progress.load(file.with_name(f"{file.name}.{topic}.progress"), target)
    skipped = count = progress.lines.get(file.name, 0)
    entries = ReadableEntries(entries_of(file, skipped))
    plan = Plan(topic=topic, speed=0.0, keep_partitions=keep_partitions, batch=batch)
    async with connection.producer() as producer:
        while due := await run_sync(lambda: list(islice(entries, batch))):
            with waits.waiting(f"{topic} to store messages"):
                await publish_entries(producer, due, plan)
            await run_sync(progress.save, due[-1])
            count += len(due)
            connection.show({"imported": count}, f"{counted(count, 'message')} published")
    if entries.error is not None:
        raise entries.error
    if progress.path is not None:
        progress.path.unlink(missing_ok=True)
    record = {"topic": topic, "messages": count, "resumed": skipped}
    text = f"{counted(count, 'message')} imported into {topic}"
    connection.show(record, text + (f", {skipped} of them before" if skipped else ""))
