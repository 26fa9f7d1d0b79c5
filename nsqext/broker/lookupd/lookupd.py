"""Lookup nodes without sockets, and what they show: the cluster's present state, a snapshot, or nothing.

Query parameters are checked in the real server's order, and refused with its texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import anyio
from attrs import Factory, asdict, define, field, frozen
from starlette.responses import Response

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator.admin_ops import KEY_NOT_FOUND
from nsqext.broker.coordinator.topics import ClusterMember, TopicSpec
from nsqext.broker.engine.options import ChannelKind, make_kind
from nsqext.broker.engine.storage.log import Refusal
from nsqext.http.api import METRICS_TYPE, Call, Handler, HttpFault, Metric, render_metrics, valid_channel, valid_topic
from nsqext.protocol.server.go_format import parse_int
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.lookupd.registry import Registry

_UNKNOWN = Address("127.0.0.1", 0)


@frozen
class ListedPartition:
    """A partition."""

    registered: str | None  #: the node for producers, a leader that accepts writes
    reader: str | None  #: the node for consumers
    channels: tuple[str, ...]  #: empty while the leader accepts no writes


@frozen
class TopicView:
    """A topic."""

    name: str
    spec: TopicSpec
    partitions: Mapping[int, ListedPartition] = field(factory=dict)


class LiveView:
    """The present state of the cluster."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def peers(self) -> Mapping[str, ClusterMember]:
        return {name: member for name, member in self.coordinator.members.items() if member.alive}

    def names(self) -> list[str]:
        return list(self.coordinator.topics)

    def topic(self, name: str) -> TopicView | None:
        topic = self.coordinator.topics.get(name)
        if topic is None:
            return None
        partitions = {number: self._partition(name, number) for number in topic.partitions}
        return TopicView(name, topic.spec, partitions)

    def _partition(self, topic: str, number: int) -> ListedPartition:
        replicas = self.coordinator.replica_sets[topic, number]
        leader = replicas.state.leader
        if not self.coordinator.members[leader].alive:
            return ListedPartition(None, None, ())
        if not self.coordinator.writable(replicas):  # its leader withdraws its registrations, with channels
            return ListedPartition(None, leader, ())
        return ListedPartition(leader, leader, tuple(replicas.leader.channels))


class ClusterSnapshot:
    """A copy of a view, or an empty view."""

    def __init__(self, view: ClusterView | None = None) -> None:
        self._peers = dict(view.peers()) if view else {}
        self._topics: dict[str, TopicView | None] = {name: view.topic(name) for name in view.names()} if view else {}

    def peers(self) -> Mapping[str, ClusterMember]:
        return self._peers

    def names(self) -> list[str]:
        return list(self._topics)

    def topic(self, name: str) -> TopicView | None:
        return self._topics.get(name)

    def put(self, topic: TopicView) -> None:
        self._topics[topic.name] = topic


ClusterView = LiveView | ClusterSnapshot


@define(eq=False, kw_only=True)
class LookupServer(ABC):
    """A lookup node without sockets."""

    name: str = "nsqlookupd"  #: for example ``l1`` in a cluster
    tcp: Address = _UNKNOWN
    http: Address = _UNKNOWN
    delay: float = 0.0  #: seconds before each response
    shown: str | None = None  #: ``empty`` or ``stale`` during such a fault
    alive: bool = True

    def pending(self) -> list[str]:
        """Return the faults in effect as texts."""
        slow = f"each response after {self.delay:g} s" if self.delay else None
        return [fault for fault in (self.shown, slow) if fault]

    @abstractmethod
    def show_current(self) -> None:
        """Show the present state, without delay."""

    @abstractmethod
    def show_nothing(self) -> None: ...

    @abstractmethod
    def show_snapshot(self) -> None: ...

    def delayed(self, handler: Handler) -> Handler:
        """Return a handler that responds after `delay`."""

        async def respond(call: Call) -> object:
            if self.delay:
                await anyio.sleep(self.delay)
            value = handler(call)
            return await value if isawaitable(value) else value

        return respond


