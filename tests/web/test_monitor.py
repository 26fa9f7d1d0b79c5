"""Samples of a cluster, and how they are shared."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext.admin import NodeStatus, PartitionChannelStats, PartitionStats, TopicInfo, TopicStats
from nsqext.errors import LookupFailed, TopicNotFound
from nsqext.types import Address
from nsqext.web.monitor import Monitor, Snapshot

if TYPE_CHECKING:
    from nsqext.admin.results import Generation

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


NODE = Address("127.0.0.1", 1)


class FakeAdmin:
    """A cluster of topics with one partition each; records the topics that are looked up.

    Attributes:
        leaders: node of each topic, according to statistics.
        channels: of each topic.
        asked: names of the topics that were looked up.
        messages, waiting: of each topic, in its channels.
    """

    def __init__(self, count: int) -> None:
        self.leaders = {f"t{number:03}": NODE for number in range(count)}
        self.channels: dict[str, tuple[str, ...]] = dict.fromkeys(self.leaders, ("ch",))
        self.asked: list[str] = []
        self.messages = self.waiting = 0

    async def all_stats(self) -> dict[str, TopicStats]:
        await checkpoint()
        generation: Generation = "redesigned"
        channel = PartitionChannelStats(
            "ch", self.waiting, 0, 0, self.messages, 0, 0, False, False, self.waiting, (), None
        )
        found: dict[str, TopicStats] = {}
        for name, node in self.leaders.items():
            channels = dict.fromkeys(self.channels[name], channel)
            part = PartitionStats(0, node, (), self.messages, 0, 0, False, channels)
            found[name] = TopicStats(name, generation, (part,), channels)
        return found

    async def topic(self, name: str) -> TopicInfo:
        await checkpoint()
        self.asked.append(name)
        if name not in self.leaders:
            raise TopicNotFound("unknown", topic=name)
        return TopicInfo(name, "redesigned", None, {0: self.leaders[name]}, (), self.channels[name])

    async def nodes(self) -> tuple[NodeStatus, ...]:
        await checkpoint()
        return ()

    async def aclose(self) -> None:
        await checkpoint()


async def test_a_topic_whose_lookup_fails_is_not_a_deleted_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin(3)
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monitor = Monitor("127.0.0.1:1", 1.0)
    before = await monitor.current(newest=True)

    async def fail(topic: str) -> TopicInfo:
        raise LookupFailed("no answer")

    monkeypatch.setattr(admin, "topic", fail)
    after = await monitor.current(newest=True)
    assert (after.topics, type(after.error)) == (before.topics, LookupFailed)


async def test_topics_are_looked_up_in_turn_and_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin(100)
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monitor = Monitor("127.0.0.1:1", 1.0)
    assert len((await monitor.current(newest=True)).topics) == 100
    assert admin.asked == sorted(admin.leaders)
    admin.asked.clear()
    for _ in range(4):
        await monitor.current(newest=True)
    assert (len(admin.asked), set(admin.asked)) == (128, set(admin.leaders))
    admin.leaders["t050"] = Address("127.0.0.1", 2)
    del admin.leaders["t051"]
    admin.channels["t052"] = ("ch", "new")
    admin.asked.clear()
    topics = (await monitor.current(newest=True)).topics
    assert topics["t050"].leaders == {0: Address("127.0.0.1", 2)}
    assert "t051" not in topics
    assert topics["t052"].channels == ("ch", "new")
    assert ({"t050", "t051", "t052"} & {*admin.asked}, len(admin.asked)) == ({"t050", "t052"}, 34)


async def test_the_rate_of_a_channel_is_that_of_its_finished_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = FakeAdmin(1)
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monitor = Monitor("127.0.0.1:1", 1.0)
    for admin.messages, admin.waiting in ((0, 0), (10, 10)):
        found = await monitor.current(newest=True)
    assert found.publish_rate("t000").now > 0 == found.finish_rate("t000", "ch").now


async def test_a_single_decrease_of_a_counter_is_no_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    admin, now = FakeAdmin(1), [100.0]
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monkeypatch.setattr("nsqext.web.monitor.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    monitor = Monitor("127.0.0.1:1", 1.0)
    for admin.messages in (10, 5, 12, 5, 14, 3, 3, 4):
        now[0] += 1.0
        found = await monitor.current(newest=True)
    assert found.publish_rate("t000").points == (0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 1.0)


async def test_the_rate_after_failed_samples_is_of_the_whole_time_since_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin, now = FakeAdmin(1), [100.0]
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monkeypatch.setattr("nsqext.web.monitor.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    monitor = Monitor("127.0.0.1:1", 1.0)
    await monitor.current(newest=True)

    async def fail() -> NoReturn:
        raise LookupFailed("no answer")

    with monkeypatch.context() as outage:
        outage.setattr(admin, "all_stats", fail)
        for _ in range(9):
            now[0] += 1.0
            await monitor.current(newest=True)
    now[0] += 1.0
    admin.messages = 100
    assert (await monitor.current(newest=True)).publish_rate("t000").points == (10.0,)


async def test_a_page_does_not_wait_for_replicas_that_lookup_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(topic: str) -> NoReturn:
        raise LookupFailed("no answer")

    async def hang(topic: str) -> NoReturn:
        await anyio.sleep_forever()
        raise AssertionError

    admin = FakeAdmin(1)
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monkeypatch.setattr("nsqext.web.monitor._REQUEST_TIMEOUT", 0.01)
    monitor = Monitor("127.0.0.1:1", 1.0)
    for replicas in (fail, hang):
        monkeypatch.setattr(admin, "replicas", replicas, raising=False)
        with anyio.fail_after(25):
            assert await monitor.replicas("t000") == {}


async def test_a_topic_that_lookup_does_not_find_has_no_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its partitions has a leader: the page showed the former ones, in green."""
    admin = FakeAdmin(2)
    monkeypatch.setattr("nsqext.web.monitor.Admin", lambda *words, **options: admin)
    monitor = Monitor("127.0.0.1:1", 1.0)
    before = (await monitor.current(newest=True)).topics["t001"]

    async def unknown(name: str) -> TopicInfo:
        raise TopicNotFound("unknown", topic=name)

    monkeypatch.setattr(admin, "topic", unknown)
    after = (await monitor.current(newest=True)).topics["t001"]
    assert (before.leaders, after.leaders) == ({0: NODE}, {})
