"""A node without sockets: partitions with roles, connected clients, timers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import count
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from attrs import define, evolve, field, fields_dict

from nsqext.broker.engine.options import NodeOptions, PartitionOptions, QueueOptions
from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.schedule import Schedule, Turn
from nsqext.broker.engine.storage.log import MemoryBudget, Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored, stored_partitions
from nsqext.broker.fault_injection import NodeFaults
from nsqext.errors import InvalidSetting
from nsqext.protocol.names import is_ephemeral
from nsqext.types import TopicMeta

if TYPE_CHECKING:
    import anyio

    from nsqext.broker.engine.channel.channel import Channel
    from nsqext.broker.engine.channel.in_flight import SubscribedClient
    from nsqext.broker.nsqd.auth_server import Authorizations
    from nsqext.protocol.layers import Layer
    from nsqext.protocol.server.command_parser import State
    from nsqext.protocol.server.negotiate import ClientSettings, ServerLimits
    from nsqext.protocol.server.request_error import RequestError

HEALTHY = "OK"
_BUCKETS = 16
_HOUR = 3600 * 1_000_000_000
_DAY = 24
logger: logging.Logger = logging.getLogger("nsqext.broker.nsqd")
SHORTEST_TICK = 0.05
"""Seconds between two ticks of a node with changed deadlines."""
_LONGEST_TICK = 0.25  # seconds between two ticks otherwise, for heartbeats of new connections


@define(eq=False)
class NodePublisher:
    """A client's publishes to a partition."""

    peer: str  #: ``host:port`` of the client
    user_agent: str  #: from its IDENTIFY
    published: int = 0  #: messages
    last: int = 0  #: last publish, in nanoseconds since 1970


@define(eq=False)
class PublishStats:
    """Publishes to a partition."""

    sizes: list[int] = field(factory=lambda: [0] * _BUCKETS)
    #: messages by duration of the publish (below 1 ms, 2 ms, 4 ms, …); a request over HTTP counts once
    durations: list[int] = field(factory=lambda: [0] * _BUCKETS)
    publishers: dict[str, NodePublisher] = field(factory=dict)  #: over TCP, by peer
    _hours: dict[int, int] = field(factory=dict, alias="hours")

    def note(self, sizes: list[int], now: int) -> None:
        """Count messages by body size; ``now`` in nanoseconds since 1970."""
        total = 0
        for size in sizes:
            total += size
            bucket = 0 if size < 100 else min((size >> 10).bit_length() + 1, _BUCKETS - 1)
            self.sizes[bucket] += 1
        hour = now // _HOUR
        self._hours[hour] = self._hours.get(hour, 0) + total
        if len(self._hours) > _DAY:
            del self._hours[min(self._hours)]

    def publisher(self, peer: str, user_agent: str) -> NodePublisher:
        found = self.publishers.get(peer)
        if found is None:
            found = self.publishers[peer] = NodePublisher(peer, user_agent)
        return found

    def hours(self, now: int) -> list[int]:
        """Return published bytes of 22 hours, oldest first, without the two newest."""
        hour = now // _HOUR
        return [self._hours.get(hour - back, 0) for back in range(_DAY - 1, 1, -1)]


@define(eq=False)
class Hosted:
    """A partition on a node, with its role from the coordinator."""

    partition: Partition
    meta: TopicMeta = field(factory=TopicMeta)
    leader: bool = True  #: a follower refuses publishes and consumers
    writable: bool = True  #: the in-sync replicas are a majority
    epoch: int = 0  #: grows with each election
    #: returns when every in-sync replica has the entries; None without other replicas. Raises `RequestError` after a
    #: change of the replicas, `Refusal` for a full disk
    replicate: Callable[[Stored], Awaitable[None]] | None = None
    auto_create_channels: bool = True  #: SUB creates an unknown channel
    waiting: int = 0  #: bytes of publishes waiting for replicas
    #: set when a large batch is stored
    storing: anyio.Event | None = None
    traced: bool = False  #: logs publishes (`/message/trace/enable`)
    failed: int = 0  #: publishes
    flushed: tuple[int, int] = (0, 0)  #: end of the queue at the last flush, offset and messages
    deliveries: dict[str, int] = field(factory=dict)  #: messages per channel (original generation)
    traffic: PublishStats = field(factory=PublishStats)


