"""What commands share: where the servers are, how results are printed, how a command is run."""

from __future__ import annotations

import base64
import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import anyio
import orjson
import typer
from attrs import define, evolve

from nsqext.errors import InvalidSetting, LookupUnreachable, NsqError, TopicNotFound

if TYPE_CHECKING:
    from nsqext import Admin, Consumer, Producer
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.settings import Loaded

__all__ = (
    "Connection",
    "Json",
    "Lookupd",
    "Nsqd",
    "Url",
    "body_fields",
    "connected",
    "counted",
    "examples",
    "lookup_addresses",
    "make_table",
    "perform",
    "printable",
    "show",
)

F = TypeVar("F", bound=Callable[..., object])

_PANEL = "Connection and output"
_STARTUP = 60.0  # seconds that a lookup service may take to start
_PATIENT = 15.0  # seconds: nsqlookupd asks the nodes before it answers a change

Lookupd = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of nsqlookupd's HTTP side, several with commas; or NSQEXT_LOOKUPD.", rich_help_panel=_PANEL
    ),
]
Nsqd = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of nsqd, to do without lookup; several with commas; or NSQEXT_NSQD.", rich_help_panel=_PANEL
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        help="nsq://HOST:PORT,…?SETTING=VALUE&… with any setting of the client; or NSQEXT_URL.", rich_help_panel=_PANEL
    ),
]
Context = Annotated[
    str | None, typer.Option(help="A context of `nsqext config`, instead of --url.", rich_help_panel=_PANEL)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print JSON lines at a terminal too; pipes always get them.", rich_help_panel=_PANEL),
]

_UNKNOWN_PLACE = InvalidSetting(
    "the address of the servers is not known", hint="give --lookupd, --nsqd or --url, or set NSQEXT_LOOKUPD"
)


def _context_url(url: str | None, context: str | None, given: Mapping[str, Any]) -> str | None:
    """Return the URL to use. Precedence: --url, --context, environment, current context."""
    from nsqext.cli.contexts import load_contexts

    if context is not None:
        if url is not None:
            raise InvalidSetting("both --url and --context are given", hint="give one of them")
        return load_contexts().url(context)
    if url is not None or given or any(os.environ.get(f"NSQEXT_{name}") for name in ("URL", "LOOKUPD", "NSQD")):
        return url
    contexts = load_contexts()
    return contexts.url(contexts.current) if contexts.current is not None else None


@define
class Connection:
    """Where the servers are and how results are printed: the shared options of a command.

    Attributes:
        url: settings as a URL, or None.
        given: addresses that override those of the URL.
        json: print JSON lines at a terminal too.
    """

    url: str | None
    given: dict[str, Any]
    json: bool = False

    def load(self) -> Loaded[ProducerOptions]:
        """Return the addresses and the settings of producers.

        Raises:
            InvalidSetting: no address is given, or a setting is not valid.
        """
        from nsqext.client.from_url import load_producer

        found = load_producer(self.url, self.given)
        if not found.lookupd and not found.nsqd:
            raise _UNKNOWN_PLACE
        return found

    def lookupd(self) -> Any:
        """Return the lookup addresses.

        Raises:
            InvalidSetting: they are not given.
        """
        found = self.load().lookupd
        if not found:
            raise InvalidSetting("the lookup service is needed, not nsqd", hint="give --lookupd, or set NSQEXT_LOOKUPD")
        return found

    def admin(self) -> Admin:
        """Return an administration client."""
        from nsqext import Admin

        addresses = self.lookupd()
        options = self.load().options.lookup
        return Admin(addresses, options=evolve(options, request_timeout=max(options.request_timeout, _PATIENT)))

    def producer(self, **settings: Any) -> Producer:
        """Return a producer; ``settings`` override those of the command line."""
        from nsqext import Producer

        self.load()
        return Producer.from_url(self.url, **{**self.given, **settings})

    def consumer(self, topic: str, channel: str, **settings: Any) -> Consumer:
        """Return a consumer; ``settings`` override those of the command line."""
        from nsqext import Consumer

        self.load()
        quiet = {"delivery_block_warning": 0.0}  # the warning is for programs with handlers of their own
        return Consumer.from_url(topic, channel, self.url, **{**self.given, **quiet, **settings})

    async def has_positions(self, topic: str) -> bool:
        """Return whether channels of a topic have a start position: on the redesigned NSQ, found through lookup.

        It waits for a lookup service that starts later, as consumers do.
        """
        if not self.load().lookupd:
            return False
        async with self.admin() as admin:
            with anyio.move_on_after(_STARTUP):
                while True:
                    with suppress(LookupUnreachable):
                        try:
                            return (await admin.topic(topic)).generation == "ha"
                        except TopicNotFound:  # it may be created later
                            return any(node.generation == "ha" for node in await admin.nodes())
                    await anyio.sleep(0.5)
        return False  # the consumer raises the error

    @property
    def for_people(self) -> bool:
        """Whether results are printed as text."""
        return not self.json and sys.stdout.isatty()

    def show(self, record: Mapping[str, Any], text: str) -> None:
        """Print a result: text at a terminal, a line of JSON everywhere else."""
        _print(record, text, json=not self.for_people)

    def table(self, columns: Sequence[str], records: Iterable[Mapping[str, Any]], title: str = "") -> None:
        """Print records: a table of these columns at a terminal, lines of JSON with every member everywhere else."""
        if not self.for_people:
            for record in records:
                _print(record, "", json=True)
            return
        from rich.console import Console

        Console().print(make_table(columns, records, title))


