"""The trace context of OpenTelemetry's active span, in programs that have loaded OpenTelemetry."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def active_context() -> dict[str, str]:
    """Return the headers that carry the context of the active span; empty without a span."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate, trace

    carrier: dict[str, str] = {}
    if trace.get_current_span().get_span_context().is_valid:
        propagate.inject(carrier)
    return carrier


@contextmanager
def without_active_span() -> Iterator[None]:
    """Run without the span in which a background task was started, and which does not contain the task's later work."""
    if "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import context

    token = context.attach(context.Context())
    try:
        yield
    finally:
        context.detach(token)
