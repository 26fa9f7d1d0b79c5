"""Middleware: code around every publish and every handled message.

A `Middleware` is an argument of `nsqext.Producer`, `nsqext.Consumer`, `nsqext.App` and the blocking clients; the first
one is the outermost.
Built-in: `HandlerTimeout`, `RateLimit`, `Deduplicate`, `Decompress`; logs, spans and metrics are in
`nsqext.observability`.
"""

from __future__ import annotations

from nsqext.client.middleware import CallNext, Handling, Middleware, Publishing, SendNext
from nsqext.middleware.builtin import Decompress, Deduplicate, HandlerTimeout, RateLimit

__all__ = (
    "CallNext",
    "Decompress",
    "Deduplicate",
    "HandlerTimeout",
    "Handling",
    "Middleware",
    "Publishing",
    "RateLimit",
    "SendNext",
)
