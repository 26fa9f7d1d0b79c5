"""Signals that end a run."""

from __future__ import annotations

import logging
import os
import signal
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group, to_thread

from nsqext import Consumer, Message
from nsqext.client.tasks import stop_on_signals
from tests.support.consumers import QUICK, depth, eventually, publish

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


async def test_sigterm_drains(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, options=QUICK)
    started, go_on = anyio.Event(), anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        started.set()
        await go_on.wait()

    publish(cluster, topic, b"a")
    with anyio.fail_after(10):
        async with create_task_group() as tasks:
            tasks.start_soon(consumer.run)
            await started.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually(lambda: consumer.paused)
            go_on.set()
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_another_thread_has_no_signals() -> None:
    stopped: list[str] = []

    async def listen() -> None:
        await stop_on_signals(lambda: stopped.append("stopped"), logging.getLogger("nsqext.consumer"))

    with anyio.fail_after(10):
        await to_thread.run_sync(lambda: anyio.run(listen))
    assert stopped == []
