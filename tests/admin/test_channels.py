"""Requests that create, change and delete channels, to mocked lookup nodes and nodes of both generations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from nsqext.errors import InvalidInput, OperationNotSupported, PartitionUnavailable, TopicNotFound
from nsqext.protocol.messages import message_id
from nsqext.protocol.record import COUNTER_BITS
from tests.support.admin_requests import OK, ORIGINAL, admin_of, find_by_all, params, stats_json
from tests.support.fake_lookupd import LookupNodes, lookup_json

if TYPE_CHECKING:
    from nsqext.errors import NsqError

pytestmark = pytest.mark.anyio


async def test_a_channel_is_created_at_every_leader(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    first = nodes.route("n1:4151", "/channel/create", OK, "POST")
    second = nodes.route("n2:4153", "/channel/create", OK, "POST")
    await admin_of(nodes).create_channel("orders", "billing")
    assert params(first) == [{"topic": "orders", "channel": "billing", "partition": "0"}]
    assert params(second) == [{"topic": "orders", "channel": "billing", "partition": "1"}]


async def test_a_channel_is_created_once_its_topic_has_a_leader_again(nodes: LookupNodes) -> None:
    answers = [{}, {}, {0: "n1:4150"}]

    def lookup(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=lookup_json(answers.pop(0) if len(answers) > 1 else answers[0], num=1))

    nodes.lists("a:4161", "a:4161", leader="a:4161")
    nodes.finds("a:4161", lookup)
    created = nodes.route("n1:4151", "/channel/create", OK, "POST")
    await admin_of(nodes).create_channel("orders", "billing")
    assert params(created) == [{"topic": "orders", "channel": "billing", "partition": "0"}]


async def test_a_channel_of_an_unknown_topic(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json())
    with pytest.raises(TopicNotFound):
        await admin_of(nodes).create_channel("orders", "billing")


async def test_channels_that_have_to_be_registered_are_registered_at_lookup(nodes: LookupNodes) -> None:
    answer = lookup_json({0: "n1:4150"}, num=1)
    answer["meta"]["disable_channel_auto_create"] = True
    find_by_all(nodes, answer)
    for answer_to_change in (OK, httpx.Response(400, json={"message": "channel already registered"})):
        registered = nodes.route("b:4161", "/channel/create", answer_to_change, "POST")
        await admin_of(nodes).create_channel("orders", "billing")
        assert params(registered)[-1:] == [{"topic": "orders", "channel": "billing"}]


async def test_changes_of_the_original_nsq_are_sent_to_every_lookup_node_and_nsqd() -> None:
    nodes = LookupNodes()
    for name in ("x:4161", "y:4161"):
        nodes.lists(name)
        nodes.finds(name, {**ORIGINAL, "channels": ["billing"]})
        nodes.route(name, "/nodes", {"producers": []})
    routes = {
        (name, path): nodes.route(name, path, OK, "POST")
        for name in ("x:4161", "y:4161", "o1:4151")
        for path in ("/channel/create", "/channel/delete", "/topic/delete", "/channel/pause")
    }
    admin = admin_of(nodes, "x:4161,y:4161")
    await admin.create_channel("orders", "billing")
    await admin.delete_channel("orders", "billing")  # lookup lists it: nodes are not asked
    await admin.delete_topic("orders")
    await admin.pause_channel("orders", "billing")
    assert params(routes["o1:4151", "/channel/pause"]) == [{"topic": "orders", "channel": "billing"}]
    assert [key for key, route in routes.items() if not route.called and key[1] != "/channel/pause"] == []


async def test_changes_of_a_channel_carry_their_settings(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    actions = ("setorder", "ratelimit", "setclientlimit", "finishmemdelayed", "emptydelayed")
    routes = [nodes.route("n2:4153", f"/channel/{action}", OK, "POST") for action in actions]
    finished = nodes.route("n2:4153", "/message/finish", OK, "POST")
    for action in actions:
        nodes.route("n1:4151", f"/channel/{action}", OK, "POST")
    admin = admin_of(nodes)
    await admin.set_channel("orders", "ch", ordered=False, rate_limit_kib=5)
    await admin.limit_consumers("orders", "ch", 3, address_prefix="10.")
    await admin.empty_delayed("orders", "ch")
    await admin.finish_message("orders", "ch", message_id((1 << COUNTER_BITS) + 7, 9))
    with pytest.raises(InvalidInput, match="no message id"):
        await admin.finish_message("orders", "ch", bytes(17))
    at = {"topic": "orders", "channel": "ch", "partition": "1"}
    settings: tuple[dict[str, str], ...] = (
        {"order": "false"},
        {"ratekilobytes": "5"},
        {"ready": "3", "client_prefix": "10."},
        {},
        {},
    )
    assert [params(route) for route in routes] == [[at | one] for one in settings]
    assert params(finished) == [at | {"msgid": str((1 << COUNTER_BITS) + 7)}]


@pytest.mark.parametrize("known", [False, True])
async def test_a_dispatch_that_servers_ignore_is_refused(nodes: LookupNodes, known: bool) -> None:
    stats = {"topics": [stats_json([{"channel_name": "ch", "dispatch": "shared"}])]}
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("n1:4151", "/stats", stats)
    answer = httpx.Response(400, json={"message": "channel already registered"}) if known else OK
    nodes.route("b:4161", "/channel/create", answer, "POST")
    deleted = nodes.route("b:4161", "/channel/delete", OK, "POST")
    with pytest.raises(OperationNotSupported, match="do not know dispatch='key_failover'"):
        await admin_of(nodes).create_channel("orders", "ch", dispatch="key_failover")
    assert len(deleted.calls) == (not known)


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ({"topics": [stats_json([{"channel_name": "other"}]) | {"topic_partition": "1"}]}, OperationNotSupported),
        ({"topics": []}, PartitionUnavailable),
        (httpx.ConnectError("down"), PartitionUnavailable),
    ],
)
async def test_a_dispatch_that_one_partition_does_not_report_is_an_error(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, second: Any, error: type[NsqError]
) -> None:
    """Nothing is created while a leader cannot show afterwards whether it has ignored the dispatch."""
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    nodes.route("n1:4151", "/stats", {"topics": [stats_json([{"channel_name": "ch", "dispatch": "key_failover"}])]})
    nodes.route("n2:4153", "/stats", second)
    created = nodes.route("b:4161", "/channel/create", OK, "POST")
    nodes.route("b:4161", "/channel/delete", OK, "POST")
    admin = admin_of(nodes)
    admin._open()._timeout = 0.1
    with pytest.raises(error):
        await admin.create_channel("orders", "ch", dispatch="key_failover")
    assert created.called is (error is OperationNotSupported)


async def test_a_header_of_keys_without_a_dispatch_is_refused(nodes: LookupNodes) -> None:
    """It would be ignored."""
    with pytest.raises(InvalidInput, match="dispatch=None is none of shared, key_failover"):
        await admin_of(nodes).create_channel("orders", "ch", key_header="cart")


@pytest.mark.parametrize("state", ["paused", "skipped"])
async def test_a_channel_that_is_paused_or_skipped_on_a_partition_does_not_read_again_there(
    nodes: LookupNodes, state: str
) -> None:
    """Servers report success, and do nothing."""
    find_by_all(nodes, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    asked = [nodes.route(name, "/channel/fixconfirmed", OK, "POST") for name in ("n1:4151", "n2:4153")]
    nodes.route("n1:4151", "/stats", {"topics": [stats_json([{"channel_name": "ch"}])]})
    stopped = stats_json([{"channel_name": "ch", state: True}, {"channel_name": "other"}])
    nodes.route("n2:4153", "/stats", {"topics": [stopped | {"topic_partition": "1"}]})
    with pytest.raises(InvalidInput, match=f"the channel ch is {state}: it does not read again") as caught:
        await admin_of(nodes).redeliver_unfinished("orders", "ch")
    assert ([len(route.calls) for route in asked], caught.value.partition) == ([1, 1], 1)
    nodes.route("n2:4153", "/stats", {"topics": [stats_json([{"channel_name": "ch"}]) | {"topic_partition": "1"}]})
    await admin_of(nodes).redeliver_unfinished("orders", "ch")


async def test_a_channel_of_an_ordered_topic_does_not_read_again(nodes: LookupNodes) -> None:
    data = lookup_json({0: "n1:4150"}, num=1)
    find_by_all(nodes, data | {"meta": {**data["meta"], "ordered": True}})
    asked = nodes.route("n1:4151", "/channel/fixconfirmed", OK, "POST")
    with pytest.raises(InvalidInput, match="channels of an ordered topic cannot read again"):
        await admin_of(nodes).redeliver_unfinished("orders", "ch")
    assert not asked.calls
