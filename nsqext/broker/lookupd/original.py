"""nsqlookupd without a cluster, of both generations: its HTTP API."""

from __future__ import annotations

import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, field

from nsqext.broker.lookupd.lookupd import (
    NO_CHANNEL,
    LookupServer,
    check_log_level,
    read_channel,
    read_deletion,
    read_topic,
    registry_metrics,
)
from nsqext.broker.lookupd.registry import NEVER, NODE_MEMBERS, ListedProducer, LookupSession, Registration, Registry
from nsqext.http.api import Call, Form, Handler, HttpFault, application, route, valid_channel, valid_topic
from nsqext.protocol.lookupd_tcp import PeerInfo

if TYPE_CHECKING:
    from starlette.applications import Starlette

_NO_TOPIC = "MISSING_ARG_TOPIC"


@define(eq=False)
class OriginalLookupd(LookupServer):
    """A lookup node where nsqd register over TCP: original, or redesigned without a cluster."""

    registry: Registry
    version: str
    broadcast_address: str = "127.0.0.1"  #: its host in the response to IDENTIFY
    #: another registry during a fault
    view: Registry = field(init=False, default=Factory(lambda self: self.registry, takes_self=True))

    def session(self, remote: str, *, partitions: bool = False) -> LookupSession:
        own = PeerInfo(self.broadcast_address, self.tcp.port, self.http.port, self.version, socket.gethostname())
        return LookupSession(self.registry, remote, own, partitions)

    def clear(self) -> None:
        self.registry = self.view = self.registry.empty()
        self.shown: str | None = None

    def show_current(self) -> None:
        self.view, self.shown = self.registry, None
        self.delay: float = 0.0

    def show_nothing(self) -> None:
        self.view, self.shown = self.registry.empty(), "empty"

    def show_snapshot(self) -> None:
        self.view, self.shown = self.registry.snapshot(), "stale"


def _topic_and_channel(call: Call) -> tuple[str, str]:
    topic = valid_topic(call.given("topic", _NO_TOPIC))
    return topic, valid_channel(call.given("channel", "MISSING_ARG_CHANNEL"))


@define(eq=False)
class _OriginalRoutes:
    lookupd: OriginalLookupd

    def info(self, call: Call) -> object:
        return {"version": self.lookupd.version}

    def metrics(self, call: Call) -> object:
        version = self.lookupd.version
        return registry_metrics(self.lookupd.view, version, "redesigned" if "HA" in version else "original")

    def topics(self, call: Call) -> object:
        return {"topics": [found.key for found in self.lookupd.view.find("topic", "*")]}

    def channels(self, call: Call) -> object:
        topic = call.given("topic", _NO_TOPIC)
        return {"channels": [found.subkey for found in self.lookupd.view.find("channel", topic, "*")]}

    def lookup(self, call: Call) -> object:
        topic, view = call.given("topic", _NO_TOPIC), self.lookupd.view
        if not view.find("topic", topic):
            raise HttpFault(404, "TOPIC_NOT_FOUND")
        shown = [found for found in view.producers("topic", topic) if view.is_active(found)]
        return {
            "channels": [found.subkey for found in view.find("channel", topic, "*")],
            "producers": [found.node.members for found in shown if not view.is_hidden(found)],
        }

    def nodes(self, call: Call) -> object:
        view = self.lookupd.view
        producers = []
        for found in view.producers("client"):
            if view.is_active(found):
                topics = view.topics_of(found.node)
                entry = dict(found.node.members)
                entry["tombstones"] = [view.is_hidden(producer) for _, producer in topics]
                producers.append(entry | {"topics": [topic for topic, _ in topics]})
        return {"producers": producers}

    def create_topic(self, call: Call) -> None:
        self.lookupd.registry.add(Registration("topic", valid_topic(call.given("topic", _NO_TOPIC))))

    def delete_topic(self, call: Call) -> None:
        topic, registry = call.given("topic", _NO_TOPIC), self.lookupd.registry
        for found in [*registry.find("channel", topic, "*"), *registry.find("topic", topic)]:
            registry.remove(found)

    def create_channel(self, call: Call) -> None:
        topic, channel = _topic_and_channel(call)
        self.lookupd.registry.add(Registration("channel", topic, channel))
        self.lookupd.registry.add(Registration("topic", topic))

    def delete_channel(self, call: Call) -> None:
        topic, channel = _topic_and_channel(call)
        found = self.lookupd.registry.find("channel", topic, channel)
        if not found:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        for registration in found:
            self.lookupd.registry.remove(registration)

    def tombstone(self, call: Call) -> None:
        topic = call.given("topic", _NO_TOPIC)
        self.lookupd.registry.hide(topic, call.given("node", "MISSING_ARG_NODE"))

    def debug(self, call: Call) -> object:
        data: dict[str, list[dict[str, Any]]] = {}
        for registration, producers in self.lookupd.view:
            entries = [
                {
                    "id": found.node.id,
                    **{key: value for key, value in found.node.members.items() if key != "remote_address"},
                    "last_update": found.node.last_seen,
                    "tombstoned": found.hidden_at is not None,
                    "tombstoned_at": NEVER if found.hidden_at is None else found.hidden_at,
                }
                for found in producers
            ]
            if entries:
                data[":".join(registration)] = [dict(sorted(entry.items())) for entry in entries]
        return dict(sorted(data.items()))


