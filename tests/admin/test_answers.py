"""What the administration client makes of answers: waits, refusals, and nodes that say less than others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from nsqext import Admin
from nsqext.admin.options import redesigned_settings, refuse_redesigned
from nsqext.admin.results import NodeStatus
from nsqext.errors import ConnectionFailed, InvalidInput, InvalidSetting, PartitionUnavailable
from nsqext.types import Address
from tests.support.admin_requests import OK, admin_of, params, requests_to
from tests.support.fake_lookupd import LookupNodes, lookup_json, node_json

if TYPE_CHECKING:
    from nsqext.admin.results import Generation

pytestmark = pytest.mark.anyio

GENERATIONS: tuple[Generation, ...] = ("original", "redesigned")


@pytest.fixture
def nodes() -> LookupNodes:
    """One lookup node, which leads; it knows two nodes and a topic of two partitions."""
    found = LookupNodes()
    found.lists("a:4161", "a:4161", leader="a:4161")
    found.finds("a:4161", lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    found.route("a:4161", "/nodes", {"producers": [node_json("n1:4150"), node_json("n2:4152")]})
    return found


async def test_a_filter_of_nodes_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="node_filter has no effect in Admin"):
        Admin("a:4161", node_filter=lambda node: True)


async def test_the_leader_is_the_first_replica(nodes: LookupNodes) -> None:
    hosts = (("n1", 4150), ("n2", 4152), ("n0", 4150), ("::1", 4150))
    members = [{"node_id": f"{host}:4260:{port}:7"} for host, port in hosts]
    for address, replicas in (("n1:4151", members), ("n2:4153", None)):
        nodes.route(address, "/coordinator/stats", {"topic_coord_stats": [{"isr_stats": replicas}]})
    found = await admin_of(nodes).replicas("orders")
    assert found == {0: ("n1:4150", "[::1]:4150", "n0:4150", "n2:4152"), 1: ()}


async def test_the_replicas_of_a_partition_without_a_leader_or_whose_leader_is_silent_are_not_known(
    nodes: LookupNodes,
) -> None:
    """Those of the other partitions are."""
    nodes.finds("a:4161", lookup_json({0: "n1:4150", 2: "n2:4152"}, num=3))
    members = {"topic_coord_stats": [{"isr_stats": [{"node_id": "n1:4260:4150:7"}]}]}
    nodes.route("n1:4151", "/coordinator/stats", members)
    nodes.route("n2:4153", "/coordinator/stats", httpx.ConnectError("down"))
    assert await admin_of(nodes).replicas("orders") == {0: ("n1:4150",), 1: (), 2: ()}
    nodes.route("n1:4151", "/coordinator/stats", httpx.ConnectError("down"))
    with pytest.raises(ConnectionFailed, match="down"):
        await admin_of(nodes).replicas("orders")
    nodes.finds("a:4161", lookup_json({}, num=2))
    assert await admin_of(nodes).replicas("orders") == {0: (), 1: ()}


async def test_a_move_that_takes_too_long_is_an_error(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    for address in ("n1:4151", "n2:4153"):
        for option in ("rpc_port", "id"):
            nodes.route(address, f"/config/{option}", httpx.Response(200, json=7))
    unstable = httpx.Response(400, json={"message": "cluster is unstable"})
    nodes.route("a:4161", "/topic/partition/move", unstable, "POST")
    with pytest.raises(PartitionUnavailable, match=r"the partition has not moved after 0\.1 s") as caught:
        await admin_of(nodes).move_partition("orders", 0, "n1:4150", "n2:4152", wait=0.1)
    assert (caught.value.partition, caught.value.node) == (0, "n2:4152")


async def test_an_unknown_node_is_not_hidden_and_clients_learn_of_a_known_one(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers accept an unknown node, and hide nothing."""
    without_http = {"broadcast_address": "n3", "tcp_port": 4150}
    nodes.route("a:4161", "/nodes", {"producers": [node_json("n1:4150"), node_json("n2:4152"), without_http]})
    hidden = nodes.route("a:4161", "/topic/tombstone", OK, "POST")
    with pytest.raises(InvalidInput, match=r"no node has the HTTP address 'n1:4150' .*: known: n1:4151, n2:4153$"):
        await admin_of(nodes).tombstone("orders", "n1:4150")
    assert not hidden.called
    changed: list[str] = []
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", changed.append)
    await admin_of(nodes).tombstone("orders", "n1:4151")
    assert (hidden.call_count, changed) == (1, ["orders"])


