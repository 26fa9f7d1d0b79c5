"""``nsqext outbox``: the relay of an outbox in a database, its tables, and its waiting messages."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Literal

from nsqext.cli.command import Json, Yes, command, examples
from nsqext.cli.connection import ServerAccess, confirm, counted
from nsqext.cli.parameters import Argument, CommandGroup, Option
from nsqext.cli.status_page import add_status_page
from nsqext.cli.waiting import waits

Database = Annotated[str, Option(envvar="NSQEXT_OUTBOX", help="postgresql://user@host/name, or sqlite:///path.")]

app: CommandGroup = CommandGroup()


@app.command("relay")
@examples(
    "nsqext outbox relay --database postgresql://shop@db/shop", "nsqext outbox relay --database sqlite:///shop.db"
)
@command
async def relay(
    connection: ServerAccess,
    database: Database,
    batch: Annotated[int, Option(min=1, help="Messages that are published together, at most.")] = 500,
    poll: Annotated[float, Option(min=0.01, help="Seconds between two polls of an empty outbox.")] = 0.5,
    http: Annotated[str | None, Option(help="HOST:PORT that serves /healthz, /readyz and /metrics.")] = None,
) -> None:
    """Publish what transactions added to an outbox, at least once, until ^C or SIGTERM.

    Any number of relays may run.
    """
    from nsqext.transactions import OutboxRelay, OutboxStore

    service = connection.app()

    def wait() -> str:
        found = service.producer.statistics()
        if not found.pending and found.lookup_failures == 0:
            return "messages in the outbox"
        return "a node to store messages of the outbox"

    with waits.waiting("the database of the outbox"), OutboxStore(database) as store, waits.waiting(wait):
        publisher = OutboxRelay(store, batch=batch, poll=poll)
        publisher.attach(service)
        if http is not None:
            add_status_page(service, http, publisher)

        @service.lifespan
        async def report(_: object) -> AsyncIterator[None]:
            waiting = store.summary(time.time()).waiting
            connection.show({"waiting": waiting}, f"relay of {counted(waiting, 'waiting message')}")
            yield

        await service.serve(signals=True)


@app.command("sql")
@examples("nsqext outbox sql", "nsqext outbox sql --dialect sqlite | sqlite3 shop.db")
def sql(
    dialect: Annotated[Literal["postgresql", "sqlite"], Option(help="Kind of the database.")] = "postgresql",
) -> None:
    """Print the statements that create the tables of outbox and inbox, for a migration."""
    from nsqext.transactions import schema_sql

    print(schema_sql(dialect), end="")


@app.command("status")
@examples("nsqext outbox status --database sqlite:///shop.db", "nsqext outbox status --discard 30 --yes")
def status(
    database: Database,
    retry: Annotated[bool, Option("--retry", help="Publish the messages that were set aside.")] = False,
    discard: Annotated[
        float | None, Option(min=0, help="Delete messages set aside that are older than this number of days.")
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Show how many messages wait, how many were set aside because they cannot be published and why, and relays."""
    from nsqext.transactions import OutboxStore

    if discard is not None:
        confirm(f"Delete the messages of the outbox that were set aside and are older than {discard:g} days?", yes=yes)
    if retry:
        confirm("Publish the messages of the outbox that were set aside", yes=yes, ask=False)
    now = time.time()
    with waits.waiting("the database of the outbox"), OutboxStore(database) as store:
        discarded = 0 if discard is None else store.discard_refused(now - discard * 86_400.0)
        again = store.retry_refused() if retry else 0
        found = store.summary(now)
    age = None if found.age is None else round(found.age, 3)
    record = {
        "waiting": found.waiting,
        "oldest_seconds": age,
        "refused": found.refused,
        "reason": found.reason,
        "retried": again,
        "discarded": discarded,
        "relays": found.relays,
    }
    text = f"{counted(found.waiting, 'message')} waiting"
    text += "" if age is None else f", the oldest for {age:g} s"
    text += f"; {found.refused} set aside; {counted(found.relays, 'relay')}"
    text += found.reason and f"; set aside last: {found.reason}"
    text += "" if discard is None else f"; {discarded} deleted"
    text += f"; {again} to be published again" if retry else ""
    ServerAccess(json=json).show(record, text)


@app.command("list")
@examples("nsqext outbox list --database sqlite:///shop.db", "nsqext outbox list --topic orders --limit 10 --json")
def show(
    database: Database,
    topic: Annotated[str | None, Option(help="Messages for this topic only.")] = None,
    limit: Annotated[int, Option(min=1, help="Largest number of messages, the first added.")] = 100,
    json: Json = False,
) -> None:
    """List the messages of an outbox, with the errors of messages that were set aside."""
    from nsqext.transactions import OutboxStore

    with waits.waiting("the database of the outbox"), OutboxStore(database) as store:
        found = store.waiting(topic, limit)
    records = [
        {
            "identity": one.identity,
            "topic": one.topic,
            "added": datetime.fromtimestamp(one.added, UTC).isoformat(timespec="milliseconds"),
            "publishing": one.publishing,
            "error": one.error,
        }
        for one in found
    ]
    ServerAccess(json=json).table(("identity", "topic", "added", "publishing", "error"), records)


@app.command("cancel")
@examples("nsqext outbox cancel order-17 --database sqlite:///shop.db --yes", "nsqext outbox cancel a b --topic orders")
def cancel(
    identity: Annotated[list[str], Argument(help="Identities of the messages.")],
    database: Database,
    topic: Annotated[str | None, Option(help="Messages for this topic only.")] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete messages of an outbox that must not be published; exit with 1 if any is unknown or being published."""
    from nsqext.app.relay import Cancellation
    from nsqext.transactions import OutboxStore

    confirm(f"Cancel {counted(len(identity), 'message')} of the outbox?", yes=yes)
    connection, failed = ServerAccess(json=json), False
    with waits.waiting("the database of the outbox"), OutboxStore(database) as store:
        for one in identity:
            result = store.cancel(one, topic)
            done = result is Cancellation.CANCELLED
            record = {"identity": one, "cancelled": done, "result": result.value}
            connection.show(record, f"{one} {result.explanation}")
            failed |= not done
    if failed:
        raise SystemExit(1)
