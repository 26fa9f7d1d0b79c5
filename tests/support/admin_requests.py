"""Requests of the administration client to mocked lookup nodes and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

from nsqext import Admin
from nsqext.admin.requests import ClusterRequests
from nsqext.lookup.client import LookupClient

if TYPE_CHECKING:
    from tests.support.fake_lookupd import LookupNodes

OK = httpx.Response(200)
ORIGINAL = {
    "channels": [],
    "producers": [{"broadcast_address": "o1", "tcp_port": 4150, "http_port": 4151, "version": "1.3.0"}],
}
"""Response to a lookup of a topic of the original NSQ."""
ORDERS = {"topic": "orders"}


def requests_to(nodes: LookupNodes, addresses: str = "a:4161", timeout: float = 1.0) -> ClusterRequests:
    """Return requests to these nodes."""
    return ClusterRequests(LookupClient(addresses, transport=nodes.transport), timeout=timeout)


def admin_of(nodes: LookupNodes, addresses: str = "a:4161") -> Admin:
    """Return an admin of these nodes."""
    admin = Admin(addresses)
    admin._requests = requests_to(nodes, addresses)
    return admin


def route_to_all(nodes: LookupNodes, path: str, answer: Any) -> None:
    """Set the response of both lookup nodes to a path; see `LookupNodes.route`."""
    for name in ("a:4161", "b:4161"):
        nodes.route(name, path, answer)


def find_by_all(nodes: LookupNodes, answer: Any) -> None:
    """Set the response of both lookup nodes to lookup."""
    route_to_all(nodes, "/lookup", answer)


def stats_json(channels: list[dict[str, object]]) -> dict[str, object]:
    """Return the statistics of partition 0 with three messages, in the format of a redesigned node."""
    numbers = {"message_count": 3, "backend_start": 0, "backend_depth": 30}
    return {"topic_name": "orders", "topic_partition": "0", "channels": channels, **numbers}


def params(route: Any) -> list[dict[str, str]]:
    """Return the arguments of all calls."""
    return [dict(call.request.url.params) for call in route.calls]
