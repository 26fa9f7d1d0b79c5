"""/metrics of lookup nodes of both generations, in the text format of Prometheus.

The real servers have no such route on this port.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from nsqext.http.metrics import METRICS_TYPE, Metric, render_metrics

if TYPE_CHECKING:
    from nsqext.broker.lookupd.lookupd import ClusterView
    from nsqext.broker.lookupd.registry import Registry


def view_metrics(view: ClusterView, version: str, *, leads: bool) -> Response:
    """Return the metrics of a lookup node of the redesigned generation."""
    topics = {name: topic for name in view.names() if (topic := view.topic(name)) is not None}
    partitions = {name: topic.partitions.values() for name, topic in topics.items()}
    channels = {name: {each for one in found for each in one.channels} for name, found in partitions.items()}
    led = {name: sum(one.registered is not None for one in found) for name, found in partitions.items()}
    return _page(
        _info(version, "ha"),
        _one("leader", "1 on the leader of the lookup nodes.", int(leads)),
        _one("nsqd", "Connected nsqd.", len(view.peers())),
        _one("topics", "Topics.", len(topics)),
        _each("partitions", "Partitions of a topic.", {name: one.spec.partition_num for name, one in topics.items()}),
        _each("partitions_led", "Partitions with a leader that accepts publishes.", led),
        _each("channels", "Channels of a topic.", {name: len(found) for name, found in channels.items()}),
    )


def registry_metrics(view: Registry, version: str, generation: str) -> Response:
    """Return the metrics of a lookup node that nsqd register at."""
    topics = sorted({one.key for one in view.find("topic", "*")})
    shown = {name: [one for one in view.producers("topic", name) if view.is_active(one)] for name in topics}
    hidden = {name: sum(map(view.is_hidden, producers)) for name, producers in shown.items()}
    return _page(
        _info(version, generation),
        _one("nsqd", "Connected nsqd.", sum(view.is_active(one) for one in view.producers("client"))),
        _one("topics", "Topics.", len(topics)),
        _each("producers", "Nsqd that have a topic.", {name: len(producers) for name, producers in shown.items()}),
        _each("tombstones", "Nsqd that are hidden for a topic.", hidden),
        _each("channels", "Channels of a topic.", {name: len(view.find("channel", name, "*")) for name in topics}),
    )


def _page(*metrics: Metric) -> Response:
    return Response(render_metrics(metrics), media_type=METRICS_TYPE)


def _info(version: str, generation: str) -> Metric:
    labels = {"version": version, "generation": generation}
    return Metric("nsqlookupd_info", "gauge", "Version of the server.", [(labels, 1)])


def _one(name: str, text: str, value: int) -> Metric:
    return Metric(f"nsqlookupd_{name}", "gauge", text, [({}, value)])


def _each(name: str, text: str, values: dict[str, int]) -> Metric:
    samples = [({"topic": topic}, value) for topic, value in values.items()]
    return Metric(f"nsqlookupd_topic_{name}", "gauge", text, samples)
