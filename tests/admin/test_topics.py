"""Requests that create, change and delete topics, to mocked lookup nodes and nodes of both generations."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint

from nsqext.errors import ConnectionFailed, InvalidInput, LookupFailed, PartitionUnavailable, UnknownSetting
from tests.support.admin_requests import (
    OK,
    ORDERS,
    ORIGINAL,
    admin_of,
    find_by_all,
    params,
    requests_to,
    route_to_all,
)
from tests.support.fake_lookupd import LookupNodes, lookup_json, node_json, not_found

pytestmark = pytest.mark.anyio


async def test_the_leading_lookup_node_creates_topics(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json())
    route_to_all(nodes, "/nodes", {"producers": []})
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


async def test_a_topic_that_is_created_meanwhile_exists(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json())
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

    find_by_all(nodes, lookup)
    route_to_all(nodes, "/nodes", {"producers": []})
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

    find_by_all(nodes, lookup)
    route_to_all(nodes, "/nodes", {"producers": []})
    nodes.route("n1:4151", "/pubtrace", httpx.Response(400, json={"message": "INVALID_TRACE_ID"}), "POST")
    nodes.route("n1:4151", "/channel/create", OK, "POST")
    await admin_of(nodes).create_topic("orders", channels=["billing"], exist_ok=True)
    assert created.call_count == 2


@pytest.mark.parametrize(
    ("access", "text"), [("r", "TOPIC_NOT_FOUND"), ("w", "Topic has no channel")], ids=["unknown", "not ready"]
)
async def test_a_new_topic_is_waited_for_until_lookup_knows_it_and_offers_it_to_producers(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, access: str, text: str
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    early = [not_found(text)] * 2

    def lookup(request: httpx.Request) -> httpx.Response:
        if early and request.url.params["access"] == access:
            return early.pop()
        return httpx.Response(200, json=lookup_json({0: "n1:4150"}, num=1))

    find_by_all(nodes, lookup)
    route_to_all(nodes, "/nodes", {"producers": []})
    for node, path in (("b:4161", "/topic/create"), ("n1:4151", "/pubtrace"), ("n1:4151", "/channel/create")):
        nodes.route(node, path, OK, "POST")
    await admin_of(nodes).create_topic("orders", channels=["billing"], exist_ok=True)
    assert early == []


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


async def test_a_topic_is_created_on_a_node_of_the_original_nsq_that_registers_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lookup knows a topic without nodes, and nsqd creates it for its first publish or subscription."""
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    nodes = LookupNodes()
    nodes.lists("x:4161")
    registered = [httpx.Response(200, json={"producers": []})] * 2
    nodes.route("x:4161", "/nodes", lambda _: registered.pop() if registered else httpx.Response(200, json=ORIGINAL))
    nodes.route("x:4161", "/topic/create", OK, "POST")
    created = nodes.route("o1:4151", "/topic/create", OK, "POST")
    empty: dict[str, object] = {"channels": [], "producers": []}
    nodes.finds("x:4161", lambda _: httpx.Response(200, json=ORIGINAL if created.calls else empty))
    with anyio.fail_after(20):
        await admin_of(nodes, "x:4161").create_topic("orders", exist_ok=True)
    assert len(created.calls) == 1


@pytest.mark.parametrize("wrong", [{"partitions": 0}, {"partitions": 255}, {"replicas": 6}, {"partitions": True}])
async def test_numbers_are_checked(nodes: LookupNodes, wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="is not within 1"):
        await admin_of(nodes).create_topic(
            "orders", partitions=wrong.get("partitions", 1), replicas=wrong.get("replicas", 1)
        )


async def test_an_unknown_setting_of_a_topic_is_refused(nodes: LookupNodes) -> None:
    with pytest.raises(UnknownSetting, match=r"create_topic: unknown setting 'partition'.*did you mean partitions"):
        await admin_of(nodes).create_topic("orders", partition=2)  # type: ignore[call-arg]
    with pytest.raises(UnknownSetting, match="set_topic: unknown setting 'partitions'"):
        await admin_of(nodes).set_topic("orders", partitions=2)  # type: ignore[call-arg]


