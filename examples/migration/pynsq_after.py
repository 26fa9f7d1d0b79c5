"""The worker of `pynsq_before.py` with nsqext: ``nsqext run examples.migration.pynsq_after:app``."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass

from nsqext import App, Message, MessageBatch
from nsqext.app import decode_body


@dataclass
class Click:
    id: str
    page: str


app = App(lookupd=os.environ.get("NSQEXT_LOOKUPD", "127.0.0.1:4161"))
opened: list[sqlite3.Connection] = []


@app.lifespan
async def storage(app: App) -> AsyncIterator[None]:
    database = sqlite3.connect(os.environ.get("CLICKS_DATABASE", "clicks.db"))
    database.execute("CREATE TABLE IF NOT EXISTS clicks (id TEXT PRIMARY KEY, page TEXT)")
    database.execute("CREATE TABLE IF NOT EXISTS broken (body BLOB PRIMARY KEY)")
    opened.append(database)
    yield
    opened.pop().close()


@app.batch_handler("clicks", "counter", max_count=500, max_wait=0.2, max_in_flight=1000)
async def count(batch: MessageBatch) -> None:
    """Write a batch in one transaction; it is finished when this returns, and requeued when this raises."""
    rows: list[tuple[str, str]] = []
    broken: list[tuple[bytes]] = []
    for message in batch:
        row = read(message)
        if row is None:
            broken.append((message.body,))
        else:
            rows.append(row)
    with opened[-1] as database:
        database.executemany("INSERT OR IGNORE INTO clicks VALUES (?, ?)", rows)
        database.executemany("INSERT OR IGNORE INTO broken VALUES (?)", broken)
    if rows:
        await app.publish("reports", {"written": len(rows)})  # retried; if it still fails, the batch is requeued


def read(message: Message) -> tuple[str, str] | None:
    """Return the row of a click; None for an invalid body."""
    try:
        click = decode_body(message.body, Click)
    except ValueError:
        return None
    return click.id, click.page
