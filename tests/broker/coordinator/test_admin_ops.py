"""Operations of administrators on the coordinator."""

from __future__ import annotations

import anyio
import pytest

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.options import PLAIN, ChannelKind
from nsqext.broker.engine.storage.log import Refusal
from nsqext.errors import InvalidSetting
from tests.support.coordinators import bodies, counted, hosted, make_coordinator, publish, running, until, wrong_roles
from tests.support.engine_partition import Consumer

pytestmark = pytest.mark.anyio


def roles(coordinator: Coordinator, topic: str = "t", partition: int = 0) -> dict[str, tuple[bool, bool]]:
    return {
        name: (found.leader, found.writable)
        for name, member in coordinator.members.items()
        if (found := member.node.hosted.get((topic, partition))) is not None
    }


def test_a_topic_is_led_at_once() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 3))
    assert sorted(roles(coordinator).values()) == [(False, False), (False, False), (True, True)]
    leader = coordinator.replica_sets["t", 0].state.leader
    assert hosted(coordinator, leader).replicate is not None
    assert wrong_roles(coordinator) == []
    hosted(coordinator, leader).writable = False
    assert wrong_roles(coordinator) == [("t", 0, leader)]


def test_an_upgrade_reaches_every_copy_and_stays() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    admin.update_topic(coordinator, "t", retention_days=2)
    assert not any(hosted(coordinator, name).partition.extend for name in roles(coordinator))
    admin.update_topic(coordinator, "t", extend=True)
    admin.update_topic(coordinator, "t", extend=False, retention_days=3)
    assert coordinator.topics["t"].spec == TopicSpec(1, 2, extend=True, retention_days=3)
    copies = [hosted(coordinator, name) for name in roles(coordinator)]
    assert all(found.partition.extend and found.meta.extend_support for found in copies)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"replica": 4}, "ErrType:9 ErrCode:1 : No node is available for topic"),
        ({"retention_days": 61}, "max retention days allowed exceed"),
        ({"sync_every": 4001}, "max sync every allowed exceed"),
    ],
)
def test_refused_changes_change_nothing(changes: dict[str, int], text: str) -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec())
    with pytest.raises(Refusal) as error:
        admin.update_topic(coordinator, "t", **changes)
    assert error.value.text == text
    assert coordinator.topics["t"].spec == TopicSpec()


def test_settings_may_reach_their_limits() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec())
    admin.update_topic(coordinator, "t", retention_days=60, sync_every=4000)
    assert coordinator.topics["t"].spec == TopicSpec(retention_days=60, sync_every=4000)


async def test_more_and_fewer_replicas() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec())
        await publish(coordinator, b"one")
        admin.update_topic(coordinator, "t", replica=3)
        await until(coordinator, "sync=n1,n2,n3")
        await publish(coordinator, b"two")
        assert [bodies(coordinator, name) for name in ("n1", "n2", "n3")] == [[b"one", b"two"]] * 3
        replicas = coordinator.replica_sets["t", 0]
        leader = replicas.state.replicas[-1]
        coordinator.elect(replicas, leader)
        admin.update_topic(coordinator, "t", replica=1)
        assert list(roles(coordinator)) == [leader]


def test_a_new_replica_is_on_the_node_with_the_fewest_partitions() -> None:
    coordinator = make_coordinator()
    for name in ("t", "u"):
        admin.create_topic(coordinator, name, TopicSpec())
    admin.update_topic(coordinator, "t", replica=2)
    assert coordinator.replica_sets["t", 0].state.replicas == ["n1", "n3"]


