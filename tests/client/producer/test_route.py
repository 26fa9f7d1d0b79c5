"""Routes: round robin, avoided targets, keys and chosen partitions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nsqext.client.events import ClientEvents
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.route import Route, Target
from nsqext.errors import ConnectionFailed, InvalidPartition, InvalidSetting, PartitionUnavailable
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.client.commands import LARGE, LargeCommand
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address, TopicMeta
from tests.support.clock import replace_clock

if TYPE_CHECKING:
    from nsqext.transport.connection import Connection


def _node(number: int) -> Address:
    return Address("n", number)


def _route(
    leaders: dict[int, int],
    num: int = 0,
    *,
    nodes: tuple[int, ...] = (),
    unlisted: frozenset[int] = frozenset(),
    filtered: dict[int, int] | None = None,
    fixed: bool = False,
    previous: Route | None = None,
) -> Route:
    view = PartitionMap(
        "t",
        meta=TopicMeta(partition_num=num or len(leaders)),
        leaders={partition: _node(node) for partition, node in leaders.items()},
        nodes=tuple(map(_node, nodes)),
        unlisted=unlisted,
        filtered=tuple((partition, _node(node)) for partition, node in (filtered or {}).items()),
        given=fixed,
    )
    return Route("t", view, ConnectionPool(ConnectionOptions(), ClientEvents()), previous)


def test_targets_are_used_in_turn_and_a_new_route_continues() -> None:
    route = _route({0: 1, 1: 2, 2: 1})
    partitions = [route.any().partition for _ in range(6)]
    assert {*partitions[:3]} == {0, 1, 2}
    assert partitions[:3] == partitions[3:]
    after = _route({0: 1, 1: 2, 2: 1}, previous=route)
    assert after.any().partition == partitions[0]


def test_a_target_that_was_not_used_is_the_next_one() -> None:
    route = _route({0: 1, 1: 2, 2: 1})
    first = route.next()
    route.give_back()
    assert route.next() is first


def test_another_partition_of_the_node_is_tried_next() -> None:
    route = _route({0: 1, 1: 1, 2: 1})
    for _ in range(3):
        tried: list[Target] = []
        for _ in range(3):
            tried.append(route.any(tried))
        assert {target.partition for target in tried} == {0, 1, 2}


def test_a_partition_that_was_tried_is_tried_again_after_the_others_of_its_node() -> None:
    route = _route({0: 1, 1: 1, 2: 1})
    for partition in range(3):
        found = {route.any([route.at(partition)]).partition for _ in range(6)}
        assert found == {0, 1, 2} - {partition}


@pytest.mark.parametrize("least_pending", [False, True])
def test_requests_that_are_pending_matter_where_that_is_chosen(least_pending: bool) -> None:
    leaders = {0: _node(1), 1: _node(2)}
    view = PartitionMap("t", meta=TopicMeta(partition_num=2), leaders=leaders)
    pool = ConnectionPool(ConnectionOptions(), ClientEvents())
    route = Route("t", view, pool, least_pending=least_pending)
    route.at(0).node.connection = cast("Connection", SimpleNamespace(in_flight=5))
    assert {route.next().partition for _ in range(4)} == ({1} if least_pending else {0, 1})


@pytest.fixture
def seeded() -> Iterator[None]:
    before = random.getstate()
    random.seed("first partition")
    yield
    random.setstate(before)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("nodes", [(), (1, 2, 3, 4)], ids=["partitions", "nodes"])
def test_producers_that_publish_once_share_the_partitions(nodes: tuple[int, ...]) -> None:
    leaders = {} if nodes else {0: 1, 1: 2, 2: 3, 3: 4}
    first = Counter(_route(leaders, nodes=nodes).any().node.address.port for _ in range(400))
    assert sorted(first) == [1, 2, 3, 4]
    assert min(first.values()) > 60


def test_a_retry_uses_a_partition_on_another_node_if_one_exists() -> None:
    route = _route({0: 1, 1: 1, 2: 2, 3: 1})
    first = route.at(0)
    assert route.any([first]).partition == 2
    assert route.any([first, route.at(2)]).partition in (1, 3)
    assert route.untried([first])
    assert not route.untried([route.at(partition) for partition in range(4)])
    assert _route({0: 1}).any([_route({0: 1}).at(0)]).partition == 0


def test_another_partition_of_the_node_is_tried_before_a_node_that_cannot_be_reached() -> None:
    route = _route({0: 1, 1: 1, 2: 2})
    targets = {target.partition: target for target in route.targets}
    targets[2].node.rest_until = float("inf")
    assert [route.any([targets[1]]).partition for _ in range(3)] == [0, 0, 0]
    assert [route.any([targets[0]]).partition for _ in range(3)] == [1, 1, 1]


def test_a_target_that_refused_is_avoided_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    replace_clock(monkeypatch, lambda: now)
    route = _route({0: 1, 1: 2})
    route.at(0).refused()
    assert {route.any().partition for _ in range(6)} == {1}
    assert route.at(0).rest_until == 100.5
    now = 101.0
    assert {route.any().partition for _ in range(6)} == {0, 1}
    assert route.partitions[0].rest_until == 0.0
    route.at(0).refused()
    now = 102.0
    assert route.at(0).rest_until == 0.0


def test_a_node_that_cannot_be_reached_is_avoided() -> None:
    route = _route({0: 1, 1: 2})
    route.at(1).node.failed(ConnectionFailed("refused"))
    assert {route.any().partition for _ in range(6)} == {0}


def test_partitions_not_listed_are_skipped_unless_there_are_no_others() -> None:
    route = _route({0: 1, 1: 2}, unlisted=frozenset({1}))
    assert {route.any().partition for _ in range(4)} == {0}
    assert route.at(1).partition == 1
    assert {target.partition for target in route.all_targets()} == {0, 1}
    every = _route({0: 1, 1: 2}, unlisted=frozenset({0, 1}))
    assert {every.any().partition for _ in range(4)} == {0, 1}


def test_nodes_without_partitions() -> None:
    route = _route({}, nodes=(1, 2))
    assert {str(route.any().node.address) for _ in range(4)} == {"n:1", "n:2"}
    target = route.any()
    assert (target.partition, target.receipt.partition) == (None, None)
    assert target.line("PUB") == b"PUB t\n"
    assert str(route.any([target]).node.address) != str(target.node.address)
    with pytest.raises(InvalidPartition, match="not known"):
        route.at(0)
    with pytest.raises(InvalidPartition, match="number of partitions"):
        route.partition_of(b"k", lambda key, count: 0)
    with pytest.raises(InvalidSetting, match=r"number of partitions.*lookupd="):
        _route({}, nodes=(1, 2), fixed=True).partition_of(b"k", lambda key, count: 0)


def test_lines_name_topic_and_partition() -> None:
    target = _route({3: 1}, 4).at(3)
    assert target.line("MPUB") == b"MPUB t 3\n"
    assert target.pub(b"xy") == b"PUB t 3\n\0\0\0\2xy"
    large = target.pub(b"x" * LARGE)
    assert isinstance(large, LargeCommand)
    assert bytes(large) == b"PUB t 3\n" + LARGE.to_bytes(4, "big") + b"x" * LARGE
    assert target.receipt.node == "n:1"


def test_a_partition_without_leader_exists() -> None:
    route = _route({0: 1}, 2)
    with pytest.raises(PartitionUnavailable):
        route.at(1)
    with pytest.raises(InvalidPartition, match="the last is 1"):
        route.at(2)
    with pytest.raises(PartitionUnavailable):
        _route({}, 2).any()
    with pytest.raises(PartitionUnavailable):
        _route({}, 1).at(0)


def test_keys_choose_among_all_partitions() -> None:
    route = _route({0: 1}, 4)
    assert route.partition_of(b"k", lambda key, count: len(key) % count) == 1
    with pytest.raises(InvalidPartition, match="gave partition 4"):
        route.partition_of(b"k", lambda key, count: count)


def test_keys_use_added_partitions_once_all_of_them_have_a_leader() -> None:
    def last(_key: bytes, count: int) -> int:
        return count - 1

    found = [_route({0: 1})]
    for leaders, num in [({0: 1}, 3), ({0: 1, 2: 1}, 3), ({0: 1, 1: 2, 2: 1}, 3), ({0: 1, 2: 1}, 3), ({0: 1}, 2)]:
        found.append(_route(leaders, num, previous=found[-1]))
    assert [route.partition_of(b"k", last) for route in found] == [0, 0, 0, 2, 2, 1]


def test_an_added_partition_whose_leader_is_filtered_has_one() -> None:
    before = _route({0: 1})
    after = _route({0: 1}, num=2, filtered={1: 2}, previous=before)
    assert after.partition_of(b"k", lambda key, count: count - 1) == 1, "another producer would choose it"
    with pytest.raises(InvalidSetting, match="node_filter leaves out the leader"):
        after.at(1)
