"""Logs, spans and metrics of publishes and handled messages.

Observers are middleware: give `LogObserver`, `nsqext.observability.otel.OpenTelemetry` (extra ``otel``) or
`nsqext.observability.prometheus.Prometheus` (extra ``prometheus``) to `nsqext.App` or to the clients of
`nsqext.middleware`.
"""

from __future__ import annotations

from nsqext.observability.observer import LogObserver, Observer

__all__ = ("LogObserver", "Observer")
