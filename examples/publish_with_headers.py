"""Publish one message with headers, a tag and a trace id, and print the receipt.

Runs on a cluster of its own. With ``--lookupd HOST:PORT`` it uses that one, which needs a topic ``orders`` with extend
support and at least one channel.
"""

from __future__ import annotations

import argparse

import anyio

import nsqext
from nsqext.broker import Cluster


async def publish(lookupd: str | list[str]) -> None:
    """Publish one order and print its receipt."""
    async with nsqext.Producer(lookupd=lookupd) as producer:
        receipt = await producer.publish(
            "orders",
            b'{"item": "coffee", "price": 3.5}',
            headers={"user": "42", "currency": "EUR"},
            tag="canary",
            trace_id=7,
            key="user 42",  # all messages with the same key go to the same partition
        )
    print(f"partition {receipt.partition}, message {receipt.message_id}, trace id {receipt.trace_id}")
    print(f"{receipt.size} bytes at offset {receipt.offset} of its queue")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", help="HTTP address of a running nsqlookupd, host:port")
    given: str | None = parser.parse_args().lookupd
    if given is not None:
        anyio.run(publish, given)
        return
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("orders", partitions=2, extend=True, channels=["billing"])
        anyio.run(publish, cluster.lookupd)


if __name__ == "__main__":
    main()
