"""Many messages published by one call: in batches, with an outcome for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import anyio

from nsqext.client.producer.batch import BatchPlanner, wrong_message
from nsqext.client.producer.delivery import deliver
from nsqext.client.producer.plain_batch import plain_batches
from nsqext.client.producer.request import check_choice, key_bytes
from nsqext.errors import BatchFailed, InvalidBody, InvalidInput, LookupFailed, NsqError, PublishFailed, TopicNotFound
from nsqext.protocol.names import check_topic
from nsqext.types import Receipt

if TYPE_CHECKING:
    from nsqext.client.producer.batch import Batch, Rows
    from nsqext.client.producer.key_lock import KeyLock, Turn
    from nsqext.client.producer.plain_batch import PlainBatch
    from nsqext.client.producer.request import OutgoingMessage
    from nsqext.client.producer.sender import Sender

__all__ = ("BatchPublisher",)

Outcome = Receipt | NsqError


class BatchPublisher:
    """Publishes many messages of a topic at a time.

    Args:
        sender: sends the batches.
        turns: keeps what is published with a key in order.
    """

    def __init__(self, sender: Sender, turns: KeyLock) -> None:
        self._sender = sender
        self._turns = turns

    async def publish(
        self, topic: str, messages: Iterable[bytes | OutgoingMessage], key: str | bytes | None, partition: int | None
    ) -> list[Receipt]:
        """Publish; see `nsqext.client.producer.producer.Producer.publish_many`."""
        sender = self._sender
        route = sender.current(topic) if isinstance(topic, str) else None
        if route is None:
            check_topic(topic)
        if key is not None or partition is not None:
            check_choice(key, partition)
        given = messages if type(messages) is list else _listed(messages, topic)
        if route is None:
            route = await sender.route(topic)
        if not given:
            return []
        if key is None:
            plain = plain_batches(route, partition, given, sender.options)
            if plain is not None:
                if len(plain) == 1:
                    return await self._publish_alone(plain[0])
                rows: Rows = [[batch] for batch in plain] if partition is None else [[*plain]]
                return await self._publish_rows(rows, len(given))
        sorter = BatchPlanner(
            route, sender.options, sender.key_hash, None if key is None else key_bytes(key), partition
        )
        sorter.add(given)
        if sorter.marked is not None:
            try:
                await sender.check_marked(route, header=sorter.marked[1])
            except InvalidInput as error:
                raise wrong_message(error, sorter.marked[0], topic) from None
        if len(sorter.rows) == 1 and len(sorter.rows[0]) == 1 and not sorter.keys:
            return await self._publish_alone(sorter.rows[0][0])
        entered: list[Turn] = []
        try:
            await self._turns.enter_all(sorted((topic, key) for key in sorter.keys), entered, sender.options.timeout)
            return await self._publish_rows(sorter.rows, sorter.count)
        finally:
            for turn in entered:
                self._turns.leave(turn)

    async def _publish_alone(self, batch: Batch | PlainBatch) -> list[Receipt]:
        """Publish a single batch: the usual case, without a task for it."""
        try:
            return await deliver(self._sender, batch)
        except (TopicNotFound, LookupFailed):
            raise
        except NsqError as error:
            raise BatchFailed([error] * len(batch.indexes)) from error

    async def _publish_rows(self, rows: Rows, count: int) -> list[Receipt]:
        outcomes: list[Outcome | None] = [None] * count
        if len(rows) == 1:
            await self._publish_row(rows[0], outcomes)
        else:
            async with anyio.create_task_group() as tasks:
                for row in rows:
                    tasks.start_soon(self._publish_row, row, outcomes)
        receipts = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
        if len(receipts) < len(outcomes):
            raise BatchFailed([outcome for outcome in outcomes if outcome is not None])
        return receipts

    async def _publish_row(self, row: list[Batch | PlainBatch], outcomes: list[Outcome | None]) -> None:
        """Publish batches of one partition, one after the other."""
        failed: NsqError | None = None
        for batch in row:
            results: Sequence[Outcome]
            if failed is not None:
                unsent = PublishFailed(
                    "not tried, because a batch that has to come before it failed", topic=batch.topic
                )
                unsent.__cause__ = failed
                results = [unsent] * len(batch.indexes)
            else:
                try:
                    results = await deliver(self._sender, batch)
                except NsqError as error:
                    failed = error
                    results = [error] * len(batch.indexes)
            for index, result in zip(batch.indexes, results, strict=True):
                outcomes[index] = result


def _listed(messages: Iterable[bytes | OutgoingMessage], topic: str) -> Sequence[bytes | OutgoingMessage]:
    if isinstance(messages, (bytes, bytearray, str)):
        raise InvalidBody("publish_many takes a list of bodies, not one", hint="use publish", topic=topic)
    return messages if isinstance(messages, Sequence) else list(messages)
