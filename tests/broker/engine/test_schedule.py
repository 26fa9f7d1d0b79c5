"""Ticks of partitions: only if a deadline has passed or may have changed."""

from __future__ import annotations

import errno
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsqext.broker.engine.options import PartitionOptions
from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.schedule import Schedule, Turn
from nsqext.broker.engine.storage.partition_store import ChannelState, NewMessage, stored_partitions
from nsqext.broker.engine.storage.segments import DiskOptions
from tests.support.engine_partition import Bench, Consumer

if TYPE_CHECKING:
    import pytest


class Timer:
    """A scheduled object that returns deadlines from a list."""

    def __init__(self, *deadlines: float | None) -> None:
        self.deadlines = list(deadlines)
        self.ticks = 0

    def tick(self) -> float | None:
        """Count the call."""
        self.ticks += 1
        return self.deadlines.pop(0) if self.deadlines else None


def test_an_item_is_ticked_after_add_and_at_its_deadline() -> None:
    schedule, timer = Schedule(), Timer(10.0, 20.0)
    schedule.run(0)
    schedule.add(timer)
    schedule.add(timer)
    schedule.run(1)
    assert timer.ticks == 1
    schedule.run(9.9)
    assert timer.ticks == 1
    schedule.run(10)
    schedule.run(19)
    assert timer.ticks == 2
    schedule.run(20)
    schedule.run(1000)
    assert timer.ticks == 3


def test_a_new_deadline_replaces_the_old_one() -> None:
    schedule, timer = Schedule(), Timer(10.0, 30.0, 20.0)
    for _ in range(3):
        schedule.add(timer)
        schedule.run(1)
    schedule.run(15)
    assert timer.ticks == 3
    schedule.run(25)
    assert timer.ticks == 4


def test_a_deadline_that_is_given_up_is_forgotten_and_one_that_is_repeated_is_not() -> None:
    schedule, given_up, repeated = Schedule(), Timer(10.0, None), Timer(10.0, 10.0, None)
    schedule.add(given_up)
    schedule.add(repeated)
    schedule.run(0)
    schedule.add(given_up)
    for now in (1, 10, 20):
        schedule.run(now)
    assert (given_up.ticks, repeated.ticks) == (2, 3)


def test_a_change_is_announced_once_until_it_is_processed() -> None:
    schedule, announced = Schedule(), []
    schedule.on_change = lambda: announced.append(1)
    for count in (1, 2):
        for _ in range(2):
            schedule.add(Timer())
            assert len(announced) == count
        schedule.run(0)


class Pumps:
    """A channel that counts its calls."""

    def __init__(self) -> None:
        self.pumps = 0

    def pump(self) -> None:
        """Count the call."""
        self.pumps += 1


def test_channels_that_wait_for_the_end_of_a_turn_are_pumped_once() -> None:
    turn, waits, other = Turn(), Pumps(), Pumps()
    assert not turn.defers(waits)
    turn.end()
    assert waits.pumps == 0
    for count in (1, 2):
        turn.begin()
        assert turn.defers(waits)
        assert turn.defers(waits)
        turn.end()
        assert (waits.pumps, other.pumps) == (count, 0)
        assert not turn.defers(other)


def test_the_next_deadline() -> None:
    schedule, timer = Schedule(), Timer(10.0, None)
    assert schedule.next_deadline == inf
    schedule.add(timer)
    assert schedule.next_deadline == -inf
    schedule.run(5.0)
    assert schedule.next_deadline == 10.0
    schedule.run(10.0)
    assert schedule.next_deadline == inf


def test_a_removed_item_is_not_ticked() -> None:
    schedule, timer = Schedule(), Timer(10.0)
    schedule.add(timer)
    schedule.run(0)
    schedule.remove(timer)
    schedule.add(timer)
    schedule.remove(timer)
    schedule.run(100)
    assert timer.ticks == 1


class Scheduled(Bench):
    """A partition that is ticked only by a schedule."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.schedule = Schedule()
        self.ticks = 0
        self.partition = Partition(
            "orders", 0, PartitionOptions(clock=self.clock, wall=self.wall, **options), schedule=self.schedule
        )
        tick = self.partition.tick

        def counted() -> float | None:
            self.ticks += 1
            return tick()

        self.partition.tick = counted  # type: ignore[method-assign]

    def wait(self, seconds: float) -> None:
        """Advance the clock in steps of 50 ms, like the server's ticks."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.05, end)
            self.schedule.run(self.now)


