"""``nsqext tail``: print the messages of a topic as they come."""

from __future__ import annotations

from secrets import token_hex
from typing import Annotated, Any

import typer

from nsqext import Consumer, Message, Requeue
from nsqext.cli.common import Lookupd, Nsqd, Url, addresses, body_fields, perform, show
from nsqext.client.from_url import read_position
from nsqext.errors import InvalidSetting

__all__ = ("run",)


def _record(message: Message) -> dict[str, Any]:
    return {
        "topic": message.topic,
        "partition": message.partition,
        "id": message.id.hex(),
        "attempts": message.attempts,
        "timestamp": message.timestamp,
        "trace_id": message.trace_id,
        "tag": message.tag,
        "headers": dict(message.headers),
        **body_fields(message.body),
    }


def run(
    topic: Annotated[str, typer.Argument(help="What to follow.")],
    channel: Annotated[
        str | None, typer.Option(help="Channel; one of its own that vanishes afterwards without it.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Only messages with this tag.")] = None,
    count: Annotated[int, typer.Option(min=0, help="End after so many messages; 0 for never.")] = 0,
    start: Annotated[
        str | None, typer.Option(help="earliest, latest, timestamp:SECONDS, offset:BYTES or message:NUMBER.")
    ] = None,
    lookupd: Lookupd = None,
    nsqd: Nsqd = None,
    url: Url = None,
) -> None:
    """Print messages, and finish them; until Ctrl+C, SIGTERM, or the count is reached."""
    settings = addresses(url, lookupd, nsqd)
    settings["delivery_block_warning"] = 0.0  # it is for programs with handlers of their own
    if count:
        settings["max_in_flight"] = min(count, 200)
    if tag is not None:
        settings["tag"] = tag
    if start is not None:
        try:
            settings["start"] = read_position(start)
        except ValueError as error:
            raise InvalidSetting(f"--start {start!r} cannot be read: {error}") from None
    consumer = Consumer.from_url(topic, channel or f"tail_{token_hex(4)}#ephemeral", url, **settings)
    broken: list[BrokenPipeError] = []
    shown = 0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal shown
        if broken or (count and shown >= count):
            raise Requeue(0.0, backoff=False)
        headers = "".join(f" {name}={value}" for name, value in message.headers.items())
        place = f"{message.topic}[{message.partition}]"
        try:
            show(_record(message), f"{place}{headers} {message.body.decode(errors='backslashreplace')}")
        except BrokenPipeError as error:
            broken.append(error)
            consumer.stop()
            raise Requeue(0.0, backoff=False) from error
        shown += 1
        if shown == count:
            consumer.stop()

    async def follow() -> None:
        await consumer.run()
        if broken:
            raise broken[0]

    perform(follow)
