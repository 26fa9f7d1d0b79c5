"""Costs of outbox, inbox and positions: the same loops with and without them.

``python -m benchmarks.bench_transactions``. Messages per second, with the embedded cluster in another process and one
database on the same machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from statistics import median

import anyio
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from benchmarks.report import table, write_section
from benchmarks.servers import redesigned_cluster
from examples.orders.postgres import postgres_server
from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.transactions import Inbox, Outbox, OutboxRelay, OutboxStore, Positions

COUNT = 1000
TASKS = 8
BODY = b"x" * 200
INSERT = text("INSERT INTO effects (number) VALUES (:number)")

Sessions = async_sessionmaker[AsyncSession]
_number = count(1)


@asynccontextmanager
async def opened(database: str, tasks: int) -> AsyncIterator[Sessions]:
    """Create the tables of a database, and return its sessions."""
    OutboxStore(database, create=True).close()
    if database.startswith("sqlite:"):
        url = database.replace("sqlite:", "sqlite+aiosqlite:")
        engine = create_async_engine(url, connect_args={"timeout": 30})
    else:
        folder = dict(word.split("=", 1) for word in database.split())["host"]
        engine = create_async_engine(f"postgresql+psycopg://postgres@/postgres?host={folder}", pool_size=tasks)
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS effects (number INTEGER)"))
    yield async_sessionmaker(engine)
    await engine.dispose()


async def transactions(sessions: Sessions, amount: int, tasks: int, outbox: Outbox | None) -> float:
    """Return how many transactions are committed in a second: one row each, with or without a message."""

    async def run() -> None:
        for number in range(amount // tasks):
            async with sessions.begin() as session:
                await session.execute(INSERT, {"number": number})
                if outbox is not None:
                    await outbox.add_async(session, "extended", BODY, key=number)

    began = time.perf_counter()
    async with anyio.create_task_group() as group:
        for _ in range(tasks):
            group.start_soon(run)
    return amount // tasks * tasks / (time.perf_counter() - began)


async def relayed(lookupd: str, database: str) -> float:
    """Return how many messages of an outbox a relay publishes in a second."""
    async with Producer(lookupd) as producer:
        await producer.publish("extended", BODY)
        with OutboxStore(database) as store:
            waiting, began = store.summary(time.time()).waiting, time.perf_counter()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(OutboxRelay(store, poll=0.01).run, producer)
                while store.summary(time.time()).waiting:  # noqa: ASYNC110 - a table has no event
                    await anyio.sleep(0.02)
                took = time.perf_counter() - began
                tasks.cancel_scope.cancel()
    return waiting / took


async def handled(lookupd: str, sessions: Sessions, amount: int, tasks: int, way: str) -> float:
    """Return how many messages a second are handled, each with a row in a transaction."""
    name, once = f"c{next(_number)}", _middleware(way, sessions)
    ordered = "in order" in way
    consumer = Consumer(
        "extended",
        name,
        lookupd,
        concurrency=1 if ordered else tasks,
        max_in_flight=4 * tasks,
        ordered=ordered,
        queue_position=way == "inbox, by offset",
        start=once if isinstance(once, Positions) else None,
        middleware=[] if once is None else [once],
    )
    times: list[float] = []

    async def handle(message: Message) -> None:
        if once is None:
            async with sessions.begin() as session:
                await session.execute(INSERT, {"number": 1})
        else:
            await once.session().execute(INSERT, {"number": 1})
        times.append(time.perf_counter())
        if len(times) == amount:
            consumer.stop()

    consumer.handler(handle)
    async with Producer(lookupd) as producer, consumer:
        marked = way == "inbox, by header"
        bodies = [
            OutgoingMessage(BODY, headers={"nsqext_id": f"{name}-{number}"} if marked else None)
            for number in range(amount + 4 * tasks)
        ]
        await producer.publish_many("extended", bodies)
        await consumer.wait()
    return (amount - 1) / (times[amount - 1] - times[0])


def _middleware(way: str, sessions: Sessions) -> Inbox[AsyncSession] | Positions[AsyncSession] | None:
    if way.startswith("inbox"):
        return Inbox(sessions.begin)
    return Positions(sessions.begin) if way.startswith("positions") else None


WAYS = ("alone", "inbox, by header", "inbox, by offset", "alone, in order", "positions, in order")


async def measure(lookupd: str, database: str, amount: int, tasks: int) -> dict[str, float]:
    """Measure everything once."""
    async with opened(database, tasks) as sessions:
        found = {"transactions": await transactions(sessions, amount, tasks, None)}
        found["with outbox"] = await transactions(sessions, amount, tasks, Outbox())
        found["relayed"] = await relayed(lookupd, database)
        for way in WAYS:
            found[way] = await handled(lookupd, sessions, amount, tasks, way)
    return found


def row(rounds: list[dict[str, float]], name: str, base: str) -> str:
    """Return a rate, and its median share of another one in the same round."""
    share = "" if name == base else f" ({median(one[name] / one[base] for one in rounds):.2f})"
    return f"{median(one[name] for one in rounds):,.0f}{share}"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=COUNT, help="messages of each measurement")
    given = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {}
    with (
        redesigned_cluster("extended:1:ext") as lookupd,
        tempfile.TemporaryDirectory() as folder,
        postgres_server() as postgres,
    ):
        for _ in range(given.rounds):
            for name, database, tasks in (("PostgreSQL", postgres, 8), ("SQLite", f"sqlite:///{folder}/o.db", 1)):
                results.setdefault(name, []).append(anyio.run(measure, lookupd, database, given.count, tasks))
    names = (
        ("a transaction with one row", "transactions", "transactions"),
        ("… and a message in the outbox", "with outbox", "transactions"),
        ("published by a relay", "relayed", "relayed"),
        ("a handler with one row", "alone", "alone"),
        ("… with an inbox, by header", "inbox, by header", "alone"),
        ("… with an inbox, by offset", "inbox, by offset", "alone"),
        ("a handler with one row, in order", "alone, in order", "alone, in order"),
        ("… with positions", "positions, in order", "alone, in order"),
    )
    rows = [(title, *(row(results[one], name, base) for one in results)) for title, name, base in names]
    text = table(("messages/s (share of the loop without it)", *results), rows)
    print(text)
    write_section(
        "Transactions",
        f"Bodies of {len(BODY)} bytes; PostgreSQL without fsync and with 8 tasks, SQLite with one; one consumer, one "
        f"relay; {given.rounds} rounds of {given.count} messages. Producers and consumers without outbox and inbox "
        f"import nothing of `nsqext.transactions`.\n\n{text}",
    )


if __name__ == "__main__":
    main()
