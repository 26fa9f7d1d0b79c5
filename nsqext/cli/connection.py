"""Shared options of commands: server addresses, contexts, and output: text and tables, or JSON lines.

Contexts are named URLs in ``~/.config/nsqext/contexts.toml``, or the file ``NSQEXT_CONTEXTS_FILE``. Only its owner can
read it, because it may contain secrets.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Unpack

import anyio
import orjson
from attrs import define, evolve, field, frozen

from nsqext.arguments import is_number
from nsqext.cli.parameters import Option
from nsqext.cli.waiting import wait_of, waits
from nsqext.errors import (
    ConnectionFailed,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    LookupUnreachable,
    PartitionUnavailable,
    TopicNotFound,
    escaped,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nsqext import Admin, App, Consumer, Producer
    from nsqext.admin import TopicInfo, TopicStats
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.settings import ConsumerSettings
    from nsqext.client.producer.settings import ProducerSettings
    from nsqext.settings import Given

FILE_VARIABLE = "NSQEXT_CONTEXTS_FILE"
_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME  # values of other types: by msgspec


@frozen
class Contexts:
    """Content of the contexts file."""

    urls: dict[str, str] = field(factory=dict)
    current: str | None = None  #: name of the context to use without an address

    def url(self, name: str) -> str:
        if name not in self.urls:
            known = ", ".join(sorted(self.urls)) or "none"
            raise InvalidSetting(
                f"there is no context {name!r}", hint=f"known: {known}; `nsqext config set {name} URL` creates it"
            )
        return self.urls[name]


def contexts_file() -> Path:
    """Return the path of the file."""
    chosen = os.environ.get(FILE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "nsqext" / "contexts.toml"


def load_contexts() -> Contexts:
    """Read the file; a missing file counts as empty."""
    import tomllib

    path = contexts_file()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{path} cannot be read: {error}") from error
    urls, current = data.get("contexts", {}), data.get("current")
    sound = isinstance(urls, dict) and all(isinstance(url, str) for url in urls.values())
    if not sound or not isinstance(current, (str, type(None))):
        raise InvalidSetting(f"{path} is not a contexts file", hint='write NAME = "URL" below [contexts]')
    return Contexts(urls, current)


def save_contexts(contexts: Contexts) -> None:
    """Replace the file atomically."""
    import tempfile

    lines = [f"current = {_toml(contexts.current)}"] if contexts.current else []
    lines += ["[contexts]", *(f"{_toml(name)} = {_toml(url)}" for name, url in contexts.urls.items()), ""]
    path = contexts_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # readable only by its owner
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines))
    Path(temporary).replace(path)


def _toml(text: str) -> str:
    """Return a text as a string of TOML, which lacks the surrogate pairs of JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidSetting(f"{text!r} is no text", hint="write it in UTF-8") from None
    shown = (one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08x}" for one in text)
    return '"' + "".join(shown) + '"'


def print_record(record: Mapping[str, Any], text: str, *, json: bool) -> None:
    """Print a result as a line of JSON, or as text with escaped control characters."""
    waits.spoke()
    if not json:
        print("\n".join(map(escaped, text.split("\n"))), flush=True)
        return
    try:
        line = orjson.dumps(record, option=_PLAIN).decode()
    except TypeError:
        import msgspec  # a tenth of a command's start; numbers of headers may have more than 64 bits

        line = msgspec.json.encode(record, enc_hook=str).decode()
    if sys.stdout.isatty() and not line.isprintable():
        line = "".join(one if one.isprintable() else _json_escape(one) for one in line)
    print(line, flush=True)


def _json_escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def make_table(columns: Sequence[str], records: Iterable[Mapping[str, Any]], title: str = "") -> Any:
    """Return a table for a terminal; numbers are right-aligned."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    rows = [[record.get(column) for column in columns] for record in records]
    table = Table(title=title or None, title_justify="left", box=SIMPLE, pad_edge=False)
    for place, column in enumerate(columns):
        number = any(is_number(row[place], -math.inf) for row in rows)
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
        return escaped(", ".join(map(str, value)))
    return escaped(str(value))


def confirm(change: str, *, yes: bool, ask: bool = True) -> None:
    """Ask for confirmation of a change at a terminal, if ``ask``.

    Raises:
        InvalidState: neither a terminal nor ``--yes``.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidState(
            f"not done without a confirmation: {change.rstrip('.')}", hint="there is no terminal: give --yes"
        )
    if ask:
        import typer

        try:
            typer.confirm(change, abort=True, err=True)
        except typer.Abort:
            print("Aborted.", file=sys.stderr)
            raise SystemExit(1) from None


