"""Publish delayed messages when they are due."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread

from nsqext.arguments import check_time
from nsqext.client.producer.options import DELAY_TOPIC
from nsqext.errors import InvalidInput, NsqError, ProtocolError
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, DelayRecord, decode_delay
from nsqext.protocol.headers import IDENTITY_HEADER
from nsqext.protocol.names import check_channel, check_topic
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from nsqext import MessageBatch, Producer
    from nsqext.app import App
    from nsqext.delays.store import DelayStore

logger: logging.Logger = logging.getLogger("nsqext.delays")

_AT_ONCE = 200
"""Messages that are taken from the store and published together."""
_IN_FLIGHT = 2000
_LEASE = 5.0
"""Seconds beyond the timeout of a publish after which another process publishes what this one has taken."""
_RETRY = 15.0
"""Seconds until a message that could not be published is tried again."""
_POLL = 1.0
"""Seconds between two looks at a store to which another process adds messages."""
_FORGET = 600.0
"""Seconds between two removals of old identities."""


class DelayRelay:
    """Publishes the messages of ``publish(delay=…, via="relay")`` when they are due.

    It consumes the topic of delayed messages, stores them in a file, and finishes them then. A message is published at
    least once: twice where the process is killed between publish and the record of it. Any number of relays may run:
    those of one machine with the same store, those of other machines with stores of their own.

    Args:
        store: the store, which the caller closes when the app has ended.
        topic: topic of the delayed messages.
        channel: channel of all relays.
        keep: seconds for which identities of published and cancelled messages are known.

    Raises:
        InvalidName: a topic or channel that servers refuse.
        InvalidSetting: a time that is not valid.

    Attributes:
        channels: the channel of all relays, and that of this store, by which it receives every cancellation.
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
        self._publishing = 0
        self._published: list[str] = []
        """Identities of messages that were published, and that the store does not know of yet."""

    def attach(self, app: App) -> None:
        """Add the handlers and the lifespan of the relay to an app.

        Raises:
            InvalidState: the app is running already.
        """
        app.lifespan(self._lifespan)
        kinds: tuple[type[DelayRecord], ...] = DelayedMessage, DelayCancel
        for channel, kind in zip(self.channels, kinds, strict=True):
            register = app.batch_handler(self.topic, channel, max_wait=0.0, max_in_flight=_IN_FLIGHT)
            register(partial(self._add, kind=kind))

    async def _lifespan(self, app: App) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._publish_due, app.producer)
            tasks.start_soon(self._forget_old)
            yield
            tasks.cancel_scope.cancel()
        published, self._published = self._published, []
        self._store.take(published, 0, 0.0, 0.0)

    async def _add(self, batch: MessageBatch, kind: type[DelayRecord]) -> None:
        records = []
        for message in batch:
            try:
                record = decode_delay(message.body)
            except ProtocolError:
                if kind is DelayedMessage:
                    logger.exception("dropped %r", message, extra={"topic": self.topic})
                continue
            if isinstance(record[0], kind):
                records.append(record)
        if records:
            await to_thread.run_sync(self._store.add, records)
            self._changed.wake()

    async def _publish_due(self, producer: Producer) -> None:
        store, published = self._store, self._published
        lease = float(str(producer.settings["timeout"])) + _LEASE
        async with anyio.create_task_group() as tasks:
            while True:
                count = len(published)
                free = _AT_ONCE - self._publishing
                taken = await to_thread.run_sync(store.take, published[:count], free, time.time(), lease)
                del published[:count]
                self._publishing += len(taken)
                for identity, data in taken:
                    tasks.start_soon(self._publish, producer, identity, data)
                if not taken:
                    await self._wait(await to_thread.run_sync(store.next_due))

    async def _wait(self, due: float | None) -> None:
        """Wait for a change, or until the next message is due."""
        full = self._publishing == _AT_ONCE or due is None
        with anyio.move_on_after(_POLL if full or due is None else min(_POLL, max(0.0, due - time.time()))):
            await self._changed.wait()

    async def _publish(self, producer: Producer, identity: str, data: bytes) -> None:
        try:
            await publish_record(producer, data)
            self._published.append(identity)
        except NsqError as error:
            logger.warning("a delayed message cannot be published, next attempt in %g s: %s", _RETRY, error)
            again, alone = time.time() + _RETRY, isinstance(error, InvalidInput)
            await to_thread.run_sync(partial(self._store.failed, identity, str(error), again, alone=alone))
        finally:
            self._publishing -= 1
            self._changed.wake()

    async def _forget_old(self) -> None:
        while True:
            await to_thread.run_sync(self._store.forget, time.time() - self._keep)
            await anyio.sleep(_FORGET)


async def publish_record(producer: Producer, data: bytes) -> None:
    """Publish a stored message to its topic, on topics with extend support with its identity in a header."""
    record, body = decode_delay(data)
    if not isinstance(record, DelayedMessage):
        raise ProtocolError("not a delayed message")
    headers = record.headers
    if (await producer.meta(record.topic)).extend_support:
        headers = {IDENTITY_HEADER: record.identity, **(headers or {})}
    await producer.publish(
        record.topic,
        body,
        headers=headers,
        tag=record.tag,
        trace_id=record.trace_id,
        key=record.key,
        partition=record.partition,
    )
