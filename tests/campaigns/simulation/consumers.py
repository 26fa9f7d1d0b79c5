"""The consumers of a schedule: handlers, handlers of batches, loops over batches, and fetches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio
from attrs import define

from nsqext import Consumer, ExtFilter, Lookup, Message, MessageBatch, Reject, Requeue
from nsqext.errors import InvalidState, MessageNotInFlight
from nsqext.key_ranges import bucket_tag
from tests.campaigns.simulation.history import Channel, Delivery, History, Letter, Wanted
from tests.campaigns.simulation.plan import JOINS, KEY_TAGS, LATE
from tests.campaigns.simulation.publishers import BUCKETS

if TYPE_CHECKING:
    from types import TracebackType

    from anyio.abc import TaskGroup

    from nsqext.testing.simulation import World
    from tests.campaigns.simulation.plan import Plan

__all__ = ("Client", "Consumers")

_ANSWERED = 75.0
"""Virtual seconds in which the last messages are handled: a key of a deleted topic waits 60 s for a redelivery."""

_BLUE = ExtFilter(1, "color", "blue")
_LATE = (901.0, 1500.0)
"""Delays of requeues in seconds that are longer than what nodes keep in memory."""

Way = Literal["handler", "batch_handler", "batches", "fetch"]


class HandlerFailed(Exception):
    """What handlers raise now and then."""


@define(eq=False)
class Client:
    """A consumer, and the tasks that loop over its batches; a context manager that opens and closes it.

    Attributes:
        consumer: the consumer.
        name: its name in the history.
        channel: topic and channel.
        tag: its tag; empty without one.
        way: how it receives messages.
        loops: tasks that loop over its batches.
        max_count: messages of a batch.
        keeps_keys: whether it keeps the order of keys.
    """

    makers: Consumers
    consumer: Consumer
    name: str
    channel: tuple[str, str]
    tag: str
    way: Way
    loops: int = 0
    max_count: int = 1
    keeps_keys: bool = False
    _wanted: Wanted | None = None

    async def __aenter__(self) -> Self:
        await self.consumer.__aenter__()
        makers = self.makers
        if self.tag:
            self._wanted = Wanted(*self.channel, self.tag, makers.world.now)
            makers.history.wanted.append(self._wanted)
        for _ in range(self.loops):
            makers.tasks.start_soon(makers.loop, self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._wanted is not None:
            self._wanted.end = self.makers.world.now
        await self.consumer.__aexit__(kind, error, trace)


class Consumers:
    """Consumers of one schedule.

    Args:
        world: the world.
        plan: the schedule.
        history: of the schedule.
        lookupd: lookup addresses, or what clients share.
        request_timeout: of connections, in seconds.
        tasks: runs loops over batches.
        extend: topics that support extend headers from the beginning.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        history: History,
        lookupd: list[str] | Lookup,
        request_timeout: float,
        tasks: TaskGroup,
        extend: set[str],
    ) -> None:
        self.world: World = world
        self.history: History = history
        self.tasks: TaskGroup = tasks
        self._plan = plan
        self._lookupd = lookupd
        self._request_timeout = request_timeout
        self._extend = extend
        self._failing = 0.2 if "failing" in plan.habits else 0.05 if "delays" in plan.habits else 0.01
        self._batches = 0
        self._random = Random(f"consumers {plan.seed}")  # for features: schedules without one stay as they are

    def every(self, topics: Sequence[str] = ()) -> list[Client]:
        """Return the consumers that run from the beginning to the end, of all topics or of some."""
        every: list[tuple[str, str, dict[str, Any]]] = [
            ("plain", "a", {"concurrency": 4}),
            ("plain", "b", {"concurrency": 2, "max_in_flight": 5}),
            ("lanes", "a", {"concurrency": 4, "key": "##key"}),
            ("keyed", "a", {"concurrency": 3, "dispatch": "key_failover"}),
            ("keyed", "a", {"concurrency": 3, "dispatch": "key_failover"}),
            ("ordered", "a", {"concurrency": 2}),
            ("upgraded", "a", {"concurrency": 2}),
            ("recreated", "a", {"concurrency": 2} | ({"key": "##key"} if "recreated" in self._extend else {})),
            ("tagged", "a", {"concurrency": 4}),
            ("tagged", "a", {"concurrency": 2, "tag": "blue", "max_in_flight": 5}),
            ("rejected", "a", {"concurrency": 3}),
            ("letters", "a", {"concurrency": 2}),
            ("filtered", "a", {"concurrency": 2}),
            ("filtered", "blue", {"concurrency": 2, "ext_filter": _BLUE}),
            ("filtered", "blue", {"concurrency": 2, "ext_filter": _BLUE}),
        ]
        topics = topics or (*self._plan.topics, *(("letters",) if "rejected" in self._plan.topics else ()))
        return [
            self.make(topic, channel, settings, way=self._way(topic, settings))
            for topic, channel, settings in every
            if topic in topics
        ]

    def guest(self, topic: str, channel: str) -> Client:
        """Return a consumer that joins and leaves."""
        return self.make(topic, channel, {"concurrency": 2})

    def _way(self, topic: str, settings: dict[str, Any]) -> Way:
        """Return how a consumer receives messages; loops keep no order of keys, and have no dead letters."""
        ways: list[Way] = [way for way in ("batch_handler", "batches", "fetch") if way in self._plan.features]
        if topic == "rejected" or "key" in settings or "dispatch" in settings:
            ways = [way for way in ways if way == "batch_handler"]
        if not ways:
            return "handler"
        return self._random.choice(ways)

    def make(
        self,
        topic: str,
        channel: str,
        settings: dict[str, Any],
        *,
        name: str = "",
        way: Way = "handler",
        hangs: bool = False,
        close_timeout: float = 30.0,
        lookupd: list[str] | None = None,
    ) -> Client:
        """Return a consumer that is not open."""
        history = self.history
        name = name or f"{topic}/{channel}/{len(history.concurrency)}"
        if topic == "keyed" and KEY_TAGS in self._plan.features:
            settings = settings | {"key_tags": BUCKETS}
        if way != "handler":
            settings = settings | {"max_in_flight": self._random.choice((4, 20, 200))}
        options: dict[str, Any] = {
            "close_timeout": 1.0 if hangs else close_timeout,
            "backoff": "off",
            "max_reconnect_wait": 1.0,
            "request_timeout": self._request_timeout,
            **self._failure(topic),
        }
        consumer = Consumer(topic, channel, lookupd=lookupd or self._lookupd, **options, **settings)
        client = Client(self, consumer, name, (topic, channel), settings.get("tag", ""), way)
        client.keeps_keys = "key" in settings or "dispatch" in settings
        history.concurrency[name] = settings["concurrency"]
        if client.tag:
            history.tags[name] = client.tag
        if way == "handler":
            self._handle_each(client, hangs=hangs)
            return client
        client.max_count = self._random.choice((2, 10))
        if way == "batch_handler":
            history.concurrency[name] *= client.max_count
            self._handle_batches(client)
        else:
            client.loops = self._random.choice((1, 1, 2))
            history.concurrency[name] = client.loops * client.max_count
        return client

    def _failure(self, topic: str) -> dict[str, Any]:
        channel = self._channel(topic)
        if channel is None or not channel.letters:
            return {"requeue_delay": 0.05}
        return {
            "requeue_delay": 0.05,
            "max_attempts": channel.max_attempts,
            "dead_letter": channel.letters,
            "reject_ordered": True,
        }

    def _channel(self, topic: str) -> Channel | None:
        return next((channel for channel in self.history.channels if channel.topic == topic), None)

    # --- deliveries -----------------------------------------------------------------------------------------------

    def _begin(self, client: Client, message: Message) -> Delivery:
        delivery = Delivery(
            *(message.body, *client.channel, client.name),
            -1 if message.partition is None else message.partition,
            message.internal_id,
            message.attempts,
            self.world.now,
            received=self.world.now - (time.monotonic() - message.delivered),
        )
        self.history.begun(delivery)
        self._check_headers(message)
        if client.channel[0] == "letters":
            self._check_letter(message)
        return delivery

    def _end(self, deliveries: Sequence[Delivery], outcome: Literal["returned", "raised"], delay: float = 0.0) -> None:
        """Note how messages are answered, before they are."""
        for delivery in deliveries:
            delivery.end, delivery.outcome, delivery.delay = self.world.now, outcome, delay
            if outcome == "returned":
                self.history.handled(delivery)

    def _check_headers(self, message: Message) -> None:
        number = int(message.body.rsplit(b"/", 1)[1])
        publish = self.history.publishes[number - 1]
        found, due = message.headers.get("number"), publish.headers.get("number")
        if found != due:
            self.history.changed.append(f"{message.body!r} arrived with header {found!r} instead of {due!r}")
        tag = publish.tag
        if message.topic == "keyed" and KEY_TAGS in self._plan.features:
            tag = bucket_tag(publish.key.encode(), BUCKETS)
        if (message.tag or "") != tag:
            self.history.changed.append(f"{message.body!r} arrived with tag {message.tag!r} instead of {tag!r}")

    def _check_letter(self, message: Message) -> None:
        """Check what a dead letter says about its message."""
        found = {name.removeprefix("dead-letter-"): str(value) for name, value in message.headers.items()}
        body = message.body
        publish = self.history.publishes[int(body.rsplit(b"/", 1)[1]) - 1]
        origin = found.get("topic"), found.get("channel"), message.key
        if origin != ("rejected", "a", publish.key):
            self.history.changed.append(f"the letter of {body!r} has topic, channel and key {origin!r}")
        place = int(found.get("partition", -1)), int(found.get("id", "0")[:16], 16)
        attempts, error = int(found.get("attempts", 0)), found.get("error", "")
        self.history.letters.append(Letter(body, self.world.now, message.internal_id, *place, attempts, error))

    async def _work(self, *, hangs: bool = False) -> None:
        random = self.world.random
        chance = random.random()
        if hangs:
            await anyio.sleep_forever()
        if chance < 0.2:
            await anyio.sleep(random.uniform(0.0, 0.02))
        elif JOINS in self._plan.features and chance < 0.3:
            await anyio.sleep(random.uniform(1.0, 5.0))  # while its bucket moves, which takes one to three seconds
        elif chance < 0.205:
            await anyio.sleep(random.uniform(1.0, 8.0))

    def _is_late(self, delivery: Delivery) -> bool:
        """Return whether a message is requeued for a long time: one that was published after the faults."""
        if LATE not in self._plan.features or delivery.topic != "plain" or self.history.healed is None:
            return False
        publish = self.history.publishes[int(delivery.body.rsplit(b"/", 1)[1]) - 1]
        again = any(found.delay and found.body == delivery.body for found in self.history.deliveries)
        return publish.begin > self.history.healed and not again

    def _fails(self, client: Client) -> bool:
        return self.world.random.random() < (0.4 if client.channel[0] == "rejected" else self._failing)

    def _error(self, client: Client) -> Exception:
        random = self.world.random
        if client.channel[0] == "rejected" and random.random() < 0.1:
            return Reject("by chance")
        if "delays" in self._plan.habits:
            return Requeue(delay=random.choice((0.0, 0.3, 2.0)))
        return HandlerFailed()

    # --- ways to receive messages ---------------------------------------------------------------------------------

    def _handle_each(self, client: Client, *, hangs: bool) -> None:
        @client.consumer.handler
        async def handle(message: Message) -> None:
            delivery = self._begin(client, message)
            try:
                await self._work(hangs=hangs)
                if self._is_late(delivery):
                    self._end([delivery], "raised", self._random.choice(_LATE))
                    raise Requeue(delivery.delay, backoff=False)
                if self._fails(client):
                    self._end([delivery], "raised")
                    error = self._error(client)
                    if isinstance(error, Requeue):
                        delivery.delay = error.delay or 0.0
                    raise error
                self._end([delivery], "returned")
            finally:
                self._cancel([delivery])

    def _cancel(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if delivery.outcome == "running":
                delivery.end, delivery.outcome = self.world.now, "cancelled"

    def _handle_batches(self, client: Client) -> None:
        @client.consumer.batch_handler(max_count=client.max_count, max_wait=self._random.choice((0.0, 0.05)))
        async def handle(batch: MessageBatch) -> None:
            deliveries = [self._begin(client, message) for message in batch]
            self._batches += 1
            for delivery in deliveries:
                delivery.batch = self._batches
            self._check_batch(client, deliveries)
            try:
                await self._work()
                if not await self._answer(client, batch, deliveries):
                    raise self._error(client)
            finally:
                self._cancel(deliveries)

    def _check_batch(self, client: Client, deliveries: Sequence[Delivery]) -> None:
        """Check that the messages of a key are in order within a batch; those without a key may be in any order."""
        if not client.keeps_keys:
            return
        latest: dict[tuple[int, str], Delivery] = {}
        for delivery in deliveries:
            place = delivery.partition, self._key(delivery)
            before = latest.get(place)
            if place[1] and before is not None and before.message_id >= delivery.message_id:
                self.history.changed.append(f"a batch has {delivery.body!r} behind {before.body!r}, of the same key")
            latest[place] = delivery

    def _key(self, delivery: Delivery) -> str:
        return self.history.publishes[int(delivery.body.rsplit(b"/", 1)[1]) - 1].key

    async def loop(self, client: Client) -> None:
        """Loop over batches, or fetch them, until the consumer is closed."""
        receive = self._fetch if client.way == "fetch" else self._iterate
        while not await receive(client):
            pass

    async def _iterate(self, client: Client) -> bool:
        """Loop over batches; return whether the consumer was closed, and not the loop left."""
        wait = self._random.choice((0.0, 0.05, 0.3))
        async for batch in client.consumer.batches(max_count=client.max_count, max_wait=wait):
            if not await self._receive(client, batch):
                return False
        return True

    async def _fetch(self, client: Client) -> bool:
        count = self._random.randint(1, client.max_count)
        try:
            batch = await client.consumer.fetch(count, None if count == 1 else self._random.choice((0.1, 1.0, 3.0)))
        except InvalidState:
            return True
        if not await self._receive(client, batch):
            await self._answered_or_refused(batch.requeue())
        return False

    async def _receive(self, client: Client, batch: MessageBatch) -> bool:
        deliveries = [self._begin(client, message) for message in batch]
        await self._work()
        return await self._answer(client, batch, deliveries)

    async def _answer(self, client: Client, batch: MessageBatch, deliveries: list[Delivery]) -> bool:
        """Answer the messages of a batch, all of them or those up to one; return False if the rest has failed."""
        if not batch or not self._fails(client):
            self._end(deliveries, "returned")
            await self._answered_or_refused(batch.finish())
            return True
        random, count = self._random, len(batch)
        first = random.randrange(count)
        delay = random.choice((0.0, 0.3))
        if client.channel[0] == "ordered":
            delay = 0.0  # servers ignore a requeue with a delay
        cases = ("up to", "requeue", "one", "leave", *(("hold",) if client.keeps_keys else ()))
        match random.choice(cases):
            case "up to":
                self._end(deliveries[: first + 1], "returned")
                await self._answered_or_refused(batch.finish_up_to(random.choice((first, batch[first]))))
                self._end(deliveries[first + 1 :], "raised", delay)
                await self._answered_or_refused(batch.requeue(delay=delay))
                return True
            case "requeue":
                self._end(deliveries[first:], "raised", delay)
                await self._answered_or_refused(batch.requeue(batch[first:], delay))
                self._end(deliveries[:first], "returned")
                await self._answered_or_refused(batch.finish())
                return True
            case "one":
                self._end([deliveries[first]], "returned")
                if not await self._answered_or_refused(batch[first].finish()):
                    self.history.failed_after_all(deliveries[first])  # with the rest of the batch
                self._end(deliveries[:first] + deliveries[first + 1 :], "raised")
            case "hold":  # one is requeued, and the later ones of its key are not finished with the batch
                key, place = self._key(deliveries[first]), deliveries[first].partition
                later = deliveries[first + 1 :] if key else []  # messages without a key are not held back
                kept = [one for one in later if (self._key(one), one.partition) == (key, place)]
                self._end([deliveries[first], *kept], "raised", delay)
                self._end([one for one in deliveries if one.outcome == "running"], "returned")
                await self._answered_or_refused(batch[first].requeue(delay))
                return True
            case _:
                self._end(deliveries, "raised")
        return False

    async def _answered_or_refused(self, answer: Any) -> bool:
        try:
            await answer
        except MessageNotInFlight as error:
            self.history.refused.append((self.world.now, str(error)))
            return False
        return True

    async def note_unanswered(self, clients: Sequence[Client]) -> None:
        """Note the consumers with messages in flight that no handler has, when everything was handled."""
        with anyio.move_on_after(_ANSWERED):
            while self._unanswered(clients):  # noqa: ASYNC110 - consumers count
                await anyio.sleep(0.5)
        self.history.unanswered += self._unanswered(clients)

    def _unanswered(self, clients: Sequence[Client]) -> list[str]:
        found = []
        running = Counter(one.consumer for one in self.history.deliveries if one.outcome == "running")
        for client in clients:
            in_flight = client.consumer.statistics().in_flight
            if in_flight > running[client.name]:
                found.append(f"{client.name} has {in_flight} messages in flight, and handles {running[client.name]}")
        return found
