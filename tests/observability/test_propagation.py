"""The trace context is sent wherever the topic supports headers, and nowhere else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span
from prometheus_client import CollectorRegistry

from nsqext import App, Consumer, OutgoingMessage, Producer
from nsqext.errors import InvalidSetting
from nsqext.observability.otel import OpenTelemetry
from nsqext.observability.prometheus import Prometheus

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


async def single(producer: Producer, topic: str) -> int:
    await producer.publish(topic, b"one")
    return 1


async def keyed(producer: Producer, topic: str) -> int:
    await producer.publish(topic, b"one", key="customer")
    return 1


async def several(producer: Producer, topic: str) -> int:
    await producer.publish_many(topic, [b"one", OutgoingMessage(b"two"), b"three"])
    return 3


async def batched(producer: Producer, topic: str) -> int:
    async with producer.batcher(topic) as batcher:
        for number in range(4):
            await batcher.add(b"%d" % number)
    return 4


WAYS: list[Callable[[Producer, str], Awaitable[int]]] = [single, keyed, several, batched]


async def received(cluster: Cluster, topic: str, count: int) -> list[object]:
    """Return the trace contexts of messages."""
    consumer = Consumer(topic, "ch", cluster.lookupd)
    found: list[object] = []
    with anyio.fail_after(25):
        async with consumer:
            for _ in range(count):
                message = await anext(consumer)
                found.append(message.headers.get("traceparent") if message.header else None)
                await message.finish()
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("extend", [True, False])
async def test_the_context_is_sent_where_the_topic_supports_headers(
    cluster: Cluster, way: Callable[[Producer, str], Awaitable[int]], extend: bool
) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, extend=extend, channels=["ch"])
    tracers = TracerProvider()
    async with Producer(cluster.lookupd, middleware=[OpenTelemetry(tracers)]) as producer:
        with tracers.get_tracer("test").start_as_current_span("request") as span:
            count = await way(producer, topic)
    contexts = await received(cluster, topic, count)
    trace = f"{span.get_span_context().trace_id:032x}"
    assert len(contexts) == count
    for context in contexts:
        assert (context is not None and trace in str(context)) if extend else context is None


@pytest.mark.parametrize("extend", [True, False])
async def test_an_app_sends_the_context_without_a_handler(cluster: Cluster, extend: bool) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, extend=extend, channels=["ch"])
    tracers = TracerProvider()
    async with App(cluster.lookupd, middleware=[OpenTelemetry(tracers)]) as app:
        with tracers.get_tracer("test").start_as_current_span("request") as span:
            await app.publish(topic, {"number": 1})
    (context,) = await received(cluster, topic, 1)
    assert (f"{span.get_span_context().trace_id:032x}" in str(context)) == extend


async def test_a_second_prometheus_shares_the_metrics_of_the_first(cluster: Cluster) -> None:
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, channels=["ch"])
    registry = CollectorRegistry()
    first, second = Prometheus(registry), Prometheus(registry)
    async with (
        Producer(cluster.lookupd, middleware=[first]) as one,
        Producer(cluster.lookupd, middleware=[second]) as other,
    ):
        await one.publish(topic, b"x")
        await other.publish(topic, b"x")
        assert registry.get_sample_value("nsqext_published_messages_total", {"topic": topic}) == 2
        assert registry.get_sample_value("nsqext_producer_messages_total", {"outcome": "stored"}) == 2
    assert registry.get_sample_value("nsqext_published_messages_total", {"topic": topic}) == 2
    with pytest.raises(InvalidSetting, match="buckets"):
        Prometheus(registry, buckets=[float(bound) for bound in range(1, 12)])
    Prometheus(registry, namespace="other", buckets=[1.0])
    Prometheus(registry, namespace="other")  # has the buckets of the first
    Prometheus(registry, namespace="other", buckets=[1.0])


async def test_a_context_is_passed_on_without_an_sdk(cluster: Cluster, topic: str) -> None:
    request = SpanContext(0x1234, 0x5678, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    async with Producer(cluster.lookupd, middleware=[OpenTelemetry()]) as producer:
        await producer.publish(topic, b"before")
        with use_span(NonRecordingSpan(request)):
            await producer.publish(topic, b"in a request")
    traceparent = f"00-{0x1234:032x}-{0x5678:016x}-01"
    assert set(await received(cluster, topic, 2)) == {None, traceparent}


@pytest.mark.parametrize("batch", [False, True])
async def test_an_invalid_context_is_not_linked(cluster: Cluster, topic: str, batch: bool) -> None:
    spans = InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    app = App(cluster.lookupd, middleware=[OpenTelemetry(tracers)])
    handled = anyio.Event()

    async def handle(messages: object) -> None:
        handled.set()

    (app.batch_handler if batch else app.handler)(topic, "ch")(handle)
    async with Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"x", headers={"traceparent": f"00-{'0' * 32}-{'0' * 16}-01"})
    with anyio.fail_after(25):
        async with app:
            await handled.wait()
    (span,) = spans.get_finished_spans()
    assert (span.name, len(span.links)) == (f"process {topic}", 0)


@pytest.mark.parametrize("batch", [False, True])
async def test_no_publish_fails_for_its_trace(cluster: Cluster, topic: str, batch: bool) -> None:
    """A context that does not fit beside the message is left out."""
    messages = [
        OutgoingMessage(b"x" * 69_950),
        OutgoingMessage(b"one", {"a": "x" * 59_950}),
        OutgoingMessage(b"two", {"a": "x" * 50_000}, key="k" * 9_950),
        OutgoingMessage(b"three", {"a": "x"}, key="k"),
    ]
    tracers = TracerProvider()
    async with Producer(cluster.lookupd, max_message_size=70_000, middleware=[OpenTelemetry(tracers)]) as producer:
        with tracers.get_tracer("test").start_as_current_span("request"):
            if batch:
                await producer.publish_many(topic, messages)
            for message in () if batch else messages:
                await producer.publish(topic, message.body, headers=message.headers, key=message.key)
    contexts = await received(cluster, topic, len(messages))
    assert [context is not None for context in contexts].count(True) == 1
