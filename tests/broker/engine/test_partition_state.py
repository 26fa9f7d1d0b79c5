"""A partition: what it keeps and stores, and what others learn of its changes."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from nsqext.broker.engine.options import ChannelKind
from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.schedule import Schedule
from nsqext.broker.engine.storage.log import LogEntry, MemoryBudget, Refusal
from nsqext.broker.engine.storage.partition_store import ChannelState, NewMessage, stored_partitions
from nsqext.broker.engine.storage.segments import DiskOptions
from tests.support.engine_partition import Bench, original

COST = 32 + 512
"""Bytes of memory of a message with a body of two bytes."""


def records(*counts: int) -> list[LogEntry]:
    """Return messages of another partition, each of 32 bytes, without those between the counts."""
    bench = Bench()
    bench.publish(*(f"{number:02}" for number in range(max(counts))))
    return [entry for entry in map(bench.partition.log.at, counts) if entry is not None]


# Replicas


@pytest.mark.parametrize(
    ("leader_start", "start", "whole"), [(None, 3, 4), (0, 0, 1), (32, 0, 1), (33, 3, 4), (96, 3, 4)]
)
def test_a_replica_restarts_where_a_leader_starts_that_has_nothing_older(
    leader_start: int | None, start: int, whole: int
) -> None:
    bench = Bench()
    bench.publish("m0")
    bench.partition.append_replica(records(4), leader_start=leader_start)
    log = bench.partition.log
    assert (log.start_count, log.start_offset, log.whole_count) == (start, 32 * start, whole)
    assert (log.end_count, log.end_offset, bench.partition.readable, bench.partition.committed) == (4, 128, 4, 4)
    assert bench.partition.readable_offset == 128
    assert bench.publish("next").message_id == 6


def test_a_replica_that_leads_delivers_what_it_copied() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    bench.partition.append_replica(records(1, 2))
    assert consumer.bodies() == ["00", "01"]


def test_messages_that_not_every_replica_has_are_hidden_unless_they_were_acknowledged() -> None:
    bench = Bench()
    bench.publish("m0", "m1", "m2", "m3")

    def left(count: int) -> tuple[int, int, int]:
        bench.partition.uncommit(count)
        return bench.partition.committed, bench.partition.readable, bench.partition.readable_offset

    assert [left(count) for count in (9, 3)] == [(4, 4, 128), (3, 3, 96)]
    bench.consume(ready=5)
    bench.channel("idle")
    bench.channel().restore(ChannelState("ch", 64, 2), [])
    assert left(0) == (3, 3, 96), "a new channel is at the end"
    bench.partition.delete_channel("idle")
    assert [left(count) for count in (2, 0)] == [(2, 2, 64), (2, 2, 64)]
    bench.partition.delete_channel("ch")
    assert [left(count) for count in (1, 0)] == [(1, 1, 32), (0, 0, 0)]


def test_a_message_that_is_rolled_back_leaves_a_paused_topic_as_it_is() -> None:
    bench = original()
    consumer = bench.consume(ready=5)
    bench.partition.set_paused(True)
    bench.publish("m0")
    bench.partition.rollback(bench.partition.put([NewMessage(b"m1")]))
    assert (bench.partition.depth, bench.partition.readable, bench.partition.committed) == (1, 0, 1)
    bench.partition.set_paused(False)
    assert consumer.bodies() == ["m0"]


# Ticks and changes


@pytest.mark.parametrize(
    "change",
    [
        lambda partition: partition.put([NewMessage(b"m0")]),
        lambda partition: partition.append_replica(records(1)),
        lambda partition: partition.note_progress(),
    ],
)
def test_a_change_schedules_one_tick(tmp_path: Path, change: Callable[[Partition], object]) -> None:
    schedule, announced = Schedule(), []
    bench = Bench()
    options = Bench(data_path=tmp_path).options
    bench.partition = Partition("orders", 1, options, schedule=schedule)
    schedule.run(bench.now)
    schedule.on_change = lambda: announced.append(1)
    change(bench.partition)
    assert (len(announced), bench.partition.touched) == (1, True)
    schedule.run(bench.now)
    assert (schedule.next_deadline > bench.now, bench.partition.touched) == (True, False)


def test_what_channels_change_during_a_tick_needs_no_other_one() -> None:
    schedule = Schedule()
    bench = Bench()
    bench.partition = Partition("orders", 0, bench.options, schedule=schedule)
    bench.consume(ready=1, msg_timeout=5.0)
    bench.publish("m0")
    schedule.run(bench.now)
    bench.now += 5
    schedule.run(bench.now)
    assert schedule.next_deadline == bench.now + 5


def test_followers_learn_of_each_change_of_channels_and_of_removed_messages() -> None:
    bench = Bench(finished_bytes=0)
    channel = bench.channel()
    consumer = bench.consume(ready=1000)
    acts: dict[str, Callable[[], object]] = {
        "publish": lambda: bench.publish(*["x" * 1000] * 9),
        "tick": lambda: bench.partition.tick(),
        "finish": lambda: bench.finish(consumer, range(2, 10)),
        "trim": lambda: bench.partition.tick(),
        "create": lambda: bench.channel("other"),
        "look": lambda: bench.channel("other"),
        "pause": lambda: channel.set_paused(True),
        "delete": lambda: bench.partition.delete_channel("other"),
        "delete what is missing": lambda: bench.partition.delete_channel("other"),
        "upgrade": lambda: bench.partition.upgrade_extend(),
    }
    changed = []
    for name, act in acts.items():
        before = bench.partition.changes
        act()
        if bench.partition.changes > before:
            changed.append(name)
        assert bench.partition.changes >= before
    assert bench.partition.log.start_count > 0
    assert changed == ["finish", "trim", "create", "pause", "delete", "upgrade"]


# Channels


def test_a_deleted_channel_closes_its_clients_and_is_announced() -> None:
    bench, deleted = Bench(), list[str]()
    consumer, other = bench.consume(), bench.consume(2, channel="other")
    bench.partition.delete_channel("other")
    assert (other.has_closed, consumer.has_closed) == (True, False)
    bench.partition.on_channel_deleted = deleted.append
    for _ in range(2):
        bench.partition.delete_channel("ch")
    assert (consumer.has_closed, deleted, bench.partition.channels) == (True, ["ch"], {})


def test_a_channel_keeps_its_position_and_its_delayed_messages_when_its_type_changes(tmp_path: Path) -> None:
    bench, keys = Bench(data_path=tmp_path), ChannelKind("key_failover")
    consumer = bench.consume(ready=5)
    bench.publish("m0", "m1", "m2")
    bench.finish(consumer, [2])
    bench.channel().requeue(consumer, 3, 1200)
    bench.channel().set_paused(True)
    bench.channel().unsubscribe(consumer)
    channel = bench.partition.set_kind("ch", keys)
    assert (channel.kind, channel.acked.count, channel.paused) == (keys, 2, True)
    assert list(channel.cursor.delayed.messages) == [3]
    assert [kept.dispatch for state in stored_partitions(tmp_path) for kept in state.channels] == ["key_failover"]
    assert bench.partition.set_kind("ch", keys) is channel
    fixed = ChannelKind("key_failover", fixed=True)
    assert bench.partition.set_kind("ch", fixed) is channel
    assert channel.kind == fixed
    assert bench.partition.set_kind("new", keys).kind == keys


def test_an_emptied_topic_forgets_delays() -> None:
    bench = original()
    bench.publish(NewMessage(b"m0", delay=5))
    bench.partition.empty()
    assert not bench.partition._delays


# Memory


def test_a_partition_that_is_exactly_at_its_bound_is_not_refused() -> None:
    budget = MemoryBudget(4 * COST)
    bench = Bench(memory_bound=2 * COST)
    bench.partition = Partition("orders", 0, bench.options, budget=budget)
    bench.channel()
    other = Partition("other", 0, Bench().options, budget=budget)
    other.channel("ch")
    bench.publish("m0")
    bench.publish("m1")
    for _ in range(3):
        other.commit(other.put([NewMessage(b"mm")]))
    with pytest.raises(Refusal, match=rf"^the node holds {5 * COST} bytes .* partition 0 holds {2 * COST} of them"):
        bench.publish("m2")
    other.truncate(0)
    bench.publish("m2")
    with pytest.raises(Refusal, match=rf"^topic orders partition 0 holds {3 * COST} bytes that are not consumed"):
        bench.publish("m3")


def test_a_closed_partition_has_no_clients_and_is_not_asked_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, bench = MemoryBudget(1000), Bench()
    bench.partition = Partition("orders", 0, bench.options, budget=budget)
    consumer, asked = bench.consume(), list[int]()
    monkeypatch.setattr(bench.partition, "free_memory", lambda: asked.append(1))
    budget.held = 1001
    for times in (1, 1):
        budget.reclaim()
        assert len(asked) == times
        bench.partition.close()
        budget.held -= 100
    assert consumer.has_closed


def test_messages_on_disk_leave_the_memory_all(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path)
    bench.publish("m0")
    bench.partition.free_memory()
    assert bench.partition.log.held == 0


def test_finished_messages_are_kept_for_consumers_that_seek_backwards(tmp_path: Path) -> None:
    on_disk = Bench(data_path=tmp_path, disk=DiskOptions(retention_bytes=320), cache_bytes=0)
    in_memory = Bench(finished_bytes=320)
    for bench in (on_disk, in_memory):
        consumer = bench.consume(ready=200)
        bench.publish(*(f"{number:02}" for number in range(100)))
        bench.finish(consumer, range(2, 101))
        bench.wait(1)
        log = bench.partition.log
        assert log.start_count == 88, "segments have 8 messages"
        bench.partition.suspend()
        bench.partition.free_memory()
        assert log.start_count == 88, "a replica removes only what its leader removed"
    in_memory.partition.resume()
    in_memory.partition.free_memory()
    assert in_memory.partition.log.start_count == 96


# Disk


def test_changes_of_a_topic_are_stored_at_once(tmp_path: Path) -> None:
    bench = original(data_path=tmp_path)
    bench.publish("m0")
    acts: list[Callable[[], object]] = [
        lambda: bench.partition.add_channels(["one", "two"]),
        lambda: bench.partition.set_paused(True),
        lambda: bench.partition.upgrade_extend(),
        lambda: bench.publish("m1"),
        lambda: bench.partition.empty(),
    ]
    seen = []
    for act in acts:
        act()
        (state,) = stored_partitions(tmp_path)
        seen.append((len(state.channels), state.paused, state.extend, state.readable))
    assert seen == [
        (2, False, False, 0),
        (2, True, False, 1),
        (2, True, True, 1),
        (2, True, True, 1),
        (2, True, True, 2),
    ]
    assert [(channel.name, channel.offset) for channel in state.channels] == [("one", 0), ("two", 0)]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_topic_that_took_headers_once_takes_them(tmp_path: Path, before: bool, after: bool) -> None:
    Bench(data_path=tmp_path, extend=before)
    assert Bench(data_path=tmp_path, extend=after).partition.extend


def test_a_partition_keeps_the_time_when_it_was_created(tmp_path: Path) -> None:
    created = Bench(data_path=tmp_path).partition.created
    assert Bench(data_path=tmp_path, wall=lambda: created + 1).partition.created == created


def test_positions_are_counted_again_when_the_number_of_lost_messages_is_estimated(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path)
    consumer = bench.consume(ready=5)
    bench.publish("first", "x" * 100)
    bench.partition.skip_ids(100)
    bench.publish("last", "waits")
    bench.finish(consumer, [2, 3, 104])
    bench.partition.close()
    file = tmp_path / "orders/orders-0.diskqueue.000000.dat"
    file.write_bytes(file.read_bytes().replace(bytes((0, 0, 0, 126)), bytes(4)))
    again = Bench(data_path=tmp_path)
    assert again.partition.recovery is not None
    assert again.partition.recovery.lost_messages == 4, "which have room in the damaged bytes"
    assert (again.channel().acked.count, again.partition.log.end_count) == (6, 7)
    again.publish("new")
    assert again.consume(ready=5).bodies() == ["waits", "new"]


def test_a_channel_of_a_replica_is_stored_when_its_position_is_known(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path)
    bench.publish("m0", "m1")
    bench.partition.suspend()

    def stored() -> list[int]:
        (state,) = stored_partitions(tmp_path)
        return [channel.count for channel in state.channels]

    channel = bench.channel()
    assert stored() == []
    channel.restore(ChannelState("ch", 32, 1), [])
    assert stored() == [1]
    channel.restore(ChannelState("ch", 64, 2), [])
    assert stored() == [1], "the next interval stores it"
    bench.wait(1)
    assert stored() == [2]


@pytest.mark.parametrize("save", [False, True])
def test_a_partition_that_is_closed_stores_its_positions_unless_it_was_killed(tmp_path: Path, save: bool) -> None:
    bench = Bench(data_path=tmp_path)
    consumer = bench.consume()
    bench.publish("m0")
    bench.finish(consumer, [2])
    bench.partition.close(save=save)
    (state,) = stored_partitions(tmp_path)
    assert [channel.count for channel in state.channels] == [save]
    assert bench.partition.tick() is None
    assert Bench().partition.recovery is None


def test_an_idle_partition_on_disk_has_no_deadline(tmp_path: Path) -> None:
    bench = Bench(data_path=tmp_path)
    bench.wait(1)
    assert bench.partition.tick() is None
    bench.partition.note_progress()
    due = bench.partition.tick()
    assert due is not None
    assert bench.now < due < inf
