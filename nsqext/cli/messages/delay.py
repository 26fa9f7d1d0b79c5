"""``nsqext delay``: the relay of delayed messages, and the messages in its store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from nsqext.cli.answers import answer_of
from nsqext.cli.command import Json, Yes, command, examples
from nsqext.cli.connection import ServerAccess, confirm, counted
from nsqext.cli.parameters import Argument, CommandGroup, Option
from nsqext.cli.status_page import add_status_page
from nsqext.cli.waiting import wait_of_app, waits
from nsqext.errors import InvalidSetting

_STORE = "delayed.sqlite"

Store = Annotated[Path, Option(help="File of the store; relays of one machine share it.")]

app: CommandGroup = CommandGroup()


@app.command("run")
@examples("nsqext delay run --store /var/lib/nsqext/delayed.sqlite")
@command
async def run(
    connection: ServerAccess,
    store: Store = Path(_STORE),
    topic: Annotated[str, Option(help="Topic of the delayed messages.")] = "delayed",
    channel: Annotated[str, Option(help="Channel of all relays.")] = "relay",
    keep: Annotated[
        float, Option(min=0, help="Seconds for which identities of published messages are remembered.")
    ] = 86_400.0,
    create: Annotated[bool, Option(help="Create the topic if it does not exist (with lookup).")] = True,
    http: Annotated[str | None, Option(help="HOST:PORT that serves /healthz, /readyz and /metrics.")] = None,
) -> None:
    """Publish the messages of publish(delay=…, via="relay") when they are due, at least once, until ^C or SIGTERM.

    Received messages are in the store, and not in the topic: keep the file on a disk that survives a restart.
    """
    from nsqext.delays import DelayRelay, DelayStore

    service = connection.app()
    with DelayStore(store) as opened:
        relay = DelayRelay(opened, topic=topic, channel=channel, keep=keep)
        relay.attach(service)
        if http is not None:
            add_status_page(service, http, relay)
        if create:
            with waits.waiting(f"lookup to create {topic}"):
                await answer_of(
                    connection, lambda admin: admin.create_topic(topic, channels=relay.channels, exist_ok=True)
                )

        @service.lifespan
        async def report(_: object) -> AsyncIterator[None]:
            waiting = opened.count()
            text = f"relay of {topic} with {counted(waiting, 'waiting message')} in {store}"
            connection.show({"topic": topic, "store": str(store), "waiting": waiting}, text)
            yield

        with waits.waiting(wait_of_app(service)):
            await service.serve(signals=True)


@app.command("list")
@examples("nsqext delay list", "nsqext delay list --topic orders --limit 10 --json")
def show(
    store: Store = Path(_STORE),
    topic: Annotated[str | None, Option(help="Messages for this topic only.")] = None,
    limit: Annotated[int, Option(min=1, help="Largest number of messages, the first due.")] = 100,
    refused: Annotated[
        bool, Option("--refused", help="List the records of the topic that are no delayed messages instead.")
    ] = False,
    json: Json = False,
) -> None:
    """List the messages in the store of a relay."""
    from nsqext.delays import DelayStore

    if refused:
        if topic is not None:
            raise InvalidSetting(
                "--topic with --refused would be ignored", hint="leave it out: such a record names no topic"
            )
        with DelayStore(store, create=False) as opened:
            found = opened.refused(limit)
        shown = [{"received": _time(one.received), "reason": one.reason, "record": repr(one.record)} for one in found]
        ServerAccess(json=json).table(("received", "reason", "record"), shown)
        return
    with DelayStore(store, create=False) as opened:
        messages = opened.waiting(topic, limit)
    connection = ServerAccess(json=json)
    records = [
        {
            "identity": one.identity,
            "topic": one.topic,
            "due": _time(one.due),
            "publishing": one.publishing,
            "error": one.error,
        }
        for one in messages
    ]
    connection.table(("identity", "topic", "due", "publishing", "error"), records)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


@app.command("cancel")
@examples("nsqext delay cancel order-17-reminder --yes")
def cancel(
    identity: Annotated[str, Argument(help="Identity of the message.")],
    store: Store = Path(_STORE),
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Cancel a message in the store of a relay; exit with 1 if it does not wait there or is being published."""
    from nsqext.delays import Cancellation, DelayStore

    confirm(f"Cancel the message {identity} in {store}?", yes=yes)
    with DelayStore(store, create=False) as opened:
        result = opened.cancel(identity)
    done = result is Cancellation.CANCELLED
    ServerAccess(json=json).show(
        {"identity": identity, "cancelled": done, "result": result.value}, f"{identity} {result.explanation}"
    )
    if not done:
        raise SystemExit(1)


@app.command("discard")
@examples("nsqext delay discard --yes")
def discard(
    store: Store = Path(_STORE),
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete the records of the topic that are no delayed messages and were set aside."""
    from nsqext.delays import DelayStore

    confirm(f"Delete the records that were set aside in {store}?", yes=yes)
    with DelayStore(store, create=False) as opened:
        count = opened.discard_refused()
    ServerAccess(json=json).show({"store": str(store), "discarded": count}, f"{counted(count, 'record')} deleted")
