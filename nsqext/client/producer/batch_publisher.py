"""Publish many messages in batches: plan them, wait for their keys, and collect the outcomes."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import anyio

from nsqext.client.producer.batch import BatchPlanner, invalid_message
from nsqext.client.producer.request import check_choice, check_supported, key_bytes
from nsqext.errors import (
    BatchFailed,
    ExtendNotSupported,
    InvalidInput,
    LookupFailed,
    NsqError,
    PublishFailed,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.protocol.names import check_topic
from nsqext.types import Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.client.producer.batch import Batch, Rows
    from nsqext.client.producer.key_lock import KeyLock, Turn
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.request import OutgoingMessage
    from nsqext.client.producer.route import Route
    from nsqext.client.producer.router import Router
    from nsqext.client.producer.sender import Sender

__all__ = ("BatchPublisher",)

_clock = time.monotonic

Outcome = Receipt | NsqError


class BatchPublisher:
    """Publishes many messages of one call.

    Args:
        options: options of the producer.
        router: routes of topics.
        sender: publishes the batches.
        key_lock: keeps the order of keys among all publishes of the producer.
    """

    def __init__(self, options: ProducerOptions, router: Router, sender: Sender, key_lock: KeyLock) -> None:
        self._options = options
        self._router = router
        self._sender = sender
        self._key_lock = key_lock

    async def publish(
        self,
        topic: str,
        messages: Sequence[bytes | OutgoingMessage],
        key: str | bytes | None,
        partition: int | None,
        started: float,
    ) -> list[Receipt]:
        """Publish messages; return a receipt for each of them.

        Args:
            topic: name of the topic.
            messages: bodies, or messages.
            key: for all messages without a key of their own.
            partition: for all messages.
            started: when the call began, in seconds of the monotonic clock.

        Raises:
            NsqError: see `nsqext.client.producer.producer.Producer.publish_many`.
        """
        route = self._router.current(topic) if isinstance(topic, str) else None
        if route is None:
            check_topic(topic)
        check_choice(key, partition)
        if route is None:
            route = await self._sender.wait_for_route(topic, started)
        if not messages:
            return []
        planner = self._planner(route, key, partition)
        try:
            planner.add(messages)
        except ExtendNotSupported:
            if not await self._sender.wait_for_lookup(partial(self._router.upgraded, topic), started):
                raise
            planner = self._planner(await self._sender.wait_for_route(topic, started), key, partition)
            planner.add(messages)
        if planner.marked is not None:
            await self._check_marked(route, *planner.marked)
        if not planner.keys:
            if len(planner.rows) > 1 or len(planner.rows[0]) > 1:
                return await self._publish_rows(planner.rows, len(messages), started)
            batch = planner.rows[0][0]
            try:
                return await self._sender.publish(batch, started)
            except (TopicNotFound, TopicNotReady, LookupFailed):
                raise
            except NsqError as error:
                raise BatchFailed([error] * batch.count) from error
        entered: list[Turn] = []
        try:
            left = max(0.0, started + self._options.timeout - _clock())
            await self._key_lock.enter_all(sorted((topic, each) for each in planner.keys), entered, left)
            return await self._publish_rows(planner.rows, len(messages), started)
        finally:
            for turn in entered:
                self._key_lock.leave(turn)

    def _planner(self, route: Route, key: str | bytes | None, partition: int | None) -> BatchPlanner:
        default_key = None if key is None else key_bytes(key)
        return BatchPlanner(route, self._options, self._router.key_hash, default_key, partition)

    async def _check_marked(self, route: Route, index: int, header: bool) -> None:
        """Check that the nodes of a topic without metadata accept headers or trace ids.

        Args:
            route: route of the topic.
            index: index of the first message that has any.
            header: it has more than a trace id.

        Raises:
            InvalidInput: they do not; nothing was sent.
        """
        with anyio.move_on_after(self._options.timeout):
            for target in route.targets:  # the first node that can be reached tells which generation it is of
                try:
                    await self._sender.connection(target)
                except NsqError:
                    continue
                try:
                    check_supported(target, header=header)
                except InvalidInput as error:
                    raise invalid_message(error, index, route.topic) from None
                break

    async def _publish_rows(self, rows: Rows, count: int, started: float) -> list[Receipt]:
        """Publish the batches of a call: those of a row one after the other, rows at the same time.

        Args:
            rows: the batches.
            count: number of messages.
            started: when the call began, in seconds of the monotonic clock; the time of later batches of a row begins
                when the one before has ended.

        Raises:
            BatchFailed: not all of them were stored.
        """
        outcomes: list[Outcome | None] = [None] * count
        if len(rows) == 1:
            await self._publish_row(rows[0], outcomes, started)
        else:
            async with anyio.create_task_group() as tasks:
                for row in rows:
                    tasks.start_soon(self._publish_row, row, outcomes, started)
        receipts = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
        if len(receipts) < len(outcomes):
            raise BatchFailed([outcome for outcome in outcomes if outcome is not None])
        return receipts

    async def _publish_row(self, row: list[Batch], outcomes: list[Outcome | None], started: float) -> None:
        failed: NsqError | None = None
        for number, batch in enumerate(row):
            results: Sequence[Outcome]
            if failed is not None:
                unsent = PublishFailed("not sent, because an earlier batch of the partition failed", topic=batch.topic)
                unsent.__cause__ = failed
                self._sender.counters.failed += batch.count
                results = [unsent] * batch.count
            else:
                try:
                    results = await self._sender.publish(batch, None if number else started)
                except NsqError as error:
                    failed = error
                    results = [error] * batch.count
            for index, result in zip(batch.indexes, results, strict=True):
                outcomes[index] = result
