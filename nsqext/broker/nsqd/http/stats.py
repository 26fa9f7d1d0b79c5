"""/stats, /message/stats and /message/historystats of the redesigned generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict

from nsqext.broker.nsqd.http.common import RequestArgs
from nsqext.golang.texts import (
    NO_LATENCY,
    channel_line,
    connected_text,
    consumer_text,
    go_time,
    heading,
    positions_text,
    topic_line,
)
from nsqext.http.api import Call, Form, HttpFault, route
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.layers import DeflateLayer, SnappyLayer
from nsqext.protocol.server.command_parser import State
from nsqext.protocol.server.go_format import NANOSECONDS, parse_bool
from nsqext.protocol.tls_layer import TlsLayer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.routing import Route

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.channel.cursor import ChannelCounters
    from nsqext.broker.engine.channel.in_flight import SubscribedClient
    from nsqext.broker.engine.options import ChannelKind
    from nsqext.broker.nsqd.node import ConnectedClient, Hosted, PublishStats

_STATES = {State.INIT: 0, State.SUBSCRIBED: 3, State.CLOSING: 4}


def _filter(wanted: Any) -> dict[str, Any]:
    if not isinstance(wanted, dict):
        return {}
    names = ("type", "inverse", "filter_ext_key", "filter_data", "filter_data_list")
    return {name: wanted[name] for name in names if wanted.get(name)}


def client_members(
    session: ConnectedClient, stats: SubscribedClient | None, counts: Mapping[str, int], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a client in /stats; generations add ``counts`` and ``own``. ``stats`` is None for a publisher."""
    settings = session.settings
    return {
        "client_id": settings.client_id,
        "hostname": settings.hostname,
        "version": "V2",
        "remote_address": session.peer,
        "state": _STATES[session.state],
        "ready_count": session.ready,
        "in_flight_count": stats.in_flight if stats else 0,
        "message_count": stats.messages if stats else 0,
        "finish_count": stats.finished if stats else 0,
        "requeue_count": stats.requeued if stats else 0,
        **counts,
        "connect_ts": session.connected // NANOSECONDS,
        "sample_rate": settings.sample_rate,
        "deflate": session.has_layer(DeflateLayer),
        "snappy": session.has_layer(SnappyLayer),
        "user_agent": settings.user_agent,
        **(session.authorizations.summary() if session.authorizations is not None else {}),
        **own,
        "tls": session.has_layer(TlsLayer),
        "tls_cipher_suite": "",
        "tls_version": session.tls_version,
        "tls_negotiated_protocol": "",
        "tls_negotiated_protocol_is_mutual": session.has_layer(TlsLayer),
    }


def _client(stats: SubscribedClient, session: ConnectedClient) -> dict[str, Any]:
    settings = session.settings
    counts = {"timeout_count": stats.timed_out, "deferred_count": 0}
    return {
        "name": settings.client_id,
        **client_members(session, stats, counts, {"desired_tag": settings.desired_tag}),
        "output_buffer_size": settings.output_buffer_size,
        "output_buffer_timeout": round(settings.output_buffer_timeout * NANOSECONDS),
        "msg_timeout": round(settings.msg_timeout * NANOSECONDS),
        "ext_filter": _filter(settings.ext_filter),
        "limited_rdy": stats.limit,
    }


def _keys(kind: ChannelKind, stats: ChannelCounters) -> dict[str, Any]:
    """Return statistics of key_failover channels, which the real server lacks."""
    return {
        "dispatch": kind.type,
        "key_header": kind.key_header,
        "replay_count": stats.replay_count,
        "held_keys": stats.held_keys,
        "key_ranges": [asdict(found) for found in stats.key_ranges],
    }


def _publishers(traffic: PublishStats) -> list[dict[str, Any]]:
    return [
        {
            "remote_address": publisher.peer,
            "user_agent": publisher.user_agent,
            "protocol": "tcp",
            "pub_count": publisher.published,
            "err_count": 0,
            "last_pub_ts": publisher.last // NANOSECONDS,
        }
        for publisher in traffic.publishers.values()
    ]


