"""The example with outbox and inbox: every order is billed once while workers and a leader are killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from examples.orders import __main__ as orders
from examples.orders.postgres import PostgresMissing
from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from tests.support.consumers import eventually
from tests.support.missing import skip_without

_ORDERS = 30


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.timeout(180)
def test_every_order_is_billed_once_while_workers_and_a_leader_are_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The example, with two workers instead of three."""
    for name in [name for name in os.environ if name.startswith("NSQEXT_")]:
        monkeypatch.delenv(name)
    for name in ("NSQEXT_LOOKUPD", "ORDERS_DATABASE"):
        monkeypatch.setenv(name, "")  # the example sets them
    monkeypatch.setattr(orders, "WORKERS", 2)
    monkeypatch.setattr(sys, "argv", ["examples.orders", "--orders", str(_ORDERS)])
    try:
        assert orders.main() == 0
    except PostgresMissing:
        skip_without("PostgreSQL", "postgresql")
    printed = capfd.readouterr()
    owed = _ORDERS * (_ORDERS + 1) // 2
    assert f"{_ORDERS} orders, {owed} cents ordered, {owed} cents owed" in printed.out, printed.err
    assert "exited with status -9" in printed.err


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["publish, then commit", "commit, then publish", "outbox"])
async def test_the_naive_ways_lose_or_invent_messages_when_the_process_ends(tmp_path: Path, way: str) -> None:
    """The process ends between the first and the second step."""
    path = tmp_path / "orders.db"
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    begin, outbox = async_sessionmaker(engine).begin, Outbox()
    received: list[bytes] = []
    with Cluster(nodes=1) as cluster, OutboxStore(f"sqlite:///{path}", create=True) as store:
        cluster.create_topic("orders", extend=True, channels=["billing"])
        async with begin() as session:
            await session.execute(text("CREATE TABLE orders (number INTEGER)"))
        async with Producer(cluster.lookupd) as producer:
            with pytest.raises(Killed):
                async with begin() as session:
                    await session.execute(text("INSERT INTO orders VALUES (1)"))
                    if way == "publish, then commit":
                        await producer.publish("orders", b"1")
                        raise Killed
                    if way == "outbox":
                        await outbox.add_async(session, "orders", b"1")
                raise Killed  # before the publish, after the commit
            consumer = Consumer("orders", "billing", cluster.lookupd)

            @consumer.handler
            async def handle(message: Message) -> None:
                received.append(message.body)

            async with anyio.create_task_group() as tasks, consumer:
                tasks.start_soon(OutboxRelay(store, poll=0.05).run, producer)
                await producer.publish("orders", b"last")
                await eventually(lambda: b"last" in received and len(received) == 1 + (way != "commit, then publish"))
                tasks.cancel_scope.cancel()
        async with begin() as session:
            stored = list((await session.execute(text("SELECT number FROM orders"))).scalars())
    await engine.dispose()
    published = [int(body) for body in received if body != b"last"]
    outcome = {"publish, then commit": ([], [1]), "commit, then publish": ([1], []), "outbox": ([1], [1])}
    assert (stored, published) == outcome[way]
