"""The NSQ clients of one kombu connection, its transport options, and the consumer of each queue."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from attrs import define, field, fields
from kombu.transport import virtual

from nsqext import sync
from nsqext.admin.options import admin_settings
from nsqext.arguments import check_time, suggest
from nsqext.client.consumer.message import ACCEPTED_DELAY, Requeue
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.settings import SELECTING, consumer_settings, producer_settings, settings_for
from nsqext.errors import (
    InvalidSetting,
    InvalidState,
    MessageNotInFlight,
    PartitionUnavailable,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.integrations import QueueTopics, kept_delay, log_lost
from nsqext.integrations.celery.envelope import decode_message, due_time, expires_after, foreign_message
from nsqext.lookup.lookup import share_lookup
from nsqext.protocol.names import is_ephemeral
from nsqext.settings import Given, build

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvent
    from nsqext.integrations.celery.envelope import QueueSpec
    from nsqext.sync.message import Message


# options of kombu and Celery
_KOMBU = frozenset(
    {
        "callback",
        "client_properties",
        "confirm_publish",
        "connect_retries_timeout",
        "errback",
        "interval_max",
        "interval_start",
        "interval_step",
        "max_retries",
        "polling_interval",
        "queue_order_strategy",
    }
)
_ETA_HOLD = 30.0
_TOPIC = {one.name for one in fields(QueueTopics)}
_REFUSED = {
    "visibility_timeout": "NSQ redelivers after msg_timeout, and messages are touched until they are acknowledged",
    "priority_steps": "NSQ has no priorities; use a queue for each of them",
    "body_encoding": "bodies are stored as they are",
    "max_in_flight": "set worker_prefetch_multiplier, or the prefetch count of the channel",
    "concurrency": "set the concurrency of the worker",
}


@define(eq=False)
class NsqClients:
    """Clients opened on first use, and closed together. Thread-safe.

    Producer and consumers share a `nsqext.Lookup`.
    """

    addresses: Mapping[str, Any]  #: `lookupd` or `nsqd` with addresses
    #: the transport options, settings of nsqext, `topic_create`, `topic_partitions`, `topic_replicas`, `topic_extend`
    #: and `eta_hold`
    options: Mapping[str, Any]
    topics: QueueTopics = field(init=False)
    #: longest time in seconds for which a worker keeps a task with `eta` or `countdown` in flight
    eta_hold: float = field(init=False)
    _settings: dict[str, Any] = field(init=False)
    _shared: Given = field(init=False)  # addresses and settings of producer and consumers
    _producer: sync.Producer | None = field(default=None, init=False)
    _admin: sync.Admin | None = field(default=None, init=False)
    _ready: set[tuple[str, str]] = field(factory=set, init=False)
    _opened: ExitStack = field(factory=ExitStack, init=False)
    _lock: threading.RLock = field(factory=threading.RLock, init=False)

    def __attrs_post_init__(self) -> None:
        known = {*producer_settings(), *consumer_settings(), *admin_settings()}
        given = {name: value for name, value in self.options.items() if name not in _KOMBU}
        for name in given:
            if name in _REFUSED:
                raise InvalidSetting(f"transport option {name} has no effect with NSQ", hint=_REFUSED[name])
            if name in SELECTING:
                raise InvalidSetting(f"tasks would be lost with the transport option {name}", hint="leave it out")
            if name not in {*known, *_TOPIC, "eta_hold", "lookupd", "nsqd"}:
                found = suggest(name, (*known, *_TOPIC, "eta_hold"))
                raise InvalidSetting(
                    f"unknown transport option {name!r}", hint=f"did you mean {found}?" if found else None
                )
        self.topics = QueueTopics(**{name: value for name, value in given.items() if name in _TOPIC})
        self.eta_hold = given.get("eta_hold", _ETA_HOLD)
        check_time("eta_hold", self.eta_hold)
        addresses: dict[str, Any] = {name: given[name] for name in ("lookupd", "nsqd") if name in given}
        self.addresses = addresses or self.addresses
        self._settings = {name: value for name, value in given.items() if name in known}
        # refuses invalid values before the first client
        build(ProducerOptions, producer_settings(), settings_for(producer_settings(), self._settings))
        build(ConsumerOptions, consumer_settings(), settings_for(consumer_settings(), self._settings))
        self._shared = share_lookup(
            Given(self.addresses.get("lookupd", ()), self.addresses.get("nsqd", ()), self._settings)
        )

    @property
    def has_lookup(self) -> bool:
        """Whether topics can be created and counted."""
        return bool(self.addresses.get("lookupd"))

    @property
    def producer(self) -> sync.Producer:
        with self._lock:
            if self._producer is None:
                shared = self._shared
                own = settings_for(producer_settings(), shared.values)
                producer = sync.Producer(shared.lookupd, nsqd=shared.nsqd, **own)
                self._producer = self._opened.enter_context(producer)
            return self._producer

    @property
    def admin(self) -> sync.Admin:
        with self._lock:
            if self._admin is None:
                if not self.has_lookup:
                    raise InvalidState(
                        "queues are counted, purged and deleted through lookup", hint="use nsq:// instead of nsqd://"
                    )
                own = settings_for(admin_settings(), self._settings)
                self._admin = self._opened.enter_context(sync.Admin(self.addresses["lookupd"], **own))
            return self._admin

    def consumer(self, topics: Iterable[str], channel: str, max_in_flight: int) -> sync.Consumer:
        """Return an unopened consumer."""
        shared = self._shared
        own = settings_for(consumer_settings(), shared.values)
        return sync.Consumer(
            tuple(topics), channel, shared.lookupd, nsqd=shared.nsqd, max_in_flight=max_in_flight, **own
        )

    def close(self) -> None:
        """Close all clients, after the publishes in flight."""
        with self._lock:
            opened, self._opened = self._opened.pop_all(), ExitStack()
            self._producer = self._admin = None
        opened.close()

    # Topics and channels

    def create(self, topic: str, channel: str) -> None:
        """Create a missing topic or channel, which keeps messages from now on.

        Without lookup, nsqd creates them with the first publish and the first consumer.

        Raises:
            InvalidState: it is missing, and ``topic_create`` is False: tasks would be dropped.
        """
        if not self.has_lookup or (topic, channel) in self._ready:
            return
        if self.topics.topic_create:
            self.admin.create_topic(topic, **self.topics.arguments(channel))
        elif not is_ephemeral(channel):
            self._check(topic, channel)
        self._ready.add((topic, channel))

    def _check(self, topic: str, channel: str) -> None:
        """Raise InvalidState for a missing topic or channel; a first channel of the original NSQ gets all messages."""
        try:
            found = self.admin.topic(topic)
            first = found.generation == "original" and not found.channels
            missing = "" if first or channel in found.channels else f"the channel {channel}"
        except TopicNotFound:
            missing = "the topic"
        if missing:
            raise InvalidState(
                f"{missing} of a queue does not exist, and topic_create is False",
                topic=topic,
                hint=f"nsqext topic create {topic} --channel {channel}",
            )

    def publish(self, topic: str, body: bytes, headers: Mapping[str, str] | None, due: float | None) -> bool:
        """Publish a message at once, or due at a time in seconds since 1970; return False if no queue is bound.

        A durable queue that this connection has declared is created again: it was deleted meanwhile, or lookup does not
        know it yet, and its message would be lost.
        """
        try:
            self._send(topic, body, headers, due)
        except (TopicNotFound, TopicNotReady):
            declared = [queue for queue in tuple(self._ready) if queue[0] == topic and not is_ephemeral(queue[1])]
            if not declared:
                return False
            for queue in declared:
                self._ready.discard(queue)
                self.create(*queue)
            self._send(topic, body, headers, due)
        return True

    def _send(self, topic: str, body: bytes, headers: Mapping[str, str] | None, due: float | None) -> None:
        delay = None if due is None else self._delay(topic, due - time.time())
        self.producer.publish(topic, body, headers=headers, delay=delay)

    def _delay(self, topic: str, wait: float) -> float | None:
        """Return the delay of a task due in ``wait`` seconds; None where its consumer must return it."""
        meta, wait = self.producer.meta(topic), wait - self.eta_hold
        return (kept_delay(meta, wait) or None) if wait > 0 else None

    def extend_support(self, topic: str) -> bool:
        """Return whether a topic supports extend headers; False if unknown."""
        try:
            return self.producer.meta(topic).extend_support
        except (TopicNotFound, TopicNotReady):
            return False

    def waiting(self, topics: Iterable[str], channel: str) -> int:
        """Return a channel's waiting messages, over its topics; 0 without lookup."""
        if not self.has_lookup:
            return 0
        count = 0
        for topic in topics:
            try:
                found = self.admin.stats(topic, channel)
            except TopicNotFound:
                continue
            for partition in found.partitions:
                one = partition.channels.get(channel)
                # messages of the original NSQ wait in the topic until it has a channel
                count += partition.depth if one is None else one.lag - one.in_flight
        return count

    def has_consumers(self, topics: Iterable[str], channel: str) -> bool:
        """Return whether a consumer is connected to a channel at any of its topics; False without lookup."""
        for topic in topics if self.has_lookup else ():
            with suppress(TopicNotFound):
                partitions = self.admin.stats(topic, channel).partitions
                if any(channel in one.channels and one.channels[channel].connections for one in partitions):
                    return True
        return False

    def empty(self, topics: Iterable[str], channel: str) -> int:
        """Drop a channel's waiting messages; return their number."""
        topics = tuple(topics)
        count = self.waiting(topics, channel)
        for topic in topics:
            with suppress(TopicNotFound):
                self.admin.empty_channel(topic, channel)
        return count

    def delete(self, topics: Iterable[str], channel: str) -> None:
        """Delete a channel, and its topic with the last channel."""
        for topic in topics:
            self._ready.discard((topic, channel))
            with suppress(TopicNotFound, PartitionUnavailable):
                self.admin.delete_channel(topic, channel, missing_ok=True)
                if not self.admin.channels(topic):
                    self.admin.delete_topic(topic, missing_ok=True)

    def exists(self, topic: str, channel: str) -> bool:
        """Return whether a topic has a channel; True if unknown, without lookup."""
        if not self.has_lookup:
            return True
        try:
            return channel in self.admin.channels(topic)
        except TopicNotFound:
            return False


