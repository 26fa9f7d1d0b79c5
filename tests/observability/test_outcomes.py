"""What observers record of operations that end otherwise, and metrics of several clients, without servers."""

from __future__ import annotations

import gc
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import anyio
import pytest
from attrs import evolve, fields
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from nsqext import Consumer, ConsumerStatistics, OutgoingMessage, Producer, Requeue
from nsqext.client.middleware import Handling
from nsqext.delays import DelayRelay, DelayStore
from nsqext.middleware import Publishing
from nsqext.observability import LogObserver, Observer, TopicRelay, TopicRelayStatistics
from nsqext.observability.otel import MESSAGE_ID, OpenTelemetry
from nsqext.observability.prometheus import Prometheus, _ClientCollector
from nsqext.transactions.relay import OutboxRelay
from nsqext.transactions.store import OutboxSummary
from nsqext.types import Receipt, TopicMeta
from tests.support.messages import RecordingOwner, make_message


class Watching(Observer):
    """Notes the error with which each operation ended, and raises it again."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def __enter__(self) -> None:
        """Begin an operation."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.ended.append("cancelled" if isinstance(error, anyio.get_cancelled_exc_class()) else repr(error))
            raise error

    def publishing(self, publishing: Publishing) -> Any:
        return self

    def handling(self, handling: Handling) -> Any:
        return self


def handling() -> Handling:
    """Return a call of a handler for one message."""
    return Handling([make_message(RecordingOwner())], "ch")


def batch_of_two() -> Publishing:
    """Return a publish of two messages."""
    return Publishing(topic="orders", messages=[OutgoingMessage(b"one"), OutgoingMessage(b"two")], batch=True)


def look_up(publishing: Publishing, largest: int = 1000) -> None:
    """Continue a publish as when its topic is known, which has extend headers."""
    publishing.max_message_size = largest
    for adapt in publishing.on_topic:
        adapt(TopicMeta(partition_num=1, extend_support=True))


async def never(_: object) -> Any:
    """Run until cancelled."""
    await anyio.sleep_forever()


class Empty(Exception):
    """An error with a number of parts, which is 0."""

    def __len__(self) -> int:
        return 0


async def fail(_: object) -> Any:
    """Fail."""
    raise Empty


