"""HTTP routes for operators of the redesigned generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from nsqext.broker.engine.options import make_kind
from nsqext.broker.engine.storage.log import LogEntry, Refusal, StartPosition
from nsqext.broker.nsqd.http.common import RequestArgs
from nsqext.http.api import Call, Form, HttpFault, HttpPanic, route
from nsqext.protocol.record import COUNTER_BITS
from nsqext.protocol.server.go_format import decode, parse_int

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.partition import Partition

_HOUR = 3600.0
_PARTITION_MASK = 1023
_MODES = ("id", "count", "virtual_offset")


class AdminRoutes(RequestArgs):
    """Routes for operators."""

    def info(self, _: Call) -> object:
        return self.about() | {"ha_support": self.node.options.clustered}

    def server_stats(self, _: Call) -> object:
        return self.health() | {"server_pub_failed": self.node.publish_failed}

    def coordinator_stats(self, call: Call) -> object:
        if self.node.coordinator_stats is None:
            raise HttpFault(500, "Coordinator is disabled.")
        return self.node.coordinator_stats(call.arg("topic"), call.number("partition", "INVALID_REQUEST", default="-1"))

    def disable_write(self, call: Call) -> None:
        kind = call.arg("type")
        self.node.switches.write_disabled = kind if kind in ("all", "ordered") else ""

    def set_log_level(self, call: Call) -> None:
        self.node.switches.log_level = call.number("loglevel", "BAD_LEVEL_STRING", missing="MISSING_ARG_LEVEL")

    # Channels

    def create_channel(self, call: Call) -> None:
        hosted, name = self.channel_args(call)
        self.check_leader(hosted)
        if not hosted.auto_create_channels:
            raise HttpFault(403, f"channel {name} not registered. channel should be initialized before use.")
        try:
            kind = make_kind(call.arg("dispatch"), call.arg("key_header"), fixed=True)
            self.node.channel(hosted, name)
            hosted.partition.admit(name, kind)
        except Refusal as refusal:
            raise HttpFault(400, refusal.text) from None

    def delete_channel(self, call: Call) -> None:
        hosted, name = self.channel_args(call)
        self.check_leader(hosted)
        partition = hosted.partition
        if not hosted.auto_create_channels:
            text = f"topic {partition.topic} has channel auto create disabled. channel {name} "
            raise HttpFault(403, f"{text}cuold not be deleted localy in nsqd.")
        partition.delete_channel(name)

    def switch(self, change: Callable[[Channel], None], call: Call, *, led: bool = False) -> None:
        """Change a channel; with ``led``, only on the leader."""
        channel = self.led_channel(call) if led else self.channel(call)[1]
        try:
            change(channel)
        except Refusal as refusal:
            raise HttpFault(500, refusal.text) from None

    def set_state(self, change: Callable[[Channel], None], call: Call) -> None:
        """Pause or skip a channel; only the leader can, because its replicas get this state from it."""
        hosted, channel = self.channel(call)
        if not hosted.leader:
            raise HttpFault(500, "INTERNAL_ERROR")
        change(channel)

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

    # Messages

    def get_message(self, call: Call) -> object:
        mode = call.arg("search_mode")
        position = call.number("search_pos", function="ParseInt")
        by_id = mode == "id"
        number = position >> COUNTER_BITS & _PARTITION_MASK if by_id else call.number("partition")
        hosted = self.node.hosted.get((call.arg("topic"), number))
        if hosted is None:
            raise HttpFault(400, "topic does not exist")
        partition = hosted.partition
        if call.arg("delayed_queue") == "true":
            return self._get_delayed_message(call, partition, mode, position)
        entry = _search(partition, mode, position, clustered=self.node.options.clustered)
        return _members(call, entry, {}, 0, {"queue_cnt_index": entry.count})

    def _get_delayed_message(self, call: Call, partition: Partition, mode: str, position: int) -> object:
        delays = not partition.ordered and (
            self.node.options.clustered
            or any(channel.cursor.delayed.messages for channel in partition.channels.values())
        )
        if not delays:
            raise HttpFault(404, "no delayed queue on the topic")
        if mode != "id":
            raise HttpFault(400, "delayed queue search mode must be id")
        name = call.arg("channel", "delayed queue search channel must be given")
        channel = partition.channels.get(name)
        delayed = channel.cursor.delayed.messages.get(position) if channel else None
        if delayed is None:
            raise HttpFault(404, "no message found in delayed queue")
        return _members(call, delayed.entry, {"orig_id": position}, delayed.attempts, {})

    def finish_message(self, call: Call) -> None:
        hosted, channel = self.channel(call)
        number = call.number("msgid", "INVALID_REQUEST")
        self.check_leader(hosted)
        try:
            channel.finish_forced(number)
        except Refusal as refusal:
            kind = "ErrType:7 ErrCode:0 : " if self.node.options.clustered else ""
            raise HttpFault(500, f"{kind}{refusal.text}") from None

    def trace(self, enabled: bool, call: Call) -> None:
        """Switch the tracing of a topic or channel; ignore unknown names."""
        channel = call.arg("channel")
        for hosted in self.node.partitions(call.arg("topic")):
            if not channel:
                hosted.traced = enabled
            elif found := hosted.partition.channels.get(channel):
                found.traced = enabled

    def table(self) -> list[Route]:
        states: list[tuple[str, Callable[[Channel], None]]] = [
            ("pause", lambda channel: channel.set_paused(True)),
            ("unpause", lambda channel: channel.set_paused(False)),
            ("skip", lambda channel: channel.set_skipped(True)),
            ("unskip", lambda channel: channel.set_skipped(False)),
        ]
        switches: list[tuple[str, Callable[[Channel], None]]] = [
            ("empty", lambda channel: channel.empty()),
            ("fixconfirmed", lambda channel: channel.redeliver_unfinished()),
            ("finishmemdelayed", lambda channel: channel.finish_deferred()),
            # messages taken from the delayed queue stay in flight
            ("emptydelayed", lambda channel: channel.cursor.delayed.clear()),
        ]
        return [
            route("GET", "/ping", self.ping, Form.TEXT),
            route("GET", "/info", self.info, Form.NEGOTIATED),
            route("GET", "/serverstats", self.server_stats),
            route("GET", "/coordinator/stats", self.coordinator_stats),
            route("POST", "/loglevel/set", self.set_log_level),
            route("POST", "/disable/write", self.disable_write),
            route("GET", "/message/get", self.get_message),
            route("POST", "/message/finish", self.finish_message),
            route("POST", "/message/trace/enable", partial(self.trace, True)),
            route("POST", "/message/trace/disable", partial(self.trace, False)),
            *(route("POST", f"/channel/{name}", partial(self.set_state, do)) for name, do in states),
            *(route("POST", f"/channel/{name}", partial(self.switch, do, led=True)) for name, do in switches),
            route("POST", "/channel/create", self.create_channel),
            route("POST", "/channel/delete", self.delete_channel),
            route("POST", "/channel/requeuedelayed", self.requeue_delayed),
            route("POST", "/channel/setoffset", self.set_offset),
            route("POST", "/channel/setorder", self.set_order),
            route("POST", "/channel/setclientlimit", self.set_client_limit),
            route("POST", "/channel/ratelimit", self.set_rate_limit),
        ]


def _search(partition: Partition, mode: str, position: int, *, clustered: bool) -> LogEntry:
    log = partition.log
    if not clustered and (mode == "id" or mode in _MODES):  # the commit log belongs to the coordinator
        raise HttpFault(500, "INTERNAL_ERROR")
    if mode in _MODES and log.end_count == log.start_count:
        raise HttpFault(404, "commit log end of file")
    entry: LogEntry | None
    if mode == "id":
        entry = log.find_id(position)
    elif mode in _MODES:
        kind = "msgcount" if mode == "count" else "virtual_queue"
        try:
            offset, _ = StartPosition(kind, position).find(log)
        except Refusal:
            raise HttpFault(500, "INTERNAL_ERROR") from None
        entry = log.read(offset)
    else:
        raise HttpFault(400, "search mode should be one of id/count/virtual_offset")
    if entry is None:
        raise HttpFault(500, "INTERNAL_ERROR")
    return entry


def _members(
    call: Call, entry: LogEntry, ids: Mapping[str, int], attempts: int, place: Mapping[str, int]
) -> dict[str, object]:
    """Return a message in the real server's order; ``ids`` and ``place`` depend on its queue."""
    record = entry.record
    return {
        "id": record.internal_id,
        **ids,
        "trace_id": record.trace_id,
        "body": _text(record.body),
        "timestamp": record.timestamp,
        "attempts": attempts,
        "offset": entry.offset,
        **place,
        "ext": _text(record.header) if call.arg("needext") == "true" else "",
    }


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