@define(eq=False)
class Lookupd(LookupServer):
    """A lookup node."""

    coordinator: Coordinator
    group: LookupdGroup
    view: ClusterView = field(init=False, default=Factory(lambda self: LiveView(self.coordinator), takes_self=True))
    #: tombstones, by topic ``host:http_port`` of nodes that access=w does not show
    hidden: dict[str, set[str]] = field(factory=dict, init=False)
    write_disabled: str = field(default="", init=False)  #: ``all``, ``ordered`` or empty (`/disable/write`)

    @property
    def is_leader(self) -> bool:
        """Whether it may change topics."""
        return self.group.leader is self

    @property
    def id(self) -> str:
        return f"{self.tcp.host}:{self.http.port}:{self.tcp.port}:nsqlookup"

    def entry(self) -> dict[str, Any]:
        """Return its entry in `/listlookup` (captured: lookupd_basic)."""
        return {
            "ID": self.id,
            "NodeIP": self.tcp.host,
            "TcpPort": str(self.tcp.port),
            "HttpPort": str(self.http.port),
            "RpcPort": str(self.http.port),
            "Epoch": self.group.epoch if self.is_leader else 0,
        }

    def show_current(self) -> None:
        self.view, self.shown = LiveView(self.coordinator), None
        self.delay: float = 0.0

    def show_nothing(self) -> None:
        self.view, self.shown = ClusterSnapshot(), "empty"

    def show_snapshot(self) -> None:
        self.view, self.shown = ClusterSnapshot(LiveView(self.coordinator)), "stale"


@define(eq=False)
class LookupdGroup:
    """Lookup nodes of a cluster."""

    nodes: list[Lookupd] = field(factory=list)
    hidden: set[str] = field(factory=set)  #: ids that `/listlookup` hides (`/cluster/lookupd/tombstone`)
    epoch: int = 0  #: grows with each election
    leader: Lookupd | None = None

    def elect(self) -> None:
        """Elect the first live node, unless the leader is alive."""
        if self.leader is not None and self.leader.alive:
            return
        before = self.leader
        self.leader = next((node for node in self.nodes if node.alive), None)
        if before is not None and self.leader is not None:
            self.epoch += 1

    def shown(self) -> list[Lookupd]:
        return [node for node in self.nodes if node.alive and node.id not in self.hidden]


