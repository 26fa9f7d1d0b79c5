"""A service whose handlers block, as one that uses a database without asyncio: restarts lose nothing."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from nsqext import sync
from nsqext.broker import Cluster
from tests.support.blocking_client import eventually
from tests.support.command_line import Process, started
from tests.support.numbered_keys import KEYS, body, disordered, lost

COUNT = 200

SERVICE = """
import sqlite3
import time
from collections.abc import Iterator
from typing import Annotated, Any

from attrs import frozen

import nsqext
from nsqext.app import Depends


@frozen
class Order:
    customer: dict[str, str]
    number: int


app = nsqext.App()


def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect("orders.db", timeout=30.0, check_same_thread=False)
    connection.execute("PRAGMA synchronous=OFF")
    yield connection
    connection.close()


# the next process sorts what the last one had in flight, if there is room for all of it
@app.handler(
    "orders", "billing", key="##key", concurrency=4, max_in_flight=1000, initial_ready=1000, settle_wait=1.0
)
def handle(order: Order, orders: Annotated[sqlite3.Connection, Depends(database)]) -> None:
    time.sleep(0.002)  # blocks the thread, not the event loop
    with orders:
        orders.execute("INSERT INTO handled VALUES (?, ?)", (order.customer["id"], order.number))
"""


@contextmanager
def service(folder: Path, cluster: Cluster) -> Iterator[Process]:
    """Run the service, which reports that it is ready."""
    with started("run", "service:app", cwd=folder, NSQEXT_LOOKUPD=cluster.lookupd[0]) as process:
        yield process


def handled(database: sqlite3.Connection) -> dict[str, list[int]]:
    """Return the numbers of each key, in the order in which they were handled."""
    found: dict[str, list[int]] = {}
    for key, number in database.execute("SELECT key, number FROM handled ORDER BY rowid"):
        found.setdefault(key, []).append(number)
    return found


def rows(found: dict[str, list[int]]) -> int:
    return sum(map(len, found.values()))


def _handles(database: sqlite3.Connection, count: int) -> None:
    """Wait until further messages are handled."""
    before = rows(handled(database))
    eventually(lambda: rows(handled(database)) > before + count, seconds=40.0)


def test_a_service_with_blocking_handlers_keeps_the_order_of_keys_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(SERVICE)
    with Cluster(nodes=2) as cluster, closing(sqlite3.connect(tmp_path / "orders.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE handled (key TEXT, number INTEGER)")
        database.commit()
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing"])
        with sync.Producer(cluster.lookupd) as producer:
            for number in range(COUNT):
                for key in range(KEYS):
                    producer.publish("orders", body(key, number), key=f"c{key}")
        for _ in range(2):  # deployments: each process continues after the one before
            with service(tmp_path, cluster) as process:
                _handles(database, 200)
                process.send_signal(signal.SIGTERM)
                assert process.wait(30.0) == 0
        found = handled(database)
        assert (disordered(found), rows(found)) == ({}, sum(len({*numbers}) for numbers in found.values()))
        with service(tmp_path, cluster) as process:
            _handles(database, 100)
            process.kill()
            process.wait()
        with service(tmp_path, cluster) as process:
            eventually(lambda: lost(handled(database), COUNT) == {}, seconds=60.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30.0) == 0
        found = handled(database)
    assert rows(found) - KEYS * COUNT <= 1000, "only what was in flight is handled twice"
