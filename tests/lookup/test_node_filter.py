"""Nodes that `node_filter` leaves out."""

from __future__ import annotations

import pytest

from nsqext import Admin, Producer
from nsqext.errors import InvalidSetting
from nsqext.lookup.metadata import NodeFilter, log_filtered
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger
from nsqext.lookup.responses import LookupAnswer, NodeInfo
from nsqext.types import Address, TopicMeta


def test_a_filter_is_a_function() -> None:
    with pytest.raises(InvalidSetting, match="node_filter='a' is not a function of host:port"):
        Producer("127.0.0.1:4161", node_filter="a")  # type: ignore[arg-type]


def test_a_filter_without_effect_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="node_filter has no effect with nsqd="):
        Producer(nsqd="127.0.0.1:1", node_filter=bool)
    with pytest.raises(InvalidSetting, match="node_filter has no effect in Admin"):
        Admin("127.0.0.1:4161", node_filter=bool)


def test_a_filter_that_raises_keeps_the_node_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    admits = NodeFilter(lambda node: {"a:1": False}[node])
    assert [admits(Address("a", 1)), admits(Address("b", 1)), admits(Address("b", 1))] == [False, True, True]
    assert [record.getMessage() for record in caplog.records] == ["node_filter raised for b:1; the node is used"]


def answer(*leaders: Address, nodes: tuple[Address, ...] = ()) -> LookupAnswer:
    meta = TopicMeta(partition_num=len(leaders)) if leaders else None
    partitions = {number: NodeInfo(leader) for number, leader in enumerate(leaders)}
    return LookupAnswer(Address("lookup", 4161), 1, meta, partitions, tuple(map(NodeInfo, nodes)))


A, B, C = (Address(name, 4150) for name in "abc")


def test_a_map_has_the_nodes_that_the_filter_keeps() -> None:
    kept = {A}
    merger = PartitionMapMerger("orders", admits=kept.__contains__)
    merger.merge([answer(A, B, A)])
    view = merger.current
    assert (view.leaders, view.filtered) == ({0: A, 2: A}, ((1, B),))
    assert view.complete  # lookup is not asked again early
    kept.add(B)
    merger.merge([answer(A, B, A)])
    assert (merger.current.leaders, merger.current.filtered) == ({0: A, 1: B, 2: A}, ())
    assert merger.current.version > view.version


def test_nodes_without_partitions_are_filtered_too() -> None:
    merger = PartitionMapMerger("orders", admits={A}.__contains__)
    merger.merge([answer(nodes=(B, A, C))])
    assert (merger.current.nodes, merger.current.filtered) == ((A,), ((None, B), (None, C)))


def test_the_log_names_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log_filtered(PartitionMap("orders", "r", filtered=((0, B), (None, C))))
    assert [record.getMessage() for record in caplog.records] == [
        "orders: not consumed from because of node_filter: partition 0 at b:4150, c:4150"
    ]


def test_a_filtered_node_without_partitions_is_no_leader() -> None:
    view = PartitionMap("orders", meta=TopicMeta(partition_num=2), leaders={0: A}, filtered=((None, C),))
    assert set(view.led) == {0}
    assert not view.complete
    assert PartitionMap("orders", meta=TopicMeta(partition_num=2), leaders={0: A}, filtered=((1, C),)).complete
