"""What relays do when their app ends."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import App, Producer
from nsqext.app import relay
from nsqext.delays import DelayRelay, DelayStore
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.middleware import Middleware
from nsqext.protocol.delay_record import DelayedMessage
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nsqext import Receipt
    from nsqext.broker import Cluster
    from nsqext.middleware import Publishing, SendNext

pytestmark = pytest.mark.anyio


class Holding(Middleware):
    """Holds the receipt of a stored message until `may_end`."""

    def __init__(self) -> None:
        self.stored = anyio.Event()
        self.may_end = anyio.Event()

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Publish, and wait."""
        receipts = await send_next(publishing)
        self.stored.set()
        await self.may_end.wait()
        await anyio.wait_all_tasks_blocked()  # the app waits for it
        return receipts


async def run_and_end(cluster: Cluster, relay: DelayRelay | OutboxRelay, *, released: bool) -> None:
    """Run a relay in an app that ends when a message is stored; its receipt arrives after that, or never."""
    holding, stop = Holding(), relay.stop

    def stopped() -> None:
        stop()
        if released:
            holding.may_end.set()

    relay.stop = stopped  # type: ignore[method-assign]
    app = App(cluster.lookupd, middleware=[holding])
    relay.attach(app)
    with anyio.fail_after(30):
        async with app:
            await holding.stored.wait()


@pytest.mark.parametrize("released", [True, False])
async def test_a_delayed_message_that_is_being_published_is_recorded(
    cluster: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    monkeypatch.setattr(relay, "LAST", 30.0 if released else 0.1)
    with DelayStore(tmp_path / "store") as store:
        delayed = DelayRelay(store, topic=f"{topic}_delayed")
        cluster.create_topic(delayed.topic, channels=delayed.channels)
        store.add([(DelayedMessage(identity="a", topic=topic, due=1), b"x")])
        await run_and_end(cluster, delayed, released=released)
        assert store.count() == (0 if released else 1)


@pytest.mark.parametrize("released", [True, False])
async def test_a_message_of_an_outbox_that_is_being_published_is_deleted(
    cluster: Cluster, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    monkeypatch.setattr(relay, "LAST", 30.0 if released else 0.1)
    database = tmp_path / "outbox"
    with OutboxStore(f"sqlite:///{database}", create=True) as store, closing(sqlite3.connect(database)) as connection:
        Outbox().add(connection, topic, b"x")
        connection.commit()
        await run_and_end(cluster, OutboxRelay(store, poll=0.05), released=released)
        assert store.summary(time.time()).waiting == (0 if released else 1)


async def test_a_relay_that_was_stopped_runs_again_with_its_app(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    database = tmp_path / "outbox"
    with OutboxStore(f"sqlite:///{database}", create=True) as store, closing(sqlite3.connect(database)) as connection:
        outbox = OutboxRelay(store, poll=0.05)
        ended, run = anyio.Event(), outbox.run

        async def run_to_its_end(producer: Producer) -> None:
            await run(producer)
            ended.set()

        outbox.run = run_to_its_end  # type: ignore[method-assign]
        app = App(cluster.lookupd)
        outbox.attach(app)
        with anyio.fail_after(30):
            async with app:
                outbox.stop()
                await ended.wait()
            Outbox().add(connection, topic, b"x")
            connection.commit()
            async with app:
                await eventually(lambda: outbox.statistics().published == 1, 20)


async def test_a_relay_whose_publishes_may_take_for_ever_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """What it had leased when it was killed was never published."""
    with DelayStore(tmp_path / "delayed") as delays, OutboxStore(f"sqlite:///{tmp_path}/x.db", create=True) as outbox:
        for one in (DelayRelay(delays), OutboxRelay(outbox)):
            app = App(cluster.lookupd, timeout=float("inf"))
            one.attach(app)
            with anyio.fail_after(25), pytest.raises(InvalidSetting, match="a relay needs a time limit"):
                await app.serve()


async def test_a_relay_that_runs_is_not_run_again(cluster: Cluster, topic: str, tmp_path: Path) -> None:
    """Both runs published what one of them had leased."""
    database = tmp_path / "outbox"
    with DelayStore(tmp_path / "delayed") as delays, OutboxStore(f"sqlite:///{database}", create=True) as outbox:
        async with Producer(cluster.lookupd) as producer:
            for one in (DelayRelay(delays), OutboxRelay(outbox)):
                for _ in range(2):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(one.run, producer)
                        await anyio.wait_all_tasks_blocked()
                        with pytest.raises(InvalidState, match="runs already"):
                            await one.run(producer)
                        tasks.cancel_scope.cancel()
