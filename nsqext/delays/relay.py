"""Keep delayed messages in a store, and publish them when they are due."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio import to_thread
from anyio.lowlevel import checkpoint_if_cancelled
from attrs import frozen

from nsqext.app.relay import Relay, lease_time, publish_timeout, refuses_message, without_receipts
from nsqext.arguments import check_time
from nsqext.client.producer.options import DELAY_TOPIC
from nsqext.errors import InvalidState, NsqError, ProtocolError, ReceiptsMissing
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, DelayRecord, decode_delay
from nsqext.protocol.messages import IDENTITY_HEADER
from nsqext.protocol.names import check_channel, check_topic
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from nsqext import MessageBatch, Producer
    from nsqext.app import App
    from nsqext.client.consumer.settings import HandlerSettings
    from nsqext.delays.store import DelayStore, DelaySummary, TakenMessage

T = TypeVar("T")

logger: logging.Logger = logging.getLogger("nsqext.delays")

AT_ONCE: int = 200
"""Messages taken from the store and published together."""
SLOW: float = 1.0
"""Seconds after which publishes without an outcome, which hold half of the places, do not hold up other topics."""
MOST_SLOW: int = 5
"""How many times `AT_ONCE` are published at once while topics are slow, at most."""
# whatever the app's settings: a record that is left out, or rejected while the store fails, is a message that is lost
_EVERY_RECORD: HandlerSettings = {
    "max_in_flight": 2000,
    "max_attempts": 0,
    "tag": None,
    "ext_filter": None,
    "sample_rate": 0,
    "partitions": None,
    "start_existing": False,
    "key": None,
    "decompress": True,
}
RETRY: float = 15.0
"""Seconds until another attempt to publish a message."""
POLL: float = 1.0
"""Seconds between two checks of a store to which another process adds messages."""
REOPEN: float = 1.0
"""Seconds until another attempt to use a store that failed."""
FULL: float = 60.0
"""Seconds for which a store that could not take a message counts as unusable, unless it takes another."""
FORGET: float = 600.0
"""Seconds between two removals of old identities."""


@frozen
class DelayStatistics:
    """What a relay of delayed messages has done since it was made."""

    published: int  #: messages that were stored
    failed: int  #: failed attempts, which are repeated
    refused: int  #: records that cannot be read, and were set aside


class DelayRelay(Relay):
    """Publishes the messages of ``publish(delay=…, via="relay")`` when they are due.

    It consumes the topic of delayed messages, and finishes them when they are stored. A message is published at least
    once: twice if the process is killed between the publish and its record, or if a publish received no response. Any
    number of relays may run: relays of a machine share a store, relays of other machines have their own. While the
    store cannot be used, as on a full disk, received messages are requeued, a warning is logged, and the relay tries
    again every second.

    Args:
        store: the store, which the caller closes after the app.
        topic: topic of the delayed messages.
        channel: channel of all relays.
        keep: seconds for which identities of published and cancelled messages are known.

    Raises:
        InvalidName: a topic or channel that servers refuse.
        InvalidSetting: an invalid time.

    Attributes:
        channels: the channel of all relays, and the channel of this store, which receives every cancellation.
    """

    def __init__(
        self, store: DelayStore, *, topic: str = DELAY_TOPIC, channel: str = "relay", keep: float = 86_400.0
    ) -> None:
        self.topic: str = check_topic(topic)
        check_time("keep", keep)
        self.channels: tuple[str, str] = (check_channel(channel), check_channel(f"{channel}-cancel-{store.name}"))
        self._store = store
        self._keep = keep
        self._changed = Wakeup()
        # when the messages were taken that are published now, by topic, by the clock of the event loop
        self._running: dict[str, list[float]] = {}
        # until when a failed publish or store counts, by the clock of the event loop
        self._failing = self._full = 0.0
        self._published: list[str] = []  # identities of published messages that are not recorded in the store yet
        self._stored = self._failed = self._refused = 0
        self._ended: InvalidState | None = None  # why it cannot continue

    def statistics(self) -> DelayStatistics:
        """Return what the relay has done since it was made."""
        return DelayStatistics(self._stored, self._failed, self._refused)

    def summary(self) -> DelaySummary:
        """Return what is in the store, from its file.

        Raises:
            InvalidState: the file cannot be read, or the store was closed.
        """
        try:
            return self._store.summary(time.time())
        except sqlite3.Error as error:
            raise InvalidState(f"the store of delayed messages cannot be read: {error}") from error

    def attach(self, app: App) -> None:
        """Add the handlers and the lifespan of the relay to an app.

        Raises:
            InvalidState: the app is running already.
        """
        super().attach(app)
        kinds: tuple[type[DelayRecord], ...] = DelayedMessage, DelayCancel
        for channel, kind in zip(self.channels, kinds, strict=True):
            register = app.batch_handler(self.topic, channel, max_wait=0.0, **_EVERY_RECORD)
            register(partial(self._add, kind=kind))

    async def _run(self, producer: Producer) -> None:
        self._ended = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._forget_old)
                await self._publish_due(producer)
                tasks.cancel_scope.cancel()
        finally:
            published, self._published = self._published, []
            record = partial(self._store.take, published, 0, time.time(), 0.0)
            try:
                with anyio.CancelScope(shield=True):
                    await to_thread.run_sync(record)  # another process may hold the store
            except sqlite3.OperationalError as error:
                logger.warning("%d messages are published twice, because the store fails: %s", len(published), error)
        if self._ended is not None:
            raise self._ended

    def stop(self) -> None:
        """Publish nothing more: `run` returns as soon as what is being published is recorded in the store."""
        super().stop()
        self._changed.wake()

    async def _in_store(self, call: Callable[[], T]) -> T:
        """Call the store in a thread, again while it cannot be used; the call reads the time of each attempt."""
        while True:
            try:
                result = await to_thread.run_sync(call)
            except sqlite3.OperationalError as error:
                self._note_outage(error)
                await anyio.sleep(REOPEN)
            else:
                if anyio.current_time() >= self._full:  # a full disk is no obstacle to a look at the store
                    self.outage = None
                return result

    def _note_outage(self, error: sqlite3.OperationalError) -> None:
        self.outage = f"the store of delayed messages cannot be used: {error}"
        logger.warning("the store of delayed messages cannot be used: %s", error)

    async def _store_received(self, call: Callable[..., object], received: object) -> None:
        """Store what was received; while that fails, it is requeued, and the relay is not ready."""
        try:
            await to_thread.run_sync(call, received)
        except sqlite3.OperationalError as error:
            self._full = anyio.current_time() + FULL
            self._note_outage(error)
            raise
        self._full = 0.0

    async def _add(self, batch: MessageBatch, kind: type[DelayRecord]) -> None:
        records = []
        refused: list[tuple[bytes, str]] = []
        for message in batch:
            try:
                record = decode_delay(message.body)
            except ProtocolError as error:
                refused.append((message.body, error.message))
                continue
            if isinstance(record[0], kind):
                records.append(record)
        if refused and kind is DelayedMessage:  # both channels receive each record
            await self._store_received(self._store.refuse, refused)
            self._refused += len(refused)
            logger.error(
                "%d records of the topic are set aside: %s", len(refused), refused[-1][1], extra={"topic": self.topic}
            )
        if records:
            await self._store_received(self._store.add, records)
            self._changed.wake()

    async def _publish_due(self, producer: Producer) -> None:
        published = self._published
        lease = lease_time(publish_timeout(producer))
        self._running.clear()  # of a run that was cancelled
        async with anyio.create_task_group() as tasks:
            while not self._stopping:
                count = len(published)
                slow = self._slow()
                free = self._free(slow)
                began, taken = await self._in_store(partial(self._take, published[:count], free, lease, slow))
                now = anyio.current_time()
                until = now + lease - (time.monotonic() - began)
                del published[:count]
                for message in taken:
                    self._running.setdefault(message.topic, []).append(now)
                    tasks.start_soon(self._publish, producer, message, now, until)
                if not taken:
                    if not self._running and now > self._failing:
                        self.failure = None  # what failed was cancelled, or another relay tries it
                    await self._wait(await self._in_store(partial(self._next_due, slow)), free)

    def _slow(self) -> set[str]:
        """Return the topics whose publishes wait for long, as for a leader, if these hold half of the places."""
        before = anyio.current_time() - SLOW
        late = {
            topic: sum(taken <= before for taken in running)
            for topic, running in self._running.items()
            if running[0] <= before  # the oldest
        }
        return {*late} if 2 * sum(late.values()) >= AT_ONCE else set()

    def _free(self, slow: Collection[str]) -> int:
        """Return how many messages of other topics may be published now."""
        held = sum(len(self._running[topic]) for topic in slow)
        running = sum(map(len, self._running.values()))
        return max(0, min(AT_ONCE + held, MOST_SLOW * AT_ONCE) - running)

    def _next_due(self, slow: Collection[str]) -> float | None:
        return self._store.next_due(time.time(), slow)

    def _take(
        self, published: list[str], free: int, lease: float, slow: Collection[str]
    ) -> tuple[float, list[TakenMessage]]:
        """Call `DelayStore.take`; return when its lease began at the earliest, in monotonic seconds, and its result."""
        began = time.monotonic()
        return began, self._store.take(published, free, time.time(), lease, slow)

    async def _wait(self, due: float | None, free: int) -> None:
        """Wait for a change, or until the next message is due."""
        pause = POLL
        if due is not None and free:
            pause = min(POLL, max(0.0, due - time.time()))
        with anyio.move_on_after(pause):
            await self._changed.wait()

    async def _publish(self, producer: Producer, message: TakenMessage, taken: float, until: float) -> None:
        """Publish a message until its lease ends: then another relay publishes it."""
        try:
            with anyio.CancelScope(deadline=until):
                await checkpoint_if_cancelled()  # this process may have stood still
                await publish_record(producer, message.record)
                self._published.append(message.identity)
                self._stored += 1
                self.failure = None
        except ReceiptsMissing as error:
            self._ended = without_receipts(error, "the store of delayed messages", "delay run")
            self._ended.__cause__ = error
            self.stop()
        except NsqError as error:
            logger.warning("a delayed message cannot be published, next attempt in %g s: %s", RETRY, error)
            self._failed += 1
            alone = refuses_message(error)
            if not alone:
                self.failure = f"no message is stored: {error}"
                self._failing = anyio.current_time() + 2 * RETRY
            failed = partial(self._store.failed, message.identity, str(error), pause=RETRY, alone=alone)
            await self._in_store(lambda: failed(now=time.time()))
        finally:
            running = self._running[message.topic]
            running.remove(taken)
            if not running:
                del self._running[message.topic]
            self._changed.wake()

    async def _forget_old(self) -> None:
        while True:
            await self._in_store(lambda: self._store.forget(time.time() - self._keep))
            await anyio.sleep(FORGET)


async def publish_record(producer: Producer, data: bytes) -> None:
    """Publish a stored message to its topic; with extend support, with its identity in a header."""
    record, body = decode_delay(data)
    if not isinstance(record, DelayedMessage):
        raise ProtocolError("not a delayed message")
    headers = record.headers
    if record.header is None and (await producer.meta(record.topic)).extend_support:
        headers = {IDENTITY_HEADER: record.identity, **(headers or {})}
    await producer.publish(
        record.topic,
        body,
        headers=headers,
        tag=record.tag,
        trace_id=record.trace_id,
        key=record.key,
        partition=record.partition,
        header=record.header,
    )
