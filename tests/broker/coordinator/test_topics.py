"""Placement, elections and majorities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.coordinator.topics import CoordinatedPartition, TopicSpec

IDLE = {"n1": (0, 0), "n2": (0, 0), "n3": (0, 0)}


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        (TopicSpec(3, 1), True),
        (TopicSpec(4, 1), False),
        (TopicSpec(1, 3), True),
        (TopicSpec(2, 2), False),
        (TopicSpec(1, 4), False),
        (TopicSpec(4, 1, ordered=True), True),
        (TopicSpec(8, 3, multi_part=True), True),
        (TopicSpec(1, 4, multi_part=True), False),
    ],
)
def test_which_topics_fit_on_three_nodes(spec: TopicSpec, fits: bool) -> None:
    assert (spec.place(IDLE, {}) is not None) is fits


def test_the_node_that_leads_and_holds_the_fewest_partitions_is_chosen() -> None:
    assert TopicSpec().place({"n1": (3, 3), "n2": (0, 5), "n3": (0, 1)}, {}) == {0: ["n3"]}
    assert TopicSpec().place({"n1": (3, 3), "n2": (0, 5), "n3": (1, 1)}, {}) == {0: ["n2"]}


def test_expanding_keeps_placed_partitions() -> None:
    existing = {0: CoordinatedPartition("n1", ["n1"], ["n1"])}
    assert TopicSpec(2).place(IDLE, existing) == {1: ["n2"]}


@given(
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 5),
    st.booleans(),
)
def test_placement_is_complete_and_even(nodes: int, partitions: int, replicas: int, shares: bool) -> None:
    spec = TopicSpec(partitions, replicas, multi_part=shares)
    placed = spec.place({f"n{number}": (0, 0) for number in range(nodes)}, {})
    assert (placed is not None) == (nodes >= spec.nodes_needed())
    if placed is None:
        return
    assert sorted(placed) == list(range(partitions))
    assert all(len(set(chosen)) == replicas for chosen in placed.values())
    held = [sum(f"n{number}" in chosen for chosen in placed.values()) for number in range(nodes)]
    assert max(held) - min(held) <= 1


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))
def test_an_expanded_placement_stays_even(nodes: int, before: int, more: int, replicas: int) -> None:
    load = {f"n{number}": (0, 0) for number in range(max(nodes, replicas))}
    placed = TopicSpec(before, replicas, multi_part=True).place(load, {})
    assert placed is not None
    existing = {number: CoordinatedPartition(chosen[0], chosen, chosen) for number, chosen in placed.items()}
    added = TopicSpec(before + more, replicas, multi_part=True).place(load, existing)
    assert added is not None
    assert sorted(added) == list(range(before, before + more))
    every = [*placed.values(), *added.values()]
    held = [sum(node in chosen for chosen in every) for node in load]
    assert max(held) - min(held) <= 1


def test_new_partitions_are_placed_on_new_nodes_until_all_hold_as_many() -> None:
    existing = {number: CoordinatedPartition("n1", ["n1"], ["n1"]) for number in range(3)}
    added = TopicSpec(10, multi_part=True).place({"n1": (3, 3), "n2": (0, 0)}, existing)
    assert added is not None
    assert [chosen[0] for chosen in added.values()] == ["n2", "n2", "n2", "n1", "n2", "n1", "n2"]


def test_nodes_with_all_replicas_lead_in_turns_until_each_leads_as_many_partitions() -> None:
    placed = TopicSpec(4, 2, multi_part=True).place({"n1": (2, 2), "n2": (0, 2)}, {})
    assert placed is not None
    assert [chosen[0] for chosen in placed.values()] == ["n2", "n2", "n1", "n2"]


def test_of_nodes_with_as_many_partitions_of_a_topic_the_one_with_fewer_of_others_is_chosen() -> None:
    existing = {0: CoordinatedPartition("n1", ["n1"], ["n1"])}
    load = {"n1": (1, 1), "n2": (1, 1)}  # n1 holds nothing else, n2 has a partition of another topic
    added = TopicSpec(3, multi_part=True).place(load, existing)
    assert added == {1: ["n2"], 2: ["n1"]}


def test_only_a_node_in_sync_is_elected() -> None:
    state = CoordinatedPartition("n1", ["n1", "n2", "n3"], ["n1", "n3"])
    assert state.candidate({"n1", "n2", "n3"}) == "n1"
    assert state.candidate({"n2", "n3"}) == "n3"
    assert CoordinatedPartition("n3", ["n1", "n3"], ["n1", "n3"]).candidate({"n1", "n3"}) == "n3", "the leader remains"
    assert state.candidate({"n2"}) is None


def test_an_election_raises_the_epoch_and_drops_the_absent() -> None:
    state = CoordinatedPartition("n1", ["n1", "n2", "n3"], ["n1", "n2", "n3"], resigned=True, joining={"n2"})
    state.promote("n3", {"n2", "n3"})
    assert (state.leader, state.epoch, state.in_sync, state.resigned, state.joining) == (
        "n3",
        2,
        ["n3", "n2"],
        False,
        set(),
    )


@pytest.mark.parametrize(("replica", "in_sync", "open_"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 2, True)])
def test_writes_need_more_than_half_of_the_replicas(replica: int, in_sync: int, open_: bool) -> None:
    names = ["n1", "n2", "n3"]
    state = CoordinatedPartition("n1", names[:replica], names[:in_sync])
    assert state.is_writable(TopicSpec(1, replica)) is open_


def test_a_leader_without_majority_resigns() -> None:
    three = CoordinatedPartition("n1", ["n1", "n2", "n3"], ["n1", "n2", "n3"])
    three.drop_from_in_sync("n2", TopicSpec(1, 3))
    assert (three.in_sync, three.resigned) == (["n1", "n3"], False)
    three.drop_from_in_sync("n3", TopicSpec(1, 3))
    assert (three.in_sync, three.resigned) == (["n1"], True)
    assert not three.is_writable(TopicSpec(1, 3))


def test_a_joining_replica_that_is_dropped_does_not_hold_up_writes() -> None:
    state = CoordinatedPartition("n1", ["n1", "n2", "n3"], ["n1", "n2"], joining={"n3"})
    state.drop_from_in_sync("n3", TopicSpec(1, 3))
    assert (state.in_sync, state.resigned, state.joining) == (["n1", "n2"], False, set())
    assert state.is_writable(TopicSpec(1, 3))


def test_writes_wait_while_a_replica_joins() -> None:
    state = CoordinatedPartition("n1", ["n1", "n2"], ["n1", "n2"], joining={"n3"})
    assert not state.is_writable(TopicSpec(1, 2))
