"""``nsqext trace``: find a message in a topic."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsqext.cli.arguments import Topic, parse_message_id, parse_position, parse_time
from nsqext.cli.command import command, examples
from nsqext.cli.connection import Connection
from nsqext.cli.message_record import message_record
from nsqext.cli.output import printable
from nsqext.errors import OperationNotSupported

if TYPE_CHECKING:
    from nsqext import Message
    from nsqext.admin import PartitionStats


@examples("nsqext trace orders 7", "nsqext trace orders 000000000000002a0000000000000007 --since 1h")
@command
async def run(
    connection: Connection,
    topic: Topic,
    wanted: Annotated[str, typer.Argument(metavar="ID", help="Trace id, or message id of 32 hexadecimal digits.")],
    since: Annotated[
        str | None,
        typer.Option(help="Search messages stored since: ISO time, seconds since 1970, or a time ago: 30s, 5m, 2h."),
    ] = None,
) -> None:
    """Find the stored messages with a trace id or message id, and show which channels have finished them.

    It reads the topic through a temporary channel, and needs the redesigned NSQ: the original one stores no messages
    that can be read again. Exits with 1 if no message is found.
    """
    sought = parse_message_id(wanted)
    start = f"timestamp:{parse_time(since) // 1_000_000_000}" if since else "earliest"
    consumer = connection.consumer(
        topic, f"trace_{token_hex(4)}#ephemeral", start=parse_position(start), queue_position=True
    )
    found: list[dict[str, Any]] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        if sought in (message.trace_id, message.id):
            found.append(message_record(message))

    if not await connection.has_positions(topic):
        raise OperationNotSupported(
            "the original NSQ stores no messages that can be read again",
            topic=topic,
            hint="nsqext tail --trace-id shows messages that are published later",
        )
    await connection.serve(consumer, until_end=True, signals=False)  # ^C ends the search with code 130
    async with connection.admin() as admin:
        parts = {part.partition: part for part in (await admin.stats(topic)).partitions} if found else {}
    for record in found:
        states = _channel_states(parts.get(record["partition"]), record["offset"])
        states.pop(consumer.channel, None)
        record["channels"] = states
        place = f"{record['topic']}[{record['partition']}] offset {record['offset']}"
        text = record.get("body", record.get("body_base64"))
        by_channel = "".join(f"\n  channel {name}: {state}" for name, state in states.items())
        ids = f"id {record['id']} trace id {record['trace_id']}"
        connection.show(record, f"{place} {ids}: {printable(str(text))}{by_channel}")
    if not found:
        typer.echo(f"{topic} stores no message with the id {wanted}", err=True)
        raise typer.Exit(1)


def _channel_states(part: PartitionStats | None, offset: int) -> dict[str, str]:
    """Return for each channel whether it has finished the message at an offset.

    A channel reports its position up to the first unfinished message; later messages may be finished too.
    """
    states: dict[str, str] = {}
    if part is None or part.end is None:
        return states
    for name, channel in part.channels.items():
        if channel.lag_bytes is None:
            continue
        if offset >= part.end - channel.lag_bytes:
            states[name] = "not finished, or finished before an earlier message"
        else:
            states[name] = "finished, or deferred" if channel.deferred else "finished"
    return states
