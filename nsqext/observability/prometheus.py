"""Prometheus: metrics of publishes, of handled messages, and of the clients (extra ``prometheus``)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import WeakKeyDictionary, finalize, ref

from attrs import frozen

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(f"{_error}: pip install 'nsqext[prometheus]'", name=_error.name) from _error

from nsqext.client.consumer.consumer import Consumer
from nsqext.client.producer.producer import Producer
from nsqext.delays.relay import DelayRelay
from nsqext.errors import BatchFailed, InvalidSetting, InvalidState, NsqError
from nsqext.observability import Observer, TopicRelay, failure, size_of
from nsqext.transactions.relay import OutboxRelay

if TYPE_CHECKING:
    from nsqext import ClientEvent, ConsumerStatistics
    from nsqext.client.middleware import Client, Handling
    from nsqext.client.producer.publishing import Publishing
    from nsqext.client.producer.statistics import ProducerStatistics

__all__ = ("Prometheus",)

logger: logging.Logger = logging.getLogger("nsqext.observability")

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@frozen
class _Published:
    messages: Counter
    size: Counter
    seconds: Histogram
    failures: Counter  #: by topic and error


@frozen
class _Handled:
    messages: Counter
    redelivered: Counter
    running: Gauge
    seconds: Histogram
    failures: Callable[[str], Counter]  #: returns the counter of an error


@frozen
class _Series:
    """A metric read from the statistics of clients at each scrape."""

    name: str  #: without the namespace
    help: str
    #: returns the value, or the values by additional labels; None without a value
    read: Callable[[Any], float | dict[tuple[str, ...], float | None] | None]
    kind: Literal["counter", "gauge"] = "gauge"
    combine: Callable[[float, float], float] = float.__add__  #: for clients with the same labels
    labels: tuple[str, ...] = ()  #: additional labels


_sum = _Series
_highest = partial(_Series, combine=max)
_count = partial(_Series, kind="counter")


def _outcomes(statistics: ProducerStatistics) -> dict[tuple[str, ...], float | None]:
    return {("stored",): statistics.stored, ("failed",): statistics.failed, ("unknown",): statistics.unknown}


def _backoff(statistics: ConsumerStatistics) -> float:
    return max((connection.backoff for connection in statistics.connections), default=0)


_PRODUCER = (
    _sum("producer_connections", "Open connections to nodes.", lambda found: found.connections),
    _sum("producer_pending_requests", "Requests that wait for a response.", lambda found: found.pending),
    _count("producer_messages", "Messages by outcome.", _outcomes, labels=("outcome",)),
    _count("producer_retries", "Attempts after the first attempt of a publish.", lambda found: found.retries),
    _count("producer_sent_bytes", "Bytes of publishes with a response.", lambda found: found.bytes_sent),
    _highest("producer_lookup_age_seconds", "Time since the last response of lookup.", lambda found: found.lookup_age),
    _highest("producer_lookup_failures", "Consecutive failed rounds of lookup.", lambda found: found.lookup_failures),
)
_CONSUMER = (
    _sum("consumer_connections", "Open subscriptions.", lambda found: len(found.connections)),
    _sum("consumer_ready", "Sum of the RDY counts.", lambda found: sum(one.ready for one in found.connections)),
    _sum(
        "consumer_blocked_partitions",
        "Partitions whose next message is larger than max_frame_size.",
        lambda found: len(found.blocked),
    ),
    _sum(
        "consumer_starved_connections",
        "Subscriptions that have 85 % of their RDY count in flight.",
        lambda found: sum(one.is_starved for one in found.connections),
    ),
    _sum("consumer_in_flight", "Messages received and not yet finished or requeued.", lambda found: found.in_flight),
    _highest("consumer_backoff_level", "Highest backoff level; 0 while handlers succeed.", _backoff),
    _count("consumer_received_messages", "Messages received.", lambda found: found.received),
    _count("consumer_finished_messages", "Messages finished (FIN).", lambda found: found.finished),
    _count("consumer_requeued_messages", "Messages requeued (REQ).", lambda found: found.requeued),
    _count("consumer_dropped_messages", "Messages that failed and were dropped.", lambda found: found.dropped),
    _count("consumer_dead_letters", "Messages sent to the dead letters.", lambda found: found.dead_letters),
    _count("consumer_lost_messages", "Messages that timed out or whose connection was lost.", lambda found: found.lost),
    _count("consumer_received_bytes", "Bytes of messages received.", lambda found: found.bytes_received),
    _count("consumer_reconnects", "Resubscriptions after a lost connection.", lambda found: found.reconnects),
    _highest("consumer_lookup_age_seconds", "Time since the last response of lookup.", lambda found: found.lookup_age),
    _highest("consumer_lookup_failures", "Consecutive failed rounds of lookup.", lambda found: found.lookup_failures),
)
_TOPIC_RELAY = (
    _count("relay_messages", "Messages that `nsqext relay` sent.", lambda found: found.relayed),
    _highest("relay_lag_messages", "Unfinished messages of the channel of `nsqext relay`.", lambda found: found.lag),
    _sum("relay_in_flight_messages", "Messages that `nsqext relay` has received.", lambda found: found.in_flight),
)
_OUTBOX_RELAY = (
    _count("outbox_published_messages", "Messages that relays published.", lambda found: found.published),
    _count("outbox_failed_publishes", "Attempts of relays that failed.", lambda found: found.failed),
)
_OUTBOX = (
    _highest("outbox_waiting_messages", "Messages of the outbox that wait.", lambda found: found.waiting),
    _highest("outbox_oldest_seconds", "Time for which the oldest of them waits.", lambda found: found.age),
    _highest("outbox_refused_messages", "Messages of the outbox that were set aside.", lambda found: found.refused),
    _highest("outbox_relays", "Relays of the outbox that run, in all processes.", lambda found: found.relays),
)
_DELAY_RELAY = (
    _count("delay_published_messages", "Delayed messages that relays published.", lambda found: found.published),
    _count("delay_failed_publishes", "Attempts of relays that failed.", lambda found: found.failed),
)
_DELAYS = (
    _highest("delay_waiting_messages", "Delayed messages that wait in the store.", lambda found: found.waiting),
    _highest(
        "delay_late_seconds", "Time since the first of them was due; 0 if none is.", lambda found: found.late or 0
    ),
    _highest("delay_refused_records", "Records of the topic that were set aside.", lambda found: found.refused),
)


_Labels = tuple[str, ...]
_Counted = dict[tuple[str, _Labels], float]  # values of counters, by series and labels


@frozen(eq=False)
class _Kind:
    """A kind of clients, with the series of their statistics."""

    client: type
    series: tuple[_Series, ...]
    names: tuple[str, ...] = ()  #: of the labels
    labels: Callable[[Any, Any], _Labels] = lambda client, statistics: ()  #: of a client and its statistics


def _labels(consumer: Consumer) -> tuple[str, str]:
    return ",".join(consumer.topics), consumer.channel


_PRODUCERS = _Kind(Producer, _PRODUCER)
_OUTBOX_RELAYS = _Kind(OutboxRelay, _OUTBOX_RELAY)
_DELAY_RELAYS = _Kind(DelayRelay, _DELAY_RELAY)
_SUMMARIES = ((_OUTBOX_RELAYS, _OUTBOX), (_DELAY_RELAYS, _DELAYS))
_KINDS = (
    _PRODUCERS,
    _Kind(Consumer, _CONSUMER, ("topic", "channel"), lambda client, _: _labels(client)),
    _OUTBOX_RELAYS,
    _DELAY_RELAYS,
    _Kind(
        TopicRelay,
        _TOPIC_RELAY,
        ("topic", "channel", "target"),
        lambda _, found: (found.topic, found.channel, found.target),
    ),
)


class _ClientCollector:
    """Reads the statistics of clients at each scrape, and when a connection ends; a message costs nothing.

    Counters include deleted clients. Otherwise their sum would decrease, which Prometheus takes for a restart.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._clients: dict[_Kind, WeakKeyDictionary[Any, _Counted]] = {kind: WeakKeyDictionary() for kind in _KINDS}
        self._deleted: deque[_Counted] = deque()  # counters of deleted clients, added by any thread
        self._gone: dict[str, dict[_Labels, float]] = {}  # sums of earlier ones, by series and labels
        self._reporting = Lock()

    def add(self, kind: _Kind, client: object) -> bool:
        """Report a client; return False if it was added before."""
        clients = self._clients[kind]
        if client in clients:
            return False
        counted: _Counted = {}
        clients[client] = counted
        # errors of a producer are counted when its connection has ended, or without a connection
        final = client.counters if isinstance(client, Producer) else None
        finalize(client, _note_deleted, self._deleted, counted, final).atexit = False
        return True

    def read(self, kind: _Kind, client: Any) -> tuple[_Labels, Any] | None:
        """Return labels and statistics of a client, None before it is opened; note its counters for its deletion."""
        try:
            statistics = client.statistics()
        except InvalidState:
            return None  # not opened
        labels = kind.labels(client, statistics)
        _note_counters(self._clients[kind][client], kind, labels, statistics)
        return labels, statistics

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all clients; combine metrics with the same labels."""
        with self._reporting:
            found = list(self._of_clients())
        yield from found
        for kind, table in _SUMMARIES:
            yield from self._families(table, (), list(_summaries(self._of_kind(kind))))

    def _of_clients(self) -> Iterator[Metric]:
        # first: these are not deleted meanwhile, and the counters of others are below, so that no sum decreases
        clients = {kind: self._of_kind(kind) for kind in _KINDS}
        while self._deleted:
            for (series, name), value in self._deleted.popleft().items():
                sums = self._gone.setdefault(series, {})
                sums[name] = sums.get(name, 0.0) + value
        for kind, ones in clients.items():
            found = [self.read(kind, client) for client in ones]
            yield from self._families(kind.series, kind.names, [one for one in found if one is not None])

    def _of_kind(self, kind: _Kind) -> list[Any]:
        return [client for one in self._clients[kind].keyrefs() if (client := one()) is not None]

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values."""
        tables = [(kind.series, kind.names) for kind in _KINDS] + [(table, ()) for _, table in _SUMMARIES]
        return [one for table, names in tables for one in self._families(table, names, ())]

    def _families(
        self, table: Sequence[_Series], labels: tuple[str, ...], clients: Sequence[tuple[_Labels, Any]]
    ) -> Iterator[Metric]:
        for series in table:
            values = dict(self._gone.get(series.name, {}))
            for own, statistics in clients:
                for name, number in _values(series, own, statistics):
                    values[name] = series.combine(values[name], number) if name in values else number
            family = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            metric = family(f"{self._namespace}_{series.name}", series.help, labels=(*labels, *series.labels))
            for name, number in values.items():
                metric.add_metric(name, number)
            yield metric


