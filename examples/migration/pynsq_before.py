# mypy: ignore-errors
"""A worker with pynsq that counts clicks in SQLite, before its migration to `pynsq_after.py`."""

import json
import logging
import os
import sqlite3

import nsq
from tornado.ioloop import PeriodicCallback

logger = logging.getLogger("clicks")
LOOKUPD = os.environ.get("NSQEXT_LOOKUPD", "127.0.0.1:4161")
NSQD = os.environ.get("NSQD", "127.0.0.1:4150")
MOST = 500

database = sqlite3.connect(os.environ.get("CLICKS_DATABASE", "clicks.db"))
database.execute("CREATE TABLE IF NOT EXISTS clicks (id TEXT PRIMARY KEY, page TEXT)")
database.execute("CREATE TABLE IF NOT EXISTS broken (body BLOB PRIMARY KEY)")
waiting = []


def handle(message):
    message.enable_async()  # finished by flush
    waiting.append(message)
    if len(waiting) >= MOST:
        flush()


def flush():
    """Write the received clicks in one transaction."""
    batch, waiting[:] = waiting[:MOST], waiting[MOST:]
    if not batch:
        return
    rows, good = [], []
    for message in batch:
        try:
            click = json.loads(message.body)
            rows.append((click["id"], click["page"]))
        except (ValueError, KeyError, TypeError):
            give_up(message)  # would always fail
        else:
            good.append(message)
    try:
        with database:
            database.executemany("INSERT OR IGNORE INTO clicks VALUES (?, ?)", rows)
    except sqlite3.OperationalError:
        logger.exception("not written")
        for message in good:
            message.requeue(time_ms=1000)
        return
    for message in good:
        message.finish()
    if rows:
        report(len(rows))


def give_up(message):
    with database:
        database.execute("INSERT OR IGNORE INTO broken VALUES (?)", (message.body,))
    message.finish()


def report(count, attempt=1):
    """Publish the number of written clicks; retry after an error."""

    def published(_, data):
        if data == b"OK":
            return
        if attempt == 5:
            logger.error("the report of %d clicks is lost: %r", count, data)
            return
        report(count, attempt + 1)

    writer.pub("reports", json.dumps({"written": count}).encode(), callback=published)


def touch():
    for message in waiting:
        message.touch()


writer = nsq.Writer([NSQD])
reader = nsq.Reader(
    topic="clicks",
    channel="counter",
    message_handler=handle,
    lookupd_http_addresses=[f"http://{LOOKUPD}"],
    max_in_flight=2 * MOST,
    max_tries=0,
    lookupd_poll_interval=15,
)
PeriodicCallback(flush, 200).start()
PeriodicCallback(touch, 20_000).start()

if __name__ == "__main__":
    nsq.run()
