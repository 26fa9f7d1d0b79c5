"""What a node hosts: partitions with their roles, connections, and the time that passes over both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.broker.engine.partition import Partition, PartitionOptions
from nsqext.broker.engine.storage.partition_store import stored_partitions
from nsqext.broker.fault_injection import NodeFaults
from nsqext.broker.nsqd.options import NodeOptions
from nsqext.broker.nsqd.publish_stats import PublishStats
from nsqext.protocol.names import is_ephemeral
from nsqext.types import TopicMeta

if TYPE_CHECKING:
    from nsqext.broker.engine.channel import Channel
    from nsqext.broker.engine.partition import Stored
    from nsqext.broker.nsqd.session import Session
    from nsqext.protocol.server.negotiate import ServerLimits

__all__ = ("Hosted", "Node", "Switches")


@define(eq=False)
class Hosted:
    """A partition on a node, with the role that the coordinator gave it.

    Attributes:
        partition: its queue and channels.
        meta: what lookup tells about the topic.
        leader: this node leads it; a follower refuses publishes and consumers.
        writable: the in-sync replicas are a majority.
        epoch: grows with every change of the leader.
        replicate: returns when every in-sync replica has what was stored; None when the leader is alone in sync. Raises
            `Fault` when the set fell apart, `Refusal` when a replica's disk is full.
        auto_create_channels: a consumer's channel is made when it is not there.
        waiting: bytes of publishes that wait for replicas.
        traced: publishes and deliveries of the topic are to be logged (`/message/trace/enable`).
        traced_channels: the same for single channels.
        failed: publishes that failed.
        flushed: where the queue ended at the last flush, offset and messages (redesigned node on its own).
        deliveries: messages that went to clients, by channel (original generation).
        traffic: what was published.
    """

    partition: Partition
    meta: TopicMeta = field(factory=TopicMeta)
    leader: bool = True
    writable: bool = True
    epoch: int = 0
    replicate: Callable[[Stored], Awaitable[None]] | None = None
    auto_create_channels: bool = True
    waiting: int = 0
    traced: bool = False
    traced_channels: set[str] = field(factory=set)
    failed: int = 0
    flushed: tuple[int, int] = (0, 0)
    deliveries: dict[str, int] = field(factory=dict)
    traffic: PublishStats = field(factory=PublishStats)


@define(eq=False)
class Switches:
    """Options that are changed while the node runs (`/config`).

    Attributes:
        allow_ext_compatible: see `NodeOptions`.
        allow_sub_ext_compatible: see `NodeOptions`.
        max_connections: clients that may be connected; 0 for any number.
        max_pub_waiting: see `NodeOptions`.
        write_disabled: ``all``, ``ordered`` or empty (`/disable/write`).
        lookupd_addresses: TCP addresses of lookup nodes, of the original generation.
        log_level: what `/config/log_level` answers.
        verbose: what `/config/verbose` answers.
    """

    allow_ext_compatible: bool = False
    allow_sub_ext_compatible: bool = False
    max_connections: int = 0
    max_pub_waiting: int = 0
    write_disabled: str = ""
    lookupd_addresses: list[str] = field(factory=list)
    log_level: int = 2
    verbose: bool = False


_COORDINATOR_ERRORS = (
    "WriteEpochError",
    "WriteNotLeaderError",
    "WriteQuorumError",
    "WriteBusyError",
    "RpcCheckFailed",
    "LeadershipError",
    "TopicCoordMissingError",
    "LocalErr",
)


_EPOCH = 1288834974288  # 2012-10-28 in units of 2**20 ns, where the original server's ids begin
_ID_SHIFT = 22


def _nothing(*_: object) -> None:
    """Stand in for a callback that nobody set."""


class Node:
    """One nsqd without its sockets.

    Args:
        name: how the cluster calls it.
        options: its settings.
        faults: what may go wrong at it.

    Attributes:
        started: when it was made, in nanoseconds since 1970.
        id_base: what the original generation adds to internal ids, which makes them look like its own.
        hosted: its partitions by topic and number.
        sessions: its connections by their number.
        on_topic_created: called with the name of a topic that a client's command made.
        on_channel_created: called with topic, partition and name of a channel that a client's command made.
        on_topic_deleted: called with the name of a topic that an HTTP request or its last client removed.
        on_channel_deleted: called with topic, partition and name of a channel that is gone.
        wake: called when a session has something to send; the server sets it.
        coordinator_stats: answers ``/coordinator/stats`` for a topic and partition; the coordinator sets it.
        exiting: it drains; publishes are refused.
    """

    def __init__(self, name: str, options: NodeOptions | None = None, faults: NodeFaults | None = None) -> None:
        self.name: str = name
        self.options: NodeOptions = options or NodeOptions()
        self.faults: NodeFaults = faults or NodeFaults()
        self.limits: ServerLimits = self.options.limits
        self.switches: Switches = Switches(
            self.options.allow_ext_compatible,
            self.options.allow_sub_ext_compatible,
            self.limits.max_connections,
            self.options.max_pub_waiting,
            log_level=2,
        )
        self.started: int = self.options.wall()
        self.id_base: int = ((self.started >> 20) - _EPOCH) << _ID_SHIFT
        self.hosted: dict[tuple[str, int], Hosted] = {}
        self.sessions: dict[int, Session] = {}
        self.dirty: list[Session] = []
        self.on_topic_created: Callable[[str], None] = _nothing
        self.on_channel_created: Callable[[str, int, str], None] = _nothing
        self.on_topic_deleted: Callable[[str], None] = _nothing
        self.on_channel_deleted: Callable[[str, int, str], None] = _nothing
        self.wake: Callable[[], None] = _nothing
        self.coordinator_stats: Callable[[str, int], dict[str, Any]] = self._alone_stats
        self.exiting: bool = False
        self.publish_failed: int = 0
        self._ids = count(1)
        self._flush_due = 0.0

    def host(self, topic: str, partition: int, meta: TopicMeta) -> Hosted:
        """Take a partition in, empty or from disk; one that is here already is returned as it is."""
        key = topic, partition
        found = self.hosted.get(key)
        if found is None:
            options = PartitionOptions(
                extend=meta.extend_support,
                ordered=meta.ordered,
                generation=self.limits.generation,
                clock=self.options.clock,
                wall=self.options.wall,
                limits=self.limits,
                memory_bytes=self.options.memory_bound,
                coordinated=self.options.clustered,
                extend_compatible=lambda: self.switches.allow_sub_ext_compatible,
                mem_queue_size=self.options.mem_queue_size,
                data_path=self.options.data_path,
                disk=self.options.disk,
                random=self._random(topic, partition),
            )
            found = Hosted(Partition(topic, partition, options), meta)
            found.auto_create_channels = not meta.disable_channel_auto_create
            found.partition.on_channel_deleted = partial(self._channel_deleted, found)
            self.hosted[key] = found
        return found

    def _random(self, topic: str, partition: int) -> Random:
        seed = self.options.seed
        return Random() if seed is None else Random(f"{seed}/{topic}/{partition}")

    def unhost(self, topic: str, partition: int, *, destroy: bool = False) -> None:
        """Let a partition go; its consumers are closed.

        Args:
            topic: the topic.
            partition: its number.
            destroy: the topic is deleted: its files go, too.
        """
        found = self.hosted.pop((topic, partition), None)
        if found is not None:
            found.partition.close(destroy=destroy)
            self.wake()

    def load(self) -> None:
        """Host what is in the data path, for a node without a coordinator.

        Raises:
            InvalidSetting: what is there is damaged.
        """
        if self.options.data_path is not None and self.options.data_path.is_dir():
            for state in list(stored_partitions(self.options.data_path)):
                meta = TopicMeta(state.partition + 1, 1, extend_support=state.extend, ordered=state.ordered)
                self.host(state.topic, state.partition, meta)

    def create_topic(self, topic: str) -> Hosted:
        """Return a topic of the original generation, made when it is not there."""
        found = self.hosted.get((topic, 0))
        if found is None:
            found = self.host(topic, 0, TopicMeta())
            self.on_topic_created(topic)
        return found

    def delete_topic(self, topic: str) -> bool:
        """Remove a topic with its channels; returns whether it was there."""
        found = self.partitions(topic)
        for hosted in found:
            for name in list(hosted.partition.channels):
                self.on_channel_deleted(topic, hosted.partition.partition, name)
            self.unhost(topic, hosted.partition.partition, destroy=True)
        if found:
            self.on_topic_deleted(topic)
        return bool(found)

    def _channel_deleted(self, hosted: Hosted, name: str) -> None:
        partition = hosted.partition
        self.on_channel_deleted(partition.topic, partition.partition, name)
        if self.options.original and is_ephemeral(partition.topic) and not partition.channels:
            self.delete_topic(partition.topic)

    def internal_id(self, wire_id: bytes) -> int:
        """Return the number behind the 16 hexadecimal characters of the original generation; 0 for other bytes."""
        try:
            return int(wire_id, 16) - self.id_base
        except ValueError:
            return 0

    def _alone_stats(self, topic: str, partition: int) -> dict[str, Any]:
        return {
            "rpc_stats": None,
            "ErrStats": dict.fromkeys(_COORDINATOR_ERRORS, 0) | {"OtherCoordErrs": {}},
            "topic_coord_stats": [
                {
                    "node": "",
                    "name": topic,
                    "partition": partition,
                    "isr_stats": [{"hostname": "", "node_id": self.name}],
                    "catchup_stats": None,
                }
            ],
        }

    def find(self, topic: str, partition: int) -> Hosted | None:
        """Return a partition; with -1 the one that this node takes by default."""
        number = self.default_partition(topic) if partition == -1 else partition
        return None if number is None else self.hosted.get((topic, number))

    def default_partition(self, topic: str) -> int | None:
        """Return the lowest partition of the topic that this node leads, None without one."""
        led = [number for (name, number), found in self.hosted.items() if name == topic and found.leader]
        return min(led, default=None)

    def partitions(self, topic: str) -> list[Hosted]:
        """Return the partitions of a topic that are here, in the order of their numbers."""
        return [found for (name, _), found in sorted(self.hosted.items(), key=lambda item: item[0]) if name == topic]

    def channel(self, hosted: Hosted, name: str) -> Channel:
        """Return a channel, made at the end of the queue when it is not there."""
        partition = hosted.partition
        found = partition.channels.get(name)
        if found is not None:
            return found
        first = not partition.channels
        channel = partition.channel(name)
        if first and self._flushes_late:
            channel.backlog.jump(*hosted.flushed)
        self.on_channel_created(partition.topic, partition.partition, name)
        return channel

    @property
    def _flushes_late(self) -> bool:
        """A redesigned node on its own shows new messages to a topic's first channel only from the last flush on."""
        return not (self.options.clustered or self.options.original)

    def _flush(self, now: float) -> None:
        if now >= self._flush_due:
            self._flush_due = now + self.options.flush_interval
            for hosted in self.hosted.values():
                hosted.flushed = hosted.partition.readable_offset, hosted.partition.readable

    def may_write(self, hosted: Hosted) -> bool:
        """Return whether writes are switched on and this node leads the partition."""
        disabled = self.switches.write_disabled
        return hosted.leader and disabled != "all" and not (disabled == "ordered" and hosted.meta.ordered)

    def add(self, session: Session) -> int:
        """Take a connection in; returns its number."""
        number = next(self._ids)
        self.sessions[number] = session
        return number

    def remove(self, session: Session) -> None:
        """Forget a connection."""
        self.sessions.pop(session.id, None)

    def tick(self) -> None:
        """Let time pass: message timeouts, deferred messages, heartbeats, silent clients, held output."""
        if self.faults.frozen:
            return
        now = self.options.clock()
        for hosted in list(self.hosted.values()):
            hosted.partition.tick()
        if self._flushes_late:
            self._flush(now)
        for session in list(self.sessions.values()):
            session.tick(now)
