"""Logs, spans and metrics of publishes and handled messages; nothing of it costs anything where it is not asked for.

An `Observer` is given to `ObservedProducer`, `ObservedConsumer` or `nsqext.App`. Three are here: `LogObserver`,
`nsqext.observability.otel.OpenTelemetry` (extra ``otel``) and `nsqext.observability.prometheus.Prometheus` (extra
``prometheus``). Clients without observers do not even load this.
"""

from __future__ import annotations

from nsqext.observability.clients import ObservedConsumer, ObservedProducer
from nsqext.observability.logs import LogObserver
from nsqext.observability.observer import Observer, Processing, Publishing

__all__ = ("LogObserver", "ObservedConsumer", "ObservedProducer", "Observer", "Processing", "Publishing")
