"""Build the pages: a template and its values, from a snapshot of the cluster."""

from __future__ import annotations

import sqlite3
import time
from datetime import UTC, datetime
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal

import anyio
from anyio import to_thread
from attrs import frozen
from markupsafe import Markup

from nsqext.admin.requests import ask_all
from nsqext.client.consumer.consumer import Consumer
from nsqext.client.settings import consumer_settings, settings_for
from nsqext.errors import ConnectionFailed, InvalidInput, InvalidState, NsqError, PartitionUnavailable, TopicNotFound
from nsqext.protocol.names import check_channel, check_topic
from nsqext.web.actions import ActionForm, name_in
from nsqext.web.document import AppDocument
from nsqext.web.topic_list import topic_list

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nsqext.admin import Admin, KeyRange, NodeStatus, PartitionStats, StoredMessage, TopicInfo, TopicStats
    from nsqext.broker import Cluster
    from nsqext.client.consumer.settings import ConsumerSettings
    from nsqext.types import Address
    from nsqext.web.monitor import Monitor, Rate, Snapshot
    from nsqext.web.security import WebOptions

_PEEKED = 20
_MOST_PEEKED = 200
_WATCHED = 5  # seconds of waiting for messages of the original NSQ


@frozen
class Page:
    """A page to render."""

    template: str
    title: str
    values: Mapping[str, Any]


@frozen
class NodeRow:
    """A row of a table of nodes."""

    address: str
    name: str  #: in an embedded cluster
    state: Literal["up", "down", "frozen"]  #: frozen only in an embedded cluster
    status: NodeStatus | None  #: None if lookup does not list the node
    leads: tuple[tuple[str, int], ...]


@frozen
class PartitionRow:
    """A partition on its topic's page."""

    number: int | None  #: None for a node's share of an original topic
    leader: Address | None  #: TCP address
    replicas: tuple[str, ...]  #: TCP addresses of the other in-sync replicas
    stats: PartitionStats | None  #: from the leader; None without a response


@frozen
class WatchedMessage:
    """A received message, with the page's members of `nsqext.StoredMessage`."""

    id: str  #: hexadecimal
    timestamp: int  #: when stored, in nanoseconds since 1970
    body: str  #: text, with U+FFFD for bytes that are not UTF-8
    node: str  #: TCP address of its node


