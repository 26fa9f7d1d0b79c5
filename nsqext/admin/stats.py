"""Request statistics and states from nodes of both generations, and sum them up over partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from nsqext.admin.requests import ask_all, cluster_generation, generation_of, http_address, http_of
from nsqext.admin.results import (
    ChannelStats,
    ClientStats,
    Generation,
    KeyRange,
    NodeStatus,
    PartitionChannelStats,
    PartitionStats,
    TopicStats,
)
from nsqext.errors import ConnectionFailed, ProtocolError
from nsqext.errors.outside_text import outside_text
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.admin.requests import ClusterRequests
    from nsqext.lookup.partition_map import PartitionMap


def _text(value: object) -> str:
    """Return a name or another text of a node, for errors, logs and terminals."""
    return outside_text(str(value))


def read_stats(data: Any, node: Address) -> dict[str, list[PartitionStats]]:
    """Parse a node's statistics: its led partitions, by topic."""
    found: dict[str, list[PartitionStats]] = {}
    try:
        for topic in data.get("topics") or ():
            if topic.get("is_leader", True):
                found.setdefault(_text(topic["topic_name"]), []).append(_read_partition(topic, node))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid response to /stats: {outside_text(repr(error))}", node=str(node)) from error
    return found


def _read_partition(data: Mapping[str, Any], node: Address) -> PartitionStats:
    partition = int(data["topic_partition"]) if "topic_partition" in data else None
    channels = {_text(channel["channel_name"]): channel for channel in data.get("channels") or ()}
    original = partition is None
    start, end = (0, None) if original else (int(data["backend_start"]), int(data["backend_depth"]))
    size = data.get("message_bytes") if end is None else end - start
    return PartitionStats(
        partition=partition,
        node=node,
        replicas=(),
        messages=int(data["message_count"]),
        bytes=None if size is None else int(size),
        depth=int(data.get("depth", 0)) if original else 0,
        paused=bool(data.get("paused", False)),
        channels={name: _read_channel(name, channel, node, partition) for name, channel in sorted(channels.items())},
        start=start,
        end=end,
    )


def _read_channel(name: str, data: Mapping[str, Any], node: Address, partition: int | None) -> PartitionChannelStats:
    depth = int(data.get("depth", 0))
    in_flight = int(data.get("in_flight_count", 0))
    on_disk = int(data.get("delayed_queue_count", 0))
    deferred = int(data.get("deferred_count", 0)) + on_disk
    # the original generation's depth excludes messages in flight and deferred messages; the redesigned generation's is
    # the number of messages after the confirmed position, without the delayed queue
    lag = depth + in_flight + deferred if partition is None else depth + on_disk
    return PartitionChannelStats(
        name=name,
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
        dispatch=_text(data.get("dispatch") or ""),
        key_ranges=tuple(_read_range(found) for found in data.get("key_ranges") or ()),
        replay=int(data.get("replay_count", 0)),
        held_keys=int(data.get("held_keys", 0)),
        connections=int(data.get("client_num") or data.get("client_count") or len(data.get("clients") or ())),
        # each finished message is counted in its class of latency
        finished=sum(map(int, data.get("msg_delivery_latency_stats") or ())),
    )


def _read_range(data: Mapping[str, Any]) -> KeyRange:
    return KeyRange(
        low=float(data["low"]),
        high=float(data["high"]),
        client=_text(data["remote_address"]),
        tag=_text(data["tag"]) if data.get("tag") else None,
        rate=float(data["rate"]),
        waiting=int(data["waiting"]),
    )


def _read_client(data: Mapping[str, Any], node: Address, partition: int | None) -> ClientStats:
    return ClientStats(
        client_id=_text(data.get("client_id", "")),
        hostname=_text(data.get("hostname", "")),
        address=_text(data.get("remote_address", "")),
        user_agent=_text(data.get("user_agent", "")),
        node=node,
        partition=partition,
        ready=int(data.get("ready_count", 0)),
        in_flight=int(data.get("in_flight_count", 0)),
        messages=int(data.get("message_count", 0)),
        finished=int(data.get("finish_count", 0)),
        requeued=int(data.get("requeue_count", 0)),
        connected_at=int(data.get("connect_ts", 0)),
        tag=_text(data["desired_tag"]) if data.get("desired_tag") else None,
        tls=bool(data.get("tls", False)),
    )


def sum_up(
    name: str, generation: Generation, partitions: Iterable[PartitionStats], unreachable: Iterable[Address] = ()
) -> TopicStats:
    """Return the statistics of a topic from its partitions' statistics."""
    ordered = tuple(sorted(partitions, key=lambda one: (one.partition is None, one.partition or 0, one.node)))
    names = sorted({channel for partition in ordered for channel in partition.channels})
    channels = {
        channel: _sum_channel(channel, [one.channels[channel] for one in ordered if channel in one.channels])
        for channel in names
    }
    return TopicStats(name, generation, ordered, channels, tuple(sorted(unreachable)))


