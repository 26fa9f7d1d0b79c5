"""Actions of the forms: change topics, channels and nodes, publish, and inject faults into an embedded cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

import anyio
from attrs import frozen

from nsqext.admin import Admin
from nsqext.admin.options import redesigned_settings, refuse_redesigned
from nsqext.client.consumer.position import Position
from nsqext.errors import InvalidInput, InvalidState

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.client.producer.producer import Producer

_EXPANDED_WITHIN = 60.0  # seconds

_TOPIC_WAIT = 30.0  # seconds until a new topic must accept publishes


@frozen
class ActionTarget:
    """Clients that actions use."""

    admin: Admin
    producer: Producer
    cluster: Cluster | None

    def embedded(self) -> Cluster:
        if self.cluster is None:
            raise InvalidState("this is not an embedded cluster", hint="nsqext broker --web starts an embedded cluster")
        return self.cluster


@frozen
class ActionForm:
    """The fields of a form, or of a page's query."""

    fields: Mapping[str, str]

    def given(self, name: str) -> str:
        return self.fields.get(name, "").strip()

    def needed(self, name: str) -> str:
        text = self.given(name)
        if not text:
            raise InvalidInput(f"the field {name} is empty", hint="go back and fill it in")
        return text

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number, or the default for an empty field."""
        text = self.given(name)
        if not text and default is not None:
            return default
        if not (text.isascii() and text.isdecimal() and len(text) <= 20):
            raise InvalidInput(f"{name}={text!r} is not a whole number", hint="go back and correct it")
        return int(text)

    def optional(self, name: str) -> int | None:
        return self.number(name) if self.given(name) else None


Perform = Callable[[ActionTarget, ActionForm], Awaitable[str]]
"""Performs an action; returns the address of the next page."""


@frozen
class Action:
    """An action of a form."""

    perform: Perform
    button: str
    done: str  #: text after success
    question: str = ""  #: asked before an action that cannot be undone


def path_of(name: str) -> str:
    """Return the name of a topic or channel in a path, with ~ before . and .., which browsers take for folders."""
    return ("~" if name in (".", "..") else "") + quote(name, safe="")


def name_in(path: str) -> str:
    """Return the name of `path_of`."""
    return path.removeprefix("~")


def topic_page(topic: str) -> str:
    """Return the address of a topic's page."""
    return f"/topics/{path_of(topic)}"


# Topics


async def _create_topic(target: ActionTarget, form: ActionForm) -> str:
    topic = form.needed("topic")
    channel = form.given("channel")
    partitions, replicas = form.number("partitions", 1), form.number("replicas", 1)
    extend, ordered = bool(form.given("extend")), bool(form.given("ordered"))
    chosen = {"partitions": partitions, "replicas": replicas, "extend": extend, "ordered": ordered}
    nodes = await target.admin.nodes()
    refuse_redesigned(redesigned_settings(chosen), topic, nodes)
    crowded = partitions * replicas > len(nodes)
    await target.admin.create_topic(
        topic,
        partitions=partitions,
        replicas=replicas,
        extend=extend,
        ordered=ordered,
        multipart=crowded and not ordered,
        channels=[channel] if channel else [],
        wait=_TOPIC_WAIT,
    )
    return topic_page(topic)


def _on_topic(change: Callable[[ActionTarget, str, ActionForm], Awaitable[object]], *, last: bool = False) -> Perform:
    async def perform(target: ActionTarget, form: ActionForm) -> str:
        topic = form.needed("topic")
        await change(target, topic, form)
        return "/" if last else topic_page(topic)

    return perform


def _topic_change(method: Callable[[Admin, str], Awaitable[object]], *, last: bool = False) -> Perform:
    return _on_topic(lambda target, topic, form: method(target.admin, topic), last=last)


async def _set_topic(target: ActionTarget, topic: str, form: ActionForm) -> None:
    await target.admin.set_topic(
        topic,
        replicas=form.optional("replicas"),
        retention_days=form.optional("retention_days"),
        sync_every=form.optional("sync_every"),
    )


