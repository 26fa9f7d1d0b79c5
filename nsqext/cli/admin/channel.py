"""``nsqext channel``: list, create, change, move and delete channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from nsqext.cli.command import Channel, Result, Topic, changes, command, examples, parse_message_id, parse_position
from nsqext.cli.connection import ServerAccess
from nsqext.cli.parameters import Argument, CommandGroup, Option

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nsqext.admin import Admin, ChannelStats, TopicStats

_COLUMNS = ("channel", "depth", "in_flight", "deferred", "lag", "consumers", "paused", "skipped")
_ADDED = ("paused_on", "skipped_on", "unreachable", "missing")  # members that few records have

app: CommandGroup = CommandGroup()


def channel_record(topic: str, stats: ChannelStats) -> dict[str, Any]:
    """Return the members of a channel for tables and JSON."""
    return {
        "topic": topic,
        "channel": stats.name,
        "depth": stats.depth,
        "in_flight": stats.in_flight,
        "deferred": stats.deferred,
        "lag": stats.lag,
        "messages": stats.messages,
        "requeued": stats.requeued,
        "timed_out": stats.timed_out,
        "consumers": stats.consumers,
        "paused": stats.paused,
        "skipped": stats.skipped,
    }


def lacking(topic: TopicStats) -> dict[str, list[Any]]:
    """Return the nodes and partitions that reported nothing, as members of a record; its sums exclude them."""
    lacks: dict[str, list[Any]] = {
        "unreachable": [str(node) for node in topic.unreachable],
        "missing": list(topic.missing or ()),
    }
    return {name: found for name, found in lacks.items() if found}


def stopped_on(topic: TopicStats, channel: str) -> dict[str, list[Any]]:
    """Return where a channel is paused or skipped, as members of its record, if it is so on some partitions only."""
    parts = [part for part in topic.partitions if channel in part.channels]
    stopped = {
        "paused_on": [part for part in parts if part.channels[channel].paused],
        "skipped_on": [part for part in parts if part.channels[channel].skipped],
    }
    return {
        name: [str(part.node) if part.partition is None else part.partition for part in found]
        for name, found in stopped.items()
        if 0 < len(found) < len(parts)
    }


def table_columns(columns: tuple[str, ...], records: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the columns of a table; members of `lacking` and `stopped_on` are added if a record has them."""
    present = {name for record in records for name in record}
    return (*columns, *(name for name in _ADDED if name in present))


@app.command("list")
@examples("nsqext channel list orders", "nsqext channel list orders --json | jq 'select(.lag > 1000)'")
@command
async def list_channels(connection: ServerAccess, topic: Topic) -> None:
    """List the channels of a topic with depth, lag, messages in flight and consumers."""
    async with connection.admin() as admin:
        stats = await admin.stats(topic)
        names = await admin.channels(topic)
    lacks = lacking(stats)
    records = [channel_record(topic, one) | stopped_on(stats, one.name) | lacks for one in stats.channels.values()]
    # a channel that no node has opened has no statistics
    records += [{"topic": topic, "channel": name, **lacks} for name in names if name not in stats.channels]
    connection.table(table_columns(_COLUMNS, records), records)


@app.command("create")
@examples(
    "nsqext channel create orders billing audit",
    "nsqext channel create orders carts --dispatch key_failover --key-header cart",
)
@command
async def create(
    connection: ServerAccess,
    topic: Topic,
    channels: Annotated[list[str], Argument(help="The channels.")],
    dispatch: Annotated[
        str | None, Option(help="shared or key_failover, on servers with the Key_Failover extension.")
    ] = None,
    key_header: Annotated[str | None, Option(help="Header that carries the key of a key_failover channel.")] = None,
) -> None:
    """Create channels on every partition; a new channel starts after the stored messages."""
    async with connection.admin() as admin:
        before = await admin.channels(topic)
        for name in channels:
            await admin.create_channel(topic, name, dispatch=dispatch, key_header=key_header)
            new = name not in before
            text = f"channel {name} of {topic} {'is created' if new else 'exists'}"
            connection.show({"topic": topic, "channel": name, "created": new}, text)


@app.command("set")
@examples(
    "nsqext channel set orders billing --rate-limit-kib 1024 --yes", "nsqext channel set orders billing --ordered --yes"
)
@changes("changed")
async def set_channel(
    admin: Admin,
    topic: Topic,
    channel: Channel,
    ordered: Annotated[
        bool | None, Option("--ordered/--unordered", help="Deliver one message of a partition at a time.")
    ] = None,
    rate_limit_kib: Annotated[
        int | None, Option(help="KiB a second that each partition delivers, in messages of more than 1 KiB.")
    ] = None,
) -> None:
    """Change settings of a channel of the redesigned NSQ; other settings stay."""
    await admin.set_channel(topic, channel, ordered=ordered, rate_limit_kib=rate_limit_kib)


