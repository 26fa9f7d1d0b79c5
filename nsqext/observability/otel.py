"""OpenTelemetry spans and metrics by the messaging conventions (extra ``otel``, API only)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanKind, Status, StatusCode
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(f"{_error}: pip install 'nsqext[otel]'", name=_error.name) from _error

from nsqext._version import __version__
from nsqext.arguments import check_flags
from nsqext.client.producer.request import key_bytes
from nsqext.errors import InvalidHeader, InvalidSetting
from nsqext.observability import UNOBSERVED, Observer, failure
from nsqext.observability.otel_metrics import Instruments, Labels
from nsqext.protocol.headers import MAX_HEADER_BYTES, encode_headers

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram

    from nsqext.client.consumer.message import Message
    from nsqext.client.middleware import Handling
    from nsqext.client.producer.publishing import OutgoingMessage, Publishing
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

# The API's functions for the global providers read the environment as long as none is set, which costs 1.4 µs each.
# They have read it when tracer and instruments were made, and then these variables are None.
_TRACE = trace.get_tracer_provider.__globals__
_METRICS = metrics.get_meter_provider.__globals__

_OTHERS = 512  # bytes of tag, delay and compression beside the headers, at most
_ESCAPED = 6  # bytes of a character of a key in JSON, at most

Attributes = dict[str, Any]


class OpenTelemetry(Observer):
    """Records spans ``publish TOPIC`` and ``process TOPIC``, and the conventions' four client metrics.

    The channel is ``messaging.consumer.group.name``. Without an SDK nothing is recorded, at little cost.

    Args:
        tracer_provider: by default the global provider.
        meter_provider: by default the global provider.
        propagate: ``supported`` writes the context of a publish to the extend headers of its messages on topics with
            extend support, unless a message would become too large by it; ``never`` does not.
        create_spans: record a span for each message of a batch, linked to the batch's span.
        parent: make a handler's span a child of the publisher's span instead of a link; a batch's span always links to
            its messages' publishers.
        body_size: record the size of bodies.

    Raises:
        InvalidSetting: ``propagate`` has another value, or an argument is not True or False.
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
        check_flags(create_spans=create_spans, parent=parent, body_size=body_size)
        self.propagates: bool = propagate == "supported"
        self.create_spans: bool = create_spans
        self.parent: bool = parent
        self.body_size: bool = body_size
        self.tracer: trace.Tracer = trace.get_tracer("nsqext", __version__, tracer_provider)
        self.instruments: Instruments = Instruments.of(meter_provider)
        self._records = tracer_provider is not None or meter_provider is not None

    def is_enabled(self) -> bool:
        """Return whether a provider is set, or there may be a context to pass on."""
        return self.parent or self._recording() or bool(context.get_current())

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Record a span for a publish."""
        if self._recording() or trace.get_current_span().get_span_context().is_valid:
            return _PublishSpan(self, publishing)
        return UNOBSERVED

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Record a span for a handler."""
        # without a provider the API passes on a parent's context
        return _HandlerSpan(self, handling) if self._recording() or self.parent else UNOBSERVED

    def _recording(self) -> bool:
        """Return whether a provider is set; an application may set the global ones at any time, once."""
        if not self._records:
            unset = _TRACE.get("_TRACER_PROVIDER", "") is None and _METRICS.get("_METER_PROVIDER", "") is None
            if not unset:
                self._records = _is_set(trace.get_tracer_provider()) or _is_set(metrics.get_meter_provider())
        return self._records

    def details(self, message: OutgoingMessage | Message | bytes) -> Attributes:
        """Return the attributes of a message's span that both sides have."""
        if isinstance(message, bytes):
            return {BODY_SIZE: len(message)} if self.body_size else {}
        attributes: Attributes = {}
        if message.trace_id:
            attributes[TRACE_ID] = str(message.trace_id)
        if message.tag is not None:
            attributes[TAG] = message.tag
        if self.body_size:
            attributes[BODY_SIZE] = len(message.body)
        return attributes


