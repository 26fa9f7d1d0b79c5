"""Statistics of channels, as nodes report them."""

from __future__ import annotations

from typing import Any

from nsqext.lookup.node_stats import PartitionChannelStats, read_stats
from nsqext.types import Address

NODE = Address("n", 1)


def client_entry(client_id: str, tag: str | None, **counts: int) -> dict[str, Any]:
    """Return the entry of a consumer's connection."""
    return {"client_id": client_id, "desired_tag": tag, **counts}


def topic_entry(name: str, *channels: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return the entry of a topic's partition 3, whose log has the bytes 10 to 100."""
    bounds = {"topic_partition": "3", "backend_start": 10, "backend_depth": 100}
    return {"topic_name": name, "message_count": 0, **bounds, "is_leader": True, "channels": [*channels], **members}


def channel_stats(*clients: dict[str, Any], **members: Any) -> PartitionChannelStats:
    """Return the parsed statistics of a channel with such connections."""
    entry = {"channel_name": "ch", "clients": [*clients], **members}
    (part,) = read_stats({"topics": [topic_entry("t", entry)]}, NODE)["t"]
    return part.channels["ch"]
