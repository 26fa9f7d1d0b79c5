"""Store the messages of the topic ``orders`` in PostgreSQL, each of them once.

The database has a table ``orders (id bytea, stored bigint, body bytea, PRIMARY KEY (id, stored))``.
"""

from __future__ import annotations

import argparse

import anyio
import psycopg

from nsqext import Consumer

INSERT = "INSERT INTO orders (id, stored, body) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"


async def store(lookupd: str, database: str) -> None:
    """Insert each batch in one transaction, and acknowledge it when it is committed."""
    async with (
        await psycopg.AsyncConnection.connect(database, autocommit=True) as connection,
        # a message whose connection was lost is delivered again, and is in the table then
        Consumer("orders", "archive", lookupd=lookupd, max_in_flight=1000, on_lost="ignore") as consumer,
    ):
        async for batch in consumer.batches(max_count=500, max_wait=0.2):
            async with connection.transaction(), connection.cursor() as cursor:
                await cursor.executemany(INSERT, [(message.id, message.timestamp, message.body) for message in batch])
            await batch.finish()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lookupd", help="such as 127.0.0.1:4161")
    parser.add_argument("database", help="such as postgresql://localhost/shop")
    given = parser.parse_args()
    anyio.run(store, given.lookupd, given.database)