def _is_set(provider: object) -> bool:
    """Return whether a provider is not one of the API itself, which record nothing."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))


class _ObservedSpan:
    """A current span and its duration."""

    __slots__ = ("_labels", "_observer", "_span", "_started", "_token")

    def __init__(self, observer: OpenTelemetry) -> None:
        self._observer = observer
        self._labels: Labels = {}  # of its metrics

    def _start(
        self, name: str, parent: Context | None, kind: SpanKind, attributes: Attributes, links: Sequence[Link]
    ) -> None:
        self._span = self._observer.tracer.start_span(name, parent, kind, attributes, links)
        self._token = context.attach(trace.set_span_in_context(self._span))
        self._started = time.monotonic()

    def _end(self, duration: Histogram, labels: Labels) -> None:
        try:
            duration.record(time.monotonic() - self._started, labels)  # in the span, for exemplars
        finally:
            context.detach(self._token)
            self._span.end()

    def _fail(self, error: BaseException, kind: str, text: str) -> None:
        """Record an error."""
        self._span.record_exception(error)
        self._span.set_status(Status(StatusCode.ERROR, text))
        self._span.set_attribute(ERROR_TYPE, kind)


class _PublishSpan(_ObservedSpan):
    """The span of a publish."""

    __slots__ = ("_count", "_publishing")

    def __init__(self, observer: OpenTelemetry, publishing: Publishing) -> None:
        super().__init__(observer)
        self._publishing = publishing

    def __enter__(self) -> None:
        publishing, observer = self._publishing, self._observer
        topic = publishing.topic
        self._count = len(publishing.given)
        self._labels = {SYSTEM: "nsq", OPERATION_NAME: "publish", DESTINATION: topic}
        attributes: Attributes = {**self._labels, OPERATION_TYPE: "send"}
        # a batch has a create span per message; a single message's send span creates it
        creates = publishing.batch and observer.create_spans
        # a single body has no headers; an object for it would cost 2 µs
        bare = not publishing.batch and type(publishing.given[0]) is bytes
        origins = [None] if bare else _origins(publishing.messages)
        parent: Context | None = None
        links: list[Link] = []
        if not publishing.batch:
            attributes |= observer.details(publishing.given[0])
            parent, origins = origins[0], [None]
        else:
            attributes[BATCH_COUNT] = len(publishing.messages)
            links = self._create(origins) if creates else [_link(origin) for origin in origins if origin is not None]
        self._start(f"publish {topic}", parent, SpanKind.CLIENT if creates else SpanKind.PRODUCER, attributes, links)
        if not creates:
            current = context.get_current()
            self._propagate([origin or current for origin in origins])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        labels = self._labels
        if error is not None:
            labels = labels | {ERROR_TYPE: type(error).__qualname__}
        instruments = self._observer.instruments
        try:
            instruments.sent.add(self._count, labels)
            if error is None:
                self._add_receipts()
            elif isinstance(error, Exception):
                self._fail(error, labels[ERROR_TYPE], f"{type(error).__name__}: {error}")
            else:  # a cancellation is no failure of the span
                self._span.set_attribute(ERROR_TYPE, labels[ERROR_TYPE])
        finally:
            self._end(instruments.duration, {**labels, OPERATION_TYPE: "send"})

    def _create(self, origins: Sequence[Context | None]) -> list[Link]:
        links, contexts = [], []
        publishing, observer = self._publishing, self._observer
        base: Attributes = {
            SYSTEM: "nsq",
            OPERATION_NAME: "create",
            OPERATION_TYPE: "create",
            DESTINATION: publishing.topic,
        }
        name = f"create {publishing.topic}"
        for message, origin in zip(publishing.messages, origins, strict=True):
            attributes = base | observer.details(message)
            span = observer.tracer.start_span(name, origin, SpanKind.PRODUCER, attributes)
            contexts.append(trace.set_span_in_context(span))
            links.append(Link(span.get_span_context()))
            span.end()
        self._propagate(contexts)
        return links

    def _propagate(self, contexts: Sequence[Context]) -> None:
        """Write the contexts to the messages once it is known whether the topic supports headers."""
        if not self._observer.propagates:
            return
        publishing = self._publishing

        def inject(meta: TopicMeta) -> None:
            if meta.extend_support:
                found = zip_longest(publishing.messages, contexts[: len(publishing.messages)])
                publishing.messages = [_with_context(publishing, message, one) for message, one in found]

        publishing.on_topic.append(inject)

    def _add_receipts(self) -> None:
        receipts = self._publishing.receipts
        if not receipts or not self._span.is_recording():
            return
        first = receipts[0]
        place = first.partition, first.node
        if len(receipts) > 1 and any((other.partition, other.node) != place for other in receipts):
            return
        attributes = _place(*place)
        if not self._publishing.batch and first.message_id:
            attributes = {**attributes, MESSAGE_ID: str(first.message_id)}
        self._span.set_attributes(attributes)


class _HandlerSpan(_ObservedSpan):
    """The span of a handler."""

    __slots__ = ("_handling",)

    def __init__(self, observer: OpenTelemetry, handling: Handling) -> None:
        super().__init__(observer)
        self._handling = handling

    def __enter__(self) -> None:
        handling, observer = self._handling, self._observer
        messages = handling.messages
        counts = handling.topic_counts
        for topic, count in counts.items():
            observer.instruments.consumed.add(count, self._labelled(topic))
        name = "process"
        if len(counts) == 1:
            (topic,) = counts
            self._labels = self._labelled(topic)
            name = f"process {topic}"
        else:
            self._labels = self._labelled()
        parent: Context | None = None
        if handling.batch:
            attributes = self._of_batch(messages)
            links = [
                _link(origin, {MESSAGE_ID: str(message.internal_id)})
                for message in messages
                if (origin := _origin(message)) is not None
            ]
        else:
            attributes = self._of_message(handling.message)
            origin = _origin(handling.message)
            links = [] if origin is None or observer.parent else [_link(origin)]
            parent = origin if observer.parent else None
        self._start(name, parent, SpanKind.CONSUMER, attributes | self._labels, links)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        labels, failed = self._labels, failure(error)
        try:
            if error is not None and failed is not None:
                labels = labels | {ERROR_TYPE: failed}
                self._fail(error, failed, failed)
        finally:
            self._end(self._observer.instruments.process, labels)

    def _labelled(self, topic: str | None = None) -> Labels:
        labels = {SYSTEM: "nsq", OPERATION_NAME: "process", GROUP: self._handling.channel}
        if topic is not None:
            labels[DESTINATION] = topic
        return labels

    def _of_message(self, message: Message) -> Attributes:
        return {
            OPERATION_TYPE: "process",
            MESSAGE_ID: str(message.internal_id),
            ATTEMPTS: message.attempts,
            **_place(message.partition, message.node),
            **self._observer.details(message),
        }

    def _of_batch(self, messages: Sequence[Message]) -> Attributes:
        attributes: Attributes = {OPERATION_TYPE: "process", BATCH_COUNT: len(messages)}
        places = {(message.partition, message.node) for message in messages}
        if len(places) == 1:
            attributes |= _place(*places.pop())
        if self._observer.body_size:
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


def _with_context(publishing: Publishing, message: OutgoingMessage, origin: Context | None) -> OutgoingMessage:
    carrier: dict[str, str] = {}
    # without an origin, another middleware added the message; a header given as bytes stays
    if origin is not None and message.header is None:
        propagate.inject(carrier, origin)
    if not carrier:
        return message
    key = publishing.key if message.key is None else message.key
    room = _OTHERS if key is None else _OTHERS + _ESCAPED * len(key_bytes(key))
    try:
        header = encode_headers(headers := {**(message.headers or {}), **carrier})
    except InvalidHeader:  # a message is not lost for its trace
        return message
    size = room + len(header)
    fits = size <= MAX_HEADER_BYTES and size + len(message.body) <= publishing.max_message_size
    return evolve(message, headers=headers) if fits else message


@lru_cache(maxsize=4096)  # partitions, in turn
def _place(partition: int | None, node: str) -> Mapping[str, Any]:
    host, _, port = node.rpartition(":")
    attributes: Attributes = {SERVER_ADDRESS: host.strip("[]"), SERVER_PORT: int(port)}
    if partition is not None:
        attributes[PARTITION] = str(partition)
    return attributes
