"""Publishing the messages of one task: a chunk at a time, acknowledged to the end, while the next one is made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
from attrs import define
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from nsqext import Lookup, Producer
from nsqext.errors import (
    BatchFailed,
    DeliveryUnknown,
    InvalidInput,
    LookupFailed,
    NsqError,
    PublishFailed,
    TopicNotFound,
)
from nsqext.sync.loop import call, shared_loop
from nsqext.types import Receipt, TopicMeta

if TYPE_CHECKING:
    from nsqext.spark.options import Access
    from nsqext.spark.write.row_mapper import Assignment, Chunk, Group

__all__ = ("Publisher", "Tally", "publish_chunks")

T = TypeVar("T")

Tallies = dict[tuple[str, int], "Tally"]


@define
class Tally:
    """What was published to a partition.

    Attributes:
        count: messages.
        first_offset: lowest byte offset in the partition's queue; -1 where no server told.
        last_offset: highest one.
        first_id: lowest internal id; 0 where no server told.
        last_id: highest one.
    """

    count: int = 0
    first_offset: int = -1
    last_offset: int = -1
    first_id: int = 0
    last_id: int = 0

    def add(self, receipt: Receipt) -> None:
        """Count a message that was stored."""
        self.count += 1
        if receipt.offset is not None:
            self.first_offset = receipt.offset if self.first_offset < 0 else min(self.first_offset, receipt.offset)
            self.last_offset = max(self.last_offset, receipt.offset)
        if receipt.message_id:
            self.first_id = min(self.first_id, receipt.message_id) if self.first_id else receipt.message_id
            self.last_id = max(self.last_id, receipt.message_id)


class Publisher:
    """Publishes chunks; an asynchronous context manager.

    Args:
        access: how the servers are reached.
        task: number of the task's partition, for messages of errors.

    Attributes:
        tallies: what was published, by topic and partition.
    """

    def __init__(self, access: Access, task: int) -> None:
        self.tallies: Tallies = {}
        self._task = task
        options = access.producer()
        lookup = Lookup(access.lookupd, options=options.lookup)
        self._directory = lookup.metadata
        self._producer = Producer(lookup, options=options)
        self._patience = options.timeout

    async def __aenter__(self) -> Self:
        await self._producer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._producer.__aexit__(kind, error, trace)

    async def meta(self, topic: str) -> TopicMeta:
        """Return what lookup tells about a topic; nothing for one that the original NSQ will make.

        Raises:
            TopicNotFound: there is none.
            LookupFailed: no lookup address answers.
        """
        try:
            return (await self._patiently(partial(self._directory.resolve, topic, "w"))).meta
        except TopicNotFound:
            nodes = await self._directory.nodes()
            if not nodes or any("HA" in node.version for node in nodes):
                raise
            return TopicMeta()

    async def publish(self, chunk: Chunk) -> None:
        """Publish a chunk; returns when all of it is stored.

        Raises:
            NsqError: the first message that was not stored, and why; the others may be stored.
        """
        failures: dict[int, NsqError] = {}
        if len(chunk.groups) == 1:
            for place, group in chunk.groups.items():
                await self._publish(place, group, failures)
        else:
            async with anyio.create_task_group() as tasks:
                for place, group in chunk.groups.items():
                    tasks.start_soon(self._publish, place, group, failures)
        if failures:
            row = min(failures)
            raise self._named(row, failures[row])

    async def _publish(self, place: Assignment, group: Group, failures: dict[int, NsqError]) -> None:
        topic, partition = place
        send = partial(self._producer.publish_many, topic, group.messages, partition=partition)
        try:
            for receipt in await self._patiently(send):
                self.tallies.setdefault((receipt.topic, receipt.partition), Tally()).add(receipt)
        except BatchFailed as error:
            for row, outcome in zip(group.rows, error.outcomes, strict=True):
                if isinstance(outcome, NsqError):
                    failures[row] = outcome
                    break
        except NsqError as error:
            index = error.index if isinstance(error, InvalidInput) else None
            if index is not None:  # rows have numbers of their own
                error.message = error.message.removeprefix(f"message {index}: ")
            failures[group.rows[index or 0]] = error

    def _named(self, row: int, error: NsqError) -> NsqError:
        """Return an error that tells which row it is about."""
        kind = type(error) if isinstance(error, (InvalidInput, DeliveryUnknown, TopicNotFound)) else PublishFailed
        where = f"row {row} of Spark partition {self._task}"
        named = kind(
            f"{where}: {error.message}",
            topic=error.topic,
            partition=error.partition,
            node=error.node,
            hint=error.hint,
        )
        named.attempts = error.attempts
        named.__cause__ = error
        return named

    async def _patiently(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call a function again while no lookup node answers; nothing has been sent then."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(LookupFailed),
            stop=stop_after_delay(self._patience),
            wait=wait_random_exponential(0.1, max=2.0),
            sleep=anyio.sleep,
            reraise=True,
        )
        return await retrying(function)


def publish_chunks(
    access: Access, task: int, chunks_of: Callable[[Callable[[str], TopicMeta]], Iterable[Chunk]]
) -> Tallies:
    """Publish the messages of a task; returns what was published, when all of it is stored.

    One chunk is under way while the next one is made; they follow each other, so that keys keep their order.

    Args:
        access: how the servers are reached.
        task: number of the task's partition, for messages of errors.
        chunks_of: returns the chunks, when it is given a function that tells about a topic.

    Raises:
        NsqError: a message cannot be right, or was not stored.
    """
    publisher = Publisher(access, task)
    with shared_loop.entered() as portal, portal.wrap_async_context_manager(publisher):
        under_way: Future[None] | None = None
        try:
            for chunk in chunks_of(lambda topic: call(portal, "sink", publisher.meta, topic)):
                if under_way is not None:
                    under_way.result()
                under_way = portal.start_task_soon(publisher.publish, chunk)
            if under_way is not None:
                under_way.result()
        except BaseException:
            if under_way is not None:
                under_way.cancel()
            raise
    return publisher.tallies
