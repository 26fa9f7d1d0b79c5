"""Nodes that are killed, frozen, drained and restarted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.replication import mirror_channels
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.server.request_error import RequestError
from tests.support.coordinators import bodies, hosted, make_coordinator, publish, running, until, wrong_roles
from tests.support.engine_partition import Consumer

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import ClusterMember
    from nsqext.broker.engine.partition import Partition

pytestmark = pytest.mark.anyio


def kill(coordinator: Coordinator, name: str) -> None:
    member = coordinator.members[name]
    member.alive = False
    membership.silent(coordinator, member)


def leave(coordinator: Coordinator, name: str) -> None:
    membership.left(coordinator, coordinator.members[name])


def restart(coordinator: Coordinator, name: str) -> None:
    membership.returned(coordinator, coordinator.members[name])


def create(coordinator: Coordinator, replicas: int) -> str:
    admin.create_topic(coordinator, "t", TopicSpec(1, replicas))
    return coordinator.replica_sets["t", 0].state.leader


async def test_a_lost_follower_of_two_makes_a_publish_hang_and_the_leader_resign() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 2)
        other = coordinator.replica_sets["t", 0].state.replicas[1]
        kill(coordinator, other)
        with pytest.raises(RequestError) as error:
            await publish(coordinator, b"one")
        assert (error.value.code, error.value.fatal) == ("E_FAILED_ON_NOT_WRITABLE", False)
        assert (hosted(coordinator, leader).leader, coordinator.replica_sets["t", 0].state.leader) == (False, leader)
        restart(coordinator, other)
        await until(coordinator, "writable")
        await publish(coordinator, b"two")
        assert bodies(coordinator, leader) == bodies(coordinator, other)
        assert bodies(coordinator, leader)[-1] == b"two"


async def test_a_lost_follower_of_three_only_delays_a_publish() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 3)
        other = coordinator.replica_sets["t", 0].state.replicas[1]
        kill(coordinator, other)
        await publish(coordinator, b"one")
        state = coordinator.replica_sets["t", 0].state
        assert (state.leader, len(state.in_sync), state.epoch) == (leader, 2, 1)


async def test_a_separated_follower_is_dropped_after_a_lease_and_catches_up() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 3)
        other, third = coordinator.replica_sets["t", 0].state.replicas[1:]
        coordinator.separate(other, third)  # the leader reaches both
        coordinator.separate(leader, other)
        await until(coordinator, f"sync={','.join(sorted((leader, third)))}")
        assert wrong_roles(coordinator) == []
        await publish(coordinator, b"one")
        assert [bodies(coordinator, name) for name in (leader, third, other)] == [[b"one"], [b"one"], []]
        coordinator.connect(leader, other)
        await until(coordinator, "sync=n1,n2,n3")
        assert bodies(coordinator, other) == [b"one"]
        coordinator.connect(other, third)
        assert coordinator.stable


async def test_followers_that_are_separated_from_each_other_change_nothing() -> None:
    async with running() as coordinator:
        create(coordinator, 3)
        changed: list[str] = []
        coordinator.watchers.append(changed.append)
        coordinator.separate(*coordinator.replica_sets["t", 0].state.replicas[1:])
        await anyio.sleep(2 * coordinator.options.lease)
        assert (changed, coordinator.stable) == ([], True)


async def test_a_follower_that_is_connected_within_a_lease_stays_in_sync() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 3)
        other = coordinator.replica_sets["t", 0].state.replicas[1]
        coordinator.separate(leader, other)
        coordinator.connect(leader, other)
        seen: list[int] = []
        coordinator.watchers.append(lambda _: seen.append(len(coordinator.replica_sets["t", 0].state.in_sync)))
        await anyio.sleep(2 * coordinator.options.lease)
        assert sorted(coordinator.replica_sets["t", 0].state.in_sync) == ["n1", "n2", "n3"]
        assert seen == []


@pytest.mark.parametrize("count", [2, 3])
async def test_messages_become_readable_when_a_separated_follower_has_them(count: int) -> None:
    async with running() as coordinator:
        leader = create(coordinator, count)
        replicas = coordinator.replica_sets["t", 0]
        other = replicas.state.replicas[1]
        coordinator.separate(leader, other)
        hosted(coordinator, leader).partition.put([NewMessage(b"one")])
        coordinator.commit_when_replicated(replicas)
        await anyio.wait_all_tasks_blocked()
        assert replicas.leader.readable == 0
        coordinator.connect(leader, other)
        await anyio.wait_all_tasks_blocked()
        assert (replicas.leader.readable, bodies(coordinator, other)) == (1, [b"one"])


async def test_a_leader_of_two_that_is_separated_resigns() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 2)
        other = coordinator.replica_sets["t", 0].state.replicas[1]
        coordinator.separate(leader, other)
        with pytest.raises(RequestError, match="E_FAILED_ON_NOT_WRITABLE"):
            await publish(coordinator, b"one")
        assert (coordinator.replica_sets["t", 0].state.resigned, wrong_roles(coordinator)) == (True, [])


async def test_a_follower_that_thaws_in_time_stays_in_sync() -> None:
    async with running(options=CoordinatorOptions(lease=5)) as coordinator:
        create(coordinator, 2)
        other = coordinator.replica_sets["t", 0].state.replicas[1]
        member = coordinator.members[other]
        member.node.faults.freeze()
        membership.silent(coordinator, member)
        async with anyio.create_task_group() as group:
            group.start_soon(publish, coordinator, b"one")
            await anyio.wait_all_tasks_blocked()
            assert bodies(coordinator, other) == []
            member.node.faults.thaw()
            membership.thawed(coordinator, member)
        assert bodies(coordinator, other) == [b"one"]
        assert coordinator.replica_sets["t", 0].state.epoch == 1


async def test_a_frozen_leader_loses_leadership_and_unreplicated_messages() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 3)
        await publish(coordinator, b"one")
        member = coordinator.members[leader]
        member.node.faults.freeze()
        membership.silent(coordinator, member)
        hosted(coordinator, leader).partition.put([NewMessage(b"lost")])
        await until(coordinator, "writable")
        while coordinator.replica_sets["t", 0].state.leader == leader:
            await coordinator.replica_sets["t", 0].changes.wait()
        await publish(coordinator, b"two")
        member.node.faults.thaw()
        membership.thawed(coordinator, member)
        await until(coordinator, "sync=n1,n2,n3")
        assert bodies(coordinator, leader) == [b"one", b"two"]


async def test_a_leader_that_thaws_within_its_lease_leads_without_the_followers_that_left_meanwhile() -> None:
    """Without them, a publish does not wait for replicas that do not answer."""
    options = CoordinatorOptions(lease=3600.0)
    async with running(options=options) as coordinator:
        leader = create(coordinator, 3)
        state = coordinator.replica_sets["t", 0].state
        gone, stays = (name for name in state.replicas if name != leader)
        member = coordinator.members[leader]
        member.node.faults.freeze()
        membership.silent(coordinator, member)
        membership.left(coordinator, coordinator.members[gone])
        assert set(state.in_sync) == {leader, gone, stays}
        epoch = state.epoch
        member.node.faults.thaw()
        membership.thawed(coordinator, member)
        assert (state.leader, state.epoch, set(state.in_sync)) == (leader, epoch, {leader, stays})
        assert set(coordinator.leases) == {gone}


@pytest.mark.parametrize("ends", [membership.left, membership.returned, membership.thawed])
async def test_a_node_that_leaves_or_returns_has_no_lease_any_more(
    ends: Callable[[Coordinator, ClusterMember], None],
) -> None:
    async with running(options=CoordinatorOptions(lease=3600.0)) as coordinator:
        leader = create(coordinator, 2)
        member = coordinator.members[leader]
        membership.silent(coordinator, member)
        lease = coordinator.leases[leader]
        ends(coordinator, member)
        assert lease.cancel_called


async def test_a_follower_that_returns_within_its_lease_changes_nothing_and_is_aligned_again() -> None:
    async with running(options=CoordinatorOptions(lease=0.01)) as coordinator:
        leader = create(coordinator, 2)
        state = coordinator.replica_sets["t", 0].state
        other = state.replicas[1]
        await publish(coordinator, b"one")
        await publish(coordinator, b"two")
        kill(coordinator, other)
        damaged = hosted(coordinator, other).partition
        damaged.truncate(0)
        for _ in range(2):
            damaged.put([NewMessage(b"bad")])
        restart(coordinator, other)
        await anyio.sleep(0.03)
        assert (state.leader, state.epoch, state.in_sync) == (leader, 1, [leader, other])
        await publish(coordinator, b"three")
        assert bodies(coordinator, other) == [b"one", b"two", b"three"]


async def test_a_leader_that_returns_within_its_lease_leads_in_a_new_epoch() -> None:
    async with running(options=CoordinatorOptions(lease=3600.0)) as coordinator:
        leader = create(coordinator, 2)
        kill(coordinator, leader)
        restart(coordinator, leader)
        state = coordinator.replica_sets["t", 0].state
        assert (state.leader, state.epoch, wrong_roles(coordinator)) == (leader, 2, [])
        await publish(coordinator, b"one")


async def test_what_was_not_replicated_before_the_start_is_replicated_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.broker.coordinator.coordinator._MIRROR", 0.001)
    coordinator = make_coordinator(2)
    for topic in ("t", "u"):
        admin.create_topic(coordinator, topic, TopicSpec(1, 2))
        hosted(coordinator, "n1" if topic == "t" else "n2", topic).partition.put([NewMessage(b"one")])
    complete, lagging = coordinator.replica_sets["t", 0], coordinator.replica_sets["u", 0]
    lagging.state.in_sync.remove("n1")
    async with anyio.create_task_group() as group:
        await group.start(coordinator.run)
        assert complete.leader.readable == 1
        await until(coordinator, "sync=n1,n2", "u")
        assert bodies(coordinator, "n1", "u") == [b"one"]
        complete.leader.channel("ch")
        while "ch" not in hosted(coordinator, "n2").partition.channels:  # noqa: ASYNC110 - no event tells it
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()


async def test_no_replica_out_of_sync_is_elected_when_all_are_down() -> None:
    async with running() as coordinator:
        leader = create(coordinator, 3)
        first, second = coordinator.replica_sets["t", 0].state.replicas[1:]
        kill(coordinator, first)
        await publish(coordinator, b"one")  # returns when `first` is out of sync
        kill(coordinator, leader)
        kill(coordinator, second)
        await anyio.sleep(0.1)
        restart(coordinator, first)
        await anyio.sleep(0.1)
        assert coordinator.replica_sets["t", 0].state.leader == leader
        restart(coordinator, second)
        await until(coordinator, f"leader={second}")
        await until(coordinator, "writable")
        await publish(coordinator, b"two")
        assert bodies(coordinator, first) == [b"one", b"two"]


async def test_the_new_leader_has_the_finished_positions() -> None:
    async with running(options=CoordinatorOptions(lease=60)) as coordinator:
        leader = create(coordinator, 3)
        channel = hosted(coordinator, leader).partition.channel("ch")
        for body in (b"one", b"two", b"three"):
            await publish(coordinator, body)
        consumer = Consumer()
        channel.subscribe(consumer)
        channel.set_ready(consumer, 3)
        for place in (0, 2):
            channel.finish(consumer, consumer.got[place].internal_id)
        channel.set_paused(True)
        membership.left(coordinator, coordinator.members[leader])
        assert consumer.has_closed
        heir = hosted(coordinator, coordinator.replica_sets["t", 0].state.leader).partition.channels["ch"]
        assert heir.paused
        heir.set_paused(False)
        next_consumer = Consumer()
        heir.subscribe(next_consumer)
        heir.set_ready(next_consumer, 3)
        assert [message.body for message in next_consumer.got] == [b"two"]


@pytest.mark.parametrize("end", [kill, leave])
async def test_a_node_that_stays_down_is_replaced(end: Callable[[Coordinator, str], None]) -> None:
    async with running(options=CoordinatorOptions(lease=0.02, join_pause=0.01, replace_after=0.02)) as coordinator:
        create(coordinator, 2)
        gone = coordinator.replica_sets["t", 0].state.replicas[1]
        await publish(coordinator, b"one")
        end(coordinator, gone)
        await until(coordinator, "writable")
        while gone in coordinator.replica_sets["t", 0].state.replicas:
            await coordinator.replica_sets["t", 0].changes.wait()
        await until(coordinator, "writable")
        await publish(coordinator, b"two")
        restart(coordinator, gone)
        assert ("t", 0) not in coordinator.members[gone].node.hosted


async def test_the_only_replicas_are_not_replaced_without_a_leader() -> None:
    async with running(4, CoordinatorOptions(lease=0.01, join_pause=0, replace_after=0.01)) as coordinator:
        assert create(coordinator, 3) == "n1"
        await publish(coordinator, b"one")
        for name in ("n1", "n2", "n3"):
            kill(coordinator, name)
        await anyio.sleep(0.1)
        restart(coordinator, "n2")
        restart(coordinator, "n3")
        await until(coordinator, "writable")
        assert coordinator.replica_sets["t", 0].state.leader == "n2"
        restart(coordinator, "n1")
        await until(coordinator, "sync=n1,n2,n3")
        assert [bodies(coordinator, name) for name in ("n1", "n2", "n3")] == [[b"one"]] * 3


async def test_a_deleted_topic_fails_waiting_publishes() -> None:
    async with running(options=CoordinatorOptions(lease=60)) as coordinator:
        create(coordinator, 2)
        kill(coordinator, coordinator.replica_sets["t", 0].state.replicas[1])
        outcome: list[str] = []

        async def try_to_publish() -> None:
            try:
                await publish(coordinator, b"one")
            except RequestError as error:
                outcome.append(error.code)

        async with anyio.create_task_group() as group:
            group.start_soon(try_to_publish)
            await anyio.wait_all_tasks_blocked()
            admin.delete_topic(coordinator, "t")
        assert outcome == ["E_FAILED_ON_NOT_WRITABLE"]


def mirror_all(coordinator: Coordinator) -> None:
    for replicas in coordinator.replica_sets.values():
        coordinator.mirror(replicas)


async def test_followers_get_the_channels_of_changed_partitions_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirrored: list[str] = []

    def count(leader: Partition, follower: Partition) -> None:
        mirrored.append(leader.topic)
        mirror_channels(leader, follower)

    monkeypatch.setattr("nsqext.broker.coordinator.replication.mirror_channels", count)
    coordinator = make_coordinator()
    for name in ("idle", "t"):
        admin.create_topic(coordinator, name, TopicSpec(1, 3))
        hosted(coordinator, coordinator.replica_sets[name, 0].state.leader, name).partition.channel("ch")
        await publish(coordinator, b"one", name)
    mirror_all(coordinator)
    mirrored.clear()
    mirror_all(coordinator)
    assert mirrored == []

    leader, *followers = coordinator.replica_sets["t", 0].state.in_sync
    channel = hosted(coordinator, leader).partition.channels["ch"]
    consumer = Consumer()
    channel.subscribe(consumer)
    channel.set_ready(consumer, 1)
    coordinator.members[followers[0]].node.faults.freeze()
    channel.finish(consumer, consumer.got[0].internal_id)
    mirror_all(coordinator)
    counts = {name: hosted(coordinator, name).partition.channels["ch"].state().count for name in followers}
    assert (mirrored, counts) == (["t"], {followers[0]: 0, followers[1]: 1})
    coordinator.members[followers[0]].node.faults.thaw()
    mirror_all(coordinator)
    assert hosted(coordinator, followers[0]).partition.channels["ch"].state().count == 1
    mirrored.clear()
    channel.set_paused(True)
    mirror_all(coordinator)
    assert [hosted(coordinator, name).partition.channels["ch"].paused for name in followers] == [True, True]
    mirror_all(coordinator)
    assert mirrored == ["t", "t"]
