"""Observers of every kind, on a cluster."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from secrets import token_hex
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Never

import anyio
import pytest
from attrs import evolve
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.util._once import Once
from prometheus_client import CollectorRegistry, Gauge

from nsqext import (
    App,
    Consumer,
    ConsumerSettings,
    InvalidInput,
    Message,
    MessageBatch,
    OutgoingMessage,
    Producer,
    Requeue,
    sync,
)
from nsqext.client.events import ClientEvent
from nsqext.errors import BatchFailed, InvalidSetting, InvalidState, LookupFailed, NsqError
from nsqext.middleware import Publishing
from nsqext.observability import UNOBSERVED, LogObserver, Observer, otel
from nsqext.observability.otel import OpenTelemetry
from nsqext.observability.otel_metrics import Instruments
from nsqext.observability.prometheus import Prometheus, _backoff
from nsqext.transactions.relay import OutboxRelay
from nsqext.types import Receipt
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.middleware import Handling, Middleware

pytestmark = pytest.mark.anyio

CALM: ConsumerSettings = {"backoff": "off", "requeue_delay": 0.01, "requeue_jitter": 0}


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A fresh topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, extend=True, channels=["ch"])
    return name


async def journey(cluster: Cluster, topic: str, observers: Sequence[Middleware]) -> None:
    """Publish one message and a batch of two, and a bad one; handle all, two of them twice."""
    async with Producer(cluster.lookupd, middleware=observers) as producer:
        await producer.publish(topic, b"one", tag=None, headers={"user": "42"}, trace_id=7)
        await producer.publish_many(topic, [b"two", OutgoingMessage(b"three", headers={"user": "43"})])
        with pytest.raises(InvalidInput):
            await producer.publish(topic, b"")
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=observers, **CALM)
    done: list[bytes] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        if message.attempts == 1 and message.body == b"two":
            raise RuntimeError("broken")
        if message.attempts == 1 and message.body == b"three":
            raise Requeue(0.0, backoff=False)
        done.append(message.body)
        if len(done) == 3:
            consumer.stop()

    with anyio.fail_after(25):
        await consumer.serve()
    assert sorted(done) == [b"one", b"three", b"two"]


async def test_logs(cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "nsqext.events")
    await journey(cluster, topic, [LogObserver()])
    records: list[Any] = [record for record in caplog.records if record.name == "nsqext.events"]
    expected = [(record.getMessage(), record.levelname, record.error) for record in records]
    assert expected[:3] == [
        ("published", "DEBUG", None),
        ("published", "DEBUG", None),
        ("publish failed", "WARNING", "InvalidBody"),
    ]
    assert sorted(expected[3:], key=str) == [
        ("handled", "DEBUG", "Requeue"),
        ("handled", "DEBUG", None),
        ("handled", "DEBUG", None),
        ("handled", "DEBUG", None),
        ("handler failed", "WARNING", "RuntimeError"),
    ]
    assert (records[1].count, records[1].bytes, records[1].partition, records[1].topic) == (2, 8, [0], topic)
    assert all(0 < record.seconds < 60 for record in records)
    assert {record.attempts for record in records[3:]} == {1, 2}
    assert 7 in {record.trace_id for record in records[3:]}


def test_a_record_is_late_from_its_limit_on_and_its_fields_are_computed_if_it_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "quick")
    computed: list[str] = []

    def fields() -> dict[str, object]:
        computed.append("x")
        return {}

    for slow, seconds in ((1.0, 0.9), (1.0, 1.0), (0.0, 0.0)):
        LogObserver("quick", slow=slow).write("handled", seconds, fields, None)
    assert [(record.levelname, record.name) for record in caplog.records] == [("WARNING", "quick")] * 2
    assert computed == ["x"] * 2


class Telemetry:
    """OpenTelemetry's SDK, in memory."""

    def __init__(self, **options: Any) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.observer = OpenTelemetry(tracers, MeterProvider([self._reader]), **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data: Any = self._reader.get_metrics_data()
        metrics = data.resource_metrics[0].scope_metrics[0].metrics
        return [point for metric in metrics if metric.name == name for point in metric.data.data_points]


async def test_spans(cluster: Cluster, topic: str) -> None:
    telemetry = Telemetry()
    await journey(cluster, topic, [telemetry.observer])
    single, batch, bad = telemetry.spans(f"publish {topic}")
    attributes = dict(single.attributes or {})
    assert int(str(attributes.pop("messaging.message.id"))) > 0
    assert attributes.pop("server.port") == int(cluster.nodes["n1"].tcp.rpartition(":")[2])
    assert attributes == {
        "messaging.system": "nsq",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
        "messaging.destination.partition.id": "0",
        "messaging.nsq.message.trace_id": "7",
        "server.address": "127.0.0.1",
    }
    created = telemetry.spans(f"create {topic}")
    assert [single.kind, batch.kind, *(span.kind for span in created)] == [
        SpanKind.PRODUCER,
        SpanKind.CLIENT,
        SpanKind.PRODUCER,
        SpanKind.PRODUCER,
    ]
    assert [link.context for link in batch.links] == [span.context for span in created]
    assert (batch.attributes or {})["messaging.batch.message_count"] == 2
    assert (bad.status.status_code, (bad.attributes or {})["error.type"]) == (StatusCode.ERROR, "InvalidBody")

    handled = telemetry.spans(f"process {topic}")
    assert {span.kind for span in handled} == {SpanKind.CONSUMER}
    assert {(span.attributes or {})["messaging.consumer.group.name"] for span in handled} == {"ch"}
    linked = {link.context.span_id for span in handled for link in span.links}
    assert single.context is not None
    assert linked == {span.context.span_id for span in (single, *created) if span.context is not None}
    failed = [span for span in handled if span.status.status_code is StatusCode.ERROR]
    assert [(span.attributes or {})["error.type"] for span in failed] == ["RuntimeError"]
    assert all(span.parent is None for span in handled)


async def handle_batches(cluster: Cluster, topic: str, observers: Sequence[Middleware], *bodies: bytes) -> None:
    """Publish messages with headers, and one without; handle them in batches."""
    async with Producer(cluster.lookupd, middleware=observers) as producer:
        for body in bodies:
            await producer.publish(topic, body, headers={"user": "42"})
        await producer.publish(topic, b"plain")
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=observers, **CALM)
    seen = 0

    @consumer.batch_handler(max_count=len(bodies) + 1, max_wait=5.0)
    async def handle(batch: MessageBatch) -> None:
        nonlocal seen
        seen += len(batch)
        if seen == len(bodies) + 1:
            consumer.stop()

    with anyio.fail_after(25):
        await consumer.serve()


