"""Options shared by commands: addresses of the servers, and the output format."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Unpack

import anyio
import typer
from attrs import define

from nsqext.cli.arguments import Yes
from nsqext.cli.command import perform
from nsqext.cli.output import confirm, make_table, print_record
from nsqext.errors import (
    ConnectionFailed,
    InvalidSetting,
    LookupFailed,
    LookupUnreachable,
    PartitionUnavailable,
    TopicNotFound,
)
from nsqext.waits import Doubling

if TYPE_CHECKING:
    from nsqext import Admin, App, Consumer, Producer
    from nsqext.admin import TopicInfo
    from nsqext.client.consumer.options import ConsumerOptions, ConsumerSettings
    from nsqext.client.producer.options import ProducerSettings
    from nsqext.settings import Given

_PANEL = "Connection and output"
_STARTUP = 60.0  # seconds that a lookup service may take to start
_PATIENT = 15.0  # seconds: nsqlookupd forwards a change to the nodes before it responds
_COMPLETION_TIMEOUT = 1.0  # seconds
_FIRST_POLL, _LONGEST_POLL = 0.05, 0.5  # seconds between two reads of a channel's lag

Lookupd = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of nsqlookupd's HTTP side, several with commas; or NSQEXT_LOOKUPD.", rich_help_panel=_PANEL
    ),
]
Nsqd = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of nsqd, without lookup; several with commas; or NSQEXT_NSQD.", rich_help_panel=_PANEL
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
    typer.Option(
        "--json", help="Print JSON lines at a terminal too; in pipes it is the default.", rich_help_panel=_PANEL
    ),
]


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
    """Addresses of the servers and output format: the options shared by commands."""

    url: str | None
    given: dict[str, Any]  # addresses that override those of the URL
    json: bool = False  # print JSON lines at a terminal too

    def load(self) -> Given:
        """Return the addresses and the settings of all clients."""
        found = load_settings(self.url, self.given)
        if not found.lookupd and not found.nsqd:
            raise InvalidSetting(
                "the address of the servers is unknown", hint="give --lookupd, --nsqd or --url, or set NSQEXT_LOOKUPD"
            )
        return found

    def options(self) -> ConsumerOptions:
        """Return the options of connections and of the lookup client, in those of a consumer."""
        from nsqext.client.consumer.options import ConsumerOptions
        from nsqext.client.settings import settings_for, shared_settings
        from nsqext.settings import build

        return build(ConsumerOptions, shared_settings(), settings_for(shared_settings(), self.load().values))

    def texts(self) -> dict[str, str]:
        """Return the settings of connections and of the lookup client as text, from the URL and the environment."""
        from nsqext.client.settings import settings_for, shared_settings
        from nsqext.settings import settings_as_text

        texts: dict[str, str] = settings_for(shared_settings(), settings_as_text(self.url))
        return texts

    def lookupd(self) -> Any:
        """Return the lookup addresses."""
        found = self.load().lookupd
        if not found:
            raise InvalidSetting(
                "this command needs the lookup service, not nsqd", hint="give --lookupd, or set NSQEXT_LOOKUPD"
            )
        return found

    def admin(self) -> Admin:
        """Return an administration client."""
        from nsqext import Admin
        from nsqext.admin.options import admin_settings
        from nsqext.client.settings import settings_for

        addresses, values = self.lookupd(), self.load().values
        patient = {"lookup_request_timeout": max(values.get("lookup_request_timeout", 0.0), _PATIENT)}
        return Admin(addresses, **settings_for(admin_settings(), {**values, **patient}))

    def producer(self, **settings: Unpack[ProducerSettings]) -> Producer:
        """Return a producer; ``settings`` override those of the command line."""
        from nsqext import Producer
        from nsqext.client.settings import producer_settings, settings_for

        found = self.load()
        own = settings_for(producer_settings(), found.values)
        return Producer(found.lookupd, nsqd=found.nsqd, **{**own, **settings})

    def consumer(self, topic: str, channel: str, **settings: Unpack[ConsumerSettings]) -> Consumer:
        """Return a consumer; ``settings`` override those of the command line."""
        from nsqext import Consumer
        from nsqext.client.settings import consumer_settings, settings_for

        found = self.load()
        own = settings_for(consumer_settings(), found.values)
        quiet = {"block_warning": 0.0}  # the warning concerns handlers of users
        return Consumer(topic, channel, found.lookupd, nsqd=found.nsqd, **{**own, **quiet, **settings})

    def app(self) -> App:
        """Return an app."""
        from nsqext import App
        from nsqext.client.settings import app_schema, settings_for

        found = self.load()
        return App(found.lookupd, nsqd=found.nsqd, **settings_for(app_schema().own, found.values))

    async def has_positions(self, topic: str) -> bool:
        """Return whether channels of a topic have a start position: only on the redesigned NSQ, with lookup.

        Like consumers, it waits for a lookup service that is not running yet.
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

    def change_cluster(self, change: Callable[[Admin], Awaitable[None]], record: Mapping[str, Any], text: str) -> None:
        """Make a change, and print a result."""

        async def act() -> None:
            async with self.admin() as admin:
                await change(admin)
            self.show(record, text)

        perform(act)

    async def serve(self, consumer: Consumer, *, until_end: bool, signals: bool = True) -> None:
        """Run a consumer until a signal or its end; with ``until_end``, until its channel has no messages left."""
        async with anyio.create_task_group() as tasks:
            if until_end:
                tasks.start_soon(self.stop_when_drained, consumer)
            await consumer.serve(signals=signals)
            tasks.cancel_scope.cancel()

    async def stop_when_drained(self, consumer: Consumer) -> None:
        """Stop a consumer when its channel has no messages left, neither waiting nor in flight nor deferred.

        A new channel is at the end of its queue until the consumer has moved it to the start position, which it does
        before it counts as connected. The redesigned NSQ moves it after it has responded: so the lag is read twice.
        """
        pauses, looks = Doubling(_FIRST_POLL, _LONGEST_POLL), 0
        async with self.admin() as admin:
            while looks < 2:
                await anyio.sleep(_FIRST_POLL if looks else pauses.next())
                drained = False
                with suppress(ConnectionFailed, LookupFailed, PartitionUnavailable):  # a leader moves, a node restarts
                    if _consumes_all(consumer, await admin.topic(consumer.topics[0])):
                        stats = await admin.stats(consumer.topics[0], consumer.channel)
                        found = stats.channels.get(consumer.channel)
                        drained = found is not None and found.lag == 0 and not stats.unreachable
                looks = looks + 1 if drained else 0
        consumer.stop()

    @property
    def for_people(self) -> bool:
        """Whether results are printed as text."""
        return not self.json and sys.stdout.isatty()

    def show(self, record: Mapping[str, Any], text: str) -> None:
        """Print a result: text at a terminal, a line of JSON elsewhere."""
        print_record(record, text, json=not self.for_people)

    def table(self, columns: Sequence[str], records: Iterable[Mapping[str, Any]], title: str = "") -> None:
        """Print records: a table of these columns at a terminal, lines of JSON with every member elsewhere."""
        if not self.for_people:
            for record in records:
                print_record(record, "", json=True)
            return
        from rich.console import Console

        Console().print(make_table(columns, records, title))


