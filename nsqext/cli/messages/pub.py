"""``nsqext pub``: publish arguments, lines, files, rows of CSV or JSON lines."""

from __future__ import annotations

import csv
import io
import os
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio
import attrs
import orjson

from nsqext import BatchFailed, OutgoingMessage
from nsqext.cli.command import Topic, command, examples, parse_headers
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.message_files import outgoing_message
from nsqext.cli.parameters import Argument, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidInput, InvalidSetting, NsqError
from nsqext.protocol.names import topic_and_partition

if TYPE_CHECKING:
    from nsqext import Batcher, Producer

Format = Literal["lines", "json", "csv", "whole"]

_CHUNK = 1 << 16
_LONGEST_LINE = 64 << 20  # bytes; servers accept messages of a few MiB
_BOM = "\ufeff".encode()  # spreadsheets and editors write it
_MOST_RANGES = 20  # of failed lines in a result


async def read_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, pipe or terminal; pipe and terminal without a thread, whose end ^C would wait for."""
    watched = not stat.S_ISREG(os.fstat(descriptor).st_mode)
    while True:
        if watched:
            try:
                await anyio.wait_readable(descriptor)
            except OSError:  # a device that cannot be polled, such as /dev/null, does not block
                watched = False
        chunk = os.read(descriptor, _CHUNK)
        if not chunk:
            return
        yield chunk


async def read_lines(descriptor: int) -> AsyncIterator[bytes]:
    """Yield lines with newlines, without a mark of the byte order at the begin."""
    waiting: list[bytes] = []  # of a line longer than a chunk
    size, mark = 0, _BOM
    async for chunk in read_chunks(descriptor):
        first, *others = chunk.split(b"\n")
        waiting.append(first)
        size += len(first)
        if size > _LONGEST_LINE:
            raise InvalidInput(f"a line is longer than {_LONGEST_LINE >> 20} MiB", hint="use --format whole")
        for line in others:
            yield b"".join(waiting).removeprefix(mark) + b"\n"
            waiting, size, mark = [line], len(line), b""
    if size:
        yield b"".join(waiting).removeprefix(mark)


async def read_rows(descriptor: int) -> AsyncIterator[tuple[int, list[str]]]:
    """Yield CSV rows with the number of their last line; a quoted field may contain newlines."""
    csv.field_size_limit(_LONGEST_LINE)
    lines: list[bytes] = []  # of a row
    number = size = quotes = 0
    async for line in read_lines(descriptor):
        number += 1
        lines.append(line)
        size += len(line)
        quotes += line.count(b'"')
        if quotes % 2 and size <= _LONGEST_LINE:
            continue
        if quotes % 2:
            raise _unclosed(number - len(lines) + 1, f"within {_LONGEST_LINE >> 20} MiB")
        try:
            rows = list(csv.reader(io.StringIO(b"".join(lines).decode(), newline="")))
        except (UnicodeDecodeError, csv.Error) as error:
            raise InvalidInput(f"line {number}: {error}") from error
        for row in rows:
            if row:
                yield number, row
        lines, size, quotes = [], 0, 0
    if lines:
        raise _unclosed(number - len(lines) + 1, "before the end of the input")


def _unclosed(line: int, where: str) -> InvalidInput:
    return InvalidInput(f"line {line}: a quoted field does not end {where}", hint='a quote in a field is written ""')


class PublishPace:
    """Limits the rate of messages; 0 without limit."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._began = time.monotonic()
        self._count = 0

    async def wait(self) -> None:
        if self._rate:
            due = self._began + self._count / self._rate
            self._count += 1
            if (pause := due - time.monotonic()) > 0:
                await anyio.sleep(pause)


@attrs.frozen
class Columns:
    """CSV columns for key, headers and body."""

    key_column: Annotated[str | None, Option(help="CSV: column of the key.")] = None
    header_column: Annotated[list[str] | None, Option(help="CSV: column to send as a header; repeat for more.")] = None
    body_column: Annotated[str | None, Option(help="CSV: column of the body. (default: the row as JSON)")] = None

    def message(self, row: dict[str, str]) -> OutgoingMessage:
        body = orjson.dumps(row) if self.body_column is None else row[self.body_column].encode()
        headers = {name: row[name] for name in self.header_column or () if row[name]}
        return OutgoingMessage(body, headers or None, key=(row[self.key_column] or None) if self.key_column else None)

    def check(self, names: list[str]) -> None:
        for name in (self.key_column, self.body_column, *(self.header_column or ())):
            if name is not None and name not in names:
                raise InvalidInput(f"the file has no column {name!r}", hint=f"its columns: {', '.join(names)}")
        if len(set(names)) < len(names):
            raise InvalidInput("the file has two columns of one name", hint=f"its columns: {', '.join(names)}")


