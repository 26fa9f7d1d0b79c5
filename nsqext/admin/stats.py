"""Request statistics from nodes of both generations, and sum them up over partitions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from nsqext.admin.requests import ask_all, cluster_generation, generation_of, http_address, http_of
from nsqext.admin.results import Generation, NodeStatus, TopicInfo, TopicStats
from nsqext.errors import ConnectionFailed, outside_text
from nsqext.lookup.node_stats import ChannelStats, PartitionChannelStats, PartitionStats, read_stats
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.admin.requests import ClusterRequests
    from nsqext.lookup.partition_map import PartitionMap


def sum_up(
    name: str,
    generation: Generation,
    partitions: Iterable[PartitionStats],
    unreachable: Iterable[Address] = (),
    expected: Iterable[int] | None = None,
) -> TopicStats:
    """Return the statistics of a topic from its partitions' statistics; ``expected`` is None if not known."""
    ordered = tuple(sorted(partitions, key=lambda one: (one.partition is None, one.partition or 0, one.node)))
    names = sorted({channel for partition in ordered for channel in partition.channels})
    channels = {
        channel: _sum_channel(channel, [one.channels[channel] for one in ordered if channel in one.channels])
        for channel in names
    }
    reported = {partition.partition for partition in ordered}
    missing = None if expected is None else tuple(number for number in expected if number not in reported)
    return TopicStats(name, generation, ordered, channels, tuple(sorted(unreachable)), missing)


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
    return sum_up(topic, generation_of(where), partitions, failed, range(where.meta.partition_num))


def _only(part: PartitionStats, channel: str | None) -> PartitionStats:
    if channel is None:
        return part
    return evolve(part, channels={name: stats for name, stats in part.channels.items() if name == channel})


async def cluster_stats(requests: ClusterRequests, topics: Mapping[str, TopicInfo]) -> dict[str, TopicStats]:
    """Request the statistics of all topics once from each node; see `nsqext.Admin.all_stats`."""
    names = await requests.client.lists.topics()
    infos = {info.tcp: info for info in await requests.client.lists.nodes()}

    async def ask(node: Address) -> dict[str, list[PartitionStats]]:
        params = {"format": "json", "leaderOnly": "true", "needClients": "true"}
        return read_stats(await requests.get(http_address(infos[node]), "/stats", params), node)

    found, failed = await ask_all(infos, ask)
    generation = cluster_generation(infos.values())
    parts: dict[str, list[PartitionStats]] = {name: [] for name in names}
    for reported in found.values():
        for name, partitions in reported.items():
            parts.setdefault(name, []).extend(partitions)

    def created(name: str) -> Iterable[int] | None:
        if name not in topics:
            return () if generation == "original" else None
        meta = topics[name].meta
        return () if meta is None else range(meta.partition_num)

    return {
        name: sum_up(
            name, generation, partitions, [node for node in failed if name in infos[node].topics], created(name)
        )
        for name, partitions in sorted(parts.items())
    }


async def node_statuses(requests: ClusterRequests) -> tuple[NodeStatus, ...]:
    """Return every nsqd that lookup lists, and whether it responds; see `nsqext.Admin.nodes`."""
    infos = await requests.client.lists.nodes()
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


async def in_sync_replicas(requests: ClusterRequests, where: PartitionMap, partition: int) -> tuple[str, ...]:
    """Request the in-sync replicas of a partition from its leader; see `nsqext.Admin.replicas`."""
    node = where.leaders[partition]
    params: dict[str, str | int] = {"topic": where.topic, "partition": partition}
    return _read_replicas(await requests.get(http_of(where, node), "/coordinator/stats", params), node)


def _read_replicas(data: Any, leader: Address) -> tuple[str, ...]:
    """Parse the in-sync replicas in ``/coordinator/stats``; a node id is ``host:rpc_port:tcp_port:number``."""
    try:
        members: list[Mapping[str, Any]] = data["topic_coord_stats"][0].get("isr_stats") or []
        parts = [outside_text(str(member["node_id"])).rsplit(":", 3) for member in members]
        found = [str(Address(host, int(port))) for host, _, port, _ in parts]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"invalid response to /coordinator/stats: {outside_text(repr(error))}"
        raise ConnectionFailed(reason, node=str(leader)) from error
    return tuple(sorted(found, key=lambda address: (address != str(leader), address)))