async def test_the_span_of_a_batch_links_to_all_its_publishers(cluster: Cluster, topic: str) -> None:
    telemetry = Telemetry(parent=True, body_size=True)
    await handle_batches(cluster, topic, [telemetry.observer], b"one", b"two")
    spans = telemetry.spans(f"process {topic}")
    published = telemetry.spans(f"publish {topic}")
    linked = [link for span in spans for link in span.links]
    assert {link.context.span_id for link in linked} == {span.context.span_id for span in published if span.context}
    assert all((link.attributes or {})["messaging.message.id"] for link in linked)
    assert all(span.parent is None for span in spans)
    assert sum(int(str((span.attributes or {})["messaging.batch.message_count"])) for span in spans) == 3
    assert sum(int(str((span.attributes or {})["messaging.message.body.size"])) for span in spans) == 11
    attributes = dict(spans[0].attributes or {})
    assert (attributes["messaging.destination.name"], attributes["messaging.destination.partition.id"]) == (topic, "0")
    assert "messaging.message.id" not in attributes
    assert sum(point.value for point in telemetry.points("messaging.client.consumed.messages")) == 3


async def test_batches_are_logged_and_counted(cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with caplog.at_level(logging.DEBUG, "nsqext.events"):
        await handle_batches(cluster, topic, [LogObserver(), Prometheus(registry)], b"one", b"two")
    handled: Any = [record for record in caplog.records if record.getMessage() == "handled"]
    assert sum(record.count for record in handled) == 3
    assert {(record.topic, record.channel, record.attempts) for record in handled} == {(topic, "ch", 1)}
    labels = {"topic": topic, "channel": "ch"}
    assert registry.get_sample_value("nsqext_handled_messages_total", labels) == 3
    assert registry.get_sample_value("nsqext_handler_seconds_count", labels) == len(handled)
    assert registry.get_sample_value("nsqext_running_handlers", labels) == 0


def test_the_names_are_those_of_the_messaging_conventions() -> None:
    names = {value for name, value in vars(messaging_attributes).items() if name.startswith("MESSAGING_")}
    own = {otel.ATTEMPTS, otel.TRACE_ID, otel.TAG}
    used = {value for name, value in vars(otel).items() if name.isupper() and str(value).startswith("messaging.")}
    assert len(used) > 8
    assert used - own <= names
    assert all(name.startswith("messaging.nsq.message.") for name in own)
    operations = {one.value for one in messaging_attributes.MessagingOperationTypeValues}
    assert {"send", "create", "process"} <= operations
    metrics = {value for name, value in vars(messaging_metrics).items() if name.startswith("MESSAGING_")}
    measured = {
        "messaging.client.operation.duration",
        "messaging.process.duration",
        "messaging.client.sent.messages",
        "messaging.client.consumed.messages",
    }
    assert measured <= metrics


async def test_statistics_and_events_of_clients_are_exported(cluster: Cluster, topic: str) -> None:
    registry = CollectorRegistry()
    app = App(cluster.lookupd, middleware=[Prometheus(registry)], **CALM)
    seen = anyio.Event()

    @app.handler(topic, "ch")
    async def handle(message: Message) -> None:
        if message.body == b"two":
            seen.set()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"nsqext_{name}", labels)

    of_consumer = {"topic": topic, "channel": "ch"}
    with anyio.fail_after(25):
        async with app:
            await app.producer.publish(topic, b"one")
            await app.producer.publish(topic, b"two")
            await seen.wait()
            assert value("consumer_connections", **of_consumer) == 1
            assert value("producer_connections") == 1
            assert (value("consumer_ready", **of_consumer) or 0) >= 1
    assert value("consumer_received_messages_total", **of_consumer) == 2
    assert value("consumer_finished_messages_total", **of_consumer) == 2
    assert value("consumer_in_flight", **of_consumer) == 0
    assert value("consumer_lost_messages_total", **of_consumer) == 0
    assert value("producer_messages_total", outcome="stored") == 2
    assert value("producer_messages_total", outcome="unknown") == 0
    assert (value("producer_sent_bytes_total") or 0) > 6
    assert (value("consumer_received_bytes_total", **of_consumer) or 0) > 6
    assert value("consumer_lookup_failures", **of_consumer) == 0
    assert value("consumer_lookup_age_seconds", **of_consumer) is not None
    assert value("consumer_events_total", **of_consumer, kind="connected") == 1
    assert value("consumer_events_total", **of_consumer, kind="disconnected") == 1
    assert value("producer_events_total", kind="connected") == 1


