"""Health and metrics of a program over HTTP."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from nsqext.app.health import Health, HealthEndpoint, reads, respond
from nsqext.errors import InvalidSetting
from nsqext.types import Address

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping

    from nsqext.app.app import App
    from nsqext.delays import DelayRelay
    from nsqext.observability.prometheus import Prometheus
    from nsqext.transactions import OutboxRelay

logger: logging.Logger = logging.getLogger("nsqext.run")

_LABEL = "worker"


def combined_health(workers: Mapping[int, Health]) -> Health:
    """Return the health of a program: live and ready if all workers are."""
    reasons = [f"worker {number}: {reason}" for number, one in sorted(workers.items()) for reason in one.reasons]
    return Health(
        live=all(one.live for one in workers.values()),
        ready=all(one.ready for one in workers.values()),
        reasons=tuple(reasons),
    )


def combined_metrics(workers: Mapping[int, str]) -> bytes:
    """Return all workers' metrics as text, with their numbers in the label ``worker``."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import Metric
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for number, text in sorted(workers.items()):
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                known.samples.append(sample._replace(labels={**sample.labels, _LABEL: str(number)}))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)


class _Collected:
    def __init__(self, families: Mapping[str, Any]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return iter(self._families.values())


class StatusPage:
    """An ASGI application with the routes ``/healthz``, ``/readyz`` and ``/metrics``.

    Args:
        health: returns the health of each worker by number.
        metrics: returns the metrics of each worker as text. Health does not wait for it: it may read databases.
    """

    def __init__(
        self,
        health: Callable[[], Awaitable[Mapping[int, Health]]],
        metrics: Callable[[], Awaitable[Mapping[int, str]]],
    ) -> None:
        self._health = health
        self._metrics = metrics

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http" or scope["path"] != "/metrics":
            workers = await self._health() if scope["type"] == "http" else {}
            await HealthEndpoint(lambda: combined_health(workers))(scope, receive, send)
            return
        if not reads(scope):
            await respond(scope, send, 405, b"use GET\n", "text/plain; charset=utf-8")
            return
        try:
            status, body = 200, combined_metrics(await self._metrics())
        except ModuleNotFoundError as error:
            status, body = 501, f"{error}: pip install 'nsqext[prometheus]'\n".encode()
        await respond(scope, send, status, body, "text/plain; version=0.0.4; charset=utf-8")


def add_status_page(app: App, address: str, relay: OutboxRelay | DelayRelay) -> None:
    """Serve health and metrics of an app and its relay at ``HOST:PORT`` while it runs.

    Raises:
        InvalidSetting: not an address that can be listened to, or a missing extra.
    """
    prometheus = process_metrics()
    prometheus.attach(relay)
    listener = listen_for_status(address)
    from prometheus_client import generate_latest

    async def health() -> dict[int, Health]:
        return {1: app.health()}

    async def metrics() -> dict[int, str]:
        return {1: (await to_thread.run_sync(generate_latest)).decode()}

    @app.lifespan
    async def serve(_: App) -> AsyncIterator[None]:
        from nsqext.http.uvicorn_server import HttpServer

        prometheus.attach(app.producer)
        for consumer in app.consumers:
            prometheus.attach(consumer)
        async with anyio.create_task_group() as tasks:
            await tasks.start(HttpServer(StatusPage(health, metrics)).serve, listener)
            yield
            tasks.cancel_scope.cancel()


def process_metrics() -> Prometheus:
    """Return the metrics of this process, in the default registry. Raises InvalidSetting without prometheus_client."""
    try:
        from nsqext.observability.prometheus import Prometheus
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"--http needs {error.name}", hint="pip install 'nsqext[prometheus]'") from error
    return Prometheus()


def listen_for_status(text: str) -> socket.socket:
    """Return a listening socket for the option --http. Raises InvalidSetting."""
    try:
        from nsqext.http.uvicorn_server import listen
    except ModuleNotFoundError as error:
        raise InvalidSetting(f"--http needs {error.name}", hint="pip install 'nsqext[web]'") from error
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidSetting(
            f"--http {text!r} is not HOST:PORT", hint="write 127.0.0.1:8080; port 0 chooses a free port"
        )
    listener = listen(Address(host.strip("[]"), int(port)))
    logger.info("health and metrics on http://%s", Address(*listener.getsockname()[:2]))
    return listener