BAD_REPLICATOR = "INVALID_ARG_TOPIC_REPLICATOR"
BAD_SYNC = "INVALID_ARG_TOPIC_SYNC_DISK"
NO_CHANNEL = "Topic has no channel, should init at least one for the new topic"


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
    """Return name and specification of a topic to create."""
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
    """Return the name of a topic to delete."""
    name = call.arg("topic", "MISSING_ARG_TOPIC")
    if call.arg("partition", "MISSING_ARG_TOPIC_PARTITION") != "**":
        raise HttpFault(400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
    return name


def read_channel(call: Call) -> tuple[str, str]:
    """Return the names of a topic and a channel."""
    topic = valid_topic(call.arg("topic", "MISSING_ARG_TOPIC"))
    return topic, valid_channel(call.arg("channel", "MISSING_ARG_CHANNEL"))


def read_kind(call: Call) -> ChannelKind | None:
    """Return the type of a new channel, None for the real server's only type."""
    try:
        return make_kind(call.arg("dispatch"), call.arg("key_header"), fixed=True)
    except Refusal as refusal:
        raise HttpFault(400, refusal.text) from None


def check_log_level(call: Call) -> None:
    """Answer `/loglevel/set`; without effect."""
    call.number("loglevel", "BAD_LEVEL_STRING", missing="MISSING_ARG_LEVEL")


def meta_of(spec: TopicSpec) -> dict[str, Any]:
    """Return the member ``meta`` of a response."""
    return dict(sorted(asdict(spec.meta()).items()))


_NO_META = meta_of(TopicSpec(partition_num=0, replica=0))


def _selected(topic: TopicView | None, partition: str) -> list[int]:
    if topic is None:
        return []
    return [number for number in topic.partitions if partition in ("", "*", str(number))]


def channels_of(topic: TopicView | None, partition: str) -> list[str]:
    """Return the channels of a topic or a partition."""
    if topic is None:
        return []
    found = [name for number in _selected(topic, partition) for name in topic.partitions[number].channels]
    return list(dict.fromkeys(found))


def _for_consumers(lookupd: Lookupd, topic: TopicView | None, partition: str) -> dict[str, str]:
    if topic is None:
        return {}
    labels = {str(number): number for number in _selected(topic, partition)} or _unusual_spelling(topic, partition)
    readers = {label: topic.partitions[number].reader for label, number in labels.items()}
    return {label: reader for label, reader in readers.items() if reader is not None}


def _unusual_spelling(topic: TopicView, partition: str) -> dict[str, int]:
    """Return a partition under the consumer's spelling (``00``)."""
    try:
        number = parse_int(partition)
    except ValueError:
        return {}
    return {partition: number} if number in topic.partitions else {}


def _for_producers(lookupd: Lookupd, topic: TopicView | None, partition: str) -> dict[str, str]:
    if topic is None:
        raise HttpFault(404, KEY_NOT_FOUND)
    hidden, peers = lookupd.hidden.get(topic.name, set()), lookupd.view.peers()
    nodes: dict[str, str] = {}
    without_channel = False
    for number in _selected(topic, partition):
        node = topic.partitions[number].registered
        if node is None or node not in peers or peers[node].address in hidden:
            continue
        if topic.partitions[number].channels:
            nodes[str(number)] = node
        else:
            without_channel = True
    if without_channel and not nodes:
        raise HttpFault(404, NO_CHANNEL)
    return nodes


def lookup(lookupd: Lookupd, call: Call) -> dict[str, Any]:
    """Answer `/lookup` (captured: lookup_ok, lookup_no_channel, topic_tombstone).

    access=w shows only partitions that accept writes and have a channel.
    """
    topic = lookupd.view.topic(call.arg("topic", "MISSING_ARG_TOPIC"))
    partition, access, meta = call.arg("partition"), call.arg("access") or "r", call.arg("metainfo")
    if access not in ("r", "w"):
        raise HttpFault(400, "INVALID_ACCESS_MODE")
    find = _for_producers if access == "w" else _for_consumers
    nodes = find(lookupd, topic, partition)
    peers = lookupd.view.peers()
    entries = {label: peers[node].entry for label, node in nodes.items() if node in peers}
    answer: dict[str, Any] = {"channels": channels_of(topic, partition)}
    disabled = lookupd.write_disabled if access == "w" else ""
    if meta or disabled == "ordered":
        answer["meta"] = meta_of(topic.spec) if topic else _NO_META
    if disabled == "all" or (disabled == "ordered" and topic and topic.spec.ordered):
        return answer | {"partitions": None, "producers": None}
    by_id = {entry["id"]: entry for entry in entries.values()}
    return answer | {"partitions": entries, "producers": list(by_id.values())}


def view_metrics(view: ClusterView, version: str, *, leads: bool) -> Response:
    """Return `/metrics` of a redesigned cluster, which the real server lacks."""
    topics = {name: topic for name in view.names() if (topic := view.topic(name)) is not None}
    partitions = {name: topic.partitions.values() for name, topic in topics.items()}
    channels = {name: {each for one in found for each in one.channels} for name, found in partitions.items()}
    led = {name: sum(one.registered is not None for one in found) for name, found in partitions.items()}
    return _page(
        _info(version, "redesigned"),
        _one("leader", "1 on the leader of the lookup nodes.", int(leads)),
        _one("nsqd", "Connected nsqd.", len(view.peers())),
        _one("topics", "Topics.", len(topics)),
        _each("partitions", "Partitions of a topic.", {name: one.spec.partition_num for name, one in topics.items()}),
        _each("partitions_led", "Partitions with a leader that accepts publishes.", led),
        _each("channels", "Channels of a topic.", {name: len(found) for name, found in channels.items()}),
    )


def registry_metrics(view: Registry, version: str, generation: str) -> Response:
    """Return `/metrics` of registrations, which the real servers lack."""
    topics = sorted({one.key for one in view.find("topic", "*")})
    shown = {name: [one for one in view.producers("topic", name) if view.is_active(one)] for name in topics}
    hidden = {name: sum(map(view.is_hidden, producers)) for name, producers in shown.items()}
    return _page(
        _info(version, generation),
        _one("nsqd", "Connected nsqd.", sum(view.is_active(one) for one in view.producers("client"))),
        _one("topics", "Topics.", len(topics)),
        _each("producers", "Nsqd that have a topic.", {name: len(producers) for name, producers in shown.items()}),
        _each("tombstones", "Nsqd that are hidden for a topic.", hidden),
        _each("channels", "Channels of a topic.", {name: len(view.find("channel", name, "*")) for name in topics}),
    )


def _page(*metrics: Metric) -> Response:
    return Response(render_metrics(metrics), media_type=METRICS_TYPE)


def _info(version: str, generation: str) -> Metric:
    labels = {"version": version, "generation": generation}
    return Metric("nsqlookupd_info", "gauge", "Version of the server.", [(labels, 1)])


def _one(name: str, text: str, value: int) -> Metric:
    return Metric(f"nsqlookupd_{name}", "gauge", text, [({}, value)])


def _each(name: str, text: str, values: dict[str, int]) -> Metric:
    samples = [({"topic": topic}, value) for topic, value in values.items()]
    return Metric(f"nsqlookupd_topic_{name}", "gauge", text, samples)
