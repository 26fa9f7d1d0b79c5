"""Publish many messages in batches: plan, wait for keys, collect the outcomes."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import anyio
from attrs import define, evolve

from nsqext.client.producer.batch import BatchPlanner, invalid_message
from nsqext.client.producer.keys import keys_of
from nsqext.client.producer.request import check_choice, check_supported, key_bytes
from nsqext.errors import (
    BatchFailed,
    ExtendNotSupported,
    InvalidInput,
    InvalidPartition,
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
    from nsqext.client.producer.keys import KeyLock, Place
    from nsqext.client.producer.publishing import Publishing
    from nsqext.client.producer.request import Outcome
    from nsqext.client.producer.route import Route
    from nsqext.client.producer.sender import Sender

_clock = time.monotonic


def raise_for_all(error: NsqError, count: int) -> NoReturn:
    """Raise the error of a call with a single batch: BatchFailed, unless lookup explains why nothing was sent."""
    if isinstance(error, (TopicNotFound, TopicNotReady, LookupFailed)):
        raise error
    raise BatchFailed([error] * count) from error


def _is_outdated(outcome: Outcome, call: Publishing) -> bool:
    """Return whether a batch failed because of an outdated plan; batches behind it were not sent."""
    error = outcome.__cause__ if isinstance(outcome, PublishFailed) else outcome
    return isinstance(error, ExtendNotSupported) or (isinstance(error, InvalidPartition) and call.partition is None)


def _receipts(outcomes: Sequence[Outcome | None]) -> list[Receipt]:
    """Return the receipts of a call; raise BatchFailed if a message has none."""
    receipts = [outcome for outcome in outcomes if isinstance(outcome, Receipt)]
    if len(receipts) < len(outcomes):
        raise BatchFailed([outcome for outcome in outcomes if outcome is not None])
    return receipts


@define(eq=False)
class BatchPublisher:
    """Publishes the messages of a batch call."""

    _sender: Sender
    _key_lock: KeyLock  # shared by all publishes of the producer

    async def publish(self, call: Publishing) -> list[Receipt]:
        """Publish messages; return a receipt for each."""
        started = _clock()
        check_choice(call.key, call.partition)
        planner = self._plan_now(call)
        keys = keys_of(call.given, call.key, call.partition) if planner is None else planner.keys
        if not keys:
            return await self._publish_planned(call, planner, None, started)
        # before any wait: a later call must not overtake this call
        place = self._key_lock.queue({(call.topic, key) for key in keys}.difference(call.entered))
        try:
            return await self._publish_planned(call, planner, place, started)
        finally:
            place.leave()

    async def _publish_planned(
        self, call: Publishing, planner: BatchPlanner | None, place: Place | None, started: float
    ) -> list[Receipt]:
        """Publish a call; plan again what a topic refuses that was created again with less: headers, partitions."""
        try:
            return await self._publish_call(call, planner, place, started)
        except BatchFailed as error:
            outcomes = list(error.outcomes)
            left = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, NsqError)]
            if not all(_is_outdated(outcomes[index], call) for index in left):
                raise
        self._sender.counters.retries += 1
        if len(left) == len(outcomes):
            return await self._publish_call(call, None, place, started)
        rest = evolve(call, messages=[call.messages[index] for index in left])
        try:
            results: Sequence[Outcome] = await self._publish_call(rest, None, place, started)
        except NsqError as error:
            results = error.outcomes if isinstance(error, BatchFailed) else [error] * len(left)
        for index, result in zip(left, results, strict=True):
            outcomes[index] = result
        return _receipts(outcomes)

    async def _publish_call(
        self, call: Publishing, planner: BatchPlanner | None, place: Place | None, started: float
    ) -> list[Receipt]:
        if planner is None:
            planner = await self._plan(call, started)
        count = len(call.given)
        if not count:
            return []
        if planner.marked is not None:
            await self._check_marked(planner.route, *planner.marked)
        if place is not None:
            await place.enter(started + self._sender.options.timeout - _clock())
        elif len(planner.rows) == 1 and len(planner.rows[0]) == 1:
            return await self._publish_one(planner.rows[0][0], started)
        return await self._publish_rows(planner.rows, count, started)

    def _plan_now(self, call: Publishing) -> BatchPlanner | None:
        """Return the batches of a call; None if planning needs lookup. Raises InvalidInput."""
        route = self._sender.routes.current(call.topic) if isinstance(call.topic, str) else None
        if route is None:
            check_topic(call.topic)
            return None
        try:
            return self._planned(route, call)
        except ExtendNotSupported:
            return None

    async def _plan(self, call: Publishing, started: float) -> BatchPlanner:
        """Ask lookup for the route, or whether the topic was upgraded; return the batches of a call."""
        route = await self._sender.wait_for_route(call.topic, started)
        try:
            return self._planned(route, call)
        except ExtendNotSupported:
            if not await self._sender.wait_for_lookup(partial(self._sender.routes.upgraded, call.topic), started):
                raise
        return self._planned(await self._sender.wait_for_route(call.topic, started), call)

    def _planned(self, route: Route, call: Publishing) -> BatchPlanner:
        if call.partition is not None:
            route.check(call.partition)
        key = None if call.key is None else key_bytes(call.key)
        options = self._sender.routes.topic_options.of(call.topic)
        planner = BatchPlanner(route, options, self._sender.routes.key_hash, key, call.partition)
        if call.given:
            planner.add(call.given, call.trace_ids, call.header_columns)
        return planner

    async def _publish_one(self, batch: Batch, started: float) -> list[Receipt]:
        batch.started = started
        try:
            return await self._sender.publish(batch)
        except NsqError as error:
            raise_for_all(error, batch.count)

    async def _check_marked(self, route: Route, index: int, header: bool) -> None:
        """Raise InvalidInput if nodes of a topic without metadata accept no headers or trace ids."""
        with anyio.move_on_after(self._sender.options.timeout):
            for target in route.targets:  # the first reachable node shows the generation
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
        """Publish the batches of a call; see `Rows`. Raises BatchFailed.

        ``timeout`` of a row's first batch begins with the call, of a later batch with the end of the previous batch.
        """
        outcomes: list[Outcome | None] = [None] * count
        if len(rows) == 1:
            await self._publish_row(rows[0], outcomes, started)
        else:
            async with anyio.create_task_group() as tasks:
                for row in rows:
                    tasks.start_soon(self._publish_row, row, outcomes, started)
        return _receipts(outcomes)

    async def _publish_row(self, row: list[Batch], outcomes: list[Outcome | None], started: float) -> None:
        failed: NsqError | None = None
        for number, batch in enumerate(row):
            results: Sequence[Outcome]
            if failed is not None:
                unsent = PublishFailed("not sent, because an earlier batch of the partition failed", topic=batch.topic)
                unsent.__cause__ = failed
                results = [unsent] * batch.count
            else:
                try:
                    batch.started = _clock() if number else started
                    results = await self._sender.publish(batch)
                except NsqError as error:
                    failed = error
                    results = [error] * batch.count
            for index, result in zip(batch.indexes, results, strict=True):
                outcomes[index] = result