@attrs.frozen
class Sending:
    """How messages are sent."""

    rate: Annotated[float, Option(min=0, help="Largest rate, in messages per second; 0 for no limit.")] = 0.0
    transport: Annotated[
        Literal["tcp", "http"] | None,
        Option(help="http where TCP does not pass; --nsqd are HTTP addresses then."),
    ] = None

    def producer(self, connection: ServerAccess) -> Producer:
        return connection.producer() if self.transport is None else connection.producer(transport=self.transport)


@attrs.frozen
class Properties:
    """Properties of every published message."""

    header: Annotated[list[str] | None, Option(help="NAME=VALUE, an extend header; repeat for more.")] = None
    tag: Annotated[str | None, Option(help="Tag for dispatch.")] = None
    key: Annotated[str | None, Option(help="Messages of one key go to one partition, in order.")] = None
    trace_id: Annotated[
        int | None, Option(help="Trace id; with it, the printed result has the message id and the offset.")
    ] = None
    partition: Annotated[int | None, Option(help="The partition; only for messages given as arguments.")] = None
    delay: Annotated[float | None, Option(help="Seconds until delivery; only for messages given as arguments.")] = None

    def of_a_batch(self) -> dict[str, Any]:
        """Return the properties of all messages of an input."""
        headers = parse_headers(self.header) or None
        found = {"headers": headers, "tag": self.tag, "trace_id": self.trace_id, "key": self.key}
        return {name: value for name, value in found.items() if value is not None}


@attrs.frozen
class _InputMessage(OutgoingMessage):
    """A message of an input."""

    line: int = attrs.field(default=0, kw_only=True)  #: number of its last line, from 1


async def _messages(descriptor: int, form: Format, columns: Columns) -> AsyncIterator[tuple[int, OutgoingMessage]]:
    """Yield messages with the numbers of their lines."""
    if form == "whole":
        yield 1, OutgoingMessage(b"".join([chunk async for chunk in read_chunks(descriptor)]))
    elif form == "csv":
        names: list[str] = []
        async for number, row in read_rows(descriptor):
            if not names:
                names = row
                columns.check(names)
            elif len(row) != len(names):
                raise InvalidInput(f"line {number}: {counted(len(row), 'column')} instead of {len(names)}: {row!r}")
            else:
                yield number, columns.message(dict(zip(names, row, strict=True)))
    else:
        number = 0
        async for line in read_lines(descriptor):
            number += 1
            text = line.rstrip(b"\r\n")
            if not text:
                continue
            if form == "lines":
                yield number, OutgoingMessage(text)
                continue
            import msgspec  # orjson reads whole numbers above 2**64 as floats

            try:
                yield number, outgoing_message(msgspec.json.decode(text))
            except (ValueError, RecursionError) as error:  # of JSON or the record
                raise InvalidInput(f"line {number}: {error}") from error