@define(eq=False)
class Switches:
    """What `/config` changes; see `NodeOptions`."""

    allow_ext_compatible: bool = False
    allow_sub_ext_compatible: bool = False
    max_connections: int = 0  #: 0 without limit
    max_pub_waiting: int = 0
    write_disabled: str = ""  #: ``all``, ``ordered`` or empty (`/disable/write`)
    lookupd_addresses: list[str] = field(factory=list)  #: TCP addresses, original generation
    log_level: int = 2
    verbose: bool = False


class ConnectedClient(Protocol):
    """What its node, its checks and the statistics use of `nsqext.broker.nsqd.session.Session`."""

    id: int
    node: Node
    peer: str
    settings: ClientSettings
    state: State
    authorizations: Authorizations | None
    connected: int
    published: dict[str, NodePublisher]
    ready: int

    @property
    def subscriber(self) -> SubscribedClient | None: ...
    @property
    def common_name(self) -> str: ...
    @property
    def tls_version(self) -> str: ...
    def has_layer(self, kind: type[Layer]) -> bool: ...
    def answer(self, data: bytes) -> None: ...
    def refuse(self, error: RequestError) -> None: ...
    def tick(self, now: float) -> float: ...
    def expire_output(self, now: float) -> float: ...


def _nothing(*_: object) -> None: ...


def _level(channel: str) -> int:
    """Return the log level; ephemeral channels come and go with connections."""
    return logging.DEBUG if is_ephemeral(channel) else logging.INFO