class Pages:
    """Builds the pages."""

    def __init__(self, monitor: Monitor, admin: Admin, options: WebOptions, cluster: Cluster | None) -> None:
        self._monitor = monitor
        self._admin = admin
        self._settings: ConsumerSettings = settings_for(consumer_settings(), options.settings)
        self._cluster = cluster
        self._delay_store = options.delay_store
        self._document = None if options.app_document is None else AppDocument.read(options.app_document)

    def node_rows(self, snapshot: Snapshot) -> tuple[NodeRow, ...]:
        """Return the nodes of lookup and of an embedded cluster, sorted by name and address."""
        leads: dict[str, list[tuple[str, int]]] = {}
        for topic in snapshot.topics.values():
            for number, leader in topic.leaders.items():
                leads.setdefault(str(leader), []).append((topic.name, number))
        known = {str(node.tcp): node for node in snapshot.nodes}
        names: dict[str, str] = dict.fromkeys(known, "")
        states: dict[str, Literal["up", "down", "frozen"]] = {
            address: "up" if node.reachable else "down" for address, node in known.items()
        }
        if self._cluster is not None:
            for embedded in self._cluster.nodes.values():
                names[embedded.tcp] = embedded.name
                states[embedded.tcp] = self._cluster.state(embedded.name)
        order = sorted(names, key=lambda address: (names[address], address))
        return tuple(
            NodeRow(
                address=address,
                name=names[address],
                state=states[address],
                status=known.get(address),
                leads=tuple(sorted(leads.get(address, ()))),
            )
            for address in order
        )

    async def overview(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        """Return the page of topics and nodes; topics by ``search``, ``sort``, ``order`` and ``page``."""
        values = {"nodes": self.node_rows(snapshot), "list": topic_list(snapshot, ActionForm(query))}
        return Page("overview.html", "Overview", values)

    async def delayed(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        store = self._delay_store
        try:
            messages = [] if store is None else await to_thread.run_sync(store.waiting, None, _MOST_PEEKED)
            count = 0 if store is None else await to_thread.run_sync(store.count)
        except sqlite3.Error as error:
            raise InvalidState(f"the store of delayed messages cannot be read: {error}") from error
        return Page("delayed.html", "Delayed messages", {"messages": messages, "count": count})

    async def app(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        return Page("app.html", "App", {"app": self._document})

    async def topic(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        name = _known_topic(snapshot, name_in(path["topic"]))
        info, stats = snapshot.topics[name], snapshot.stats.get(name)
        parts = {part.partition: part for part in stats.partitions} if stats else {}
        rows: list[PartitionRow] = []
        if info.generation == "original":
            rows = [PartitionRow(None, part.node, (), part) for part in (stats.partitions if stats else ())]
        else:
            replicas = await self._monitor.replicas(name)
            number_of = max(info.meta.partition_num if info.meta else 0, *(part + 1 for part in info.leaders), 0)
            for number in range(number_of):
                leader = info.leaders.get(number)
                others = tuple(found for found in replicas.get(number, ()) if found != str(leader))
                rows.append(PartitionRow(number, leader, others, parts.get(number)))
        nodes = self.node_rows(snapshot)
        moves = {node.address: node.name for node in nodes if node.state == "up"}
        channels = sorted({*info.channels, *(stats.channels if stats else ())})
        values = {
            "topic": info,
            "stats": stats,
            "partitions": rows,
            "channels": channels,
            "stopped": {one: _stopped(stats, one) for one in channels},
            "names": {node.address: node.name for node in nodes},
            "http": {node.address: str(node.status.http) for node in nodes if node.status and node.status.http},
            "moves": moves if self._cluster is not None and info.generation == "redesigned" else {},
        }
        return Page("topic.html", name, values)

    async def channel(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        name = _known_topic(snapshot, name_in(path["topic"]))
        channel = check_channel(name_in(path["channel"]))
        info, stats = snapshot.topics[name], snapshot.stats.get(name)
        found = stats.channels.get(channel) if stats else None
        if found is None and channel not in info.channels:
            raise InvalidInput(f"the topic has no channel {channel}", topic=name, hint="it may have been deleted")
        partitions = [part for part in stats.partitions if channel in part.channels] if stats else []
        clients = found.clients if found else ()
        reported = {part.partition for part in partitions}
        values = {
            "topic": info,
            "name": channel,
            "missing": [one for one in range(info.meta.partition_num if info.meta else 0) if one not in reported],
            "stats": stats,
            "channel": found,
            "stopped": _stopped(stats, channel),
            "paused": any(part.channels[channel].paused for part in partitions),
            "skipped": any(part.channels[channel].skipped for part in partitions),
            "partitions": partitions,
            "clients": sorted(clients, key=lambda one: (one.client_id, one.address, one.partition or 0)),
            "kinds": sorted({part.channels[channel].dispatch for part in partitions} - {""}),
            "addresses": sorted({part.client for p in partitions for part in p.channels[channel].key_ranges}),
        }
        return Page("channel.html", f"{channel} of {name}", values)

    async def messages(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        name = _known_topic(snapshot, name_in(path["topic"]))
        form = ActionForm(query)
        count, partition = min(form.number("count", _PEEKED), _MOST_PEEKED), form.optional("partition")
        topic = snapshot.topics[name]
        if topic.generation == "original":
            return _messages(topic, (), count=count, partition=partition)
        missing: list[int] = []
        try:
            found = await self._admin.peek(name, count=count, partition=partition)
        except (PartitionUnavailable, ConnectionFailed):
            if partition is not None:
                raise
            found, missing = await self._peek_available(topic, count)
        return _messages(topic, found, count=count, partition=partition, missing=missing)

    async def _peek_available(self, topic: TopicInfo, count: int) -> tuple[tuple[StoredMessage, ...], list[int]]:
        """Return the newest messages of the partitions that can be read, and the numbers of the others."""
        numbers = range(topic.meta.partition_num if topic.meta else 0)
        read = partial(self._admin.peek, topic.name, count=count)
        found, failed = await ask_all(numbers, lambda number: read(partition=number))
        messages = [message for messages in found.values() for message in messages]
        newest = sorted(messages, key=lambda one: (one.timestamp, one.offset), reverse=True)
        return tuple(newest[:count]), sorted(failed)

    async def next_messages(self, snapshot: Snapshot, path: Mapping[str, str], lookupd: str) -> Page:
        """Return the page of the next messages of a topic of the original NSQ, copies from an ephemeral channel."""
        name = _known_topic(snapshot, name_in(path["topic"]))
        if snapshot.topics[name].generation != "original":
            raise InvalidInput("the topic has a log", topic=name, hint="load the page to read its newest messages")
        stats = await self._admin.stats(name)
        for part in stats.partitions:
            if not part.channels:
                raise InvalidState(
                    "the topic has no channel, so a temporary channel would consume the waiting messages",
                    topic=name,
                    node=str(part.node),
                    hint="create a channel first",
                )
        found: list[WatchedMessage] = []
        silent = {str(node) for node in stats.unreachable}  # whether the topic has channels there is not known
        own: ConsumerSettings = {
            **self._settings,
            "max_in_flight": _PEEKED,
            "node_filter": lambda node: node not in silent,
        }
        async with Consumer(name, f"watch_{token_hex(4)}#ephemeral", lookupd, **own) as consumer:
            with anyio.move_on_after(_WATCHED):
                while len(found) < _PEEKED:
                    message = await anext(consumer)
                    await message.finish()
                    body = message.body.decode(errors="replace")
                    found.append(WatchedMessage(message.id.hex(), message.timestamp, body, message.node))
        newest = sorted(found, key=lambda one: one.timestamp, reverse=True)
        return _messages(snapshot.topics[name], newest, waited=True, silent=sorted(silent))

    async def node(self, snapshot: Snapshot, path: Mapping[str, str], query: Mapping[str, str]) -> Page:
        wanted = path["node"]
        for node in self.node_rows(snapshot):
            if node.address == wanted:
                break
        else:
            raise NsqError(
                "lookup does not know the node", node=wanted, hint="it may be down; the overview lists all nodes"
            )
        topics = sorted({*(node.status.topics if node.status else ()), *(name for name, _ in node.leads)})
        clients = sorted(
            (
                (name, channel.name, client)
                for name, topic in snapshot.stats.items()
                for channel in topic.channels.values()
                for client in channel.clients
                if str(client.node) == wanted
            ),
            key=lambda one: (one[0], one[1], one[2].address),
        )
        return Page("node.html", node.name or node.address, {"node": node, "topics": topics, "clients": clients})


def _messages(topic: TopicInfo, found: Sequence[object], *, count: int = _PEEKED, **values: object) -> Page:
    shown = {"topic": topic, "messages": found, "count": count, "seconds": _WATCHED}
    unsaid = {"partition": None, "waited": False, "missing": (), "silent": ()}
    return Page("messages.html", f"Messages of {topic.name}", {**unsaid, **shown, **values})


def _stopped(stats: TopicStats | None, channel: str) -> list[str]:
    """Return why a channel delivers no messages, on all of its partitions or on some."""
    parts = [part.channels[channel] for part in stats.partitions if channel in part.channels] if stats else []
    counts = {"paused": sum(part.paused for part in parts), "skips every message": sum(part.skipped for part in parts)}
    return [
        text if count == len(parts) else f"{text} in {count} of {len(parts)} places"
        for text, count in counts.items()
        if count
    ]


def _known_topic(snapshot: Snapshot, name: str) -> str:
    check_topic(name)
    if name not in snapshot.topics:
        raise TopicNotFound("lookup does not know the topic", topic=name, hint="the overview lists all topics")
    return name


_WIDTH, _HEIGHT = 96, 22
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SHADES = 6


def count(value: int) -> str:
    """Return a count with thin spaces between thousands."""
    return f"{value:,}".replace(",", "\u202f")


def per_second(value: float) -> str:
    """Return a rate, with one decimal below 100."""
    return f"{value:.1f}" if 0 < value < 100 else count(round(value))


def size(value: int | None) -> str:
    """Return bytes in binary units; a dash for None."""
    if value is None:
        return "–"
    amount, unit = float(value), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{value} B" if not unit else f"{amount:.1f} {_UNITS[unit]}"


def age(since: float) -> str:
    """Return the time since ``since`` (seconds since 1970) in the largest fitting unit."""
    seconds = max(time.time() - since, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def seconds_since(since: float) -> int:
    """Return whole seconds since ``since`` (seconds since 1970)."""
    return round(max(time.time() - since, 0))


def moment(nanoseconds: int) -> str:
    """Return nanoseconds since 1970 as ISO text with milliseconds, in UTC."""
    try:
        text = datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")
    except (OverflowError, OSError, ValueError):
        return str(nanoseconds)
    return text.removesuffix("+00:00")


def sparkline(rate: Rate, label: str) -> Markup:
    """Draw the points of a rate."""
    points = rate.points if len(rate.points) > 1 else (0.0, 0.0)
    highest = max(points) or 1.0
    step = _WIDTH / (len(points) - 1)
    places = [f"{at * step:.1f},{_HEIGHT - 2 - value / highest * (_HEIGHT - 4):.1f}" for at, value in enumerate(points)]
    line = " ".join(places)
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" role="img" aria-label="{label}" preserveAspectRatio="none">'
        '<polygon points="0,{h} {line} {w},{h}"/><polyline points="{line}"/></svg>'
    ).format(w=_WIDTH, h=_HEIGHT, line=line, label=f"{label}: {per_second(rate.now)} a second")


def key_ranges(ranges: Sequence[KeyRange], clients: Sequence[str]) -> Markup:
    """Draw consumers' key ranges on the hash space from 0 to 1, shaded by index in all clients."""
    rect = Markup(
        '<rect class="shade-{shade}" x="{x:.2f}" width="{width:.2f}" y="0" height="28"><title>{title}</title></rect>'
    )
    shapes = Markup("").join(
        rect.format(
            shade=clients.index(found.client) % _SHADES,
            x=found.low * 1000,
            width=max((found.high - found.low) * 1000, 2),
            title=f"{found.low:.3f} to {found.high:.3f}: {found.client}",
        )
        for found in ranges
    )
    label = "; ".join(f"{found.low:.3f} to {found.high:.3f} {found.client}" for found in ranges) or "no consumer"
    return Markup(
        '<svg class="ranges" viewBox="0 0 1000 28" role="img" aria-label="{label}" preserveAspectRatio="none">'
        '<rect class="empty" x="0" width="1000" y="0" height="28"/>{shapes}</svg>'
    ).format(label=label, shapes=shapes)
