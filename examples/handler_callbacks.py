"""Consume with a handler: returning finishes a message, raising requeues it.

Publishes ten orders. The handler fails once on the fourth, which is then redelivered. Runs on a cluster
of its own. With ``--lookupd HOST:PORT`` it uses that one, which needs a topic ``orders`` with extend support and a
channel ``billing``.
"""

from __future__ import annotations

import argparse
from uuid import uuid4

import anyio

import nsqext
from nsqext.broker import Cluster

ORDERS = 10


async def consume(lookupd: str | list[str]) -> None:
    """Publish the orders and handle them until all are done."""
    run = uuid4().hex  # separates these orders from the orders of an earlier run
    done: set[bytes] = set()
    all_done = anyio.Event()
    consumer = nsqext.Consumer("orders", "billing", lookupd=lookupd)

    @consumer.handler
    async def handle(message: nsqext.Message) -> None:
        if message.headers.get("run") != run:
            return
        if message.body == b"order 4" and message.attempts == 1:
            raise ConnectionError("the payment service is down")
        done.add(message.body)
        print(f"{message.body.decode()}: attempt {message.attempts}")
        if len(done) == ORDERS:
            all_done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consumer.serve)
        async with nsqext.Producer(lookupd=lookupd) as producer:
            for number in range(1, ORDERS + 1):
                await producer.publish("orders", b"order %d" % number, headers={"run": run})
        await all_done.wait()
        tasks.cancel_scope.cancel()  # the consumer finishes its messages, then closes
    print(f"handled {len(done)} orders")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", help="HTTP address of a running nsqlookupd, host:port")
    given: str | None = parser.parse_args().lookupd
    if given is not None:
        anyio.run(consume, given)
        return
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing"])
        anyio.run(consume, cluster.lookupd)


if __name__ == "__main__":
    main()