async def test_events_have_the_topics_that_the_consumer_has_then(cluster: Cluster, topic: str) -> None:
    registry = CollectorRegistry()
    cluster.create_topic(f"{topic}_more", channels=["ch"])

    def connected(topics: str) -> float | None:
        labels = {"topic": topics, "channel": "ch", "kind": "connected"}
        return registry.get_sample_value("nsqext_consumer_events_total", labels)

    with anyio.fail_after(25):
        async with Consumer(topic, "ch", cluster.lookupd, middleware=[Prometheus(registry)]) as consumer:
            await eventually(lambda: connected(topic) == 1)
            consumer.topics = (topic, f"{topic}_more")
            await eventually(lambda: connected(f"{topic},{topic}_more") == 1)
    assert connected(topic) == 1


async def test_dropped_messages_and_dead_letters_are_counted_and_announced_once(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    app = App(cluster.lookupd, middleware=[Prometheus(registry)], max_attempts=1, backoff="off")
    seen: list[Message] = []

    @app.handler(topic, "drops")
    @app.handler(topic, "drops_too")
    @app.handler(topic, "letters", dead_letter=f"{topic}_dead")
    async def handle(message: Message) -> None:
        seen.append(message)
        raise ValueError("no price")

    cluster.create_topic(f"{topic}_dead", extend=True, channels=["support"])
    with anyio.fail_after(25):
        async with app:
            await app.producer.publish(topic, b"one")
            await eventually(lambda: len(seen) == 3 and all(message.answered for message in seen))
    for channel, dropped, letters in (("drops", 1, 0), ("drops_too", 1, 0), ("letters", 0, 1)):
        labels = {"topic": topic, "channel": channel}
        assert registry.get_sample_value("nsqext_consumer_dropped_messages_total", labels) == dropped
        assert registry.get_sample_value("nsqext_consumer_dead_letters_total", labels) == letters
    (warning,) = (text for text in caplog.messages if "max_attempts=1" in text)
    assert warning == (
        f"messages of {topic}/drops_too, {topic}/drops, except on ordered topics, are dropped after max_attempts=1, "
        "because dead_letter is not set; set it to keep them"
    )


async def test_metrics(cluster: Cluster, topic: str) -> None:
    telemetry = Telemetry()
    await journey(cluster, topic, [telemetry.observer])
    durations = telemetry.points("messaging.client.operation.duration")
    exemplars = {exemplar.span_id for point in durations for exemplar in point.exemplars}
    assert exemplars <= {span.context.span_id for span in telemetry.spans(f"publish {topic}")}
    assert exemplars, "a duration is measured inside its span"
    assert {point.attributes["messaging.operation.type"] for point in durations} == {"send"}
    tried = telemetry.points("messaging.client.sent.messages")
    sent = {point.attributes.get("error.type"): point.value for point in tried}
    assert sent == {None: 3, "InvalidBody": 1}
    assert sum(point.value for point in telemetry.points("messaging.client.consumed.messages")) == 5
    assert sum(point.count for point in durations) == 3
    measured = telemetry.points("messaging.process.duration")
    processed = {point.attributes.get("error.type"): point.count for point in measured}
    assert processed == {None: 4, "RuntimeError": 1}
    bounds = {point.explicit_bounds for point in (*durations, *measured)}
    assert bounds == {(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)}


async def test_observers_of_one_provider_count_together(cluster: Cluster, topic: str) -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])
    for _ in range(3):
        async with Producer(cluster.lookupd, middleware=[OpenTelemetry(None, meters)]) as producer:
            await producer.publish(topic, b"x")
    data: Any = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    (sent,) = [metric for metric in metrics if metric.name == "messaging.client.sent.messages"]
    assert [point.value for point in sent.data.data_points] == [3]


