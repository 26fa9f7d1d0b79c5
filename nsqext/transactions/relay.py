"""Publish the messages of an outbox."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio
import orjson
from anyio import to_thread

from nsqext.arguments import check_number, check_time
from nsqext.client.producer.request import OutgoingMessage
from nsqext.errors import BatchFailed, ExtendNotSupported, InvalidInput, InvalidPartition, NsqError
from nsqext.errors.server import BadMessage, RecordTooLarge
from nsqext.protocol.headers import IDENTITY_HEADER
from nsqext.transactions.store import OutboxListener

if TYPE_CHECKING:
    from nsqext import Producer
    from nsqext.app import App
    from nsqext.transactions.store import OutboxRow, OutboxStore, OutboxSummary

logger: logging.Logger = logging.getLogger("nsqext.transactions")

_LEASE = 5.0
"""Seconds beyond the timeout of a publish after which another relay takes what this one has leased."""
_RETRY = 5.0
"""Seconds until a topic is tried again that could not be published to."""
_RECONNECT = 1.0
"""Seconds until a database that could not be reached is tried again."""


class RelayStatistics(NamedTuple):
    """What a relay has done.

    Attributes:
        published: messages that are stored, and deleted from the outbox.
        failed: attempts that failed; the message is tried again.
        refused: messages that cannot be published, and were set aside.
    """

    published: int
    failed: int
    refused: int


class OutboxRelay:
    """Publishes what transactions added to an outbox, at least once, and in the order of each key.

    Any number of relays may run, in any processes: each leases an equal share of the keys. A message is published twice
    if the relay ends between the publish and the deletion, or if a publish received no response. Its identity in the
    header ``nsqext_id`` is the same then, so that an `Inbox` handles it once; topics without extend support have none.

    A message that can never be published, such as one that is too large, is set aside: its row keeps the error, and
    later messages of its key are published. Other errors delay the messages of their topic.

    Args:
        store: the outbox, which the caller closes when the relay has ended.
        batch: messages that are read and published together, at most.
        poll: seconds between two looks at an empty outbox; PostgreSQL notifies the relay earlier.

    Raises:
        InvalidSetting: a number that is not valid.
    """

    def __init__(self, store: OutboxStore, *, batch: int = 500, poll: float = 0.5) -> None:
        check_number("batch", batch, 1)
        check_time("poll", poll, zero=False)
        self._store = store
        self._batch = batch
        self._poll = poll
        self._owner = os.urandom(8).hex()
        self._resting: dict[str, float] = {}
        """Topics that could not be published to, and when they are tried again."""
        self._alone: set[str] = set()
        """Topics whose messages are published one by one, because one of them was refused."""
        self._published = self._failed = self._refused = 0

    def statistics(self) -> RelayStatistics:
        """Return what the relay has done since it was made."""
        return RelayStatistics(self._published, self._failed, self._refused)

    def summary(self) -> OutboxSummary:
        """Return what is in the outbox, from the database.

        Raises:
            InvalidState: the database cannot be read, or the store was closed.
        """
        return self._store.summary(time.time())

    def attach(self, app: App) -> None:
        """Run while an app runs, with its producer.

        Raises:
            InvalidState: the app is running already.
        """
        app.lifespan(self._lifespan)

    async def _lifespan(self, app: App) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run, app.producer)
            yield
            tasks.cancel_scope.cancel()

    async def run(self, producer: Producer) -> None:
        """Publish until cancelled, and return the leases then; cancellation takes effect within ``poll`` seconds.

        While the database cannot be reached, a warning is logged, and it is tried again every second.

        Args:
            producer: an open producer; without ``middleware`` that drops messages.

        Raises:
            InvalidState: the store was closed.
            Exception: an error of the database other than an outage.
        """
        listener = OutboxListener(self._store)
        lease = float(str(producer.settings["timeout"])) + _LEASE
        try:
            while True:
                try:
                    if not await self._publish_next(producer, lease):
                        await listener.wait(self._poll)
                except self._store.outage as error:
                    logger.warning("the database of the outbox cannot be reached: %s", error)
                    await anyio.sleep(_RECONNECT)
        finally:
            with anyio.CancelScope(shield=True), suppress(self._store.outage):  # its leases end by themselves
                await to_thread.run_sync(listener.close)
                await to_thread.run_sync(self._store.leave, self._owner)

    async def _publish_next(self, producer: Producer, lease: float) -> bool:
        """Publish the next messages, leased for some seconds; return whether there may be more."""
        now = time.time()
        shards = await to_thread.run_sync(self._store.lease, self._owner, now, now + lease)
        self._resting = {topic: again for topic, again in self._resting.items() if again > now}
        rows = await to_thread.run_sync(self._store.rows, shards, self._resting, self._batch)
        by_topic: dict[str, list[OutboxRow]] = {}
        for row in rows:
            by_topic.setdefault(row.topic, []).append(row)
        stored: list[int] = []
        refused: list[tuple[OutboxRow, NsqError]] = []
        try:
            async with anyio.create_task_group() as tasks:
                for topic, listed in by_topic.items():
                    tasks.start_soon(self._publish, producer, topic, listed, stored, refused)
        finally:
            if stored:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(self._store.delete, stored)
                self._published += len(stored)
        for row, error in refused:
            await self._refuse(row, error)
        return len(rows) == self._batch or bool(self._alone)

    async def _publish(
        self,
        producer: Producer,
        topic: str,
        rows: Sequence[OutboxRow],
        stored: list[int],
        refused: list[tuple[OutboxRow, NsqError]],
    ) -> None:
        """Publish messages of a topic, and add the numbers of those that are stored, and those that never can be.

        After an error that a message causes, the messages are published one by one, to find that message.
        """
        size = 1 if topic in self._alone else len(rows)
        self._alone.discard(topic)
        for first in range(0, len(rows), size):
            some = rows[first : first + size]
            try:
                extend = (await producer.meta(topic)).extend_support
                await producer.publish_many(topic, [_message(row, extend=extend) for row in some])
                stored += [row.sequence for row in some]
                continue
            except BatchFailed as error:
                stored += [
                    row.sequence
                    for row, outcome in zip(some, error.outcomes, strict=True)
                    if not isinstance(outcome, NsqError)
                ]
                failure: NsqError = next(one for one in error.outcomes if isinstance(one, NsqError))
            except NsqError as error:
                failure = error
            if not _is_final(failure):
                self._rest(topic, failure, len(rows) - first)
                return
            if size > 1:
                self._alone.add(topic)
                return
            refused.append((some[0], failure))

    def _rest(self, topic: str, error: NsqError, count: int) -> None:
        self._failed += 1
        self._resting[topic] = time.time() + _RETRY
        logger.warning(
            "%d messages of the outbox are not published, %g s until the next try: %s",
            count,
            _RETRY,
            error,
            extra={"topic": topic},
        )

    async def _refuse(self, row: OutboxRow, error: NsqError) -> None:
        self._refused += 1
        logger.error(
            "the message %s of the outbox cannot be published, and is set aside: %s",
            row.identity,
            error,
            extra={"topic": row.topic},
        )
        await to_thread.run_sync(self._store.refuse, row.sequence, str(error))


def _is_final(error: NsqError) -> bool:
    """Return whether an error says that a message can never be stored, and is not."""
    about_message = isinstance(error, (InvalidInput, BadMessage, RecordTooLarge))
    return about_message and not isinstance(error, InvalidPartition | ExtendNotSupported)


def _message(row: OutboxRow, *, extend: bool) -> OutgoingMessage:
    headers: dict[str, str] = orjson.loads(row.headers) if row.headers else {}
    if extend:
        headers[IDENTITY_HEADER] = row.identity
    return OutgoingMessage(bytes(row.body), headers or None, row.tag, None, None if row.key is None else bytes(row.key))
