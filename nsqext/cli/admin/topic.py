"""``nsqext topic``: list, create, change and delete topics. ``nsqext lookup``: show what the lookup service reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import anyio
import attrs
from attrs import asdict, frozen

from nsqext.cli.command import Result, Topic, changes, command, examples
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.parameters import Argument, CommandGroup, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting, TopicNotFound
from nsqext.protocol.names import DEFAULT_CHANNEL

if TYPE_CHECKING:
    from nsqext.admin import Admin, TopicInfo
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import TopicMeta

app: CommandGroup = CommandGroup()

_LOOK = 0.5  # seconds between two looks whether lookup lists a node

RetentionDays = Annotated[int | None, Option(help="Days for which consumed messages are kept.")]
SyncEvery = Annotated[int | None, Option(help="Messages after which a node flushes its disk.")]


def topic_record(info: TopicInfo) -> dict[str, Any]:
    """Return a topic for tables and JSON."""
    meta = info.meta
    return {
        "topic": info.name,
        "generation": info.generation,
        "partitions": meta.partition_num if meta else None,
        "replicas": meta.replica if meta else None,
        "extend": meta.extend_support if meta else False,
        "ordered": meta.ordered if meta else False,
        "channels": list(info.channels),
        "leaders": {str(number): str(node) for number, node in info.leaders.items()},
        "leaderless": list(info.leaderless),
        "nodes": [str(node) for node in info.nodes],
    }


@app.command("list")
@examples("nsqext topic list --lookupd 127.0.0.1:4161", "nsqext topic list --json | jq -r .topic")
@command
async def list_topics(connection: ServerAccess) -> None:
    """List every topic with its partitions and channels."""
    async with connection.admin() as admin:
        records = [topic_record(info) for info in (await admin.topics()).values()]
    columns = ("topic", "generation", "partitions", "replicas", "extend", "ordered", "channels")
    lacks = ("leaderless",) if any(record["leaderless"] for record in records) else ()
    connection.table((*columns, *lacks), records)


@app.command("show")
@examples("nsqext topic show orders")
@command
async def show_topic(connection: ServerAccess, topic: Topic) -> None:
    """Show a topic: its options, channels, and the leader and in-sync replicas of each partition."""
    async with connection.admin() as admin:
        info = await admin.topic(topic)
        replicas = await admin.replicas(topic) if info.generation == "redesigned" else {}
    partitions = [
        {"partition": number, "leader": str(info.leaders.get(number, "no leader")), "in_sync": list(nodes)}
        for number, nodes in replicas.items()
    ] or [{"node": str(node)} for node in info.nodes]
    record = topic_record(info) | {"in_sync": {str(number): list(nodes) for number, nodes in replicas.items()}}
    connection.show(record, describe(info))
    if connection.for_people:
        connection.table(tuple(partitions[0]) if partitions else (), partitions)


def describe_meta(meta: TopicMeta) -> list[str]:
    """Return a redesigned topic's options in words."""
    words = [counted(meta.partition_num, "partition"), counted(meta.replica, "replica")]
    return words + [word for word, holds in (("extend", meta.extend_support), ("ordered", meta.ordered)) if holds]


def describe(info: TopicInfo) -> str:
    """Return a topic in one line."""
    parts = describe_meta(info.meta) if info.meta else [f"on {counted(len(info.nodes), 'node')}"]
    channels = ", ".join(info.channels) or "none"
    return f"{info.name}: {', '.join(parts)}; channels: {channels}"


@frozen
class NewTopic:
    """Options of a new topic of the redesigned NSQ."""

    partitions: Annotated[int, Option(help="Number of partitions.")] = 1
    replicas: Annotated[int, Option(help="Replicas of each partition.")] = 1
    extend: Annotated[bool, Option("--extend", help="Messages may carry headers, tags and keys.")] = False
    ordered: Annotated[bool, Option("--ordered", help="Deliver the messages of each partition in order.")] = False
    multipart: Annotated[
        bool, Option("--multipart", help="One node may hold several partitions: for small clusters.")
    ] = False
    retention_days: RetentionDays = None
    sync_every: SyncEvery = None
    registered_channels_only: Annotated[
        bool, Option("--registered-channels-only", help="Consumers cannot create channels.")
    ] = False


