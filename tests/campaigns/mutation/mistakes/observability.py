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
        "            if not unset:",
        "            if False:",
    ),
    Mistake(
        "observers of one provider have instruments of their own",
        "observability/otel_metrics.py",
        "cls._of_providers[provider] = own = cls(provider)",
        "own = cls(provider)",
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
    Mistake(
        "the sums of deleted clients are lost",
        "observability/prometheus.py",
        "gone = max(gone, last - number)",
        "gone = 0.0",
    ),
    Mistake(
        "a refused registry keeps half of the metrics",
        "observability/prometheus.py",
        "                    undo.callback(registry.unregister, collector)\n",
        "",
    ),
    Mistake(
        "a cancelled publish fails its span",
        "observability/otel.py",
        "elif isinstance(error, Exception):",
        "elif error is not None:",
    ),
    Mistake(
        "the trace id 0 is recorded",
        "observability/otel.py",
        "if message.trace_id:",
        "if message.trace_id is not None:",
    ),
    Mistake(
        "a span has the node of the first receipt only",
        "observability/otel.py",
        "for other in receipts):\n            return\n",
        "for other in receipts):\n            pass\n",
    ),
    Mistake(
        "a Requeue is a failed handler",
        "observability/__init__.py",
        "if error is None or isinstance(error, HandlerSignal):",
        "if error is None:",
    ),
    Mistake(
        "a slow success is not a warning",
        "observability/__init__.py",
        "seconds >= self._slow",
        "seconds < self._slow",
    ),
    Mistake(
        "the attempts of a batch are those of its first message",
        "observability/__init__.py",
        "max((message.attempts for message in messages), default=0)",
        "messages[0].attempts",
    ),
    Mistake(
        "running handlers are never less",
        "observability/prometheus.py",
        "            handled.running.dec()\n",
        "",
    ),
    Mistake(
        "a redelivered message of a batch is not counted",
        "observability/prometheus.py",
        "for message in handling.messages:\n            if message.attempts > 1:",
        "for message in handling.messages[:1]:\n            if message.attempts > 1:",
    ),
    Mistake(
        "lag of two relays of a channel is added",
        "observability/prometheus.py",
        '_highest("relay_lag_messages"',
        '_sum("relay_lag_messages"',
    ),
    Mistake(
        "a consumer that is not open ends the scrape",
        "observability/prometheus.py",
        "            except InvalidState:\n                continue  # not opened",
        "            except KeyError:\n                continue  # not opened",
    ),
    Mistake(
        "a database that is down ends the scrape",
        "observability/prometheus.py",
        "except InvalidState as error:  # the database",
        "except KeyError as error:  # the database",
    ),
    Mistake(
        "other buckets of the same metrics are ignored",
        "observability/prometheus.py",
        "            if self._buckets != first._buckets:\n",
        "            if False:\n",
    ),
    Mistake(
        "a client that is attached twice counts its events twice",
        "observability/prometheus.py",
        "        if client in self._clients.producers or client in self._clients.consumers:\n            return\n",
        "",
    ),
    Mistake(
        "the kinds of outcomes are swapped",
        "observability/prometheus.py",
        '("failed",): statistics.failed, ("unknown",): statistics.unknown',
        '("failed",): statistics.unknown, ("unknown",): statistics.failed',
    ),
)
