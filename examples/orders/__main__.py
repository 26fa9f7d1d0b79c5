"""Start everything: ``python -m examples.orders``.

A cluster, a PostgreSQL server, the web application and three workers run until ^C; ``--orders N`` sends orders, kills
workers and the leader of the orders meanwhile, and ends when every order is confirmed. ``--lookupd`` and ``--database``
name a cluster and a database that run already.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import httpx

from examples.orders.database import create_tables
from examples.orders.postgres import postgres_server
from nsqext.broker import Cluster

ROOT = Path(__file__).parents[2]
WORKERS = 3
_PATIENCE = 90.0
"""Seconds until every order has to be confirmed."""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of this package, and end it."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def url_of(dsn: str) -> str:
    """Return the URL of a server that listens on a Unix socket."""
    folder = dict(word.split("=", 1) for word in dsn.split())["host"]
    return f"postgresql://postgres@/postgres?host={folder}"


def cluster_of(stack: ExitStack) -> Cluster:
    """Start a cluster with the topics of this example."""
    cluster = stack.enter_context(Cluster(nodes=3))
    for topic, channel in (("orders", "billing"), ("bills", "confirmation")):
        cluster.create_topic(topic, partitions=2, replicas=3, extend=True, channels=[channel])
    return cluster


def wait_until(done: Callable[[], bool], what: str) -> None:
    """Wait until a function returns True."""
    deadline = time.monotonic() + _PATIENCE
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} within {_PATIENCE:g} s: no")
        time.sleep(0.1)


def responds(client: httpx.Client) -> bool:
    """Return whether the web application responds."""
    try:
        return client.get("/totals").status_code == 200
    except httpx.TransportError:
        return False


def workers_of(service: subprocess.Popen[bytes]) -> list[int]:
    """Return the process ids of the workers."""
    listed = Path(f"/proc/{service.pid}/task/{service.pid}/children").read_text(encoding="ascii")
    return [int(pid) for pid in re.findall(r"\d+", listed)]


def send(client: httpx.Client, count: int, service: subprocess.Popen[bytes], cluster: Cluster | None) -> bool:
    """Send orders while workers and a leader are killed; report whether every order was billed once."""
    for number in range(count):
        order = {"customer": f"c{number % 7}", "cents": 1 + number}
        client.post("/orders", json=order).raise_for_status()
        if number and number % (count // 3) == 0:
            os.kill(random.choice(workers_of(service)), signal.SIGKILL)
        if number == count // 2 and cluster is not None:
            cluster.kill(cluster.leader("orders"))
    wait_until(lambda: client.get("/totals").json()["confirmed"] == count, f"{count} orders confirmed")
    totals = client.get("/totals").json()
    print(f"{totals['confirmed']} orders, {totals['ordered']} cents ordered, {totals['owed']} cents owed")
    return bool(totals["ordered"] == totals["owed"])


def main() -> int:
    """Read the command line, start everything, and wait."""
    parser = argparse.ArgumentParser(prog="python -m examples.orders", description=__doc__)
    parser.add_argument("--lookupd", help="HTTP address of a redesigned NSQ with the topics orders and bills")
    parser.add_argument("--database", help="postgresql://user@host/name")
    parser.add_argument("--orders", type=int, default=0, help="number of orders to send before the end; at least 3")
    given = parser.parse_args()
    with ExitStack() as stack:
        cluster = None if given.lookupd else cluster_of(stack)
        os.environ["NSQEXT_LOOKUPD"] = given.lookupd or str(cluster.lookupd[0] if cluster else "")
        os.environ["ORDERS_DATABASE"] = given.database or url_of(stack.enter_context(postgres_server()))
        anyio.run(create_tables)
        port = free_port()
        web = ("uvicorn", "examples.orders.web:web", "--port", str(port), "--log-level", "warning")
        stack.enter_context(running(*web))
        service = stack.enter_context(running("nsqext", "run", "examples.orders.worker:app", "--workers", str(WORKERS)))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0))
        wait_until(lambda: responds(client), "the web application responds")
        wait_until(lambda: len(workers_of(service)) == WORKERS, "the workers run")
        if given.orders:
            return 0 if send(client, given.orders, service, cluster) else 1
        order = '-H \'content-type: application/json\' -d \'{"customer": "ann", "cents": 450}\''
        print(f"curl {client.base_url}/orders {order}\ncurl {client.base_url}/totals", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