class Node:
    """An nsqd without sockets."""

    def __init__(self, name: str, options: NodeOptions | None = None, faults: NodeFaults | None = None) -> None:
        self.name: str = name
        self.options: NodeOptions = options or NodeOptions()
        self.faults: NodeFaults = faults or NodeFaults()
        self.faults.on_flush = self._flush_all
        limits = self.options.limits
        self.limits: ServerLimits = evolve(limits, snappy=limits.snappy and find_spec("cramjam") is not None)
        self.switches: Switches = Switches(
            self.options.allow_ext_compatible,
            self.options.allow_sub_ext_compatible,
            self.limits.max_connections,
            self.options.max_pub_waiting,
            log_level=2,
        )
        self.place: dict[str, Any] = {}  #: ``rpc_port`` and ``id`` in its cluster
        self.started: int = self.options.wall()  #: nanoseconds since 1970
        self.hosted: dict[tuple[str, int], Hosted] = {}  #: by topic and number
        self.schedule: Schedule = Schedule()
        self.turn: Turn = Turn()
        self.memory: MemoryBudget = MemoryBudget(self.options.node_memory_bound)
        self.sessions: dict[int, ConnectedClient] = {}  #: by number
        self.dirty: list[ConnectedClient] = []  #: clients to send to or to close
        #: called with a topic created by a client's command
        self.on_topic_created: Callable[[str], None] = _nothing
        #: called with topic, partition and channel created by a client's command
        self.on_channel_created: Callable[[str, int, str], None] = _nothing
        #: called with a topic deleted by an HTTP request or its last client
        self.on_topic_deleted: Callable[[str], None] = _nothing
        #: called with topic, partition and deleted channel
        self.on_channel_deleted: Callable[[str, int, str], None] = _nothing
        self.wake: Callable[[], None] = _nothing  #: called when ``dirty`` gets its first entry; set by the server
        #: called with the ``options.machine_clock`` time of the next `expire_output`; set by the server
        self.wake_at: Callable[[float], None] = _nothing
        #: answers ``/coordinator/stats`` for a topic and partition
        self.coordinator_stats: Callable[[str, int], dict[str, Any]] | None = None
        self.exiting: bool = False  #: drains, and refuses publishes
        self.health: str = HEALTHY  #: else ``NOK - `` and why the disk did not take the last message
        self.publish_failed: int = 0
        self._ids = count(1)
        self._holding: dict[int, ConnectedClient] = {}
        self._flush_due = 0.0
        self._session_due = inf

    def host(self, topic: str, partition: int, meta: TopicMeta) -> Hosted:
        """Return a partition, opened or created if not hosted."""
        key = topic, partition
        found = self.hosted.get(key)
        if found is None:
            seed = self.options.seed
            shared = {name: getattr(self.options, name) for name in fields_dict(QueueOptions)} | {"limits": self.limits}
            options = PartitionOptions(
                extend=meta.extend_support,
                ordered=meta.ordered,
                extend_compatible=lambda: self.switches.allow_sub_ext_compatible,
                turn=self.turn,
                random=Random() if seed is None else Random(f"{seed}/{topic}/{partition}"),
                **shared,
            )
            found = Hosted(Partition(topic, partition, options, schedule=self.schedule, budget=self.memory), meta)
            found.auto_create_channels = not meta.disable_channel_auto_create
            found.partition.on_channel_deleted = partial(self._channel_deleted, found)
            self.hosted[key] = found
        return found

    def unhost(self, topic: str, partition: int, *, destroy: bool = False) -> None:
        """Close a partition and disconnect its consumers; ``destroy`` deletes its files."""
        found = self.hosted.pop((topic, partition), None)
        if found is not None:
            found.partition.close(destroy=destroy)
            self.wake()

    def load(self) -> None:
        """Host every partition of the data path, without a coordinator; raises `InvalidSetting`."""
        if self.options.data_path is not None and self.options.data_path.is_dir():
            for state in list(stored_partitions(self.options.data_path)):
                meta = TopicMeta(state.partition + 1, 1, extend_support=state.extend, ordered=state.ordered)
                self.host(state.topic, state.partition, meta)

    def restart(self) -> None:
        """Continue as a restarted process, with the messages in memory."""
        for hosted in list(self.hosted.values()):
            hosted.deliveries.clear()
            hosted.traffic.publishers.clear()
            hosted.partition.restart()
            if self.options.original and is_ephemeral(hosted.partition.topic):
                self.delete_topic(hosted.partition.topic)

    def create_topic(self, topic: str, partition: int = 0, meta: TopicMeta | None = None) -> Hosted:
        """Return a partition, created if unknown; raises `Refusal` for an unusable disk."""
        found = self.hosted.get((topic, partition))
        if found is None:
            try:
                found = self.host(topic, partition, meta or TopicMeta())
            except InvalidSetting as error:
                logger.warning("TOPIC(%s): %s", topic, error)
                raise Refusal(str(error)) from error
            logger.info("TOPIC(%s): created", topic)
            self.on_topic_created(topic)
        return found

    def delete_topic(self, topic: str) -> bool:
        """Delete a topic; return whether it existed."""
        found = self.partitions(topic)
        if found:
            logger.info("TOPIC(%s): deleting", topic)
        for hosted in found:
            for name in list(hosted.partition.channels):
                self.on_channel_deleted(topic, hosted.partition.partition, name)
            self.unhost(topic, hosted.partition.partition, destroy=True)
        if found:
            self.on_topic_deleted(topic)
        return bool(found)

    def _channel_deleted(self, hosted: Hosted, name: str) -> None:
        partition = hosted.partition
        logger.log(_level(name), "CHANNEL(%s): deleting", name)
        self.on_channel_deleted(partition.topic, partition.partition, name)
        hosted.deliveries[name] = 0  # a new channel of this name counts from 0
        if self.options.original and is_ephemeral(partition.topic) and not partition.channels:
            self.delete_topic(partition.topic)

    def find(self, topic: str, partition: int) -> Hosted | None:
        """Return a partition, or None; -1 stands for `default_partition`."""
        number = self.default_partition(topic) if partition == -1 else partition
        return None if number is None else self.hosted.get((topic, number))

    def default_partition(self, topic: str) -> int | None:
        led = [number for (name, number), found in self.hosted.items() if name == topic and found.leader]
        return min(led, default=None)

    def partitions(self, topic: str) -> list[Hosted]:
        return [found for (name, _), found in sorted(self.hosted.items(), key=lambda item: item[0]) if name == topic]

    def channel(self, hosted: Hosted, name: str) -> Channel:
        """Return a channel; create an unknown channel at the end of the queue."""
        partition = hosted.partition
        found = partition.channels.get(name)
        if found is not None:
            return found
        first = not partition.channels
        channel = partition.channel(name)
        if first and self._flushes_late:
            channel.cursor.jump(*hosted.flushed)
        self._channel_created(partition, name)
        return channel

    def add_channels(self, hosted: Hosted, names: Iterable[str]) -> None:
        """Create unknown channels, which get the messages in the topic."""
        partition = hosted.partition
        new = [name for name in names if name not in partition.channels]
        partition.add_channels(new)
        for name in new:
            self._channel_created(partition, name)

    def _channel_created(self, partition: Partition, name: str) -> None:
        logger.log(_level(name), "TOPIC(%s): new channel(%s)", partition.topic, name)
        self.on_channel_created(partition.topic, partition.partition, name)

    @property
    def _flushes_late(self) -> bool:
        """Whether a topic's first channel starts at the last flush (redesigned node without cluster)."""
        return not (self.options.clustered or self.options.original)

    def _flush(self, now: float) -> None:
        if now >= self._flush_due:
            self._flush_due = now + self.options.flush_interval
            for hosted in self.hosted.values():
                hosted.flushed = hosted.partition.readable_offset, hosted.partition.readable

    def _flush_all(self) -> None:
        for hosted in self.hosted.values():
            hosted.partition.flush()

    def put(self, hosted: Hosted, messages: Sequence[NewMessage]) -> Stored:
        """Append messages as `Partition.put`, and note whether the disk takes them."""
        try:
            stored = hosted.partition.put(messages)
        except Refusal as refusal:
            if hosted.partition.is_stored:
                self.health = f"NOK - {refusal.text}"
            raise
        self.health = HEALTHY
        return stored

    def may_write(self, hosted: Hosted) -> bool:
        disabled = self.switches.write_disabled
        return hosted.leader and disabled != "all" and not (disabled == "ordered" and hosted.meta.ordered)

    def add(self, session: ConnectedClient) -> int:
        number = next(self._ids)
        self.sessions[number] = session
        return number

    def remove(self, session: ConnectedClient) -> None:
        self.sessions.pop(session.id, None)
        self._holding.pop(session.id, None)

    def flush_later(self, session: ConnectedClient, due: float) -> None:
        """Send a session's held messages at a time of ``options.machine_clock``."""
        self._holding[session.id] = session
        self.wake_at(due)

    def expire_output(self) -> None:
        if self.faults.frozen:
            return  # `tick` sends them after the thaw
        now = self.options.machine_clock()
        nearest = 0.0
        for session in list(self._holding.values()):
            due = session.expire_output(now)
            if not due:
                self._holding.pop(session.id, None)
            elif not nearest or due < nearest:
                nearest = due
        if nearest:
            self.wake_at(nearest)

    def tick(self) -> None:
        """Run due timers of channels and sessions."""
        if self.faults.frozen:
            return
        now = self.options.clock()
        self.schedule.run(now)
        if self._flushes_late:
            self._flush(now)
        self._session_due = min((session.tick(now) for session in list(self.sessions.values())), default=inf)

    def seconds_to_tick(self) -> float:
        """Return seconds until the next `tick`."""
        if self.faults.frozen:
            return SHORTEST_TICK
        due = min(self.schedule.next_deadline, self._session_due) - self.options.clock()
        return min(max(due, SHORTEST_TICK), _LONGEST_TICK)