@asynccontextmanager
async def _progress() -> AsyncIterator[Callable[[int], None]]:
    if not sys.stderr.isatty() or sys.stdin.isatty():
        yield lambda number: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:,.0f} messages"),
        TextColumn("{task.speed:,.0f}/s"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("")
        yield lambda number: progress.update(task, completed=number)


@examples(
    "nsqext pub orders hello",
    "nsqext pub orders hello --transport http",
    "nsqext pub orders --key 4711 --header user=42 '{\"total\": 12}'",
    "cat orders.txt | nsqext pub orders --rate 100",
    "nsqext pub orders --file orders.csv --format csv --key-column customer",
    "nsqext tail orders --count 10 | nsqext pub copies --format json",
)
@command
async def run(
    connection: ServerAccess,
    topic: Topic,
    body: Annotated[list[str] | None, Argument(help="Messages. (default: read --file or standard input)")] = None,
    file: Annotated[Path | None, Option(help="Read this file instead of standard input.")] = None,
    form: Annotated[
        Format,
        Option("--format", help="Input format: one message per line, JSON record or row; or the whole input."),
    ] = "lines",
    properties: Properties = Properties(),
    sending: Sending = Sending(),
    columns: Columns = Columns(),
) -> None:
    """Publish messages; print the position of each argument, or the number of messages of an input.

    Empty lines are skipped. JSON records are as `nsqext tail` prints them into a pipe: body or body_base64, and
    headers, tag, key, trace_id. After ^C or SIGTERM, what was read of an input is published, and counted.
    """
    if columns != Columns() and form != "csv":
        raise InvalidSetting("--key-column, --header-column and --body-column need --format csv")
    given = properties.of_a_batch()
    if body:
        if file is not None or form != "lines":
            raise InvalidSetting("--file and --format cannot be combined with messages as arguments")
        options = {**given, "partition": properties.partition, "delay": properties.delay}
        await _publish_arguments(connection, topic, body, sending, options)
        return
    if properties.partition is not None or properties.delay is not None:
        raise InvalidSetting("--partition and --delay need messages as arguments")
    if file is not None and file.is_dir():
        raise InvalidInput(f"{file} is a folder", hint="nsqext pub reads a file")
    descriptor = os.open(file, os.O_RDONLY) if file is not None else sys.stdin.fileno()
    await _publish_input(connection, topic, _messages(descriptor, form, columns), sending, given)


async def _publish_arguments(
    connection: ServerAccess, topic: str, bodies: list[str], sending: Sending, options: dict[str, Any]
) -> None:
    pace = PublishPace(sending.rate)
    async with sending.producer(connection) as producer:
        for text in bodies:
            await pace.wait()
            with waits.waiting(f"{topic} to store the message"):
                receipt = await producer.publish(topic, os.fsencode(text), **options)
            place = topic_and_partition(receipt.topic, receipt.partition)
            connection.show(receipt._asdict(), f"stored in {place} at {receipt.node}")


def _with_options(message: OutgoingMessage, given: dict[str, Any], line: int) -> _InputMessage:
    """Return a message of a line with the command line's options, and headers of both."""
    headers = {**(message.headers or {}), **given.get("headers", {})}
    found = attrs.asdict(message, recurse=False)
    return _InputMessage(**{**found, **given, "headers": headers or None, "line": line})


def _ranges(lines: Iterable[int]) -> str:
    """Return numbers of lines as text: ``1-3, 7``."""
    found: list[list[int]] = []
    for line in sorted(lines):
        if found and line == found[-1][1] + 1:
            found[-1][1] = line
        elif len(found) == _MOST_RANGES:
            return _ranges_text(found) + ", …"
        else:
            found.append([line, line])
    return _ranges_text(found)


def _ranges_text(ranges: Iterable[Sequence[int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


async def _publish_input(
    connection: ServerAccess,
    topic: str,
    messages: AsyncIterator[tuple[int, OutgoingMessage]],
    sending: Sending,
    given: dict[str, Any],
) -> None:
    from anyio.lowlevel import current_token

    from nsqext.client.signals import last_signal, stopping_on_signals
    from nsqext.transport.event_loop import call_soon

    pace, count, last, reading = PublishPace(sending.rate), 0, 0, True
    token, rest, whole = current_token().native_token, anyio.CancelScope(), anyio.CancelScope()
    failure: NsqError | None = None

    def wait() -> str:
        return "messages to read" if reading else f"{topic} to store messages"

    def stop() -> None:
        call_soon(token, rest.cancel if reading else whole.cancel)

    async with sending.producer(connection) as producer, _progress() as progress:
        batcher = producer.batcher(topic)
        try:
            with stopping_on_signals(stop), whole, waits.waiting(wait):
                async with batcher:
                    with rest:
                        async for line, message in messages:
                            if sending.rate:
                                with waits.waiting(None):
                                    await pace.wait()
                            with waits.waiting(f"{topic} to store messages"):
                                await _add(batcher, _with_options(message, given, line))
                            count, last = count + 1, line
                            progress(count - batcher.pending)
                    reading = False
        except NsqError as error:  # the messages before an input's error are published
            failure = error
    failed = [one for one, _ in batcher.take_failed()]
    record: dict[str, Any] = {"topic": topic, "published": count - len(failed)}
    text = f"{counted(count - len(failed), 'message')} stored in {topic}"
    if failure is not None or failed:
        lines = _ranges(one.line for one in failed if isinstance(one, _InputMessage))
        record |= {"failed": len(failed), "failed_lines": lines}
        text += f", {len(failed)} of {count} failed" + (f": lines {lines}" if lines else "")
    if rest.cancel_called:
        record["last_line"] = last
        text += f"; what follows line {last} of the input was not read"
    connection.show(record, text)
    if failure is not None:
        if isinstance(failure, BatchFailed):
            failure.hint = None  # a method of the batcher
        raise failure
    if rest.cancel_called or whole.cancel_called:
        raise SystemExit(128 + last_signal())


async def _add(batcher: Batcher, message: _InputMessage) -> None:
    try:
        await batcher.add(message)
    except InvalidInput as error:
        raise InvalidInput(f"line {message.line}: {error.message}", hint=error.hint) from error
