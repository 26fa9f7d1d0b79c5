"""A node's answer to ``/coordinator/stats``."""

from __future__ import annotations

import pytest

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.runtimes import coordinator_stats
from tests.support.coordinators import make_coordinator


@pytest.mark.anyio
async def test_a_node_lists_its_partitions_of_a_topic() -> None:
    coordinator = make_coordinator()
    admin.create_topic(coordinator, "t", TopicSpec(partition_num=4, replica=2, ordered=True))
    state = coordinator.replica_sets["t", 0].state
    behind = next(name for name in state.replicas if name != state.leader)
    state.in_sync.remove(behind)
    held = [replicas.partition for replicas in coordinator.replica_sets_on(behind)]
    expected = coordinator_stats(coordinator, behind, "t", -1)["topic_coord_stats"]
    assert [entry["partition"] for entry in expected] == held
    ids = {name: member.distributed_id for name, member in coordinator.members.items()}
    (first,) = coordinator_stats(coordinator, behind, "t", 0)["topic_coord_stats"]
    assert first["isr_stats"] == [{"hostname": "", "node_id": ids[state.leader]}]
    assert first["catchup_stats"] == [{"hostname": "", "node_id": ids[behind], "progress": 0}]
    assert coordinator_stats(coordinator, behind, "", -1)["topic_coord_stats"] == []
    assert coordinator_stats(coordinator, behind, "t", 9)["topic_coord_stats"] == []