@app.command("create")
@examples(
    "nsqext topic create orders --partitions 4 --extend --channel billing", "nsqext topic create orders --if-not-exists"
)
@command
async def create(
    connection: ServerAccess,
    topic: Topic,
    channel: Annotated[list[str] | None, Option(help="A channel to create; repeat for more.")] = None,
    options: NewTopic = NewTopic(),
    if_not_exists: Annotated[bool, Option("--if-not-exists", help="Keep an existing topic as it is.")] = False,
    wait: Annotated[float, Option(help="Seconds to wait until every partition accepts publishes.")] = 150.0,
) -> None:
    """Create a topic with channels, and wait until it accepts publishes.

    A redesigned cluster refuses publishes to a topic without channels: without --channel the channel "default" is
    created. A real cluster takes about 10 s until all partitions accept publishes. The original NSQ has neither
    partitions nor options, which are refused there.
    """
    from nsqext.admin.options import redesigned_settings, refuse_redesigned

    if not wait:
        raise InvalidSetting(
            "--wait 0: channels are created once the topic accepts publishes", hint="give a number of seconds"
        )
    async with connection.admin() as admin:
        if names := redesigned_settings(asdict(options)):
            nodes = await admin.nodes()
            with anyio.move_on_after(wait):
                while not nodes:  # the first node decides whether the settings would be ignored
                    await anyio.sleep(_LOOK)
                    nodes = await admin.nodes()
            refuse_redesigned(names, topic, nodes)
        existed = if_not_exists and await _exists(admin, topic)
        with waits.waiting(f"all partitions of {topic} to accept publishes"):
            await admin.create_topic(topic, **asdict(options), exist_ok=if_not_exists, wait=wait)
        text = f"{topic} exists, and stays as it is" if existed else f"{topic} is created"
        connection.show({"topic": topic, "created": not existed}, text)
        info = await admin.topic(topic)
        needed = [DEFAULT_CHANNEL] if info.generation == "redesigned" and not info.channels else []
        for name in channel or needed:
            await admin.create_channel(topic, name)
            new = name not in info.channels
            text = f"channel {name} of {topic} {'is created' if new else 'exists'}"
            connection.show({"topic": topic, "channel": name, "created": new}, text)


async def _exists(admin: Admin, topic: str) -> bool:
    try:
        await admin.topic(topic)
    except TopicNotFound:
        return False
    return True


@app.command("delete")
@examples("nsqext topic delete orders --yes")
@changes(question="Delete the topic {topic} with all its messages and channels?")
async def delete(
    admin: Admin,
    topic: Topic,
    if_exists: Annotated[bool, Option("--if-exists", help="A missing topic is not an error.")] = False,
) -> Result:
    """Delete a topic with all its messages and channels."""
    deleted = await admin.delete_topic(topic, missing_ok=if_exists)
    return {"topic": topic, "deleted": deleted}, f"{topic} {'is deleted' if deleted else 'does not exist'}"


@app.command("expand")
@examples("nsqext topic expand orders --partitions 8 --yes")
@changes("expanded", "Give {topic} {partitions} partitions? It cannot be undone.")
async def expand(
    admin: Admin, topic: Topic, partitions: Annotated[int, Option(help="The new number of partitions.")]
) -> None:
    """Raise the number of partitions of a topic."""
    await admin.expand_topic(topic, partitions)


@app.command("set")
@examples("nsqext topic set orders --retention-days 7 --replicas 2 --yes")
@changes("changed")
async def set_topic(
    admin: Admin,
    topic: Topic,
    replicas: Annotated[int | None, Option(help="Replicas of each partition.")] = None,
    retention_days: RetentionDays = None,
    sync_every: SyncEvery = None,
    registered_channels_only: Annotated[
        bool | None,
        Option("--registered-channels-only/--any-channel", help="Whether consumers cannot create channels."),
    ] = None,
) -> None:
    """Change settings of a topic of the redesigned NSQ; other settings stay."""
    await admin.set_topic(
        topic,
        replicas=replicas,
        retention_days=retention_days,
        sync_every=sync_every,
        registered_channels_only=registered_channels_only,
    )


@app.command("move")
@examples("nsqext topic move orders 0 127.0.0.1:4150 127.0.0.1:4152 --yes")
@changes("moved")
async def move(
    admin: Admin,
    topic: Topic,
    partition: Annotated[int, Argument(help="The partition.")],
    source: Annotated[str, Argument(help="HOST:PORT of the TCP side of a node with a replica.")],
    target: Annotated[str, Argument(help="HOST:PORT of the TCP side of the other node.")],
) -> None:
    """Move a replica of a partition to another node, which becomes the leader if the first node leads."""
    await admin.move_partition(topic, partition, source, target)


