"""Which lookup nodes and nodes get a change, and what is repeated, on mocked lookup nodes and nodes."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from nsqext.errors import InvalidInput, LookupFailed, PartitionUnavailable
from nsqext.protocol.record import COUNTER_BITS
from tests.support.admin_requests import OK, ORDERS, admin_of, find_by_all, requests_to
from tests.support.fake_lookupd import LookupNodes, lookup_json, not_found

pytestmark = pytest.mark.anyio


async def test_a_refusal_of_lookup_is_raised_with_its_text(nodes: LookupNodes) -> None:
    requests = requests_to(nodes)
    await requests.client.lookup_nodes()
    nodes.lists("a:4161", "a:4161", "b:4161", leader="a:4161")
    nodes.route("b:4161", "/topic/create", httpx.Response(400, json={"message": "no nodes"}), "POST")
    other = nodes.route("a:4161", "/topic/create", OK, "POST")
    with pytest.raises(LookupFailed, match="400 no nodes"):
        await requests.change_lookup("/topic/create", ORDERS)
    assert not other.called


async def test_a_refusal_of_a_node_is_raised_without_its_control_characters(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("n1:4151", "/channel/pause", httpx.Response(400, text="\x1b[2Jgone"), "POST")
    with pytest.raises(InvalidInput) as caught:
        await admin_of(nodes).pause_channel("orders", "ch")
    assert r"was refused with 400 \x1b[2Jgone" in str(caught.value)


@pytest.mark.parametrize(
    "failure", [httpx.ConnectError("down"), httpx.Response(400, json={"message": "E_FAILED_ON_NOT_LEADER"})]
)
@pytest.mark.parametrize("moved", [True, False])
async def test_a_new_leader_of_the_lookup_nodes_is_asked_at_once(nodes: LookupNodes, failure: Any, moved: bool) -> None:
    requests = requests_to(nodes)
    await requests.client.lookup_nodes()
    nodes.lists("a:4161", "a:4161", "b:4161", leader="a:4161" if moved else "b:4161")
    former = nodes.route("b:4161", "/topic/create", failure, "POST")
    new = nodes.route("a:4161", "/topic/create", OK, "POST")
    with nullcontext() if moved else pytest.raises(LookupFailed, match=r"down|NOT_LEADER"):
        await requests.change_lookup("/topic/create", ORDERS)
    assert (former.call_count, new.call_count) == (1, moved)


@pytest.mark.parametrize("failure", [httpx.Response(500), not_found("E_FAILED_ON_NOT_LEADER")])
async def test_a_change_is_repeated_where_it_failed_only(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, failure: httpx.Response
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152", 2: "n3:4154"}, num=3))
    answers = [failure, OK]
    first = nodes.route("n1:4151", "/channel/empty", OK, "POST")
    nodes.route("n2:4153", "/channel/empty", lambda request: answers.pop(0), "POST")
    nodes.route("n3:4155", "/channel/empty", not_found("CHANNEL_NOT_FOUND"), "POST")  # a new partition
    await admin_of(nodes).empty_channel("orders", "ch")
    assert (len(first.calls), answers) == (1, [])


@pytest.mark.parametrize("partition_num", [2, 3])  # with three, the last has no leader
async def test_leaders_behind_a_dead_node_or_without_the_others_are_asked(
    nodes: LookupNodes, partition_num: int
) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=partition_num))
    nodes.route("n1:4151", "/channel/pause", httpx.ConnectError("down"), "POST")
    paused = nodes.route("n2:4153", "/channel/pause", OK, "POST")
    finished = nodes.route("n2:4153", "/message/finish", OK, "POST")
    admin = admin_of(nodes)
    with pytest.raises(PartitionUnavailable, match="not completed"):
        await admin.pause_channel("orders", "ch")
    await admin.finish_message("orders", "ch", (1 << COUNTER_BITS) + 7)
    assert (len(paused.calls), len(finished.calls)) == (1, 1)
    nodes.route("n1:4151", "/channel/pause", OK, "POST")
    with nullcontext() if partition_num == 2 else pytest.raises(PartitionUnavailable, match="no leader"):
        await admin.pause_channel("orders", "ch")


async def test_an_error_that_cannot_pass_is_raised_before_one_that_can(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    nodes.route("n1:4151", "/channel/pause", httpx.ConnectError("down"), "POST")
    nodes.route("n2:4153", "/channel/pause", not_found("CHANNEL_NOT_FOUND"), "POST")
    with pytest.raises(InvalidInput, match="CHANNEL_NOT_FOUND"):
        await admin_of(nodes).pause_channel("orders", "ch")


async def test_one_lookup_node_of_the_original_nsq_may_be_down() -> None:
    nodes = LookupNodes()
    for name in ("x:4161", "y:4161"):
        nodes.lists(name)
    nodes.route("x:4161", "/topic/create", not_found(), "POST")
    created = nodes.route("y:4161", "/topic/create", OK, "POST")
    await requests_to(nodes, "x:4161,y:4161").change_lookup("/topic/create", ORDERS)
    assert created.called
    nodes.route("y:4161", "/topic/create", not_found(), "POST")
    with pytest.raises(LookupFailed, match="no lookup node returned a usable response"):
        await requests_to(nodes, "x:4161,y:4161").change_lookup("/topic/create", ORDERS)


async def test_a_node_without_http_address() -> None:
    nodes = LookupNodes()
    nodes.lists("x:4161")
    nodes.finds("x:4161", {"channels": [], "producers": [{"broadcast_address": "o1", "tcp_port": 4150}]})
    nodes.route("x:4161", "/channel/create", OK, "POST")
    with pytest.raises(LookupFailed, match="does not report the node's HTTP address"):
        await admin_of(nodes, "x:4161").create_channel("orders", "billing")


async def test_the_cluster_is_asked_again_every_six_seconds(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked, slept = 100.0, list[float](), list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    async def attempt() -> None:
        if now < 120.0:
            raise PartitionUnavailable("no leader yet")

    async def again() -> None:
        asked.append(now)
        assert len(asked) < 10

    clock = SimpleNamespace(current_time=lambda: now, sleep=sleep, move_on_after=anyio.move_on_after)
    monkeypatch.setattr("nsqext.admin.requests.anyio", clock)
    await requests_to(nodes).settled(attempt, "orders", again=again, bounded=False)
    assert asked == [106.0, 112.0, 118.0]
    growing = [0.25, 0.5, 1.0, 2.0]
    assert slept == [*[*growing, 2.0, 0.25] * 3, *growing], "pauses are short again behind each request"


async def test_a_partition_may_move_for_longer_than_other_changes(nodes: LookupNodes) -> None:
    """The time of a change bounds it no longer: ``wait`` does."""
    requests, attempts = requests_to(nodes, timeout=0.1), count()

    async def attempt() -> None:
        if next(attempts) % 2 == 0:
            raise PartitionUnavailable("not yet")

    await requests.settled(attempt, "orders", bounded=False)
    with pytest.raises(PartitionUnavailable, match=r"not completed within 0.1 s, last error: not yet"):
        await requests.settled(attempt, "orders")


async def test_a_refusal_names_its_partition_in_printable_text(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("n1:4151", "/channel/pause", httpx.Response(400, json={"message": "no\x1b[2J"}), "POST")
    with pytest.raises(InvalidInput, match="/channel/pause was refused with 400 no") as caught:
        await admin_of(nodes).pause_channel("orders", "ch")
    assert caught.value.partition == 0
    assert str(caught.value).isprintable()
