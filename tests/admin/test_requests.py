"""Administration requests to lookup nodes and nodes of both generations, through a mocked transport."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import anyio
import httpx
import pytest
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from nsqext import Admin
from nsqext.admin.requests import ClusterRequests
from nsqext.admin.stats import sum_up
from nsqext.errors import (
    ConnectionFailed,
    InvalidInput,
    LookupFailed,
    OperationNotSupported,
    PartitionUnavailable,
    ProtocolError,
    TopicNotFound,
    UnknownSetting,
)
from nsqext.lookup.client import LookupClient
from nsqext.lookup.node_stats import read_stats
from nsqext.protocol.messages import message_id
from nsqext.protocol.record import COUNTER_BITS
from nsqext.types import Address
from tests.support.fake_lookupd import LookupNodes, lookup_json, node_json, not_found

pytestmark = pytest.mark.anyio

OK = httpx.Response(200)
ORIGINAL = {
    "channels": [],
    "producers": [{"broadcast_address": "o1", "tcp_port": 4150, "http_port": 4151, "version": "1.3.0"}],
}
ORDERS = {"topic": "orders"}


@pytest.fixture
def nodes() -> LookupNodes:
    """Lookup nodes of which b leads."""
    lookup_nodes = LookupNodes()
    lookup_nodes.lists("a:4161", "a:4161", "b:4161", leader="b:4161")
    return lookup_nodes


def requests_to(nodes: LookupNodes, addresses: str = "a:4161") -> ClusterRequests:
    """Return requests to these nodes."""
    return ClusterRequests(LookupClient(addresses, transport=nodes.transport), timeout=1.0)


def admin_of(nodes: LookupNodes, addresses: str = "a:4161") -> Admin:
    """Return an admin of these nodes."""
    admin = Admin(addresses)
    admin._requests = requests_to(nodes, addresses)
    return admin


def stats_json(channels: list[dict[str, object]]) -> dict[str, object]:
    """Return the statistics of partition 0 with three messages, in the format of a redesigned node."""
    numbers = {"message_count": 3, "backend_start": 0, "backend_depth": 30}
    return {"topic_name": "orders", "topic_partition": "0", "channels": channels, **numbers}


def params(route: Any) -> list[dict[str, str]]:
    """Return the arguments of all calls."""
    return [dict(call.request.url.params) for call in route.calls]


async def test_the_leading_lookup_node_creates_topics(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json())
    created = nodes.route("b:4161", "/topic/create", OK, "POST")
    admin = admin_of(nodes)
    await admin.create_topic("plain", extend=False, wait=0)
    await admin.create_topic("all", partitions=4, replicas=2, extend=True, ordered=True, multipart=True, wait=0)
    assert params(created) == [
        {"topic": "plain", "partition_num": "1", "replicator": "1"},
        {
            "topic": "all",
            "partition_num": "4",
            "replicator": "2",
            "extend": "true",
            "orderedmulti": "true",
            "multipart": "true",
        },
    ]


async def test_a_refusal_of_lookup_is_raised_with_its_text(nodes: LookupNodes) -> None:
    requests = requests_to(nodes)
    await requests.client.lookup_nodes()
    nodes.lists("a:4161", "a:4161", "b:4161", leader="a:4161")
    nodes.route("b:4161", "/topic/create", httpx.Response(400, json={"message": "no nodes"}), "POST")
    other = nodes.route("a:4161", "/topic/create", OK, "POST")
    with pytest.raises(LookupFailed, match="400 no nodes"):
        await requests.change_lookup("/topic/create", ORDERS)
    assert not other.called


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


async def test_a_topic_that_is_created_meanwhile_exists(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json())
    nodes.route("b:4161", "/topic/create", httpx.Response(400, json={"message": "already exist"}), "POST")
    with pytest.raises(InvalidInput, match="the topic exists"):
        await admin_of(nodes).create_topic("orders", wait=0)


@pytest.mark.parametrize("refused", [False, True], ids=["accepted", "refused"])
async def test_the_creation_is_requested_again_until_partitions_have_leaders(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A real cluster checks its topics after such a request, and else once a minute."""
    monkeypatch.setattr("nsqext.admin.requests._AGAIN", 0.0)
    asked = list[dict[str, str]]()

    def create(request: httpx.Request) -> httpx.Response:
        asked.append(dict(request.url.params))
        return httpx.Response(400, json={"message": "already exist"}) if refused and len(asked) > 1 else OK

    def lookup(request: httpx.Request) -> httpx.Response:
        leaders = {0: "n1:4150"} if len(asked) > 2 else {}
        return httpx.Response(200, json=lookup_json(leaders, num=int(bool(asked))))

    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup)
        nodes.route(name, "/nodes", {"producers": []})
    nodes.route("b:4161", "/topic/create", create, "POST")
    nodes.route("n1:4151", "/pubtrace", httpx.Response(400, json={"message": "INVALID_TRACE_ID"}), "POST")
    admin = admin_of(nodes)
    await admin.create_topic("orders")
    assert asked == [{"topic": "orders", "partition_num": "1", "replicator": "1"}] * 3


