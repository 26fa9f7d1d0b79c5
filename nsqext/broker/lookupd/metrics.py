"""/metrics of lookup nodes of both generations, in the text format of Prometheus.

The real servers have no such route on this port.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from starlette.responses import Response

from nsqext.http.metrics import METRICS_TYPE, Metric, render_metrics

if TYPE_CHECKING:
    from nsqext.broker.lookupd.cluster_view import ClusterView
    from nsqext.broker.lookupd.registry import Registry

__all__ = ("registry_metrics", "view_metrics")


def view_metrics(view: ClusterView, version: str, *, leads: bool) -> Response:
    """Return the metrics of a lookup node of the redesigned generation."""
    topics = {name: topic for name in view.names() if (topic := view.topic(name)) is not None}
    channels = {
        name: len({channel for found in topic.partitions.values() for channel in found.channels})
        for name, topic in topics.items()
    }

    def found() -> Iterator[Metric]:
        yield _info(version, "ha")
        yield Metric("nsqlookupd_leader", "gauge", "1 on the leader of the lookup nodes.", [({}, int(leads))])
        yield _one("nsqd", "Connected nsqd.", len(view.peers()))
        yield _one("topics", "Topics.", len(topics))
        yield Metric(
            "nsqlookupd_topic_partitions",
            "gauge",
            "Partitions of a topic.",
            [({"topic": name}, topic.spec.partition_num) for name, topic in topics.items()],
        )
        yield Metric(
            "nsqlookupd_topic_partitions_led",
            "gauge",
            "Partitions with a leader that accepts publishes.",
            [
                ({"topic": name}, sum(one.registered is not None for one in topic.partitions.values()))
                for name, topic in topics.items()
            ],
        )
        yield _channels(channels)

    return Response(render_metrics(found()), media_type=METRICS_TYPE)


def registry_metrics(view: Registry, version: str, generation: str) -> Response:
    """Return the metrics of a lookup node that nsqd register at."""
    topics = sorted({one.key for one in view.find("topic", "*")})

    def found() -> Iterator[Metric]:
        yield _info(version, generation)
        yield _one("nsqd", "Connected nsqd.", sum(view.is_active(one) for one in view.producers("client")))
        yield _one("topics", "Topics.", len(topics))
        shown = {name: [one for one in view.producers("topic", name) if view.is_active(one)] for name in topics}
        yield Metric(
            "nsqlookupd_topic_producers",
            "gauge",
            "Nsqd that have a topic.",
            [({"topic": name}, len(producers)) for name, producers in shown.items()],
        )
        yield Metric(
            "nsqlookupd_topic_tombstones",
            "gauge",
            "Nsqd that are hidden for a topic.",
            [({"topic": name}, sum(map(view.is_hidden, producers))) for name, producers in shown.items()],
        )
        yield _channels({name: len(view.find("channel", name, "*")) for name in topics})

    return Response(render_metrics(found()), media_type=METRICS_TYPE)


def _info(version: str, generation: str) -> Metric:
    labels = {"version": version, "generation": generation}
    return Metric("nsqlookupd_info", "gauge", "Version of the server.", [(labels, 1)])


def _one(name: str, text: str, value: int) -> Metric:
    return Metric(f"nsqlookupd_{name}", "gauge", text, [({}, value)])


def _channels(counts: dict[str, int]) -> Metric:
    samples = [({"topic": name}, count) for name, count in counts.items()]
    return Metric("nsqlookupd_topic_channels", "gauge", "Channels of a topic.", samples)
