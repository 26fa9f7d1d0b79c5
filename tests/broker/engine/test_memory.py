"""Memory of queues: finished messages are freed, messages on disk are read from there, a node has a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.storage.log import MemoryBudget, Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from tests.support.engine_partition import Bench, Consumer

BODY = "x" * 1000


class Budgeted(Bench):
    """Partitions that share a memory bound."""

    def __init__(self, limit: int, **options: Any) -> None:
        super().__init__(finished_bytes=200_000, cache_bytes=50_000, **options)  # small segments
        self.budget = MemoryBudget(limit)
        self.partition = Partition("orders", 0, self.options, budget=self.budget)
        self.other = Partition("other", 0, self.options, budget=self.budget)


def consume_all(bench: Bench, messages: int) -> Consumer:
    """Publish and finish messages, with a tick after every tenth."""
    consumer = bench.consume(ready=10)
    for number in range(messages):
        bench.publish(BODY)
        (message,) = consumer.take()
        bench.channel().finish(consumer, message.internal_id)
        if number % 10 == 0:
            bench.partition.tick()
    return consumer


def test_finished_messages_are_freed() -> None:
    bench = Bench(finished_bytes=100_000)
    consume_all(bench, 2000)
    assert bench.partition.log.held < 200_000
    assert bench.partition.log.start_count > 1800


def test_unfinished_messages_are_kept() -> None:
    bench = Bench(finished_bytes=1)
    bench.channel("slow")
    consume_all(bench, 500)
    assert len(bench.consume(2, ready=2500, channel="slow").bodies()) == 500


def test_a_node_refuses_when_unfinished_messages_exceed_its_bound() -> None:
    bench = Budgeted(200_000)
    bench.channel()
    bench.other.channel("ch")
    with pytest.raises(Refusal, match=r"the node holds \d+ bytes that are not consumed, more than 200000"):
        for _ in range(200):
            bench.publish(BODY)
            bench.other.commit(bench.other.put([NewMessage(BODY.encode())]))
    assert bench.budget.held < 220_000
    bench.channel().empty()
    bench.other.channel("ch").empty()
    for _ in range(100):
        bench.publish(BODY)
        bench.channel().empty()
    assert bench.budget.held == bench.partition.log.held + bench.other.log.held < 220_000


def test_finished_messages_of_other_partitions_are_freed_first() -> None:
    bench = Budgeted(200_000)
    consume_all(bench, 100)
    assert bench.partition.log.held > 100_000
    bench.other.channel("ch")
    for _ in range(100):
        bench.other.commit(bench.other.put([NewMessage(BODY.encode())]))
    assert bench.partition.log.held < 20_000
    assert bench.budget.held < 220_000


class User:
    """A queue that frees a number of bytes at a time."""

    def __init__(self, budget: MemoryBudget, frees: int) -> None:
        self.budget, self.frees, self.asked = budget, frees, 0

    def free_memory(self) -> None:
        """Free memory."""
        self.asked += 1
        self.budget.held -= self.frees


def test_memory_that_could_not_be_freed_is_not_asked_for_until_less_is_held() -> None:
    budget = MemoryBudget(100)
    full = User(budget, 0)
    budget.add(full)
    budget.held = 3200
    budget.reclaim()
    budget.reclaim()
    assert full.asked == 1
    budget.held = 3100
    budget.reclaim()
    budget.held = 3101
    budget.reclaim()
    assert full.asked == 2


def test_memory_is_asked_for_again_after_enough_was_freed() -> None:
    budget = MemoryBudget(100)
    users = [User(budget, 50), User(budget, 60)]
    for user in users:
        budget.add(user)
    for asked in (1, 2):
        budget.held = 210
        assert budget.is_exceeded
        budget.reclaim()
        assert (budget.held, budget.is_exceeded, [user.asked for user in users]) == (100, False, [asked, asked])
    budget.remove(users[0])
    budget.reclaim()
    assert [user.asked for user in users] == [2, 3]


def test_a_closed_partition_frees_its_memory() -> None:
    bench = Budgeted(1_000_000)
    bench.publish(BODY)
    bench.partition.close()
    bench.other.close()
    assert bench.budget.held == 0


def test_a_node_with_a_disk_never_refuses_for_memory(tmp_path: Path) -> None:
    bench = Budgeted(50_000, data_path=tmp_path)
    bench.channel()
    bench.other.channel("ch")
    for number in range(200):
        bench.publish(f"{number} {BODY}")
        bench.other.commit(bench.other.put([NewMessage(BODY.encode())]))
    assert bench.budget.held < 60_000
    bodies = bench.consume(ready=2500).bodies()
    assert [body.split()[0] for body in bodies] == [str(number) for number in range(200)]
