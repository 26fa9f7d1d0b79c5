"""The example shop under uvicorn while a leader is killed: no accepted order and no span is lost."""

from __future__ import annotations

import json
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
from typing import Any

import httpx

from nsqext import sync
from nsqext.broker import Cluster
from tests.support.blocking_client import eventually

ROOT = str(Path(__file__).parents[2])
ORDERS = 160


class Shop:
    """The web application in a process of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.log = ""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("NSQEXT_")}
        environ |= {"NSQEXT_LOOKUPD": cluster.lookupd[0], "PYTHONPATH": ROOT}
        environ |= {"SHOP_DATABASE": str(folder / "shop.db"), "SHOP_SPANS": str(folder / "spans.jsonl")}
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
        self._reader.join(30)
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
    """Send an order repeatedly until it is accepted."""
    body = {"number": number, "customer": f"c{number % 7}", "cents": cents}
    for _ in range(10):
        response = client.post("/orders", json=body)
        if response.status_code == 202:
            return True
        assert response.status_code == 503, response.text
    return False


def check_spans(file: Path) -> None:
    """Check that the spans of every invoice lead back to the request of its order."""
    spans = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    by_name: dict[str, dict[str, Any]] = {}
    for span in spans:
        by_name.setdefault(span["name"], {})[span["context"]["span_id"]] = span
    orders, invoices = by_name["publish orders"], by_name["publish invoices"]
    billed: set[str] = set()
    for batch in by_name["process invoices"].values():
        assert len(batch["links"]) == batch["attributes"]["messaging.batch.message_count"]
        for link in batch["links"]:
            handled = by_name["process orders"][invoices[link["context"]["span_id"]]["parent_id"]]
            (origin,) = handled["links"]
            billed.add(origin["context"]["span_id"])
    stored = {span_id for span_id, span in orders.items() if "error.type" not in span["attributes"]}
    assert len(stored) >= ORDERS + 1
    assert len(stored - billed) == 1, "only the order of the dead letter has no invoice"


def test_a_leader_that_is_killed_loses_no_order(tmp_path: Path) -> None:
    with Cluster(nodes=3) as cluster:
        for topic, channel in (("orders", "billing"), ("invoices", "ledger")):
            cluster.create_topic(topic, partitions=2, replicas=3, extend=True, channels=[channel])
        cluster.create_topic("shop-dead", extend=True, replicas=3, channels=["audit"])
        with running_shop(cluster, tmp_path) as shop:
            client = httpx.Client(base_url=shop.url(), timeout=30.0)
            with client, ThreadPoolExecutor(4) as threads:
                assert client.get("/health/readyz").json() == {"ok": True, "reasons": []}
                replies = [threads.submit(send, client, number, 100) for number in range(ORDERS // 2)]
                eventually(lambda: client.get("/ledger").json()["invoices"], lambda found: found >= ORDERS // 20)
                leader = cluster.leader("orders", 0)
                # submitted now, so that they are sent during the kill
                replies += [threads.submit(send, client, number, 100) for number in range(ORDERS // 2, ORDERS)]
                cluster.kill(leader)
                assert all(reply.result() for reply in replies)
                assert send(client, ORDERS, 0)
                expected = {"invoices": ORDERS, "cents": 100 * ORDERS}
                eventually(lambda: client.get("/ledger").json(), lambda found: found == expected, seconds=40.0)
            with sync.Consumer("shop-dead", "audit", lookupd=cluster.lookupd) as letters:
                letter = next(letters)
                letter.finish()
            shop.process.send_signal(signal.SIGTERM)
            assert shop.end() in (0, -signal.SIGTERM)  # uvicorn raises the signal again after its shutdown
            assert "Application shutdown complete" in shop.log
    check_spans(tmp_path / "spans.jsonl")
    assert letter.headers["dead-letter-error"] == f"Reject: order {ORDERS} costs 0 cents"
    assert (letter.headers["dead-letter-topic"], letter.headers["source"]) == ("orders", "web")
