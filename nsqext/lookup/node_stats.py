"""The statistics of a node (``/stats``) of both generations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import frozen

from nsqext.errors import ProtocolError, outside_text

if TYPE_CHECKING:
    from nsqext.types import Address


@frozen
class ClientStats:
    """A consumer's connection as a node reports it."""

    client_id: str  #: sent by the consumer
    hostname: str  #: sent by the consumer
    address: str  #: ``host:port`` of the consumer
    user_agent: str  #: library and version
    node: Address  #: TCP address of the node
    partition: int | None  #: None on the original generation
    ready: int
    in_flight: int
    messages: int  #: messages sent on this connection
    finished: int
    requeued: int
    connected_at: int  #: in seconds since 1970
    tag: str | None  #: of the subscription
    tls: bool


@frozen
class KeyRange:
    """A range of key hashes of a ``key_failover`` channel on a partition."""

    low: float  #: 0 to 1
    high: float  #: 0 to 1
    client: str  #: ``host:port`` of the consumer of these keys
    tag: str | None  #: dispatch tag of the consumer
    rate: float  #: messages per second read recently
    waiting: int  #: messages that wait for the consumer


@frozen
class ChannelStats:
    """A channel over all partitions of its topic; counts are sums."""

    name: str
    #: waiting messages as the server counts them; only the redesigned NSQ includes messages in flight
    depth: int
    in_flight: int
    deferred: int  #: messages whose delay runs, in memory and on disk
    messages: int  #: received messages
    requeued: int
    timed_out: int
    paused: bool  #: on every partition
    skipped: bool  #: on every partition (redesigned NSQ)
    lag: int  #: messages that wait, are in flight or deferred; counted equally on both generations
    clients: tuple[ClientStats, ...]  #: consumers' connections, an entry per subscribed partition

    @property
    def consumers(self) -> int:
        """Connected consumers; of each client id and host, as many as share a partition of a node."""
        connections = Counter((one.client_id, one.hostname, one.node, one.partition) for one in self.clients)
        most: dict[tuple[str, str], int] = {}
        for (client_id, hostname, *_), count in connections.items():
            most[client_id, hostname] = max(count, most.get((client_id, hostname), 0))
        return sum(most.values())


@frozen
class PartitionChannelStats(ChannelStats):
    """A channel on a partition."""

    lag_bytes: int | None  #: bytes of unfinished messages; None if not reported
    dispatch: str = ""  #: dispatch type, for example ``key_failover``; empty if not reported
    key_ranges: tuple[KeyRange, ...] = ()  #: sorted by ``low``; of ``key_failover`` channels
    replay: int = 0  #: messages that wait for the consumer of their key; on ``key_failover`` channels
    held_keys: int = 0  #: keys with messages in flight; on ``key_failover`` channels
    connections: int = 0  #: of consumers, even if not listed
    finished: int = 0  #: messages finished since the leader opened the channel (redesigned NSQ)
    on_disk: int = 0  #: messages among ``deferred`` that wait on disk, and delay no other message (redesigned NSQ)
    unread: int = 0  #: messages that the node has not read for this channel (redesigned NSQ)
    #: stored messages that no channel may read yet, for some seconds until the node flushes them (redesigned NSQ)
    unreadable: int = 0

    @property
    def read(self) -> int:
        """Messages read from the log's start; fewer after the channel moved back (redesigned NSQ)."""
        return self.messages - self.unread

    @property
    def unconfirmed(self) -> int:
        """Messages that the node has read and not confirmed, and may redeliver (redesigned NSQ)."""
        return max(0, self.depth - self.unread)


@frozen
class PartitionStats:
    """A partition on its leader; on the original generation, a node's share of the topic."""

    partition: int | None  #: None on the original generation
    node: Address  #: TCP address of the leader, or of the node
    replicas: tuple[str, ...]  #: ``host:port`` (TCP) of the in-sync replicas, the leader first; empty if unknown
    messages: int  #: received messages
    bytes: int | None  #: bytes on disk; on the original generation received bytes, None if unknown
    depth: int  #: messages that wait for a first channel (original generation)
    paused: bool  #: whether the topic passes no messages to channels (original generation)
    channels: Mapping[str, PartitionChannelStats]  #: by name
    start: int = 0  #: byte offset of the first retained message; 0 on the original generation
    end: int | None = None  #: byte offset behind the last message; None on the original generation

    @property
    def committed(self) -> int:
        """Messages known to be committed, because a channel may read them (redesigned NSQ)."""
        return max((channel.messages for channel in self.channels.values()), default=0)

    def finished_to(self, channel: str) -> int | None:
        """Return the byte offset behind the messages that a channel has finished without a gap; None if unknown."""
        found = self.channels.get(channel)
        if self.end is None or found is None or found.lag_bytes is None or found.unreadable:
            return None
        return self.end - found.lag_bytes


def _text(value: object) -> str:
    return outside_text(str(value))


def read_stats(data: Any, node: Address) -> dict[str, list[PartitionStats]]:
    """Parse a node's led partitions, by topic; raises ProtocolError."""
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
        channels={
            name: _read_channel(name, channel, node, partition, data) for name, channel in sorted(channels.items())
        },
        start=start,
        end=end,
    )


def _read_channel(
    name: str, data: Mapping[str, Any], node: Address, partition: int | None, topic: Mapping[str, Any]
) -> PartitionChannelStats:
    depth = int(data.get("depth", 0))
    in_flight = int(data.get("in_flight_count", 0))
    on_disk = int(data.get("delayed_queue_count", 0))
    in_memory = int(data.get("deferred_count", 0))
    deferred = in_memory + on_disk
    # the original generation's depth excludes messages in flight or deferred; the redesigned generation's counts the
    # readable messages after the confirmed position, without the delayed queue
    received = int(topic["message_count"])
    unreadable = 0 if partition is None else max(0, received - int(data.get("message_count", received)))
    lag = depth + in_flight + deferred if partition is None else depth + on_disk + unreadable
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
        on_disk=on_disk,
        unread=max(0, int(data.get("backlogs", 0)) - in_memory),
        unreadable=unreadable,
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
