"""The HTTP API of nsqlookupd, redesigned generation: operations on nodes and partitions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.lookupd.params import read_log_level, read_ranged
from nsqext.broker.lookupd.registry import NEVER
from nsqext.http.api import Call, Form, HttpFault, route, set_block_rate

if TYPE_CHECKING:
    from starlette.routing import Route

    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.lookupd.lookupd import Lookupd

__all__ = ("AdminApi", "must_lead")

_BASE_LOAD = 0.8
_MEBIBYTE = 1024 * 1024


def must_lead(lookupd: Lookupd, status: int = 400, text: str = "Not nsqlookup leader") -> None:
    """Refuse a request that only the leader of the lookup nodes serves."""
    if not lookupd.is_leader:
        raise HttpFault(status, text)


class AdminApi:
    """The handlers of one lookup node."""

    def __init__(self, lookupd: Lookupd) -> None:
        self.lookupd = lookupd
        self.coordinator: Coordinator = lookupd.coordinator

    def _name(self, node: str) -> str:
        """Return the name of a node that is given by its id or its name."""
        for name, member in self.coordinator.members.items():
            if node in (name, member.distributed_id):
                return name
        return node

    def stats(self, call: Call) -> object:
        """Answer `/cluster/stats`: loads are the bytes in the nodes' queues, beside a constant."""
        must_lead(self.lookupd, text="E_FAILED_ON_NOT_LEADER")
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
            {
                "hostname": member.hostname,
                "broadcast_address": member.tcp.host,
                "tcp_port": member.tcp.port,
                "http_port": member.http.port,
                "leader_load_factor": _load(leads.get(name, 0)),
                "node_load_factor": _load(holds.get(name, 0)),
            }
            for name, member in self.coordinator.members.items()
            if member.alive
        ]
        topn = call.readable_args.get("topn", "")
        wanted = int(topn) if topn.isdecimal() else 0
        most = sorted(topics, key=lambda name: topics[name], reverse=True)[:wanted]
        top = [{"topic": name, "load_factor": _load(topics[name])} for name in most]
        return {"stable": self.coordinator.stable, "node_stat_list": nodes, "topn_topics": top}

    def remove_node(self, call: Call) -> object:
        """Answer `/cluster/node/remove`: move the node's partitions to others, one after the other."""
        node = call.arg("remove_node")
        must_lead(self.lookupd)
        self.coordinator.spawn(admin.remove_node, self.coordinator, self._name(node))
        return None

    def upgrade_begin(self, call: Call) -> object:
        """Answer `/cluster/upgrade/begin`: the cluster counts as unstable until it is done."""
        must_lead(self.lookupd)
        self.coordinator.upgrading = True
        return None

    def upgrade_done(self, call: Call) -> object:
        """Answer `/cluster/upgrade/done`."""
        must_lead(self.lookupd)
        self.coordinator.upgrading = False
        return None

    def balance(self, call: Call) -> object:
        """Answer `/cluster/balance/topn`; without effect: partitions are always placed evenly."""
        len(call.args)  # refuses unreadable arguments
        must_lead(self.lookupd)
        return None

    def hide_lookupd(self, call: Call) -> object:
        """Answer `/cluster/lookupd/tombstone`: hide a node from `/listlookup`, or show it again."""
        node, group = call.arg("node", "MISSING_ARG_NODE"), self.lookupd.group
        if call.arg("restore"):
            if node not in group.hidden:
                raise HttpFault(404, "lookup node id not found")
            group.hidden.discard(node)
        elif any(other.id == node for other in group.nodes):
            group.hidden.add(node)
        else:
            raise HttpFault(404, "lookup node id not found")
        return None

    def log_level(self, call: Call) -> object:
        """Answer `/loglevel/set`; without effect."""
        read_log_level(call)
        return None

    def disable_write(self, call: Call) -> object:
        """Answer `/disable/write`: access=w shows no topics (``all``), or no ordered ones (``ordered``)."""
        kind = call.arg("type")
        self.lookupd.write_disabled = kind if kind in ("all", "ordered") else ""
        return None

    async def move(self, call: Call) -> object:
        """Answer `/topic/partition/move` after the move."""
        topic = call.arg("topic", "MISSING_ARG_TOPIC")
        wanted = call.arg("partition", "MISSING_ARG_TOPIC_PARTITION")
        partition = read_ranged(wanted, 0, 254, "INVALID_ARG_TOPIC_PARTITION_NUM")
        source, target = self._name(call.arg("move_from")), self._name(call.arg("move_to"))
        if not self.coordinator.stable:
            raise HttpFault(400, admin.UNSTABLE)
        leader = call.arg("move_leader") == "true"
        try:
            await admin.move_partition(self.coordinator, topic, partition, source, target, leader=leader)
        except admin.Refused as error:
            raise HttpFault(400, error.text) from error
        return None

    def debug(self, call: Call) -> object:
        """Answer `/debug`: all registrations."""
        view, now = self.lookupd.view, time.time_ns()
        peers = view.peers()
        shown = ("id", "hostname", "broadcast_address", "tcp_port", "http_port", "version")
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
        """Return the routes."""
        return [
            route("GET", "/debug", self.debug, Form.NEGOTIATED),
            route("GET", "/cluster/stats", self.stats),
            route("POST", "/cluster/node/remove", self.remove_node),
            route("POST", "/cluster/upgrade/begin", self.upgrade_begin),
            route("POST", "/cluster/upgrade/done", self.upgrade_done),
            route("POST", "/cluster/lookupd/tombstone", self.hide_lookupd),
            route("POST", "/cluster/balance/topn", self.balance),
            route("POST", "/loglevel/set", self.log_level),
            route("POST", "/disable/write", self.disable_write),
            route("PUT", "/debug/setblockrate", set_block_rate, Form.TEXT),
            route("POST", "/topic/partition/move", self.move),
        ]


def _load(size: int) -> float:
    return _BASE_LOAD + size / _MEBIBYTE
