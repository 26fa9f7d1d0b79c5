"""HTTP routes of the original nsqd, except statistics and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.publish import NewMessage
from nsqext.broker.listeners import split_address
from nsqext.broker.nsqd.batch_store import store_in_parts
from nsqext.broker.nsqd.http.publish import read_batch
from nsqext.broker.nsqd.http.request_args import RequestArgs
from nsqext.http.api import Call, Form, HttpFault, HttpPanic, check_block_rate, route
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.go_format import NANOSECONDS, parse_int, wrap
from nsqext.protocol.server.publish_bodies import PublishItem

if TYPE_CHECKING:
    from starlette.requests import Request

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.engine.publish import Stored
    from nsqext.broker.nsqd.node import Hosted

__all__ = ("classic_routes", "refusing_routes")

_MS = 1_000_000
_FALSE = ("false", "0")


class _Publisher(RequestArgs):
    def _topic_of(self, call: Call) -> str:
        if "topic" not in call.args:
            raise HttpFault(400, "MISSING_ARG_TOPIC")
        topic = call.arg("topic")
        if not is_valid_topic(topic):
            raise HttpFault(400, "INVALID_TOPIC")
        return topic

    async def pub(self, call: Call) -> str:
        body = await call.body(self.node.limits.max_msg_size, "MSG_TOO_BIG")
        if not body:
            raise HttpFault(400, "MSG_EMPTY")
        hosted = self.node.create_topic(self._topic_of(call))
        await self._put(hosted, [PublishItem(body)], self._delay(call))
        return "OK"

    def _delay(self, call: Call) -> float:
        if "defer" not in call.args:
            return 0.0
        try:
            nanoseconds = wrap(parse_int(call.arg("defer")) * _MS)
        except ValueError:
            raise HttpFault(400, "INVALID_DEFER") from None
        if not 0 <= nanoseconds <= self.node.limits.max_req_timeout * NANOSECONDS:
            raise HttpFault(400, "INVALID_DEFER")
        return nanoseconds / NANOSECONDS

    async def mpub(self, call: Call) -> str:
        limits = self.node.limits
        if int(call.headers.get("content-length") or 0) > limits.max_body_size:
            raise HttpFault(413, "BODY_TOO_BIG")
        hosted = self.node.create_topic(self._topic_of(call))
        binary = "binary" in call.args and call.arg("binary") not in _FALSE
        items = await read_batch(call, hosted.partition.topic, limits, binary=binary)
        if items:
            await self._put(hosted, items)
        return "OK"

    async def _put(self, hosted: Hosted, items: list[PublishItem], delay: float = 0.0) -> None:
        def put(part: Sequence[PublishItem]) -> Stored:
            return hosted.partition.put([NewMessage(item.body, delay=delay) for item in part])

        try:
            stored = await store_in_parts(hosted, items, put)
        except Refusal:
            raise HttpFault(503, "EXITING") from None
        hosted.partition.commit(stored)

    def create(self, call: Call) -> None:
        self.node.create_topic(self._topic_of(call))


class _Topics(RequestArgs):
    def existing(self, call: Call) -> Hosted:
        if "topic" not in call.args:
            raise HttpFault(400, "MISSING_ARG_TOPIC")
        return self._existing(call.arg("topic"))

    def _existing(self, topic: str) -> Hosted:
        found = self.node.hosted.get((topic, 0))
        if found is None:
            raise HttpFault(404, "TOPIC_NOT_FOUND")
        return found

    def delete(self, call: Call) -> None:
        self.node.delete_topic(self.existing(call).partition.topic)

    def empty(self, call: Call) -> None:
        if "topic" in call.args and not is_valid_topic(call.arg("topic")):
            raise HttpFault(400, "INVALID_TOPIC")
        self.existing(call).partition.empty()

    def switch(self, change: Callable[[Partition], None], call: Call) -> None:
        change(self.existing(call).partition)

    def _named(self, call: Call) -> tuple[Hosted, str]:
        """Return the topic, and the name of a channel that may be unknown."""
        if "topic" not in call.args:
            raise HttpFault(400, "MISSING_ARG_TOPIC")
        if not is_valid_topic(call.arg("topic")):
            raise HttpFault(400, "INVALID_ARG_TOPIC")
        if "channel" not in call.args:
            raise HttpFault(400, "MISSING_ARG_CHANNEL")
        if not is_valid_channel(call.arg("channel")):
            raise HttpFault(400, "INVALID_ARG_CHANNEL")
        return self._existing(call.arg("topic")), call.arg("channel")

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


class _Operator(RequestArgs):
    def ping(self, _: Call) -> str:
        return "OK"

    def info(self, _: Call) -> object:
        options, limits = self.node.options, self.node.limits
        return {
            "version": limits.version,
            "broadcast_address": options.broadcast_address,
            "hostname": options.hostname,
            "http_port": split_address(self.addresses.http_address).port,
            "tcp_port": split_address(self.addresses.tcp_address).port,
            "start_time": self.node.started // NANOSECONDS,
            "max_heartbeat_interval": round(limits.max_heartbeat_interval * NANOSECONDS),
            "max_output_buffer_size": limits.max_output_buffer_size,
            "max_output_buffer_timeout": round(limits.max_output_buffer_timeout * NANOSECONDS),
            "max_deflate_level": limits.max_deflate_level,
            "topology_zone": limits.topology_zone,
            "topology_region": limits.topology_region,
        }

    def set_block_rate(self, call: Call) -> None:
        check_block_rate(call.arg("rate"))
        raise HttpPanic  # the original program acts, and then crashes because it has no text to send

    def free_memory(self, _: Call) -> None:
        raise HttpPanic  # as above


def classic_routes(args: RequestArgs) -> list[Route]:
    """Return the routes, except statistics and options."""
    publisher, topics = _Publisher(args.node, args.addresses), _Topics(args.node, args.addresses)
    operator = _Operator(args.node, args.addresses)
    return [
        route("GET", "/ping", operator.ping, Form.TEXT),
        route("GET", "/info", operator.info),
        route("POST", "/pub", publisher.pub),
        route("POST", "/mpub", publisher.mpub),
        route("POST", "/topic/create", publisher.create),
        route("POST", "/topic/delete", topics.delete),
        route("POST", "/topic/empty", topics.empty),
        route("POST", "/topic/pause", partial(topics.switch, lambda partition: partition.pause())),
        route("POST", "/topic/unpause", partial(topics.switch, lambda partition: partition.unpause())),
        route("POST", "/channel/create", topics.create_channel),
        route("POST", "/channel/delete", topics.delete_channel),
        route("POST", "/channel/empty", partial(topics.switch_channel, lambda channel: channel.empty())),
        route("POST", "/channel/pause", partial(topics.switch_channel, lambda channel: channel.pause())),
        route("POST", "/channel/unpause", partial(topics.switch_channel, lambda channel: channel.unpause())),
        route("PUT", "/debug/setblockrate", operator.set_block_rate, Form.TEXT),
        route("POST", "/debug/freememory", operator.free_memory, Form.TEXT),
    ]


def refusing_routes(args: RequestArgs) -> list[Route]:
    """Return one route for all requests, which refers the client to the HTTPS port."""

    async def refuse(_: Request) -> Response:
        address = args.addresses.https_address
        port = split_address(address).port if address else 0
        body = f'{{"message": "TLS_REQUIRED", "https_port": {port}}}'
        headers = {"X-NSQ-Content-Type": "nsq; version=1.0"}
        return Response(body, 403, headers, "application/json; charset=utf-8")

    made = Route("/{path:path}", refuse)
    made.methods = None  # every method
    return [made]
