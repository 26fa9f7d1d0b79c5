"""Relays that are killed lose no message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from nsqext import App, Consumer
from nsqext.broker import Cluster
from nsqext.delays import DelayRelay, DelayStore
from tests.delays.kill_at_each_line import MESSAGES
from tests.support.consumers import eventually

pytestmark = pytest.mark.anyio

DEADLINE = 60.0


@pytest.mark.parametrize(("generation", "each", "least"), [("redesigned", 12, 3), ("original", 6, 7)])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_kill_at_any_line_loses_no_message(
    generation: str, each: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    with DelayStore(path) as store, Cluster(nodes=1, generation=generation) as cluster:
        relays = DelayRelay(store, topic="delayed")
        cluster.create_topic("delayed", channels=relays.channels)
        cluster.create_topic("orders", channels=["ch"])
        arguments = (cluster.lookupd[0], str(path), "delayed", "orders", str(each))
        command = [sys.executable, "-m", "tests.delays.kill_at_each_line", *arguments]
        killed, processes = map(int, (await anyio.run_process(command, stderr=subprocess.STDOUT)).stdout.split())
        assert killed > least
        missing = {b"%d-%d" % (number, one) for number in range(processes) for one in range(MESSAGES)}
        monkeypatch.setattr("nsqext.app.relay.MARGIN", -29.5)
        app = App(cluster.lookupd)
        relays.attach(app)
        await app.start()
        async with Consumer("orders", "ch", lookupd=cluster.lookupd) as consumer:
            with anyio.fail_after(DEADLINE):
                while missing:
                    message = await anext(consumer)
                    await message.finish()
                    missing.discard(message.body)
                # what a process had published before it was killed is published again
                await eventually(lambda: store.count() == 0, DEADLINE)
        await app.aclose()