async def _tombstone(target: ActionTarget, topic: str, form: ActionForm, *, restore: bool = False) -> None:
    await target.admin.tombstone(topic, form.needed("node"), restore=restore)


def _headers(text: str) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        name, colon, value = line.partition(":")
        if not colon:
            raise InvalidInput(f"the header line {line!r} has no colon", hint="write one name: value per line")
        if name.strip() in found:
            raise InvalidInput(f"the header {name.strip()} is given twice", hint="go back and remove a line")
        found[name.strip()] = value.strip()
    return found or None


async def _publish(target: ActionTarget, topic: str, form: ActionForm) -> None:
    body = form.fields.get("body", "").replace("\r\n", "\n")  # browsers send lines of a text area with CRLF
    await target.producer.publish(
        topic,
        body.encode("utf-8", "surrogateescape"),
        headers=_headers(form.given("headers")),
        tag=form.given("tag") or None,
        key=form.given("key") or None,
        trace_id=form.optional("trace_id"),
        partition=form.optional("partition"),
    )


# Channels


def _on_channel(change: Callable[[Admin, str, str, ActionForm], Awaitable[object]], *, last: bool = False) -> Perform:
    async def perform(target: ActionTarget, form: ActionForm) -> str:
        topic, channel = form.needed("topic"), form.needed("channel")
        await change(target.admin, topic, channel, form)
        return topic_page(topic) + ("" if last else f"/channels/{path_of(channel)}")

    return perform


def _channel_change(method: Callable[[Admin, str, str], Awaitable[object]], *, last: bool = False) -> Perform:
    return _on_channel(lambda admin, topic, channel, form: method(admin, topic, channel), last=last)


def _position(form: ActionForm) -> Position:
    kind = form.needed("position")
    if kind != "time" and form.given("time"):
        raise InvalidInput(
            f"a time is given, and the channel would move to {kind}", hint="choose a time, or clear the field"
        )
    if kind == "earliest":
        return Position.earliest()
    if kind == "latest":
        return Position.latest()
    if kind != "time":
        raise InvalidInput(f"position={kind!r} is not earliest, latest or time")
    text = form.needed("time")
    try:
        time = datetime.fromisoformat(text)
        return Position.at(time if time.tzinfo else time.replace(tzinfo=UTC))
    except ValueError as error:
        raise InvalidInput(f"time={text!r} is not a time", hint="write it as 2030-12-31T23:59, in UTC") from error


# The embedded cluster


def _on_node(change: Callable[[Cluster, str], None]) -> Perform:
    async def perform(target: ActionTarget, form: ActionForm) -> str:
        await anyio.to_thread.run_sync(change, target.embedded(), form.needed("name"))
        return "/"

    return perform


async def _move_leader(target: ActionTarget, topic: str, form: ActionForm) -> None:
    move = target.embedded().move_leader
    await anyio.to_thread.run_sync(move, topic, form.number("partition"), form.needed("name"), abandon_on_cancel=True)


