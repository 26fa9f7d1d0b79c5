"""Actions of the forms: change topics, channels and nodes, publish, and inject faults into an embedded cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio
from attrs import frozen

from nsqext.client.consumer.position import Position
from nsqext.errors import InvalidInput, InvalidState

if TYPE_CHECKING:
    from nsqext.admin import Admin
    from nsqext.broker import Cluster
    from nsqext.client.producer.producer import Producer

__all__ = ("ACTIONS", "Action", "Form", "Target", "topic_page")

_EXPANDED_WITHIN = 60.0  # seconds

_TOPIC_WAIT = 30.0  # seconds until a new topic has to accept publishes


@frozen
class Target:
    """Clients that actions use.

    Attributes:
        admin: administration client.
        producer: producer for the publish form.
        cluster: the embedded cluster, or None.
    """

    admin: Admin
    producer: Producer
    cluster: Cluster | None

    def embedded(self) -> Cluster:
        """Return the embedded cluster."""
        if self.cluster is None:
            raise InvalidState("this is not an embedded cluster", hint="start one with nsqext broker --web")
        return self.cluster


@frozen
class Form:
    """The fields of a form.

    Attributes:
        fields: text by name.
    """

    fields: Mapping[str, str]

    def given(self, name: str) -> str:
        """Return a field; empty when it is missing."""
        return self.fields.get(name, "").strip()

    def needed(self, name: str) -> str:
        """Return a field."""
        text = self.given(name)
        if not text:
            raise InvalidInput(f"the field {name} is empty", hint="go back and fill it in")
        return text

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number; for an empty field, the default."""
        text = self.given(name)
        if not text and default is not None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 20):
            raise InvalidInput(f"{name}={text!r} is not a whole number", hint="go back and correct it")
        return int(text)

    def optional(self, name: str) -> int | None:
        """Return a whole number; None for an empty field."""
        return self.number(name) if self.given(name) else None


@frozen
class Action:
    """An action of a form.

    Attributes:
        perform: performs the action and returns the address of the page to show next.
        button: label of the button.
        done: text to show after success.
        question: warning to confirm first if the action cannot be undone; otherwise empty.
    """

    perform: Callable[[Target, Form], Awaitable[str]]
    button: str
    done: str
    question: str = ""


def topic_page(topic: str) -> str:
    """Return the address of a topic's page."""
    return f"/topics/{quote(topic, safe='')}"


def _channel_page(topic: str, channel: str) -> str:
    return f"{topic_page(topic)}/channels/{quote(channel, safe='')}"


# Topics


async def _create_topic(target: Target, form: Form) -> str:
    topic = form.needed("topic")
    channel = form.given("channel")
    partitions, replicas = form.number("partitions", 1), form.number("replicas", 1)
    ordered = bool(form.given("ordered"))
    crowded = partitions * replicas > len(await target.admin.nodes())
    await target.admin.create_topic(
        topic,
        partitions=partitions,
        replicas=replicas,
        extend=bool(form.given("extend")),
        ordered=ordered,
        multipart=crowded and not ordered,
        channels=[channel] if channel else [],
        wait=_TOPIC_WAIT,
    )
    return topic_page(topic)


async def _delete_topic(target: Target, form: Form) -> str:
    await target.admin.delete_topic(form.needed("topic"))
    return "/"


async def _change_topic(method: str, target: Target, form: Form) -> str:
    topic = form.needed("topic")
    await getattr(target.admin, method)(topic)
    return topic_page(topic)


async def _expand_topic(target: Target, form: Form) -> str:
    topic = form.needed("topic")
    await target.admin.expand_topic(topic, form.number("partitions"), wait=_EXPANDED_WITHIN)
    return topic_page(topic)


async def _set_topic(target: Target, form: Form) -> str:
    topic = form.needed("topic")
    await target.admin.set_topic(
        topic,
        replicas=form.optional("replicas"),
        retention_days=form.optional("retention_days"),
        sync_every=form.optional("sync_every"),
    )
    return topic_page(topic)


async def _tombstone(target: Target, form: Form, *, restore: bool = False) -> str:
    topic = form.needed("topic")
    await target.admin.tombstone(topic, form.needed("node"), restore=restore)
    return topic_page(topic)


