"""The names and labels of all series that Prometheus can read: of clients, of embedded nsqd, and of the real one."""

from __future__ import annotations

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from nsqext.broker.nsqd.server import application
from nsqext.observability.prometheus import Prometheus
from tests.support.nsqd_sessions import host, make_node

__all__ = ("all_series", "exported")

_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_REAL = {"channel_depth": {"topic", "partition", "channel"}}  # the redesigned nsqd at -metric-address: nsqd/metric.go


async def all_series() -> dict[str, set[str]]:
    """Return the labels of every series by its name."""
    return exported() | await _served() | _REAL


def exported() -> dict[str, set[str]]:
    """Return the labels of every series of clients by its name."""
    registry = CollectorRegistry()
    metrics = Prometheus(registry=registry)
    found: dict[str, set[str]] = {}
    for collector in tuple(registry._collector_to_names):
        for family in collector.describe():  # type: ignore[attr-defined]
            labels = set(getattr(family, "_labelnames", ())) | set(getattr(collector, "_labelnames", ()))
            for suffix in _SUFFIXES[family.type]:
                found[family.name + suffix] = labels
    assert metrics is not None
    return found


async def _served() -> dict[str, set[str]]:
    """Return the labels of every series of an embedded nsqd by its name."""
    node = make_node()
    host(node).partition.channel("ch")
    transport = httpx.ASGITransport(application(node, {"tcp": "127.0.0.1:4150", "http": "127.0.0.1:4150"}))
    async with httpx.AsyncClient(transport=transport, base_url="http://nsqd") as client:
        text = (await client.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}
