"""The wait for a commit that adds messages to an outbox."""

from __future__ import annotations

from contextlib import closing
from typing import Any, cast

import anyio
import psycopg
import pytest

from nsqext.transactions import OutboxRelay, OutboxStore
from nsqext.transactions.listener import OutboxListener
from tests.support.consumers import eventually
from tests.transactions.relays import END_OTHERS, Scripted, accept, on_postgresql, publishing
from tests.transactions.test_outbox import add_with_driver, add_with_sqlalchemy

pytestmark = pytest.mark.anyio
_SECONDS = 40


@on_postgresql
@pytest.mark.parametrize("way", ["psycopg", "session"])
def test_a_commit_notifies_relays_and_a_rollback_does_not(database: str, way: str) -> None:
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("LISTEN nsqext_outbox")
        add = {"psycopg": add_with_driver, "session": add_with_sqlalchemy}[way]
        add(database, "t", commit=False)
        assert list(listener.notifies(timeout=0.1, stop_after=1)) == []
        add(database, "t", commit=True)
        assert len(list(listener.notifies(timeout=10, stop_after=1))) == 1


@on_postgresql
async def test_a_listener_waits_for_a_message_from_its_first_call_on(database: str) -> None:
    with OutboxStore(database) as store, closing(OutboxListener(store)) as listener:
        assert await listener.wait(0.0), "messages may have been added before it listens"
        add_with_driver(database, "t", commit=True)
        began = anyio.current_time()
        await listener.wait(8.0)
        assert anyio.current_time() - began < 6


@on_postgresql
async def test_a_listener_that_lost_its_connection_listens_again(database: str) -> None:
    with OutboxStore(database) as store, closing(OutboxListener(store)) as listener:
        await listener.wait(0.0)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(END_OTHERS)
        with pytest.raises(psycopg.OperationalError):
            await listener.wait(8.0)
        await listener.wait(0.0)


async def test_a_relay_that_seldom_looks_is_stopped_at_once(database: str) -> None:
    """An app waited for its relay, as long as the relay waited for PostgreSQL."""
    with OutboxStore(database) as store:
        relay, leased, lease = OutboxRelay(store, poll=3600.0), 0, store.lease

        def counted(owner: str, seconds: float) -> list[int]:
            nonlocal leased
            leased += 1
            return lease(owner, seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "lease", counted)
            with anyio.fail_after(_SECONDS):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(relay.run, cast("Any", Scripted(accept)))
                    await eventually(lambda: leased > (not database.startswith("sqlite")), _SECONDS)
                    relay.stop()


@on_postgresql
async def test_a_relay_that_has_ended_does_not_listen_any_more(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[OutboxListener] = []

    class Noted(OutboxListener):
        def __init__(self, store: OutboxStore) -> None:
            super().__init__(store)
            listeners.append(self)

    monkeypatch.setattr("nsqext.transactions.relay.OutboxListener", Noted)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(accept)):
            await eventually(lambda: bool(listeners) and listeners[0]._connection is not None, _SECONDS)
            connection = listeners[0]._connection
    assert connection.closed
