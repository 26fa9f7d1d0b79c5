"""Requests that change nodes and move partitions, to mocked lookup nodes and nodes."""

from __future__ import annotations

import httpx
import pytest

from nsqext.errors import InvalidInput
from tests.support.admin_requests import OK, admin_of, find_by_all, params, route_to_all
from tests.support.fake_lookupd import LookupNodes, lookup_json, node_json

pytestmark = pytest.mark.anyio


async def test_a_value_that_is_empty_or_refused_is_an_invalid_input(nodes: LookupNodes) -> None:
    route_to_all(nodes, "/nodes", {"producers": [node_json("n1:4150")]})
    nodes.route("n1:4151", "/config/log_level", httpx.Response(413, text="INVALID_VALUE"), "PUT")
    for value, text in (("", "log_level is empty"), ("x" * 2000, "refuses log_level='xx.*INVALID_VALUE")):
        with pytest.raises(InvalidInput, match=text):
            await admin_of(nodes).set_node_option("n1:4150", "log_level", value)


@pytest.mark.parametrize(
    ("node", "sent"),
    [("[::1]:4150", "::1:4250:4150:7"), ("n9:4250:4150:9", "n9:4250:4150:9"), ("::9:4250:4150:9", "::9:4250:4150:9")],
)
async def test_a_node_is_removed_by_its_address_or_its_id(nodes: LookupNodes, node: str, sent: str) -> None:
    """The cluster accepts an unknown id, and does nothing."""
    listed = {**node_json("n1:4150"), "broadcast_address": "::1"}
    route_to_all(nodes, "/nodes", {"producers": [listed]})
    for name, value in (("rpc_port", "4250"), ("id", "7")):
        nodes.route("[::1]:4151", f"/config/{name}", httpx.Response(200, text=value))
    removed = nodes.route("b:4161", "/cluster/node/remove", OK, "POST")
    await admin_of(nodes).remove_node(node)
    assert params(removed) == [{"remove_node": sent}]


async def test_an_option_is_a_value_or_a_text_without_quotes(nodes: LookupNodes) -> None:
    route_to_all(nodes, "/nodes", {"producers": [node_json("n1:4150")]})
    for name, text in (("rpc_port", "4250"), ("log_level", "info")):
        nodes.route("n1:4151", f"/config/{name}", httpx.Response(200, text=text))
    admin = admin_of(nodes)
    assert [await admin.node_option("n1:4150", name) for name in ("rpc_port", "log_level")] == [4250, "info"]


@pytest.mark.parametrize("leads", [False, True])
async def test_a_replica_or_a_leader_moves(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    """The response to the request may be late, and lookup may report the new leader later."""
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    source = "n1:4150" if leads else "n2:4152"
    leaders = ["n1:4150"]
    members = [{"node_id": f"{name}:4250:{port}:{name[1]}"} for name, port in (("n1", 4150), ("n2", 4152))]
    find_by_all(nodes, lambda _: httpx.Response(200, json=lookup_json({0: leaders[-1]}, num=1)))
    listed = [node_json(f"n{number}:{4148 + 2 * number}") for number in (1, 2, 3)]
    route_to_all(nodes, "/nodes", {"producers": listed})
    for number in (1, 2, 3):
        nodes.route(f"n{number}:{4149 + 2 * number}", "/config/rpc_port", httpx.Response(200, text="4250"))
        nodes.route(f"n{number}:{4149 + 2 * number}", "/config/id", httpx.Response(200, text=str(number)))

    def move(request: httpx.Request) -> httpx.Response:
        members[1] = {"node_id": "n3:4250:4154:3"}
        raise httpx.ReadTimeout("late")

    def coordination(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url.host))
        if leads and len(asked) > 2:
            leaders.append("n3:4154")
        return httpx.Response(200, json={"topic_coord_stats": [{"isr_stats": members}]})

    asked = list[str]()
    moved = nodes.route("b:4161", "/topic/partition/move", move, "POST")
    for name in ("n1:4151", "n3:4155"):
        nodes.route(name, "/coordinator/stats", coordination)
    await admin_of(nodes).move_partition("orders", 0, source, "n3:4154")
    ends = {"move_from": "n1:4250:4150:1" if leads else "n2:4250:4152:2", "move_to": "n3:4250:4154:3"}
    ends["move_leader"] = str(leads).lower()
    assert asked[-1] == ("n3" if leads else "n1")
    assert params(moved) == [{"topic": "orders", "partition": "0", **ends}]