def _values(series: _Series, labels: _Labels, statistics: Any) -> Iterator[tuple[_Labels, float]]:
    """Yield the values of a client's statistics by all labels."""
    found = series.read(statistics)
    for further, value in (found if isinstance(found, dict) else {(): found}).items():
        if value is not None:
            yield (*labels, *further), float(value)


def _note_counters(counted: _Counted, kind: _Kind, labels: _Labels, statistics: object) -> None:
    """Replace the noted counters of a client."""
    counted.clear()
    for series in kind.series:
        if series.kind == "counter":
            counted.update({(series.name, name): value for name, value in _values(series, labels, statistics)})


def _note_deleted(deleted: deque[_Counted], counted: _Counted, final: object) -> None:
    """Note a deleted client, with the final counters of a producer."""
    if final is not None:
        _note_counters(counted, _PRODUCERS, (), final)
    deleted.append(counted)


def _summaries(relays: Iterable[OutboxRelay | DelayRelay]) -> Iterator[tuple[_Labels, Any]]:
    for relay in relays:
        try:
            yield (), relay.summary()
        except InvalidState as error:  # the database is down: the other metrics are reported
            logger.warning("metrics of a relay: %s", error)


class Prometheus(Observer):
    """Counts messages, measures durations, and reports the statistics of clients. Names begin with the namespace:

    - by topic: ``published_messages_total``, ``published_bytes_total``, ``publish_seconds``;
    - by topic and error: ``publish_failures_total``, which counts calls, not messages;
    - by topic and channel: ``handled_messages_total``, ``redelivered_messages_total``, ``running_handlers``,
      ``handler_seconds``;
    - by topic, channel and error: ``handler_failures_total``, which counts calls, not messages.

    ``producer_…`` and ``consumer_…`` are the values of `nsqext.Producer.statistics` and `nsqext.Consumer.statistics`,
    of clients with this middleware and of clients passed to `attach`. Consumers are labelled by topic (as given: a
    pattern, or several with commas) and channel; clients with the same labels are combined.
    ``producer_events_total`` and ``consumer_events_total`` count their connections, disconnections, moved leaders and
    changes of the backoff, by ``kind``.

    Args:
        registry: by default the global registry.
        namespace: prefix of every name.
        buckets: upper bounds of the histograms, in seconds; by default 0.005 to 10, or the bounds of an earlier object.

    Objects with the same registry and namespace share their metrics.

    Raises:
        InvalidSetting: an earlier object with this registry and namespace has other buckets.
        ValueError: from prometheus_client, if the registry has other metrics with these names.
    """

    _first: ClassVar[WeakKeyDictionary[CollectorRegistry, dict[str, Prometheus]]] = WeakKeyDictionary()

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        namespace: str = "nsqext",
        buckets: Sequence[float] | None = None,
    ) -> None:
        first = self._first.setdefault(registry, {}).get(namespace)
        if first is not None:
            if buckets is not None and tuple(buckets) != first._buckets:
                raise InvalidSetting("the metrics of this registry and namespace exist with other buckets")
            vars(self).update(vars(first))
            return
        self._buckets: tuple[float, ...] = tuple(_BUCKETS if buckets is None else buckets)
        common: dict[str, Any] = {"namespace": namespace, "registry": None}
        topic, channel = ("topic",), ("topic", "channel")
        self._messages = Counter("published_messages", "Messages that were stored.", topic, **common)
        self._bytes = Counter("published_bytes", "Bytes of the bodies that were stored.", topic, **common)
        self._publish = Histogram(
            "publish_seconds", "Time until the messages were stored.", topic, buckets=self._buckets, **common
        )
        self._failures = Counter("publish_failures", "Publishes that failed.", (*topic, "error"), **common)
        self._handled = Counter("handled_messages", "Messages whose handler ended.", channel, **common)
        self._again = Counter("redelivered_messages", "Messages that were redelivered.", channel, **common)
        self._running = Gauge("running_handlers", "Running handlers.", channel, **common)
        self._handler = Histogram("handler_seconds", "Time of handlers.", channel, buckets=self._buckets, **common)
        self._broken = Counter("handler_failures", "Handlers that raised.", (*channel, "error"), **common)
        self._producer_events = Counter("producer_events", "Events of producers.", ("kind",), **common)
        self._consumer_events = Counter("consumer_events", "Events of consumers.", (*channel, "kind"), **common)
        self._clients = _ClientCollector(namespace)
        with ExitStack() as undo:  # all or none
            for collector in vars(self).values():
                if hasattr(collector, "collect"):
                    registry.register(collector)
                    undo.callback(registry.unregister, collector)
            undo.pop_all()
        self._first[registry][namespace] = self
        # labelled children, whose look-up is slow
        self._by_topic: dict[str, _Published] = {}
        self._by_channel: dict[tuple[str, str], _Handled] = {}

    def attach(self, client: Client | OutboxRelay | DelayRelay | TopicRelay) -> None:
        """Report the statistics and events of a client; clients attach their own middleware.

        ``outbox_…`` are the values of `OutboxRelay.statistics` and `OutboxRelay.summary`, and ``delay_…`` the same
        values of `nsqext.delays.DelayRelay`; each scrape reads the database for the summaries. Clients and relays are
        referenced weakly.

        Raises:
            InvalidSetting: another object, such as a client of `nsqext.sync`: create it with this middleware.
        """
        kind = next((kind for kind in _KINDS if isinstance(client, kind.client)), None)
        if kind is None:
            raise InvalidSetting(
                f"{client!r} has no statistics that can be reported",
                hint="give blocking clients middleware=[Prometheus()] instead",
            )
        if not self._clients.add(kind, client):
            return
        known = ref(client)  # the client has the callback, which must not keep it alive

        def count(event: ClientEvent) -> None:
            found = known()
            if found is None:
                return
            if isinstance(found, Consumer):  # labels are read each time, because its topics may change
                self._consumer_events.labels(*_labels(found), event.kind).inc()
            else:
                self._producer_events.labels(event.kind).inc()
            if event.kind == "disconnected":
                self._clients.read(kind, found)

        if isinstance(client, (Producer, Consumer)):
            client.on_event(count)

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Measure a publish."""
        topic = publishing.topic
        bound = self._by_topic.get(topic)
        if bound is None:
            bound = self._by_topic[topic] = _Published(
                self._messages.labels(topic), self._bytes.labels(topic), self._publish.labels(topic), self._failures
            )
        return _MeasuredPublish(bound, publishing)

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Measure a handler."""
        channel = handling.channel
        for message in handling.messages:
            if message.attempts > 1:
                self._handled_of(message.topic, channel).redelivered.inc()
        return _MeasuredHandler(
            [(self._handled_of(topic, channel), count) for topic, count in handling.topic_counts.items()]
        )

    def _handled_of(self, topic: str, channel: str) -> _Handled:
        key = (topic, channel)
        bound = self._by_channel.get(key)
        if bound is None:
            bound = self._by_channel[key] = _Handled(
                self._handled.labels(*key),
                self._again.labels(*key),
                self._running.labels(*key),
                self._handler.labels(*key),
                partial(self._broken.labels, *key),
            )
        return bound