async def test_the_creation_is_requested_again_until_lookup_offers_the_partitions_to_producers(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real cluster, a leader may accept messages for a minute before the check that enables its partition."""
    monkeypatch.setattr("nsqext.admin.requests._AGAIN", 0.0)
    created = nodes.route("b:4161", "/topic/create", OK, "POST")

    def lookup(request: httpx.Request) -> httpx.Response:
        enabled = request.url.params["access"] == "r" or created.call_count > 1
        leaders = {0: "n1:4150"} if created.called and enabled else {}
        return httpx.Response(200, json=lookup_json(leaders, num=int(created.called)))

    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup)
        nodes.route(name, "/nodes", {"producers": []})
    nodes.route("n1:4151", "/pubtrace", httpx.Response(400, json={"message": "INVALID_TRACE_ID"}), "POST")
    nodes.route("n1:4151", "/channel/create", OK, "POST")
    await admin_of(nodes).create_topic("orders", channels=["billing"], exist_ok=True)
    assert created.call_count == 2


@pytest.mark.parametrize("wrong", [{"partitions": 0}, {"partitions": 255}, {"replicas": 6}, {"partitions": True}])
async def test_numbers_are_checked(nodes: LookupNodes, wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="is not within 1"):
        await admin_of(nodes).create_topic(
            "orders", partitions=wrong.get("partitions", 1), replicas=wrong.get("replicas", 1)
        )


async def test_a_channel_is_created_at_every_leader(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
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


@pytest.mark.parametrize("action", ["delete", "pause", "unpause", "empty"])
async def test_a_silent_node_of_an_original_topic_does_not_keep_others_from_a_change(
    nodes: LookupNodes, action: str
) -> None:
    nodes.lists("a:4161")
    nodes.finds("a:4161", {"channels": [], "producers": [node_json("o1:4150", ""), node_json("o2:4150", "")]})
    nodes.route("a:4161", "/topic/delete", OK, "POST")
    nodes.route("o1:4151", f"/topic/{action}", httpx.ConnectError("down"), "POST")
    changed = nodes.route("o2:4151", f"/topic/{action}", OK, "POST")
    with pytest.raises(ConnectionFailed, match="o1:4151"):
        await getattr(admin_of(nodes), f"{action}_topic")("orders")
    assert params(changed) == [{"topic": "orders"}]


async def test_nodes_that_respond_are_emptied_and_create_the_topic_although_others_are_down() -> None:
    nodes = LookupNodes()
    listed = {"channels": ["c1", "c2"], "producers": [node_json("o1:4150", ""), node_json("o2:4150", "")]}
    asked = anyio.Event()

    async def silent(_: httpx.Request) -> httpx.Response:
        await asked.wait()
        return OK

    def answer(_: httpx.Request) -> httpx.Response:
        asked.set()
        return OK

    for name, change in (("x:4161", silent), ("y:4161", answer)):
        nodes.lists(name)
        nodes.finds(name, listed)
        nodes.route(name, "/nodes", listed)
        nodes.route(name, "/topic/create", change, "POST")
    paths = ("/channel/empty", "/topic/empty", "/topic/create")
    for path in paths:
        nodes.route("o1:4151", path, httpx.ConnectError("down"), "POST")
    changed = [nodes.route("o2:4151", path, OK, "POST") for path in paths]
    admin = admin_of(nodes, "x:4161,y:4161")
    for call in (partial(admin.empty_topic, "orders"), partial(admin.create_topic, "orders", exist_ok=True)):
        with pytest.raises(ConnectionFailed, match="o1:4151"), anyio.fail_after(10):
            await call()
    assert [len(route.calls) for route in changed] == [2, 1, 1]


async def test_channels_that_have_to_be_registered_are_registered_at_lookup(nodes: LookupNodes) -> None:
    answer = lookup_json({0: "n1:4150"}, num=1)
    answer["meta"]["disable_channel_auto_create"] = True
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, answer)
    for answer_to_change in (OK, httpx.Response(400, json={"message": "channel already registered"})):
        registered = nodes.route("b:4161", "/channel/create", answer_to_change, "POST")
        await admin_of(nodes).create_channel("orders", "billing")
        assert params(registered)[-1:] == [{"topic": "orders", "channel": "billing"}]


async def test_changes_of_a_channel_carry_their_settings(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
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


@pytest.mark.parametrize("failure", [httpx.Response(500), not_found("E_FAILED_ON_NOT_LEADER")])
async def test_a_change_is_repeated_where_it_failed_only(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, failure: httpx.Response
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150", 1: "n2:4152", 2: "n3:4154"}, num=3))
    answers = [failure, OK]
    first = nodes.route("n1:4151", "/channel/empty", OK, "POST")
    nodes.route("n2:4153", "/channel/empty", lambda request: answers.pop(0), "POST")
    nodes.route("n3:4155", "/channel/empty", not_found("CHANNEL_NOT_FOUND"), "POST")  # a new partition
    await admin_of(nodes).empty_channel("orders", "ch")
    assert (len(first.calls), answers) == (1, [])


async def test_an_expansion_waits_until_the_cluster_is_stable(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150"}, num=1))
    unstable = httpx.Response(400, json={"message": "cluster is unstable"})
    nodes.route("b:4161", "/topic/partition/expand", unstable, "POST")
    with pytest.raises(PartitionUnavailable, match=r"not expanded: the cluster is unstable for 0.05 s"):
        await admin_of(nodes).expand_topic("orders", 2, wait=0.05)
    answers = [unstable, OK]
    nodes.route("b:4161", "/topic/partition/move", lambda request: answers.pop(0), "POST")
    await requests_to(nodes).change_settled("/topic/partition/move", ORDERS, "orders")
    assert answers == []


@pytest.mark.parametrize("ordered", [False, True])
async def test_an_upgrade_ends_connections_once_lookup_reports_it(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    changed = list[str]()
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", changed.append)
    before, after = (lookup_json({0: "n1:4150"}, num=1, extend=extend) for extend in (False, True))
    before["meta"]["ordered"] = after["meta"]["ordered"] = ordered
    answers = [before] * 6
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lambda request: httpx.Response(200, json=answers.pop() if answers else after))
    nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    ended = nodes.route("n1:4151", "/channel/setorder", OK, "POST")
    await admin_of(nodes).upgrade_topic("orders")
    assert [one["order"] for one in params(ended)] == (["false", "true"] if ordered else ["true", "false"])
    assert (answers, changed) == ([], ["orders"])


@pytest.mark.parametrize("known", [False, True])
async def test_a_dispatch_that_servers_ignore_is_refused(nodes: LookupNodes, known: bool) -> None:
    stats = {"topics": [stats_json([{"channel_name": "ch", "dispatch": "shared"}])]}
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("n1:4151", "/stats", stats)
    answer = httpx.Response(400, json={"message": "channel already registered"}) if known else OK
    nodes.route("b:4161", "/channel/create", answer, "POST")
    deleted = nodes.route("b:4161", "/channel/delete", OK, "POST")
    with pytest.raises(OperationNotSupported, match="do not know dispatch='key_failover'"):
        await admin_of(nodes).create_channel("orders", "ch", dispatch="key_failover")
    assert len(deleted.calls) == (not known)


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


async def test_peek_asks_for_no_message_more_and_returns_the_first_of_a_batch_once(nodes: LookupNodes) -> None:
    """A real server returns the first message of a batch for each of its messages."""
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("n1:4151", "/stats", {"topics": [stats_json([])]})
    stored = {"id": 1, "offset": 0, "timestamp": 1, "trace_id": 0, "body": "x", "ext": "blue"}
    asked = nodes.route("n1:4151", "/message/get", stored)
    (message,) = await admin_of(nodes).peek("orders", count=2)
    assert (message.body, message.tag, message.headers) == ("x", "blue", {})
    assert [one["search_pos"] for one in params(asked)] == ["3", "2"]


async def test_an_empty_option_is_refused(nodes: LookupNodes) -> None:
    with pytest.raises(InvalidInput, match="log_level is empty"):
        await admin_of(nodes).set_node_option("n1:4150", "log_level", "")


@pytest.mark.parametrize("partition_num", [2, 3])  # with three, the last has no leader
async def test_leaders_behind_a_dead_node_or_without_the_others_are_asked(
    nodes: LookupNodes, partition_num: int
) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=partition_num))
    nodes.route("n1:4151", "/channel/pause", httpx.ConnectError("down"), "POST")
    paused = nodes.route("n2:4153", "/channel/pause", OK, "POST")
    finished = nodes.route("n2:4153", "/message/finish", OK, "POST")
    admin = admin_of(nodes)
    with pytest.raises(PartitionUnavailable, match="not completed"):
        await admin.pause_channel("orders", "ch")
    await admin.finish_message("orders", "ch", (1 << COUNTER_BITS) + 7)
    assert (len(paused.calls), len(finished.calls)) == (1, 1)


async def test_an_error_that_cannot_pass_is_raised_before_one_that_can(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2))
    nodes.route("n1:4151", "/channel/pause", httpx.ConnectError("down"), "POST")
    nodes.route("n2:4153", "/channel/pause", not_found("CHANNEL_NOT_FOUND"), "POST")
    with pytest.raises(InvalidInput, match="CHANNEL_NOT_FOUND"):
        await admin_of(nodes).pause_channel("orders", "ch")


async def test_set_topic_waits_until_lookup_reports_the_change(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    before, after = lookup_json({0: "n1:4150"}, num=1), lookup_json({0: "n1:4150"}, num=1)
    after["meta"]["replica"] = 2
    changed = nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    answers = [before] * 6
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lambda request: httpx.Response(200, json=answers.pop() if answers else after))
    await admin_of(nodes).set_topic("orders", replicas=2)
    assert params(changed) == [{"topic": "orders", "replicator": "2"}]
    assert answers == []


@pytest.mark.parametrize("leads", [False, True])
async def test_a_replica_or_a_leader_moves(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    """The response to the request may be late, and lookup may report the new leader later."""
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    source = "n1:4150" if leads else "n2:4152"
    leaders = ["n1:4150"]
    members = [{"node_id": f"{name}:4250:{port}:{name[1]}"} for name, port in (("n1", 4150), ("n2", 4152))]
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lambda _: httpx.Response(200, json=lookup_json({0: leaders[-1]}, num=1)))
        nodes.route(
            name, "/nodes", {"producers": [node_json(f"n{number}:{4148 + 2 * number}") for number in (1, 2, 3)]}
        )
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


async def test_a_channel_is_paused_where_all_partitions_are() -> None:
    shares = [
        {"topic_name": "orders", "message_count": 1, "channels": [{"channel_name": "ch", "paused": paused}]}
        for paused in (True, False, True)
    ]
    for number, expected in ((1, True), (3, False)):
        parts = read_stats({"topics": shares[:number]}, Address("n", 4150))["orders"]
        assert sum_up("orders", "original", parts).channels["ch"].paused is expected
    led = [evolve(parts[0], partition=number, node=Address("n", 4152 - number)) for number in (1, 0)]
    assert [part.partition for part in sum_up("orders", "redesigned", led).partitions] == [0, 1]


async def test_a_channel_of_an_unknown_topic(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json())
    with pytest.raises(TopicNotFound):
        await admin_of(nodes).create_channel("orders", "billing")


async def test_a_topic_is_deleted_with_all_partitions(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150"}, num=1))
    deleted = nodes.route("b:4161", "/topic/delete", OK, "POST")
    await admin_of(nodes).delete_topic("orders")
    assert params(deleted) == [{"topic": "orders", "partition": "**"}]


async def test_changes_of_the_original_nsq_are_sent_to_every_lookup_node_and_nsqd() -> None:
    nodes = LookupNodes()
    for name in ("x:4161", "y:4161"):
        nodes.lists(name)
        nodes.finds(name, {**ORIGINAL, "channels": ["billing"]})
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


async def test_clients_learn_of_a_deletion_that_a_dead_node_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", changed.append)
    nodes = LookupNodes()
    nodes.lists("x:4161")
    nodes.finds("x:4161", ORIGINAL)
    nodes.route("x:4161", "/topic/delete", OK, "POST")
    nodes.route("o1:4151", "/topic/delete", httpx.ConnectError("down"), "POST")
    with pytest.raises(ConnectionFailed):
        await admin_of(nodes, "x:4161").delete_topic("orders")
    assert changed == ["orders"]


async def test_clients_learn_of_a_change_that_lookup_reports_late(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    changed: list[str] = []
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", changed.append)
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    admin = admin_of(nodes)
    admin._open()._timeout = 0.02
    for change in (admin.upgrade_topic("orders"), admin.set_topic("orders", replicas=2)):
        with pytest.raises(PartitionUnavailable, match=r"not completed within 0.02 s"):
            await change
    assert changed == ["orders", "orders"]


async def test_a_created_topic_of_the_original_nsq_is_registered_by_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the channel would not be created on a node that registers the topic later."""
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    other = {"broadcast_address": "o2", "tcp_port": 4150, "http_port": 4151, "version": "1.3.0"}
    both = {**ORIGINAL, "producers": [*ORIGINAL["producers"], other]}
    one, all_of_them = httpx.Response(200, json=ORIGINAL), httpx.Response(200, json=both)
    answers = [not_found("TOPIC_NOT_FOUND"), one, one, one, all_of_them]
    nodes = LookupNodes()
    nodes.lists("x:4161")
    nodes.finds("x:4161", lambda request: answers.pop(0) if len(answers) > 1 else answers[0])
    nodes.route("x:4161", "/nodes", both)
    nodes.route("x:4161", "/topic/create", OK, "POST")
    for name in ("x:4161", "o1:4151", "o2:4151"):
        nodes.route(name, "/channel/create", OK, "POST")
    for name in ("o1:4151", "o2:4151"):
        nodes.route(name, "/topic/create", OK, "POST")
    await admin_of(nodes, "x:4161").create_topic("orders", channels=["billing"])
    created = [str(call.request.url.host) for call in nodes.router.calls if call.request.url.path == "/channel/create"]
    assert (created[0], sorted(created)) == ("x", ["o1", "o2", "x"])


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


async def test_an_unknown_setting_of_a_topic_is_refused(nodes: LookupNodes) -> None:
    with pytest.raises(UnknownSetting, match=r"create_topic: unknown setting 'partition'.*did you mean partitions"):
        await admin_of(nodes).create_topic("orders", partition=2)  # type: ignore[call-arg]
    with pytest.raises(UnknownSetting, match="set_topic: unknown setting 'partitions'"):
        await admin_of(nodes).set_topic("orders", partitions=2)  # type: ignore[call-arg]


async def test_a_partition_may_move_for_longer_than_other_changes(nodes: LookupNodes) -> None:
    """The time of a change bounds it no longer: ``wait`` does."""
    requests, attempts = ClusterRequests(LookupClient("a:4161", transport=nodes.transport), timeout=0.1), count()

    async def attempt() -> None:
        if next(attempts) % 2 == 0:
            raise PartitionUnavailable("not yet")

    await requests.settled(attempt, "orders", bounded=False)
    with pytest.raises(PartitionUnavailable, match=r"not completed within 0.1 s, last error: not yet"):
        await requests.settled(attempt, "orders")


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
