"""``nsqext tail``: print the messages of a topic."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer
from attrs import define, field

from nsqext import Requeue
from nsqext.cli.channel import parse_position
from nsqext.cli.common import Connection, connected, examples, perform, printable
from nsqext.cli.records import message_record
from nsqext.errors import ConnectionFailed, InvalidSetting, LookupFailed, PartitionUnavailable

if TYPE_CHECKING:
    from nsqext import Admin, Consumer, Message

__all__ = ("Filter", "drained", "parse_pairs", "parse_time", "run")

_POLL = 0.5  # seconds between two looks at the lag of a channel


def parse_time(text: str) -> int:
    """Return a time in nanoseconds since 1970, from ISO form, seconds since 1970, or a duration ago such as ``90m``.

    Raises:
        InvalidSetting: it is neither.
    """
    import time
    from datetime import datetime

    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:])
    try:
        if unit is not None:
            return int((time.time() - float(text[:-1]) * unit) * 1e9)
        if text.replace(".", "", 1).isdecimal():
            return int(float(text) * 1e9)
        return int(datetime.fromisoformat(text).timestamp() * 1e9)
    except ValueError:
        raise InvalidSetting(
            f"the time {text!r} cannot be parsed", hint="write 2026-05-01T12:00:00, seconds since 1970, or 30s, 5m, 2h"
        ) from None


def parse_pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """Return NAME=VALUE options as a mapping.

    Raises:
        InvalidSetting: one is not of this form.
    """
    pairs = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise InvalidSetting(f"{option} {text!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


@define
class Filter:
    """Which messages are wanted.

    Attributes:
        headers: headers with these values.
        tag: this tag.
        key: this key.
        trace_id: this trace id.
        since: stored at this time or later, in nanoseconds since 1970.
        until: stored before this time.
    """

    headers: Mapping[str, str] = field(factory=dict)
    tag: str | None = None
    key: str | None = None
    trace_id: int | None = None
    since: int | None = None
    until: int | None = None

    def takes(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record of a message is wanted."""
        headers = record["headers"]
        return (
            (self.since is None or record["timestamp"] >= self.since)
            and (self.until is None or record["timestamp"] < self.until)
            and (self.tag is None or record["tag"] == self.tag)
            and (self.key is None or record["key"] == self.key)
            and (self.trace_id is None or record["trace_id"] == self.trace_id)
            and all(str(headers.get(name)) == value for name, value in self.headers.items())
        )


async def drained(admin: Admin, topic: str, channel: str) -> None:
    """Return when a channel has no messages left: none waits, is in flight or deferred."""
    while True:
        with suppress(ConnectionFailed, LookupFailed, PartitionUnavailable):  # a leader moves, or a node restarts
            stats = await admin.stats(topic, channel)
            if channel in stats.channels and stats.channels[channel].lag == 0 and not stats.unreachable:
                return
        await anyio.sleep(_POLL)


def _printer(connection: Connection, raw: bool, template: str | None) -> Callable[[Message, dict[str, Any]], None]:
    """Return a function that prints a message; at a terminal, control characters are escaped."""
    terminal = sys.stdout.isatty()

    def print_line(text: str) -> None:
        print(printable(text) if terminal else text, flush=True)

    def print_raw(message: Message, record: dict[str, Any]) -> None:
        if terminal:
            print_line(message.body.decode(errors="backslashreplace"))
            return
        sys.stdout.buffer.write(message.body + b"\n")
        sys.stdout.buffer.flush()

    def print_formatted(message: Message, record: dict[str, Any]) -> None:
        text = message.body.decode(errors="backslashreplace")
        headers = defaultdict(str, record["headers"])
        values = {name: "" if value is None else value for name, value in record.items()}
        print_line((template or "").format_map({**values, "body": text, "headers": headers}))

    def print_message(message: Message, record: dict[str, Any]) -> None:
        headers = "".join(f" {name}={value}" for name, value in record["headers"].items())
        marks = "".join(f" {name}={record[name]}" for name in ("key", "tag") if record[name] is not None)
        text = message.body.decode(errors="backslashreplace")
        connection.show(record, printable(f"{message.topic}[{message.partition}]{marks}{headers} {text}"))

    if raw:
        return print_raw
    return print_formatted if template is not None else print_message