T = TypeVar("T")

EVERY_MESSAGE: dict[str, Any] = {
    **dict.fromkeys(("tag", "ext_filter", "partitions", "dispatch", "key_tags", "ordered", "dead_letter")),
    **dict.fromkeys(("sample_rate", "max_attempts"), 0),
    "reject_ordered": False,
}
"""Settings with which a consumer leaves no message out, for commands that read what services may be filtered by."""

_PANEL = "Connection and output"
_STARTUP = 60.0  # seconds that a lookup service may take to start
_PATIENT = 15.0  # seconds for a lookup service to start
_FIRST_POLL, _LONGEST_POLL = 0.05, 0.5  # seconds between two reads of a channel's lag

Url = Annotated[
    str | None,
    Option(help="nsq://HOST:PORT,…?SETTING=VALUE&… with any setting of the client; or NSQEXT_URL.", panel=_PANEL),
]
Json = Annotated[
    bool,
    Option("--json", help="Print JSON lines at a terminal too; in pipes it is the default.", panel=_PANEL),
]


@define
class ServerAccess:
    """Addresses of the servers and output format, shared by commands."""

    lookupd: Annotated[
        str | None,
        Option(help="HOST:PORT of nsqlookupd's HTTP side, several with commas; or NSQEXT_LOOKUPD.", panel=_PANEL),
    ] = None
    nsqd: Annotated[
        str | None,
        Option(help="HOST:PORT of nsqd, without lookup; several with commas; or NSQEXT_NSQD.", panel=_PANEL),
    ] = None
    url: Url = None
    context: Annotated[str | None, Option(help="A context of `nsqext config`, instead of --url.", panel=_PANEL)] = None
    json: Json = False

    def chosen_url(self) -> str | None:
        """Return the URL of --url, --context, environment, or current context, in this order."""
        if self.context is not None:
            if self.url is not None:
                raise InvalidSetting("both --url and --context are given", hint="give one of them")
            return load_contexts().url(self.context)
        given = self.url or self.lookupd or self.nsqd
        if given or any(os.environ.get(f"NSQEXT_{name}") for name in ("URL", "LOOKUPD", "NSQD")):
            return self.url
        contexts = load_contexts()
        return contexts.url(contexts.current) if contexts.current is not None else None

    def load(self) -> Given:
        found = load_settings(self.chosen_url(), self.lookupd, self.nsqd)
        if not found.lookupd and not found.nsqd:
            raise InvalidSetting(
                "the address of the servers is unknown", hint="give --lookupd, --nsqd or --url, or set NSQEXT_LOOKUPD"
            )
        if found.lookupd:
            from nsqext.http.client import load_httpcore

            load_httpcore(only_asyncio=True)  # before the event loop runs, without a thread
            return found
        from nsqext.lookup.lookup import lookup_schema

        # the environment may have settings for services that use lookup
        own = lookup_schema().own
        return evolve(found, values={name: value for name, value in found.values.items() if name not in own})

    def options(self) -> ConsumerOptions:
        from nsqext.client.consumer.options import ConsumerOptions
        from nsqext.client.settings import settings_for, shared_settings
        from nsqext.settings import build

        return build(ConsumerOptions, shared_settings(), settings_for(shared_settings(), self.load().values))

    def texts(self) -> dict[str, str]:
        """Return the settings of connections and the lookup client as text, from URL and environment."""
        from nsqext.client.settings import settings_for, shared_settings
        from nsqext.settings_text import settings_as_text

        texts: dict[str, str] = settings_for(shared_settings(), settings_as_text(self.chosen_url()))
        return texts

    def lookup(self) -> Any:
        found = self.load().lookupd
        if not found:
            raise InvalidSetting(
                "this command needs the lookup service, not nsqd", hint="give --lookupd, or set NSQEXT_LOOKUPD"
            )
        return found

    @asynccontextmanager
    async def admin(self, request_timeout: float | None = None) -> AsyncIterator[Admin]:
        """Return an administration client; see `new_admin`."""
        with waits.waiting(f"a response of lookup at {self._lookup_text()}, or of its nodes"):
            async with self.new_admin(request_timeout) as admin:
                yield admin

    def cluster(self) -> str:
        """Return the addresses as text, by which a command that continues recognizes its cluster."""
        given = self.load()
        texts = given.lookupd or given.nsqd
        listed = [texts] if isinstance(texts, str) else map(str, texts)
        return ", ".join(sorted(address.strip() for text in listed for address in text.split(",")))

    def _lookup_text(self) -> str:
        found = self.lookup()
        return found if isinstance(found, str) else ", ".join(map(str, found))

    def new_admin(self, request_timeout: float | None = None) -> Admin:
        """Return an administration client that reports no waits.

        Args:
            request_timeout: seconds for a request; None for those that a starting lookup service needs, or more if
                the setting lookup_request_timeout says so.
        """
        from nsqext import Admin
        from nsqext.admin.options import admin_settings
        from nsqext.client.settings import settings_for

        addresses, values = self.lookup(), self.load().values
        if request_timeout is None:
            request_timeout = max(values.get("lookup_request_timeout", 0.0), _PATIENT)
        given = {**values, "lookup_request_timeout": request_timeout}
        return Admin(addresses, **settings_for(admin_settings(), given))

    def producer(self, **settings: Unpack[ProducerSettings]) -> Producer:
        """Return a producer; ``settings`` override the command line."""
        from nsqext import Producer
        from nsqext.client.settings import producer_settings, settings_for

        found = self.load()
        own = settings_for(producer_settings(), found.values)
        return Producer(found.lookupd, nsqd=found.nsqd, **{**own, **settings})

    def check_end_is_known(self, *, until_end: bool) -> None:
        """Raise InvalidSetting for ``until_end`` without lookup, before a channel is created."""
        if until_end:
            self.lookup()

    def refuse_loss(self) -> None:
        """Raise InvalidSetting for consumer settings with which a command would lose messages, or leave them out.

        They may be meant for services that have the same environment.
        """
        from nsqext.client.settings import SELECTING

        values = self.load().values
        for name in ("max_attempts", *SELECTING):
            if values.get(name) and not (name == "max_attempts" and values.get("dead_letter")):
                raise InvalidSetting(
                    f"messages would be left out with the setting {name}={values[name]}",
                    hint=f"leave it out of the URL, the context and the environment (NSQEXT_{name.upper()})",
                )

    def consumer(self, topic: str, channel: str, **settings: Unpack[ConsumerSettings]) -> Consumer:
        """Return a consumer; ``settings`` override the command line."""
        from nsqext import Consumer
        from nsqext.client.settings import consumer_settings, settings_for

        found = self.load()
        own = settings_for(consumer_settings(), found.values)
        quiet = {"block_warning": 0.0}  # the warning concerns users' handlers
        return Consumer(topic, channel, found.lookupd, nsqd=found.nsqd, **{**own, **quiet, **settings})

    def app(self) -> App:
        from nsqext import App
        from nsqext.client.settings import app_schema, settings_for

        found = self.load()
        return App(found.lookupd, nsqd=found.nsqd, **settings_for(app_schema().own, found.values))

    async def has_positions(self, topic: str) -> bool:
        """Return whether a topic's channels have a start position: on the redesigned NSQ.

        Waits for lookup to start, and to list a node.

        Raises:
            LookupUnreachable: they did not start in time. A consumer without a start position, which may still connect
                later, would leave out stored messages.
        """
        if not self.load().lookupd:
            return False
        failure = LookupUnreachable(f"no response within {_STARTUP:g} s")
        async with self.admin() as admin:
            with anyio.move_on_after(_STARTUP):
                while True:
                    try:
                        try:
                            return (await admin.topic(topic)).generation == "redesigned"
                        except TopicNotFound:  # it may be created later
                            return await is_redesigned(admin)
                    except LookupUnreachable as error:
                        failure = error
                    await anyio.sleep(0.5)
        raise failure

    async def serve(self, consumer: Consumer, *, until_end: bool, signals: bool = True) -> None:
        """Run a consumer until a signal or its end; with ``until_end``, until its channel is empty."""
        obstacles: list[str] = []
        with waits.waiting(wait_of(consumer, obstacles)):
            async with anyio.create_task_group() as tasks:
                if until_end:
                    tasks.start_soon(self.stop_when_drained, consumer, obstacles)
                await consumer.serve(signals=signals)
                tasks.cancel_scope.cancel()

    @staticmethod
    def check_end(*, until_end: bool) -> None:
        """Exit as a shell's program does on a signal, if one came before the end that ``until_end`` waits for."""
        from nsqext.client.signals import last_signal  # not for the help of all commands

        if until_end and (number := last_signal()):
            raise SystemExit(128 + number)

    async def stop_when_drained(self, consumer: Consumer, obstacles: list[str]) -> None:
        """Stop a consumer when its channel has no waiting, in-flight or deferred messages.

        The redesigned NSQ moves a new channel to the start position after its response, so the lag is read twice.

        Args:
            obstacles: gets what keeps the channel from its end; see `wait_of`.
        """
        from nsqext.waits import Doubling

        pauses, looks = Doubling(_FIRST_POLL, _LONGEST_POLL), 0
        async with self.new_admin() as admin:
            while looks < 2:
                await anyio.sleep(_FIRST_POLL if looks else pauses.next())
                drained = False
                with suppress(ConnectionFailed, LookupFailed, PartitionUnavailable):  # a leader moves, a node restarts
                    topic = await admin.topic(consumer.topics[0])
                    obstacles[:] = [f"a leader of partition {number} of {topic.name}" for number in topic.leaderless]
                    if _consumes_all(consumer, topic):
                        stats = await admin.stats(consumer.topics[0], consumer.channel)
                        lags = _lags(consumer, stats)
                        drained = bool(lags) and sum(lags) == 0 and stats.complete
                looks = looks + 1 if drained else 0
        consumer.stop()

    @property
    def for_people(self) -> bool:
        return not self.json and sys.stdout.isatty()

    def show(self, record: Mapping[str, Any], text: str) -> None:
        """Print a result: text at a terminal, otherwise a line of JSON."""
        print_record(record, text, json=not self.for_people)

    def table(self, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
        """Print records: a table of these columns at a terminal, otherwise JSON lines with every member."""
        if not self.for_people:
            for record in records:
                print_record(record, "", json=True)
            return
        from rich.console import Console

        waits.spoke()
        Console().print(make_table(columns, records))

    @contextmanager
    def live(
        self, table: Callable[[T], RenderableType], records: Callable[[T], Iterable[Mapping[str, Any]]]
    ) -> Iterator[Callable[[T], None]]:
        """Yield a function that shows values: as an updated table, or as lines of JSON."""
        if not self.for_people:
            yield lambda value: self.table((), records(value))
            return
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield lambda value: live.update(table(value), refresh=True)


async def is_redesigned(admin: Admin) -> bool:
    """Return whether a cluster has a node of the redesigned NSQ; raise `LookupUnreachable` if lookup lists no node."""
    nodes = await admin.nodes()
    if not nodes:
        raise LookupUnreachable("lookup knows no node yet")
    return any(node.generation == "redesigned" for node in nodes)


def _consumes_all(consumer: Consumer, topic: TopicInfo) -> bool:
    """Return whether a consumer is connected to all its partitions, and these have leaders."""
    open_connections = consumer.connections
    if topic.meta is None:
        return {str(node) for node in topic.nodes} <= {one.node for one in open_connections}
    chosen = consumer.settings["partitions"]
    wanted = chosen if isinstance(chosen, tuple) else range(topic.meta.partition_num)
    return {*wanted} <= {one.partition for one in open_connections} & topic.leaders.keys()


def _lags(consumer: Consumer, topic: TopicStats) -> list[int]:
    """Return the unfinished messages of a consumer's channel in each of its partitions that has the channel."""
    chosen, channel = consumer.settings["partitions"], consumer.channel
    parts = [part for part in topic.partitions if not isinstance(chosen, tuple) or part.partition in chosen]
    return [part.channels[channel].lag for part in parts if channel in part.channels]


def load_settings(
    url: str | None, lookupd: str | None = None, nsqd: str | None = None, environ: Mapping[str, str] | None = None
) -> Given:
    """Return the settings of all clients from URL and environment, by default of the process.

    Args:
        url: the URL; None for the environment's.
        lookupd: lookup addresses, which override the URL's.
        nsqd: addresses of nsqd, which override the URL's.
        environ: the environment.
    """
    from nsqext.settings import Schema
    from nsqext.settings_text import PREFIX, settings_as_text

    environ = os.environ if environ is None else environ
    if url or environ.get(f"{PREFIX}URL") or settings_as_text(None, environ):
        from nsqext.client.settings import app_schema

        schema = app_schema()
    else:  # addresses only: the options of clients that the command does not use take 15 ms
        schema = Schema("App", {}, dict)
    return schema.collect(lookupd or (), nsqd or (), PREFIX, {}, environ, url=url, required=False)
