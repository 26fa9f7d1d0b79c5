"""Copies of records between the replicas of a partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.replication import commit_all, copy_records, cut_tail, mirror_channels
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from tests.support.coordinators import bodies, hosted, make_coordinator, wrong_roles
from tests.support.engine_partition import Consumer

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.engine.partition import Partition

COUNT = st.integers(0, 5)


def with_two_replicas() -> tuple[Coordinator, str, str]:
    """Return a coordinator with a partition, its leader and its follower."""
    coordinator = make_coordinator(2)
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    leader, follower = coordinator.replica_sets["t", 0].state.replicas
    return coordinator, leader, follower


@given(COUNT, COUNT, COUNT, st.integers(1, 3))
def test_a_replica_keeps_what_it_shares_with_its_leader_and_copies_the_rest(
    shared: int, own: int, missing: int, chunk: int
) -> None:
    coordinator, leader, follower = with_two_replicas()
    source, target = hosted(coordinator, leader).partition, hosted(coordinator, follower).partition
    for number in range(shared):
        target.append_replica(source.put([NewMessage(b"shared %d" % number)]).entries)
    for number in range(missing):
        source.put([NewMessage(b"leader %d" % number)])
    for number in range(own):
        target.put([NewMessage(b"own    %d" % number)])
    wanted = bodies(coordinator, leader)
    cut_tail(source, target)
    assert bodies(coordinator, follower) == wanted[:shared]
    steps = 1
    while not copy_records(source, target, chunk):
        steps += 1
        assert bodies(coordinator, follower) == wanted[: min(shared + (steps - 1) * chunk, len(wanted))]
    assert steps == max(-(-missing // chunk), 1)
    assert bodies(coordinator, follower) == wanted
    assert (target.log.start_offset, target.log.end_offset) == (source.log.start_offset, source.log.end_offset)
    commit_all(target)
    assert target.readable == len(wanted)


def test_a_replica_removes_what_its_leader_took_back() -> None:
    coordinator, leader, follower = with_two_replicas()
    replicas = coordinator.replica_sets["t", 0]
    source, target = hosted(coordinator, leader).partition, hosted(coordinator, follower).partition
    assert replicas.push(source.put([NewMessage(b"one")]))
    refused = source.put([NewMessage(b"refused")])
    assert copy_records(source, target), "as a catch-up in the middle of a large batch"
    source.rollback(refused)
    assert replicas.push(source.put([NewMessage(b"two")]))
    assert bodies(coordinator, follower) == bodies(coordinator, leader) == [b"one", b"two"]


@pytest.mark.anyio
async def test_a_disk_that_was_full_does_not_refuse_a_later_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, leader, follower = with_two_replicas()
    replicas, source = coordinator.replica_sets["t", 0], hosted(coordinator, leader).partition

    def refuse(*_: object, **__: object) -> None:
        raise Refusal("the disk is full")

    with monkeypatch.context() as full:
        full.setattr(hosted(coordinator, follower).partition, "append_replica", refuse)
        with pytest.raises(Refusal, match="the disk is full"):
            await replicas.replicate(source.put([NewMessage(b"one")]))
    coordinator.members[follower].node.faults.freeze()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replicas.replicate, source.put([NewMessage(b"two")]))
        await anyio.wait_all_tasks_blocked()
        coordinator.members[follower].node.faults.thaw()
        replicas.changes.wake()
    assert bodies(coordinator, follower) == [b"one", b"two"]


def test_a_new_leader_serves_what_every_replica_has() -> None:
    coordinator, leader, follower = with_two_replicas()
    replicas = coordinator.replica_sets["t", 0]
    hosted(coordinator, leader).partition.put([NewMessage(b"one"), NewMessage(b"two")])
    assert replicas.push()
    assert replicas.leader.readable == 0
    coordinator.elect(replicas, follower)
    assert (replicas.state.leader, replicas.leader.readable, wrong_roles(coordinator)) == (follower, 2, [])


def test_a_new_leader_serves_messages_that_a_follower_lacked_as_soon_as_it_has_them() -> None:
    coordinator = make_coordinator(3)
    admin.create_topic(coordinator, "t", TopicSpec(1, 3))
    replicas = coordinator.replica_sets["t", 0]
    leader, first, second = replicas.state.replicas
    stored = hosted(coordinator, leader).partition.put([NewMessage(b"one"), NewMessage(b"two")])
    hosted(coordinator, first).partition.append_replica(stored.entries)
    coordinator.elect(replicas, first)
    assert bodies(coordinator, second) == [b"one", b"two"]
    assert (replicas.leader.readable, replicas.leader.committed) == (2, 2)


@pytest.mark.parametrize("most", [1, 10])
def test_a_replica_keeps_what_follows_records_that_its_leader_lost_as_well(most: int) -> None:
    coordinator, leader, follower = with_two_replicas()
    source, target = hosted(coordinator, leader).partition, hosted(coordinator, follower).partition
    source.put([NewMessage(b"before")])
    assert copy_records(source, target)
    source.log.append_gap(source.log.end_offset + 100, source.log.end_count + 2)
    source.put([NewMessage(b"behind"), NewMessage(b"last")])
    copied = [copy_records(source, target, most) for _ in range(2)]
    assert copied == [most > 1, True]
    target.put([NewMessage(b"own")])
    cut_tail(source, target)
    assert target.log.end_count == source.log.end_count == 5
    assert bodies(coordinator, follower) == bodies(coordinator, leader) == [b"before", b"behind", b"last"]


def test_a_follower_removes_what_its_leader_removed_without_a_publish() -> None:
    coordinator, leader, follower = with_two_replicas()
    source, target = hosted(coordinator, leader).partition, hosted(coordinator, follower).partition
    for _ in range(3000):  # more than one segment
        source.put([NewMessage(b"x")])
    copy_records(source, target, 3000)
    source.log.trim(source.log.end_offset)
    mirror_channels(source, target)
    assert 0 < target.log.start_count == source.log.start_count


def test_ephemeral_channels_are_of_the_leader_only() -> None:
    coordinator, leader, follower = with_two_replicas()
    source, target = hosted(coordinator, leader).partition, hosted(coordinator, follower).partition
    for name in ("ch", "tmp#ephemeral"):
        source.channel(name)
    coordinator.mirror(coordinator.replica_sets["t", 0])
    assert list(target.channels) == ["ch"]
    coordinator.elect(coordinator.replica_sets["t", 0], follower)
    assert list(target.channels) == ["ch"]


def test_a_follower_that_lost_its_channels_gets_them_again() -> None:
    coordinator, leader, follower = with_two_replicas()
    replicas = coordinator.replica_sets["t", 0]
    hosted(coordinator, leader).partition.channel("ch")
    coordinator.mirror(replicas)
    hosted(coordinator, follower).partition.delete_channel("ch")
    coordinator.mirror(replicas)
    assert not hosted(coordinator, follower).partition.channels, "nothing changed at the leader"
    membership.returned(coordinator, coordinator.members[follower])
    coordinator.mirror(replicas)
    assert list(hosted(coordinator, follower).partition.channels) == ["ch"]


def test_a_leader_that_leads_again_delivers_what_is_unfinished_and_nothing_that_was_finished_meanwhile() -> None:
    coordinator, leader, follower = with_two_replicas()
    replicas = coordinator.replica_sets["t", 0]
    source = hosted(coordinator, leader).partition
    source.channel("ch")
    stored = source.put([NewMessage(b"delayed"), NewMessage(b"in flight")])
    replicas.push(stored)
    source.commit(stored)
    first = subscribed(source, 2)
    source.channels["ch"].requeue(first, first.take()[0].internal_id, 1000)
    coordinator.elect(replicas, follower)
    heir = hosted(coordinator, follower).partition
    (delayed,) = heir.channels["ch"].cursor.delayed.messages
    heir.channels["ch"].cursor.delayed.remove(delayed)  # it was finished
    coordinator.elect(replicas, leader)
    assert source.channels["ch"].cursor.delayed.messages == {}
    assert subscribed(source, 2).bodies() == ["in flight"]


def subscribed(partition: Partition, ready: int) -> Consumer:
    """Subscribe a consumer to a channel."""
    consumer = Consumer()
    partition.channel("ch").subscribe(consumer)
    partition.channel("ch").set_ready(consumer, ready)
    return consumer
