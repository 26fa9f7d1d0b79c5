"""Three workers share the orders of a channel, and the events of each order stay in order.

The service is `app`: ``nsqext run examples.orders_in_order:app --workers 3``. As a program this file starts it,
publishes the events of 30 orders, and checks in which order they were handled: on a cluster of its own, or with
``--lookupd HOST:PORT`` on that one, a redesigned NSQ with a topic ``orders`` with extend support and a channel
``billing``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import anyio

import nsqext
from nsqext.broker import Cluster

EVENTS = ("created", "paid", "packed", "sent")
ORDERS = 30

app = nsqext.App(lookupd=os.environ.get("NSQEXT_LOOKUPD", "127.0.0.1:4161"))


@app.handler("orders", "billing", dispatch="key_failover", concurrency=8)
async def bill(message: nsqext.Message) -> None:
    """Handle an event of an order, and note it."""
    await anyio.sleep(0.01)
    async with await anyio.open_file(os.environ["ORDERS_HANDLED"], "a", encoding="utf-8") as file:
        await file.write(f"{message.key} {message.body.decode()} {os.environ.get('NSQEXT_WORKER')}\n")


async def publish(lookupd: str, run: str) -> None:
    """Publish all events, the events of an order one after the other."""
    async with nsqext.Producer(lookupd=lookupd, key_tags=16) as producer:
        for event in EVENTS:
            for order in range(ORDERS):
                await producer.publish("orders", event.encode(), key=f"{run}-{order}")


def handled(path: Path, run: str) -> tuple[dict[str, list[str]], int]:
    """Return the events of each order of this run as they were handled, and the number of workers."""
    events: dict[str, list[str]] = defaultdict(list)
    workers = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        order, event, worker = line.split()
        if order.startswith(run):
            events[order].append(event)
            workers.add(worker)
    return events, len(workers)


def serve(lookupd: str) -> bool:
    """Run three workers until all events are handled; report whether every order had its events in order."""
    run = f"order-{time.time_ns()}"
    with tempfile.TemporaryDirectory() as folder:
        path, ready = Path(folder, "handled"), Path(folder, "ready")
        path.touch()
        environ = {**os.environ, "NSQEXT_LOOKUPD": lookupd, "ORDERS_HANDLED": str(path)}
        command = [sys.executable, "-m", "nsqext", "run", f"{Path(__file__).stem}:app", "--workers", "3"]
        service = subprocess.Popen([*command, "--ready-file", str(ready)], env=environ, cwd=Path(__file__).parent)
        try:
            while not ready.exists() and service.poll() is None:
                time.sleep(0.1)
            time.sleep(4.0)  # the workers share the keys among themselves
            anyio.run(publish, lookupd, run)
            deadline = time.monotonic() + 60.0
            while sum(map(len, handled(path, run)[0].values())) < ORDERS * len(EVENTS) and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait()
        events, workers = handled(path, run)
    right = sum(tuple(found) == EVENTS for found in events.values())
    print(f"{right} of {ORDERS} orders in order, handled by {workers} workers")
    return right == ORDERS


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", help="HTTP address of a running nsqlookupd, host:port")
    given: str | None = parser.parse_args().lookupd
    if given is not None:
        return 0 if serve(given) else 1
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing"])
        return 0 if serve(str(cluster.lookupd[0])) else 1


if __name__ == "__main__":
    sys.exit(main())