def make_table(columns: Sequence[str], records: Iterable[Mapping[str, Any]], title: str = "") -> Any:
    """Return a table for a terminal; numbers are right-aligned."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    rows = [[record.get(column) for column in columns] for record in records]
    table = Table(title=title or None, title_justify="left", box=SIMPLE, pad_edge=False)
    for place, column in enumerate(columns):
        number = any(isinstance(row[place], (int, float)) and not isinstance(row[place], bool) for row in rows)
        table.add_column(column.replace("_", " "), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    return table


def _cell(value: object) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, (list, tuple)):
        return printable(", ".join(map(str, value)))
    return printable(str(value))


def connected(function: Callable[..., object]) -> Callable[..., object]:
    """Decorator: add --lookupd, --nsqd, --url, --context and --json; the command receives a `Connection` first."""
    shared: dict[str, Any] = {"lookupd": Lookupd, "nsqd": Nsqd, "url": Url, "context": Context, "json": Json}

    @functools.wraps(function)
    def run(**values: Any) -> object:
        lookupd, nsqd, url, context, json = (values.pop(name) for name in shared)
        given = {name: value for name, value in (("lookupd", lookupd), ("nsqd", nsqd)) if value}
        return function(Connection(_context_url(url, context, given), given, json), **values)

    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in own]
    for name, annotation in shared.items():
        default = False if name == "json" else None
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def examples(*lines: str) -> Callable[[F], F]:
    """Decorator: end the help of a command with examples."""

    def add(function: F) -> F:
        text = "\n".join(f"  {line}" for line in lines)
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n\b\nExamples:\n{text}\n"
        return function

    return add


def lookup_addresses(url: str | None, lookupd: str | None, usual: Sequence[str] = ()) -> Sequence[str]:
    """Return the addresses of the lookup service.

    Args:
        url: settings as a URL.
        lookupd: overrides the addresses of the URL.
        usual: the addresses if none are given.

    Raises:
        InvalidSetting: no address is given.
    """
    from nsqext.client.from_url import load_producer

    found: Sequence[str] = load_producer(url, {"lookupd": lookupd} if lookupd else {}).lookupd or usual
    if not found:
        raise InvalidSetting(
            "the address of lookup is not known", hint="give --lookupd or --url, or set NSQEXT_LOOKUPD"
        )
    return found


def show(record: Mapping[str, Any], text: str) -> None:
    """Print a result: text at a terminal, a line of JSON everywhere else."""
    _print(record, text, json=not sys.stdout.isatty())


def _print(record: Mapping[str, Any], text: str, *, json: bool) -> None:
    line = orjson.dumps(record, default=str).decode() if json else "\n".join(map(printable, text.split("\n")))
    print(line, flush=True)


def printable(text: str) -> str:
    r"""Return text that a terminal only prints: control characters and separators become escapes such as \x1b."""
    return text if text.isprintable() else "".join(one if one.isprintable() else _escape(one) for one in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "replace").decode("ascii")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it is needed."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def body_fields(body: bytes) -> dict[str, str]:
    """Return a body for JSON: ``body`` where it is text, ``body_base64`` otherwise."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def perform(command: Callable[[], Awaitable[None]]) -> None:
    """Run a command; the first of several simultaneous errors is raised.

    It ends quietly when the reader has closed the pipe, and with exit code 130 on ^C.
    """
    from nsqext.client.tasks import first_error

    try:
        anyio.run(command)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        _leave_the_pipe()
    except BaseExceptionGroup as group:
        matching, rest = group.split((NsqError, BrokenPipeError, typer.Exit, SystemExit))
        if matching is None or rest is not None:
            raise
        first = first_error(matching)
        if isinstance(first, BrokenPipeError):
            _leave_the_pipe()
            return
        raise first from None


def _leave_the_pipe() -> None:
    # Python flushes standard output at its end, and would complain
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
