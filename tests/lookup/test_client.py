"""Queries to all lookup nodes: their list, their order, failing and slow ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import httpx
import pytest

from nsqext.errors import InvalidInput, InvalidName, InvalidSetting, InvalidState, LookupFailed, TopicNotFound
from nsqext.lookup.client import LookupClient
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.responses import read_lookup
from nsqext.types import Address
from tests.support.clock import run_in_virtual_time
from tests.support.fake_lookupd import Held, LookupNodes, lookup_json, node_json, not_found, recorded

pytestmark = pytest.mark.anyio

A, B, C = Address("a", 4161), Address("b", 4161), Address("c", 4161)
FOUND = lookup_json({0: "n1:4150"}, num=1)


@pytest.fixture
async def nodes() -> AsyncIterator[LookupNodes]:
    """Lookup nodes with scripted responses."""
    lookup_nodes = LookupNodes()
    yield lookup_nodes


def client_of(nodes: LookupNodes, addresses: str = "a:4161", **options: Any) -> LookupClient:
    """Return a client of these nodes, with timeouts that a busy machine does not reach."""
    given = {"request_timeout": 30.0, "straggler_timeout": 30.0, **options}
    return LookupClient(addresses, LookupOptions(**given), nodes.transport)


def refuse(request: httpx.Request) -> httpx.Response:
    """Fail like a node that is down."""
    raise httpx.ConnectError("refused", request=request)


async def stuck(request: httpx.Request) -> httpx.Response:
    """Never respond."""
    await anyio.sleep_forever()
    raise AssertionError


async def test_all_listed_nodes_are_requested(nodes: LookupNodes) -> None:
    listed = nodes.lists("a:4161", "a:4161", "b:4161", leader="b:4161")
    asked = [nodes.finds("a:4161", FOUND), nodes.finds("b:4161", lookup_json({1: "n2:4150"}, num=2))]
    client = client_of(nodes)
    answers = await client.lookup("orders", "r")
    assert [(answer.source, list(answer.partitions)) for answer in answers] == [(A, [0]), (B, [1])]
    assert listed.call_count == 1
    for route in asked:
        request = route.calls.last.request
        assert dict(request.url.params) == {"topic": "orders", "access": "r", "metainfo": "true"}
        assert request.headers["Accept"] == "application/vnd.nsq; version=1.0"
    assert [(node.address, node.leader) for node in await client.lookup_nodes()] == [(A, False), (B, True)]


async def test_lookup_nodes_are_requested_concurrently(nodes: LookupNodes) -> None:
    here, both = set[str](), anyio.Event()

    async def meet(request: httpx.Request) -> httpx.Response:
        here.add(request.url.host)
        if len(here) == 2:
            both.set()
        with anyio.fail_after(25):
            await both.wait()
        return httpx.Response(200, json=FOUND)

    nodes.lists("a:4161", "a:4161", "b:4161")
    nodes.finds("a:4161", meet)
    nodes.finds("b:4161", meet)
    assert all(answer.found for answer in await client_of(nodes).lookup("orders"))


def test_a_token_is_not_given_to_an_address_without_tls() -> None:
    with pytest.raises(InvalidSetting, match="auth_secret would be sent in clear to n:4161"):
        LookupClient(["127.0.0.1:4161", "n:4161"], LookupOptions(auth_secret="hush"))
    LookupClient(["127.0.0.1:4161", "https://n:4161"], LookupOptions(auth_secret="hush"))


async def test_an_equal_response_is_read_once(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "a:4161", epochs={"a:4161": 4})
    nodes.finds("a:4161", FOUND)
    client = client_of(nodes, poll_interval=0.001)
    [first], [again] = await client.lookup("orders", "r"), await client.lookup("orders", "r")
    assert again is first
    nodes.lists("a:4161", "a:4161", epochs={"a:4161": 5})
    await anyio.sleep(0.02)
    [newer] = await client.lookup("orders", "r")
    assert (newer.epoch, newer.partitions is first.partitions) == (5, True)
    nodes.finds("a:4161", lookup_json({0: "n9:4150"}, num=1))
    [changed] = await client.lookup("orders", "r")
    assert changed.partitions != first.partitions


async def test_responses_of_many_topics_are_not_all_kept(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.lookup.client.MAX_PARSED", 2)
    nodes.lists("a:4161", "a:4161")
    nodes.finds("a:4161", FOUND)
    client = client_of(nodes)
    [first], [again] = await client.lookup("one"), await client.lookup("one")
    assert again is first
    for topic in ("two", "three"):
        await client.lookup(topic)
    [later] = await client.lookup("one")
    assert later == first
    assert later is not first


async def test_the_lists_of_all_lookup_nodes_are_bounded_together(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "a:4161", "b:4161")
    nodes.lists("b:4161", "c:4161", "d:4161")
    client = client_of(nodes, "a:4161,b:4161", max_lookup_nodes=2)
    assert len(await client.lookup_nodes()) == 2


async def test_of_lists_that_disagree_the_higher_epoch_counts(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "a:4161", "b:4161", epochs={"a:4161": 4, "b:4161": 1})
    nodes.lists("b:4161", "a:4161", "b:4161", epochs={"a:4161": 4, "b:4161": 2}, leader="b:4161")
    listed = await LookupClient("a:4161,b:4161", transport=nodes.transport).lookup_nodes()
    assert {str(node.address): (node.epoch, node.leader) for node in listed} == {
        "a:4161": (4, False),
        "b:4161": (2, True),
    }


async def test_answers_have_the_epoch_of_listlookup(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "a:4161", "b:4161", epochs={"a:4161": 3})
    nodes.lists("b:4161", "a:4161", "b:4161", epochs={"a:4161": 2, "b:4161": 7})
    for name in ("a:4161", "b:4161"):
        nodes.finds(name, FOUND)
    answers = await client_of(nodes, "a:4161,b:4161").lookup("orders")
    assert [(answer.source, answer.epoch) for answer in answers] == [(A, 3), (B, 7)]


async def test_a_node_of_the_original_nsq_is_requested_directly(
    nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.lookup.client.RELIST_SOON", 0.0)  # after a list that failed
    recordings = {answer["path"]: answer for answer in recorded("original.json")}
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        asked.append(path)
        return httpx.Response(recordings[path]["status"], text=recordings[path]["body"])

    nodes.route("a:4161", "/listlookup", answer)
    nodes.finds("a:4161", answer)
    client = client_of(nodes)
    (found,) = await client.lookup("orders")
    assert [str(node.tcp) for node in found.nodes] == ["127.0.0.1:14150"]
    (missing,) = await client.lookup("missing")
    assert isinstance(missing.error, TopicNotFound)
    assert asked.count("/listlookup") == 1


async def test_old_and_new_clusters_together(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "b:4161")
    nodes.lists("c:4161")
    nodes.finds("b:4161", FOUND)
    nodes.finds("c:4161", {"channels": [], "producers": []})
    answers = await client_of(nodes, "a:4161,c:4161").lookup("orders")
    assert {answer.source for answer in answers} == {B, C}


async def test_without_a_list_the_given_addresses_are_requested(nodes: LookupNodes) -> None:
    nodes.route("a:4161", "/listlookup", refuse)
    nodes.route("b:4161", "/listlookup", httpx.Response(500, text="boom"))
    nodes.finds("a:4161", refuse)
    nodes.finds("b:4161", FOUND)
    answers = {answer.source: answer for answer in await client_of(nodes, "a:4161,b:4161").lookup("orders")}
    assert answers[B].found
    assert isinstance(answers[A].error, LookupFailed)


async def test_an_unreachable_list_falls_back_to_the_configured_addresses(nodes: LookupNodes) -> None:
    """Lookup nodes may list addresses that are valid only inside their network."""
    nodes.lists("a:4161", "b:4161", "c:4161")
    nodes.finds("b:4161", refuse)
    nodes.finds("c:4161", refuse)
    nodes.finds("a:4161", FOUND)
    answers = await client_of(nodes).lookup("orders")
    assert [(answer.source, answer.epoch) for answer in answers if answer.found] == [(A, 0)]


async def test_an_unlisted_address_is_requested_only_if_needed(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "b:4161")
    nodes.finds("b:4161", FOUND)
    spared = nodes.finds("a:4161", FOUND)
    await client_of(nodes).lookup("orders")
    assert not spared.called


async def test_lists_are_requested_again_after_the_interval(nodes: LookupNodes) -> None:
    listed = nodes.lists("a:4161", "a:4161")
    nodes.finds("a:4161", FOUND)
    client = client_of(nodes)
    await client.lookup("orders")
    await client.lookup("orders")
    assert listed.call_count == 1
    client = client_of(nodes, poll_interval=1e-6)
    await client.lookup("orders")
    await anyio.sleep(0.001)
    await client.lookup("orders")
    assert listed.call_count == 3


async def test_a_node_removed_from_the_list_is_not_requested(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "a:4161", "b:4161")
    nodes.finds("a:4161", FOUND)
    left = nodes.finds("b:4161", FOUND)
    client = client_of(nodes, poll_interval=1e-6)
    await client.lookup("orders")
    nodes.lists("a:4161", "a:4161")
    await anyio.sleep(0.001)
    await client.lookup("orders")
    assert left.call_count == 1
    assert [node.address for node in await client.lookup_nodes()] == [A]


async def test_known_nodes_are_kept_without_a_list(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "b:4161")
    nodes.finds("b:4161", FOUND)
    client = client_of(nodes, poll_interval=1e-6)
    await client.lookup("orders")
    for name in ("a:4161", "b:4161"):
        nodes.route(name, "/listlookup", refuse)
        nodes.finds(name, refuse)
    nodes.finds("b:4161", FOUND)
    await anyio.sleep(0.001)
    assert [answer.source for answer in await client.lookup("orders") if answer.found] == [B]


async def test_the_list_is_read_from_known_nodes_when_the_configured_ones_are_down(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "b:4161")
    nodes.finds("b:4161", FOUND)
    client = client_of(nodes, poll_interval=1e-6)
    await client.lookup("orders")
    nodes.route("a:4161", "/listlookup", refuse)
    nodes.finds("a:4161", refuse)
    nodes.lists("b:4161", "b:4161", "c:4161")
    nodes.finds("c:4161", FOUND)
    await anyio.sleep(0.001)
    assert {answer.source for answer in await client.lookup("orders") if answer.found} == {B, C}


async def test_a_failing_address_is_requested_last(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.lists(name)
    failing = nodes.finds("a:4161", refuse)
    nodes.finds("b:4161", FOUND)
    client = client_of(nodes, "a:4161,b:4161", max_failures=2)
    for _ in range(4):
        assert any(answer.found for answer in await client.lookup("orders"))
    assert failing.call_count == 2
    nodes.finds("b:4161", not_found("TOPIC_NOT_FOUND"))
    await client.lookup("orders")
    assert failing.call_count == 3, "it is queried if the others do not find the topic"
    nodes.finds("a:4161", FOUND)
    await client.lookup("orders")
    nodes.finds("b:4161", FOUND)
    assert len(await client.lookup("orders")) == 2, "it is queried like the others since it responded"


async def test_a_failing_address_is_tried_again_after_a_while(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.lists(name)
    failing = nodes.finds("a:4161", refuse)
    nodes.finds("b:4161", FOUND)
    client = client_of(nodes, "a:4161,b:4161", max_failures=1, retry_failed=1e-6)
    for _ in range(3):
        await client.lookup("orders")
        await anyio.sleep(0.001)
    assert failing.call_count == 3


async def test_failures_are_remembered_when_the_list_is_read_again(nodes: LookupNodes) -> None:
    nodes.lists("a:4161", "b:4161", "c:4161")
    given, listed = nodes.finds("a:4161", refuse), nodes.finds("b:4161", refuse)
    nodes.finds("c:4161", not_found("TOPIC_NOT_FOUND"))
    client = client_of(nodes, max_failures=1, poll_interval=1e-6)
    await client.lookup("orders")
    assert (given.call_count, listed.call_count) == (1, 1)
    await anyio.sleep(0.001)
    nodes.finds("c:4161", FOUND)
    await client.lookup("orders")
    assert (given.call_count, listed.call_count) == (1, 1), "they are asked last"
    await anyio.sleep(0.001)
    nodes.finds("c:4161", not_found("TOPIC_NOT_FOUND"))
    nodes.finds("a:4161", FOUND)
    assert any(answer.found for answer in await client.lookup("orders"))
    assert (given.call_count, listed.call_count) == (2, 2), "both are asked last"


async def test_an_unknown_topic_is_no_failure_of_the_node(nodes: LookupNodes) -> None:
    nodes.lists("a:4161")
    nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
    nodes.lists("b:4161")
    nodes.finds("b:4161", FOUND)
    client = client_of(nodes, "a:4161,b:4161", max_failures=1)
    for _ in range(3):
        assert len(await client.lookup("orders")) == 2


async def test_a_much_slower_node_is_not_waited_for(nodes: LookupNodes) -> None:
    for name in ("a:4161", "b:4161"):
        nodes.lists(name)
    nodes.finds("a:4161", stuck)
    nodes.finds("b:4161", FOUND)
    client = client_of(nodes, "a:4161,b:4161", straggler_timeout=0.01, request_timeout=30)
    with anyio.fail_after(25):
        slow, quick = sorted(await client.lookup("orders"), key=lambda answer: answer.source)
    assert quick.found
    assert "straggler_timeout" in str(slow.error)


def test_a_second_response_gives_the_others_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.9)
        return httpx.Response(200, json=FOUND)

    async def ask() -> None:
        nodes = LookupNodes()
        for name, answer in (("a:4161", FOUND), ("b:4161", slow), ("c:4161", stuck)):
            nodes.lists(name)
            nodes.finds(name, answer)
        client = client_of(nodes, "a:4161,b:4161,c:4161", straggler_timeout=1.0)
        began = anyio.current_time()
        assert [answer.found for answer in await client.lookup("orders")] == [True, True, False]
        assert anyio.current_time() - began == pytest.approx(1.0)

    run_in_virtual_time(monkeypatch, ask)


async def test_a_long_list_of_lookup_nodes_is_requested_in_portions(nodes: LookupNodes) -> None:
    names = [f"n{number}:4161" for number in range(100)]
    nodes.lists(names[0], *names)
    asked = most = 0

    async def count(request: httpx.Request) -> httpx.Response:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        await anyio.lowlevel.checkpoint()
        asked -= 1
        return httpx.Response(200, json=FOUND)

    for name in names:
        nodes.finds(name, count)
    answers = await client_of(nodes, names[0], max_lookup_nodes=100).lookup("orders")
    assert [answer.found for answer in answers] == [True] * 100
    assert 1 < most <= 32


async def test_a_refusal_does_not_change_the_pace_of_the_others(nodes: LookupNodes) -> None:
    """In a mixed cluster, a node without the topic does not imply anything about the others."""
    for name in ("a:4161", "b:4161"):
        nodes.lists(name)

    async def slow(request: httpx.Request) -> httpx.Response:
        await anyio.sleep(0.05)
        return httpx.Response(200, json=FOUND)

    nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
    nodes.finds("b:4161", slow)
    answers = await client_of(nodes, "a:4161,b:4161", straggler_timeout=0).lookup("orders")
    assert any(answer.found for answer in answers)


async def test_lookups_at_the_same_time_share_one_list(nodes: LookupNodes) -> None:
    listed = nodes.lists("a:4161", "a:4161")
    nodes.finds("a:4161", FOUND)
    client = client_of(nodes)
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(client.lookup, f"topic{number}")
    assert listed.call_count == 1


async def test_another_task_continues_a_cancelled_listing(nodes: LookupNodes) -> None:
    held = Held(not_found())
    nodes.route("a:4161", "/listlookup", held)
    client = client_of(nodes)
    scope = anyio.CancelScope()
    found: list[object] = []

    async def give_up() -> None:
        with scope:
            await client.lookup_nodes()

    async def wait_for_list() -> None:
        found.append(await client.lookup_nodes())

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            await held.asked.wait()
            tasks.start_soon(wait_for_list)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
            held.open.set()
    assert len(found) == 1


async def test_lists_are_requested_at_once_when_everything_fails(nodes: LookupNodes) -> None:
    listed = nodes.lists("a:4161", "b:4161")
    nodes.finds("a:4161", refuse)
    nodes.finds("b:4161", refuse)
    client = client_of(nodes)
    for _ in range(2):
        assert not any(answer.found for answer in await client.lookup("orders"))
    assert listed.call_count == 2


async def test_names_are_checked_before_any_request(nodes: LookupNodes) -> None:
    client = client_of(nodes)
    with pytest.raises(InvalidName):
        await client.lookup("a b")
    with pytest.raises(InvalidInput, match="neither 'r' nor 'w'"):
        await client.lookup("orders", "rw")


async def test_topics_and_nodes_of_all(nodes: LookupNodes) -> None:
    for name, file in (("a:4161", "redesigned.json"), ("b:4161", "original.json")):
        nodes.lists(name)
        for path in ("/topics", "/nodes"):
            answer = next(answer for answer in recorded(file) if answer["path"] == path)
            nodes.route(name, path, httpx.Response(answer["status"], text=answer["body"]))
    client = client_of(nodes, "a:4161,b:4161")
    assert "orders" in await client.lists.topics()
    assert len(await client.lists.topics()) == 5
    found = [str(node.tcp) for node in await client.lists.nodes()]
    assert found == ["127.0.0.1:5350", "127.0.0.1:5352", "127.0.0.1:5354", "127.0.0.1:14150"]


@pytest.mark.parametrize("answer", [{"topics": 7}, {}, [], httpx.Response(200, text="<html>")])
async def test_invalid_lists(nodes: LookupNodes, answer: Any) -> None:
    nodes.lists("a:4161", "b:4161")  # a given address is asked after the listed ones
    for name in ("a:4161", "b:4161"):
        nodes.route(name, "/topics", httpx.Response(200, json=answer) if answer == [] else answer)
    with pytest.raises(LookupFailed, match=r"no lookup node returned a usable response: .*b:4161.*a:4161"):
        await client_of(nodes).lists.topics()


@pytest.mark.parametrize("addresses", ["", ",", []])
async def test_no_address_is_refused(addresses: Any) -> None:
    with pytest.raises(InvalidSetting, match="has no address"):
        LookupClient(addresses)


async def test_it_is_closed_with_its_block() -> None:
    async with LookupClient("a:4161") as client:
        pass
    for ask in (client.lookup_nodes, client.lists.topics, client.lists.nodes, partial(client.lookup, "orders")):
        with pytest.raises(InvalidState, match="closed"):
            await ask()


async def test_long_lists_are_refused_or_cut(nodes: LookupNodes, caplog: pytest.LogCaptureFixture) -> None:
    nodes.lists("a:4161", "a:4161")
    nodes.route("a:4161", "/topics", {"topics": ["one", "two", "three"]})
    nodes.route("a:4161", "/nodes", {"producers": [node_json(f"n{number}:4150") for number in range(5)]})
    assert len(await client_of(nodes, max_topics=3).lists.topics()) == 3
    with pytest.raises(LookupFailed, match=r"lists 3 topics, more than max_topics=2.*raise max_topics"):
        await client_of(nodes, max_topics=2).lists.topics()
    with pytest.raises(LookupFailed, match="lists 3 topics"):
        await client_of(nodes, max_topics=2).lists.extend_support()
    assert len(await client_of(nodes, max_nodes=5).lists.nodes()) == 5
    assert "max_nodes" not in caplog.text
    assert len(await client_of(nodes, max_nodes=2).lists.nodes()) == 2
    assert "a:4161 lists 5 nodes; max_nodes=2 of them are read" in caplog.text


@pytest.mark.parametrize("addresses", ["a:4161", "a:4161,b:4161"])
async def test_errors_that_are_kept_do_not_keep_the_response(nodes: LookupNodes, addresses: str) -> None:
    for address in addresses.split(","):
        nodes.lists(address)
        nodes.finds(address, {"partitions": {"x": {"large": "response"}}})
    answers = await client_of(nodes, addresses).lookup("orders")
    assert len(answers) == len(addresses.split(","))
    for answer in answers:
        error: BaseException | None = answer.error
        assert isinstance(error, LookupFailed)
        while error is not None:
            assert error.__traceback__ is None
            error = error.__cause__ or error.__context__


async def test_responses_are_read_in_turns(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two large responses the event loop runs other tasks."""
    turns: list[int] = []
    turn = 0

    def reading(*arguments: Any) -> Any:
        turns.append(turn)
        return read_lookup(*arguments)

    async def count() -> None:
        nonlocal turn
        while True:
            turn += 1
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr("nsqext.lookup.client.read_lookup", reading)
    names = [f"n{number}:4161" for number in range(16)]
    nodes.lists("a:4161", *names)
    for name in names:
        nodes.finds(name, FOUND)
    client = client_of(nodes)
    await client.lookup_nodes()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(count)
        await client.lookup("orders")
        tasks.cancel_scope.cancel()
    assert len(turns) == 16
    assert max(Counter(turns).values()) <= 2  # one before and one after the other task, on trio


async def test_what_is_known_of_a_failure_keeps_nothing_in_memory() -> None:
    def lost(request: httpx.Request) -> httpx.Response:
        try:
            request.url.params["no such name"]
        except KeyError:
            raise httpx.ReadError("reset")  # noqa: B904 - as libraries do
        raise AssertionError

    client = LookupClient("a:4161", LookupOptions(), httpx.MockTransport(lost))
    (answer,) = await client.lookup("orders", "r")
    links: list[BaseException] = []
    error: BaseException | None = answer.error
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    assert KeyError in map(type, links)
    assert [link for link in links if link.__traceback__ is not None] == []
    await client.aclose()
