"""Publish a task's messages: a chunk is published while the next is built."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import anyio
from attrs import asdict

from nsqext import OutgoingMessage, Producer
from nsqext.errors import (
    BatchFailed,
    DeliveryUnknown,
    InvalidInput,
    NsqError,
    PublishFailed,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.spark.write.row_ids import row_name
from nsqext.spark.write.row_mapper import Group, RowMapper
from nsqext.sync.loop import OpenLoop, call

if TYPE_CHECKING:
    import pyarrow as pa

    from nsqext.spark.cluster.client_config import ClientConfig
    from nsqext.spark.options import SinkOptions
    from nsqext.spark.write.row_ids import RowIds
    from nsqext.spark.write.row_mapper import Chunk, Target
    from nsqext.types import Receipt, TopicMeta

logger: logging.Logger = logging.getLogger("nsqext.spark")

Tallies = Counter[tuple[str, int | None]]
"""Published messages by topic and partition."""
Describe = Callable[[int, NsqError, Mapping[str, Any]], "tuple[Target, bytes | OutgoingMessage, int]"]
"""Makes the message that describes a bad row from its number, the error and the row by column."""

_partition_of = attrgetter("partition")
LOG_INTERVAL: float = 5.0
"""Seconds without an acknowledgement between log records."""


class RowPublisher:
    def __init__(self, config: ClientConfig, task: int | None, describe: Describe | None = None) -> None:
        self.tallies: Tallies = Counter()
        self._task = task
        # makes the message for a row that cannot be published; None raises the row's error
        self._describe = describe
        self.producer: Producer = Producer(config.lookupd, **config.keywords("write"))

    async def publish(self, chunk: Chunk) -> None:
        """Publish a chunk; raise the error of the first message that was not stored; others may be stored."""
        failures: dict[int, NsqError] = {}
        if len(chunk.groups) == 1:
            for target, group in chunk.groups.items():
                await self._publish(target, group, failures)
        else:
            async with anyio.create_task_group() as tasks:
                for target, group in chunk.groups.items():
                    tasks.start_soon(self._publish, target, group, failures)
        if failures:
            row = min(failures)
            raise self._named(row, failures[row])

    async def _publish(self, target: Target, group: Group, failures: dict[int, NsqError]) -> None:
        left: Group | None = group
        while left is not None and left.rows:
            left = await self._publish_until_bad(target, left, failures)

    async def _publish_until_bad(self, target: Target, group: Group, failures: dict[int, NsqError]) -> Group | None:
        """Publish a group, up to its first bad row, which is described; return what is behind it, None at the end."""
        topic, partition = target
        try:
            self._count(topic, await self.producer.publish_many(topic, group.messages, partition=partition))
        except BatchFailed as error:
            self._count(topic, [outcome for outcome in error.outcomes if not isinstance(outcome, NsqError)])
            for index, outcome in enumerate(error.outcomes):
                if isinstance(outcome, NsqError) and not await self._describe_row(
                    target, group, index, outcome, failures
                ):
                    break
        except InvalidInput as error:
            bad, error.index = error.index or 0, None
            error.message = error.message.removeprefix(f"message {bad}: ")  # rows have other numbers
            if await self._describe_row(target, group, bad, error, failures):
                before = group.part(0, bad)
                await self._publish(target, before, failures)
                if failures.keys().isdisjoint(before.rows):
                    return group.part(bad + 1, len(group.rows))
        except NsqError as error:
            failures[group.rows[0]] = error
        return None

    def _count(self, topic: str, receipts: Iterable[Receipt]) -> None:
        for partition, count in Counter(map(_partition_of, receipts)).items():
            self.tallies[topic, partition] += count

    async def _describe_row(
        self, target: Target, group: Group, index: int, error: NsqError, failures: dict[int, NsqError]
    ) -> bool:
        """Publish the description of an unpublishable row; return whether that is possible."""
        row, message = group.rows[index], group.messages[index]
        if self._describe is not None and isinstance(error, InvalidInput):
            fields = asdict(message) if isinstance(message, OutgoingMessage) else {"body": message}
            fields = {"value": fields.pop("body"), "topic": target[0], "partition": target[1], **fields}
            where, description, _ = self._describe(row, error, fields)
            if where[0] != target[0]:
                await self._publish(where, Group([row], [description]), failures)
                return row not in failures
        failures[row] = error
        return False

    def _named(self, row: int, error: NsqError) -> NsqError:
        named = (InvalidInput, DeliveryUnknown, TopicNotFound, TopicNotReady)
        kind = type(error) if isinstance(error, named) else PublishFailed
        failed = kind(f"{row_name(row, self._task)}: {error.message}", hint=error.hint, **error.where)
        failed.attempts = error.attempts
        failed.__cause__ = error
        return failed


def publish_chunks(
    config: ClientConfig,
    task: int | None,
    chunks_of: Callable[[Callable[[str], TopicMeta]], Iterable[Chunk]],
    describe: Describe | None = None,
) -> Tallies:
    """Publish a task's messages; return after every message is stored.

    Chunks are published one after another: messages of a key keep their order. ``chunks_of`` receives a function that
    returns a topic's meta.
    """
    publisher = RowPublisher(config, task, describe)
    with OpenLoop() as portal, portal.wrap_async_context_manager(publisher.producer):
        pending: Future[None] | None = None
        try:
            for chunk in chunks_of(lambda topic: call(portal, "sink", publisher.producer.meta, topic)):
                if pending is not None:
                    wait_logging(pending, task)
                pending = portal.start_task_soon(publisher.publish, chunk)
            if pending is not None:
                wait_logging(pending, task)
        except BaseException:
            if pending is not None:
                pending.cancel()
            raise
    return publisher.tallies


def _place(task: int | None) -> str:
    return "the write" if task is None else f"Spark partition {task}"


def wait_logging(pending: Future[None], task: int | None) -> None:
    """Wait until a chunk is published; log a long wait, because the producer's retries are silent."""
    began = time.monotonic()
    while not wait([pending], timeout=LOG_INTERVAL).done:
        logger.warning(
            "%s: messages were not acknowledged for %.0f s; the producer tries again",
            _place(task),
            time.monotonic() - began,
        )
    pending.result()


def publish_rows(
    options: SinkOptions, columns: tuple[str, ...], ids: RowIds, batches: Iterator[pa.RecordBatch]
) -> Tallies:
    """Publish a task's rows; return the published messages by topic and partition. Errors name the row's number."""
    rate, bad = options.max_rows_per_second, options.bad_rows_topic
    mapper = RowMapper(options, columns, ids)

    def chunks(meta: Callable[[str], TopicMeta]) -> Iterable[Chunk]:
        found = mapper.chunks(batches, meta)
        return found if rate is None else paced(found, rate)

    tallies = publish_chunks(options.client, ids.partition, chunks, None if bad is None else mapper.describe)
    if found := sum(count for (topic, _), count in tallies.items() if topic == bad):
        logger.warning("%s: %d rows could not be published; %s describes them", _place(ids.partition), found, bad)
    return tallies


def paced(
    chunks: Iterable[Chunk],
    rate: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Chunk]:
    """Delay chunks so that their messages do not exceed a rate."""
    due = clock()
    for chunk in chunks:
        now = clock()
        if due > now:
            sleep(due - now)
        due = max(due, now) + chunk.count / rate
        yield chunk
