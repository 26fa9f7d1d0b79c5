"""Middleware: code around every publish and every handled message.

A `Middleware` is given to `nsqext.App`, `MiddlewareProducer` or `MiddlewareConsumer`; the first one is the outermost.
Built-in: `HandlerTimeout`, `RateLimit`, `Deduplicate`, `Decompress`; logs, spans and metrics are in
`nsqext.observability`. Clients without middleware do not load this module.
"""

from __future__ import annotations

from nsqext.middleware.base import CallNext, Handling, Middleware, Publishing, SendNext
from nsqext.middleware.builtin import Decompress, Deduplicate, HandlerTimeout, RateLimit
from nsqext.middleware.clients import MiddlewareConsumer, MiddlewareProducer

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
