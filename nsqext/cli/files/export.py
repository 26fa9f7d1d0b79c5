"""``nsqext export``: write the stored messages of a topic to a file, once each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from attrs import frozen

from nsqext.cli.command import Topic, command, examples
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.files.tables import SCHEMA, writer_of
from nsqext.cli.message_files import synchronize, write_synced
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.client.settings import settings_for, shared_settings
from nsqext.errors import DataLoss, InvalidInput, InvalidSetting

if TYPE_CHECKING:
    import pyarrow as pa

_PART_BYTES = 64 << 20


@frozen
class _Part:
    """Messages of a partition in a file of the progress."""

    path: Path
    partition: int
    start: int
    end: int  #: behind the last message

    @classmethod
    def of(cls, path: Path) -> _Part:
        partition, start, end = map(int, path.stem.split("-"))
        return cls(path, partition, start, end)


class ExportProgress:
    """The complete parts of an export, in a folder beside its file.

    The first run fixes the offsets. A part is written under another name, synchronized and renamed: the next run
    continues behind the complete parts.
    """

    def __init__(self, file: Path) -> None:
        self.folder: Path = file.with_name(f"{file.name}.progress")
        self._plan = self.folder / "plan.json"

    def begin(
        self, topic: str, cluster: str, bounds: Callable[[], Mapping[int, tuple[int, int]]]
    ) -> dict[int, tuple[int, int]]:
        """Return the offsets by partition from the first run that has written a part.

        Parts that do not follow each other from there are deleted.
        """
        begins = not self._plan.exists()
        if begins:
            partitions = {str(number): found for number, found in bounds().items()}
            # behind what may fail: beside a folder of progress, an existing file is replaced
            self.folder.mkdir(parents=True, exist_ok=True)
            for part in self.parts():  # of a plan that was deleted
                part.path.unlink()
            write_synced(self._plan, orjson.dumps({"topic": topic, "cluster": cluster, "partitions": partitions}))
        try:
            plan = orjson.loads(self._plan.read_bytes())
            found = {int(number): (start, end) for number, (start, end) in plan["partitions"].items()}
            source = plan["topic"], plan["cluster"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{self._plan} is damaged: {error!r}", hint=f"delete {self.folder}") from error
        if source != (topic, cluster):
            raise InvalidSetting(
                f"{self.folder} is the progress of an export of {' at '.join(source)}",
                hint="give another file, or delete it",
            )
        behind = {number: start for number, (start, _) in found.items()}
        for part in self.parts():
            if behind.get(part.partition) == part.start:
                behind[part.partition] = part.end
            else:  # a run was killed while it deleted them
                part.path.unlink()
        if begins or self.parts():
            return found
        self._plan.unlink()  # the topic may have been created again: no part says which it was
        return self.begin(topic, cluster, bounds)

    def parts(self) -> list[_Part]:
        """Return the complete parts, in the order of partitions and offsets."""
        return sorted(
            (_Part.of(path) for path in self.folder.glob("*-*-*.parquet")), key=lambda one: (one.partition, one.start)
        )

    def last(self) -> dict[int, _Part]:
        """Return the last complete part of each partition."""
        return {part.partition: part for part in self.parts()}

    def add(self, partition: int, batches: list[pa.RecordBatch]) -> int:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_batches(batches)
        offsets = table.column("offset")
        start, end = offsets[0].as_py(), offsets[-1].as_py() + 1
        temporary = self.folder / "unfinished"
        pq.write_table(table, temporary)
        synchronize(temporary)
        temporary.replace(self.folder / f"{partition:04d}-{start:020d}-{end:020d}.parquet")
        synchronize(self.folder)
        return int(end)


@examples(
    "nsqext export orders orders.parquet",
    "nsqext export orders orders.jsonl",
    "nsqext import orders.parquet orders_copy",
)
@command
def run(
    connection: ServerAccess,
    topic: Topic,
    file: Annotated[Path, Argument(help="FILE.parquet, FILE.csv or FILE.jsonl; it must not exist.")],
    rows: Annotated[int, Option(min=1, help="Messages after which the progress is written.")] = 100_000,
) -> None:
    """Write the messages that a topic of the redesigned NSQ has now to a file, by partition and offset, once each.

    A killed export continues when it is run again: its parts are in FILE.progress until the file is complete. It ends
    with an error if messages of its range are not retained any more, or the topic was created again meanwhile. For the
    original NSQ, which keeps no log, use `nsqext record`.
    """
    writer = writer_of(file)
    progress = ExportProgress(file)
    if file.exists() and not progress.folder.exists():
        raise InvalidSetting(f"{file} exists", hint="give another file, or delete it")
    import nsqext.arrow

    lookupd = connection.lookup()
    settings: dict[str, Any] = settings_for(shared_settings(), connection.load().values)
    with waits.waiting(f"messages of {topic}"):
        ranges = progress.begin(topic, connection.cluster(), lambda: nsqext.arrow.bounds(topic, lookupd, **settings))
        total = sum(end - start for start, end in ranges.values())
        last = progress.last()
        done = {partition: part.end for partition, part in last.items()}
        count = sum(part.end - part.start for part in progress.parts())
        resumed = count
        if 0 < count < total:
            _check_topic(topic, lookupd, settings, last.values(), progress.folder)
        for partition, (start, end) in sorted(ranges.items()):
            start = done.get(partition, start)
            if start == end:
                continue
            reader = nsqext.arrow.read(
                {topic: [partition]},
                lookupd,
                starting_offsets={topic: {partition: start}},
                ending_offsets={topic: {partition: end}},
                columns=SCHEMA,
                decompress=False,
                **settings,
            )
            for batches in _grouped(reader, rows):
                behind = progress.add(partition, batches)
                count += behind - start
                start = behind
                connection.show({"exported": count, "of": total}, f"{count} of {counted(total, 'message')} read")
    temporary = file.with_name(f"{file.name}.new")
    writer(temporary, [part.path for part in progress.parts()])
    synchronize(temporary)
    temporary.replace(file)
    synchronize(file.parent)
    shutil.rmtree(progress.folder)
    record = {"topic": topic, "file": str(file), "messages": count, "resumed": resumed}
    connection.show(record, f"{counted(count, 'message')} of {topic} exported to {file}")


def _check_topic(topic: str, lookupd: Any, settings: dict[str, Any], parts: Iterable[_Part], folder: Path) -> None:
    """Raise DataLoss unless the topic has the last message of each part: it may have been deleted and created again."""
    import pyarrow.parquet as pq

    import nsqext.arrow

    columns = ("message_id", "timestamp")
    retained = nsqext.arrow.bounds(topic, lookupd, **settings)
    for part in parts:
        first, end = retained.get(part.partition, (0, 0))
        if first >= part.end:
            continue  # it was removed
        same = end >= part.end
        if same:
            found = nsqext.arrow.read(
                {topic: [part.partition]},
                lookupd,
                starting_offsets={topic: {part.partition: part.end - 1}},
                ending_offsets={topic: {part.partition: part.end}},
                columns=columns,
                **settings,
            ).read_all()
            exported = pq.read_table(part.path, columns=list(columns)).to_pylist()
            same = found.to_pylist() == exported[-1:]
        if not same:
            raise DataLoss(
                f"the topic has another message {part.end - 1} than when its export began: it was created again, or "
                "its leader has lost messages",
                topic=topic,
                partition=part.partition,
                hint=f"delete {folder} to begin again",
            )


def _grouped(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    found: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        while batch.num_rows:
            head = batch.slice(0, rows - count)
            batch = batch.slice(head.num_rows)
            found.append(head)
            count, size = count + head.num_rows, size + head.nbytes
            if count >= rows or size >= _PART_BYTES:
                yield found
                found, count, size = [], 0, 0
    if found:
        yield found
