"""The publishers of a schedule: single messages, batches, and a `nsqext.Batcher`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from nsqext import (
    Batcher,
    BatchFailed,
    DeliveryUnknown,
    Lookup,
    NsqError,
    OutgoingMessage,
    Producer,
    ProducerSettings,
    Receipt,
)
from tests.campaigns.simulation.history import History, Publish, PublishOutcome
from tests.campaigns.simulation.plan import KEY_TAGS

if TYPE_CHECKING:
    from nsqext.testing.simulation import World
    from tests.campaigns.simulation.plan import Plan

__all__ = ("BUCKETS", "KEYED", "TAGS", "Publishers")

KEYS = 6
BUCKETS = 4
KEYED = ("lanes", "keyed", "ordered", "rejected")
TAGS = ("blue", "green", "red")
"""Tags of messages; a consumer of ``green`` joins and leaves, and no consumer wants ``red``."""
_TAGGED = ("tagged", "rejected")
_BURST = 4
"""Publishes of one key that do not wait for each other."""
_GROUP = 8
"""Messages that are added to a batcher before it is flushed."""


class Publishers:
    """Publishers of one schedule.

    Args:
        world: the world.
        plan: the schedule.
        history: of the schedule.
        lookupd: lookup addresses, or what clients share.
        request_timeout: of connections, in seconds.
        extend: topics that support extend headers from the beginning.

    Attributes:
        working: whether they publish; they end soon after it is False.
        producers: what they share.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        history: History,
        lookupd: list[str] | Lookup,
        request_timeout: float,
        extend: set[str],
    ) -> None:
        self.working: bool = True
        self.producers: list[Producer] = []
        self.tagging: dict[Producer, Producer] = {}
        """For topics whose keys are shared by tags, the producer that writes them, by the other one."""
        self._world = world
        self._plan = plan
        self._history = history
        self._lookupd = lookupd
        self._request_timeout = request_timeout
        self._extend = extend
        self._tags = Random(f"tags {plan.seed}")

    def duties(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return what runs while faults happen."""
        plan = self._plan
        return [
            *(partial(self.publish_each, topic, f"single {topic}") for topic in plan.single),
            *(partial(self._publish_batches, topic, f"batch {topic}") for topic in plan.batches),
            *(partial(self._use_batcher, topic, f"batcher {topic}") for topic in plan.batchers),
        ]

    def tags_of(self, topic: str) -> int:
        """Return by how many tags the keys of a topic are shared; 0 if they are not."""
        return BUCKETS if topic == "keyed" and KEY_TAGS in self._plan.features else 0

    def producer(self, lookupd: list[str] | None = None, *, key_tags: int = 0) -> Producer:
        """Return a new producer."""
        history = self._history
        settings: ProducerSettings = {
            "on_unknown": history.on_unknown,
            "timeout": history.timeout,
            "request_timeout": self._request_timeout,
            "key_tags": key_tags,
        }
        if history.settle_timeout:
            settings["settle_timeout"] = history.settle_timeout
        elif "http" in self._plan.habits:
            settings["transport"] = "http"
        return Producer(lookupd or self._lookupd, **settings)

    def _chosen(self, topic: str) -> Producer:
        return self._for(topic, self._world.random.choice(self.producers))

    def _for(self, topic: str, producer: Producer) -> Producer:
        return self.tagging[producer] if self.tags_of(topic) else producer

    def _begin(self, topic: str, key: str, batch: int = 0) -> Publish:
        history = self._history
        number = len(history.publishes) + 1
        publish = Publish(f"{topic}/{key}/{number}".encode(), topic, key, number, self._world.now, batch=batch)
        if topic in _TAGGED:
            publish.tag = self._tags.choice(("", *TAGS))
        publish.headers = self._headers(publish)
        history.publishes.append(publish)
        return publish

    def _headers(self, publish: Publish) -> dict[str, str]:
        """Return the headers of a message; a topic that is not upgraded refuses them."""
        topic, number = publish.topic, publish.number
        if topic == "filtered":
            color = self._tags.choice(("", *TAGS))
            return {"color": color, "number": str(number)} if color else {}
        wanted = "headers" in self._plan.habits and topic in (*self._extend, "upgraded")
        return {"number": str(number)} if (wanted or topic == "rejected") and number % 3 else {}

    def _end(self, publish: Publish, result: Receipt | BaseException | None) -> None:
        """Note an outcome; None for a message that a batcher stored, which gives no receipt."""
        publish.end = self._world.now
        if result is None or isinstance(result, Receipt):
            publish.outcome = "stored"
            if result is not None:
                publish.partition = -1 if result.partition is None else result.partition
                publish.message_id, publish.offset = result.message_id, result.offset
            self._history.stored(publish)
            return
        outcome: PublishOutcome = "undocumented"
        if isinstance(result, NsqError):
            outcome = "unknown" if isinstance(result, DeliveryUnknown) else "failed"
        elif not isinstance(result, Exception):
            outcome = "killed"
        publish.outcome, publish.error = outcome, repr(result)

    async def publish_each(self, topic: str, name: str, producer: Producer | None = None) -> None:
        """Publish single messages."""
        random, keyed = self._world.random, topic in KEYED
        producer = producer or random.choice(self.producers)
        while self.working:
            key = f"{name}{random.randrange(KEYS)}" if keyed else ""
            async with anyio.create_task_group() as tasks:
                for _ in range(random.choice((1, 1, _BURST)) if keyed else 1):
                    tasks.start_soon(self.publish_one, producer, topic, key)
            await anyio.sleep(random.uniform(0.0, self._plan.pause))

    async def publish_one(self, producer: Producer, topic: str, key: str) -> None:
        """Publish one message."""
        publish = self._begin(topic, key)
        trace_id = publish.number if self._world.random.random() < 0.5 else None
        if topic == "upgraded" and self._history.healed is not None:
            publish.headers = {}
        try:
            receipt = await self._for(topic, producer).publish(
                *(topic, publish.body),
                headers=publish.headers or None,
                tag=publish.tag or None,
                key=key or None,
                trace_id=trace_id,
            )
        except BaseException as error:
            self._end(publish, error)
            if not isinstance(error, Exception):
                raise
        else:
            self._end(publish, receipt)

    async def _publish_batches(self, topic: str, name: str) -> None:
        random = self._world.random
        producer = self._chosen(topic)
        while self.working:
            size = random.randint(1, self._plan.batch)
            number = len(self._history.publishes) + 1
            batch = [self._begin(topic, self._key(topic, name), number) for _ in range(size)]
            if "http" in self._plan.habits and not self._history.settle_timeout:
                for publish in batch:  # those with headers or trace ids are sent one by one
                    publish.patience = self._history.timeout * (size - 1)
            messages = [_outgoing(publish) for publish in batch]
            outcomes: list[Any]
            try:
                outcomes = list(await producer.publish_many(topic, messages))
            except BatchFailed as error:
                outcomes = list(error.outcomes)
            except Exception as error:
                outcomes = [error] * len(batch)
            for publish, outcome in zip(batch, outcomes, strict=True):
                self._end(publish, outcome)
            await anyio.sleep(random.uniform(0.0, 4 * self._plan.pause))

    def _key(self, topic: str, name: str) -> str:
        return f"{name}{self._world.random.randrange(KEYS)}" if topic in KEYED else ""

    # --- batcher --------------------------------------------------------------------------------------------------

    async def _use_batcher(self, topic: str, name: str) -> None:
        """Publish through a batcher: one task adds messages and flushes, others wait for receipts."""
        random = self._world.random
        count = random.choice((2, 6, 1000))
        room = random.choice((4, 2 * count, 10_000))
        patience = self._history.timeout * (3 + min(4, ceil(room / count))) + 10.0
        added: dict[int, tuple[OutgoingMessage, Publish]] = {}
        batcher = self._chosen(topic).batcher(
            topic, linger=random.choice((0.0, 0.005, 0.2)), max_count=count, max_pending=room
        )
        with suppress(BatchFailed):  # take_failed() says which
            async with batcher, anyio.create_task_group() as tasks:
                for number in range(random.choice((0, 1, 2))):
                    tasks.start_soon(self._publish_with, batcher, topic, f"{name} {number} ", patience)
                await self._add_to(batcher, topic, f"{name} added ", patience, added)
        self._end_added(batcher, added)

    async def _publish_with(self, batcher: Batcher, topic: str, name: str, patience: float) -> None:
        random = self._world.random
        while self.working:
            publish = self._begin(topic, self._key(topic, name))
            publish.patience = patience
            try:
                self._end(publish, await batcher.publish(_outgoing(publish)))
            except Exception as error:
                self._end(publish, error)
            await anyio.sleep(random.uniform(0.0, self._plan.pause))

    async def _add_to(
        self,
        batcher: Batcher,
        topic: str,
        name: str,
        patience: float,
        added: dict[int, tuple[OutgoingMessage, Publish]],
    ) -> None:
        random = self._world.random
        while self.working:
            group = len(self._history.publishes) + 1
            for _ in range(random.randint(1, _GROUP)):
                publish = self._begin(topic, self._key(topic, name), group)
                publish.patience = patience
                message = _outgoing(publish)
                try:
                    await batcher.add(message)
                    added[id(message)] = message, publish
                except BatchFailed as error:  # room for failed messages is used up: this one is not accepted
                    self._end(publish, error)
                    break
                if random.random() < 0.3:
                    await anyio.sleep(random.uniform(0.0, self._plan.pause))
            if self.working:  # otherwise the end of the batcher publishes what is pending
                with suppress(BatchFailed):
                    await batcher.flush()
                self._end_added(batcher, added)
                await anyio.sleep(random.uniform(0.0, 2 * self._plan.pause))

    def _end_added(self, batcher: Batcher, added: dict[int, tuple[OutgoingMessage, Publish]]) -> None:
        """Note the outcomes of what was added, after a flush or the end: what did not fail is stored."""
        for failed, error in batcher.take_failed():
            _, publish = added.pop(id(failed))
            self._end(publish, error)
        for _, publish in added.values():
            self._end(publish, None)
        added.clear()


def _outgoing(publish: Publish) -> OutgoingMessage:
    return OutgoingMessage(publish.body, publish.headers or None, key=publish.key or None, tag=publish.tag or None)
