"""The client metrics of OpenTelemetry's messaging conventions."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation

from nsqext._version import __version__

__all__ = ("Instruments", "Labels", "MessageCounter")

Labels = dict[str, str]

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class MessageCounter:
    """Counts messages by labels; a meter reads the sums.

    A counter of the SDK costs as much for each message as a span.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._sums: dict[tuple[str, ...], int] = {}
        self._labels: dict[tuple[str, ...], Labels] = {}

    def add(self, count: int, labels: Labels) -> None:
        """Count messages, in any thread."""
        key = tuple(labels.values())
        with self._lock:
            if key not in self._sums:
                self._sums[key], self._labels[key] = 0, labels
            self._sums[key] += count

    def observe(self, _options: CallbackOptions) -> Iterable[Observation]:
        """Return the sums, for a meter."""
        with self._lock:
            return [Observation(value, self._labels[key]) for key, value in self._sums.items()]


class Instruments:
    """The instruments of a meter provider; observers with the same provider share them."""

    _of_providers: ClassVar[WeakKeyDictionary[MeterProvider, Instruments]] = WeakKeyDictionary()
    _global: ClassVar[Instruments | None] = None

    def __init__(self, provider: MeterProvider | None) -> None:
        meter = metrics.get_meter("nsqext", __version__, provider)
        self.duration: Histogram = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of messaging operations of a client.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self.process: Histogram = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handling a message.",
            explicit_bucket_boundaries_advisory=_BUCKETS,
        )
        self.sent: MessageCounter = MessageCounter()
        meter.create_observable_counter(
            "messaging.client.sent.messages",
            [self.sent.observe],
            "{message}",
            "Messages that a producer tried to send.",
        )
        self.consumed: MessageCounter = MessageCounter()
        meter.create_observable_counter(
            "messaging.client.consumed.messages",
            [self.consumed.observe],
            "{message}",
            "Messages that were delivered to a handler.",
        )

    @classmethod
    def of(cls, provider: MeterProvider | None) -> Instruments:
        """Return the instruments of a provider, or of the global provider, which may be set later."""
        current = metrics.get_meter_provider()
        found = cls._of_providers.get(provider or current)  # it may have become the global one
        if found is not None:
            return found
        if provider is None or provider is current:
            cls._global = cls._global or cls(None)
            return cls._global
        cls._of_providers[provider] = own = cls(provider)
        return own
