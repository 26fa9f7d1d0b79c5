"""Messages of an outbox, and relays whose producer has no servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, closing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Consumer, OutgoingMessage, Position, Producer, Receipt
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from tests.support.relays import running
from tests.transactions.test_outbox import connect

if TYPE_CHECKING:
    from nsqext.broker import Cluster

_SECONDS = 40
one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)
"""Ends all other connections of PostgreSQL."""


def fill(database: str, topic: str, count: int, size: int) -> list[bytes]:
    """Add messages of a number of bytes."""
    bodies = [(b"%d " % number).ljust(size, b"x") for number in range(count)]
    with closing(connect(database)) as connection:
        for number, body in enumerate(bodies):
            Outbox().add(connection, topic, body, key=number % 5)
        connection.commit()
    return bodies


async def all_stored(cluster: Cluster, topic: str) -> Counter[bytes]:
    """Return how often each body is stored: the last of a partition is one that is published now."""
    found: Counter[bytes] = Counter()
    async with Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"last")
    async with Consumer(topic, "ch", cluster.lookupd, start=Position.earliest(), start_existing=True) as consumer:
        with anyio.fail_after(_SECONDS):
            async for message in consumer:
                await message.finish()
                if message.body == b"last":
                    return found
                found[message.body] += 1
    raise AssertionError("the consumer has ended")


class Scripted:
    """A producer without servers."""

    def __init__(
        self, publish: Callable[[str, list[OutgoingMessage]], Awaitable[None]], *, extend: bool = True
    ) -> None:
        self.settings = {"timeout": "2.0"}
        self.calls: list[tuple[str, list[bytes]]] = []
        self.messages: list[OutgoingMessage] = []
        self._publish = publish
        self._meta = SimpleNamespace(extend_support=extend)

    async def meta(self, topic: str) -> Any:
        return self._meta

    async def publish_many(self, topic: str, messages: list[OutgoingMessage]) -> list[Receipt]:
        self.calls.append((topic, [message.body for message in messages]))
        self.messages += messages
        await self._publish(topic, messages)
        return [Receipt(topic, 0, "scripted")] * len(messages)


async def accept(topic: str, messages: list[OutgoingMessage]) -> None:
    """Store everything."""


def publishing(
    store: OutboxStore, producer: Scripted | Producer, poll: float = 0.01
) -> AbstractAsyncContextManager[OutboxRelay]:
    """Run a relay."""
    return running(OutboxRelay(store, poll=poll), producer, _SECONDS)
