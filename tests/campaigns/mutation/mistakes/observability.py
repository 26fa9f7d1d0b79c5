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
        "        if not self._observer.propagates:\n            return\n",
        "",
    ),
    Mistake(
        "failed publishes are not counted",
        "observability/otel.py",
        "        instruments.sent.add(self._count, labels)",
        "        instruments.sent.add(0 if error else self._count, labels)",
    ),
    Mistake(
        "a batch counts one message",
        "observability/otel.py",
        "        self._count = len(publishing.given)",
        "        self._count = 1",
    ),
    Mistake(
        "sizes of bodies are recorded without the option",
        "observability/otel.py",
        "        if self.body_size:\n            attributes[BODY_SIZE] = len(message.body)\n        return",
        "        if True:\n            attributes[BODY_SIZE] = len(message.body)\n        return",
    ),
    Mistake(
        "an invalid origin is linked",
        "observability/otel.py",
        "return context if trace.get_current_span(context).get_span_context().is_valid else None",
        "return context",
    ),
    Mistake(
        "a provider that is set after the client records nothing",
        "observability/otel.py",
        "            if providers != self._placeholders:",
        "            if self._placeholders is None:",
    ),
    Mistake(
        "observers of one provider have instruments of their own",
        "observability/otel_metrics.py",
        "            found = cls._of_providers[provider] = cls(provider)",
        "            found = cls(provider)",
    ),
    Mistake(
        "without a provider the context of a web request ends at the publish",
        "observability/otel.py",
        "if self._recording() or trace.get_current_span().get_span_context().is_valid:",
        "if self._recording():",
    ),
    Mistake(
        "an observer's error ends the publish",
        "observability/__init__.py",
        '    except Exception:\n        logger.exception("an observer failed before',
        '    except KeyError:\n        logger.exception("an observer failed before',
    ),
)
