"""Publishes the messages of one task: one chunk is published while the next one is built."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from itertools import groupby
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
from attrs import define

from nsqext import Producer
from nsqext.errors import (
    BatchFailed,
    DeliveryUnknown,
    InvalidInput,
    NsqError,
    PublishFailed,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.sync.loop import call, shared_loop

if TYPE_CHECKING:
    from nsqext.spark.options import ClientConfig
    from nsqext.spark.write.row_mapper import Chunk, Group, Target
    from nsqext.types import Receipt, TopicMeta

__all__ = ("Publisher", "Tally", "publish_chunks", "wait_logging")

logger: logging.Logger = logging.getLogger("nsqext.spark")

Tallies = dict[tuple[str, int], "Tally"]

_LOG_INTERVAL = 5.0
"""Seconds without an acknowledgement between two log records."""


@define
class Tally:
    """Messages that were published to a partition.

    Attributes:
        count: number of messages.
        first_offset: lowest byte offset in the partition's queue; -1 if unknown.
        last_offset: highest byte offset.
        first_id: lowest internal id; 0 if unknown.
        last_id: highest internal id.
    """

    count: int = 0
    first_offset: int = -1
    last_offset: int = -1
    first_id: int = 0
    last_id: int = 0

    def add(self, receipts: Sequence[Receipt]) -> None:
        """Count stored messages."""
        self.count += len(receipts)
        offsets = [offset for offset in map(attrgetter("offset"), receipts) if offset is not None]
        if offsets:
            lowest = min(offsets)
            self.first_offset = lowest if self.first_offset < 0 else min(self.first_offset, lowest)
            self.last_offset = max(self.last_offset, *offsets)
        ids = [number for number in map(attrgetter("message_id"), receipts) if number]
        if ids:
            self.first_id = min(self.first_id or ids[0], *ids)
            self.last_id = max(self.last_id, *ids)


class Publisher:
    """Publishes chunks; an asynchronous context manager.

    Args:
        config: how the servers are reached.
        task: number of the task's partition, for error messages.

    Attributes:
        tallies: published messages by topic and partition.
    """

    def __init__(self, config: ClientConfig, task: int) -> None:
        self.tallies: Tallies = {}
        self._task = task
        self._producer = Producer(config.lookupd, **config.writing())

    async def __aenter__(self) -> Self:
        await self._producer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._producer.__aexit__(kind, error, trace)

    async def meta(self, topic: str) -> TopicMeta:
        """Return the meta of a topic; raises what `nsqext.Producer.meta` raises."""
        return await self._producer.meta(topic)

    async def publish(self, chunk: Chunk) -> None:
        """Publish a chunk; returns after every message is stored.

        Raises:
            NsqError: the error of the first message that was not stored; other messages may be stored.
        """
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
        topic, partition = target
        try:
            receipts = await self._producer.publish_many(topic, group.messages, partition=partition)
            for number, found in groupby(receipts, attrgetter("partition")):
                self.tallies.setdefault((topic, number), Tally()).add(list(found))
        except BatchFailed as error:
            for row, outcome in zip(group.rows, error.outcomes, strict=True):
                if isinstance(outcome, NsqError):
                    failures[row] = outcome
                    break
        except NsqError as error:
            index = error.index if isinstance(error, InvalidInput) else None
            if index is not None:  # rows have other numbers
                error.message = error.message.removeprefix(f"message {index}: ")
            failures[group.rows[index or 0]] = error

    def _named(self, row: int, error: NsqError) -> NsqError:
        """Return an error that names the row."""
        named = (InvalidInput, DeliveryUnknown, TopicNotFound, TopicNotReady)
        kind = type(error) if isinstance(error, named) else PublishFailed
        where = f"row {row} of Spark partition {self._task}"
        failed = kind(
            f"{where}: {error.message}",
            topic=error.topic,
            partition=error.partition,
            node=error.node,
            hint=error.hint,
        )
        failed.attempts = error.attempts
        failed.__cause__ = error
        return failed


def publish_chunks(
    config: ClientConfig, task: int, chunks_of: Callable[[Callable[[str], TopicMeta]], Iterable[Chunk]]
) -> Tallies:
    """Publish the messages of a task; returns after every message is stored.

    One chunk is published while the next one is built. Chunks are published one after the other: the messages of a key
    keep their order.

    Args:
        config: how the servers are reached.
        task: number of the task's partition, for error messages.
        chunks_of: returns the chunks; its argument returns the meta of a topic.

    Raises:
        NsqError: a message is invalid or was not stored.
    """
    publisher = Publisher(config, task)
    with shared_loop.entered() as portal, portal.wrap_async_context_manager(publisher):
        pending: Future[None] | None = None
        try:
            for chunk in chunks_of(lambda topic: call(portal, "sink", publisher.meta, topic)):
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


def wait_logging(pending: Future[None], task: int) -> None:
    """Wait until a chunk is published, and log that it takes long: the producer repeats failed publishes silently."""
    began = time.monotonic()
    while not wait([pending], timeout=_LOG_INTERVAL).done:
        logger.warning(
            "Spark partition %d: messages were not acknowledged for %.0f s; the producer tries again",
            task,
            time.monotonic() - began,
        )
    pending.result()