def test_a_topic_stays_if_its_missing_partition_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a partition were lost, and the topic is created again."""
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec())
    coordinator.topics["t"].change(partition_num=2)

    def refuse(*_: object) -> None:
        raise InvalidSetting("the disk is full")

    monkeypatch.setattr(coordinator, "open_partition", refuse)
    with pytest.raises(Refusal, match="the disk is full"):
        admin.create_topic(coordinator, "t", TopicSpec(2))
    assert list(coordinator.topics["t"].partitions) == [0]


async def test_expanding_adds_partitions() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 1))
        admin.expand_topic(coordinator, "t", 3)
        assert sorted(coordinator.topics["t"].partitions) == [0, 1, 2]
        assert {coordinator.replica_sets["t", number].state.leader for number in range(3)} == {"n1", "n2", "n3"}
        refused = (
            (2, "the partition number can not be reduced"),
            (4, "No node is available"),
            (255, "max partition allowed exceed"),
        )
        for wanted, text in refused:
            with pytest.raises(Refusal, match=text):
                admin.expand_topic(coordinator, "t", wanted)
        admin.expand_topic(coordinator, "t", 3)
        assert coordinator.topics["t"].spec.partition_num == 3
        copies = [found for node in coordinator.members.values() for found in node.node.hosted.values()]
        assert [found.meta.partition_num for found in copies] == [3, 3, 3]


def test_followers_have_registered_channels_at_once() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2, disable_channel_auto_create=True))
    for channels in (["a", "b"], ["b"]):
        admin.register_channels(coordinator, "t", channels)
        assert [sorted(hosted(coordinator, name).partition.channels) for name in roles(coordinator)] == [channels] * 2


def test_channels_are_deleted_when_a_topic_begins_to_need_registered_ones() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    coordinator.replica_sets["t", 0].leader.channel("a")
    admin.update_topic(coordinator, "t", retention_days=3)
    assert list(coordinator.replica_sets["t", 0].leader.channels) == ["a"]
    admin.update_topic(coordinator, "t", disable_channel_auto_create=True)
    assert list(coordinator.replica_sets["t", 0].leader.channels) == []


def test_new_partitions_have_the_registered_channels() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2, multi_part=True, disable_channel_auto_create=True))
    admin.register_channels(coordinator, "t", ["a", "b"])
    admin.expand_topic(coordinator, "t", 3)
    copies = [found.partition for node in coordinator.members.values() for found in node.node.hosted.values()]
    assert [sorted(copy.channels) for copy in copies] == [["a", "b"]] * 6


async def test_a_partition_moves_with_its_messages_and_positions() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec())
        before = coordinator.replica_sets["t", 0].state.leader
        hosted(coordinator, before).partition.channel("ch")
        await publish(coordinator, b"one")
        target = next(name for name in coordinator.members if name != before)
        await admin.move_partition(coordinator, "t", 0, before, target, leader=True)
        assert roles(coordinator) == {target: (True, True)}
        assert bodies(coordinator, target) == [b"one"]
        channel = hosted(coordinator, target).partition.channels["ch"]
        assert channel.stats().depth == 1
        await publish(coordinator, b"two")
        assert bodies(coordinator, target) == [b"one", b"two"]


async def test_a_replica_moves_without_the_leadership() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        await publish(coordinator, b"one")
        await admin.move_partition(coordinator, "t", 0, "n2", "n3", leader=False)
        state = coordinator.replica_sets["t", 0].state
        assert (state.leader, state.replicas, list(roles(coordinator))) == ("n1", ["n1", "n3"], ["n1", "n3"])
        assert bodies(coordinator, "n3") == [b"one"]


async def test_an_abandoned_move_removes_the_new_replica() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec())
        state = coordinator.replica_sets["t", 0].state
        before, target = state.leader, next(name for name in coordinator.members if name != state.leader)
        with anyio.move_on_after(0) as scope:
            await admin.move_partition(coordinator, "t", 0, before, target, leader=True)
        assert scope.cancelled_caught
        assert coordinator.load() == counted(coordinator)
        assert (state.replicas, state.leader, list(roles(coordinator))) == ([before], before, [before])
        await until(coordinator, "writable")


async def test_a_move_abandoned_after_catch_up_is_completed() -> None:
    async with running(4, CoordinatorOptions(join_pause=60)) as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        state = coordinator.replica_sets["t", 0].state
        before, target = state.leader, next(name for name in coordinator.members if name not in state.replicas)

        async def move() -> None:
            with scope:
                await admin.move_partition(coordinator, "t", 0, before, target, leader=True)

        scope = anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move)
            await anyio.wait_all_tasks_blocked()
            assert not state.is_writable(TopicSpec(1, 3)), "writes wait while the replica joins"
            scope.cancel()
            state.in_sync.append(target)  # like the end of copying
        assert (state.leader, len(state.replicas), before in state.replicas) == (target, 3, False)
        assert before not in roles(coordinator)


@pytest.mark.parametrize("again", [False, True])
async def test_a_move_of_a_topic_that_is_deleted_leaves_the_next_one_alone(again: bool) -> None:
    async with running(options=CoordinatorOptions(join_pause=3600)) as coordinator:  # the copy is never ready
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        refused: list[str] = []
        done = anyio.Event()

        async def move() -> None:
            with pytest.raises(Refusal) as error:
                await admin.move_partition(coordinator, "t", 0, "n2", "n3", leader=False)
            refused.append(error.value.text)
            done.set()

        async with anyio.create_task_group() as group:
            group.start_soon(move)
            await anyio.wait_all_tasks_blocked()
            admin.delete_topic(coordinator, "t")
            if again:
                admin.create_topic(coordinator, "t", TopicSpec(1, 3))
            with anyio.fail_after(25):
                await done.wait()
        assert refused == [admin.KEY_NOT_FOUND]
        assert len(roles(coordinator)) == (3 if again else 0)
        if again:
            await publish(coordinator, b"new")


async def test_a_leader_without_majority_writes_again_when_it_needs_no_other() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        coordinator.members["n2"].alive = False
        membership.silent(coordinator, coordinator.members["n2"])
        await until(coordinator, "sync=n1")
        assert roles(coordinator)["n1"] == (False, False)
        admin.update_topic(coordinator, "t", replica=1)
        assert roles(coordinator) == {"n1": (True, True)}
        await publish(coordinator, b"one")


async def test_a_deleted_topic_refuses_writes() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec())
        replicas = coordinator.replica_sets["t", 0]
        assert coordinator.writable(replicas)
        admin.delete_topic(coordinator, "t")
        assert not coordinator.writable(replicas)


async def test_refused_moves() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        state = coordinator.replica_sets["t", 0].state
        leader, follower = state.replicas
        other = next(name for name in coordinator.members if name not in state.replicas)
        cases = [
            ((leader, leader, True), "move to and from node can not be the same"),
            ((follower, other, True), "move from not the topic leader"),
            ((leader, other, False), "can not move leader without moveleader param"),
            ((other, leader, False), "the move source node has no replica for the topic"),
            ((follower, leader, False), "the move destination has the topic data already"),
            ((leader, "n9", True), "the move destination is not found in cluster"),
        ]
        for (source, target, moves), text in cases:
            with pytest.raises(Refusal) as error:
                await admin.move_partition(coordinator, "t", 0, source, target, leader=moves)
            assert error.value.text == text
        with pytest.raises(Refusal, match="Key not found"):
            await admin.move_partition(coordinator, "none", 0, leader, other, leader=True)


async def test_partitions_of_a_removed_node_are_moved() -> None:
    async with running() as coordinator:
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        leader = coordinator.replica_sets["t", 0].state.leader
        await publish(coordinator, b"one")
        await admin.remove_node(coordinator, leader)
        state = coordinator.replica_sets["t", 0].state
        assert leader not in state.replicas
        assert sorted(state.in_sync) == sorted(state.replicas)
        assert bodies(coordinator, state.leader) == [b"one"]
        admin.create_topic(coordinator, "u", TopicSpec(1, 2))
        assert leader not in coordinator.replica_sets["u", 0].state.replicas


async def test_the_load_follows_every_operation() -> None:
    async with running(4) as coordinator:
        for number in range(3):
            admin.create_topic(coordinator, f"t{number}", TopicSpec(2, 2, multi_part=True))
            assert coordinator.load() == counted(coordinator)
        admin.update_topic(coordinator, "t0", replica=3)
        assert coordinator.load() == counted(coordinator)
        await until(coordinator, "writable", "t0")
        admin.update_topic(coordinator, "t0", replica=1)
        assert coordinator.load() == counted(coordinator)
        with anyio.fail_after(25):
            while not coordinator.stable:  # noqa: ASYNC110 - stability has no event
                await anyio.sleep(0.005)
        admin.expand_topic(coordinator, "t1", 4)
        assert coordinator.load() == counted(coordinator)
        await admin.remove_node(coordinator, "n2")
        assert coordinator.load() == counted(coordinator)
        admin.delete_topic(coordinator, "t2")
        assert coordinator.load() == counted(coordinator)
        assert sum(holds for _, holds in coordinator.load().values()) == 2 + 4 * 2


def test_a_channel_is_created_on_every_partition_or_on_none() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(3, 1))
    led = coordinator.replica_sets["t", 2].state.leader
    coordinator.members[led].alive = False
    with pytest.raises(Refusal, match="partition 2 of topic t has no leader"):
        admin.create_channel(coordinator, "t", "ch", PLAIN)
    assert [list(replicas.leader.channels) for replicas in coordinator.partitions("t")] == [[], [], []]
    coordinator.members[led].alive = True
    admin.create_channel(coordinator, "t", "ch", PLAIN)
    assert [list(replicas.leader.channels) for replicas in coordinator.partitions("t")] == [["ch"]] * 3
    assert coordinator.topics["t"].registered == []
    coordinator.replica_sets["t", 2].leader.channel("other").subscribe(Consumer())
    with pytest.raises(Refusal, match="channel other of topic t is dispatched by"):
        admin.create_channel(coordinator, "t", "other", ChannelKind("key_failover"))
    assert "other" not in coordinator.replica_sets["t", 0].leader.channels


def test_a_created_channel_is_known_to_followers_at_once() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 3))
    admin.create_channel(coordinator, "t", "ch", PLAIN)
    assert [list(hosted(coordinator, name).partition.channels) for name in roles(coordinator)] == [["ch"]] * 3


def test_a_topic_is_writable_as_soon_as_a_replica_that_joins_is_removed() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    replicas = coordinator.replica_sets["t", 0]
    replicas.state.joining.add(next(name for name in replicas.state.replicas if name != replicas.state.leader))
    assert not coordinator.writable(replicas)
    admin.update_topic(coordinator, "t", replica=1)
    assert coordinator.writable(replicas)


async def test_leadership_moves_to_another_replica_and_the_old_leader_follows() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 3))
    first, second, _ = coordinator.replica_sets["t", 0].state.replicas
    await admin.move_partition(coordinator, "t", 0, first, second, leader=True)
    leads = {name: name == second for name in coordinator.members}
    assert {name: leader for name, (leader, _) in roles(coordinator).items()} == leads
    assert coordinator.load() == {name: (int(leader), 1) for name, leader in leads.items()}


async def test_nothing_is_moved_from_an_unknown_or_dead_node() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    await admin.remove_node(coordinator, "n9")
    assert len(coordinator.usable()) == 3
    coordinator.members["n1"].alive = False
    await admin.remove_node(coordinator, "n1")
    assert coordinator.replica_sets["t", 0].state.replicas == ["n1", "n2"]


def test_watchers_learn_of_new_topics_new_leaders_and_deleted_topics() -> None:
    coordinator = make_coordinator()
    changed: list[str] = []
    coordinator.watchers.append(changed.append)
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    assert set(changed) == {"t"}
    changed.clear()
    coordinator.elect(coordinator.replica_sets["t", 0], "n2")
    assert set(changed) == {"t"}
    changed.clear()
    admin.delete_topic(coordinator, "t")
    assert changed == ["t"]


def test_watchers_learn_of_changes_of_channels() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 1, disable_channel_auto_create=True))
    changed: list[str] = []
    coordinator.watchers.append(changed.append)
    admin.register_channels(coordinator, "t", ["a"])
    assert changed == ["t"]
    admin.create_channel(coordinator, "t", "b", PLAIN)
    assert (changed, coordinator.topics["t"].registered) == (["t", "t"], ["a", "b"])


def test_a_cluster_is_stable_while_every_node_is_alive_and_every_replica_in_sync() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    assert coordinator.stable
    coordinator.upgrading = True
    assert not coordinator.stable
    coordinator.upgrading = False
    for member in coordinator.members.values():
        member.alive = False
        assert not coordinator.stable
        member.alive = True
    state = coordinator.replica_sets["t", 0].state
    missing = state.in_sync.pop()
    assert not coordinator.stable
    state.in_sync.append(missing)
    assert coordinator.stable


@pytest.mark.parametrize("registers", [False, True])
def test_nodes_create_channels_unless_the_topic_registers_them(registers: bool) -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2, disable_channel_auto_create=registers))
    assert {hosted(coordinator, name).auto_create_channels for name in roles(coordinator)} == {not registers}
    admin.update_topic(coordinator, "t", disable_channel_auto_create=not registers)
    assert {hosted(coordinator, name).auto_create_channels for name in roles(coordinator)} == {registers}
