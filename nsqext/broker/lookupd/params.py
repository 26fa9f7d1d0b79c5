"""Query parameters of the redesigned nsqlookupd, validated in its order and refused with its error texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.channel.kind import ChannelKind, make_kind
from nsqext.broker.engine.errors import Refusal
from nsqext.http.api import HttpFault
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.protocol.server.go_format import parse_int

if TYPE_CHECKING:
    from nsqext.http.api import Call

__all__ = ("read_channel", "read_deletion", "read_kind", "read_log_level", "read_number", "read_ranged", "read_topic")


def read_number(text: str, fault: str = "") -> int:
    """Return a signed 64-bit number, or raise the fault; by default its text names the number."""
    try:
        return parse_int(text)
    except ValueError as error:
        raise HttpFault(400, fault or str(error)) from None


def read_ranged(text: str, low: int, high: int, fault: str) -> int:
    """Return a number within bounds, or raise the fault."""
    value = read_number(text, fault)
    if not low <= value <= high:
        raise HttpFault(400, fault)
    return value


def _valid_topic(call: Call) -> str:
    name = call.arg("topic", "MISSING_ARG_TOPIC")
    if not is_valid_topic(name):
        raise HttpFault(400, "INVALID_ARG_TOPIC")
    return name


def read_topic(call: Call) -> tuple[str, TopicSpec]:
    """Return name and specification of the topic to create."""
    name = _valid_topic(call)
    wanted = call.arg("partition_num", "MISSING_ARG_TOPIC_PARTITION_NUM")
    partitions = read_ranged(wanted, 1, 255, "INVALID_ARG_TOPIC_PARTITION_NUM")
    wanted = call.arg("replicator", "MISSING_ARG_TOPIC_REPLICATOR")
    return name, TopicSpec(
        partition_num=partitions,
        replica=read_ranged(wanted, 1, 5, "INVALID_ARG_TOPIC_REPLICATOR"),
        suggest_load=read_ranged(call.arg("suggestload") or "0", 0, 10000, "INVALID_ARG_TOPIC_LOAD_FACTOR"),
        sync_every=min(read_number(call.arg("syncdisk") or "0", "INVALID_ARG_TOPIC_SYNC_DISK"), admin.MAX_SYNC_EVERY),
        retention_days=read_number(call.arg("retention") or "0"),
        ordered=call.arg("orderedmulti") == "true",
        multi_part=call.arg("multipart") == "true",
        extend=call.arg("extend") == "true",
        disable_channel_auto_create=call.arg("disable_channel_auto_create") == "true",
    )


def read_deletion(call: Call) -> str:
    """Return the name of the topic to delete."""
    name = call.arg("topic", "MISSING_ARG_TOPIC")
    if call.arg("partition", "MISSING_ARG_TOPIC_PARTITION") != "**":
        raise HttpFault(400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
    return name


def read_channel(call: Call) -> tuple[str, str]:
    """Return the names of a topic and a channel."""
    name = _valid_topic(call)
    channel = call.arg("channel", "MISSING_ARG_CHANNEL")
    if not is_valid_channel(channel):
        raise HttpFault(400, "INVALID_ARG_CHANNEL")
    return name, channel


def read_kind(call: Call) -> ChannelKind | None:
    """Return the type of the channel to create, None for the default; an extension of this broker (key-failover)."""
    try:
        return make_kind(call.arg("dispatch"), call.arg("key_header"), fixed=True)
    except Refusal as refusal:
        raise HttpFault(400, refusal.text) from None


def read_log_level(call: Call) -> int:
    """Return the log level to set."""
    return read_number(call.arg("loglevel", "MISSING_ARG_LEVEL"), "BAD_LEVEL_STRING")