def original_app(lookupd: OriginalLookupd) -> Starlette:
    """Return the HTTP application of a lookup node."""
    routes = _OriginalRoutes(lookupd)
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/info", routes.info),
        ("GET", "/debug", routes.debug),
        ("GET", "/lookup", routes.lookup),
        ("GET", "/topics", routes.topics),
        ("GET", "/channels", routes.channels),
        ("GET", "/nodes", routes.nodes),
        ("GET", "/metrics", routes.metrics),
        ("POST", "/topic/create", routes.create_topic),
        ("POST", "/topic/delete", routes.delete_topic),
        ("POST", "/channel/create", routes.create_channel),
        ("POST", "/channel/delete", routes.delete_channel),
        ("POST", "/topic/tombstone", routes.tombstone),
    ]
    ping = route("GET", "/ping", lookupd.delayed(lambda call: "OK"), Form.TEXT)
    delayed = [route(method, path, lookupd.delayed(handler)) for method, path, handler in table]
    return application([ping, *delayed], original=True)


@define(eq=False)
class _StandaloneRoutes:
    """Captured on a real nsqlookupd without cluster id and a standalone nsqd."""

    lookupd: OriginalLookupd

    def _partitions(self, topic: str) -> dict[str, list[ListedProducer]]:
        view = self.lookupd.view
        found = {each.subkey: view.producers("topic", topic, each.subkey) for each in view.find("topic", topic, "*")}
        return {name: [one for one in held if view.is_active(one)] for name, held in sorted(found.items())}

    def _channels(self, topic: str, partition: str) -> list[str]:
        names: dict[str, None] = {}
        for each, held in self.lookupd.view:
            number, _, name = each.subkey.partition(":")
            if each.category == "channel" and each.key == topic and held and _selects(number, partition):
                names[name] = None
        return list(names)

    def info(self, call: Call) -> object:
        return {"version": self.lookupd.version, "ha_support": False}

    def topics(self, call: Call) -> object:
        names = [each.key for each, held in self.lookupd.view if held and each.category == "topic"]
        return {"topics": list(dict.fromkeys(names))}

    def channels(self, call: Call) -> object:
        return {"channels": self._channels(call.arg("topic", "MISSING_ARG_TOPIC"), call.arg("partition"))}

    def lookup(self, call: Call) -> object:
        topic = call.arg("topic", "MISSING_ARG_TOPIC")
        partition, access = call.arg("partition"), call.arg("access") or "r"
        if access not in ("r", "w"):
            raise HttpFault(400, "INVALID_ACCESS_MODE")
        nodes: dict[str, dict[str, Any]] = {}
        silent = False
        for number, held in self._partitions(topic).items():
            if not (held and _selects(number, partition)):
                continue
            if access == "w" and self.lookupd.view.is_hidden(held[-1]):
                continue
            if access == "w" and not self._channels(topic, number):
                silent = True
                continue
            node = held[-1].node
            nodes[number] = {"id": node.id, **{key: node.members[key] for key in NODE_MEMBERS}, "distributed_id": ""}
        if silent and not nodes:
            raise HttpFault(404, NO_CHANNEL)
        by_id = {entry["id"]: entry for entry in nodes.values()}
        return {"channels": self._channels(topic, partition), "partitions": nodes, "producers": list(by_id.values())}

    def nodes(self, call: Call) -> object:
        view = self.lookupd.view
        producers = []
        for found in view.producers("client"):
            if not view.is_active(found):
                continue
            held: dict[str, list[str]] = {}
            hidden: dict[str, bool] = {}
            for each, under in view:
                for producer in under:
                    if each.category == "topic" and producer.node is found.node:
                        held.setdefault(each.key, []).append(each.subkey)
                        hidden[each.key] = view.is_hidden(producer)
            entry = {key: found.node.members[key] for key in NODE_MEMBERS}
            entry |= {"tombstones": list(hidden.values()), "topics": list(held), "partitions": held}
            producers.append(entry)
        return {"producers": producers}

    def tombstone(self, call: Call) -> None:
        topic, node = call.arg("topic", "MISSING_ARG_TOPIC"), call.arg("node", "MISSING_ARG_NODE")
        self.lookupd.registry.hide(topic, node, call.arg("restore") != "true")

    def stats(self, call: Call) -> object:
        return {"stable": False, "node_stat_list": [], "topn_topics": []}

    def refuse(self, call: Call, *, read: Handler | None = None, text: str = "MISSING_COORDINATOR") -> object:
        """Check the arguments of an operation that needs a cluster, and refuse it."""
        if read is not None:
            read(call)
        raise HttpFault(500, text)

    def hide_lookupd(self, call: Call) -> object:
        call.arg("node", "MISSING_ARG_NODE")
        if call.arg("restore"):
            raise HttpFault(404, "lookup node id not found")
        return self.refuse(call)

    def debug(self, call: Call) -> object:
        data: dict[str, list[dict[str, Any]]] = {}
        for each, producers in self.lookupd.view:
            for found in producers:
                about = {key: found.node.members[key] for key in NODE_MEMBERS[1:]} | {"id": found.node.id}
                about["last_update"] = found.node.last_seen
                if each.category == "client":
                    data.setdefault(f"peerInfo:{found.node.id}", []).append(about)
                elif each.category == "channel":
                    number, _, name = each.subkey.partition(":")
                    line = {"channelName": name, "partitionID": number, "peerId": found.node.id}
                    data.setdefault(f"channel:{each.key}:{number}", []).append(line)
                else:
                    about |= {"partitionID": each.subkey, "tombstoned": found.hidden_at is not None}
                    about["tombstoned_at"] = NEVER if found.hidden_at is None else found.hidden_at
                    data.setdefault(f"topic:{each.key}", []).append(about)
        return data


