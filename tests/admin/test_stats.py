"""Requests for statistics and stored messages, to mocked lookup nodes and nodes."""

from __future__ import annotations

import httpx
import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from nsqext.admin.stats import sum_up
from nsqext.errors import PartitionUnavailable, ProtocolError
from nsqext.lookup.node_stats import read_stats
from nsqext.types import Address
from tests.support.admin_requests import admin_of, find_by_all, params, stats_json
from tests.support.fake_lookupd import LookupNodes, lookup_json, node_json

pytestmark = pytest.mark.anyio


async def test_the_statistics_of_all_topics_name_the_nodes_that_do_not_respond() -> None:
    nodes = LookupNodes()
    nodes.lists("x:4161")
    nodes.route("x:4161", "/topics", {"topics": ["orders"]})
    holder, other = ({**node_json(f"n{one}:4150"), "topics": ["orders"] * (one == 2)} for one in (2, 3))
    nodes.route("x:4161", "/nodes", {"producers": [node_json("n1:4150"), holder, other]})
    asked = nodes.route("n1:4151", "/stats", {"topics": [stats_json([])]})
    for name in ("n2:4151", "n3:4151"):
        nodes.route(name, "/stats", httpx.ConnectError("down"))
    found = (await admin_of(nodes, "x:4161").all_stats())["orders"]
    assert (found.messages, found.unreachable) == (3, (Address("n2", 4150),))
    assert params(asked) == [{"format": "json", "leaderOnly": "true", "needClients": "true"}]
    nodes.finds("x:4161", lookup_json({0: "n1:4150", 1: "n2:4150"}, num=2))
    found = await admin_of(nodes, "x:4161").stats("orders")
    assert (found.messages, found.unreachable) == (3, (Address("n2", 4150),))


async def test_a_topic_and_a_channel_are_paused_where_all_partitions_are() -> None:
    shares = [
        {"topic_name": "orders", "message_count": 1, "channels": [{"channel_name": "ch"} | by], **by}
        for by in ({"paused": True}, {"paused": False}, {"paused": True})
    ]
    for number, expected in ((1, True), (3, False)):
        parts = read_stats({"topics": shares[:number]}, Address("n", 4150))["orders"]
        found = sum_up("orders", "original", parts)
        assert (found.paused, found.channels["ch"].paused) == (expected, expected)
    led = [evolve(parts[0], partition=number, node=Address("n", 4152 - number)) for number in (1, 0)]
    assert [part.partition for part in sum_up("orders", "redesigned", led).partitions] == [0, 1]


@given(text=st.text(), times=st.sampled_from([1, 1000]))
@example(text="n\n1\x1b[2J\u202e\ud800", times=1)
def test_texts_of_statistics_are_printable_and_bounded(text: str, times: int) -> None:
    names = ("client_id", "hostname", "remote_address", "user_agent", "desired_tag", "tag")
    client = dict.fromkeys(names, text * times)
    ranges = [client | {"low": 0, "high": 1, "rate": 1, "waiting": 0}]
    channel = {"channel_name": text * times, "dispatch": text * times, "clients": [client], "key_ranges": ranges}
    topic = {"topic_name": text * times, "message_count": 0, "channels": [channel]}
    for name, parts in read_stats({"topics": [topic]}, Address("n1", 4150)).items():
        (of_channel,) = parts[0].channels.values()
        (of_client,), (of_range,) = of_channel.clients, of_channel.key_ranges
        texts = [name, of_channel.name, of_channel.dispatch, of_client.client_id, of_client.hostname, of_client.address]
        texts += [of_client.user_agent, of_client.tag or "", of_range.client, of_range.tag or ""]
        assert all(shown.isprintable() and len(shown) <= 501 for shown in texts)
    with pytest.raises(ProtocolError) as caught:
        read_stats({"topics": [topic | {"message_count": f"x{text * times}"}]}, Address("n1", 4150))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


async def test_peek_asks_for_no_message_more_and_returns_the_first_of_a_batch_once(nodes: LookupNodes) -> None:
    """A real server returns the first message of a batch for each of its messages."""
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("n1:4151", "/stats", {"topics": [stats_json([])]})
    stored = {"id": 1, "offset": 0, "timestamp": 1, "trace_id": 0, "body": "x", "ext": "blue"}
    asked = nodes.route("n1:4151", "/message/get", stored)
    (message,) = await admin_of(nodes).peek("orders", count=2)
    assert (message.body, message.tag, message.headers) == ("x", "blue", {})
    assert sorted(one["search_pos"] for one in params(asked)) == ["2", "3"]


async def test_peek_leaves_out_a_message_that_the_log_lacks_and_fails_where_a_leader_has_no_partition(
    nodes: LookupNodes,
) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    stored = {"id": 1, "offset": 0, "timestamp": 1, "trace_id": 0, "body": "x", "ext": ""}

    def get(request: httpx.Request) -> httpx.Response:
        removed = request.url.params["search_pos"] == "1"
        return httpx.Response(500, json={"message": "gone"}) if removed else httpx.Response(200, json=stored)

    nodes.route("n1:4151", "/message/get", get)
    nodes.route("n1:4151", "/stats", {"topics": [stats_json([])]})
    assert [message.body for message in await admin_of(nodes).peek("orders")] == ["x"]
    nodes.route("n1:4151", "/stats", {"topics": []})
    with pytest.raises(PartitionUnavailable, match="the partition's leader does not report it") as caught:
        await admin_of(nodes).peek("orders")
    assert (caught.value.partition, caught.value.node) == (0, "n1:4150")