def _check_template(template: str) -> None:
    names = ("topic", "partition", "id", "attempts", "timestamp", "trace_id", "offset", "tag", "key", "body")
    try:
        template.format_map({**dict.fromkeys(names, ""), "headers": defaultdict(str)})
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        hint = f"use {{headers[NAME]}} and, in braces, {', '.join(names)}"
        raise InvalidSetting(f"--format {template!r} cannot be used: {error!r}", hint=hint) from None


@examples(
    "nsqext tail orders",
    "nsqext tail orders --start earliest --until-end --raw > orders.txt",
    "nsqext tail orders --since 10m --header country=NL --key 4711",
    "nsqext tail orders --format '{timestamp} {key} {headers[user]} {body}'",
)
@connected
def run(
    connection: Connection,
    topic: Annotated[str, typer.Argument(help="The topic.")],
    channel: Annotated[
        str | None, typer.Option(help="Channel to consume; without it an own one, deleted afterwards.")
    ] = None,
    count: Annotated[int, typer.Option(min=0, help="End after so many messages; 0 for never.")] = 0,
    until_end: Annotated[bool, typer.Option("--until-end", help="End when the channel has no messages left.")] = False,
    start: Annotated[
        str | None, typer.Option(help="earliest, latest, timestamp:SECONDS, offset:BYTES or message:NUMBER.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Only messages with this tag.")] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: only messages with it; repeat for more.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="Only messages with this key.")] = None,
    trace_id: Annotated[int | None, typer.Option(help="Only messages with this trace id.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only messages stored since: ISO time, seconds since 1970, or 30s, 5m, 2h ago.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Only messages stored before then.")] = None,
    partition: Annotated[list[int] | None, typer.Option(help="Only this partition; repeat for more.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print bodies only, each with a newline.")] = False,
    template: Annotated[
        str | None, typer.Option("--format", help="Print '{topic} {partition} {key} {headers[NAME]} {body} …'.")
    ] = None,
) -> None:
    """Print messages, and finish them, until ^C, SIGTERM or the given end.

    A message that a filter refuses is finished as well: with --channel, other consumers of the channel do not receive
    it. Only --tag with --channel leaves other messages in the channel.
    """
    if raw and template is not None:
        raise InvalidSetting("--raw and --format contradict each other")
    if template is not None:
        _check_template(template)
    wanted = Filter(
        parse_pairs(header, "--header"),
        tag,
        key,
        trace_id,
        parse_time(since) if since else None,
        parse_time(until) if until else None,
    )
    settings: dict[str, Any] = {}
    if count:
        settings["max_in_flight"] = min(count, 200)
    if tag is not None and channel is not None:
        if until_end:
            raise InvalidSetting(
                "--until-end does not go with --tag and --channel", hint="untagged messages stay in the channel"
            )
        settings["tag"] = tag
    if partition:
        settings["partitions"] = tuple(partition)
    if start is not None:
        settings["start"] = parse_position(start)
    show = _printer(connection, raw, template)

    async def act() -> None:
        name = channel or f"tail_{token_hex(4)}#ephemeral"
        if wanted.since is not None and name != channel and start is None and await connection.has_positions(topic):
            settings["start"] = parse_position(f"timestamp:{wanted.since // 1_000_000_000}")
        consumer = connection.consumer(topic, name, **settings)
        await _follow(connection, consumer, wanted, show, count, until_end=until_end)

    perform(act)


async def _follow(
    connection: Connection,
    consumer: Consumer,
    wanted: Filter,
    show: Callable[[Message, dict[str, Any]], None],
    count: int,
    *,
    until_end: bool,
) -> None:
    broken: list[BrokenPipeError] = []
    shown = 0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal shown
        if broken or (count and shown >= count):
            raise Requeue(0.0, backoff=False)
        record = message_record(message)
        if not wanted.takes(record):
            return
        try:
            show(message, record)
        except BrokenPipeError as error:
            broken.append(error)
            consumer.stop()
            raise Requeue(0.0, backoff=False) from error
        shown += 1
        if shown == count:
            consumer.stop()

    async def stop_at_end() -> None:
        async with connection.admin() as admin:
            await drained(admin, consumer.topics[0], consumer.channel)
        consumer.stop()

    async with anyio.create_task_group() as tasks:
        if until_end:
            tasks.start_soon(stop_at_end)
        await consumer.run(signals=True)
        tasks.cancel_scope.cancel()
    if broken:
        raise broken[0]
