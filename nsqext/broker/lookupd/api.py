"""The HTTP API of nsqlookupd, redesigned generation: queries and changes of topics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.lookupd.admin_api import AdminApi, must_lead
from nsqext.broker.lookupd.lookup_route import channels_of, lookup
from nsqext.broker.lookupd.metrics import view_metrics
from nsqext.broker.lookupd.params import (
    read_channel,
    read_deletion,
    read_kind,
    read_number,
    read_ranged,
    read_topic,
)
from nsqext.http.api import Call, Form, HttpFault, application, route

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.routing import Route

    from nsqext.broker.lookupd.cluster_view import TopicView
    from nsqext.broker.lookupd.lookupd import Lookupd

__all__ = ("lookupd_app",)


class _Routes:
    """The handlers of one lookup node."""

    def __init__(self, lookupd: Lookupd) -> None:
        self.lookupd = lookupd
        self.coordinator = lookupd.coordinator

    # Queries

    def info(self, call: Call) -> object:
        return {"version": self._version(), "ha_support": True}

    def metrics(self, call: Call) -> object:
        return view_metrics(self.lookupd.view, self._version(), leads=self.lookupd.is_leader)

    def _version(self) -> str:
        return next((member.version for member in self.coordinator.members.values()), "")

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
        infos = []
        for name in names:
            if topic := view.topic(name):
                spec = topic.spec
                infos.append(
                    {
                        "topic_name": name,
                        "extend_support": spec.extend,
                        "ordered": spec.ordered,
                        "multi_part": spec.multi_part,
                        "disable_channel_auto_create": spec.disable_channel_auto_create,
                        "registered_channels": None,
                    }
                )
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
        shown = ("remote_address", "hostname", "broadcast_address", "tcp_port", "http_port", "version")
        producers = []
        for peer in view.peers().values():
            topics = held.get(peer.name, {})
            entry: dict[str, Any] = {key: peer.entry[key] for key in shown}
            entry["tombstones"] = [peer.address in self.lookupd.hidden.get(name, ()) for name in topics]
            producers.append(entry | {"topics": list(topics), "partitions": topics})
        return {"producers": producers}

    # Topics

    def create_topic(self, call: Call) -> object:
        name, spec = read_topic(call)
        must_lead(self.lookupd, 400, "E_FAILED_ON_NOT_LEADER")
        self._do(400, admin.create_topic, name, spec)
        return None

    def _do(self, status: int, action: Callable[..., None], *args: object, **options: object) -> None:
        try:
            action(self.coordinator, *args, **options)
        except admin.Refused as error:
            raise HttpFault(status, error.text) from error

    def delete_topic(self, call: Call) -> object:
        name = read_deletion(call)
        must_lead(self.lookupd, 500)
        if name in self.coordinator.topics or call.arg("force") != "true":
            self._do(500, admin.delete_topic, name)
        self.lookupd.hidden.pop(name, None)
        return None

    def update_topic(self, call: Call) -> object:
        name = call.arg("topic", "MISSING_ARG_TOPIC")
        replicas, sync, days = call.arg("replicator"), call.arg("syncdisk"), call.arg("retention")
        changes: dict[str, Any] = {}
        if replicas:
            changes["replica"] = read_ranged(replicas, 1, 5, "INVALID_ARG_TOPIC_REPLICATOR")
        if sync:
            changes["sync_every"] = _given(read_number(sync, "INVALID_ARG_TOPIC_SYNC_DISK"))
        if days:
            changes["retention_days"] = _given(read_number(days))
        if call.arg("disable_channel_auto_create") in ("true", "false"):
            changes["disable_channel_auto_create"] = call.arg("disable_channel_auto_create") == "true"
        must_lead(self.lookupd)
        self._do(400, admin.update_topic, name, extend=call.arg("upgradeext") == "true", **changes)
        return None

    def expand_topic(self, call: Call) -> object:
        name = call.arg("topic", "MISSING_ARG_TOPIC")
        wanted = call.arg("partition_num", "MISSING_ARG_TOPIC_PARTITION_NUM")
        partitions = read_ranged(wanted, 1, 255, "INVALID_ARG_TOPIC_PARTITION_NUM")
        must_lead(self.lookupd, 500)
        self._do(500, admin.expand_topic, name, partitions)
        return None

    def tombstone(self, call: Call) -> object:
        name, node = call.arg("topic", "MISSING_ARG_TOPIC"), call.arg("node", "MISSING_ARG_NODE")
        if call.arg("restore") == "true":
            self.lookupd.hidden.get(name, set()).discard(node)
        elif node in self._writers(name):
            self.lookupd.hidden.setdefault(name, set()).add(node)
        return None

    def _writers(self, name: str) -> set[str]:
        """Return the addresses of the nodes that lead a partition of a topic."""
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

    def create_channel(self, call: Call) -> object:
        name, channel, registered, closed = self._registered(call)
        kind = read_kind(call)
        if kind is not None:
            must_lead(self.lookupd)
            self._do(400, admin.create_channel, name, channel, kind)
            return None
        if not closed:
            raise HttpFault(400, f"channel auto create NOT disabled in topic {name}")
        if channel in registered:
            raise HttpFault(400, f"channel {channel} already registered")
        must_lead(self.lookupd)
        admin.register_channels(self.coordinator, name, [*registered, channel])
        return None

    def delete_channel(self, call: Call) -> object:
        name, channel, registered, closed = self._registered(call)
        if not closed:
            return None
        if channel not in registered:
            raise HttpFault(400, f"channel {channel} not registered")
        must_lead(self.lookupd)
        admin.register_channels(self.coordinator, name, [other for other in registered if other != channel])
        return None

    def table(self) -> list[Route]:
        """Return the routes."""
        delayed = self.lookupd.delayed
        return [
            route("GET", "/ping", delayed(lambda call: "OK"), Form.TEXT),
            route("GET", "/info", delayed(self.info), Form.NEGOTIATED),
            route("GET", "/listlookup", delayed(self.listlookup), Form.NEGOTIATED),
            route("GET", "/lookup", delayed(self.lookup), Form.NEGOTIATED),
            route("GET", "/topics", delayed(self.topics), Form.NEGOTIATED),
            route("GET", "/channels", delayed(self.channels), Form.NEGOTIATED),
            route("GET", "/nodes", delayed(self.nodes), Form.NEGOTIATED),
            route("GET", "/metrics", delayed(self.metrics)),
            route("POST", "/topic/create", delayed(self.create_topic)),
            route("PUT", "/topic/create", delayed(self.create_topic)),
            route("POST", "/topic/delete", delayed(self.delete_topic)),
            route("POST", "/topic/meta/update", delayed(self.update_topic)),
            route("POST", "/topic/partition/expand", delayed(self.expand_topic)),
            route("POST", "/topic/tombstone", delayed(self.tombstone)),
            route("POST", "/channel/create", delayed(self.create_channel)),
            route("POST", "/channel/delete", delayed(self.delete_channel)),
        ]


def _is_listed(topic: TopicView | None) -> bool:
    """Return whether `/topics` lists a topic: a leader without quorum withdraws it, a dead one does not."""
    partitions = topic.partitions.values() if topic else ()
    return any(found.registered for found in partitions) or not any(found.reader for found in partitions)


def _given(value: int) -> int | None:
    """Return None for a negative number: the setting stays as it is."""
    return value if value >= 0 else None


def lookupd_app(lookupd: Lookupd) -> Starlette:
    """Return the HTTP application of a lookup node."""
    return application([*_Routes(lookupd).table(), *AdminApi(lookupd).table()])
