"""Nodes that `node_filter` leaves out."""

from __future__ import annotations

import pytest

from nsqext import Admin, Producer
from nsqext.errors import InvalidSetting
from nsqext.lookup.metadata import MetadataCache, NodeFilter
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.partition_map import PartitionMap, PartitionMapMerger
from nsqext.lookup.responses import LookupAnswer, NodeInfo
from nsqext.types import Address, TopicMeta
from tests.support.fake_lookupd import LookupNodes, lookup_json


def test_a_filter_is_a_function() -> None:
    with pytest.raises(InvalidSetting, match="node_filter='a' is not a function of host:port"):
        Producer("127.0.0.1:4161", node_filter="a")  # type: ignore[arg-type]

    async def keep(node: str) -> bool:
        return bool(node)

    with pytest.raises(InvalidSetting, match=r"node_filter.* is a coroutine function"):
        Producer("127.0.0.1:4161", node_filter=keep)  # type: ignore[arg-type]


def test_a_filter_without_effect_is_refused() -> None:
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


@pytest.mark.anyio
async def test_what_is_left_out_is_logged_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    nodes, kept = LookupNodes(), {"a:4150"}
    nodes.lists("l:4161", "l:4161")
    options = LookupOptions(node_filter=kept.__contains__, max_pause=0.0)
    cache = MetadataCache("l:4161", options=options, transport=nodes.transport)
    for extend in (False, False, True):  # the topic is upgraded, which changes its map
        nodes.finds("l:4161", lookup_json({0: "b:4150"}, nodes=("a:4150", "c:4150"), num=1, extend=extend))
        await cache.refresh("orders", "r")
    kept.add("c:4150")
    await cache.refresh("orders", "r")
    assert [record.getMessage() for record in caplog.records] == [
        f"orders: not consumed from because of node_filter: partition 0 at b:4150{others}"
        for others in (", c:4150", "")
    ]
    await cache.aclose()


def test_a_filtered_node_without_partitions_is_no_leader() -> None:
    view = PartitionMap("orders", meta=TopicMeta(partition_num=2), leaders={0: A}, filtered=((None, C),))
    assert set(view.led) == {0}
    assert not view.complete
    assert PartitionMap("orders", meta=TopicMeta(partition_num=2), leaders={0: A}, filtered=((1, C),)).complete