def _consumes_all(consumer: Consumer, topic: TopicInfo) -> bool:
    """Return whether a consumer is connected to all partitions that it is to consume, and these have leaders."""
    open_connections = consumer.connections
    if topic.meta is None:
        return {str(node) for node in topic.nodes} <= {one.node for one in open_connections}
    chosen = consumer.settings["partitions"]
    wanted = chosen if isinstance(chosen, tuple) else range(topic.meta.partition_num)
    return {*wanted} <= {one.partition for one in open_connections} & topic.leaders.keys()


def complete_topics(context: typer.Context, incomplete: str) -> list[str]:
    """Return the topics that begin with a text, for the completion of the shell; nothing if lookup does not respond."""
    from nsqext.lookup.client import LookupClient

    given = {name: context.params[name] for name in ("lookupd", "nsqd") if context.params.get(name)}

    async def topics() -> list[str]:
        connection = Connection(_context_url(context.params.get("url"), context.params.get("context"), given), given)
        async with LookupClient(connection.lookupd(), connection.options().lookup) as client:
            with anyio.fail_after(_COMPLETION_TIMEOUT):
                return [name for name in await client.topics() if name.startswith(incomplete)]

    with suppress(Exception):  # a message would appear in the middle of the command line
        return anyio.run(topics)
    return []


