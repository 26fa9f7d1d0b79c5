"""nsqlookupd of the original generation: its HTTP API over the registrations of nsqd."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.broker.lookupd.lookup_node import LookupNode
from nsqext.broker.lookupd.metrics import registry_metrics
from nsqext.broker.lookupd.registry import NEVER, Registration, Registry
from nsqext.http.api import Call, Form, Handler, HttpFault, application, route, valid_channel, valid_topic
from nsqext.protocol.lookupd_tcp import PeerInfo

if TYPE_CHECKING:
    from starlette.applications import Starlette

_NO_TOPIC = "MISSING_ARG_TOPIC"


@define(eq=False)
class ClassicLookupd(LookupNode):
    """One lookup node that nsqd register at over TCP: of the original generation, or redesigned without a cluster."""

    registry: Registry  # the registrations
    version: str  # version that it reports
    broadcast_address: str = "127.0.0.1"  # its host in the response to IDENTIFY
    view: Registry = field(init=False)  # the registrations that it shows; another registry while a fault is injected

    @view.default
    def _all(self) -> Registry:
        return self.registry

    def peer_info(self) -> PeerInfo:
        return PeerInfo(self.broadcast_address, self.tcp.port, self.http.port, self.version, socket.gethostname())

    def clear(self) -> None:
        """Remove every registration, as a restart does."""
        self.registry = self.view = self.registry.empty()

    def show_current(self) -> None:
        self.view = self.registry
        self.delay: float = 0.0

    def show_nothing(self) -> None:
        self.view = self.registry.empty()

    def show_snapshot(self) -> None:
        self.view = self.registry.snapshot()


def _topic_and_channel(call: Call) -> tuple[str, str]:
    topic = valid_topic(call.given("topic", _NO_TOPIC))
    return topic, valid_channel(call.given("channel", "MISSING_ARG_CHANNEL"))


class _Routes:
    """The handlers of one lookup node."""

    def __init__(self, lookupd: ClassicLookupd) -> None:
        self.lookupd = lookupd

    def info(self, call: Call) -> object:
        return {"version": self.lookupd.version}

    def metrics(self, call: Call) -> object:
        version = self.lookupd.version
        return registry_metrics(self.lookupd.view, version, "ha" if "HA" in version else "nsq")

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


def classic_app(lookupd: ClassicLookupd) -> Starlette:
    """Return the HTTP application of a lookup node."""
    routes = _Routes(lookupd)
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
