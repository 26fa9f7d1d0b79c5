"""The HTTP API of nsqlookupd, redesigned generation: what is asked, and what operators change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.http_api import Call, Form, Handler, HttpFault, application, route
from nsqext.broker.lookupd.admin_api import NOT_LEADER, AdminApi
from nsqext.broker.lookupd.lookup_route import channels_of, lookup
from nsqext.broker.lookupd.numbers import number, ranged
from nsqext.broker.lookupd.params import read_channel, read_deletion, read_kind, read_topic

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

    # --- questions ------------------------------------------------------------------------------------------------

    def info(self, call: Call) -> object:
        return {"version": self._version(), "ha_support": True}

    def _version(self) -> str:
        return next((member.version for member in self.coordinator.members.values()), "")

    def listlookup(self, call: Call) -> object:
        group = self.lookupd.group
        leader = group.leader or self.lookupd
        return {"lookupdleader": leader.entry(), "lookupdnodes": [node.entry() for node in group.shown()]}

    def lookup(self, call: Call) -> object:
        return lookup(self.lookupd, call)

    def topics(self, call: Call) -> object:
        sight = self.lookupd.sight
        names = [name for name in sight.names() if _is_listed(sight.topic(name))]
        if call.arg("metaInfo") != "true":
            return {"topics": names}
        infos = []
        for name in names:
            if topic := sight.topic(name):
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
        topic = self.lookupd.sight.topic(call.arg("topic", "MISSING_ARG_TOPIC"))
        return {"channels": channels_of(topic, call.arg("partition"))}

    def nodes(self, call: Call) -> object:
        sight = self.lookupd.sight
        held: dict[str, dict[str, list[str]]] = {}
        for name in sight.names():
            topic = sight.topic(name)
            for partition, seen in topic.partitions.items() if topic else ():
                if seen.registered is not None:
                    held.setdefault(seen.registered, {}).setdefault(name, []).append(str(partition))
        shown = ("remote_address", "hostname", "broadcast_address", "tcp_port", "http_port", "version")
        producers = []
        for peer in sight.peers().values():
            topics = held.get(peer.name, {})
            entry: dict[str, Any] = {key: peer.entry[key] for key in shown}
            entry["tombstones"] = [peer.address in self.lookupd.hidden.get(name, ()) for name in topics]
            producers.append(entry | {"topics": list(topics), "partitions": topics})
        return {"producers": producers}

    # --- topics ---------------------------------------------------------------------------------------------------

    def _must_lead(self, status: int = 400, text: str = NOT_LEADER) -> None:
        if not self.lookupd.leads:
            raise HttpFault(status, text)

    def create_topic(self, call: Call) -> object:
        name, spec = read_topic(call)
        self._must_lead(400, "E_FAILED_ON_NOT_LEADER")
        self._do(400, admin.create_topic, name, spec)
        return None

    def _do(self, status: int, action: Callable[..., None], *args: object, **options: object) -> None:
        try:
            action(self.coordinator, *args, **options)
        except admin.Refused as error:
            raise HttpFault(status, error.text) from error

    def delete_topic(self, call: Call) -> object:
        name = read_deletion(call)
        self._must_lead(500)
        if name in self.coordinator.topics or call.arg("force") != "true":
            self._do(500, admin.delete_topic, name)
        self.lookupd.hidden.pop(name, None)
        return None

    def update_topic(self, call: Call) -> object:
        name = call.arg("topic", "MISSING_ARG_TOPIC")
        replicas, sync, days = call.arg("replicator"), call.arg("syncdisk"), call.arg("retention")
        changes: dict[str, Any] = {}
        if replicas:
            changes["replica"] = ranged(replicas, 1, 5, "INVALID_ARG_TOPIC_REPLICATOR")
        if sync:
            changes["sync_every"] = _given(number(sync, "INVALID_ARG_TOPIC_SYNC_DISK"))
        if days:
            changes["retention_days"] = _given(number(days))
        if call.arg("disable_channel_auto_create") in ("true", "false"):
            changes["disable_channel_auto_create"] = call.arg("disable_channel_auto_create") == "true"
        self._must_lead()
        self._do(400, admin.update_topic, name, extend=call.arg("upgradeext") == "true", **changes)
        return None

    def expand_topic(self, call: Call) -> object:
        name = call.arg("topic", "MISSING_ARG_TOPIC")
        wanted = call.arg("partition_num", "MISSING_ARG_TOPIC_PARTITION_NUM")
        partitions = ranged(wanted, 1, 255, "INVALID_ARG_TOPIC_PARTITION_NUM")
        self._must_lead(500)
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
        """Return the addresses of the nodes that take the messages of a topic."""
        topic, peers = self.lookupd.sight.topic(name), self.lookupd.sight.peers()
        registered = [seen.registered for seen in topic.partitions.values()] if topic else []
        return {peers[node].address for node in registered if node is not None and node in peers}

    # --- registered channels --------------------------------------------------------------------------------------

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
            self._must_lead()
            self._do(400, admin.create_channel, name, channel, kind)
            return None
        if not closed:
            raise HttpFault(400, f"channel auto create NOT disabled in topic {name}")
        if channel in registered:
            raise HttpFault(400, f"channel {channel} already registered")
        self._must_lead()
        admin.register_channels(self.coordinator, name, [*registered, channel])
        return None

    def delete_channel(self, call: Call) -> object:
        name, channel, registered, closed = self._registered(call)
        if not closed:
            return None
        if channel not in registered:
            raise HttpFault(400, f"channel {channel} not registered")
        self._must_lead()
        admin.register_channels(self.coordinator, name, [other for other in registered if other != channel])
        return None

    def table(self) -> list[Route]:
        """Return the routes."""
        lazy = self._late
        return [
            route("GET", "/ping", lazy(lambda call: "OK"), Form.TEXT),
            route("GET", "/info", lazy(self.info), Form.NEGOTIATED),
            route("GET", "/listlookup", lazy(self.listlookup), Form.NEGOTIATED),
            route("GET", "/lookup", lazy(self.lookup), Form.NEGOTIATED),
            route("GET", "/topics", lazy(self.topics), Form.NEGOTIATED),
            route("GET", "/channels", lazy(self.channels), Form.NEGOTIATED),
            route("GET", "/nodes", lazy(self.nodes), Form.NEGOTIATED),
            route("POST", "/topic/create", lazy(self.create_topic)),
            route("PUT", "/topic/create", lazy(self.create_topic)),
            route("POST", "/topic/delete", lazy(self.delete_topic)),
            route("POST", "/topic/meta/update", lazy(self.update_topic)),
            route("POST", "/topic/partition/expand", lazy(self.expand_topic)),
            route("POST", "/topic/tombstone", lazy(self.tombstone)),
            route("POST", "/channel/create", lazy(self.create_channel)),
            route("POST", "/channel/delete", lazy(self.delete_channel)),
        ]

    def _late(self, handler: Handler) -> Handler:
        async def answer(call: Call) -> object:
            await self.lookupd.dawdle()
            return handler(call)

        return answer


def _is_listed(topic: TopicView | None) -> bool:
    """Return whether `/topics` shows a topic: a leader that takes no writes takes it back, one that died does not."""
    seen = topic.partitions.values() if topic else ()
    return any(found.registered for found in seen) or not any(found.reader for found in seen)


def _given(value: int) -> int | None:
    """A negative number means that nothing is to be changed."""
    return value if value >= 0 else None


def lookupd_app(lookupd: Lookupd) -> Starlette:
    """Return the HTTP application of a lookup node."""
    return application([*_Routes(lookupd).table(), *AdminApi(lookupd).table()])