@app.command("limit-consumers")
@examples("nsqext channel limit-consumers orders billing 10 --yes")
@changes("limited")
async def limit_consumers(
    admin: Admin,
    topic: Topic,
    channel: Channel,
    ready: Annotated[int, Argument(help="Messages in flight at each connection, at most; 50000 ends the limit.")],
    address_prefix: Annotated[str, Option(help="Only consumers whose HOST:PORT begins with this text.")] = "",
) -> None:
    """Limit messages in flight at the connected consumers of a channel of the redesigned NSQ."""
    await admin.limit_consumers(topic, channel, ready, address_prefix=address_prefix)


@app.command("finish")
@examples("nsqext channel finish orders billing 0000000000000002000000000000002a --yes")
@changes("finished", "Finish the message {message} of {topic}, channel {channel}, without delivery?")
async def finish(
    admin: Admin,
    topic: Topic,
    channel: Channel,
    message: Annotated[str, Argument(metavar="ID", help="Message id of 32 hexadecimal digits, or its number.")],
) -> None:
    """Finish a message that is in flight or deferred in a channel of the redesigned NSQ, for any consumer."""
    await admin.finish_message(topic, channel, parse_message_id(message))


@app.command("delete")
@examples("nsqext channel delete orders billing --yes")
@changes(question="Delete the channel {channel} of {topic} with its waiting messages?")
async def delete(
    admin: Admin,
    topic: Topic,
    channel: Channel,
    if_exists: Annotated[bool, Option("--if-exists", help="A missing channel is not an error.")] = False,
) -> Result:
    """Delete a channel with its position and waiting messages."""
    deleted = await admin.delete_channel(topic, channel, missing_ok=if_exists)
    text = f"channel {channel} of {topic} {'is deleted' if deleted else 'does not exist'}"
    return {"topic": topic, "channel": channel, "deleted": deleted}, text


@app.command("empty")
@examples("nsqext channel empty orders billing --yes")
@changes("emptied", "Discard the messages that wait in the channel {channel} of {topic}?")
async def empty(admin: Admin, topic: Topic, channel: Channel) -> None:
    """Discard the waiting messages of a channel."""
    await admin.empty_channel(topic, channel)


def _add_switch(name: str, done: str, summary: str, method: str, question: str = "") -> None:
    example = f"nsqext channel {name} orders billing --yes"

    async def switch(admin: Admin, topic: Topic, channel: Channel) -> None:
        await getattr(admin, method)(topic, channel)

    switch.__doc__ = summary
    app.command(name)(examples(example)(changes(done, question)(switch)))


_add_switch("pause", "paused", "Stop delivery from a channel; messages wait.", "pause_channel")
_add_switch("unpause", "unpaused", "Resume delivery from a channel.", "unpause_channel")
_add_switch(
    "skip",
    "skipped",
    "Make a channel of the redesigned NSQ finish every message without delivery, until `unskip`.",
    "skip_channel",
    "Finish all messages of the channel {channel} of {topic} without delivery?",
)
_add_switch("unskip", "unskipped", "Make a skipped channel deliver messages again.", "unskip_channel")
_add_switch(
    "redeliver",
    "redelivered",
    "Make a channel of the redesigned NSQ that is stuck read again from its confirmed position.",
    "redeliver_unfinished",
    "Read the channel {channel} of {topic} again from its confirmed position? Messages may be delivered twice.",
)


@app.command("empty-delayed")
@examples("nsqext channel empty-delayed orders billing --yes")
@changes("emptied", "Discard the delayed messages of the channel {channel} of {topic}?")
async def empty_delayed(admin: Admin, topic: Topic, channel: Channel) -> None:
    """Discard the delayed messages of a channel of the redesigned NSQ."""
    await admin.empty_delayed(topic, channel)


@app.command("deliver-delayed")
@examples("nsqext channel deliver-delayed orders billing --within-hours 24 --yes")
@changes("delivered", "Deliver delayed messages of the channel {channel} of {topic} now, before they are due?")
async def deliver_delayed(
    admin: Admin,
    topic: Topic,
    channel: Channel,
    within_hours: Annotated[int, Option(help="Messages that are due within this number of hours.")] = 1,
) -> None:
    """Deliver messages of a channel's delayed queue (redesigned NSQ) before they are due."""
    await admin.deliver_delayed(topic, channel, within_hours=within_hours)


@app.command("seek")
@examples(
    "nsqext channel seek orders billing earliest --yes",
    "nsqext channel seek orders billing 2026-05-01T12:00:00+02:00 --yes",
    "nsqext channel seek orders billing message:1000 --partition 0 --yes",
)
@changes("moved", "Move the channel {channel} of {topic} to {position}? It skips messages, or delivers them again.")
async def seek(
    admin: Admin,
    topic: Topic,
    channel: Channel,
    position: Annotated[
        str,
        Argument(help="earliest, latest, timestamp:SECONDS, offset:BYTES, message:NUMBER, or a time in ISO form."),
    ],
    partition: Annotated[list[int] | None, Option(help="Only this partition; repeat for more.")] = None,
) -> None:
    """Move a channel of the redesigned NSQ to a position; its consumers continue there."""
    await admin.seek_channel(topic, channel, parse_position(position), partitions=partition)
