"""A consumer of keys in a process of its own, which writes what it handles to a file: ``key number begin end``.

``python -m tests.support.key_tags_worker LOOKUPD TOPIC CHANNEL TAGS FILE``; it ends with SIGTERM.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import anyio

from nsqext import Consumer, Message

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


def main() -> None:
    """Run it."""
    lookupd, topic, channel, tags, path = sys.argv[1:]
    make_consumer(lookupd.split(","), topic, channel, int(tags), Path(path)).run()


if __name__ == "__main__":
    main()