class StatsRoutes(RequestArgs):
    """Routes /stats, /message/stats and /message/historystats."""

    def stats(self, call: Call) -> object:
        topic, channel, partition = call.arg("topic"), call.arg("channel"), call.arg("partition")
        clients = call.arg("needClients")
        with_clients = clients == "true" or bool(topic and not clients)
        found = [
            self._topic(hosted, channel, with_clients=with_clients)
            for hosted in self._selected(call)
            if not partition or str(hosted.partition.partition) == partition
        ]
        if call.arg("format") != "json":
            return self._text(found)
        return self.health() | {"topics": found}

    def _selected(self, call: Call) -> list[Hosted]:
        topic = call.arg("topic")
        try:
            leader_only = parse_bool(call.arg("leaderOnly"))
        except ValueError:
            leader_only = False
        wanted = [
            hosted
            for hosted in self.node.hosted.values()
            if topic in ("", hosted.partition.topic) and (hosted.leader or not leader_only)
        ]
        return sorted(wanted, key=lambda hosted: f"{hosted.partition.topic}-{hosted.partition.partition}")

    def _topic(self, hosted: Hosted, only: str, *, with_clients: bool) -> dict[str, Any]:
        partition, meta, traffic = hosted.partition, hosted.meta, hosted.traffic
        name, number = partition.topic, str(partition.partition)
        channels = [
            self._channel(channel, with_clients=with_clients and only in ("", label))
            for label, channel in sorted(partition.channels.items())
        ]
        chosen = [channel for channel in channels if channel["channel_name"] == only]
        size = partition.log.end_offset
        publishers = _publishers(traffic)
        several = partition.ordered or meta.multi_part
        return {
            "topic_name": name,
            "topic_full_name": f"{name}-{number}",
            "topic_partition": number,
            "channels": chosen or channels,
            "channel_num": len(channels),
            "depth": size,
            "backend_depth": size,
            "backend_start": partition.log.start_offset,
            "message_count": partition.log.end_count,
            "is_leader": hosted.leader,
            "hourly_pubsize": 0,
            "client_pub_stats": publishers if with_clients else None,
            "client_num": len(publishers),
            "msg_size_stats": traffic.sizes,
            "msg_write_latency_stats": traffic.durations,
            "is_multi_ordered": partition.ordered,
            "is_multi_part": meta.multi_part,
            "is_ext": partition.extend,
            "is_channel_auto_create_disabled": not hosted.auto_create_channels,
            "statsd_name": f"{name}.{number}" if several else name,
            "pub_failed_cnt": hosted.failed,
            "e2e_processing_latency": NO_LATENCY,
        }

    def _channel(self, channel: Channel, *, with_clients: bool) -> dict[str, Any]:
        stats, sessions = channel.stats(), self.node.sessions
        clients = [
            _client(client, sessions[number]) for number, client in channel.clients.items() if number in sessions
        ]
        return {
            "channel_name": channel.name,
            "backlogs": stats.backlogs,
            "depth": stats.depth,
            "depth_size": stats.depth_size,
            "depth_ts": go_time(stats.depth_timestamp),
            "depth_ts_nano": stats.depth_timestamp,
            "backend_depth": stats.backend_depth,
            "hourly_subsize": 0,
            "in_flight_count": stats.in_flight_count,
            "deferred_count": stats.deferred_count,
            "deferred_from_delay_count": stats.deferred_from_delay_count,
            "message_count": stats.message_count,
            "requeue_count": stats.requeue_count,
            "timeout_count": stats.timeout_count,
            "clients": clients if with_clients else None,
            "client_num": len(channel.clients),
            "paused": channel.paused,
            "skipped": channel.skipped,
            "zan_test_skipped": False,
            "delayed_queue_count": stats.delayed_queue_count,
            "delayed_queue_recent": go_time(stats.delayed_queue_recent),
            "delayed_queue_recent_nano": stats.delayed_queue_recent,
            "e2e_processing_latency": NO_LATENCY,
            "msg_consume_latency_stats": channel.latencies.consume,
            "msg_delivery_latency_stats": channel.latencies.delivery,
        } | (_keys(channel.kind, stats) if channel.kind.type == KEY_FAILOVER else {})

    def _text(self, topics: list[dict[str, Any]]) -> str:
        now = self.node.options.wall()
        lines = heading(self.node.limits.version, self.node.started, now)
        if not topics:
            return "\n".join([*lines, "", "NO_TOPICS", ""])
        lines += ["", f"Health: {self.node.health}"]
        for topic in topics:
            lines += ["", topic_line(topic)]
            for channel in topic["channels"]:
                lines.append(channel_line(channel))
                lines += [_client_line(client, now) for client in channel["clients"] or ()]
        return "\n".join([*lines, ""])

    def message_stats(self, call: Call) -> str:
        hosted, name = self.channel_args(call)
        channel = hosted.partition.channels.get(name)
        if channel is None:
            return ""
        stats, partition, acked = channel.stats(), hosted.partition, channel.acked
        end, read, confirmed = positions_text(
            (
                (partition.readable_offset, partition.readable),
                (channel.cursor.offset, channel.cursor.count),
                (acked.offset, acked.count),
            )
        )
        intervals = "".join(f"interval &{{{start} {stop} {count}}}, " for start, stop, count in acked.intervals)
        return (
            f"topic {hosted.partition.topic} channel {channel.name} \n"
            f"inflight {stats.in_flight_count}, req 0, 0, 0, "
            f"deferred: {stats.deferred_count} , {stats.deferred_from_delay_count}, \n\n"
            f"channel end : {end},current read:{read}, current confirm {confirmed}, "
            f"confirmed {len(acked.intervals)} messages: {intervals}\n\n"
        )

    def history(self, call: Call) -> object:
        topic, number = call.arg("topic"), call.arg("partition")
        now = self.node.options.wall()
        if not topic and not number:
            leading = [hosted for hosted in self.node.hosted.values() if hosted.leader]
            found = [
                {
                    "topic_name": hosted.partition.topic,
                    "topic_partition": str(hosted.partition.partition),
                    "hourly_pub_size": hosted.traffic.hours(now)[-1],
                }
                for hosted in leading
            ]
            return {"node_hourly_pub_size_stats": found or None}
        partition = call.number("partition", "INVALID_REQUEST", default="0") if topic else 0
        hosted = self.node.hosted.get((topic, partition))
        if hosted is None:
            raise HttpFault(404, "E_TOPIC_NOT_EXIST")
        return {"hourly_pub_size": hosted.traffic.hours(now)}

    def table(self) -> list[Route]:
        return [
            route("GET", "/stats", self.stats, Form.NEGOTIATED),
            route("GET", "/message/stats", self.message_stats, Form.V1),
            route("GET", "/message/historystats", self.history, Form.V1),
        ]


def _client_line(client: dict[str, Any], now: int) -> str:
    name = f"{client['name']}:{client['remote_address'].rpartition(':')[2]}"
    return f"        [V2 {name:<21}] {consumer_text(client)} {connected_text(client, now)}"
