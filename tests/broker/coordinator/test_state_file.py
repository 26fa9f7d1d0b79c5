"""The coordinator's file: what it does not accept is kept aside, and nothing of it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from anyio.lowlevel import checkpoint

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import state_file as module
from nsqext.broker.coordinator.state_file import StateFile
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.storage.files import with_checksum, without_checksum
from nsqext.broker.engine.storage.partition_store import NewMessage
from tests.support.coordinators import make_coordinator
from tests.support.engine_partition import Consumer
from tests.support.sleeps import replace_sleep

Change = Callable[[dict[str, Any], dict[str, Any]], object]

WRONG: dict[str, Change] = {
    "no number": lambda topic, _: topic["partitions"].update(x=topic["partitions"].pop("1")),
    "a sign": lambda topic, _: topic["partitions"].update({"-1": topic["partitions"].pop("1")}),
    "a partition too many": lambda topic, _: topic["partitions"].update({"2": topic["partitions"].pop("1")}),
    "more partitions than allowed": lambda topic, _: topic["spec"].update(partition_num=256),
    "a negative setting": lambda topic, _: topic["spec"].update(retention_days=-1),
    "a setting of another type": lambda topic, _: topic["spec"].update(extend=1),
    "channels that are no list": lambda topic, _: topic.update(registered="ch"),
    "a channel without a valid name": lambda topic, _: topic.update(registered=["ch", "a b"]),
    "a leader that is no text": lambda _, partition: partition.update(leader=1),
    "replicas twice": lambda _, partition: partition.update(replicas=["n1", "n1"]),
    "in sync, but no replica": lambda _, partition: partition.update(in_sync=["n1", "n2", "n3"]),
    "an epoch of another type": lambda _, partition: partition.update(epoch="1"),
    "no epoch": lambda _, partition: partition.pop("epoch"),
}


def saved(path: Path) -> dict[str, Any]:
    """Save a topic with two partitions; return the document."""
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(2, 2, multi_part=True, disable_channel_auto_create=True))
    admin.register_channels(coordinator, "t", ["ch"])
    StateFile(coordinator, path).save_all()
    found: dict[str, Any] = orjson.loads(without_checksum(path.read_bytes()))
    return found


def test_topics_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    document = saved(path)
    coordinator = make_coordinator()
    StateFile(coordinator, path).load()
    assert coordinator.topics["t"].registered == ["ch"]
    assert coordinator.topics["t"].spec == TopicSpec(2, 2, multi_part=True, disable_channel_auto_create=True)
    kept = document["topics"]["t"]["partitions"]
    assert {str(number): state.leader for number, state in coordinator.topics["t"].partitions.items()} == {
        number: one["leader"] for number, one in kept.items()
    }
    assert [state.epoch for state in coordinator.topics["t"].partitions.values()] == [2, 2], "each start is a new term"
    assert [list(coordinator.replica_sets["t", number].leader.channels) for number in (0, 1)] == [["ch"], ["ch"]]


def test_a_cluster_of_fewer_nodes_keeps_the_replicas_of_its_nodes(tmp_path: Path) -> None:
    kept = saved(tmp_path / "state")["topics"]["t"]["partitions"]
    coordinator = make_coordinator(2)
    StateFile(coordinator, tmp_path / "state").load()
    assert {number: set(state.replicas) for number, state in coordinator.topics["t"].partitions.items()} == {
        int(number): {*one["replicas"]} - {"n3"} for number, one in kept.items()
    }


def test_a_deleted_topic_leaves_the_file_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "state"
    coordinator = make_coordinator()
    state = StateFile(coordinator, path)
    for name in ("t", "u"):
        admin.create_topic(coordinator, name, TopicSpec(1, 1))
    state.save_all()
    admin.delete_topic(coordinator, "t")
    state.save("t")
    assert list(orjson.loads(without_checksum(path.read_bytes()))["topics"]) == ["u"]


def test_elections_continue_their_count_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state"
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(1, 2))
    replicas = coordinator.replica_sets["t", 0]
    for name in (*replicas.state.replicas, *replicas.state.replicas):
        coordinator.elect(replicas, name)
    StateFile(coordinator, path).save_all()
    again = make_coordinator()
    StateFile(again, path).load()
    assert (replicas.state.epoch, again.replica_sets["t", 0].state.epoch) == (5, 6)


def test_a_rebuilt_topic_has_as_many_replicas_as_the_partition_with_the_most(tmp_path: Path) -> None:
    before = make_coordinator(folder=tmp_path)
    admin.create_topic(before, "t", TopicSpec(3, 2, multi_part=True))
    lost = before.replica_sets["t", 0].state.replicas[1]
    for member in before.members.values():
        for number in range(3):
            member.node.unhost("t", number, destroy=member.name == lost and number == 0)
    after = make_coordinator(folder=tmp_path)
    StateFile(after, tmp_path / "state").load()
    assert (after.topics["t"].spec.partition_num, after.topics["t"].spec.replica) == (3, 2)


def test_the_replica_that_knows_most_of_what_consumers_finished_leads_a_rebuilt_partition(tmp_path: Path) -> None:
    before = make_coordinator(folder=tmp_path)
    admin.create_topic(before, "t", TopicSpec(1, 2))
    replicas = before.replica_sets["t", 0]
    leader = replicas.state.replicas[1]
    before.elect(replicas, leader)
    channel, consumer = replicas.leader.channel("ch"), Consumer()
    before.mirror(replicas)
    channel.subscribe(consumer)
    channel.set_ready(consumer, 1)
    stored = replicas.leader.put([NewMessage(b"one")])
    assert replicas.push(stored)
    replicas.leader.commit(stored)
    channel.finish(consumer, stored.message_id)
    for member in before.members.values():
        member.node.unhost("t", 0)
    after = make_coordinator(folder=tmp_path)
    StateFile(after, tmp_path / "state").load()
    assert after.replica_sets["t", 0].state.leader == leader


@pytest.mark.parametrize("wrong", WRONG)
def test_a_document_with_an_invalid_member_is_kept_aside(
    tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    document = saved(path)
    topic = document["topics"]["t"]
    WRONG[wrong](topic, next(iter(topic["partitions"].values())))
    damaged = with_checksum(orjson.dumps(document))
    path.write_bytes(damaged)
    coordinator = make_coordinator()
    StateFile(coordinator, path).load()
    assert (coordinator.topics, coordinator.replica_sets) == ({}, {})
    assert [kept.read_bytes() for kept in tmp_path.iterdir()] == [damaged]
    assert not path.exists()
    assert "is damaged" in caplog.text


@pytest.mark.anyio
async def test_a_write_is_repeated_only_after_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, turns = tmp_path / "state", 0

    async def turn(_: float) -> None:
        nonlocal turns
        turns += 1
        await checkpoint()

    async def turn_three_times() -> None:
        wanted = turns + 3
        while turns < wanted:
            await checkpoint()

    replace_sleep(monkeypatch, turn)
    saved(path)
    before = path.read_bytes()
    coordinator = make_coordinator()
    state = StateFile(coordinator, path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(state.run)
        await turn_three_times()
        assert path.read_bytes() == before, "nothing was saved so far"
        state.load()
        admin.delete_topic(coordinator, "t")
        with monkeypatch.context() as patch:
            patch.setattr(module, "write_atomically", _fail)
            state.save("t")
            await turn_three_times()
            assert path.read_bytes() == before
        await turn_three_times()
        assert orjson.loads(without_checksum(path.read_bytes())) == {"topics": {}}
        tasks.cancel_scope.cancel()


def _fail(*_: object, sync: bool) -> None:
    raise OSError(28, "No space left on device")
