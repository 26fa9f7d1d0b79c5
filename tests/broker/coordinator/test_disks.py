"""Copies on disk: a copy that joins has all records, and a failing disk affects only its own copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from attrs import evolve

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage, stored_partitions
from nsqext.broker.engine.storage.segments import DiskOptions
from tests.support.coordinators import bodies, hosted, publish, running, until
from tests.support.engine_partition import Consumer

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.engine.partition import Partition

pytestmark = pytest.mark.anyio

NO_RETENTION = DiskOptions(retention_bytes=0, max_file_bytes=5000)


def on_disk(coordinator: Coordinator, path: Path, **options: object) -> None:
    """Make every node store its partitions in a folder."""
    for member in coordinator.members.values():
        member.node.options = evolve(member.node.options, data_path=path / member.name, **options)  # type: ignore[arg-type]


def break_disk(monkeypatch: pytest.MonkeyPatch, partition: Partition) -> None:
    """Make the disk of a copy refuse records until the end of the test or of the patch."""

    def refuse(*_: object) -> None:
        raise Refusal("No space left on device")

    monkeypatch.setattr(partition.log._store, "append", refuse)


async def test_a_joining_replica_keeps_unread_messages_of_channels(tmp_path: Path) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path, memory_bound=50_000, disk=NO_RETENTION)
        admin.create_topic(coordinator, "t", TopicSpec())
        hosted(coordinator, "n1").partition.channel("ch")
        sent = [b"%d" % number for number in range(2500)]
        for body in sent:
            await publish(coordinator, body)
        await admin.move_partition(coordinator, "t", 0, "n1", "n2", leader=True)
        assert bodies(coordinator, "n2") == sent
        assert hosted(coordinator, "n2").partition.channels["ch"].acked.count == 0


async def test_a_replica_saves_its_channels_at_once(tmp_path: Path) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        node = coordinator.members["n1"].node
        node.on_channel_created = coordinator.channels_changed
        node.channel(hosted(coordinator, "n1"), "ch")
        for name in ("n1", "n2"):
            (kept,) = stored_partitions(tmp_path / name)
            assert [(channel.name, channel.count) for channel in kept.channels] == [("ch", 0)]


async def test_a_node_without_a_replica_has_no_files_of_it_and_gets_all_of_it_again(tmp_path: Path) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        hosted(coordinator, "n1").partition.channel("ch")
        await publish(coordinator, b"one")
        replicas = coordinator.replica_sets["t", 0]
        coordinator.mirror(replicas)
        admin.update_topic(coordinator, "t", replica=1)
        assert (list(replicas.hosts), list(stored_partitions(tmp_path / "n2"))) == (["n1"], [])
        admin.update_topic(coordinator, "t", replica=2)
        await until(coordinator, "sync=n1,n2")
        coordinator.mirror(replicas)
        assert (bodies(coordinator, "n2"), list(hosted(coordinator, "n2").partition.channels)) == ([b"one"], ["ch"])


@pytest.mark.parametrize("disk", [True, False])
async def test_a_replica_removes_what_its_leader_removed(tmp_path: Path, disk: bool) -> None:
    async with running() as coordinator:
        if disk:
            on_disk(coordinator, tmp_path, memory_bound=50_000, disk=NO_RETENTION)
        else:
            for member in coordinator.members.values():
                member.node.options = evolve(member.node.options, memory_bound=50_000)
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        leader, follower = hosted(coordinator, "n1").partition, hosted(coordinator, "n2").partition
        for _ in range(500):  # no channel needs them
            await publish(coordinator, b"x")
            follower.tick()
            leader.tick()
        assert leader.log.start_offset > 0
        assert 0 < follower.log.start_offset <= leader.log.start_offset
        assert follower.log.held < 60_000


async def test_a_full_disk_of_a_follower_only_refuses_the_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        await publish(coordinator, b"one")
        with monkeypatch.context() as patch:
            break_disk(patch, hosted(coordinator, "n2").partition)
            with pytest.raises(Refusal, match="No space left"):
                await publish(coordinator, b"two")
            assert hosted(coordinator, "n1").partition.readable == 1
            coordinator.commit_when_replicated(coordinator.replica_sets["t", 0])
        await publish(coordinator, b"three")
        assert [bodies(coordinator, name) for name in ("n1", "n2", "n3")] == [[b"one", b"two", b"three"]] * 3
        assert hosted(coordinator, "n1").partition.readable == 3


async def test_a_new_leader_delivers_what_every_replica_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the follower led next, messages that it could not write would be lost after they were delivered."""
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        await publish(coordinator, b"one")
        with monkeypatch.context() as patch:
            break_disk(patch, hosted(coordinator, "n3").partition)
            with pytest.raises(Refusal, match="No space left"):
                await publish(coordinator, b"two")
            member = coordinator.members["n1"]
            member.alive = False
            membership.silent(coordinator, member)
            await until(coordinator, "sync=n2,n3")
            leader = hosted(coordinator, "n2").partition
            assert (bodies(coordinator, "n2"), leader.readable) == ([b"one", b"two"], 1)
        coordinator.commit_when_replicated(coordinator.replica_sets["t", 0])
        assert leader.readable == 2