logger: logging.Logger = logging.getLogger("nsqext.celery")

DEFAULT_PREFETCH = 200
"""Messages in flight without a prefetch count."""

Receive = Callable[["QueueConsumer", dict[str, Any], "Message"], None]
"""Called in a consumer's thread with a decoded message."""
Failed = Callable[["QueueConsumer"], None]
"""Called in a thread when a consumer cannot continue."""


class QueueConsumer:
    """Receives a queue's messages; drops messages that no binding selects or that have expired.

    A task whose ``eta`` is later than ``eta_hold`` goes back to the server: the worker would keep it in flight, longer
    than servers allow. A prefetch count of 0 stands for the default.
    """

    def __init__(
        self, clients: NsqClients, spec: QueueSpec, prefetch: int, receive: Receive, failed: Failed = lambda _: None
    ) -> None:
        self.queue: str = spec.name
        #: why it cannot continue; no error after which kombu repeats the operation
        self.error: InvalidState | None = None
        self.single: bool = False  #: opened for one message, closed after its answer
        self._leaving = False
        self._lock = threading.Lock()  # makes `leave` wait for a handler that hands a message over
        self._hold = clients.eta_hold
        self._spec = spec
        self._receive = receive
        self._failed = failed
        self.consumer: sync.Consumer = clients.consumer(spec.topics, spec.channel, prefetch or DEFAULT_PREFETCH)
        self.consumer.handler(auto_finish=False)(self._handle)
        self.consumer.on_event(self._note)

    def _note(self, event: ClientEvent) -> None:
        if event.kind == "failed":
            self.error = InvalidState(f"queue {self.queue}: its consumer cannot continue: {event.detail}")
            self._failed(self)

    def leave(self) -> None:
        """Pause, and return messages that still arrive; close it later."""
        self.consumer.pause()
        with self._lock:
            self._leaving = True

    def _handle(self, message: Message) -> None:
        decoded = decode_message(message.body, message.headers) or foreign_message(message.body, self.queue)
        route = decoded["properties"]["delivery_info"]
        if not self._spec.selects(route.get("exchange", ""), route["routing_key"]):
            message.finish()
            return
        lifetime = expires_after(decoded)
        if lifetime is not None and time.time() > message.timestamp / 1e9 + lifetime:
            message.finish()
            return
        due = due_time(decoded)
        wait = 0.0 if due is None else due - time.time() - self._hold
        if wait > 0:
            raise Requeue(min(wait, ACCEPTED_DELAY), backoff=False)  # of an ordered topic, the consumer keeps it
        if message.attempts > 1:
            route["redelivered"] = True
        with self._lock:
            if not self._leaving:
                self._receive(self, decoded, message)
                return
        message.requeue()


