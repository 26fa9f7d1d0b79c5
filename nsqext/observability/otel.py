"""OpenTelemetry spans and metrics by the messaging conventions (extra ``otel``, API only)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(f"{_error}: pip install 'nsqext[otel]'", name=_error.name) from _error

from nsqext._version import __version__
from nsqext.errors import InvalidSetting
from nsqext.observability import Observer, failure

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import Handling
    from nsqext.client.producer.request import OutgoingMessage, Publishing
    from nsqext.types import TopicMeta

__all__ = ("OpenTelemetry",)

SYSTEM = "messaging.system"
OPERATION_NAME = "messaging.operation.name"
OPERATION_TYPE = "messaging.operation.type"
DESTINATION = "messaging.destination.name"
PARTITION = "messaging.destination.partition.id"
GROUP = "messaging.consumer.group.name"
MESSAGE_ID = "messaging.message.id"
BODY_SIZE = "messaging.message.body.size"
BATCH_COUNT = "messaging.batch.message_count"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
ATTEMPTS = "messaging.nsq.message.attempts"
TRACE_ID = "messaging.nsq.message.trace_id"
TAG = "messaging.nsq.message.tag"

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

Attributes = dict[str, Any]


class OpenTelemetry(Observer):
    """Records spans ``publish TOPIC`` and ``process TOPIC``, and the conventions' four client metrics.

    The channel is ``messaging.consumer.group.name``. Without an SDK nothing is recorded, at little cost.

    Args:
        tracer_provider: by default the global provider.
        meter_provider: by default the global provider.
        propagate: ``supported`` writes the context of a publish to the extend headers of its messages on topics with
            extend support; ``never`` does not.
        create_spans: record a span for each message of a batch, linked to the batch's span.
        parent: make a handler's span a child of the publisher's span instead of a link; a batch's span always links to
            its messages' publishers.
        body_size: record the size of bodies.

    Raises:
        InvalidSetting: ``propagate`` has another value.
    """

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        *,
        propagate: Literal["supported", "never"] = "supported",
        create_spans: bool = True,
        parent: bool = False,
        body_size: bool = False,
    ) -> None:
        if propagate not in ("supported", "never"):
            raise InvalidSetting(f"propagate={propagate!r} is neither 'supported' nor 'never'")
        self._propagates = propagate == "supported"
        self._create_spans = create_spans
        self._parent = parent
        self._body_size = body_size
        self._tracer = trace.get_tracer("nsqext", __version__, tracer_provider)
        meter = metrics.get_meter("nsqext", __version__, meter_provider)
        self._duration = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of messaging operations of a client.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._process = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handling a message.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that a producer tried to send."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were delivered to a handler."
        )

    # Publishing

    @contextmanager
    def publishing(self, publishing: Publishing) -> Iterator[None]:
        """Record a span for a publish."""
        topic = publishing.topic
        base: Attributes = {SYSTEM: "nsq", OPERATION_NAME: "publish", DESTINATION: topic}
        attributes: Attributes = {**base, OPERATION_TYPE: "send"}
        # a batch has a create span per message; a single message's send span creates it
        creates = publishing.batch and self._create_spans
        origins = _origins(publishing.messages)
        parent: Context | None = None
        links: list[Link] = []
        if not publishing.batch:
            attributes |= self._details(publishing.messages[0])
            parent, origins = origins[0], [None]
        else:
            attributes[BATCH_COUNT] = len(publishing.messages)
            links = (
                self._create(publishing, origins)
                if creates
                else [_link(origin) for origin in origins if origin is not None]
            )
        kind = SpanKind.CLIENT if creates else SpanKind.PRODUCER
        name = f"publish {topic}"
        with (
            self._tracer.start_as_current_span(name, parent, kind=kind, attributes=attributes, links=links) as span,
            self._measured(span, base, len(publishing.messages)),
        ):
            if not creates:
                current = context.get_current()
                self._propagate(publishing, [origin or current for origin in origins])
            yield
            self._add_receipts(span, publishing)

    def _create(self, publishing: Publishing, origins: Sequence[Context | None]) -> list[Link]:
        links, contexts = [], []
        base: Attributes = {
            SYSTEM: "nsq",
            OPERATION_NAME: "create",
            OPERATION_TYPE: "create",
            DESTINATION: publishing.topic,
        }
        name = f"create {publishing.topic}"
        for message, origin in zip(publishing.messages, origins, strict=True):
            attributes = base | self._details(message)
            span = self._tracer.start_span(name, origin, SpanKind.PRODUCER, attributes)
            contexts.append(trace.set_span_in_context(span))
            links.append(Link(span.get_span_context()))
            span.end()
        self._propagate(publishing, contexts)
        return links

    def _propagate(self, publishing: Publishing, contexts: Sequence[Context]) -> None:
        """Write the contexts to the messages once it is known whether the topic supports headers."""
        if not self._propagates:
            return

        def inject(meta: TopicMeta) -> None:
            if meta.extend_support:
                found = zip_longest(publishing.messages, contexts[: len(publishing.messages)])
                publishing.messages = [_with_context(message, one) for message, one in found]

        publishing.on_topic.append(inject)

    def _details(self, message: OutgoingMessage | Message) -> Attributes:
        attributes: Attributes = {}
        if message.trace_id:
            attributes[TRACE_ID] = str(message.trace_id)
        if message.tag is not None:
            attributes[TAG] = message.tag
        if self._body_size:
            attributes[BODY_SIZE] = len(message.body)
        return attributes

    @contextmanager
    def _measured(self, span: Span, base: Attributes, count: int) -> Iterator[None]:
        started = time.monotonic()
        error_type: Mapping[str, str] = {}
        try:
            yield
        except BaseException as error:
            error_type = {ERROR_TYPE: type(error).__qualname__}
            span.set_attributes(error_type)
            raise
        finally:
            self._duration.record(time.monotonic() - started, {**base, OPERATION_TYPE: "send", **error_type})
            self._sent.add(count, {**base, **error_type})

    def _add_receipts(self, span: Span, publishing: Publishing) -> None:
        if not span.is_recording() or not publishing.receipts:
            return
        first = publishing.receipts[0]
        if any((other.partition, other.node) != (first.partition, first.node) for other in publishing.receipts):
            return
        span.set_attributes(_place(first.partition, first.node))
        if not publishing.batch and first.message_id:
            span.set_attribute(MESSAGE_ID, str(first.message_id))

    # Processing

    @contextmanager
    def handling(self, handling: Handling) -> Iterator[None]:
        """Record a span for a handler."""
        base: Attributes = {SYSTEM: "nsq", OPERATION_NAME: "process", GROUP: handling.channel}
        counts = Counter(message.topic for message in handling.messages)
        for topic, count in counts.items():
            self._consumed.add(count, {**base, DESTINATION: topic})
        name = "process"
        if len(counts) == 1:
            (base[DESTINATION],) = counts
            name = f"process {base[DESTINATION]}"
        started = time.monotonic()
        error_type: Mapping[str, str] = {}
        context: Context | None = None
        if handling.batch:
            attributes = self._of_batch(handling.messages)
            links = [
                _link(origin, {MESSAGE_ID: str(message.internal_id)})
                for message in handling.messages
                if (origin := _origin(message)) is not None
            ]
        else:
            attributes = self._of_message(handling.message)
            origin = _origin(handling.message)
            links = [] if origin is None or self._parent else [_link(origin)]
            context = origin if self._parent else None
        span = self._tracer.start_span(name, context, SpanKind.CONSUMER, attributes | base, links)
        try:
            with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
                try:
                    yield
                except BaseException as error:
                    kind = failure(error)
                    if kind is not None:
                        error_type = {ERROR_TYPE: kind}
                        span.record_exception(error)
                        span.set_status(Status(StatusCode.ERROR, kind))
                        span.set_attributes(error_type)
                    raise
        finally:
            self._process.record(time.monotonic() - started, {**base, **error_type})

    def _of_message(self, message: Message) -> Attributes:
        return {
            OPERATION_TYPE: "process",
            MESSAGE_ID: str(message.internal_id),
            ATTEMPTS: message.attempts,
            **_place(message.partition, message.node),
            **self._details(message),
        }

    def _of_batch(self, messages: Sequence[Message]) -> Attributes:
        attributes: Attributes = {OPERATION_TYPE: "process", BATCH_COUNT: len(messages)}
        places = {(message.partition, message.node) for message in messages}
        if len(places) == 1:
            attributes |= _place(*places.pop())
        if self._body_size:
            attributes[BODY_SIZE] = sum(len(message.body) for message in messages)
        return attributes


def _origin(message: Message) -> Context | None:
    return _context_in(message.headers) if message.header else None


def _origins(messages: Sequence[OutgoingMessage]) -> list[Context | None]:
    """Return the contexts in messages' headers, as of an outbox; without effect in an active span."""
    if trace.get_current_span().get_span_context().is_valid:
        return [None] * len(messages)
    return [_context_in(message.headers) if message.headers else None for message in messages]


def _context_in(headers: Mapping[str, object]) -> Context | None:
    texts = {name: value for name, value in headers.items() if isinstance(value, str)}
    context = propagate.extract(texts, Context())
    return context if trace.get_current_span(context).get_span_context().is_valid else None


def _link(origin: Context, attributes: Attributes | None = None) -> Link:
    return Link(trace.get_current_span(origin).get_span_context(), attributes)


def _with_context(message: OutgoingMessage, origin: Context | None) -> OutgoingMessage:
    carrier: dict[str, str] = {}
    # without an origin, another middleware added the message; a header given as bytes stays
    if origin is not None and message.header is None:
        propagate.inject(carrier, origin)
    return evolve(message, headers={**(message.headers or {}), **carrier}) if carrier else message


def _place(partition: int | None, node: str) -> Attributes:
    host, _, port = node.rpartition(":")
    attributes: Attributes = {SERVER_ADDRESS: host.strip("[]"), SERVER_PORT: int(port)}
    if partition is not None:
        attributes[PARTITION] = str(partition)
    return attributes
