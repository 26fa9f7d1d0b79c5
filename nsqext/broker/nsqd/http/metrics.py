"""/metrics of both generations: statistics of a node in the text format of Prometheus.

The real servers have no such route on this port.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from nsqext.broker.nsqd.http.request_args import RequestArgs
from nsqext.http.api import Call, route
from nsqext.http.metrics import METRICS_TYPE, Metric, render_metrics
from nsqext.protocol.server.go_format import NANOSECONDS

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.nsqd.node import Hosted

_CHANNEL_METRICS = (
    ("depth", "gauge", "Messages that wait for delivery.", lambda stats: stats.depth),
    ("in_flight", "gauge", "Messages delivered and not answered yet.", lambda stats: stats.in_flight_count),
    ("deferred", "gauge", "Messages requeued or published with a delay.", lambda stats: stats.deferred_count),
    ("messages_total", "counter", "Messages queued.", lambda stats: stats.message_count),
    ("requeued_total", "counter", "Messages requeued by consumers.", lambda stats: stats.requeue_count),
    ("timed_out_total", "counter", "Messages requeued after a timeout.", lambda stats: stats.timeout_count),
    ("clients", "gauge", "Subscribed consumers.", lambda stats: len(stats.clients)),
    ("paused", "gauge", "1 while the channel is paused.", lambda stats: int(stats.paused)),
)


class MetricsRoutes(RequestArgs):
    """Route /metrics."""

    def metrics(self, _: Call) -> Response:
        return Response(render_metrics(self._all()), media_type=METRICS_TYPE)

    def _all(self) -> Iterator[Metric]:
        node = self.node
        labels = {"version": node.limits.version, "generation": node.limits.generation}
        yield Metric("nsqd_info", "gauge", "Version of the server.", [(labels, 1)])
        yield Metric("nsqd_start_time_seconds", "gauge", "Start, since 1970.", [({}, node.started / NANOSECONDS)])
        yield Metric("nsqd_clients", "gauge", "Connected clients.", [({}, len(node.sessions))])
        yield Metric("nsqd_publish_failed_total", "counter", "Refused publishes.", [({}, node.publish_failed)])
        hosted = [found for _, found in sorted(node.hosted.items(), key=lambda item: item[0])]
        yield self._per_topic("depth", "gauge", "Messages kept for channels.", hosted, self._depth)
        yield self._per_topic("messages_total", "counter", "Messages published.", hosted, self._published)
        yield self._per_topic("leader", "gauge", "1 on the leader.", hosted, lambda found: int(found.leader))
        channels = [
            (_labels(found) | {"channel": name}, channel.stats())
            for found in hosted
            for name, channel in sorted(found.partition.channels.items())
        ]
        for name, kind, text, value in _CHANNEL_METRICS:
            samples = [(labels, value(stats)) for labels, stats in channels]
            yield Metric(f"nsqd_channel_{name}", kind, text, samples)

    def _per_topic(self, name: str, kind: str, text: str, hosted: list[Hosted], value: Any) -> Metric:
        return Metric(f"nsqd_topic_{name}", kind, text, [(_labels(found), value(found)) for found in hosted])

    def _depth(self, hosted: Hosted) -> int:
        if self.node.options.original:
            return hosted.partition.depth
        return hosted.partition.log.end_count - hosted.partition.log.start_count

    def _published(self, hosted: Hosted) -> int:
        return hosted.partition.message_count if self.node.options.original else hosted.partition.log.end_count

    def table(self) -> list[Route]:
        return [route("GET", "/metrics", self.metrics)]


def _labels(hosted: Hosted) -> dict[str, str]:
    return {"topic": hosted.partition.topic, "partition": str(hosted.partition.partition)}
