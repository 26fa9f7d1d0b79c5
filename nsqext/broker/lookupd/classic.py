"""nsqlookupd of the original generation: its HTTP API over what nodes registered."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field

from nsqext.broker.http_api import Call, Form, Handler, HttpFault, application, route
from nsqext.broker.lookupd.registry import NEVER, Registration, Registry
from nsqext.broker.lookupd.session import OwnInfo
from nsqext.protocol.names import is_valid_channel, is_valid_topic
from nsqext.types import Address

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ("ClassicLookupd", "classic_app")

_UNKNOWN = Address("127.0.0.1", 0)


@define(eq=False)
class ClassicLookupd:
    """One lookup node of the original generation, without its sockets.

    Attributes:
        name: how the cluster calls it.
        registry: what nodes registered.
        version: what it says it is.
        broadcast_address: host that it tells nodes.
        seen: what it shows; another registry while it is stale or empty.
        delay: seconds that each answer takes longer.
        alive: it runs.
    """

    name: str
    registry: Registry
    version: str
    broadcast_address: str = "127.0.0.1"
    tcp: Address = _UNKNOWN
    http: Address = _UNKNOWN
    seen: Registry = field()
    delay: float = 0.0
    alive: bool = True

    @seen.default
    def _all(self) -> Registry:
        return self.registry

    def own(self) -> OwnInfo:
        """Return what it tells nodes about itself."""
        return OwnInfo(self.tcp.port, self.http.port, self.version, self.broadcast_address, socket.gethostname())

    def forget(self) -> None:
        """Lose every registration, as a restart does."""
        self.registry = self.seen = self.registry.empty()

    def see_truth(self) -> None:
        """Tell the truth again."""
        self.seen, self.delay = self.registry, 0.0

    def see_nothing(self) -> None:
        """Know of no node and no topic."""
        self.seen = self.registry.empty()

    def stand_still(self) -> None:
        """Go on telling what is true now, whatever changes."""
        self.seen = self.registry.picture()

    def slow_down(self, seconds: float) -> None:
        """Take so many seconds longer for each answer."""
        self.delay = seconds


def _given(call: Call, name: str, missing: str) -> str:
    """Return an argument that has to be there, though it may be empty."""
    if name not in call.args:
        raise HttpFault(400, missing)
    return call.args[name]


def _topic(call: Call) -> str:
    topic = _given(call, "topic", "MISSING_ARG_TOPIC")
    if not is_valid_topic(topic):
        raise HttpFault(400, "INVALID_ARG_TOPIC")
    return topic


def _topic_and_channel(call: Call) -> tuple[str, str]:
    topic, channel = _topic(call), _given(call, "channel", "MISSING_ARG_CHANNEL")
    if not is_valid_channel(channel):
        raise HttpFault(400, "INVALID_ARG_CHANNEL")
    return topic, channel


class _Routes:
    """The handlers of one lookup node."""

    def __init__(self, lookupd: ClassicLookupd) -> None:
        self.lookupd = lookupd

    def info(self, call: Call) -> object:
        return {"version": self.lookupd.version}

    def topics(self, call: Call) -> object:
        return {"topics": [found.key for found in self.lookupd.seen.find("topic", "*")]}

    def channels(self, call: Call) -> object:
        topic = _given(call, "topic", "MISSING_ARG_TOPIC")
        return {"channels": [found.subkey for found in self.lookupd.seen.find("channel", topic, "*")]}

    def lookup(self, call: Call) -> object:
        topic, seen = _given(call, "topic", "MISSING_ARG_TOPIC"), self.lookupd.seen
        if not seen.find("topic", topic):
            raise HttpFault(404, "TOPIC_NOT_FOUND")
        shown = [found for found in seen.producers("topic", topic) if seen.is_active(found)]
        return {
            "channels": [found.subkey for found in seen.find("channel", topic, "*")],
            "producers": [found.peer.members for found in shown if not seen.is_hidden(found)],
        }

    def nodes(self, call: Call) -> object:
        seen = self.lookupd.seen
        producers = []
        for found in seen.producers("client"):
            if seen.is_active(found):
                topics = seen.topics_of(found.peer)
                entry = dict(found.peer.members)
                entry["tombstones"] = [seen.is_hidden(producer) for _, producer in topics]
                producers.append(entry | {"topics": [topic for topic, _ in topics]})
        return {"producers": producers}

    def create_topic(self, call: Call) -> object:
        self.lookupd.registry.add(Registration("topic", _topic(call)))
        return None

    def delete_topic(self, call: Call) -> object:
        topic, registry = _given(call, "topic", "MISSING_ARG_TOPIC"), self.lookupd.registry
        for found in [*registry.find("channel", topic, "*"), *registry.find("topic", topic)]:
            registry.remove(found)
        return None

    def create_channel(self, call: Call) -> object:
        topic, channel = _topic_and_channel(call)
        self.lookupd.registry.add(Registration("channel", topic, channel))
        self.lookupd.registry.add(Registration("topic", topic))
        return None

    def delete_channel(self, call: Call) -> object:
        topic, channel = _topic_and_channel(call)
        found = self.lookupd.registry.find("channel", topic, channel)
        if not found:
            raise HttpFault(404, "CHANNEL_NOT_FOUND")
        for registration in found:
            self.lookupd.registry.remove(registration)
        return None

    def tombstone(self, call: Call) -> object:
        topic = _given(call, "topic", "MISSING_ARG_TOPIC")
        self.lookupd.registry.hide(topic, _given(call, "node", "MISSING_ARG_NODE"))
        return None

    def debug(self, call: Call) -> object:
        data: dict[str, list[dict[str, Any]]] = {}
        for registration, producers in self.lookupd.seen:
            entries = [
                {
                    "id": found.peer.id,
                    **{key: value for key, value in found.peer.members.items() if key != "remote_address"},
                    "last_update": found.peer.seen,
                    "tombstoned": found.hidden_at is not None,
                    "tombstoned_at": NEVER if found.hidden_at is None else found.hidden_at,
                }
                for found in producers
            ]
            if entries:
                data[":".join(registration)] = [dict(sorted(entry.items())) for entry in entries]
        return dict(sorted(data.items()))

    def late(self, handler: Handler) -> Handler:
        """Have a handler answer as late as it is to."""

        async def answer(call: Call) -> object:
            if self.lookupd.delay:
                await anyio.sleep(self.lookupd.delay)
            return handler(call)

        return answer


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
        ("POST", "/topic/create", routes.create_topic),
        ("POST", "/topic/delete", routes.delete_topic),
        ("POST", "/channel/create", routes.create_channel),
        ("POST", "/channel/delete", routes.delete_channel),
        ("POST", "/topic/tombstone", routes.tombstone),
    ]
    ping = route("GET", "/ping", routes.late(lambda call: "OK"), Form.TEXT)
    late = [route(method, path, routes.late(handler)) for method, path, handler in table]
    return application([ping, *late], original=True)
