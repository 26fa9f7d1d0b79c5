"""Prometheus: counters and histograms of publishes and handled messages (extra ``prometheus``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from attrs import frozen

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(f"{_error}: pip install 'nsqext[prometheus]'", name=_error.name) from _error

from nsqext.observability.observer import Observer, failure

if TYPE_CHECKING:
    from nsqext.middleware.base import Handling, Publishing

__all__ = ("Prometheus",)

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@frozen
class _Published:
    messages: Counter
    size: Counter
    seconds: Histogram


@frozen
class _Handled:
    messages: Counter
    redelivered: Counter
    running: Gauge
    seconds: Histogram


class Prometheus(Observer):
    """Counts messages and measures durations. All names begin with the namespace:

    ``published_messages_total``, ``published_bytes_total``, ``publish_seconds`` by topic; ``publish_failures_total`` by
    topic and error (calls, not messages); ``handled_messages_total``, ``redelivered_messages_total``,
    ``running_handlers``, ``handler_seconds`` by topic and channel; ``handler_failures_total`` by topic, channel and
    error.

    Args:
        registry: the global one by default.
        namespace: prefix of every name.
        buckets: upper bounds of the histograms, in seconds.

    Raises:
        ValueError: by prometheus_client, when the registry has such metrics already.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        namespace: str = "nsqext",
        buckets: Sequence[float] = _BUCKETS,
    ) -> None:
        common: dict[str, Any] = {"namespace": namespace, "registry": registry}
        topic, channel = ("topic",), ("topic", "channel")
        self._messages = Counter("published_messages", "Messages that were stored.", topic, **common)
        self._bytes = Counter("published_bytes", "Bytes of the bodies that were stored.", topic, **common)
        self._publish = Histogram("publish_seconds", "Time until stored.", topic, buckets=buckets, **common)
        self._failures = Counter("publish_failures", "Publishes that failed.", (*topic, "error"), **common)
        self._handled = Counter("handled_messages", "Messages whose handler ended.", channel, **common)
        self._again = Counter("redelivered_messages", "Messages that were redelivered.", channel, **common)
        self._running = Gauge("running_handlers", "Handlers that run.", channel, **common)
        self._handler = Histogram("handler_seconds", "Time of handlers.", channel, buckets=buckets, **common)
        self._broken = Counter("handler_failures", "Handlers that raised.", (*channel, "error"), **common)
        # children are looked up once: the lookup is what takes time
        self._by_topic: dict[str, _Published] = {}
        self._by_channel: dict[tuple[str, str], _Handled] = {}

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Measure a publish."""
        return self._publishing(publishing)

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Measure a handler."""
        return self._handling(handling)

    @contextmanager
    def _publishing(self, publishing: Publishing) -> Iterator[None]:
        topic = publishing.topic
        bound = self._by_topic.get(topic)
        if bound is None:
            bound = self._by_topic[topic] = _Published(
                self._messages.labels(topic), self._bytes.labels(topic), self._publish.labels(topic)
            )
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._failures.labels(topic, type(error).__qualname__).inc()
            raise
        bound.messages.inc(len(publishing.messages))
        bound.size.inc(sum(len(message.body) for message in publishing.messages))
        bound.seconds.observe(time.monotonic() - started)

    @contextmanager
    def _handling(self, handling: Handling) -> Iterator[None]:
        key = (handling.message.topic, handling.channel)
        bound = self._by_channel.get(key)
        if bound is None:
            bound = self._by_channel[key] = _Handled(
                self._handled.labels(*key),
                self._again.labels(*key),
                self._running.labels(*key),
                self._handler.labels(*key),
            )
        if handling.message.attempts > 1:
            bound.redelivered.inc()
        bound.running.inc()
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            kind = failure(error)
            if kind is not None:
                self._broken.labels(*key, kind).inc()
            raise
        finally:
            bound.running.dec()
            bound.messages.inc()
            bound.seconds.observe(time.monotonic() - started)