@app.command("trace")
@examples("nsqext topic trace orders --channel billing --yes", "nsqext topic trace orders --off --yes")
@changes("traced")
async def trace(
    admin: Admin,
    topic: Topic,
    channel: Annotated[str | None, Option(help="Deliveries of this channel, instead of publishes.")] = None,
    off: Annotated[bool, Option("--off", help="Stop it.")] = False,
) -> str:
    """Make the nodes of the redesigned NSQ log the messages of a topic or channel."""
    await admin.trace_topic(topic, channel=channel, enabled=not off)
    return "untraced" if off else "traced"


@app.command("tombstone")
@examples(
    "nsqext topic tombstone orders 127.0.0.1:4151 --yes", "nsqext topic tombstone orders 127.0.0.1:4151 --restore --yes"
)
@changes("hidden")
async def tombstone(
    admin: Admin,
    topic: Topic,
    node: Annotated[str, Argument(help="HOST:PORT of the node's HTTP side.")],
    restore: Annotated[bool, Option("--restore", help="Show a hidden node again.")] = False,
) -> str:
    """Hide a topic's node temporarily from consumers and producers, before it is taken out of service."""
    await admin.tombstone(topic, node, restore=restore)
    return "shown" if restore else "hidden"


@app.command("empty")
@examples("nsqext topic empty orders --yes")
@changes("emptied", "Discard the messages that wait in {topic} and all its channels?")
async def empty(admin: Admin, topic: Topic) -> None:
    """Discard the waiting messages of a topic and its channels."""
    await admin.empty_topic(topic)


def _add_switch(name: str, done: str, summary: str, question: str = "") -> None:
    async def switch(admin: Admin, topic: Topic) -> None:
        await getattr(admin, f"{name}_topic")(topic)

    switch.__doc__ = summary
    app.command(name)(examples(f"nsqext topic {name} orders --yes")(changes(done, question)(switch)))


_add_switch(
    "upgrade",
    "upgraded",
    "Give a topic extend support: headers, tags and keys. It cannot be undone.",
    "Give {topic} extend support? It cannot be undone, and ends the connections of its clients.",
)
_add_switch("pause", "paused", "Stop a topic of the original NSQ from passing messages to its channels.")
_add_switch("unpause", "unpaused", "Make a paused topic pass messages to its channels again.")


def _show_map(connection: ServerAccess, found: PartitionMap) -> None:
    meta = found.meta
    connection.show(
        {"topic": found.topic, "meta": attrs.asdict(meta)},
        f"{found.topic}: {', '.join(describe_meta(meta)) if meta.partition_num else 'original NSQ'}",
    )
    lacks = "no leader" if found.access == "r" else "not offered to producers"
    for partition in sorted({*range(meta.partition_num), *found.leaders}):
        leader = found.leaders.get(partition)
        http = found.http.get(leader) if leader is not None else None
        connection.show(
            {
                "topic": found.topic,
                "partition": partition,
                "leader": leader and str(leader),
                "http": http and str(http),
            },
            f"  partition {partition}: {leader or lacks}",
        )
    for node in found.nodes:
        connection.show({"topic": found.topic, "node": str(node)}, f"  node {node}")


@examples("nsqext lookup --lookupd 127.0.0.1:4161", "nsqext lookup orders --access w")
@command
async def lookup(
    connection: ServerAccess,
    topic: Annotated[str | None, Argument(help="A topic; without it, all nodes and topics.")] = None,
    access: Annotated[str, Option(help="w: partitions for producers; r: partitions for consumers.")] = "r",
) -> None:
    """Show lookup nodes, nsqd nodes and topics, or the partitions of a topic."""
    if topic is None and access != "r":
        raise InvalidSetting("--access without a topic would be ignored", hint="give a topic")
    with waits.waiting("a response of lookup"):
        await _look_up(connection, topic, access)


async def _look_up(connection: ServerAccess, topic: str | None, access: str) -> None:
    from nsqext.lookup.client import LookupClient
    from nsqext.lookup.partition_map import merged

    async with LookupClient(connection.lookup(), connection.options().lookup) as client:
        if topic is not None:
            _show_map(connection, merged(topic, access, await client.lookup(topic, access)))
            return
        for lookup in await client.lookup_nodes():
            leader = " (leader)" if lookup.leader else ""
            record = {"lookupd": str(lookup.address), "leader": lookup.leader}
            connection.show(record, f"nsqlookupd {lookup.address}{leader}")
        for node in await client.lists.nodes():
            connection.show({"nsqd": str(node.tcp), "version": node.version}, f"nsqd {node.tcp} {node.version}")
        for name in await client.lists.topics():
            connection.show({"topic": name}, f"topic {name}")
