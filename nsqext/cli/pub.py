"""``nsqext pub``: publish from the command line, or the lines of standard input."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
import attrs
import typer

from nsqext import OutgoingMessage, Producer
from nsqext.cli.common import Lookupd, Nsqd, Url, addresses, perform, show
from nsqext.errors import InvalidSetting

__all__ = ("run",)


def _headers(given: list[str] | None) -> dict[str, str] | None:
    headers = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidSetting(f"--header {text!r} is not NAME=VALUE")
        headers[name] = value
    return headers or None


def run(
    topic: Annotated[str, typer.Argument(help="Where to.")],
    body: Annotated[
        list[str] | None, typer.Argument(help="Messages; without any, each line of standard input is one.")
    ] = None,
    header: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, an extend header; repeat for more.")] = None,
    tag: Annotated[str | None, typer.Option(help="Tag for dispatch.")] = None,
    key: Annotated[str | None, typer.Option(help="Messages of one key go to one partition, in order.")] = None,
    partition: Annotated[int | None, typer.Option(help="The partition.")] = None,
    trace_id: Annotated[int | None, typer.Option(help="Trace id; the result then tells id and offset.")] = None,
    delay: Annotated[float | None, typer.Option(help="Seconds until it is delivered; original NSQ only.")] = None,
    lookupd: Lookupd = None,
    nsqd: Nsqd = None,
    url: Url = None,
) -> None:
    """Publish messages; prints where each was stored, or how many lines were."""
    headers = _headers(header)
    producer = Producer.from_url(url, **addresses(url, lookupd, nsqd))

    async def arguments() -> None:
        async with producer:
            for text in body or ():
                receipt = await producer.publish(
                    topic,
                    text.encode(),
                    headers=headers,
                    tag=tag,
                    trace_id=trace_id,
                    key=key,
                    partition=partition,
                    delay=delay,
                )
                show(attrs.asdict(receipt), f"stored in {receipt.topic}[{receipt.partition}] at {receipt.node}")

    async def lines() -> None:
        count = 0
        async with producer, producer.batcher(topic) as batcher:
            async for line in anyio.wrap_file(sys.stdin.buffer):
                text = line.rstrip(b"\r\n")
                if text:
                    await batcher.add(OutgoingMessage(text, headers, tag, trace_id, key))
                    count += 1
            await batcher.flush()
        show({"topic": topic, "published": count}, f"{count} messages stored in {topic}")

    if body:
        perform(arguments)
        return
    if partition is not None or delay is not None:
        raise InvalidSetting("lines of standard input take neither --partition nor --delay")
    perform(lines)
