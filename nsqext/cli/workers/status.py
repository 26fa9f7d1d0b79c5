"""What ``nsqext run --http`` serves: health and metrics of all workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

from attrs import frozen

from nsqext.app.health import Health, HealthEndpoint, respond

_LABEL = "worker"


@frozen
class WorkerStatus(Health):
    """The health of a worker's app, which is not live either if the worker does not run or respond."""

    metrics: str = ""


def combined_health(workers: Mapping[int, WorkerStatus]) -> Health:
    """Return the health of a program: live and ready if each of its workers is."""
    reasons = [f"worker {number}: {reason}" for number, one in sorted(workers.items()) for reason in one.reasons]
    return Health(
        live=all(one.live for one in workers.values()),
        ready=all(one.ready for one in workers.values()),
        reasons=tuple(reasons),
    )


def combined_metrics(workers: Mapping[int, WorkerStatus]) -> bytes:
    """Return the metrics of all workers as text; the label ``worker`` has the number of the worker."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import Metric
    from prometheus_client.parser import text_string_to_metric_families

    families: dict[str, Any] = {}
    for number, one in sorted(workers.items()):
        for family in text_string_to_metric_families(one.metrics):
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
        """Return the families."""
        return iter(self._families.values())


class StatusPage:
    """An ASGI application with the routes ``/healthz``, ``/readyz`` and ``/metrics``."""

    def __init__(self, ask: Callable[[], Awaitable[Mapping[int, WorkerStatus]]]) -> None:
        self._ask = ask

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
    ) -> None:
        """Handle one request."""
        workers = await self._ask() if scope["type"] == "http" else {}
        if scope["type"] != "http" or scope["path"] != "/metrics":
            await HealthEndpoint(lambda: combined_health(workers))(scope, receive, send)
            return
        try:
            status, body = 200, combined_metrics(workers)
        except ModuleNotFoundError as error:
            status, body = 501, f"{error}: pip install 'nsqext[prometheus]'\n".encode()
        await respond(scope, send, status, body, "text/plain; version=0.0.4; charset=utf-8")
