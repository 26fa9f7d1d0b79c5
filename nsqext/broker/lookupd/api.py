"""The HTTP API of the redesigned nsqlookupd."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.lookupd.lookupd import (
    BAD_REPLICATOR,
    BAD_SYNC,
    LiveView,
    Lookupd,
    TopicView,
    channels_of,
    check_log_level,
    lookup,
    read_channel,
    read_deletion,
    read_kind,
    read_partition_num,
    read_ranged,
    read_topic,
    view_metrics,
)
from nsqext.broker.lookupd.registry import NEVER, NODE_MEMBERS
from nsqext.http.api import Call, Form, Handler, HttpFault, application, route

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

_BASE_LOAD = 0.8
_MEBIBYTE = 1024 * 1024


class _RedesignedRoutes:
    def __init__(self, lookupd: Lookupd) -> None:
        self.lookupd = lookupd
        self.coordinator = lookupd.coordinator

    # Queries

    def info(self, call: Call) -> object:
        return {"version": self._version(), "ha_support": True}

    def metrics(self, call: Call) -> object:
        return view_metrics(self.lookupd.view, self._version(), leads=self.lookupd.is_leader)

    def _version(self) -> str:
        return next((member.node.limits.version for member in self.coordinator.members.values()), "")

    def listlookup(self, call: Call) -> object:
        group = self.lookupd.group
        leader = group.leader or self.lookupd
        return {"lookupdleader": leader.entry(), "lookupdnodes": [node.entry() for node in group.shown()]}

    def lookup(self, call: Call) -> object:
        return lookup(self.lookupd, call)

    def topics(self, call: Call) -> object:
        view = self.lookupd.view
        names = [name for name in view.names() if _is_listed(view.topic(name))]
        if call.arg("metaInfo") != "true":
            return {"topics": names}
        infos = [
            {
                "topic_name": name,
                "extend_support": topic.spec.extend,
                "ordered": topic.spec.ordered,
                "multi_part": topic.spec.multi_part,
                "disable_channel_auto_create": topic.spec.disable_channel_auto_create,
                "registered_channels": None,
            }
            for name in names
            if (topic := view.topic(name))
        ]
        return {"meta_info": infos or None, "topics": names}

    def channels(self, call: Call) -> object:
        topic = self.lookupd.view.topic(call.arg("topic", "MISSING_ARG_TOPIC"))
        return {"channels": channels_of(topic, call.arg("partition"))}

    def nodes(self, call: Call) -> object:
        view = self.lookupd.view
        held: dict[str, dict[str, list[str]]] = {}
        for name in view.names():
            topic = view.topic(name)
            for partition, found in topic.partitions.items() if topic else ():
                if found.registered is not None:
                    held.setdefault(found.registered, {}).setdefault(name, []).append(str(partition))
        producers = []
        for peer in view.peers().values():
            topics = held.get(peer.name, {})
            entry: dict[str, Any] = {key: peer.entry[key] for key in NODE_MEMBERS}
            entry["tombstones"] = [peer.address in self.lookupd.hidden.get(name, ()) for name in topics]
            producers.append(entry | {"topics": list(topics), "partitions": topics})
        return {"producers": producers}

    # Topics

    def _must_lead(self, status: int = 400, text: str = "Not nsqlookup leader") -> None:
        if not self.lookupd.is_leader:
            raise HttpFault(status, text)

    def create_topic(self, call: Call) -> None:
        name, spec = read_topic(call)
        self._must_lead(400, "E_FAILED_ON_NOT_LEADER")
        self._do(400, admin.create_topic, name, spec)

    def _do(self, status: int, action: Callable[..., None], *args: object, **options: object) -> None:
        try:
            action(self.coordinator, *args, **options)
        except Refusal as error:
            raise HttpFault(status, error.text) from error

    def delete_topic(self, call: Call) -> None:
        name = read_deletion(call)
        self._must_lead(500)
        if name in self.coordinator.topics or call.arg("force") != "true":
            self._do(500, admin.delete_topic, name)
        self.lookupd.hidden.pop(name, None)

    def update_topic(self, call: Call) -> None:
        name = call.arg("topic", "MISSING_ARG_TOPIC")
        changes: dict[str, Any] = {}
        if call.arg("replicator"):
            changes["replica"] = read_ranged(call, "replicator", 1, 5, BAD_REPLICATOR)
        # negative: the setting stays
        if (sync := call.number("syncdisk", BAD_SYNC, default="-1")) >= 0:
            changes["sync_every"] = sync
        if (days := call.number("retention", default="-1")) >= 0:
            changes["retention_days"] = days
        if call.arg("disable_channel_auto_create") in ("true", "false"):
            changes["disable_channel_auto_create"] = call.arg("disable_channel_auto_create") == "true"
        self._must_lead()
        self._do(400, admin.update_topic, name, extend=call.arg("upgradeext") == "true", **changes)

    def expand_topic(self, call: Call) -> None:
        name = call.arg("topic", "MISSING_ARG_TOPIC")
        partitions = read_partition_num(call)
        self._must_lead(500)
        self._do(500, admin.expand_topic, name, partitions)

    def tombstone(self, call: Call) -> None:
        name, node = call.arg("topic", "MISSING_ARG_TOPIC"), call.arg("node", "MISSING_ARG_NODE")
        if call.arg("restore") == "true":
            self.lookupd.hidden.get(name, set()).discard(node)
        elif node in self._writers(name):
            self.lookupd.hidden.setdefault(name, set()).add(node)

    def _writers(self, name: str) -> set[str]:
        """Return the addresses of a topic's leaders."""
        topic, peers = self.lookupd.view.topic(name), self.lookupd.view.peers()
        registered = [found.registered for found in topic.partitions.values()] if topic else []
        return {peers[node].address for node in registered if node is not None and node in peers}

    # Registered channels

    def _registered(self, call: Call) -> tuple[str, str, list[str], bool]:
        name, channel = read_channel(call)
        topic = self.coordinator.topics.get(name)
        if topic is None:
            raise HttpFault(400, admin.KEY_NOT_FOUND)
        return name, channel, topic.registered, topic.spec.disable_channel_auto_create

    def create_channel(self, call: Call) -> None:
        name, channel, registered, closed = self._registered(call)
        kind = read_kind(call)
        if kind is not None:
            self._must_lead()
            self._do(400, admin.create_channel, name, channel, kind)
            return
        if not closed:
            raise HttpFault(400, f"channel auto create NOT disabled in topic {name}")
        if channel in registered:
            raise HttpFault(400, f"channel {channel} already registered")
        self._must_lead()
        admin.register_channels(self.coordinator, name, [*registered, channel])

    def delete_channel(self, call: Call) -> None:
        name, channel, registered, closed = self._registered(call)
        if not closed:
            return
        if channel not in registered:
            raise HttpFault(400, f"channel {channel} not registered")
        self._must_lead()
        admin.register_channels(self.coordinator, name, [other for other in registered if other != channel])

    # Nodes and partitions

    def _name(self, node: str) -> str:
        for name, member in self.coordinator.members.items():
            if node in (name, member.distributed_id):
                return name
        return node

    def stats(self, call: Call) -> object:
        """Answer `/cluster/stats`: a load is a constant plus the bytes in a node's queues."""
        self._must_lead(text="E_FAILED_ON_NOT_LEADER")
        leads: dict[str, int] = {}
        holds: dict[str, int] = {}
        topics: dict[str, int] = {}
        for replicas in self.coordinator.replica_sets.values():
            for name, hosted in replicas.hosts.items():
                size = hosted.partition.log.end_offset - hosted.partition.log.start_offset
                holds[name] = holds.get(name, 0) + size
                if name == replicas.state.leader:
                    leads[name] = leads.get(name, 0) + size
                    topics[replicas.topic] = topics.get(replicas.topic, 0) + size
        nodes = [
            {key: peer.entry[key] for key in ("hostname", "broadcast_address", "tcp_port", "http_port")}
            | {"leader_load_factor": _load(leads.get(name, 0)), "node_load_factor": _load(holds.get(name, 0))}
            for name, peer in LiveView(self.coordinator).peers().items()
        ]
        topn = call.readable_args.get("topn", "")
        wanted = int(topn) if topn.isdecimal() else 0
        most = sorted(topics, key=lambda name: topics[name], reverse=True)[:wanted]
        top = [{"topic": name, "load_factor": _load(topics[name])} for name in most]
        return {"stable": self.coordinator.stable, "node_stat_list": nodes, "topn_topics": top}

    def remove_node(self, call: Call) -> None:
        """Answer `/cluster/node/remove`: start to move the node's partitions."""
        node = call.arg("remove_node")
        self._must_lead()
        self.coordinator.spawn(admin.remove_node, self.coordinator, self._name(node))

    def upgrade(self, upgrading: bool, call: Call) -> None:
        """Answer `/cluster/upgrade/begin` and `/done`; between them the cluster is unstable."""
        self._must_lead()
        self.coordinator.upgrading = upgrading

    def hide_lookupd(self, call: Call) -> None:
        """Answer `/cluster/lookupd/tombstone`: hide a node from `/listlookup`, or show it again."""
        node, group = call.arg("node", "MISSING_ARG_NODE"), self.lookupd.group
        restored = bool(call.arg("restore"))
        if node not in (group.hidden if restored else {other.id for other in group.nodes}):
            raise HttpFault(404, "lookup node id not found")
        (group.hidden.discard if restored else group.hidden.add)(node)

    def disable_write(self, call: Call) -> None:
        """Answer `/disable/write`: access=w shows no topics (``all``) or no ordered topics (``ordered``)."""
        kind = call.arg("type")
        self.lookupd.write_disabled = kind if kind in ("all", "ordered") else ""

    async def move(self, call: Call) -> None:
        topic = call.arg("topic", "MISSING_ARG_TOPIC")
        fault, missing = "INVALID_ARG_TOPIC_PARTITION_NUM", "MISSING_ARG_TOPIC_PARTITION"
        partition = read_ranged(call, "partition", 0, 254, fault, missing=missing)
        source, target = self._name(call.arg("move_from")), self._name(call.arg("move_to"))
        if not self.coordinator.stable:
            raise HttpFault(400, admin.UNSTABLE)
        leader = call.arg("move_leader") == "true"
        try:
            await admin.move_partition(self.coordinator, topic, partition, source, target, leader=leader)
        except Refusal as error:
            raise HttpFault(400, error.text) from error

    def debug(self, call: Call) -> object:
        view, now = self.lookupd.view, time.time_ns()
        peers = view.peers()
        shown = ("id", *NODE_MEMBERS[1:])
        found: dict[str, list[dict[str, Any]]] = {}
        for name in view.names():
            topic = view.topic(name)
            for partition, led in topic.partitions.items() if topic else ():
                if led.registered is None or led.registered not in peers:
                    continue
                peer = peers[led.registered]
                entry = {"partitionID": str(partition)} | {key: peer.entry[key] for key in shown}
                entry |= {"last_update": now, "tombstoned_at": NEVER}
                entry["tombstoned"] = peer.address in self.lookupd.hidden.get(name, ())
                found.setdefault(f"topic:{name}", []).append(entry)
                found[f"channel:{name}:{partition}"] = [
                    {"partitionID": str(partition), "channelName": channel, "peerId": peer.entry["id"]}
                    for channel in led.channels
                ]
        for peer in peers.values():
            found[f"peerInfo:{peer.entry['id']}"] = [{key: peer.entry[key] for key in shown} | {"last_update": now}]
        return {key: entries for key, entries in found.items() if entries}

    def table(self) -> list[Route]:
        v1, negotiated = Form.V1, Form.NEGOTIATED
        table: list[tuple[str, str, Handler, Form]] = [
            ("GET", "/ping", lambda call: "OK", Form.TEXT),
            ("GET", "/info", self.info, negotiated),
            ("GET", "/listlookup", self.listlookup, negotiated),
            ("GET", "/lookup", self.lookup, negotiated),
            ("GET", "/topics", self.topics, negotiated),
            ("GET", "/channels", self.channels, negotiated),
            ("GET", "/nodes", self.nodes, negotiated),
            ("GET", "/debug", self.debug, negotiated),
            ("GET", "/metrics", self.metrics, v1),
            ("POST", "/topic/create", self.create_topic, v1),
            ("PUT", "/topic/create", self.create_topic, v1),
            ("POST", "/topic/delete", self.delete_topic, v1),
            ("POST", "/topic/meta/update", self.update_topic, v1),
            ("POST", "/topic/partition/expand", self.expand_topic, v1),
            ("POST", "/topic/partition/move", self.move, v1),
            ("POST", "/topic/tombstone", self.tombstone, v1),
            ("POST", "/channel/create", self.create_channel, v1),
            ("POST", "/channel/delete", self.delete_channel, v1),
            ("GET", "/cluster/stats", self.stats, v1),
            ("POST", "/cluster/node/remove", self.remove_node, v1),
            ("POST", "/cluster/upgrade/begin", partial(self.upgrade, True), v1),
            ("POST", "/cluster/upgrade/done", partial(self.upgrade, False), v1),
            ("POST", "/cluster/lookupd/tombstone", self.hide_lookupd, v1),
            ("POST", "/loglevel/set", check_log_level, v1),
            ("POST", "/disable/write", self.disable_write, v1),
        ]
        return [route(method, path, self.lookupd.delayed(handler), form) for method, path, handler, form in table]


def _is_listed(topic: TopicView | None) -> bool:
    """Return whether `/topics` lists a topic, which a leader without quorum withdraws, a dead leader not."""
    partitions = topic.partitions.values() if topic else ()
    return any(found.registered for found in partitions) or not any(found.reader for found in partitions)


def _load(size: int) -> float:
    return _BASE_LOAD + size / _MEBIBYTE


def lookupd_app(lookupd: Lookupd) -> Starlette:
    """Return the HTTP application of a lookup node."""
    return application(_RedesignedRoutes(lookupd).table())