@pytest.mark.parametrize(
    ("api", "name", "set_provider"),
    [
        (trace, "_TRACER_PROVIDER", lambda: trace.set_tracer_provider(TracerProvider())),
        (metrics._internal, "_METER_PROVIDER", lambda: metrics.set_meter_provider(MeterProvider())),
    ],
)
def test_a_provider_that_is_set_later_is_found(
    monkeypatch: pytest.MonkeyPatch, api: ModuleType, name: str, set_provider: Callable[[], None]
) -> None:
    monkeypatch.setattr(api, name, None)  # as in a new process, and so after this test
    monkeypatch.setattr(api, f"{name}_SET_ONCE", Once())
    observer = OpenTelemetry()
    publishing = Publishing(topic="orders", messages=[b"x"], batch=True)
    for _ in range(2):
        assert observer.publishing(publishing) is UNOBSERVED
        assert not observer.is_enabled()
    set_provider()
    assert observer.is_enabled()
    assert observer.publishing(publishing) is not UNOBSERVED


def test_a_provider_without_effect_is_not_recorded_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", trace.NoOpTracerProvider())
    assert not OpenTelemetry().is_enabled()


def test_telemetry_is_enabled_where_it_may_pass_on_a_context() -> None:
    assert OpenTelemetry(parent=True).is_enabled()
    span = trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=True))
    with trace.use_span(span):
        assert OpenTelemetry().is_enabled()
    assert not OpenTelemetry().is_enabled()


def test_a_provider_that_becomes_the_global_one_keeps_its_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    meters = MeterProvider()
    assert Instruments.of(None) is Instruments.of(None)
    own = Instruments.of(meters)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    assert Instruments.of(None) is Instruments.of(meters) is own


def test_a_span_has_the_place_that_all_receipts_have_and_a_cancellation_is_no_failure() -> None:
    telemetry = Telemetry()
    node, other = "[::1]:4150", "n:4150"
    traced = Receipt("orders", 0, node, message_id=5)
    places: tuple[tuple[tuple[int | None, str], ...], ...] = (
        ((0, node), (0, node)),
        ((0, node), (1, node)),
        ((None, node), (None, other)),
        (),
    )
    for receipts in ([traced], *([Receipt("orders", *place) for place in some] for some in places)):
        publishing = Publishing(topic="orders", messages=[OutgoingMessage(b"x", trace_id=0)], batch=False)
        with suppress(KeyboardInterrupt), telemetry.observer.publishing(publishing):
            publishing.receipts = receipts
            if not receipts:
                raise KeyboardInterrupt
    found = telemetry.spans("publish orders")
    names = otel.PARTITION, otel.SERVER_ADDRESS, otel.MESSAGE_ID
    assert [tuple((span.attributes or {}).get(name) for name in names) for span in found] == [
        ("0", "::1", "5"),
        ("0", "::1", None),
        *[(None, None, None)] * 3,
    ]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}
    assert not any(otel.TRACE_ID in (span.attributes or {}) for span in found)


