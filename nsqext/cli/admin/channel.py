"""``nsqext channel``: list, create, change, move and delete channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsqext.cli.arguments import Channel, Topic, Yes, parse_message_id, parse_position
from nsqext.cli.command import examples
from nsqext.cli.connection import Connection, connected
from nsqext.cli.output import confirm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nsqext import Admin
    from nsqext.admin import ChannelStats

app: typer.Typer = typer.Typer()


def channel_record(topic: str, stats: ChannelStats) -> dict[str, Any]:
    """Return a channel for tables and JSON."""
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
        "consumers": len({(client.client_id, client.hostname, client.address) for client in stats.clients}),
        "paused": stats.paused,
        "skipped": stats.skipped,
    }


@app.command("list")
@examples("nsqext channel list orders", "nsqext channel list orders --json | jq 'select(.lag > 1000)'")
@connected
async def list_channels(connection: Connection, topic: Topic) -> None:
    """List the channels of a topic with depth, lag, messages in flight and consumers."""
    async with connection.admin() as admin:
        stats = await admin.stats(topic)
        names = await admin.channels(topic)
    records = [channel_record(topic, one) for one in stats.channels.values()]
    # a channel that no node has opened yet has no statistics
    records += [{"topic": topic, "channel": name} for name in names if name not in stats.channels]
    connection.table(("channel", "depth", "in_flight", "deferred", "lag", "consumers", "paused", "skipped"), records)


@app.command("create")
@examples(
    "nsqext channel create orders billing audit",
    "nsqext channel create orders carts --dispatch key_failover --key-header cart",
)
@connected
def create(
    connection: Connection,
    topic: Topic,
    channels: Annotated[list[str], typer.Argument(help="The channels.")],
    dispatch: Annotated[
        str | None, typer.Option(help="shared or key_failover, on servers with the Key_Failover extension.")
    ] = None,
    key_header: Annotated[
        str | None, typer.Option(help="Header that carries the key of a key_failover channel.")
    ] = None,
) -> None:
    """Create channels on every partition; a new channel starts after the stored messages."""

    def create_one(name: str) -> Callable[[Admin], Awaitable[None]]:
        return lambda admin: admin.create_channel(topic, name, dispatch=dispatch, key_header=key_header)

    for name in channels:
        connection.change(topic, "created", create_one(name), name)


@app.command("set")
@examples("nsqext channel set orders billing --rate-limit-kib 1024", "nsqext channel set orders billing --ordered")
@connected
def set_channel(
    connection: Connection,
    topic: Topic,
    channel: Channel,
    ordered: Annotated[
        bool | None, typer.Option("--ordered/--unordered", help="Deliver one message of a partition at a time.")
    ] = None,
    rate_limit_kib: Annotated[
        int | None, typer.Option(help="KiB a second that each partition delivers, in messages of more than 1 KiB.")
    ] = None,
) -> None:
    """Change settings of a channel of the redesigned NSQ; the others stay as they are."""
    connection.change(
        topic,
        "changed",
        lambda admin: admin.set_channel(topic, channel, ordered=ordered, rate_limit_kib=rate_limit_kib),
        channel,
    )


@app.command("limit-consumers")
@examples("nsqext channel limit-consumers orders billing 10 --address-prefix 10.0.0.7:")
@connected
def limit_consumers(
    connection: Connection,
    topic: Topic,
    channel: Channel,
    ready: Annotated[int, typer.Argument(help="Messages in flight at each connection, at most; 50000 ends the limit.")],
    address_prefix: Annotated[str, typer.Option(help="Only consumers whose HOST:PORT begins with this text.")] = "",
) -> None:
    """Limit the messages in flight at the connected consumers of a channel of the redesigned NSQ."""
    connection.change(
        topic,
        "limited",
        lambda admin: admin.limit_consumers(topic, channel, ready, address_prefix=address_prefix),
        channel,
    )


@app.command("finish")
@examples("nsqext channel finish orders billing 0000000000000002000000000000002a")
@connected
def finish(
    connection: Connection,
    topic: Topic,
    channel: Channel,
    message: Annotated[str, typer.Argument(metavar="ID", help="Message id of 32 hexadecimal digits, or its number.")],
) -> None:
    """Finish a message that is in flight or deferred in a channel of the redesigned NSQ, for any consumer."""
    wanted = parse_message_id(message)
    connection.change(topic, "finished", lambda admin: admin.finish_message(topic, channel, wanted), channel)


@app.command("delete")
@examples("nsqext channel delete orders billing --yes")
@connected
def delete(
    connection: Connection,
    topic: Topic,
    channel: Channel,
    yes: Yes = False,
    if_exists: Annotated[bool, typer.Option("--if-exists", help="A missing channel is not an error.")] = False,
) -> None:
    """Delete a channel with its position and its waiting messages."""
    confirm(f"Delete the channel {channel} of {topic} with its waiting messages?", yes=yes)
    connection.change(
        topic, "deleted", lambda admin: admin.delete_channel(topic, channel, missing_ok=if_exists), channel
    )


@app.command("empty")
@examples("nsqext channel empty orders billing --yes")
@connected
def empty(connection: Connection, topic: Topic, channel: Channel, yes: Yes = False) -> None:
    """Discard the messages that wait in a channel."""
    confirm(f"Discard the messages that wait in the channel {channel} of {topic}?", yes=yes)
    connection.change(topic, "emptied", lambda admin: admin.empty_channel(topic, channel), channel)


def _add_switch(name: str, done: str, summary: str, method: str) -> None:
    """Add a command that changes a channel and has no options."""

    def switch(connection: Connection, topic: Topic, channel: Channel) -> None:
        connection.change(topic, done, lambda admin: getattr(admin, method)(topic, channel), channel)

    switch.__doc__ = summary
    app.command(name)(examples(f"nsqext channel {name} orders billing")(connected(switch)))


_add_switch("pause", "paused", "Stop delivery from a channel; messages wait.", "pause_channel")
_add_switch("unpause", "unpaused", "Resume delivery from a channel.", "unpause_channel")
_add_switch(
    "skip",
    "skipped",
    "Make a channel of the redesigned NSQ finish every message without delivery, until `unskip`.",
    "skip_channel",
)
_add_switch("unskip", "unskipped", "Make a skipped channel deliver messages again.", "unskip_channel")
_add_switch(
    "redeliver",
    "redelivered",
    "Make a channel of the redesigned NSQ that is stuck read again from its confirmed position.",
    "redeliver_unfinished",
)


@app.command("empty-delayed")
@examples("nsqext channel empty-delayed orders billing --yes")
@connected
def empty_delayed(connection: Connection, topic: Topic, channel: Channel, yes: Yes = False) -> None:
    """Discard the delayed messages of a channel of the redesigned NSQ."""
    confirm(f"Discard the delayed messages of the channel {channel} of {topic}?", yes=yes)
    connection.change(topic, "emptied", lambda admin: admin.empty_delayed(topic, channel), channel)


@app.command("deliver-delayed")
@examples("nsqext channel deliver-delayed orders billing --within-hours 24")
@connected
def deliver_delayed(
    connection: Connection,
    topic: Topic,
    channel: Channel,
    within_hours: Annotated[int, typer.Option(help="Messages that are due within so many hours.")] = 1,
) -> None:
    """Deliver messages of the delayed queue of a channel of the redesigned NSQ before they are due."""
    connection.change(
        topic, "delivered", lambda admin: admin.deliver_delayed(topic, channel, within_hours=within_hours), channel
    )


@app.command("seek")
@examples(
    "nsqext channel seek orders billing earliest",
    "nsqext channel seek orders billing 2026-05-01T12:00:00+02:00",
    "nsqext channel seek orders billing message:1000 --partition 0",
)
@connected
def seek(
    connection: Connection,
    topic: Topic,
    channel: Channel,
    position: Annotated[
        str,
        typer.Argument(
            help="earliest, latest, timestamp:SECONDS, offset:BYTES, message:NUMBER, or a time in ISO form."
        ),
    ],
    partition: Annotated[list[int] | None, typer.Option(help="Only this partition; repeat for more.")] = None,
) -> None:
    """Move a channel of the redesigned NSQ to a position; its consumers continue there."""
    target = parse_position(position)
    connection.change(
        topic, "moved", lambda admin: admin.seek_channel(topic, channel, target, partitions=partition), channel
    )