def _sum_channel(name: str, parts: list[PartitionChannelStats]) -> ChannelStats:
    counts = ("depth", "in_flight", "deferred", "messages", "requeued", "timed_out", "lag")
    return ChannelStats(
        name=name,
        **{count: sum(getattr(part, count) for part in parts) for count in counts},
        paused=all(part.paused for part in parts),
        skipped=all(part.skipped for part in parts),
        clients=tuple(client for part in parts for client in part.clients),
    )


async def topic_stats(requests: ClusterRequests, where: PartitionMap, channel: str | None) -> TopicStats:
    """Request the statistics of a topic from its nodes."""
    topic = where.topic
    holders = tuple(dict.fromkeys((*where.leaders.values(), *where.nodes)))

    async def ask(node: Address) -> list[PartitionStats]:
        params = {"format": "json", "topic": topic}
        return read_stats(await requests.get(http_of(where, node), "/stats", params), node).get(topic, [])

    found, failed = await ask_all(holders, ask)
    if failed and not found:
        raise next(iter(failed.values()))
    partitions = [_only(part, channel) for parts in found.values() for part in parts]
    return sum_up(topic, generation_of(where), partitions, failed)


def _only(part: PartitionStats, channel: str | None) -> PartitionStats:
    if channel is None:
        return part
    return evolve(part, channels={name: stats for name, stats in part.channels.items() if name == channel})


async def cluster_stats(requests: ClusterRequests) -> dict[str, TopicStats]:
    """Request the statistics of all topics once from each node; see `nsqext.Admin.all_stats`."""
    names = await requests.client.topics()
    infos = {info.tcp: info for info in await requests.client.nodes()}

    async def ask(node: Address) -> dict[str, list[PartitionStats]]:
        params = {"format": "json", "leaderOnly": "true", "needClients": "true"}
        return read_stats(await requests.get(http_address(infos[node]), "/stats", params), node)

    found, failed = await ask_all(infos, ask)
    generation = cluster_generation(infos.values())
    parts: dict[str, list[PartitionStats]] = {name: [] for name in names}
    for topics in found.values():
        for name, partitions in topics.items():
            parts.setdefault(name, []).extend(partitions)
    return {
        name: sum_up(name, generation, partitions, [node for node in failed if name in infos[node].topics])
        for name, partitions in sorted(parts.items())
    }


async def node_statuses(requests: ClusterRequests) -> tuple[NodeStatus, ...]:
    """Return every nsqd that lookup lists, and whether it responds; see `nsqext.Admin.nodes`."""
    infos = await requests.client.nodes()
    by_address = {info.tcp: info for info in infos}

    async def ping(address: Address) -> bool:
        await requests.get(http_address(by_address[address]), "/info", {})
        return True

    answered, _ = await ask_all(by_address, ping)
    return tuple(
        NodeStatus(
            tcp=info.tcp,
            http=info.http,
            version=info.version,
            hostname=info.hostname,
            generation="redesigned" if info.redesigned else "original",
            topics=dict(sorted(info.topics.items())),
            tombstoned=info.tombstoned,
            reachable=answered.get(info.tcp, False),
        )
        for info in infos
    )


async def in_sync_replicas(requests: ClusterRequests, where: PartitionMap) -> dict[int, tuple[str, ...]]:
    """Request the in-sync replicas of each partition from its leader; see `nsqext.Admin.replicas`."""
    found: dict[int, tuple[str, ...]] = {}
    for number, node in sorted(where.leaders.items()):
        params: dict[str, str | int] = {"topic": where.topic, "partition": number}
        data = await requests.get(http_of(where, node), "/coordinator/stats", params)
        found[number] = _read_replicas(data, node)
    return found


def _read_replicas(data: Any, leader: Address) -> tuple[str, ...]:
    """Parse the in-sync replicas in ``/coordinator/stats``; a node id is ``host:rpc_port:tcp_port:number``."""
    try:
        members: list[Mapping[str, Any]] = data["topic_coord_stats"][0].get("isr_stats") or []
        parts = [_text(member["node_id"]).rsplit(":", 3) for member in members]
        found = [str(Address(host, int(port))) for host, _, port, _ in parts]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"invalid response to /coordinator/stats: {outside_text(repr(error))}"
        raise ConnectionFailed(reason, node=str(leader)) from error
    return tuple(sorted(found, key=lambda address: (address != str(leader), address)))
