"""Middleware: code around every publish and every handled message.

A `Middleware` is given to `nsqext.App`, `MiddlewareProducer` or `MiddlewareConsumer`; the first one is the outermost.
Ready ones: `HandlerTimeout`, `RateLimit`, `Deduplicate`, `Decompress`; logs, spans and metrics are in
`nsqext.observability`. Clients without middleware do not load this module.
"""

from __future__ import annotations

from nsqext.middleware.base import CallNext, Handling, Middleware, Publishing, SendNext
from nsqext.middleware.clients import MiddlewareConsumer, MiddlewareProducer
from nsqext.middleware.ready import Decompress, Deduplicate, HandlerTimeout, RateLimit

__all__ = (
    "CallNext",
    "Decompress",
    "Deduplicate",
    "HandlerTimeout",
    "Handling",
    "Middleware",
    "MiddlewareConsumer",
    "MiddlewareProducer",
    "Publishing",
    "RateLimit",
    "SendNext",
)
