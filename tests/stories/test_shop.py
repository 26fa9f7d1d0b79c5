"""The shop of the examples under uvicorn, with a leader that is killed: no accepted order is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx

from nsqext import sync
from nsqext.broker import Cluster
from tests.support.blocking_client import eventually

ROOT = str(Path(__file__).parents[2])
ORDERS = 200


class Shop:
    """The web application in a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.log = ""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("NSQEXT_")}
        environ |= {"NSQEXT_LOOKUPD": cluster.lookupd[0], "PYTHONPATH": ROOT, "SHOP_DATABASE": str(folder / "shop.db")}
        command = [sys.executable, "-m", "uvicorn", "examples.shop.web:web", "--port", "0", "--no-access-log"]
        self.process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, cwd=folder)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log += line

    def url(self) -> str:
        """Return the address of the server, once it runs."""
        found = eventually(lambda: re.search(r"http://127.0.0.1:\d+", self.log), seconds=30.0)
        assert found is not None
        return found[0]

    def end(self) -> int:
        """Wait for the end and return the exit status."""
        status = self.process.wait(30)
        self._reader.join(10)
        return status


@contextmanager
def running_shop(cluster: Cluster, folder: Path) -> Iterator[Shop]:
    """Run the shop, and kill it afterwards."""
    shop = Shop(cluster, folder)
    try:
        yield shop
    finally:
        shop.process.kill()
        shop.end()


def send(client: httpx.Client, number: int, cents: int) -> bool:
    """Send an order until it is accepted, as a customer does."""
    body = {"number": number, "customer": f"c{number % 7}", "cents": cents}
    for _ in range(10):
        response = client.post("/orders", json=body)
        if response.status_code == 202:
            return True
        assert response.status_code == 503, response.text
    return False


def test_a_leader_that_is_killed_loses_no_order(tmp_path: Path) -> None:
    with Cluster(nodes=3) as cluster:
        for topic, channel in (("orders", "billing"), ("invoices", "ledger")):
            cluster.create_topic(topic, partitions=2, replicas=3, extend=True, channels=[channel])
        cluster.create_topic("shop-dead", extend=True, replicas=3, channels=["audit"])
        with running_shop(cluster, tmp_path) as shop:
            client = httpx.Client(base_url=shop.url(), timeout=10.0)
            with client, ThreadPoolExecutor(4) as threads:
                assert client.get("/health/readyz").json() == {"ok": True, "reasons": []}
                accepted = list(threads.map(lambda number: send(client, number, 100), range(ORDERS // 2)))
                cluster.kill(cluster.leader("orders", 0))
                accepted += threads.map(lambda number: send(client, number, 100), range(ORDERS // 2, ORDERS))
                assert all(accepted)
                assert send(client, ORDERS, 0)
                expected = {"invoices": ORDERS, "cents": 100 * ORDERS}
                eventually(lambda: client.get("/ledger").json(), lambda found: found == expected, seconds=40.0)
            with sync.Consumer("shop-dead", "audit", lookupd=cluster.lookupd) as letters:
                letter = next(letters)
                letter.finish()
            shop.process.send_signal(signal.SIGTERM)
            assert shop.end() in (0, -signal.SIGTERM)  # uvicorn raises the signal again after its shutdown
            assert "Application shutdown complete" in shop.log
    assert letter.headers["dead-letter-error"] == f"Reject: order {ORDERS} costs 0 cents"
    assert (letter.headers["dead-letter-topic"], letter.headers["source"]) == ("orders", "web")