@pytest.mark.parametrize("message", [b"body", OutgoingMessage(b"body")])
def test_a_span_has_the_size_of_its_message_if_asked(message: bytes | OutgoingMessage) -> None:
    for body_size, expected in ((True, 4), (False, None)):
        telemetry = Telemetry(body_size=body_size)
        publishing = Publishing(topic="orders", messages=[message], batch=False)
        with telemetry.observer.publishing(publishing):
            pass
        assert publishing.given == [message]
        (span,) = telemetry.spans("publish orders")
        assert (span.attributes or {}).get(otel.BODY_SIZE) == expected


def test_the_origin_of_a_message_is_its_parent_outside_of_other_spans() -> None:
    """As of an outbox."""
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    message = OutgoingMessage(b"x", headers={"traceparent": f"00-{7:032x}-{9:016x}-01"})
    publishings = [Publishing(topic="orders", messages=[message], batch=False) for _ in range(2)]
    with OpenTelemetry(tracers).publishing(publishings[0]):
        pass
    observed = OpenTelemetry(tracers).publishing(publishings[1])
    with tracers.get_tracer("test").start_as_current_span("request") as request, observed:
        pass
    parents = [span.parent for span in exporter.get_finished_spans() if span.name == "publish orders"]
    assert [parent and parent.span_id for parent in parents] == [9, request.get_span_context().span_id]


def test_a_batch_of_several_topics_has_the_name_and_labels_of_none() -> None:
    telemetry = Telemetry()
    parts: Any = {"node": "n:4150", "headers": {}, "header": b"", "internal_id": 1, "body": b"x"}
    messages = [SimpleNamespace(topic=topic, partition=len(topic), **parts) for topic in ("a", "bb", "bb")]
    handling: Any = SimpleNamespace(batch=True, channel="ch", messages=messages, topic_counts={"a": 1, "bb": 2})
    with telemetry.observer.handling(handling):
        pass
    (span,) = telemetry.spans("process")
    assert not {otel.DESTINATION, otel.PARTITION} & (span.attributes or {}).keys()
    counted = telemetry.points("messaging.client.consumed.messages")
    assert {point.attributes[otel.DESTINATION]: point.value for point in counted} == {"a": 1, "bb": 2}


