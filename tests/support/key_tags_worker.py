"""A consumer of keys in a process of its own, which writes what it handles to a file: ``key number begin end``.

``python -m tests.support.key_tags_worker LOOKUPD TOPIC CHANNEL TAGS FILE [NODE=RELAY…]``; it ends with SIGTERM. Nodes
with a relay are connected through it.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from nsqext import Consumer, Message
from nsqext.client.consumer.subscriptions import partition_reader
from nsqext.transport.handshake import open_connection
from nsqext.types import Address

__all__ = ("HEARTBEAT", "LANES", "make_consumer")

HEARTBEAT = 1.0
LANES = 8
HANDLER = 0.004


def make_consumer(lookupd: list[str], topic: str, channel: str, tags: int, path: Path) -> Consumer:
    """Return the consumer."""
    consumer = Consumer(
        topic,
        channel,
        lookupd=lookupd,
        dispatch="key_failover",
        key_tags=tags,
        concurrency=LANES,
        max_in_flight=LANES * 25,
        heartbeat_interval=HEARTBEAT,
        msg_timeout=10.0,
        close_timeout=5.0,
        max_reconnect_wait=1.0,
        on_lost="ignore",
    )
    out = path.open("a", buffering=1, encoding="utf-8")
    chance = random.Random(str(path))

    @consumer.handler
    async def handle(message: Message) -> None:
        begin = time.monotonic()
        out.write(f"begin {message.key} {message.body.decode()} {begin:.6f}\n")
        await anyio.sleep(HANDLER * chance.uniform(0.5, 1.5))
        out.write(f"end {message.key} {message.body.decode()} {time.monotonic():.6f}\n")

    return consumer


async def open_relayed(relays: dict[str, str], address: Address, *rest: Any) -> Any:
    """Connect to a node through its relay, if it has one."""
    host, _, port = relays.get(str(address), str(address)).rpartition(":")
    return await open_connection(Address(host, int(port)), *rest)


def main() -> None:
    """Run it."""
    lookupd, topic, channel, tags, path, *relays = sys.argv[1:]
    given = {node: relay for node, _, relay in (pair.partition("=") for pair in relays)}
    with patch.object(partition_reader, "open_connection", partial(open_relayed, given)):
        make_consumer(lookupd.split(","), topic, channel, int(tags), Path(path)).run()


if __name__ == "__main__":
    main()
