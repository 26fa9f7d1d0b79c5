"""Read ``/stats`` of nodes of both generations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nsqext.admin.results import (
    ChannelStats,
    ClientStats,
    Generation,
    KeyRange,
    PartitionChannelStats,
    PartitionStats,
    StoredMessage,
    TopicStats,
)
from nsqext.errors import ProtocolError
from nsqext.protocol.headers import KEY_HEADER, RESERVED_PREFIX, decode_headers, tag_of

if TYPE_CHECKING:
    from nsqext.types import Address

__all__ = ("read_message", "read_stats", "sum_up")


def read_stats(data: Any, node: Address) -> dict[str, list[PartitionStats]]:
    """Read a node's statistics: the partitions that it leads, by topic.

    Args:
        data: the data of ``/stats?format=json``.
        node: TCP address of the node.

    Raises:
        ProtocolError: the data is not that of ``/stats``.
    """
    found: dict[str, list[PartitionStats]] = {}
    try:
        for topic in data.get("topics") or ():
            if topic.get("is_leader", True):
                found.setdefault(str(topic["topic_name"]), []).append(_read_partition(topic, node))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"/stats cannot be read: {error!r}", node=str(node)) from error
    return found


def _read_partition(data: Mapping[str, Any], node: Address) -> PartitionStats:
    partition = int(data["topic_partition"]) if "topic_partition" in data else None
    channels = {str(channel["channel_name"]): channel for channel in data.get("channels") or ()}
    classic = partition is None
    return PartitionStats(
        partition=partition,
        node=node,
        replicas=(),
        messages=int(data.get("message_count", 0)),
        bytes=int(data["message_bytes"] if classic else data.get("backend_depth", 0) - data.get("backend_start", 0))
        if not classic or "message_bytes" in data
        else None,
        depth=int(data.get("depth", 0)) if classic else 0,
        paused=bool(data.get("paused", False)),
        channels={name: _read_channel(channel, node, partition) for name, channel in sorted(channels.items())},
        end=None if classic else int(data.get("backend_depth", 0)),
    )


def _read_channel(data: Mapping[str, Any], node: Address, partition: int | None) -> PartitionChannelStats:
    depth = int(data.get("depth", 0))
    in_flight = int(data.get("in_flight_count", 0))
    on_disk = int(data.get("delayed_queue_count", 0))
    deferred = int(data.get("deferred_count", 0)) + on_disk
    # the classic generation does not count messages in flight and deferred ones as depth; the redesigned one counts
    # everything behind the confirmed position, and the delayed queue beside it
    lag = depth + in_flight + deferred if partition is None else depth + on_disk
    return PartitionChannelStats(
        depth=depth,
        in_flight=in_flight,
        deferred=deferred,
        messages=int(data.get("message_count", 0)),
        requeued=int(data.get("requeue_count", 0)),
        timed_out=int(data.get("timeout_count", 0)),
        paused=bool(data.get("paused", False)),
        skipped=bool(data.get("skipped", False)),
        lag=lag,
        lag_bytes=int(data["depth_size"]) if "depth_size" in data else None,
        clients=tuple(_read_client(client, node, partition) for client in data.get("clients") or ()),
        dispatch=str(data.get("dispatch") or ""),
        key_ranges=tuple(_read_range(found) for found in data.get("key_ranges") or ()),
        replay=int(data.get("replay_count", 0)),
        held_keys=int(data.get("held_keys", 0)),
    )


def _read_range(data: Mapping[str, Any]) -> KeyRange:
    return KeyRange(
        low=float(data["low"]),
        high=float(data["high"]),
        client=str(data["remote_address"]),
        tag=str(data["tag"]) if data.get("tag") else None,
        rate=float(data["rate"]),
        waiting=int(data["waiting"]),
    )


def _read_client(data: Mapping[str, Any], node: Address, partition: int | None) -> ClientStats:
    return ClientStats(
        client_id=str(data.get("client_id", "")),
        hostname=str(data.get("hostname", "")),
        address=str(data.get("remote_address", "")),
        user_agent=str(data.get("user_agent", "")),
        node=node,
        partition=partition,
        ready=int(data.get("ready_count", 0)),
        in_flight=int(data.get("in_flight_count", 0)),
        messages=int(data.get("message_count", 0)),
        finished=int(data.get("finish_count", 0)),
        requeued=int(data.get("requeue_count", 0)),
        connected_at=int(data.get("connect_ts", 0)),
        tag=str(data["desired_tag"]) if data.get("desired_tag") else None,
        tls=bool(data.get("tls", False)),
    )


def sum_up(
    name: str, generation: Generation, partitions: Iterable[PartitionStats], unreachable: Iterable[Address] = ()
) -> TopicStats:
    """Return the statistics of a topic from those of its partitions."""
    ordered = tuple(sorted(partitions, key=lambda one: (one.partition is None, one.partition or 0, one.node)))
    names = sorted({channel for partition in ordered for channel in partition.channels})
    channels = {
        channel: _sum_channel(channel, [one.channels[channel] for one in ordered if channel in one.channels])
        for channel in names
    }
    return TopicStats(name, generation, ordered, channels, tuple(sorted(unreachable)))


def _sum_channel(name: str, parts: list[PartitionChannelStats]) -> ChannelStats:
    return ChannelStats(
        name=name,
        depth=sum(part.depth for part in parts),
        in_flight=sum(part.in_flight for part in parts),
        deferred=sum(part.deferred for part in parts),
        messages=sum(part.messages for part in parts),
        requeued=sum(part.requeued for part in parts),
        timed_out=sum(part.timed_out for part in parts),
        paused=all(part.paused for part in parts),
        skipped=all(part.skipped for part in parts),
        lag=sum(part.lag for part in parts),
        clients=tuple(client for part in parts for client in part.clients),
    )


def read_message(data: Any, partition: int, node: Address) -> StoredMessage:
    """Read the data of ``/message/get``.

    Raises:
        ProtocolError: the data is not that of ``/message/get``, or the header is not JSON.
    """
    try:
        ext = str(data.get("ext") or "")
        headers = decode_headers(ext.encode("utf-8", "surrogatepass")) if ext.lstrip().startswith("{") else {}
        key = headers.get(KEY_HEADER)
        return StoredMessage(
            partition=partition,
            id=int(data["id"]),
            offset=int(data["offset"]),
            timestamp=int(data["timestamp"]),
            trace_id=int(data["trace_id"]),
            body=str(data["body"]),
            headers={name: value for name, value in headers.items() if not name.startswith(RESERVED_PREFIX)},
            key=str(key) if isinstance(key, (str, int)) and not isinstance(key, bool) and key != "" else None,
            tag=tag_of(headers) if headers else (ext or None),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"/message/get cannot be read: {error!r}", node=str(node), partition=partition) from error
