"""A consumer in the lifespan of a web application under uvicorn, stopped by SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import uvicorn
from starlette.applications import Starlette

from nsqext import Consumer, Message, Producer

if TYPE_CHECKING:
    from nsqext.broker import Cluster


@pytest.mark.parametrize("way", ["start", "block", "task"])
def test_sigterm_ends_the_server_and_the_handler_finishes(nsq_cluster: Cluster, nsq_topic: str, way: str) -> None:
    handled: list[bytes] = []
    consumer = Consumer(nsq_topic, "default", lookupd=nsq_cluster.lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        handled.append(message.body)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with Producer(nsq_cluster.lookupd) as producer:
            await producer.publish(nsq_topic, b"one coffee")
        if way == "start":
            await consumer.start()
            yield
            await consumer.aclose()
        elif way == "block":
            async with consumer:
                yield
        else:
            task = asyncio.create_task(consumer.serve())
            yield
            consumer.stop()
            await task

    server = uvicorn.Server(uvicorn.Config(Starlette(lifespan=lifespan), port=0, log_level="warning"))
    raised_again: list[int] = []  # uvicorn raises the signal again when it has shut down
    before = signal.signal(signal.SIGTERM, lambda number, frame: raised_again.append(number))
    try:
        asyncio.run(asyncio.wait_for(server.serve(), 20))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handled == [b"one coffee"]
    assert raised_again == [signal.SIGTERM]
