"""The list of lookup nodes: how its nodes are reached, and when it is asked for again."""

from __future__ import annotations

import httpx
import pytest

from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupOptions
from tests.support.fake_lookupd import LookupNodes, lookup_json

pytestmark = pytest.mark.anyio

_OPTIONS = LookupOptions(request_timeout=30.0)


async def test_listed_nodes_are_asked_over_https_as_the_given_one() -> None:
    nodes, found = LookupNodes(), lookup_json({0: "n1:4150"}, num=1)
    nodes.lists("a:4161", "a:4161", "b:4161")
    routes = [nodes.finds(name, found) for name in ("a:4161", "b:4161")]
    client = LookupClient("https://a:4161", _OPTIONS, nodes.transport)
    assert len(await client.lookup("orders")) == 2
    assert [route.calls.last.request.url.scheme for route in routes] == ["https", "https"]


async def test_a_list_that_no_node_returns_is_not_asked_for_again_at_once() -> None:
    nodes = LookupNodes()
    listed = nodes.route("a:4161", "/listlookup", httpx.ConnectError("refused"))
    client = LookupClient("a:4161", _OPTIONS, nodes.transport)
    for _ in range(3):
        assert len(await client.lookup_nodes()) == 1
    assert listed.call_count == 1
    client.relist()
    await client.lookup_nodes()
    assert listed.call_count == 2