def connected(function: Callable[..., Any]) -> Callable[..., object]:
    """Decorator: add --lookupd, --nsqd, --url, --context and --json; the command receives a `Connection` first.

    A coroutine function runs in an event loop.
    """
    from typer.models import ArgumentInfo

    shared: dict[str, Any] = {"lookupd": Lookupd, "nsqd": Nsqd, "url": Url, "context": Context, "json": Json}

    @functools.wraps(function)
    def run(**values: Any) -> object:
        lookupd, nsqd, url, context, json = (values.pop(name) for name in shared)
        given = {name: value for name, value in (("lookupd", lookupd), ("nsqd", nsqd)) if value}
        connection = Connection(_context_url(url, context, given), given, json)
        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            perform(functools.partial(function, connection, **values))
            return None
        return function(connection, **values)

    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    for one in own:
        for info in getattr(one.annotation, "__metadata__", ()):
            if one.name == "topic" and isinstance(info, ArgumentInfo):
                info.autocompletion = complete_topics
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [one.replace(kind=keyword) for one in own]
    for name, annotation in shared.items():
        default = False if name == "json" else None
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def changes(done: str, question: str = "") -> Callable[[Callable[..., Awaitable[str | None]]], Callable[..., object]]:
    """Decorator of a command that changes a topic or a channel: like `connected`, with an open `Admin` instead.

    Args:
        done: what is printed about the topic, or about its channel; the command may return another word.
        question: asked before the change, with the arguments in its braces; adds --yes.
    """

    def decorate(function: Callable[..., Awaitable[str | None]]) -> Callable[..., object]:
        def run(connection: Connection, *, topic: str, yes: bool = False, **values: Any) -> None:
            if question:
                confirm(question.format(topic=topic, **values), yes=yes)

            async def act() -> None:
                async with connection.admin() as admin:
                    result = await function(admin, topic=topic, **values) or done
                channel = values.get("channel")
                where = {"topic": topic} if channel is None else {"topic": topic, "channel": channel}
                subject = topic if channel is None else f"channel {channel} of {topic}"
                connection.show({**where, result: True}, f"{subject} is {result}")

            perform(act)

        # Admin is not imported for --help
        admin, *own = inspect.signature(function, eval_str=True, locals={"Admin": object}).parameters.values()
        if question:
            own.append(inspect.Parameter("yes", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Yes))
        run.__doc__, run.__module__ = function.__doc__, function.__module__
        run.__signature__ = inspect.Signature([admin, *own])  # type: ignore[attr-defined]
        return connected(run)

    return decorate


def load_settings(url: str | None, addresses: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Given:
    """Return the settings of all clients from a URL and the environment.

    Args:
        url: the URL; None for that of the environment.
        addresses: ``lookupd`` or ``nsqd``; they override those of the URL.
        environ: the environment; the one of the process by default.
    """
    from nsqext.client.settings import app_schema
    from nsqext.settings import PREFIX

    lookupd, nsqd = addresses.get("lookupd", ()), addresses.get("nsqd", ())
    return app_schema().collect(lookupd, nsqd, PREFIX, {}, environ, url=url, required=False)
