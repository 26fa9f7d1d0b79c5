"""``nsqext relay``: publish the messages of a topic to another topic, cluster or generation, or send them to a URL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import httpx
import typer

from nsqext.cli.common import Connection, connected, counted, examples, perform
from nsqext.cli.contexts import load_contexts
from nsqext.cli.tail import drained
from nsqext.errors import InvalidSetting, PublishFailed
from nsqext.protocol.headers import KEY_HEADER

if TYPE_CHECKING:
    from nsqext import Consumer, Message, Producer

__all__ = ("run",)

Send = Callable[["Message"], Awaitable[None]]


@examples(
    "nsqext relay orders --to orders_copy",
    "nsqext relay orders --to orders --to-lookupd other:4161 --channel mirror",
    "nsqext relay orders --to-http https://example.com/hook --concurrency 8",
)
@connected
def run(
    connection: Connection,
    topic: Annotated[str, typer.Argument(help="The topic to consume.")],
    channel: Annotated[str, typer.Option(help="The channel to consume.")] = "relay",
    to: Annotated[str | None, typer.Option(help="The topic to publish to.")] = None,
    to_lookupd: Annotated[str | None, typer.Option(help="Lookup addresses of the other cluster.")] = None,
    to_nsqd: Annotated[str | None, typer.Option(help="Addresses of the other nsqd.")] = None,
    to_url: Annotated[str | None, typer.Option(help="Settings of the other cluster as a URL.")] = None,
    to_context: Annotated[str | None, typer.Option(help="Context of the other cluster.")] = None,
    to_http: Annotated[str | None, typer.Option(help="Send each body to this URL with POST instead.")] = None,
    content_type: Annotated[str, typer.Option(help="--to-http: content type.")] = "application/octet-stream",
    timeout: Annotated[float, typer.Option(min=0.1, help="--to-http: seconds for one request.")] = 10.0,
    without_headers: Annotated[
        bool, typer.Option("--without-headers", help="Leave out headers, tags, keys and trace ids.")
    ] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Messages that are sent at the same time.")] = 16,
    until_end: Annotated[bool, typer.Option("--until-end", help="End when the channel has no messages left.")] = False,
) -> None:
    """Publish the messages of a topic to another topic, or send them to a URL, at least once.

    A message is finished after it was stored, or after the URL answered with a status of 200 to 299; otherwise it is
    requeued, and the relay slows down until sending succeeds again. Messages of one key stay in their order. The other
    topic must support extend headers where messages have them; --without-headers relays to topics that do not.
    """
    if (to is None) == (to_http is None):
        raise InvalidSetting("exactly one of --to and --to-http is needed")
    elsewhere = {name: value for name, value in (("lookupd", to_lookupd), ("nsqd", to_nsqd)) if value}
    settings: dict[str, Any] = {"concurrency": concurrency, "max_in_flight": max(200, 2 * concurrency)}
    if not without_headers:
        settings["key"] = KEY_HEADER
    if to_http is not None:
        if elsewhere or to_url or to_context:
            raise InvalidSetting("--to-http takes no address of another cluster")
        consumer = connection.consumer(topic, channel, **settings)
        perform(lambda: _to_http(connection, consumer, str(to_http), content_type, timeout, until_end=until_end))
        return
    if to_url is not None and to_context is not None:
        raise InvalidSetting("both --to-url and --to-context are given", hint="give one of them")
    url = load_contexts().url(to_context) if to_context is not None else to_url
    target = Connection(url, elsewhere) if url or elsewhere else connection
    if target is connection and to == topic:
        raise InvalidSetting("the topic would be relayed to itself", hint="give another topic or cluster")
    consumer = connection.consumer(topic, channel, **settings)
    perform(
        lambda: _to_topic(
            connection, consumer, target.producer(), str(to), with_headers=not without_headers, until_end=until_end
        )
    )


async def _to_topic(
    connection: Connection, consumer: Consumer, producer: Producer, topic: str, *, with_headers: bool, until_end: bool
) -> None:
    async def send(message: Message) -> None:
        if not with_headers:
            await producer.publish(topic, message.body)
            return
        await producer.publish(
            topic,
            message.body,
            headers={name: str(value) for name, value in message.headers.items()} or None,
            tag=message.tag,
            trace_id=message.trace_id or None,
            key=message.key,
        )

    async with producer:
        await _relay(connection, consumer, send, until_end=until_end)


async def _to_http(
    connection: Connection, consumer: Consumer, url: str, content_type: str, timeout: float, *, until_end: bool
) -> None:
    async with httpx.AsyncClient(timeout=timeout) as client:

        async def send(message: Message) -> None:
            headers = {
                "Content-Type": content_type,
                "X-NSQ-Message-Id": message.id.hex(),
                "X-NSQ-Attempts": str(message.attempts),
            }
            try:
                answer = await client.post(url, content=message.body, headers=headers)
            except httpx.HTTPError as error:
                raise PublishFailed(f"{url} did not answer: {error!r}") from error
            if not answer.is_success:
                raise PublishFailed(f"{url} answered with {answer.status_code}")

        await _relay(connection, consumer, send, until_end=until_end)


async def _relay(connection: Connection, consumer: Consumer, send: Send, *, until_end: bool) -> None:
    count = 0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal count
        await send(message)
        count += 1

    async def stop_at_end() -> None:
        async with connection.admin() as admin:
            await drained(admin, consumer.topics[0], consumer.channel)
        consumer.stop()

    async with anyio.create_task_group() as tasks:
        if until_end:
            tasks.start_soon(stop_at_end)
        await consumer.run(signals=True)
        tasks.cancel_scope.cancel()
    text = f"{counted(count, 'message')} of {consumer.topics[0]} relayed"
    connection.show({"topic": consumer.topics[0], "relayed": count}, text)
