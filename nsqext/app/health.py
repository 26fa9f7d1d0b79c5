"""Health of an app, and an ASGI application for liveness and readiness probes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson
from attrs import frozen

from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from nsqext.client.consumer.consumer import Consumer

ReadinessCheck: TypeAlias = Callable[[], str | None]
"""Returns why an app is not ready; None if it is."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@frozen
class Health:
    """The state of an app."""

    live: bool  #: False if a consumer or a lifespan failed; restart the process
    #: the lifespans have begun, every consumer has subscribed to all partitions once and has a connection, and no
    #: message above ``max_frame_size`` blocks a partition; relays store what they publish, and can use their store; and
    #: no readiness check returns a reason
    ready: bool
    reasons: tuple[str, ...] = ()  #: why the app is not ready


def name_of(consumer: Consumer) -> str:
    """Return topics and channel of a consumer."""
    return f"{','.join(consumer.topics)}/{consumer.channel}"


def unready(consumer: Consumer) -> str | None:
    """Return why a consumer is not ready."""
    name = name_of(consumer)
    try:
        statistics = consumer.statistics()
    except InvalidState:
        return f"{name}: not started"
    if statistics.blocked:
        return f"{name}: {statistics.blocked[0]}"
    if statistics.connections and consumer.subscribed:
        return None
    state = "not all partitions are subscribed yet" if statistics.connections else "no partition is connected"
    failures = statistics.lookup_failures
    return f"{name}: {state}" + (f", {failures} failed lookups" if failures else "")


def obstacles(checks: Iterable[ReadinessCheck]) -> list[str]:
    """Return what readiness checks return or raise."""
    found: list[str] = []
    for check in checks:
        try:
            reason = check()
        except Exception as error:
            name = getattr(check, "__qualname__", repr(check))
            reason = f"the readiness check {name} raised {error!r}"
        if reason is not None:
            found.append(str(reason))
    return found


class HealthEndpoint:
    """An ASGI application with the routes ``/healthz`` (live) and ``/readyz`` (ready): 200, or 503 with reasons.

    Args:
        health: returns the health, for example ``app.health``.
    """

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _acknowledge_lifespan(receive, send)
        elif scope["type"] == "http":
            status, content = self._answer(scope)
            await respond(scope, send, status, orjson.dumps(content), "application/json")

    def _answer(self, scope: _Scope) -> tuple[int, dict[str, Any]]:
        health = self._health()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in ("/healthz", "/readyz"):
            return 404, {"error": "unknown path: use /healthz or /readyz"}
        if not reads(scope):
            return 405, {"error": "use GET"}
        good = health.live if path == "/healthz" else health.ready
        return 200 if good else 503, {"ok": good, "reasons": list(health.reasons)}


def reads(scope: _Scope) -> bool:
    """Return whether the method of an HTTP request is GET or HEAD."""
    return scope["method"] in ("GET", "HEAD")


async def respond(scope: _Scope, send: _Send, status: int, body: bytes, content_type: str) -> None:
    """Send an uncacheable ASGI response; without its body for HEAD, and with the allowed methods for status 405."""
    headers = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _acknowledge_lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return
