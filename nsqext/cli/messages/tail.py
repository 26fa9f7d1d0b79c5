"""``nsqext tail``: print the messages of a topic. ``nsqext trace``: find a message in a topic."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated, Any

from attrs import Factory, field, frozen

from nsqext import Requeue
from nsqext.cli.command import (
    Topic,
    UntilEnd,
    command,
    examples,
    parse_headers,
    parse_message_id,
    parse_position,
    parse_time,
)
from nsqext.cli.connection import EVERY_MESSAGE, ServerAccess
from nsqext.cli.message_files import message_record
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting, OperationNotSupported, escaped
from nsqext.protocol.headers import header_json
from nsqext.protocol.names import topic_and_partition

if TYPE_CHECKING:
    from nsqext import Message
    from nsqext.admin import PartitionStats

# members of a record in a template, besides ``headers``
_NAMES = ("topic", "partition", "id", "attempts", "timestamp", "trace_id", "offset", "tag", "key", "body")


def _parsed(parse: Callable[[Any], Any]) -> Any:
    return field(init=False, default=Factory(parse, takes_self=True))


@frozen
class Filter:
    """Options that select messages; all must match."""

    header: Annotated[list[str] | None, Option(help="NAME=VALUE: only messages with it; repeat for more.")] = None
    tag: Annotated[str | None, Option(help="Only messages with this tag.")] = None
    key: Annotated[str | None, Option(help="Only messages with this key.")] = None
    trace_id: Annotated[int | None, Option(help="Only messages with this trace id.")] = None
    since: Annotated[
        str | None,
        Option(help="Only messages stored since: ISO time, seconds since 1970, or a time ago: 30s, 5m, 2h."),
    ] = None
    until: Annotated[str | None, Option(help="Only messages stored before, as for --since.")] = None
    partition: Annotated[list[int] | None, Option(help="Only this partition; repeat for more.")] = None
    headers: Mapping[str, str] = _parsed(lambda given: parse_headers(given.header))
    after: int | None = _parsed(lambda given: parse_time(given.since) if given.since else None)
    before: int | None = _parsed(lambda given: parse_time(given.until) if given.until else None)

    def check(self) -> None:
        if self.after is not None and self.before is not None and self.after >= self.before:
            raise InvalidSetting(
                f"no message is stored since {self.since} and before {self.until}",
                hint="--since is the earlier time, as in --since 2h --until 1h",
            )

    def takes(self, record: Mapping[str, Any]) -> bool:
        headers = record["headers"]
        return (
            (self.after is None or record["timestamp"] >= self.after)
            and (self.before is None or record["timestamp"] < self.before)
            and (self.tag is None or record["tag"] == self.tag)
            and (self.key is None or record["key"] == self.key)
            and (self.trace_id is None or record["trace_id"] == self.trace_id)
            and all(header_json(headers.get(name)) == value for name, value in self.headers.items())
        )


@frozen
class Reading:
    """Options of the start and the end of reading."""

    count: Annotated[int, Option(min=0, help="Exit after this number of messages; 0 for no limit.")] = 0
    until_end: UntilEnd = False
    start: Annotated[
        str | None,
        Option(
            help="Where a new channel starts: earliest, latest, timestamp:SECONDS, offset:BYTES or message:NUMBER."
            " (default: latest; with --until-end earliest, on the redesigned NSQ)"
        ),
    ] = None


@frozen
class Output:
    """Output format of messages."""

    raw: Annotated[bool, Option("--raw", help="Print bodies only, each with a newline.")] = False
    template: Annotated[
        str | None, Option("--format", help="Print '{topic} {partition} {key} {headers[NAME]} {body} …'.")
    ] = None

    def check(self, *, json: bool) -> None:
        if json and (self.raw or self.template is not None):
            raise InvalidSetting("--json contradicts --raw and --format", hint="give one of them")
        if self.template is None:
            return
        if self.raw:
            raise InvalidSetting("--raw and --format contradict each other")
        try:
            self.template.format_map({**dict.fromkeys(_NAMES, ""), "headers": defaultdict(str)})
        except (KeyError, ValueError, IndexError, AttributeError) as error:
            hint = f"use {{headers[NAME]}} and, in braces, {', '.join(_NAMES)}"
            raise InvalidSetting(f"--format {self.template!r} cannot be used: {error!r}", hint=hint) from None


def _printer(connection: ServerAccess, output: Output) -> Callable[[Message, dict[str, Any]], None]:
    """Return a function that prints a message, with escaped control characters at a terminal."""
    terminal = sys.stdout.isatty()

    def print_line(text: str) -> None:
        print(escaped(text) if terminal else text, flush=True)

    def print_raw(message: Message, record: dict[str, Any]) -> None:
        if terminal:
            print_line(message.body.decode(errors="backslashreplace"))
            return
        sys.stdout.buffer.write(message.body + b"\n")
        sys.stdout.buffer.flush()

    def print_formatted(message: Message, record: dict[str, Any]) -> None:
        text = message.body.decode(errors="backslashreplace")
        headers = defaultdict(str, {name: header_json(value) or "" for name, value in record["headers"].items()})
        values = {name: "" if value is None else str(value) for name, value in record.items()}  # texts, as checked
        print_line((output.template or "").format_map({**values, "body": text, "headers": headers}))

    def print_message(message: Message, record: dict[str, Any]) -> None:
        headers = "".join(f" {name}={header_json(value)}" for name, value in record["headers"].items())
        marks = "".join(f" {name}={record[name]}" for name in ("key", "tag") if record[name] is not None)
        text = message.body.decode(errors="backslashreplace")
        place = topic_and_partition(message.topic, message.partition)
        connection.show(record, escaped(f"{place}{marks}{headers} {text}"))

    if output.raw:
        return print_raw
    return print_formatted if output.template is not None else print_message


@examples(
    "nsqext tail orders",
    "nsqext tail orders --start earliest --until-end --raw > orders.txt",
    "nsqext tail orders --since 10m --header country=NL --key 4711",
    "nsqext tail orders --format '{timestamp} {key} {headers[user]} {body}'",
)
@command
async def run(
    connection: ServerAccess,
    topic: Topic,
    channel: Annotated[str | None, Option(help="Channel to consume. (default: a temporary channel)")] = None,
    reading: Reading = Reading(),
    wanted: Filter = Filter(),
    output: Output = Output(),
) -> None:
    """Print and finish messages until ^C, SIGTERM, --count or --until-end.

    Messages that do not match are finished, too: other consumers of --channel do not receive them. Only --tag with
    --channel leaves other messages in the channel. Only these options leave messages out: a tag, filter, partitions,
    sample_rate or max_attempts in the URL or the environment are meant for services, and do not count.
    """
    output.check(json=connection.json)
    wanted.check()
    connection.check_end_is_known(until_end=reading.until_end)
    settings: dict[str, Any] = {}
    if reading.count:
        settings["max_in_flight"] = min(reading.count, 200)
    if wanted.tag is not None and channel is not None:
        if reading.until_end:
            raise InvalidSetting(
                "--until-end cannot be combined with --tag and --channel", hint="untagged messages stay in the channel"
            )
        settings["tag"] = wanted.tag
    if wanted.partition:
        settings["partitions"] = tuple(wanted.partition)
    show = _printer(connection, output)
    name = channel or f"tail_{token_hex(4)}#ephemeral"
    start = reading.start
    if start is None and (reading.until_end or wanted.after is not None) and await connection.has_positions(topic):
        if wanted.after is not None and channel is None:
            start = f"timestamp:{wanted.after // 1_000_000_000}"
        elif reading.until_end:
            start = "earliest"  # a channel that is new has no other end than its start
    if start is not None:
        settings["start"] = parse_position(start)
    consumer = connection.consumer(topic, name, **{**EVERY_MESSAGE, **settings})
    broken: list[OSError] = []
    shown = 0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal shown
        record = message_record(message)
        if not wanted.takes(record):
            return
        try:
            waits.spoke()
            show(message, record)
        except OSError as error:  # a closed pipe, a full disk
            broken.append(error)
            consumer.stop()
            raise Requeue(0.0, backoff=False) from error
        shown += 1
        if shown == reading.count:
            consumer.stop()

    await connection.serve(consumer, until_end=reading.until_end)
    if broken:
        raise broken[0]
    connection.check_end(until_end=reading.until_end)


@examples("nsqext trace orders 7", "nsqext trace orders 000000000000002a0000000000000007 --since 1h")
@command
async def trace(
    connection: ServerAccess,
    topic: Topic,
    wanted: Annotated[str, Argument(metavar="ID", help="Trace id, or message id of 32 hexadecimal digits.")],
    since: Annotated[
        str | None,
        Option(help="Search messages stored since: ISO time, seconds since 1970, or a time ago: 30s, 5m, 2h."),
    ] = None,
) -> None:
    """Find the stored messages with a trace id or message id, and show which channels have finished them.

    Reads a topic of the redesigned NSQ through a temporary channel: the original NSQ stores no messages that can be
    read again. Exits with 1 if no message is found.
    """
    sought = parse_message_id(wanted)
    connection.check_end_is_known(until_end=True)
    start = f"timestamp:{parse_time(since) // 1_000_000_000}" if since else "earliest"
    name = f"trace_{token_hex(4)}#ephemeral"
    consumer = connection.consumer(topic, name, start=parse_position(start), queue_position=True, **EVERY_MESSAGE)
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
        connection.show(record, f"{place} {ids}: {escaped(str(text))}{by_channel}")
    if not found:
        print(f"{topic} stores no message with the id {wanted}", file=sys.stderr)
        raise SystemExit(1)


def _channel_states(part: PartitionStats | None, offset: int) -> dict[str, str]:
    """Return for each channel, which reports only its first unfinished message, whether it has finished a message."""
    states: dict[str, str] = {}
    if part is None:
        return states
    for name, channel in part.channels.items():
        finished = part.finished_to(name)
        if finished is None:
            states[name] = "unknown, the leader does not deliver its last messages yet"
        elif offset >= finished:
            states[name] = "not finished, or finished before an earlier message"
        else:
            states[name] = "finished, or deferred" if channel.deferred else "finished"
    return states
