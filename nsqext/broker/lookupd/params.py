"""Query parameters of the redesigned nsqlookupd, validated in its order and refused with its error texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.channel.kind import ChannelKind, make_kind
from nsqext.broker.engine.errors import Refusal
from nsqext.http.api import HttpFault, valid_channel, valid_topic

if TYPE_CHECKING:
    from nsqext.http.api import Call

BAD_REPLICATOR = "INVALID_ARG_TOPIC_REPLICATOR"
BAD_SYNC = "INVALID_ARG_TOPIC_SYNC_DISK"


def read_ranged(call: Call, name: str, low: int, high: int, fault: str, **given: str) -> int:
    """Return an argument as a number within bounds, or raise the fault."""
    value = call.number(name, fault, **given)
    if not low <= value <= high:
        raise HttpFault(400, fault)
    return value


def read_partition_num(call: Call) -> int:
    """Return the number of partitions of a topic."""
    missing = "MISSING_ARG_TOPIC_PARTITION_NUM"
    return read_ranged(call, "partition_num", 1, 255, "INVALID_ARG_TOPIC_PARTITION_NUM", missing=missing)


def read_topic(call: Call) -> tuple[str, TopicSpec]:
    """Return name and specification of the topic to create."""
    return valid_topic(call.arg("topic", "MISSING_ARG_TOPIC")), TopicSpec(
        partition_num=read_partition_num(call),
        replica=read_ranged(call, "replicator", 1, 5, BAD_REPLICATOR, missing="MISSING_ARG_TOPIC_REPLICATOR"),
        suggest_load=read_ranged(call, "suggestload", 0, 10000, "INVALID_ARG_TOPIC_LOAD_FACTOR", default="0"),
        sync_every=min(call.number("syncdisk", BAD_SYNC, default="0"), admin.MAX_SYNC_EVERY),
        retention_days=call.number("retention", default="0"),
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
    topic = valid_topic(call.arg("topic", "MISSING_ARG_TOPIC"))
    return topic, valid_channel(call.arg("channel", "MISSING_ARG_CHANNEL"))


def read_kind(call: Call) -> ChannelKind | None:
    """Return the type of the channel to create, None for the default; an extension of this broker (key-failover)."""
    try:
        return make_kind(call.arg("dispatch"), call.arg("key_header"), fixed=True)
    except Refusal as refusal:
        raise HttpFault(400, refusal.text) from None


def check_log_level(call: Call) -> None:
    """Answer `/loglevel/set`; without effect."""
    call.number("loglevel", "BAD_LEVEL_STRING", missing="MISSING_ARG_LEVEL")