def _selects(number: str, partition: str) -> bool:
    return partition in ("", "*", number)


def standalone_app(lookupd: OriginalLookupd) -> Starlette:
    """Return the HTTP application of a redesigned lookup node without a cluster."""
    routes = _StandaloneRoutes(lookupd)
    queries: list[tuple[str, Handler]] = [
        ("/info", routes.info),
        ("/debug", routes.debug),
        ("/lookup", routes.lookup),
        ("/listlookup", lambda call: None),
        ("/topics", routes.topics),
        ("/channels", routes.channels),
        ("/nodes", routes.nodes),
    ]
    create = partial(routes.refuse, read=read_topic)
    change_channel = partial(routes.refuse, read=read_channel, text="INTERNAL_ERROR")
    needs_cluster = [
        "/topic/meta/update",
        "/topic/partition/expand",
        "/topic/partition/move",
        "/cluster/node/remove",
        "/cluster/upgrade/begin",
        "/cluster/upgrade/done",
    ]
    return application(
        [
            route("GET", "/ping", lambda call: "OK", Form.TEXT),
            *(route("GET", path, handler, Form.NEGOTIATED) for path, handler in queries),
            route("GET", "/cluster/stats", routes.stats),
            route("POST", "/topic/create", create),
            route("PUT", "/topic/create", create),
            route("POST", "/topic/delete", partial(routes.refuse, read=read_deletion)),
            route("POST", "/topic/tombstone", routes.tombstone),
            route("POST", "/channel/create", change_channel),
            route("POST", "/channel/delete", change_channel),
            route("POST", "/cluster/lookupd/tombstone", routes.hide_lookupd),
            route("POST", "/loglevel/set", check_log_level),
            route("POST", "/disable/write", lambda call: None),  # without effect
            *(route("POST", path, routes.refuse) for path in needs_cluster),
        ]
    )
