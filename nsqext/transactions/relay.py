"""Publish the messages of an outbox."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import anyio
import orjson
from anyio import to_thread
from attrs import evolve, field, frozen

from nsqext.app.relay import Relay, lease_time, publish_timeout, refuses_message, without_receipts
from nsqext.arguments import check_number, check_time
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.errors import BatchFailed, ExtendNotSupported, InvalidHeader, InvalidState, NsqError, ReceiptsMissing
from nsqext.errors.server import ExtendRefused
from nsqext.protocol.messages import IDENTITY_HEADER
from nsqext.transactions.listener import OutboxListener
from nsqext.transactions.outages import outage_of
from nsqext.transactions.store import LONGEST_LEASE, MOST_BYTES
from nsqext.transactions.trace_context import without_active_span
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from nsqext import Producer
    from nsqext.transactions.store import OutboxRow, OutboxStore, OutboxSummary

logger: logging.Logger = logging.getLogger("nsqext.transactions")

_FIRST = 1 << 17  # bytes of the first publish
MARGIN: float = 1.0
"""Seconds before the end of a lease that could not be renewed at which publishes end."""
RETRY: float = 5.0
"""Seconds until another publish to a topic that failed."""
_RECONNECT = 1.0  # seconds until another attempt to reach the database
_SLICE = 0.5  # seconds of a wait for PostgreSQL, whose thread neither `stop` nor a cancellation ends


class Pace:
    """How many bytes of a topic are published at once, to take a fraction of the timeout."""

    def __init__(self) -> None:
        self._size = _FIRST

    def part(self, rows: Sequence[OutboxRow]) -> list[OutboxRow]:
        """Return the first messages, at least one, that are published together."""
        found: list[OutboxRow] = []
        size = 0
        for row in rows:
            size += len(row.body)
            if found and size > self._size:
                break
            found.append(row)
        return found

    def took(self, rows: Sequence[OutboxRow], seconds: float, timeout: float, *, failed: bool) -> bool:
        """Adapt the size to a publish; return whether fewer messages have to be tried, because it was slow."""
        size = sum(len(row.body) for row in rows)
        slow = seconds > timeout / 2
        if slow:
            self._size = min(size, self._size) // 2
        elif not failed and seconds < timeout / 8:
            self._size = min(MOST_BYTES, max(2 * self._size, size))
        return slow


class RelayStatistics(NamedTuple):
    """What a relay has done.

    Attributes:
        published: messages that were stored, and deleted from the outbox.
        failed: failed attempts, which are repeated.
        refused: messages that cannot be published, and were set aside.
    """

    published: int
    failed: int
    refused: int


@frozen(eq=False)
class _LeasedTurn:
    """The publishes under a lease."""

    producer: Producer
    timeout: float  #: of each publish, in seconds
    shards: Sequence[int]  #: the leased shards
    until: float  #: when the last publish begins, by the clock of the event loop
    errors: list[Exception] = field(factory=list)  #: that end the turn


class OutboxRelay(Relay):
    """Publishes what transactions added to an outbox, at least once, and in the order of each key.

    Any number of relays may run, in any processes: each leases an equal share of the keys. A message is published twice
    if the relay is killed or cancelled between the publish and the deletion, or if a publish received no response. Its
    header ``nsqext_id`` is the same then, so that an `Inbox` handles it once; topics without extend support have no
    headers.

    A message that can never be stored in its topic is set aside: its row keeps the error, and later messages of its key
    are published. It is too large, for example, or it has headers and the topic no extend support, or a key on the
    original NSQ. Other errors delay the messages of their topic.

    Args:
        store: the outbox, which the caller closes when the relay has ended.
        batch: messages that are read and published together, at most.
        poll: seconds between two reads of an empty outbox; PostgreSQL notifies the relay earlier.

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
        # topics to which publishes failed, and when they are tried again, by the clock of the event loop
        self._resting: dict[str, float] = {}
        self._alone: set[str] = set()  # topics whose messages are published one by one, to find a refused message
        self._paces: dict[str, Pace] = {}
        self._stored: dict[int, str] = {}  # identities of published messages that are not deleted yet, by sequence
        self._published = self._failed = self._refused = 0

    def statistics(self) -> RelayStatistics:
        """Return what the relay has done since it was made."""
        return RelayStatistics(self._published, self._failed, self._refused)

    def summary(self) -> OutboxSummary:
        """Return what is in the outbox, from the database.

        Raises:
            InvalidState: the database cannot be read, or the store was closed.
        """
        try:
            return self._store.summary(time.time())
        except Exception as error:
            if outage_of(error) is None:
                raise
            raise InvalidState(f"the outbox cannot be read: {self._store.shown(error)}") from None

    async def _run(self, producer: Producer) -> None:
        listener = OutboxListener(self._store)
        timeout = publish_timeout(producer)
        try:
            with without_active_span():
                await self._publish_all(producer, listener, timeout)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._leave, listener)

    async def _publish_all(self, producer: Producer, listener: OutboxListener, timeout: float) -> None:
        while not self._stopping:
            try:
                more = await self._publish_next(producer, timeout)
                self.outage = None
                if not more:
                    await self._wait(listener)
            except Exception as error:
                if outage_of(error) is None:
                    raise
                shown = self._store.shown(error)
                self.outage = f"the database of the outbox cannot be used: {shown}"
                logger.warning("the database of the outbox cannot be used: %s", shown)
                await anyio.sleep(_RECONNECT)

    async def _wait(self, listener: OutboxListener) -> None:
        """Wait for a message, the next try of a topic that failed, or `stop`."""
        until = min([anyio.current_time() + self._poll, *self._resting.values()])
        while not self._stopping and (left := until - anyio.current_time()) > 0:
            if await listener.wait(min(left, _SLICE)):
                return

    def _leave(self, listener: OutboxListener) -> None:
        """Return the leases; they end by themselves while the database cannot be used."""
        try:
            listener.close()
            self._store.leave(self._owner)
        except Exception as error:
            if outage_of(error) is None:
                raise

    async def _publish_next(self, producer: Producer, timeout: float) -> bool:
        """Publish the next messages while their lease can be renewed; return whether more messages may wait."""
        lease = min(lease_time(timeout), LONGEST_LEASE)
        began = anyio.current_time()
        shards = await to_thread.run_sync(self._store.lease, self._owner, lease)
        self._resting = {topic: again for topic, again in self._resting.items() if again > began}
        rows = await to_thread.run_sync(self._store.rows, shards, self._resting, self._batch, MOST_BYTES, self._owner)
        if not rows:
            if not self._resting:  # what failed was cancelled, or published by another relay
                self.failure = None
            return False
        turn = _LeasedTurn(producer, timeout, shards, began + timeout)
        with anyio.CancelScope(deadline=began + lease - MARGIN) as leased:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._renew, shards, lease, leased, turn.errors)
                await self._publish_rows(turn, rows)
                tasks.cancel_scope.cancel()
        if turn.errors:
            raise turn.errors[0]
        if leased.cancelled_caught:
            logger.warning("the lease of the outbox could not be renewed: messages may be published twice")
        return True

    async def _publish_rows(self, turn: _LeasedTurn, rows: Sequence[OutboxRow]) -> None:
        """Publish messages; while a topic takes long, as without a leader, publish what other topics have meanwhile."""
        running: dict[str, list[int]] = {}  # sequences that are published now, by topic
        ended = Wakeup()

        async def publish(topic: str, listed: Sequence[OutboxRow]) -> None:
            try:
                await self._publish(turn, topic, listed)
            finally:
                del running[topic]
                ended.wake()

        async with anyio.create_task_group() as publishes:
            while True:
                by_topic: dict[str, list[OutboxRow]] = {}
                for row in rows:
                    by_topic.setdefault(row.topic, []).append(row)
                for topic, listed in by_topic.items():
                    running[topic] = [row.sequence for row in listed]
                    publishes.start_soon(publish, topic, listed)
                full = len(rows) >= self._batch
                with anyio.move_on_after(min(self._poll, _SLICE)):
                    await ended.wait()
                    while running and not full:
                        await ended.wait()
                if not running or turn.errors or self._stopping or anyio.current_time() >= turn.until:
                    return
                without, now = {*self._resting, *running}, [one for listed in running.values() for one in listed]
                try:
                    rows = await to_thread.run_sync(
                        self._store.rows, turn.shards, without, self._batch, MOST_BYTES, self._owner, now
                    )
                except Exception as error:
                    turn.errors.append(error)
                    return

    async def _renew(
        self, shards: Sequence[int], lease: float, leased: anyio.CancelScope, errors: list[Exception]
    ) -> None:
        """Renew the lease until cancelled; without a lease, the publishes end before another relay begins them."""
        pause = lease / 3
        while True:
            await anyio.sleep(pause)
            began = anyio.current_time()
            try:
                if not await to_thread.run_sync(self._store.renew, self._owner, shards, lease):
                    leased.cancel()
                leased.deadline = began + lease - MARGIN
                pause = lease / 3
            except Exception as error:
                if outage_of(error) is None:
                    errors.append(error)
                    leased.cancel()
                logger.warning("the lease of the outbox is not renewed: %s", self._store.shown(error))
                pause = min(_RECONNECT, lease / 3)

    async def _publish(self, turn: _LeasedTurn, topic: str, rows: Sequence[OutboxRow]) -> None:
        """Publish messages of a topic until the turn ends, and delete them from the outbox."""
        pace = self._paces.setdefault(topic, Pace())
        alone = topic in self._alone
        self._alone.discard(topic)
        try:
            stored = [row for row in rows if self._stored.get(row.sequence) == row.identity]
            await self._delete(stored)  # the database failed when they were stored: they are not published again
            left = [row for row in rows if row not in stored] if stored else [*rows]
            while left and not self._stopping and anyio.current_time() < turn.until:
                some = left[:1] if alone else pace.part(left)
                if not await self._publish_part(turn, topic, some, pace):
                    return
                del left[: len(some)]
        except Exception as error:
            turn.errors.append(error)

    async def _publish_part(self, turn: _LeasedTurn, topic: str, rows: Sequence[OutboxRow], pace: Pace) -> bool:
        """Publish messages at once; return whether the messages behind them may follow now."""
        began = anyio.current_time()
        failure: NsqError | None = None
        stored: Sequence[OutboxRow] = ()
        try:
            extend = (await turn.producer.meta(topic)).extend_support
            await turn.producer.publish_many(topic, [_message(row, extend=extend) for row in rows])
            stored = rows
        except BatchFailed as error:
            stored = [
                row for row, outcome in zip(rows, error.outcomes, strict=True) if not isinstance(outcome, NsqError)
            ]
            failure = next(outcome for outcome in error.outcomes if isinstance(outcome, NsqError))
        except ReceiptsMissing as error:  # its messages would be published again and again
            raise without_receipts(error, "the outbox", "outbox relay") from error
        except NsqError as error:
            failure = error
        slow = pace.took(rows, anyio.current_time() - began, turn.timeout, failed=failure is not None)
        await self._delete(stored)
        if failure is None:
            return True
        if _is_final(failure, rows):
            if len(rows) > 1:
                self._alone.add(topic)
                return False
            if rows[0].trace_context:  # a message is not lost for its trace
                return await self._publish_part(turn, topic, [evolve(rows[0], trace_context=None)], pace)
            await self._refuse(rows[0], failure)
            return True
        if slow and len(rows) > 1:
            self._failed += 1
            logger.warning(
                "%d messages of the outbox were not stored within the timeout, next try in smaller parts: %s",
                len(rows) - len(stored),
                failure,
                extra={"topic": topic},
            )
        else:
            self._rest(topic, failure, len(rows) - len(stored))
        return False

    async def _delete(self, stored: Sequence[OutboxRow]) -> None:
        if stored:
            sequences = [row.sequence for row in stored]
            self._stored.update((row.sequence, row.identity) for row in stored)
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._store.delete, sequences)
            for sequence in sequences:
                del self._stored[sequence]
            self._published += len(stored)
            self.failure = None

    def _rest(self, topic: str, error: NsqError, count: int) -> None:
        self._failed += 1
        self.failure = f"no message is stored: {error}"
        self._resting[topic] = anyio.current_time() + RETRY
        logger.warning(
            "%d messages of the outbox are not published, %g s until the next try: %s",
            count,
            RETRY,
            error,
            extra={"topic": topic},
        )

    async def _refuse(self, row: OutboxRow, error: NsqError) -> None:
        await to_thread.run_sync(self._store.refuse, row.sequence, str(error))
        self._refused += 1
        logger.error(
            "the message %s of the outbox cannot be published, and is set aside: %s",
            row.identity,
            error,
            extra={"topic": row.topic},
        )


def _is_final(error: NsqError, rows: Sequence[OutboxRow]) -> bool:
    """Return whether an error says that one of some messages can never be stored, as it and its topic are."""
    if isinstance(error, ExtendNotSupported | ExtendRefused):
        # of other messages it refuses the identity, because the topic was created again meanwhile
        return any(row.headers or row.tag for row in rows)
    return refuses_message(error)


def _message(row: OutboxRow, *, extend: bool) -> OutgoingMessage:
    """Return the message of a row; raises InvalidHeader for a row of another program."""
    headers: dict[str, str]
    try:
        headers = dict(orjson.loads(row.headers)) if row.headers else {}
        if extend:
            trace_context: dict[str, str] = dict(orjson.loads(row.trace_context)) if row.trace_context else {}
            headers = {**trace_context, **headers, IDENTITY_HEADER: row.identity}
    except (TypeError, ValueError) as error:
        raise InvalidHeader(f"headers of a row are no object of JSON: {error}", topic=row.topic) from error
    return OutgoingMessage(bytes(row.body), headers or None, row.tag, None, None if row.key is None else bytes(row.key))
