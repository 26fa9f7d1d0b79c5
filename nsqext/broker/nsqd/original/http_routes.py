"""HTTP routes of the original nsqd, except /config and /metrics."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.broker.listeners import split_address
from nsqext.broker.nsqd.http.common import RequestArgs
from nsqext.broker.nsqd.http.publish import read_batch
from nsqext.broker.nsqd.http.stats import client_members
from nsqext.broker.nsqd.publish_commands import store_in_parts
from nsqext.golang.texts import MEMORY, NO_LATENCY, channel_line, connected_text, consumer_text, heading, topic_line
from nsqext.http.api import Call, Form, HttpFault, route, valid_channel, valid_topic
from nsqext.protocol.server.command_parser import PublishItem
from nsqext.protocol.server.go_format import NANOSECONDS, wrap

if TYPE_CHECKING:
    from starlette.requests import Request

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.channel.in_flight import SubscribedClient
    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.nsqd.node import ConnectedClient, Hosted

_MS = 1_000_000
_FALSE = ("false", "0")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


class OriginalRoutes(RequestArgs):
    # Publishing

    """Routes except options."""

    async def pub(self, call: Call) -> str:
        body = await call.body(self.node.limits.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise HttpFault(400, "MSG_EMPTY")
        hosted = self._created(call)
        await self._put(hosted, [PublishItem(body)], self._delay(call))
        return "OK"

    def _delay(self, call: Call) -> float:
        if "defer" not in call.args:
            return 0.0
        nanoseconds = wrap(call.number("defer", "INVALID_DEFER") * _MS)
        if not 0 <= nanoseconds <= self.node.limits.max_req_timeout * NANOSECONDS:
            raise HttpFault(400, "INVALID_DEFER")
        return nanoseconds / NANOSECONDS

    async def mpub(self, call: Call) -> str:
        limits = self.node.limits
        if int(call.headers.get("content-length") or 0) > limits.max_body_size:
            raise HttpFault(413, "BODY_TOO_BIG")
        hosted = self._created(call)
        binary = "binary" in call.args and call.arg("binary") not in _FALSE
        items = await read_batch(call, hosted.partition.topic, limits, binary=binary)
        if items:
            await self._put(hosted, items)
        return "OK"

    async def _put(self, hosted: Hosted, items: list[PublishItem], delay: float = 0.0) -> None:
        def put(part: Sequence[PublishItem]) -> Stored:
            return self.node.put(hosted, [NewMessage(item.body, delay=delay) for item in part])

        try:
            stored = await store_in_parts(hosted, items, put)
        except Refusal:
            raise HttpFault(503, "EXITING") from None
        hosted.partition.commit(stored)

    # Topics and channels

    def _existing(self, topic: str) -> Hosted:
        found = self.node.hosted.get((topic, 0))
        if found is None:
            raise HttpFault(404, "TOPIC_NOT_FOUND")
        return found

    def _created(self, call: Call) -> Hosted:
        try:
            return self.node.create_topic(_topic(call))
        except Refusal as refusal:
            raise HttpFault(500, refusal.text) from None

    def create_topic(self, call: Call) -> None:
        self._created(call)

    def delete_topic(self, call: Call) -> None:
        topic = call.given("topic", "MISSING_ARG_TOPIC")
        self.node.delete_topic(self._existing(topic).partition.topic)

    def empty_topic(self, call: Call) -> None:
        self._existing(_topic(call)).partition.empty()

    def switch_topic(self, change: Callable[[Partition], None], call: Call) -> None:
        change(self._existing(call.given("topic", "MISSING_ARG_TOPIC")).partition)

    def _named(self, call: Call) -> tuple[Hosted, str]:
        """Return the topic and the name of a channel, which may not exist."""
        topic = valid_topic(call.given("topic", "MISSING_ARG_TOPIC"))
        channel = valid_channel(call.given("channel", "MISSING_ARG_CHANNEL"))
        return self._existing(topic), channel

    def create_channel(self, call: Call) -> None:
        self.node.channel(*self._named(call))

    def delete_channel(self, call: Call) -> None:
        hosted, name = self._named(call)
        if name not in hosted.partition.channels:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        hosted.partition.delete_channel(name)

    def switch_channel(self, change: Callable[[Channel], None], call: Call) -> None:
        hosted, name = self._named(call)
        channel = hosted.partition.channels.get(name)
        if channel is None:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        change(channel)

    # The node

    def info(self, _: Call) -> object:
        limits = self.node.limits
        return self.about() | {
            "max_heartbeat_interval": round(limits.max_heartbeat_interval * NANOSECONDS),
            "max_output_buffer_size": limits.max_output_buffer_size,
            "max_output_buffer_timeout": round(limits.max_output_buffer_timeout * NANOSECONDS),
            "max_deflate_level": limits.max_deflate_level,
            "topology_zone": limits.topology_zone,
            "topology_region": limits.topology_region,
        }

    # Statistics

    def stats(self, call: Call) -> object:
        topic, channel = call.arg("topic"), call.arg("channel")
        clients = _BOOLEANS.get(call.arg("include_clients"), True)
        memory = None
        if _BOOLEANS.get(call.arg("include_mem"), True):
            memory = MEMORY | {"gc_total_runs": sum(one["collections"] for one in gc.get_stats())}
        topics, producers = self._topics(topic, channel, clients=clients), None
        if clients and topics is not None:
            producers = [
                _client(session, session.subscriber, topic)
                for session in self.node.sessions.values()
                if session.published
            ] or None
        if call.arg("format") != "json":
            return self._text(topics or [], producers or [], memory)
        answer = self.health() | {"topics": topics}
        if memory is not None:
            answer["memory"] = memory
        return answer | {"producers": producers}

    def _topics(self, topic: str, channel: str, *, clients: bool) -> list[dict[str, Any]] | None:
        """Return the topics; None for an unknown topic, an empty list for an unknown channel."""
        if topic and (topic, 0) not in self.node.hosted:
            return None
        chosen = sorted(
            (hosted for hosted in self.node.hosted.values() if topic in ("", hosted.partition.topic)),
            key=lambda hosted: hosted.partition.topic,
        )
        return [
            self._topic(hosted, topic, channel, clients=clients)
            for hosted in chosen
            if not channel or channel in hosted.partition.channels
        ]

    def _topic(self, hosted: Hosted, asked: str, only: str, *, clients: bool) -> dict[str, Any]:
        """Return a topic; ``asked`` and ``only`` are topic and channel of the request, or empty."""
        partition = hosted.partition
        return {
            "topic_name": partition.topic,
            "channels": [
                self._channel(channel, hosted, asked, clients=clients)
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

    def _channel(self, channel: Channel, hosted: Hosted, asked: str, *, clients: bool) -> dict[str, Any]:
        stats, sessions = channel.stats(), self.node.sessions
        delivered = hosted.deliveries.get(channel.name, 0)
        found = [
            _client(sessions[number], client, asked) for number, client in channel.clients.items() if number in sessions
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
        lines = [*heading(self.node.limits.version, self.node.started, now), "", f"Health: {self.node.health}"]
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
        return [
            route("GET", "/ping", self.ping, Form.TEXT),
            route("GET", "/info", self.info),
            route("GET", "/stats", self.stats),
            route("POST", "/pub", self.pub),
            route("POST", "/mpub", self.mpub),
            route("POST", "/topic/create", self.create_topic),
            route("POST", "/topic/delete", self.delete_topic),
            route("POST", "/topic/empty", self.empty_topic),
            route("POST", "/topic/pause", partial(self.switch_topic, lambda partition: partition.set_paused(True))),
            route("POST", "/topic/unpause", partial(self.switch_topic, lambda partition: partition.set_paused(False))),
            route("POST", "/channel/create", self.create_channel),
            route("POST", "/channel/delete", self.delete_channel),
            route("POST", "/channel/empty", partial(self.switch_channel, lambda channel: channel.empty())),
            route("POST", "/channel/pause", partial(self.switch_channel, lambda channel: channel.set_paused(True))),
            route("POST", "/channel/unpause", partial(self.switch_channel, lambda channel: channel.set_paused(False))),
        ]


def _topic(call: Call) -> str:
    return valid_topic(call.given("topic", "MISSING_ARG_TOPIC"), "INVALID_TOPIC")


def refusing_route(addresses: Mapping[str, str]) -> Route:
    """Return the route that answers all requests with the HTTPS port."""

    async def refuse(_: Request) -> Response:
        port = split_address(addresses["https"]).port if "https" in addresses else 0
        body = f'{{"message": "TLS_REQUIRED", "https_port": {port}}}'
        headers = {"X-NSQ-Content-Type": "nsq; version=1.0"}
        return Response(body, 403, headers, "application/json; charset=utf-8")

    made = Route("/{path:path}", refuse)
    made.methods = None
    return made


def _client(session: ConnectedClient, stats: SubscribedClient | None, topic: str) -> dict[str, Any]:
    own: dict[str, Any] = {name: session.settings.raw.get(name, "") for name in ("topology_zone", "topology_region")}
    counts = [
        {"topic": name, "count": publisher.published}
        for name, publisher in session.published.items()
        if topic in ("", name)
    ]
    if counts:
        own["pub_counts"] = counts[:1]  # the real server shows a single topic, too
    return client_members(session, stats, {}, own)


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