def _headers(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        name, colon, value = line.partition(":")
        if not colon:
            raise InvalidInput(f"the header line {line!r} has no colon", hint="write one name: value per line")
        found[name.strip()] = value.strip()
    return found or None


async def _publish(target: Target, form: Form) -> str:
    topic = form.needed("topic")
    body = form.fields.get("body", "").replace("\r\n", "\n")  # browsers send lines of a text area with CRLF
    await target.producer.publish(
        topic,
        body.encode("utf-8", "surrogateescape"),
        headers=_headers(form.given("headers")),
        tag=form.given("tag") or None,
        key=form.given("key") or None,
        trace_id=form.number("trace_id") if form.given("trace_id") else None,
        partition=form.number("partition") if form.given("partition") else None,
    )
    return topic_page(topic)


# Channels


async def _change_channel(method: str, target: Target, form: Form) -> str:
    topic, channel = form.needed("topic"), form.needed("channel")
    await getattr(target.admin, method)(topic, channel)
    return _channel_page(topic, channel)


async def _set_channel(target: Target, form: Form) -> str:
    topic, channel = form.needed("topic"), form.needed("channel")
    await target.admin.set_channel(topic, channel, rate_limit_kib=form.optional("rate_limit_kib"))
    return _channel_page(topic, channel)


async def _deliver_delayed(target: Target, form: Form) -> str:
    topic, channel = form.needed("topic"), form.needed("channel")
    await target.admin.deliver_delayed(topic, channel, within_hours=form.number("within_hours"))
    return _channel_page(topic, channel)


async def _delete_channel(target: Target, form: Form) -> str:
    topic = form.needed("topic")
    await target.admin.delete_channel(topic, form.needed("channel"))
    return topic_page(topic)


def _position(form: Form) -> Position:
    kind = form.needed("position")
    if kind == "earliest":
        return Position.earliest()
    if kind == "latest":
        return Position.latest()
    if kind != "time":
        raise InvalidInput(f"position={kind!r} is not earliest, latest or time")
    text = form.needed("time")
    try:
        return Position.at(datetime.fromisoformat(text).replace(tzinfo=UTC))
    except ValueError as error:
        raise InvalidInput(f"time={text!r} is not a time", hint="write it as 2030-12-31T23:59, in UTC") from error


async def _seek_channel(target: Target, form: Form) -> str:
    topic, channel = form.needed("topic"), form.needed("channel")
    await target.admin.seek_channel(topic, channel, _position(form))
    return _channel_page(topic, channel)


# The embedded cluster


async def _fault(method: str, target: Target, form: Form) -> str:
    cluster = target.embedded()
    await anyio.to_thread.run_sync(getattr(cluster.faults, method), form.needed("name"))
    return "/"


async def _move_leader(target: Target, form: Form) -> str:
    cluster = target.embedded()
    topic = form.needed("topic")
    await anyio.to_thread.run_sync(
        cluster.move_leader, topic, form.number("partition"), form.needed("name"), abandon_on_cancel=True
    )
    return topic_page(topic)


ACTIONS: dict[str, Action] = {
    "create-topic": Action(_create_topic, "Create topic", "The topic was created."),
    "delete-topic": Action(
        _delete_topic,
        "Delete topic",
        "The topic was deleted.",
        "All its messages and channels are lost, and its consumers are disconnected.",
    ),
    "empty-topic": Action(
        partial(_change_topic, "empty_topic"),
        "Empty topic",
        "The topic was emptied.",
        "The messages that wait in the topic and in all its channels will not be delivered.",
    ),
    "upgrade-topic": Action(
        partial(_change_topic, "upgrade_topic"),
        "Upgrade topic",
        "The topic was upgraded: messages may carry headers, tags and keys.",
        "The topic gets extend support, which cannot be removed, and old clients may be unable to read its messages.",
    ),
    "expand-topic": Action(
        _expand_topic,
        "Add partitions",
        "The topic gets more partitions.",
        "This cannot be undone. A key may move to a partition other than that of its earlier messages.",
    ),
    "pause-topic": Action(partial(_change_topic, "pause_topic"), "Pause", "The topic is paused."),
    "unpause-topic": Action(partial(_change_topic, "unpause_topic"), "Unpause", "The topic is no longer paused."),
    "tombstone": Action(
        _tombstone,
        "Tombstone",
        "Lookup temporarily hides the node.",
        "Lookup temporarily hides the topic on this node: consumers disconnect from it, producers avoid it.",
    ),
    "show-node": Action(partial(_tombstone, restore=True), "Show again", "Lookup shows the node again."),
    "set-topic": Action(_set_topic, "Change settings", "The settings of the topic were changed."),
    "publish": Action(_publish, "Publish", "The message was stored."),
    "create-channel": Action(partial(_change_channel, "create_channel"), "Create channel", "The channel was created."),
    "delete-channel": Action(
        _delete_channel,
        "Delete channel",
        "The channel was deleted.",
        "Its position and its waiting messages are lost, and its consumers are disconnected.",
    ),
    "pause-channel": Action(partial(_change_channel, "pause_channel"), "Pause", "The channel is paused."),
    "unpause-channel": Action(partial(_change_channel, "unpause_channel"), "Unpause", "The channel delivers again."),
    "empty-channel": Action(
        partial(_change_channel, "empty_channel"),
        "Empty channel",
        "The channel was emptied.",
        "The messages that wait in the channel will not be delivered.",
    ),
    "skip-channel": Action(
        partial(_change_channel, "skip_channel"),
        "Skip messages",
        "The channel skips every message.",
        "The channel finishes every message without delivery, until skipping is switched off.",
    ),
    "unskip-channel": Action(
        partial(_change_channel, "unskip_channel"), "Stop skipping", "The channel delivers messages again."
    ),
    "seek-channel": Action(
        _seek_channel,
        "Move channel",
        "The channel was moved.",
        "Consumers continue at the new position: they receive earlier messages again, or skip messages.",
    ),
    "set-channel": Action(_set_channel, "Limit rate", "The rate of the channel is limited."),
    "redeliver-channel": Action(
        partial(_change_channel, "redeliver_unfinished"),
        "Redeliver",
        "The channel reads again from its confirmed position.",
        "Messages in flight may be delivered twice. It helps a channel that has a depth and delivers nothing.",
    ),
    "deliver-delayed": Action(
        _deliver_delayed,
        "Deliver delayed messages",
        "The delayed messages are delivered.",
        "Consumers receive the messages of the delayed queue before they are due.",
    ),
    "empty-delayed": Action(
        partial(_change_channel, "empty_delayed"),
        "Discard delayed messages",
        "The delayed messages were discarded.",
        "The delayed messages of the channel will not be delivered.",
    ),
    "kill": Action(partial(_fault, "kill"), "Kill", "The node was killed."),
    "freeze": Action(partial(_fault, "freeze"), "Freeze", "The node is frozen."),
    "thaw": Action(partial(_fault, "thaw"), "Thaw", "The node runs again."),
    "restart": Action(partial(_fault, "restart"), "Restart", "The node was started again."),
    "move-leader": Action(_move_leader, "Move leader", "The leader was moved."),
}
"""Actions by the last segment of their path."""