def test_an_idle_partition_is_not_ticked() -> None:
    bench = Scheduled()
    consumer = bench.consume(ready=1, msg_timeout=100.0)
    bench.publish(*"abcdef")
    bench.finish(consumer, [2])
    bench.wait(0.1)
    before = bench.ticks
    bench.wait(30)
    assert bench.ticks - before <= 1


def test_deadlines_are_met_without_other_activity() -> None:
    bench = Scheduled()
    consumer = bench.consume(ready=5, msg_timeout=5.0)
    bench.publish("a", "b", "c", "d")
    bench.channel().requeue(consumer, 3, 2.0)
    bench.channel().requeue(consumer, 4, 1000.0)
    bench.channel().finish(consumer, 5)
    assert consumer.attempts() == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    bench.wait(2)
    assert consumer.attempts() == [("b", 2)]
    bench.channel().finish(consumer, 3)
    bench.wait(2.9)
    assert consumer.attempts() == []
    bench.wait(0.2)
    assert consumer.attempts() == [("a", 2)]
    bench.channel().touch(consumer, 2)
    bench.channel().finish(consumer, 2)
    bench.wait(994)
    assert consumer.attempts() == []
    bench.wait(2)
    assert consumer.attempts() == [("c", 2)]


def test_the_delayed_queue_waits_for_a_client() -> None:
    bench = Scheduled()
    consumer = bench.consume(ready=1)
    bench.publish("a")
    bench.channel().requeue(consumer, 2, 1000.0)
    bench.channel().unsubscribe(consumer)
    bench.wait(1001)
    second = Consumer(2)
    bench.channel().subscribe(second)
    bench.channel().set_ready(second, 1)
    bench.wait(0.1)
    assert second.bodies() == ["a"]


def test_positions_are_stored_without_other_activity(tmp_path: Path) -> None:
    bench = Scheduled(data_path=tmp_path)
    consumer = bench.consume(ready=5)
    bench.publish("a", "b")
    bench.wait(5)
    bench.partition.note_progress()
    bench.channel().finish(consumer, 2)
    bench.wait(5)
    (kept,) = stored_partitions(tmp_path)
    assert [channel.count for channel in kept.channels] == [1]
    bench.channel().cursor.jump(bench.partition.readable_offset, 2)
    bench.wait(5)
    (kept,) = stored_partitions(tmp_path)
    assert [channel.count for channel in kept.channels] == [2]


def test_positions_of_the_leader_are_stored_without_other_activity(tmp_path: Path) -> None:
    bench = Scheduled(data_path=tmp_path)
    bench.channel()
    bench.publish("a", "b")
    bench.wait(5)
    bench.channel().restore(ChannelState("ch", 32, 1), [])
    bench.wait(5)
    (kept,) = stored_partitions(tmp_path)
    assert [channel.count for channel in kept.channels] == [1]


def test_a_state_that_could_not_be_written_is_written_without_other_activity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nsqext.broker.engine.storage.partition_store.write_atomically", refuse)
        bench = Scheduled(data_path=tmp_path)
    assert not any(tmp_path.rglob("*.channels.json"))
    bench.wait(1)
    assert any(tmp_path.rglob("*.channels.json"))


def test_messages_without_a_channel_are_synced_without_other_activity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Scheduled(data_path=tmp_path, disk=DiskOptions(fsync="interval"))
    bench.wait(5)
    synced: list[int] = []
    monkeypatch.setattr("nsqext.broker.engine.storage.segments.os.fsync", synced.append)
    bench.publish("a")
    bench.wait(5)
    assert len(synced) == 1


def test_a_touch_that_shortens_the_timeout_is_met() -> None:
    bench = Scheduled()
    consumer = bench.consume(ready=1, msg_timeout=60.0, touch_timeout=1.0)
    bench.publish("a")
    bench.wait(1)
    bench.channel().touch(consumer, 2)
    bench.wait(1.1)
    assert consumer.attempts() == [("a", 1), ("a", 2)]


def test_a_closed_partition_is_not_ticked() -> None:
    bench = Scheduled()
    bench.partition.put([NewMessage(b"a")])
    bench.partition.close()
    bench.wait(1)
    assert bench.ticks == 0
