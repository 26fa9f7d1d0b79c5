"""HTTP routes /channel/… of the redesigned generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from nsqext.broker.engine.channel.kind import make_kind
from nsqext.broker.engine.channel_types import admit
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.start_position import StartPosition
from nsqext.broker.nsqd.http.request_args import RequestArgs
from nsqext.http.api import Call, HttpFault, HttpPanic, route
from nsqext.protocol.server.go_format import decode, parse_int

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.engine.channel.channel import Channel

_HOUR = 3600.0


class ChannelRoutes(RequestArgs):
    """Routes /channel/…."""

    def create(self, call: Call) -> None:
        hosted, name = self.channel_args(call)
        self.check_leader(hosted)
        if not hosted.auto_create_channels:
            raise HttpFault(403, f"channel {name} not registered. channel should be initialized before use.")
        try:
            kind = make_kind(call.arg("dispatch"), call.arg("key_header"), fixed=True)
            self.node.channel(hosted, name)
            admit(hosted.partition, name, kind)
        except Refusal as refusal:
            raise HttpFault(400, refusal.text) from None

    def delete(self, call: Call) -> None:
        hosted, name = self.channel_args(call)
        self.check_leader(hosted)
        partition = hosted.partition
        if not hosted.auto_create_channels:
            text = f"topic {partition.topic} has channel auto create disabled. channel {name} "
            raise HttpFault(403, f"{text}cuold not be deleted localy in nsqd.")
        partition.delete_channel(name)

    def switch(self, change: Callable[[Channel], None], call: Call, *, led: bool = False) -> None:
        """Change a channel; with ``led``, only one of a partition that this node leads."""
        channel = self.led_channel(call) if led else self.channel(call)[1]
        try:
            change(channel)
        except Refusal as refusal:
            raise HttpFault(500, refusal.text) from None

    def skip_test_messages(self, call: Call) -> None:
        hosted, _ = self.channel_args(call)
        if not hosted.partition.extend:
            raise HttpFault(400, "INVALID_REQUEST")
        self.channel(call)

    def requeue_delayed(self, call: Call) -> None:
        channel = self.led_channel(call)
        try:
            hours = parse_int(call.arg("offset") or "1")
        except ValueError:
            hours = 1
        channel.requeue_delayed(hours * _HOUR)

    async def set_offset(self, call: Call) -> None:
        _, channel = self.channel(call)
        if "transfer-encoding" in call.headers:
            raise HttpPanic  # a body of unknown size
        body = await call.body()
        if not body:
            raise HttpFault(406, "MSG_EMPTY")
        try:
            position = StartPosition.parse(decode(body))
        except Refusal as refusal:
            raise HttpFault(400, refusal.text) from None
        self.switch(lambda _: channel.set_offset(position), call, led=True)

    def set_order(self, call: Call) -> None:
        self.channel(call)
        order = call.arg("order")
        if order not in ("true", "false"):
            raise HttpFault(400, "INVALID_OPTION")
        self.switch(lambda channel: channel.set_ordered(order == "true"), call)

    def set_client_limit(self, call: Call) -> None:
        _, channel = self.channel(call)
        channel.set_client_limit(call.arg("client_prefix"), call.number("ready", "INVALID_OPTION"))

    def set_rate_limit(self, call: Call) -> None:
        _, channel = self.channel(call)
        try:
            channel.set_rate_limit(call.number("ratekilobytes", "INVALID_OPTION"))
        except Refusal as refusal:
            raise HttpFault(400, refusal.text) from None

    def table(self) -> list[Route]:
        switches: list[tuple[str, Callable[[Channel], None], bool]] = [
            ("pause", lambda channel: channel.pause(), False),
            ("unpause", lambda channel: channel.unpause(), False),
            ("skip", lambda channel: channel.skip(), False),
            ("unskip", lambda channel: channel.unskip(), False),
            ("empty", lambda channel: channel.empty(), True),
            ("fixconfirmed", lambda channel: channel.redeliver_unfinished(), True),
            ("finishmemdelayed", lambda channel: channel.finish_deferred(), True),
            # messages that were taken from the delayed queue stay in flight
            ("emptydelayed", lambda channel: channel.cursor.delayed.clear(), True),
        ]
        made = [
            route("POST", f"/channel/{name}", partial(self.switch, change, led=led)) for name, change, led in switches
        ]
        return [
            *made,
            route("POST", "/channel/create", self.create),
            route("POST", "/channel/delete", self.delete),
            route("POST", "/channel/skipZanTest", self.skip_test_messages),
            route("POST", "/channel/unskipZanTest", self.skip_test_messages),
            route("POST", "/channel/requeuedelayed", self.requeue_delayed),
            route("POST", "/channel/setoffset", self.set_offset),
            route("POST", "/channel/setorder", self.set_order),
            route("POST", "/channel/setclientlimit", self.set_client_limit),
            route("POST", "/channel/ratelimit", self.set_rate_limit),
        ]