def test_a_span_ends_although_its_error_has_no_text_or_its_metric_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    observer = OpenTelemetry(TracerProvider())
    for error in (Silent(), None):
        observed = observer.publishing(Publishing(topic="orders", messages=[b"x"], batch=True))
        observed.__enter__()
        with pytest.raises(ZeroDivisionError):
            observed.__exit__(None if error is None else Silent, error, None)
        assert not trace.get_current_span().get_span_context().is_valid
        monkeypatch.setattr(observer.instruments, "duration", SimpleNamespace(record=lambda *_: 1 // 0))


async def test_contexts_become_parents(cluster: Cluster, topic: str) -> None:
    telemetry = Telemetry(create_spans=False, parent=True, body_size=True)
    await journey(cluster, topic, [telemetry.observer])
    single, batch, _ = telemetry.spans(f"publish {topic}")
    assert telemetry.spans(f"create {topic}") == []
    assert (batch.kind, (single.attributes or {})["messaging.message.body.size"]) == (SpanKind.PRODUCER, 3)
    parents = {span.parent.span_id for span in telemetry.spans(f"process {topic}") if span.parent is not None}
    assert single.context is not None
    assert batch.context is not None
    assert parents == {single.context.span_id, batch.context.span_id}
    assert [list(span.links) for span in telemetry.spans(f"process {topic}") if span.parent is not None] == [[]] * 5


async def test_contexts_are_not_propagated_with_never(cluster: Cluster, topic: str) -> None:
    telemetry = Telemetry(propagate="never")
    await journey(cluster, topic, [telemetry.observer])
    assert [(span.parent, list(span.links)) for span in telemetry.spans(f"process {topic}")] == [(None, [])] * 5


async def test_headers_stay_beside_the_context(cluster: Cluster, topic: str) -> None:
    """Headers that are given as bytes stay as they are; values that are no text are none of the propagator's."""
    sending, receiving = Telemetry(), Telemetry()
    async with Producer(cluster.lookupd, middleware=[sending.observer]) as producer:
        await producer.publish(topic, b"own", headers={"user": "42"})
        await producer.publish(topic, b"given", header=b'{"traceparent":7}')
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=[receiving.observer], **CALM)
    seen: dict[bytes, Message] = {}

    @consumer.handler
    async def handle(message: Message) -> None:
        seen[message.body] = message
        if len(seen) == 2:
            consumer.stop()

    with anyio.fail_after(25):
        await consumer.serve()
    assert seen[b"own"].headers.keys() == {"user", "traceparent"}
    assert seen[b"given"].header == b'{"traceparent":7}'
    assert sorted(len(span.links) for span in receiving.spans(f"process {topic}")) == [0, 1]


async def test_prometheus(cluster: Cluster, topic: str) -> None:
    registry = CollectorRegistry()
    await journey(cluster, topic, [Prometheus(registry)])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"nsqext_{name}", {"topic": topic, **labels})

    assert (value("published_messages_total"), value("published_bytes_total")) == (3, 11)
    assert value("publish_seconds_count") == 2
    assert value("publish_failures_total", error="InvalidBody") == 1
    assert value("handled_messages_total", channel="ch") == 5
    assert value("redelivered_messages_total", channel="ch") == 2
    assert value("handler_seconds_count", channel="ch") == 5
    assert value("handler_failures_total", channel="ch", error="RuntimeError") == 1
    assert value("running_handlers", channel="ch") == 0


def test_what_a_failed_batch_has_stored_is_counted() -> None:
    registry = CollectorRegistry()
    publishing = Publishing(topic="orders", messages=[b"one", b"three", b"two"], batch=True)
    receipt = Receipt("orders", 0, "n1:4150")
    outcomes: list[Receipt | NsqError] = [receipt, InvalidInput("refused"), receipt]
    with suppress(BatchFailed), Prometheus(registry).publishing(publishing):
        raise BatchFailed(outcomes)
    found = {
        name: registry.get_sample_value(f"nsqext_{name}", {"topic": "orders"})
        for name in ("published_messages_total", "published_bytes_total", "publish_seconds_count")
    }
    assert found == {"published_messages_total": 2, "published_bytes_total": 6, "publish_seconds_count": 0}


