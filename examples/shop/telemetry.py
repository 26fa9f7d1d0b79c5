"""Spans of the shop: the OpenTelemetry SDK, which writes them as JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter


@contextmanager
def spans_written() -> Iterator[None]:
    """Write spans to the file SHOP_SPANS; a real service would use an OTLP exporter instead."""
    with Path(os.environ.get("SHOP_SPANS", os.devnull)).open("a", encoding="utf-8") as file:
        exporter = ConsoleSpanExporter(out=file, formatter=lambda span: f"{span.to_json(indent=None)}\n")
        provider = TracerProvider(resource=Resource.create({"service.name": "shop"}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        try:
            yield
        finally:
            provider.shutdown()
