"""/stats of the original nsqd, as JSON and as text."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from nsqext.broker.nsqd.http.stats import (
    NO_LATENCY,
    StatsPage,
    channel_line,
    client_members,
    connected_text,
    consumer_text,
    topic_line,
)
from nsqext.http.api import Call, route

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.channel.client import Client
    from nsqext.broker.nsqd.node import ConnectedClient, Hosted

_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_MEMORY = (
    "heap_objects",
    "heap_idle_bytes",
    "heap_in_use_bytes",
    "heap_released_bytes",
    "gc_pause_usec_100",
    "gc_pause_usec_99",
    "gc_pause_usec_95",
    "next_gc_bytes",
    "gc_total_runs",
)


def _memory() -> dict[str, int]:
    """Return the real server's members; those that Python does not know are 0."""
    return dict.fromkeys(_MEMORY, 0) | {"gc_total_runs": sum(one["collections"] for one in gc.get_stats())}


def _client(session: ConnectedClient, stats: Client | None, topic: str) -> dict[str, Any]:
    own: dict[str, Any] = {name: session.settings.raw.get(name, "") for name in ("topology_zone", "topology_region")}
    counts = [
        {"topic": name, "count": publisher.published}
        for name, publisher in session.published.items()
        if topic in ("", name)
    ]
    if counts:
        own["pub_counts"] = counts[:1]  # the real server shows only one topic of each client, too
    return client_members(session, stats, {}, own)


class ClassicStatsRoutes(StatsPage):
    """Route /stats."""

    def stats(self, call: Call) -> object:
        topic, channel = call.arg("topic"), call.arg("channel")
        clients = _BOOLEANS.get(call.arg("include_clients"), True)
        memory = _memory() if _BOOLEANS.get(call.arg("include_mem"), True) else None
        topics, producers = self._topics(topic, channel, clients=clients), None
        if clients and topics is not None:
            producers = [
                _client(session, None, topic) for session in self.node.sessions.values() if session.published
            ] or None
        if call.arg("format") != "json":
            return self._text(topics or [], producers or [], memory)
        answer = self.answer(topics)
        if memory is not None:
            answer["memory"] = memory
        return answer | {"producers": producers}

    def _topics(self, topic: str, channel: str, *, clients: bool) -> list[dict[str, Any]] | None:
        """Return the topics; None for an unknown topic, an empty list for an unknown channel of a topic."""
        if topic and (topic, 0) not in self.node.hosted:
            return None
        chosen = sorted(
            (hosted for hosted in self.node.hosted.values() if topic in ("", hosted.partition.topic)),
            key=lambda hosted: hosted.partition.topic,
        )
        return [
            self._topic(hosted, channel, clients=clients)
            for hosted in chosen
            if not channel or channel in hosted.partition.channels
        ]

    def _topic(self, hosted: Hosted, only: str, *, clients: bool) -> dict[str, Any]:
        partition = hosted.partition
        return {
            "topic_name": partition.topic,
            "channels": [
                self._channel(channel, hosted, clients=clients)
                for name, channel in sorted(partition.channels.items())
                if only in ("", name)
            ],
            "depth": partition.depth,
            "backend_depth": max(partition.depth - self.node.options.mem_queue_size, partition.stored_depth),
            "message_count": partition.message_count,
            "message_bytes": partition.message_bytes,
            "paused": partition.paused,
            "e2e_processing_latency": NO_LATENCY,
        }

    def _channel(self, channel: Channel, hosted: Hosted, *, clients: bool) -> dict[str, Any]:
        stats, sessions, topic = channel.stats(), self.node.sessions, hosted.partition.topic
        delivered = hosted.deliveries.get(channel.name, 0)
        found = [
            _client(sessions[number], client, topic) for number, client in channel.clients.items() if number in sessions
        ]
        return {
            "channel_name": channel.name,
            "depth": stats.depth,
            "backend_depth": stats.backend_depth,
            "in_flight_count": stats.in_flight_count,
            "deferred_count": stats.deferred_count,
            "message_count": stats.message_count,
            **({"global_msg_count": delivered} if delivered else {}),
            "requeue_count": stats.requeue_count,
            "timeout_count": stats.timeout_count,
            "client_count": len(channel.clients),
            "clients": found if clients else None,
            "paused": channel.paused,
            "e2e_processing_latency": NO_LATENCY,
        }

    def _text(
        self, topics: list[dict[str, Any]], producers: list[dict[str, Any]], memory: dict[str, int] | None
    ) -> str:
        now = self.node.options.wall()
        lines = [*self.heading(now), "", "Health: OK"]
        if memory is not None:
            lines += ["", "Memory:", *(f"   {name:<25}\t{value}" for name, value in memory.items())]
        lines += ["", "Topics:"] if topics else ["", "Topics: None"]
        for index, topic in enumerate(topics):
            if index:
                lines.append("")
            lines.append(topic_line(topic))
            for channel in topic["channels"]:
                lines.append(channel_line(channel))
                lines += [f"        {_client_line(client, now)}" for client in channel["clients"] or ()]
        lines += ["", "Producers:" if producers else "Producers: None"]
        lines += [f"   {_client_line(client, now)}" for client in producers]
        return "\n".join([*lines, ""])

    def table(self) -> list[Route]:
        return [route("GET", "/stats", self.stats)]


def _client_line(client: dict[str, Any], now: int) -> str:
    port = client["remote_address"].rpartition(":")[2]
    name = f"{client['hostname']}:{port} {client['user_agent']}"
    connected = connected_text(client, now)
    counts = client.get("pub_counts")
    if counts:
        total = sum(one["count"] for one in counts)
        topics = ",".join(f"{one['topic']}={one['count']}" for one in counts)
        return f"[V2 {name:<21}] msgs: {total:<8} topics: {topics} {connected}"
    return f"[V2 {name:<21}] {consumer_text(client)} {connected}"
