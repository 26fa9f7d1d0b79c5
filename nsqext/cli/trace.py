"""``nsqext trace``: find a message in a topic."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from nsqext.cli.channel import parse_position
from nsqext.cli.common import Connection, connected, examples, perform, printable
from nsqext.cli.records import message_record
from nsqext.cli.tail import drained, parse_time

if TYPE_CHECKING:
    from nsqext import Message

__all__ = ("run",)


@examples("nsqext trace orders 7", "nsqext trace orders 000000000000002a0000000000000007 --since 1h")
@connected
def run(
    connection: Connection,
    topic: Annotated[str, typer.Argument(help="The topic.")],
    wanted: Annotated[str, typer.Argument(metavar="ID", help="Trace id, or message id of 32 hexadecimal digits.")],
    since: Annotated[
        str | None, typer.Option(help="Search messages stored since: ISO time, seconds since 1970, or 30s, 5m, 2h ago.")
    ] = None,
) -> None:
    """Find the messages with a trace id or message id among those that are stored, and show where they are.

    A topic of the redesigned NSQ is read through a channel of its own, which is deleted afterwards. Ends with 1 if no
    message is found.
    """
    start = f"timestamp:{parse_time(since) // 1_000_000_000}" if since else "earliest"
    consumer = connection.consumer(
        topic, f"trace_{token_hex(4)}#ephemeral", start=parse_position(start), queue_position=True
    )
    found: list[dict[str, Any]] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        if wanted in (str(message.trace_id), message.id.hex()):
            record = message_record(message)
            found.append(record)
            place = f"{record['topic']}[{record['partition']}] offset {record['offset']}"
            text = message.body.decode(errors="backslashreplace")
            connection.show(record, printable(f"{place} id {record['id']} trace id {record['trace_id']}: {text}"))

    async def stop_at_end() -> None:
        async with connection.admin() as admin:
            await drained(admin, topic, consumer.channel)
        consumer.stop()

    async def search() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop_at_end)
            await consumer.run(signals=True)
            tasks.cancel_scope.cancel()
        if not found:
            raise typer.Exit(1)

    perform(search)
