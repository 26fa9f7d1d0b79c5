"""Options shared by commands: addresses of the servers, and the output format."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Unpack

import anyio
import typer
from attrs import define

from nsqext.cli.output import make_table, print_record
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
    from rich.console import RenderableType

    from nsqext import Admin, App, Consumer, Producer
    from nsqext.admin import TopicInfo
    from nsqext.client.consumer.options import ConsumerOptions, ConsumerSettings
    from nsqext.client.producer.options import ProducerSettings
    from nsqext.settings import Given

T = TypeVar("T")

_PANEL = "Connection and output"
_STARTUP = 60.0  # seconds that a lookup service may take to start
_PATIENT = 15.0  # seconds: nsqlookupd forwards a change to the nodes before it responds
_COMPLETION_TIMEOUT = 1.0  # seconds
_FIRST_POLL, _LONGEST_POLL = 0.05, 0.5  # seconds between two reads of a channel's lag

Url = Annotated[
    str | None,
    typer.Option(
        help="nsq://HOST:PORT,…?SETTING=VALUE&… with any setting of the client; or NSQEXT_URL.", rich_help_panel=_PANEL
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print JSON lines at a terminal too; in pipes it is the default.", rich_help_panel=_PANEL
    ),
]


@define
class Connection:
    """Addresses of the servers and output format: the options shared by commands."""

    lookupd: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of nsqlookupd's HTTP side, several with commas; or NSQEXT_LOOKUPD.", rich_help_panel=_PANEL
        ),
    ] = None
    nsqd: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of nsqd, without lookup; several with commas; or NSQEXT_NSQD.", rich_help_panel=_PANEL
        ),
    ] = None
    url: Url = None
    context: Annotated[
        str | None, typer.Option(help="A context of `nsqext config`, instead of --url.", rich_help_panel=_PANEL)
    ] = None
    json: Json = False

    def chosen_url(self) -> str | None:
        """Return the URL to use. Precedence: --url, --context, environment, current context."""
        from nsqext.cli.contexts import load_contexts

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
        """Return the addresses and the settings of all clients."""
        found = load_settings(self.chosen_url(), self.lookupd, self.nsqd)
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

        texts: dict[str, str] = settings_for(shared_settings(), settings_as_text(self.chosen_url()))
        return texts

    def lookup(self) -> Any:
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

        addresses, values = self.lookup(), self.load().values
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

    def table(self, columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> None:
        """Print records: a table of these columns at a terminal, lines of JSON with every member elsewhere."""
        if not self.for_people:
            for record in records:
                print_record(record, "", json=True)
            return
        from rich.console import Console

        Console().print(make_table(columns, records))

    @contextmanager
    def live(
        self, table: Callable[[T], RenderableType], records: Callable[[T], Iterable[Mapping[str, Any]]]
    ) -> Iterator[Callable[[T], None]]:
        """Yield a function that shows values: as a table that is updated, elsewhere as lines of JSON."""
        if not self.for_people:
            yield lambda value: self.table((), records(value))
            return
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield lambda value: live.update(table(value), refresh=True)


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

    given: dict[str, Any] = {name: context.params.get(name) for name in ("lookupd", "nsqd", "url", "context")}

    async def topics() -> list[str]:
        connection = Connection(**given)
        async with LookupClient(connection.lookup(), connection.options().lookup) as client:
            with anyio.fail_after(_COMPLETION_TIMEOUT):
                return [name for name in await client.topics() if name.startswith(incomplete)]

    with suppress(Exception):  # a message would appear in the middle of the command line
        return anyio.run(topics)
    return []


def load_settings(
    url: str | None, lookupd: str | None = None, nsqd: str | None = None, environ: Mapping[str, str] | None = None
) -> Given:
    """Return the settings of all clients from a URL and the environment.

    Args:
        url: the URL; None for that of the environment.
        lookupd: lookup addresses, which override those of the URL.
        nsqd: addresses of nsqd, which override those of the URL.
        environ: the environment; the one of the process by default.
    """
    from nsqext.client.settings import app_schema
    from nsqext.settings import PREFIX

    return app_schema().collect(lookupd or (), nsqd or (), PREFIX, {}, environ, url=url, required=False)
