"""Samples of a cluster, and who shares them."""

from __future__ import annotations

import anyio
import pytest

from nsqext.web.monitor import Monitor, Snapshot

pytestmark = pytest.mark.anyio


class Sampler(Monitor):
    """Samples without a cluster."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", 1.0)
        self.reads = 0
        self.reading = anyio.Event()
        self.answer = anyio.Event()

    async def _read(self) -> Snapshot:
        self.reads += 1
        number = self.reads
        self.reading.set()
        await self.answer.wait()
        return Snapshot(float(number), {}, {}, (), {}, {})


async def test_a_sample_that_began_before_a_change_is_not_the_newest() -> None:
    sampler = Sampler()
    found: list[float] = []

    async def sample() -> None:
        found.append((await sampler.current(newest=True)).taken)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sample)
        await sampler.reading.wait()
        tasks.start_soon(sample)
        tasks.start_soon(sample)
        await anyio.wait_all_tasks_blocked()
        sampler.answer.set()
    assert sorted(found) == [1.0, 2.0, 2.0]
    assert sampler.reads == 2
