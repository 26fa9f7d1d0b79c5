"""A consumer under ``asyncio.run``: with sniffio installed, anyio cannot detect the event loop in callbacks."""

from __future__ import annotations

import asyncio

import anyio

from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster


async def _consume(cluster: Cluster, lost: list[object]) -> list[bytes]:
    asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
    consumer = Consumer("orders", "billing", lookupd=cluster.lookupd)
    bodies: list[bytes] = []
    arrived = {b"before": anyio.Event(), b"after": anyio.Event()}

    @consumer.handler
    async def handle(message: Message) -> None:
        bodies.append(message.body)
        arrived[message.body].set()

    async with consumer, Producer(cluster.lookupd) as producer:
        with anyio.fail_after(25):
            await producer.publish("orders", b"before")
            await arrived[b"before"].wait()
            cluster.kill("n1")
            cluster.restart("n1")
            await producer.publish("orders", b"after")
            await arrived[b"after"].wait()
    return bodies


def test_a_consumer_reconnects_after_a_reset_connection() -> None:
    """A callback of the event loop raised NoEventLoopError, so the consumer did not detect the lost connection."""
    lost: list[object] = []
    with Cluster(1) as cluster:
        cluster.create_topic("orders", channels=["billing"])
        assert b"after" in asyncio.run(_consume(cluster, lost))
    assert lost == []