class _MeasuredPublish:
    """Measures a publish."""

    __slots__ = ("_bound", "_publishing", "_started")

    def __init__(self, bound: _Published, publishing: Publishing) -> None:
        self._bound = bound
        self._publishing = publishing

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        bound, publishing = self._bound, self._publishing
        given = publishing.given
        if error is not None:
            bound.failures.labels(publishing.topic, type(error).__qualname__).inc()
            if isinstance(error, BatchFailed):
                stored = [
                    message
                    for message, outcome in zip(given, error.outcomes, strict=True)
                    if not isinstance(outcome, NsqError)
                ]
                bound.messages.inc(len(stored))
                bound.size.inc(sum(map(size_of, stored)))
            return
        bound.messages.inc(len(given))
        bound.size.inc(size_of(given[0]) if len(given) == 1 else sum(map(size_of, given)))
        bound.seconds.observe(time.monotonic() - self._started)


class _MeasuredHandler:
    """Measures a call of a handler."""

    __slots__ = ("_bound", "_started")

    def __init__(self, bound: Sequence[tuple[_Handled, int]]) -> None:
        self._bound = bound

    def __enter__(self) -> None:
        for handled, _ in self._bound:
            handled.running.inc()
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        seconds, failed = time.monotonic() - self._started, failure(error)
        for handled, count in self._bound:
            handled.running.dec()
            handled.messages.inc(count)
            handled.seconds.observe(seconds)
            if failed is not None:
                handled.failures(failed).inc()