@pytest.mark.anyio
@pytest.mark.parametrize(("operation", "ended"), [(never, "cancelled"), (fail, "Empty()")])
async def test_operations_that_are_cancelled_or_fail_are_observed_to_their_end(
    operation: Callable[[object], Awaitable[Any]], ended: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that was cancelled would be counted as running, and its span would not be exported."""
    observer = Watching()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: observer.publish(batch_of_two(), operation),
        lambda: observer.handle(handling(), operation),
    ]
    for call in calls:
        with anyio.CancelScope() as scope, suppress(Empty):
            scope.cancel()
            await call()
    assert observer.ended == [ended] * 2
    assert not caplog.records, "an error that the observer passes on is not its own"


def test_logs_have_all_partitions_of_a_publish_and_batches_without_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nsqext.events")
    publishing = batch_of_two()
    with LogObserver().publishing(publishing):
        publishing.receipts = [Receipt("orders", partition, "n:4150") for partition in (1, None, 0)]
    with LogObserver().handling(Handling([], "ch", batch=True)):  # other middleware has left out all
        pass
    published, handled = map(vars, caplog.records)
    assert published["partition"] == [0, 1]
    assert (handled["count"], handled["attempts"]) == (0, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_message_that_other_middleware_has_dropped_or_added_gets_no_context(count: int) -> None:
    publishing = batch_of_two()
    with OpenTelemetry(TracerProvider()).publishing(publishing):
        publishing.messages = [*publishing.messages, OutgoingMessage(b"three")][:count]
        look_up(publishing)
    found = [(message.body, [*(message.headers or {})]) for message in publishing.messages]
    assert found == [(b"one", ["traceparent"]), (b"two", ["traceparent"]), (b"three", [])][:count]


def test_messages_of_a_batch_keep_their_contexts() -> None:
    """As of an outbox."""
    own = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    messages = [OutgoingMessage(b"x", headers=own), OutgoingMessage(b"y")]
    publishing = Publishing(topic="orders", messages=messages, batch=True)
    with OpenTelemetry(TracerProvider(), create_spans=False).publishing(publishing):
        look_up(publishing)
    first, second = (message.headers or {} for message in publishing.messages)
    assert first == own
    assert second.keys() == own.keys()
    assert second != own


@pytest.mark.parametrize(
    ("size", "key", "of_batch"), [(59_700, None, None), (30_000, "k" * 5_000, None), (30_000, None, "k" * 5_000)]
)
def test_a_context_for_which_the_header_has_no_room_is_left_out(
    size: int, key: str | None, of_batch: str | None
) -> None:
    for length, fits in ((size, False), (size - 1000, True)):
        message = OutgoingMessage(b"x", headers={"a": "x" * length}, key=key)
        publishing = Publishing(topic="orders", messages=[message], batch=True, key=of_batch)
        with OpenTelemetry(TracerProvider()).publishing(publishing):
            look_up(publishing, 1 << 20)
        assert ("traceparent" in (publishing.messages[0].headers or {})) is fits


@pytest.mark.anyio
async def test_a_handler_continues_the_trace_of_its_message_without_a_provider() -> None:
    message = make_message(RecordingOwner(), headers={"traceparent": f"00-{7:032x}-{9:016x}-01"})
    found: list[int] = []

    async def handle(_: object) -> None:
        found.append(trace.get_current_span().get_span_context().trace_id)

    await OpenTelemetry(parent=True).handle(Handling([message], "ch"), handle)
    assert found == [7]


def test_the_context_of_an_active_span_replaces_the_context_of_a_message() -> None:
    message = OutgoingMessage(b"x", headers={"traceparent": f"00-{7:032x}-{9:016x}-01", "user": "42"})
    publishing = Publishing(topic="orders", messages=[message], batch=False)
    request = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1)))
    with trace.use_span(request), OpenTelemetry(TracerProvider()).publishing(publishing):
        look_up(publishing)
    headers = publishing.messages[0].headers or {}
    assert headers["user"] == "42"
    assert headers["traceparent"].split("-")[1] == f"{1:032x}"


def test_a_requeue_that_a_handler_asks_for_is_no_failure() -> None:
    registry = CollectorRegistry()
    with suppress(Requeue), Prometheus(registry).handling(handling()):
        raise Requeue
    labels = {"topic": handling().message.topic, "channel": "ch"}
    assert registry.get_sample_value("nsqext_handled_messages_total", labels) == 1
    assert registry.get_sample_value("nsqext_handler_failures_total", {**labels, "error": "Requeue"}) is None


def test_two_namespaces_of_a_registry_count_apart() -> None:
    registry = CollectorRegistry()
    for namespace in ("one", "two"):
        with Prometheus(registry, namespace=namespace).publishing(batch_of_two()):
            pass
    found = [
        registry.get_sample_value(f"{name}_published_messages_total", {"topic": "orders"}) for name in ("one", "two")
    ]
    assert found == [2, 2]


class Relaying(TopicRelay):
    """A relay that has sent three messages."""

    topic, sent = "orders", 3
    lag: int | None = 4

    def statistics(self) -> TopicRelayStatistics:
        return TopicRelayStatistics(self.topic, "ch", "copy", self.sent, self.lag, 2)


def relayed(registry: CollectorRegistry, topic: str = "orders") -> float | None:
    """Return how many messages the relays of a topic have sent."""
    labels = {"topic": topic, "channel": "ch", "target": "copy"}
    return registry.get_sample_value("nsqext_relay_messages_total", labels)


class Failing(Consumer):
    """An open consumer whose lookup does not respond."""

    failures = 3

    def statistics(self) -> ConsumerStatistics:
        values: dict[str, Any] = {one.name: 0 for one in fields(ConsumerStatistics)}
        return ConsumerStatistics(**{**values, "connections": (), "blocked": (), "lookup_failures": self.failures})


def test_failures_of_lookup_are_those_of_the_consumer_with_the_most() -> None:
    registry = CollectorRegistry()
    consumers = [Failing("orders", "ch", lookupd="127.0.0.1:1") for _ in range(3)]
    consumers[0].failures = 1
    for consumer in consumers:
        Prometheus(registry).attach(consumer)
    labels = {"topic": "orders", "channel": "ch"}
    assert registry.get_sample_value("nsqext_consumer_lookup_failures", labels) == 3


def test_counters_keep_what_clients_that_are_gone_had_counted() -> None:
    registry, relays, found = CollectorRegistry(), [Relaying(), Relaying()], list[float | None]()
    for one in relays:
        Prometheus(registry).attach(one)
    del one
    labels = {"topic": "orders", "channel": "ch", "target": "copy"}
    assert registry.get_sample_value("nsqext_relay_lag_messages", labels) == 4  # of the channel that both consume
    assert registry.get_sample_value("nsqext_relay_in_flight_messages", labels) == 4  # of both
    for sent in (3, 3, 5):
        relays[0].sent = sent
        found.append(relayed(registry))
        del relays[1:]
        gc.collect()
    assert found == [6, 6, 8]
    relays[0].lag = None
    assert registry.get_sample_value("nsqext_relay_lag_messages", labels) is None, "an unknown lag is not 0"


def test_a_client_that_is_deleted_during_a_scrape_stays_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    prometheus, relays = Prometheus(registry), [Relaying(), Relaying()]
    for relay in relays:
        prometheus.attach(relay)
    del relay
    assert relayed(registry) == 6
    of_kind = _ClientCollector._of_kind

    def delete_first(collector: _ClientCollector, kind: Any) -> list[Any]:
        del relays[1:]
        gc.collect()
        return of_kind(collector, kind)

    monkeypatch.setattr(_ClientCollector, "_of_kind", delete_first)
    assert relayed(registry) == 6


def test_a_client_whose_labels_change_counts_under_the_last_ones() -> None:
    registry = CollectorRegistry()
    relay = Relaying()
    Prometheus(registry).attach(relay)
    assert relayed(registry) == 3
    relay.topic = "bills"
    assert (relayed(registry, "bills"), relayed(registry)) == (3, None)
    del relay
    gc.collect()
    assert (relayed(registry, "bills"), relayed(registry)) == (3, None)


@pytest.mark.parametrize(("batch", "create_spans"), [(False, True), (True, True), (True, False)])
def test_a_message_with_a_context_is_published_in_its_trace(batch: bool, create_spans: bool) -> None:
    """As of an outbox."""
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    message = OutgoingMessage(b"x", headers={"traceparent": f"00-{7:032x}-{9:016x}-01"})
    publishing = Publishing(topic="orders", messages=[message], batch=batch)
    with OpenTelemetry(tracers, create_spans=create_spans).publishing(publishing):
        look_up(publishing)
        publishing.receipts = [Receipt("orders", 0, "n:4150", message_id=5)]
    spans = {span.name: span for span in exporter.get_finished_spans()}
    published = spans["publish orders"]
    sender = spans.get("create orders", published)
    own = sender.context.span_id if create_spans else 9
    assert (publishing.messages[0].headers or {})["traceparent"] == f"00-{7:032x}-{own:016x}-01"
    assert [link.context.span_id for link in published.links] == ([own] if batch else [])
    assert (sender.parent is not None and sender.parent.span_id) == (9 if create_spans else False)
    assert (MESSAGE_ID in (published.attributes or {})) is not batch, "a batch has the id of no message"


def test_a_message_without_a_context_is_not_linked_to_the_span_that_receives_it() -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    message = make_message(RecordingOwner(), headers={"user": "42"})
    request = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1)))
    with trace.use_span(request), OpenTelemetry(tracers).handling(Handling([message], "ch")):
        pass
    (span,) = exporter.get_finished_spans()
    assert [*span.links] == []


def test_a_handler_of_several_topics_runs_and_counts_for_each() -> None:
    registry = CollectorRegistry()
    messages: Any = [SimpleNamespace(topic=topic, attempts=1) for topic in ("a", "b", "b")]

    def values(name: str) -> list[float | None]:
        return [registry.get_sample_value(f"nsqext_{name}", {"topic": one, "channel": "ch"}) for one in ("a", "b")]

    with Prometheus(registry).handling(Handling(messages, "ch", batch=True)):
        assert values("running_handlers") == [1, 1]
    assert (values("running_handlers"), values("handled_messages_total")) == ([0, 0], [1, 2])


def test_of_several_producers_connections_are_added_and_the_highest_age_of_lookup_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, producers = CollectorRegistry(), [Producer("127.0.0.1:1") for _ in range(2)]
    for producer, age in zip(producers, (2.0, 3.0), strict=True):
        found = evolve(producer.statistics(), connections=1, lookup_age=age, lookup_failures=4)
        monkeypatch.setattr(producer, "statistics", lambda found=found: found)
        Prometheus(registry).attach(producer)
    names = ("connections", "lookup_age_seconds", "lookup_failures")
    assert [registry.get_sample_value(f"nsqext_producer_{name}") for name in names] == [2, 3.0, 4]


def test_an_attached_client_is_freed_with_its_last_reference() -> None:
    producer = Producer("127.0.0.1:1")
    Prometheus(CollectorRegistry()).attach(producer)
    known = ref(producer)
    gc.collect()
    gc.disable()  # which would free a cycle later
    try:
        del producer
        assert known() is None
    finally:
        gc.enable()


class Reading(OutboxRelay):
    """A relay of an outbox in which some messages wait."""

    def __init__(self, waiting: int) -> None:
        self._published = self._failed = self._refused = 0
        self._waiting = waiting

    def summary(self) -> OutboxSummary:
        return OutboxSummary(self._waiting, 0, 1.0, 2)


def test_what_waits_is_reported_once_by_several_relays_and_is_late_when_it_is_due(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    prometheus, relays = Prometheus(registry), [Reading(2), Reading(3)]  # the first has read the outbox before
    with DelayStore(tmp_path / "store") as store:
        delays = DelayRelay(store)
        prometheus.attach(delays)
        for relay in relays:
            prometheus.attach(relay)
        assert registry.get_sample_value("nsqext_outbox_waiting_messages") == 3
        assert registry.get_sample_value("nsqext_delay_late_seconds") == 0
