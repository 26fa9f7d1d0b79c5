"""``nsqext replay``: publish the messages in files of `nsqext record`."""

from __future__ import annotations

import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import anyio
import orjson
from anyio.to_thread import run_sync
from attrs import define, field, frozen

from nsqext.cli.command import command, examples
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.message_files import Entry, files_in, outgoing_message, read_entries, write_synced
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidInput, InvalidSetting, NsqError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nsqext import Producer


_TARGET = "#target"  # in a progress file, besides the names of files


@define
class Progress:
    """Progress of a replay, in an atomically replaced file."""

    path: Path | None  #: None without a file
    target: str  #: where the messages are published
    lines: dict[str, int] = field(factory=dict)

    @classmethod
    def load(cls, path: Path | None, target: str) -> Progress:
        """Load the file, which must be of this target; without a file, start at the beginning.

        Raises:
            OSError: progress could not be saved.
        """
        if path is None:
            return cls(path, target)
        with tempfile.TemporaryFile(dir=path.parent):  # before anything is published
            pass
        if not path.exists():
            return cls(path, target)
        try:
            lines = orjson.loads(path.read_bytes())
        except ValueError as error:
            raise InvalidInput(f"{path} is not a progress file: {error}") from error
        before = lines.pop(_TARGET, target) if isinstance(lines, dict) else target
        if before != target:
            raise InvalidSetting(
                f"{path} is the progress of messages for {before}, and not for {target}",
                hint="give the same addresses, topic and files to continue, or delete it to begin again",
            )
        if not isinstance(lines, dict) or not all(isinstance(number, int) for number in lines.values()):
            raise InvalidInput(f"{path} is not a progress file", hint="delete it to begin again")
        return cls(path, target, lines)

    def save(self, last: Entry) -> None:
        self.lines[last.file] = last.number
        if self.path is not None:
            write_synced(self.path, orjson.dumps({_TARGET: self.target, **self.lines}))


@frozen
class Plan:
    """How recorded messages are published."""

    topic: Annotated[str | None, Option(help="Publish to this topic instead of the recorded topic.")] = None
    speed: Annotated[
        float, Option(min=0, help="Factor of the recorded speed: 2 is twice as fast; 0 makes no pauses.")
    ] = 1.0
    keep_partitions: Annotated[
        bool, Option("--keep-partitions", help="Publish messages without key to the recorded partition.")
    ] = False
    batch: Annotated[int, Option(min=1, help="Messages in one publish.")] = 500


@examples(
    "nsqext replay backup/ --topic orders_copy --progress copy.progress",
    "nsqext replay backup/orders.2026-05-01T12-00-00.000000Z.jsonl.gz --speed 0",
    "nsqext replay backup/ --speed 10 --keep-partitions",
)
@command
async def run(
    connection: ServerAccess,
    paths: Annotated[list[Path], Argument(help="Files, or folders of them.")],
    progress: Annotated[Path | None, Option(help="File for the progress: a later replay continues from it.")] = None,
    plan: Plan = Plan(),
) -> None:
    """Publish recorded messages with headers, tags, keys and trace ids, in order.

    With --progress, a killed replay continues: it loses no message, and publishes at most one batch twice. Messages
    without a key are distributed over the partitions.
    """
    files = files_in(paths)
    if progress is not None and progress.is_dir():
        raise InvalidSetting(f"--progress {progress} is a folder", hint="give a file")
    target = f"{plan.topic or 'the recorded topics'} at {connection.cluster()}"
    await _replay(connection, files, plan, Progress.load(progress, target))


class ReadableEntries:
    """An iterator over messages that ends before the first that cannot be read.

    Attributes:
        error: why it cannot be read.
    """

    def __init__(self, entries: Iterator[Entry]) -> None:
        self.error: NsqError | None = None
        self._entries = entries

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Entry:
        try:
            return next(self._entries)
        except InvalidInput as error:
            error.hint = error.hint or "the messages before it are published"
            self.error = error
            raise StopIteration from None


class _DueBatches:
    """The messages of a plan, when they are due."""

    def __init__(self, entries: Iterator[Entry], plan: Plan) -> None:
        self._entries = entries
        self._plan = plan
        self._began = time.monotonic()
        self._first: int | None = None  # when the first message was stored, in nanoseconds
        self._next: Entry | None = None

    async def next(self) -> list[Entry]:
        """Wait for the next message; return it and those behind it in its file that are due too, none at the end."""
        first = self._next = self._next or await run_sync(next, self._entries, None)
        if first is None:
            return []
        if (pause := self._pause(first)) > 0:
            with waits.waiting(f"the recorded time of the next message, in {pause:.1f} s"):
                await anyio.sleep(pause)
        due = [first]
        self._next = next(self._entries, None)
        while self._next is not None and self._next.file == first.file and len(due) < self._plan.batch:
            if self._pause(self._next) > 0:
                break
            due.append(self._next)
            self._next = next(self._entries, None)
        return due

    def _pause(self, entry: Entry) -> float:
        """Return the seconds until a message is due; negative when late."""
        stored = entry.record.get("timestamp")
        if not self._plan.speed or not isinstance(stored, int):
            return 0.0
        if self._first is None:
            self._first = stored
        return (stored - self._first) / 1e9 / self._plan.speed - (time.monotonic() - self._began)


async def _replay(connection: ServerAccess, files: Sequence[Path], plan: Plan, progress: Progress) -> None:
    count, skipped = 0, sum(progress.lines.get(path.name, 0) for path in files)
    entries = ReadableEntries(entry for path in files for entry in read_entries(path, progress.lines.get(path.name, 0)))
    failure: NsqError | None = None
    async with connection.producer() as producer:
        with waits.waiting("a node to connect to"):
            await producer.ping()  # connect before the first message is due
        batches = _DueBatches(entries, plan)
        try:
            while due := await batches.next():
                await publish_entries(producer, due, plan)
                await run_sync(progress.save, due[-1])
                count += len(due)
        except NsqError as error:
            failure = error
    connection.show(
        {"replayed": count, "skipped": skipped, "files": len(files)},
        f"{counted(count, 'message')} replayed" + (f", {skipped} skipped" if skipped else ""),
    )
    if failure := failure or entries.error:
        raise failure


async def publish_entries(producer: Producer, due: Sequence[Entry], plan: Plan) -> None:
    """Publish messages in order, consecutive messages of one topic and partition together."""

    def target(entry: Entry) -> tuple[str, int | None]:
        topic = plan.topic or entry.record.get("topic")
        if not isinstance(topic, str):
            raise InvalidInput(f"{entry.file}, line {entry.number} has no topic", hint="give --topic")
        keep = plan.keep_partitions and entry.record.get("key") is None
        partition = entry.record.get("partition") if keep else None
        return topic, partition if isinstance(partition, int) else None

    for (topic, partition), group in groupby(due, target):
        with waits.waiting(f"{topic} to store messages"):
            await _publish_group(producer, topic, list(group), partition)


async def _publish_group(producer: Producer, topic: str, entries: Sequence[Entry], partition: int | None) -> None:
    messages = []
    for entry in entries:
        try:
            messages.append(outgoing_message(entry.record))
        except InvalidInput as error:
            raise _named(error, entry) from error.__cause__
    try:
        await producer.publish_many(topic, messages, partition=partition)
    except InvalidInput as error:
        if error.index is None:
            raise
        raise _named(error, entries[error.index]) from error.__cause__


def _named(error: InvalidInput, entry: Entry) -> InvalidInput:
    error.message = f"{entry.file}, line {entry.number}: {error.message}"
    return error
