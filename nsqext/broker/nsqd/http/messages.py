"""/message/get, /message/finish and /message/trace/… of the redesigned generation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.start_position import StartPosition
from nsqext.broker.nsqd.http.request_args import RequestArgs
from nsqext.http.api import Call, HttpFault, route
from nsqext.protocol.record import COUNTER_BITS

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.engine.storage.log import Entry

_PARTITION_MASK = 1023
_MODES = ("id", "count", "virtual_offset")


class MessageRoutes(RequestArgs):
    """Routes /message/…."""

    def get(self, call: Call) -> object:
        mode = call.arg("search_mode")
        position = call.number("search_pos", function="ParseInt")
        by_id = mode == "id"
        number = position >> COUNTER_BITS & _PARTITION_MASK if by_id else call.number("partition")
        hosted = self.node.hosted.get((call.arg("topic"), number))
        if hosted is None:
            raise HttpFault(400, "topic does not exist")
        partition = hosted.partition
        if call.arg("delayed_queue") == "true":
            return self._get_delayed(call, partition, mode, position)
        entry = _search(partition, mode, position)
        return _members(call, entry, {}, 0, {"queue_cnt_index": entry.count})

    def _get_delayed(self, call: Call, partition: Partition, mode: str, position: int) -> object:
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

    def finish(self, call: Call) -> None:
        hosted, channel = self.channel(call)
        number = call.number("msgid", "INVALID_REQUEST")
        self.check_leader(hosted)
        try:
            channel.finish_forced(number)
        except Refusal as refusal:
            kind = "ErrType:7 ErrCode:0 : " if self.node.options.clustered else ""
            raise HttpFault(500, f"{kind}{refusal.text}") from None

    def trace(self, enabled: bool, call: Call) -> None:
        """Switch the tracing of a topic or a channel; unknown ones are ignored."""
        channel = call.arg("channel")
        for hosted in self.node.partitions(call.arg("topic")):
            if not channel:
                hosted.traced = enabled
            elif found := hosted.partition.channels.get(channel):
                found.traced = enabled

    def table(self) -> list[Route]:
        return [
            route("GET", "/message/get", self.get),
            route("POST", "/message/finish", self.finish),
            route("POST", "/message/trace/enable", partial(self.trace, True)),
            route("POST", "/message/trace/disable", partial(self.trace, False)),
        ]


def _search(partition: Partition, mode: str, position: int) -> Entry:
    log = partition.log
    if mode in _MODES and log.end_count == log.start_count:
        raise HttpFault(404, "commit log end of file")
    entry: Entry | None
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
    call: Call, entry: Entry, ids: Mapping[str, int], attempts: int, place: Mapping[str, int]
) -> dict[str, object]:
    """Return a message in the real server's order, with what only the queue, or the delayed queue, has of it."""
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