def test_metrics_that_the_registry_refused_are_registered_later() -> None:
    registry = CollectorRegistry()
    other = Gauge("nsqext_handler_seconds", "Of another package.", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Prometheus(registry)
    registry.unregister(other)
    with Prometheus(registry).publishing(Publishing(topic="orders", messages=[b"x"], batch=True)):
        pass
    assert registry.get_sample_value("nsqext_published_messages_total", {"topic": "orders"}) == 1


async def test_counters_have_what_clients_counted_between_two_scrapes(cluster: Cluster, topic: str) -> None:
    registry = CollectorRegistry()
    observers = [Prometheus(registry)]
    for _ in range(2):
        async with (
            Producer(cluster.lookupd, middleware=observers) as producer,
            Consumer(topic, "ch", cluster.lookupd, middleware=observers) as consumer,
        ):
            await producer.publish(topic, b"x")
            message = await anext(consumer)
            await message.finish()
        del producer, consumer, message
        gc.collect()
    stored = registry.get_sample_value("nsqext_producer_messages_total", {"outcome": "stored"})
    finished = registry.get_sample_value("nsqext_consumer_finished_messages_total", {"topic": topic, "channel": "ch"})
    assert (stored, finished) == (2, 2)


async def test_counters_have_the_errors_of_a_producer_that_was_deleted_before_a_scrape() -> None:
    """They were 0, because such a producer had no connection whose end was counted."""
    registry = CollectorRegistry()
    async with Producer("127.0.0.1:1", middleware=[Prometheus(registry)], lookup_timeout=0.01) as producer:
        with pytest.raises(LookupFailed):
            await producer.publish("orders", b"x")
    del producer
    gc.collect()
    assert registry.get_sample_value("nsqext_producer_messages_total", {"outcome": "failed"}) == 1


def test_a_client_that_cannot_be_attached_is_refused() -> None:
    with pytest.raises(InvalidSetting, match=r"give blocking clients middleware=\[Prometheus\(\)\]"):
        Prometheus(CollectorRegistry()).attach(sync.Producer("127.0.0.1:1"))


def test_a_batch_has_the_attempts_of_all_its_messages(caplog: pytest.LogCaptureFixture) -> None:
    messages = [SimpleNamespace(topic="t", partition=0, attempts=one, trace_id=0, body=b"x") for one in (1, 3, 2)]
    handling: Any = SimpleNamespace(batch=True, channel="ch", messages=messages, topic_counts={"t": 3})
    registry = CollectorRegistry()
    caplog.set_level(logging.DEBUG, "nsqext.events")
    with LogObserver().handling(handling), Prometheus(registry).handling(handling):
        pass
    labels = {"topic": "t", "channel": "ch"}
    assert registry.get_sample_value("nsqext_redelivered_messages_total", labels) == 2
    record = vars(caplog.records[-1])
    assert (record["attempts"], record["partition"]) == (3, [0])


class Unreadable(OutboxRelay):
    def __init__(self) -> None:
        self._published = self._failed = self._refused = 7

    def summary(self) -> Never:
        raise InvalidState("no database")


def test_the_level_of_the_backoff_is_the_highest_of_all_connections() -> None:
    found: Any = SimpleNamespace(connections=[SimpleNamespace(backoff=level) for level in (0, 2, 1)])
    assert _backoff(found) == 2


def test_the_statistics_of_a_client_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    prometheus, producer, relay = Prometheus(registry), Producer("127.0.0.1:1"), Unreadable()
    statistics, callbacks = evolve(producer.statistics(), failed=2, unknown=3), list[Callable[[ClientEvent], object]]()
    monkeypatch.setattr(producer, "statistics", lambda: statistics)
    monkeypatch.setattr(producer, "on_event", callbacks.append)
    for _ in range(2):
        prometheus.attach(producer)
        prometheus.attach(relay)
    for callback in callbacks:
        callback(ClientEvent("connected", None, None, "n:1", ""))
    names = ("producer_messages", "producer_messages", "producer_events", "outbox_published_messages")
    labels: tuple[dict[str, str], ...] = ({"outcome": "failed"}, {"outcome": "unknown"}, {"kind": "connected"}, {})
    found = [registry.get_sample_value(f"nsqext_{name}_total", one) for name, one in zip(names, labels, strict=True)]
    assert found == [2, 3, 1, 7]
    assert registry.get_sample_value("nsqext_outbox_waiting_messages") is None


class Broken(Observer):
    """An observer that fails at the start or at the end, or suppresses errors."""

    def __init__(self, how: str) -> None:
        self._how = how

    @contextmanager
    def _observe(self) -> Iterator[None]:
        if self._how == "beginning":
            raise ZeroDivisionError
        try:
            yield
        except Exception:
            if self._how != "suppresses":
                raise
        if self._how == "end":
            raise ZeroDivisionError

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        return self._observe()

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        return self._observe()


@pytest.mark.parametrize("how", ["beginning", "end", "suppresses"])
async def test_a_broken_observer_changes_nothing(
    cluster: Cluster, topic: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = CollectorRegistry()
    await journey(cluster, topic, [Prometheus(registry), Broken(how), LogObserver()])
    assert registry.get_sample_value("nsqext_published_messages_total", {"topic": topic}) == 3
    labels = {"topic": topic, "channel": "ch"}
    assert registry.get_sample_value("nsqext_handled_messages_total", labels) == 5
    expected = [record for record in caplog.records if record.name == "nsqext.observability"]
    assert bool(expected) == (how != "suppresses")


@pytest.mark.parametrize("make", [Producer, lambda *a, **k: Consumer("orders", "ch", **k)])
async def test_other_objects_are_refused(make: Callable[..., object]) -> None:
    with pytest.raises(InvalidSetting, match="is not a middleware"):
        make(nsqd="127.0.0.1:1", **({"middleware": [print]}))
    with pytest.raises(InvalidSetting, match="propagate"):
        OpenTelemetry(propagate="sometimes")  # type: ignore[arg-type]