ACTIONS: dict[str, Action] = {
    "create-topic": Action(_create_topic, "Create topic", "The topic was created."),
    "delete-topic": Action(
        _topic_change(Admin.delete_topic, last=True),
        "Delete topic",
        "The topic was deleted.",
        "All its messages and channels are lost, and its consumers are disconnected.",
    ),
    "empty-topic": Action(
        _topic_change(Admin.empty_topic),
        "Empty topic",
        "The topic was emptied.",
        "The messages that wait in the topic and in all its channels will not be delivered.",
    ),
    "upgrade-topic": Action(
        _topic_change(Admin.upgrade_topic),
        "Upgrade topic",
        "The topic was upgraded: messages may carry headers, tags and keys.",
        "The topic gets extend support, which cannot be removed, and old clients may be unable to read its messages.",
    ),
    "expand-topic": Action(
        _on_topic(
            lambda at, topic, form: at.admin.expand_topic(topic, form.number("partitions"), wait=_EXPANDED_WITHIN)
        ),
        "Add partitions",
        "The topic gets more partitions.",
        "This cannot be undone. A key may move to another partition than its earlier messages.",
    ),
    "pause-topic": Action(_topic_change(Admin.pause_topic), "Pause", "The topic is paused."),
    "unpause-topic": Action(_topic_change(Admin.unpause_topic), "Unpause", "The topic is no longer paused."),
    "tombstone": Action(
        _on_topic(_tombstone),
        "Tombstone",
        "Lookup temporarily hides the node.",
        "Lookup temporarily hides the topic on this node: consumers disconnect from it, producers avoid it.",
    ),
    "show-node": Action(_on_topic(partial(_tombstone, restore=True)), "Show again", "Lookup shows the node again."),
    "set-topic": Action(_on_topic(_set_topic), "Change settings", "The settings of the topic were changed."),
    "publish": Action(_on_topic(_publish), "Publish", "The message was stored."),
    "create-channel": Action(_channel_change(Admin.create_channel), "Create channel", "The channel was created."),
    "delete-channel": Action(
        _channel_change(Admin.delete_channel, last=True),
        "Delete channel",
        "The channel was deleted.",
        "Its position and its waiting messages are lost, and its consumers are disconnected.",
    ),
    "pause-channel": Action(_channel_change(Admin.pause_channel), "Pause", "The channel is paused."),
    "unpause-channel": Action(_channel_change(Admin.unpause_channel), "Unpause", "The channel delivers again."),
    "empty-channel": Action(
        _channel_change(Admin.empty_channel),
        "Empty channel",
        "The channel was emptied.",
        "The messages that wait in the channel will not be delivered.",
    ),
    "skip-channel": Action(
        _channel_change(Admin.skip_channel),
        "Skip messages",
        "The channel skips every message.",
        "The channel finishes every message without delivery, until skipping is switched off.",
    ),
    "unskip-channel": Action(
        _channel_change(Admin.unskip_channel), "Stop skipping", "The channel delivers messages again."
    ),
    "seek-channel": Action(
        _on_channel(lambda admin, topic, channel, form: admin.seek_channel(topic, channel, _position(form))),
        "Move channel",
        "The channel was moved.",
        "Consumers continue at the new position: they receive earlier messages again, or skip messages.",
    ),
    "set-channel": Action(
        _on_channel(
            lambda admin, topic, channel, form: admin.set_channel(
                topic, channel, rate_limit_kib=form.optional("rate_limit_kib")
            )
        ),
        "Limit rate",
        "The rate of the channel is limited.",
    ),
    "redeliver-channel": Action(
        _channel_change(Admin.redeliver_unfinished),
        "Redeliver",
        "The channel reads again from its confirmed position.",
        "Messages in flight may be delivered twice. It helps a channel that has a depth and delivers nothing.",
    ),
    "deliver-delayed": Action(
        _on_channel(
            lambda admin, topic, channel, form: admin.deliver_delayed(
                topic, channel, within_hours=form.number("within_hours")
            )
        ),
        "Deliver delayed messages",
        "The delayed messages are delivered.",
        "Consumers receive the messages of the delayed queue before they are due.",
    ),
    "empty-delayed": Action(
        _channel_change(Admin.empty_delayed),
        "Discard delayed messages",
        "The delayed messages were discarded.",
        "The delayed messages of the channel will not be delivered.",
    ),
    "kill": Action(_on_node(lambda cluster, name: cluster.kill(name)), "Kill", "The node was killed."),
    "freeze": Action(_on_node(lambda cluster, name: cluster.faults.freeze(name)), "Freeze", "The node is frozen."),
    "thaw": Action(_on_node(lambda cluster, name: cluster.faults.thaw(name)), "Thaw", "The node runs again."),
    "restart": Action(_on_node(lambda cluster, name: cluster.restart(name)), "Restart", "The node was started again."),
    "move-leader": Action(_on_topic(_move_leader), "Move leader", "The leader was moved."),
}
"""Actions by the last segment of their paths."""