async def test_a_channel_that_is_not_emptied_is_an_error_after_the_others(nodes: LookupNodes) -> None:
    nodes.lists("a:4161")
    nodes.finds("a:4161", {"channels": ["c1", "c2"], "producers": [node_json("o1:4150", "")]})

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(400, json={"message": "REFUSED"}) if request.url.params["channel"] == "c1" else OK

    channels = nodes.route("o1:4151", "/channel/empty", answer, "POST")
    topic = nodes.route("o1:4151", "/topic/empty", OK, "POST")
    with pytest.raises(InvalidInput, match="/channel/empty was refused with 400 REFUSED"):
        await admin_of(nodes).empty_topic("orders")
    assert (channels.call_count, topic.call_count) == (2, 1)


async def test_one_text_is_not_a_list_of_channels(nodes: LookupNodes) -> None:
    """It became a channel of each letter."""
    channels: Any = "billing"
    with pytest.raises(InvalidInput, match=r"channels='billing' is one text .*: give channels=\['billing'\]"):
        await admin_of(nodes).create_topic("new", channels=channels)


async def test_an_expansion_waits_until_lookup_reports_the_partitions(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Producers of this process would else use the former partitions only, until their next poll."""
    for name in ("_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(f"nsqext.admin.requests.{name}", 0.001)
    shown: list[int] = []
    expanded = nodes.route("a:4161", "/topic/partition/expand", OK, "POST")

    def lookup(_: httpx.Request) -> httpx.Response:
        if expanded.called:
            shown.append(2 if len(shown) < 20 else 3)
        found = {number: f"n{number}:4150" for number in range(shown[-1] if shown else 2)}
        return httpx.Response(200, json=lookup_json(found, num=len(found)))

    nodes.finds("a:4161", lookup)
    missing = httpx.Response(400, json={"message": "INVALID_TRACE_ID"})
    for number in range(3):
        nodes.route(f"n{number}:4151", "/pubtrace", missing, "POST")
        nodes.route(f"n{number}:4151", "/channel/create", OK, "POST")
    await admin_of(nodes).expand_topic("orders", 3)
    assert shown[-1] == 3


async def test_a_topic_with_a_leaderless_partition_is_not_led(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", lookup_json({0: "n1:4150"}, num=2))
    with pytest.raises(PartitionUnavailable, match="no leader of the partition") as caught:
        await requests_to(nodes).led("orders")
    assert caught.value.partition == 1


async def test_a_topic_that_no_node_reports_is_in_the_statistics(nodes: LookupNodes) -> None:
    nodes.route("a:4161", "/topics", {"topics": ["orders"]})
    for address in ("n1:4151", "n2:4153"):
        nodes.route(address, "/stats", {"topics": []})
    found = await admin_of(nodes).all_stats()
    assert [(name, topic.partitions) for name, topic in found.items()] == [("orders", ())]


async def test_changes_of_every_node_reach_lookup_nodes_and_say_what_is_changed(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "a:4161", "b:4161", leader="a:4161")
    nodes.route("b:4161", "/nodes", {"producers": [node_json("n1:4150"), node_json("n2:4152")]})
    every = ("n1:4151", "n2:4153", "a:4161", "b:4161")
    levels = [nodes.route(address, "/loglevel/set", OK, "POST") for address in every]
    writes = [nodes.route(address, "/disable/write", OK, "POST") for address in every]
    admin = admin_of(nodes)
    await admin.set_log_level("debug")
    await admin.disable_writes(ordered_only=True)
    await admin.disable_writes()
    await admin.enable_writes()
    assert [params(route) for route in levels] == [[{"loglevel": "3"}]] * 4
    assert [params(route) for route in writes] == [[{"type": "ordered"}, {"type": "all"}, {"type": "none"}]] * 4


def test_settings_are_refused_by_a_cluster_of_original_nodes_only() -> None:
    """While a cluster is replaced, it has nodes of both generations."""
    at = Address("n", 4150)
    original, redesigned = (NodeStatus(at, at, "", "", one, {}, (), True) for one in GENERATIONS)
    names = redesigned_settings({"partitions": 2, "replicas": 1, "extend": False, "sync_every": None})
    with pytest.raises(InvalidInput, match="the original NSQ has no partitions of topics"):
        refuse_redesigned(names, "orders", [original, original])
    for nodes in ([original, redesigned], []):
        refuse_redesigned(names, "orders", nodes)
    refuse_redesigned([], "orders", [original])
    assert redesigned_settings({"extend": True, "ordered": False, "multipart": True}) == ["extend", "multipart"]
    given = {"sync_every": 1, "retention_days": 0, "partitions": 1, "replicas": 1}
    assert redesigned_settings(given) == ["sync_every", "retention_days"]


def test_lookup_has_more_time_for_changes_than_for_the_requests_of_other_clients() -> None:
    assert Admin("127.0.0.1:1").settings["lookup_request_timeout"] == 15.0
    assert Admin("127.0.0.1:1", lookup_request_timeout=3.0).settings["lookup_request_timeout"] == 3.0