async def test_a_replica_with_a_full_disk_joins_when_space_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqext.broker.coordinator.coordinator._RETRY", 0.01)
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        member = coordinator.members["n2"]
        member.alive = False
        membership.silent(coordinator, member)
        await until(coordinator, "sync=n1,n3")
        await publish(coordinator, b"one")
        with monkeypatch.context() as patch:
            break_disk(patch, hosted(coordinator, "n2").partition)
            membership.returned(coordinator, member)
            while caplog.text.count("n2 cannot catch up: No space left") < 3:  # noqa: ASYNC110 - a log has no event
                await anyio.sleep(0.001)
            await publish(coordinator, b"two")  # a publish in between
        await until(coordinator, "sync=n1,n2,n3")
        assert bodies(coordinator, "n2") == [b"one", b"two"]


async def test_a_disk_that_is_full_at_the_last_step_of_a_catch_up_does_not_hold_up_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.broker.coordinator.coordinator._RETRY", 3600)
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        state, member = coordinator.replica_sets["t", 0].state, coordinator.members["n2"]
        member.alive = False
        membership.silent(coordinator, member)
        await until(coordinator, "sync=n1,n3")
        membership.returned(coordinator, member)
        while not state.joining:
            await coordinator.replica_sets["t", 0].changes.wait()
        hosted(coordinator, state.leader).partition.put([NewMessage(b"one")])
        break_disk(monkeypatch, hosted(coordinator, "n2").partition)
        await until(coordinator, "writable")
        assert sorted(state.in_sync) == ["n1", "n3"]


async def test_a_topic_that_cannot_be_written_does_not_exist(tmp_path: Path) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        (tmp_path / "n2").write_text("no folder")
        with pytest.raises(Refusal, match="cannot be used"):
            admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        assert (coordinator.topics, coordinator.replica_sets) == ({}, {})
        assert [member.node.hosted for member in coordinator.members.values()] == [{}, {}, {}]
        (tmp_path / "n2").unlink()
        admin.create_topic(coordinator, "t", TopicSpec(1, 3))
        await publish(coordinator, b"one")


async def test_a_partition_that_a_full_disk_refuses_is_not_moved(tmp_path: Path) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        spec = TopicSpec(1, 2, multi_part=True)
        admin.create_topic(coordinator, "t", spec)
        (tmp_path / "n3").write_text("no folder")
        state = coordinator.replica_sets["t", 0].state
        with pytest.raises(Refusal, match="cannot be used"):
            await admin.move_partition(coordinator, "t", 0, "n2", "n3", leader=False)
        with pytest.raises(Refusal, match="cannot be used"):
            admin.update_topic(coordinator, "t", replica=3)
        assert coordinator.topics["t"].spec == spec
        with pytest.raises(Refusal, match="cannot be used"):
            admin.expand_topic(coordinator, "t", 2)
        admin.update_topic(coordinator, "t", replica=2)  # no other node is tried
        assert (state.replicas, state.in_sync, coordinator.topics["t"].spec) == (["n1", "n2"], ["n1", "n2"], spec)
        await publish(coordinator, b"one")


async def test_the_delayed_queue_moves_to_a_leader_whose_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as coordinator:
        on_disk(coordinator, tmp_path)
        admin.create_topic(coordinator, "t", TopicSpec(1, 2))
        channel = hosted(coordinator, "n1").partition.channel("ch")
        await publish(coordinator, b"one")
        consumer = Consumer()
        channel.subscribe(consumer)
        channel.set_ready(consumer, 1)
        channel.requeue(consumer, consumer.take()[0].internal_id, 1000)

        def refuse(*_: object) -> None:
            raise Refusal("No space left on device")

        monkeypatch.setattr("nsqext.broker.engine.storage.delayed_queue.DelayedJournal.put", refuse)
        await admin.move_partition(coordinator, "t", 0, "n1", "n2", leader=True)
        assert len(hosted(coordinator, "n2").partition.channels["ch"].cursor.delayed.messages) == 1
