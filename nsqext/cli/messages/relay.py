"""``nsqext relay``, ``nsqext deadletters``: publish the messages of a topic again, elsewhere or where they failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import httpx
from attrs import evolve, frozen

from nsqext.cli.command import check_http_url, command, examples, parse_position
from nsqext.cli.connection import ServerAccess, counted
from nsqext.cli.messages.mirror import Kept, Mirror, prepare
from nsqext.cli.messages.relay_run import RelayRun, Running
from nsqext.cli.parameters import Argument, CommandGroup, Option
from nsqext.cli.waiting import waits
from nsqext.errors import InvalidSetting, PublishFailed
from nsqext.settings_text import redact_url

if TYPE_CHECKING:
    from nsqext import Consumer, Message

_KEPT = 32  # idle connections
_LONGEST_ANSWER = 1 << 16


@frozen
class TargetCluster:
    """The cluster to publish to, by default the consumed cluster."""

    to_lookupd: Annotated[str | None, Option(help="Lookup addresses of the other cluster.")] = None
    to_nsqd: Annotated[str | None, Option(help="Addresses of the other nsqd.")] = None
    to_url: Annotated[str | None, Option(help="Settings of the other cluster as a URL.")] = None
    to_context: Annotated[str | None, Option(help="Context of the other cluster.")] = None

    def connection(self) -> ServerAccess | None:
        """Return the connection to the cluster; None for the consumed cluster."""
        if self.to_url is not None and self.to_context is not None:
            raise InvalidSetting("both --to-url and --to-context are given", hint="give one of them")
        found = ServerAccess(self.to_lookupd, self.to_nsqd, self.to_url, self.to_context)
        return None if found == ServerAccess() else found


@frozen
class Hook:
    """The URL to send messages to."""

    to_http: Annotated[str | None, Option(help="Send each body to this URL with POST instead.")] = None
    content_type: Annotated[str, Option(help="--to-http: content type.")] = "application/octet-stream"
    timeout: Annotated[float, Option(min=0.1, help="--to-http: seconds for one request.")] = 10.0

    def __attrs_post_init__(self) -> None:
        if self.to_http is not None:
            check_http_url("--to-http", self.to_http, "https://example.com/hook")
        if not (self.content_type.isascii() and self.content_type.isprintable()):
            raise InvalidSetting(f"--content-type {self.content_type!r} is not the value of a header", hint="use ASCII")


@examples(
    "nsqext relay orders --to orders_copy",
    "nsqext relay orders --to orders --to-lookupd other:4161 --channel mirror",
    "nsqext relay orders --to orders --to-lookupd other:4161 --start earliest",
    "nsqext relay orders --to-http https://example.com/hook --concurrency 8",
)
@command
async def run(
    connection: ServerAccess,
    topic: Annotated[str, Argument(help="The topic to consume.")],
    channel: Annotated[str, Option(help="The channel to consume.")] = "relay",
    to: Annotated[str | None, Option(help="The topic to publish to; a missing topic is created as TOPIC is.")] = None,
    cluster: TargetCluster = TargetCluster(),
    hook: Hook = Hook(),
    kept: Kept = Kept(),
    concurrency: Annotated[int, Option(min=1, help="Messages or batches sent concurrently.")] = 16,
    running: Running = Running(),
) -> None:
    """Publish the messages of a topic to another topic, or send them to a URL, at least once, until ^C or SIGTERM.

    A message is finished after it was stored, or after a response of the URL with status 200 to 299; until then it is
    sent again. The relay waits for nodes of both clusters; it ends with an error if the target can never store a
    message. Extend header and body stay byte for byte. Messages of one key keep their order; so do messages of a
    partition, on an ordered topic, and on a topic without keys (extend). A missing target topic gets the partitions,
    flags and other channels of the source. Relays that share a channel do not keep the order.
    """
    if (to is None) == (hook.to_http is None):
        raise InvalidSetting("exactly one of --to and --to-http is needed")
    if hook.to_http is None and hook != Hook():
        raise InvalidSetting("--content-type and --timeout without --to-http would be ignored", hint="leave them out")
    connection.check_end_is_known(until_end=running.until_end)
    connection.refuse_loss()
    settings: dict[str, Any] = {"concurrency": concurrency}
    if running.until_end and running.start is None and await connection.has_positions(topic):
        running = evolve(running, start="earliest")  # a channel that is new has no other end than its start
    if running.start is not None:
        settings["start"] = parse_position(running.start)
    # errors, metrics and health name the URL, which may have a secret
    relay = RelayRun(connection, topic, channel, to or redact_url(str(hook.to_http)), running)
    if to is None:
        if cluster != TargetCluster():
            raise InvalidSetting("--to-http cannot be combined with the address of another cluster")
        key = kept.key if not kept.without_headers else None
        await _to_http(
            relay, partial(connection.consumer, topic, channel, key=key, **relay.settings(), **settings), hook
        )
        return
    target = cluster.connection() or connection
    if target is connection and to == topic:
        raise InvalidSetting("the topic would be relayed to itself", hint="give another topic or cluster")
    placement = await prepare(relay, target, kept)
    mirror = Mirror(relay, target.producer(), placement)

    def consumer() -> Consumer:
        # without headers, bodies are unpacked; otherwise body and headers are published as stored
        own = {"key": placement.lane, "decompress": kept.without_headers, **relay.settings(), **settings}
        opened = connection.consumer(topic, channel, **own)
        opened.batch_handler(max_wait=0.0)(mirror.copy)
        return opened

    async with mirror.producer:
        await relay.serve(consumer, mirror.producer)


async def _to_http(relay: RelayRun, new_consumer: Callable[[], Consumer], hook: Hook) -> None:
    url, shown = str(hook.to_http), relay.target
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT)
    async with httpx.AsyncClient(timeout=hook.timeout, limits=limits) as client:

        async def post(body: bytes, headers: dict[str, str]) -> int:
            """Send a body and return the status; read a short response, to reuse the connection."""
            size = 0
            async with client.stream("POST", url, content=body, headers=headers) as answer:
                async for chunk in answer.aiter_raw():
                    size += len(chunk)
                    if size > _LONGEST_ANSWER:
                        break
                return answer.status_code

        async def send_once(body: bytes, headers: dict[str, str]) -> None:
            try:
                with anyio.fail_after(hook.timeout):  # httpx limits only the wait for each chunk
                    status = await post(body, headers)
            except (httpx.TimeoutException, TimeoutError) as error:
                raise PublishFailed(f"{shown} did not respond within {hook.timeout:g} s") from error
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise PublishFailed(f"{shown} did not respond: {error!r}") from error
            if not 200 <= status < 300:
                raise PublishFailed(f"{shown} responded with status {status}")

        async def send(message: Message) -> None:
            headers = {
                "Content-Type": hook.content_type,
                "X-NSQ-Message-Id": message.id.hex(),
                "X-NSQ-Attempts": str(message.attempts),
            }
            try:
                await send_once(message.body, headers)
            except PublishFailed as error:
                relay.outage = error
                raise
            relay.outage = None
            relay.relayed += 1

        def consumer() -> Consumer:
            opened = new_consumer()
            opened.handler(send)
            return opened

        await relay.serve(consumer)


deadletters: CommandGroup = CommandGroup()


@deadletters.command("replay")
@examples("nsqext deadletters replay orders_dead")
@command
async def replay(
    connection: ServerAccess,
    topic: Annotated[str, Argument(help="The dead letter topic.")],
    channel: Annotated[str, Option(help="Channel to consume; its position is the progress.")] = "replay",
    idle: Annotated[float, Option(min=0.1, help="Seconds without a dead letter after which the replay ends.")] = 5.0,
) -> None:
    """Publish dead letters to the topics where they failed, with headers, tag, trace id and key.

    All channels of these topics receive the messages. After an interruption the next replay continues, and may publish
    one message twice.
    """
    from nsqext import Lookup, replay_dead_letters
    from nsqext.client.settings import connection_settings, settings_for
    from nsqext.lookup.lookup import lookup_schema

    values = connection.load().values
    lookup = Lookup(connection.lookup(), **settings_for(lookup_schema().own, values))
    own = settings_for(connection_settings(), values)
    with waits.waiting(f"dead letters of {topic}, channel {channel}"):
        count = await replay_dead_letters(topic, lookupd=lookup, channel=channel, idle=idle, **own)
    connection.show({"topic": topic, "replayed": count}, f"{counted(count, 'dead letter')} of {topic} replayed")