class Deliveries(virtual.QoS):  # type: ignore[misc]
    """A channel's unacknowledged messages; an acknowledgement finishes the message, from any thread."""

    restore_at_shutdown: bool = False  #: servers redeliver them after the connection

    def __init__(self, channel: virtual.Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._answers: dict[object, tuple[Message, QueueConsumer]] = {}

    def hold(self, delivery_tag: object, message: Message, source: QueueConsumer) -> None:
        self._answers[delivery_tag] = (message, source)

    def holds(self, source: QueueConsumer) -> bool:
        return any(held is source for _, held in self._answers.values())

    def ack(self, delivery_tag: object) -> None:
        self._answer(delivery_tag, lambda message: message.finish())

    def reject(self, delivery_tag: object, requeue: bool = False) -> None:
        self._answer(delivery_tag, lambda message: message.requeue() if requeue else message.finish())

    def _answer(self, delivery_tag: object, answer: Callable[[Message], None]) -> None:
        super().ack(delivery_tag)
        held = self._answers.pop(delivery_tag, None)
        if held is None:
            return
        message, source = held
        try:
            answer(message)
        except MessageNotInFlight as error:
            log_lost(logger, error, source.queue)
        if source.single:
            source.consumer.close()

    def restore_unacked(self) -> list[Any]:
        for delivery_tag in tuple(self._answers):
            self.reject(delivery_tag, requeue=True)
        self._flush()
        return []

    def restore_unacked_once(self, stderr: object = None) -> None:
        """Do nothing: closing the consumers requeues unacknowledged messages."""
        self._on_collect.cancel()
