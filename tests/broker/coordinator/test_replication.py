"""Copies of records between the replicas of a partition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator.replication import commit_all, copy_records, cut_tail
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.publish import NewMessage
from tests.support.coordinators import bodies, hosted, make_coordinator, wrong_roles

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator

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


def test_a_replica_keeps_what_follows_records_that_its_leader_lost_as_well() -> None:
    coordinator, leader, follower = with_two_replicas()
    source, target = hosted(coordinator, leader).partition, hosted(coordinator, follower).partition
    source.put([NewMessage(b"before")])
    source.log.append_gap(source.log.end_offset + 100, source.log.end_count + 2)
    source.put([NewMessage(b"behind")])
    assert copy_records(source, target)
    target.put([NewMessage(b"own")])
    cut_tail(source, target)
    assert target.log.end_count == source.log.end_count == 4
    assert bodies(coordinator, follower) == bodies(coordinator, leader) == [b"before", b"behind"]
