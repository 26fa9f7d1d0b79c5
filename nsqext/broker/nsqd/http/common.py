"""HTTP of both generations: request arguments, /config, and /metrics, which the real servers lack on this port."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from nsqext.broker.listeners import split_address
from nsqext.broker.nsqd.node import HEALTHY
from nsqext.golang import config_values
from nsqext.http.api import (
    METRICS_TYPE,
    Call,
    HttpFault,
    Metric,
    null,
    render_metrics,
    route,
    valid_channel,
    valid_topic,
)
from nsqext.protocol.server.go_format import NANOSECONDS

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.nsqd.node import Hosted, Node
    from nsqext.protocol.server.negotiate import ServerLimits

NOT_LEADER = "E_FAILED_ON_NOT_LEADER"
NOT_WRITABLE = "E_FAILED_ON_NOT_WRITABLE"
_TLS_1_0 = 769
_LEVELS = {"debug": 1, "info": 2, "warn": 3, "error": 4, "fatal": 5}
_SETTABLE: dict[str, tuple[str, type]] = {
    "nsqlookupd_tcp_addresses": ("lookupd_addresses", list),
    "verbose": ("verbose", bool),
    "log_level": ("log_level", int),
    "allow_ext_compatible": ("allow_ext_compatible", bool),
    "allow_sub_ext_compatible": ("allow_sub_ext_compatible", bool),
    "max_conn_for_client": ("max_connections", int),
    "max_pub_waiting_size": ("max_pub_waiting", int),
}
_SETTABLE_ORIGINAL = frozenset(("nsqlookupd_tcp_addresses", "log_level"))
_DEFAULT_CONNECTIONS = 500_000
# in `ServerLimits`: plain values, and times, which Go shows in nanoseconds
_LIMITS = (
    *("deflate", "max_body_size", "max_deflate_level", "max_msg_size", "max_output_buffer_size", "max_rdy_count"),
    "snappy",
)
_TIMES = ("max_heartbeat_interval", "max_msg_timeout", "max_output_buffer_timeout", "max_req_timeout", "msg_timeout")
_TIMES_ORIGINAL = ("min_output_buffer_timeout", "output_buffer_timeout")
_CHANNEL_METRICS = (
    ("depth", "gauge", "Messages that wait for delivery.", lambda _, stats: stats.depth),
    ("in_flight", "gauge", "Messages delivered and not answered yet.", lambda _, stats: stats.in_flight_count),
    ("deferred", "gauge", "Messages requeued or published with a delay.", lambda _, stats: stats.deferred_count),
    ("messages_total", "counter", "Messages queued.", lambda _, stats: stats.message_count),
    ("requeued_total", "counter", "Messages requeued by consumers.", lambda _, stats: stats.requeue_count),
    ("timed_out_total", "counter", "Messages requeued after a timeout.", lambda _, stats: stats.timeout_count),
    ("clients", "gauge", "Subscribed consumers.", lambda channel, _: len(channel.clients)),
    ("paused", "gauge", "1 while the channel is paused.", lambda channel, _: int(channel.paused)),
)


class RequestArgs:
    """Finds what a request names."""

    def __init__(self, node: Node, addresses: Mapping[str, str]) -> None:
        self.node: Node = node
        #: ``host:port`` of ``tcp``, ``http`` and ``https``
        self.addresses: Mapping[str, str] = addresses

    def health(self) -> dict[str, Any]:
        started = self.node.started // NANOSECONDS
        return {"version": self.node.limits.version, "health": self.node.health, "start_time": started}

    def ping(self, _: Call) -> str:
        if self.node.health != HEALTHY:
            raise HttpFault(500, self.node.health)
        return HEALTHY

    def about(self) -> dict[str, object]:
        """Return the members of ``/info`` that both generations have."""
        options = self.node.options
        return {
            "version": options.limits.version,
            "broadcast_address": options.broadcast_address,
            "hostname": options.hostname,
            "http_port": split_address(self.addresses["http"]).port,
            "tcp_port": split_address(self.addresses["tcp"]).port,
            "start_time": self.node.started // NANOSECONDS,
        }

    def topic(self, call: Call) -> Hosted:
        return self._find(*self._topic_args(call))

    def channel_args(self, call: Call) -> tuple[Hosted, str]:
        """Return the partition, and the name of a channel that may not exist."""
        topic, partition = self._topic_args(call)
        channel = valid_channel(call.arg("channel", "MISSING_ARG_CHANNEL"))
        return self._find(topic, partition), channel

    def channel(self, call: Call) -> tuple[Hosted, Channel]:
        hosted, name = self.channel_args(call)
        channel = hosted.partition.channels.get(name)
        if channel is None:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        return hosted, channel

    def led_channel(self, call: Call) -> Channel:
        hosted, channel = self.channel(call)
        self.check_leader(hosted)
        return channel

    def check_leader(self, hosted: Hosted) -> None:
        if not hosted.leader:
            raise HttpFault(400, NOT_LEADER)

    def _topic_args(self, call: Call) -> tuple[str, int]:
        return valid_topic(call.arg("topic", "MISSING_ARG_TOPIC")), call.number("partition", default="-1")

    def _find(self, topic: str, partition: int) -> Hosted:
        hosted = self.node.find(topic, partition)
        if hosted is None:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        return hosted


def _fixed(node: Node, addresses: Mapping[str, str]) -> dict[str, Any]:
    options, limits, rules = node.options, node.limits, node.options.rules
    port = split_address(addresses["http"]).port
    values: dict[str, Any] = {
        **{name: getattr(limits, name) for name in _LIMITS},
        **_times(limits, _TIMES),
        "auth_http_addresses": list(options.auth_addresses),
        "broadcast_address": options.broadcast_address,
        "data_path": str(options.data_path or ""),
        "max_bytes_per_file": options.disk.max_file_bytes,
        "mem_queue_size": options.mem_queue_size,
        "http_address": addresses["http"],
        "https_address": addresses.get("https", ""),
        "tcp_address": addresses["tcp"],
        "tls_min_version": _TLS_1_0,
        "tls_required": int(limits.tls_required),
    }
    if options.original:
        values |= {
            **config_values.ORIGINAL,
            **_times(limits, _TIMES_ORIGINAL),
            "auth_http_request_method": options.auth_method,
            "max_channel_consumers": limits.max_channel_consumers,
            "broadcast_http_port": port,
            "broadcast_tcp_port": split_address(addresses["tcp"]).port,
            "id": zlib.crc32(hashlib.md5(options.hostname.encode(), usedforsecurity=False).digest()) % 1024,
            **options.reported,
        }
    else:
        values = {
            **config_values.REDESIGNED,
            **values,
            "max_confirm_win": rules.confirm_window,
            "max_channel_delayed_qnum": rules.delayed_most,
            "req_to_end_threshold": round(rules.delayed_threshold * NANOSECONDS),
            "sync_timeout": round(options.flush_interval / 4 * NANOSECONDS),
            **node.place,
        }
    if prefix := values["statsd_prefix"]:
        values["statsd_prefix"] = config_values.statsd_prefix(prefix, options.broadcast_address, port)
    return values


def _times(limits: ServerLimits, names: tuple[str, ...]) -> dict[str, int]:
    return {name: round(getattr(limits, name) * NANOSECONDS) for name in names}


class CommonRoutes(RequestArgs):
    """Routes of /config/… and /metrics."""

    def show(self, call: Call) -> object:
        name = call.path["opt"]
        if name in self._settable():
            value = getattr(self.node.switches, _SETTABLE[name][0])
            return value or _DEFAULT_CONNECTIONS if name == "max_conn_for_client" else value
        fixed = _fixed(self.node, self.addresses)
        if name not in fixed:
            raise HttpFault(400, "INVALID_OPTION")
        return null() if fixed[name] is None else fixed[name]

    def _settable(self) -> frozenset[str]:
        return _SETTABLE_ORIGINAL if self.node.options.original else frozenset(_SETTABLE)

    async def change(self, call: Call) -> object:
        body = await call.body(self.node.limits.max_msg_size, "INVALID_VALUE")
        if not body:
            raise HttpFault(413, "INVALID_VALUE")
        name = call.path["opt"]
        if name not in self._settable():
            raise HttpFault(400, "INVALID_OPTION")
        attribute, kind = _SETTABLE[name]
        setattr(self.node.switches, attribute, self._read(name, body, kind))
        return self.show(call)

    def _read(self, name: str, body: bytes, kind: type) -> object:
        bad = HttpFault(400, "INVALID_VALUE")
        if name == "log_level" and self.node.options.original:
            level = _LEVELS.get(body.decode("latin-1").lower())
            if level is None:
                raise bad
            return level
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise bad from None
        if value is None:  # null empties a list, and changes nothing else
            return [] if kind is list else getattr(self.node.switches, _SETTABLE[name][0])
        texts = not isinstance(value, list) or all(isinstance(item, str) for item in value)
        if type(value) is not kind or not texts:
            raise bad
        return value

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

        def depth(found: Hosted) -> int:
            log = found.partition.log
            return found.partition.depth if node.options.original else log.end_count - log.start_count

        def published(found: Hosted) -> int:
            return found.partition.message_count if node.options.original else found.partition.log.end_count

        yield self._per_topic("depth", "gauge", "Messages kept for channels.", hosted, depth)
        yield self._per_topic("messages_total", "counter", "Messages published.", hosted, published)
        yield self._per_topic("leader", "gauge", "1 on the leader.", hosted, lambda found: int(found.leader))
        channels = [
            (_labels(found) | {"channel": name}, channel, channel.stats())
            for found in hosted
            for name, channel in sorted(found.partition.channels.items())
        ]
        for name, kind, text, value in _CHANNEL_METRICS:
            samples = [(labels, value(channel, stats)) for labels, channel, stats in channels]
            yield Metric(f"nsqd_channel_{name}", kind, text, samples)

    def _per_topic(self, name: str, kind: str, text: str, hosted: list[Hosted], value: Any) -> Metric:
        return Metric(f"nsqd_topic_{name}", kind, text, [(_labels(found), value(found)) for found in hosted])

    def table(self) -> list[Route]:
        return [
            route("GET", "/config/{opt}", self.show),
            route("PUT", "/config/{opt}", self.change),
            route("GET", "/metrics", self.metrics),
        ]


def _labels(hosted: Hosted) -> dict[str, str]:
    return {"topic": hosted.partition.topic, "partition": str(hosted.partition.partition)}