async def test_a_topic_is_deleted_with_all_partitions(nodes: LookupNodes) -> None:
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    deleted = nodes.route("b:4161", "/topic/delete", OK, "POST")
    await admin_of(nodes).delete_topic("orders")
    assert params(deleted) == [{"topic": "orders", "partition": "**"}]


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
    find_by_all(nodes, lambda request: httpx.Response(200, json=answers.pop() if answers else after))
    nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    scope = anyio.CancelScope()

    async def cancel(_: httpx.Request) -> httpx.Response:
        scope.cancel()  # a channel is not left in between
        await checkpoint()
        return OK

    ended = nodes.route("n1:4151", "/channel/setorder", cancel, "POST")
    with scope:
        await admin_of(nodes).upgrade_topic("orders")
    assert [one["order"] for one in params(ended)] == (["false", "true"] if ordered else ["true", "false"])
    assert (answers, changed) == ([], ["orders"])


@pytest.mark.parametrize(
    ("settings", "sent", "shown"),
    [
        ({"replicas": 2}, {"replicator": "2"}, {"replica": 2}),
        (
            {"registered_channels_only": True},
            {"disable_channel_auto_create": "true"},
            {"disable_channel_auto_create": True},
        ),
    ],
)
async def test_set_topic_waits_until_lookup_reports_the_change(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch, settings: Any, sent: dict[str, str], shown: dict[str, object]
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    before, after = lookup_json({0: "n1:4150"}, num=1), lookup_json({0: "n1:4150"}, num=1)
    after["meta"] |= shown
    changed = nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    answers = [before] * 6
    find_by_all(nodes, lambda request: httpx.Response(200, json=answers.pop() if answers else after))
    await admin_of(nodes).set_topic("orders", **settings)
    assert params(changed) == [{"topic": "orders", **sent}]
    assert answers == []


async def test_an_expansion_waits_until_the_cluster_is_stable(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.admin.requests._PAUSE", 0.001)
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    unstable = httpx.Response(400, json={"message": "cluster is unstable"})
    nodes.route("b:4161", "/topic/partition/expand", unstable, "POST")
    admin = admin_of(nodes)
    admin._open()._timeout = 0.02  # of other changes
    with pytest.raises(PartitionUnavailable, match=r"not expanded: the cluster is unstable for 0.05 s"):
        await admin.expand_topic("orders", 2, wait=0.05)
    texts = ("cluster is unstable", "another balance is running", "topic has no leader")
    answers = [*(httpx.Response(400, json={"message": text}) for text in texts), OK]
    nodes.route("b:4161", "/topic/partition/move", lambda request: answers.pop(0), "POST")
    await requests_to(nodes).change_settled("/topic/partition/move", ORDERS, "orders")
    assert answers == []


async def test_a_deleted_topic_need_not_be_known_to_every_original_lookup_node() -> None:
    nodes = LookupNodes()
    for name, answer in (("x:4161", OK), ("y:4161", not_found("TOPIC_NOT_FOUND"))):
        nodes.lists(name)
        nodes.finds(name, ORIGINAL)
        nodes.route(name, "/nodes", {"producers": []})
        nodes.route(name, "/topic/delete", answer, "POST")
    deleted = nodes.route("o1:4151", "/topic/delete", OK, "POST")
    assert await admin_of(nodes, "x:4161,y:4161").delete_topic("orders")
    assert deleted.called


async def test_clients_learn_of_a_deletion_that_a_dead_node_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[str] = []
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", changed.append)
    nodes = LookupNodes()
    nodes.lists("x:4161")
    nodes.finds("x:4161", ORIGINAL)
    nodes.route("x:4161", "/nodes", {"producers": []})
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
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    admin = admin_of(nodes)
    admin._open()._timeout = 0.02
    for change in (admin.upgrade_topic("orders"), admin.set_topic("orders", replicas=2)):
        with pytest.raises(PartitionUnavailable, match=r"not completed within 0.02 s"):
            await change
    assert changed == ["orders", "orders"]


async def test_clients_learn_of_an_expansion_or_move_that_fails(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", changed.append)
    find_by_all(nodes, lookup_json({0: "n1:4150"}, num=1))
    route_to_all(nodes, "/nodes", httpx.ConnectError("down"))
    nodes.route("b:4161", "/topic/partition/expand", OK, "POST")
    admin = admin_of(nodes)
    for change in (admin.expand_topic("orders", 2), admin.move_partition("orders", 0, "n1:4150", "n2:4150")):
        with pytest.raises(LookupFailed, match="down"):
            await change
    assert changed == ["orders", "orders"]


@pytest.mark.parametrize("action", ["delete", "pause", "unpause", "empty"])
async def test_a_silent_node_of_an_original_topic_does_not_keep_others_from_a_change(
    nodes: LookupNodes, action: str
) -> None:
    nodes.lists("a:4161")
    nodes.finds("a:4161", {"channels": [], "producers": [node_json("o1:4150", ""), node_json("o2:4150", "")]})
    nodes.route("a:4161", "/nodes", {"producers": []})
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


async def test_a_topic_of_the_original_nsq_is_emptied_before_its_channels(nodes: LookupNodes) -> None:
    """It would pass its waiting messages to channels that are empty already."""
    emptied: list[str] = []

    def empty(request: httpx.Request) -> httpx.Response:
        emptied.append(request.url.path)
        return OK

    nodes.lists("a:4161")
    nodes.finds("a:4161", {"channels": ["billing"], "producers": [node_json("o1:4150", "")]})
    for path in ("/channel/empty", "/topic/empty"):
        nodes.route("o1:4151", path, empty, "POST")
    await admin_of(nodes).empty_topic("orders")
    assert emptied == ["/topic/empty", "/channel/empty"]


async def test_a_topic_of_a_mixed_cluster_is_created_although_an_original_node_does_not_hold_it() -> None:
    """While a cluster is replaced, it has nodes of both generations."""
    nodes = LookupNodes()
    nodes.lists("a:4161", "a:4161", leader="a:4161")
    nodes.finds("a:4161", lookup_json({0: "n1:4150"}, num=1))
    nodes.route("a:4161", "/nodes", {"producers": [node_json("n1:4150"), node_json("o1:4150", "1.3.0")]})
    nodes.route("a:4161", "/topic/create", OK, "POST")
    created = nodes.route("o1:4151", "/topic/create", OK, "POST")
    nodes.route("n1:4151", "/pubtrace", httpx.Response(400, json={"message": "INVALID_TRACE_ID"}), "POST")
    await admin_of(nodes).create_topic("orders", exist_ok=True, wait=5.0)
    assert created.called


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"partitions": 3}, "3 partitions need 3 nodes, but the cluster has 2"),
        ({"partitions": 2}, "No node is available for topic"),
        ({"partitions": 3, "multipart": True}, "No node is available for topic"),
    ],
)
async def test_a_lack_of_nodes_is_named_where_it_is_the_reason(nodes: LookupNodes, settings: Any, text: str) -> None:
    find_by_all(nodes, lookup_json())
    route_to_all(nodes, "/nodes", {"producers": [node_json("n1:4150"), node_json("n2:4152")]})
    refusal = httpx.Response(400, json={"message": "No node is available for topic"})
    nodes.route("b:4161", "/topic/create", refusal, "POST")
    with pytest.raises(LookupFailed, match=text):
        await admin_of(nodes).create_topic("orders", wait=0, **settings)


async def test_an_upgraded_topic_is_not_upgraded_again_and_its_channels_may_lack_partitions(
    nodes: LookupNodes,
) -> None:
    """Partitions that were added later have no channel until a consumer subscribes."""
    before, after = (lookup_json({0: "n1:4150", 1: "n2:4152"}, num=2, extend=extend) for extend in (False, True))
    upgraded = nodes.route("b:4161", "/topic/meta/update", OK, "POST")
    find_by_all(nodes, lambda _: httpx.Response(200, json=after if upgraded.called else before))
    nodes.route("n1:4151", "/channel/setorder", not_found("CHANNEL_NOT_FOUND"), "POST")
    ended = nodes.route("n2:4153", "/channel/setorder", OK, "POST")
    for _ in range(2):
        await admin_of(nodes).upgrade_topic("orders")
        assert (upgraded.call_count, ended.call_count) == (1, 2)
