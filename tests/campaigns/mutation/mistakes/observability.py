"""Mistakes in tracing."""

from __future__ import annotations

from tests.campaigns.mutation.mistake import Mistake

__all__ = ("MISTAKES",)

MISTAKES = (
    Mistake(
        "a header that is no text reaches the propagator",
        "observability/otel.py",
        " for name, value in headers.items() if isinstance(value, str)}\n    context",
        " for name, value in headers.items()}\n    context",
    ),
    Mistake(
        "the context replaces the headers of a message",
        "observability/otel.py",
        "headers={**(message.headers or {}), **carrier}",
        "headers=carrier",
    ),
    Mistake(
        "a given header is replaced by the context",
        "observability/otel.py",
        "if origin is not None and message.header is None:",
        "if origin is not None:",
    ),
    Mistake(
        "the context is written to topics without extend support",
        "observability/otel.py",
        "            if meta.extend_support:\n                found",
        "            if True:\n                found",
    ),
    Mistake(
        "propagate=never writes the context",
        "observability/otel.py",
        "        if not self._propagates:\n            return\n",
        "",
    ),
    Mistake(
        "failed publishes are not counted",
        "observability/otel.py",
        "            self._sent.add(count, {**base, **error_type})",
        "            self._sent.add(0 if error_type else count, {**base, **error_type})",
    ),
    Mistake(
        "a batch counts one message",
        "observability/otel.py",
        "self._measured(span, base, len(publishing.messages))",
        "self._measured(span, base, 1)",
    ),
    Mistake(
        "sizes of bodies are recorded without the option",
        "observability/otel.py",
        "        if self._body_size:\n            attributes[BODY_SIZE] = len(message.body)\n        return",
        "        if True:\n            attributes[BODY_SIZE] = len(message.body)\n        return",
    ),
    Mistake(
        "an invalid origin is linked",
        "observability/otel.py",
        "return context if trace.get_current_span(context).get_span_context().is_valid else None",
        "return context",
    ),
)
