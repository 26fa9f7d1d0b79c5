"""Partition maps: lookup, failures, polling, watching."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anyio
import certifi
import httpx
import pytest

import nsqext.lookup.metadata as module
from nsqext import Producer
from nsqext.errors import InvalidName, InvalidSetting, InvalidState, LookupFailed, TopicNotFound
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.responses import NodeInfo
from nsqext.types import Address, TopicMeta
from tests.support.clock import run_in_virtual_time
from tests.support.fake_lookupd import Held, LookupNodes, answering, eventually, http, lookup_json, not_found, serving

if TYPE_CHECKING:
    from nsqext.lookup.partition_map import PartitionMap

pytestmark = pytest.mark.anyio

N1, N2 = Address("n1", 4150), Address("n2", 4150)


@pytest.fixture
async def nodes() -> AsyncIterator[LookupNodes]:
    """One lookup node, a."""
    lookup_nodes = LookupNodes()
    lookup_nodes.lists("a:4161", "a:4161")
    yield lookup_nodes


def cache_of(nodes: LookupNodes, **options: Any) -> MetadataCache:
    """Return a cache that uses node a, with timeouts that a busy machine does not reach."""
    given = {"request_timeout": 30.0, "straggler_timeout": 30.0, **options}
    return MetadataCache("a:4161", options=LookupOptions(**given), transport=nodes.transport)


def leads(name: str, num: int = 1) -> dict[str, Any]:
    """Return an answer in which a node leads partition 0."""
    return lookup_json({0: f"{name}:4150"}, num=num)


# Without lookup


async def test_fixed_nodes_without_lookup() -> None:
    cache = MetadataCache(nsqd="n1:4150, n2:4150")
    view = cache.cached("orders")
    assert view is not None
    assert view is cache.cached("orders") is await cache.resolve("orders")
    assert (view.nodes, view.leaders, view.meta) == ((N1, N2), {}, TopicMeta())
    assert view.complete
    assert (view.partition_num, view.version) == (0, 1)
    assert (cache.addresses, cache.has_https, cache.answer_age) == ((N1, N2), False, None)
    with pytest.raises(InvalidState, match="no HTTP addresses"):
        _ = cache.channels
    for ask in (cache.topics, cache.nodes, lambda: cache.refresh("orders")):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await ask()
        assert scope.cancelled_caught
    await cache.run()
    await cache.refresh("orders", failed=view)
    assert (await cache.topics(), await cache.nodes(), await cache.lacks_channel("orders", 0)) == ((), (), False)
    cache.watch("orders", "r", lambda view: None)()
    assert cache.cached("orders") is view
    with pytest.raises(InvalidName):
        cache.cached("a b")
    await cache.aclose()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "neither lookupd nor nsqd"),
        ({"lookupd": [], "nsqd": ""}, "neither lookupd nor nsqd"),
        ({"lookupd": "a:1", "nsqd": "b:2"}, "both lookupd and nsqd"),
        ({"lookupd": "a:"}, "lookupd: 'a:' is not an address"),
        ({"lookupd": ","}, "has no address"),
        ({"nsqd": ["a"]}, "nsqd: 'a' is not an address"),
    ],
)
def test_addresses_are_checked(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        MetadataCache(**given)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("lookup_request_timeout", 5.0), ("lookup_ca", certifi.where()), ("address_map", "a=b"), ("node_filter", bool)],
)
def test_settings_of_lookup_are_refused_without_it(setting: str, value: Any) -> None:
    settings: dict[str, Any] = {setting: value}
    Producer("127.0.0.1:1", **settings)
    with pytest.raises(InvalidSetting, match=f"{setting} has no effect with nsqd="):
        Producer(nsqd="127.0.0.1:1", **settings)


def test_it_can_be_made_outside_of_an_event_loop() -> None:
    assert MetadataCache("http://[::1]:4161").cached("orders") is None


# Finding


async def test_a_topic_is_looked_up_once(nodes: LookupNodes) -> None:
    asked = nodes.finds("a:4161", lookup_json({0: "n1:4150", 1: "n2:4150"}, num=2, extend=True))
    cache = cache_of(nodes)
    assert cache.cached("orders") is None
    view = await cache.resolve("orders")
    assert view.leaders == {0: N1, 1: N2}
    assert view.http == {N1: Address("n1", 4151), N2: Address("n2", 4151)}
    assert view.meta.extend_support
    assert view.complete
    assert cache.cached("orders") is view is await cache.resolve("orders")
    assert cache.cached("orders", "r") is None
    assert asked.call_count == 1
    await cache.resolve("orders", "r")
    assert asked.calls.last.request.url.params["access"] == "r"


async def test_an_unknown_topic_differs_from_a_failed_lookup(nodes: LookupNodes) -> None:
    cache = cache_of(nodes, max_pause=0)
    nodes.finds("a:4161", not_found("Key not found"))
    with pytest.raises(TopicNotFound, match=r"does not know the topic \(topic orders, node a:4161\): create it"):
        await cache.resolve("orders")
    assert cache.failures == 0, "an unknown topic is an answer"
    nodes.finds("a:4161", httpx.Response(200, html="<html>It works!</html>"))
    for failures in (1, 2):
        with pytest.raises(LookupFailed, match=r"It works!.*nsqlookupd's HTTP side"):
            await cache.resolve("orders")
        assert cache.failures == failures
    nodes.finds("a:4161", leads("n1"))
    assert (await cache.resolve("orders")).leaders == {0: N1}
    assert cache.failures == 0


@pytest.mark.parametrize(("nsqd", "https"), [("https://n1:4151", True), ("http://n1:4151", False), ("n1:4151", False)])
def test_fixed_nodes_may_be_reached_over_https(nsqd: str, https: bool) -> None:
    assert MetadataCache(nsqd=nsqd, over_http=True).has_https is https


async def test_it_says_when_a_lookup_node_answered_last_and_what_is_unknown(nodes: LookupNodes) -> None:
    cache = cache_of(nodes, max_pause=0)
    assert (cache.answer_age, cache.is_unknown("orders"), cache.addresses) == (None, False, (Address("a", 4161),))
    nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
    with pytest.raises(TopicNotFound):
        await cache.resolve("orders")
    assert cache.is_unknown("orders")
    nodes.finds("a:4161", leads("n1"))
    await cache.resolve("orders")
    assert not cache.is_unknown("orders")
    assert cache.answer_age is not None
    assert 0 <= cache.answer_age < 60


_LISTED = lookup_json(nodes=["n1:4150"])
_HAS: dict[str, Any] = {"topics": [{"topic_name": "orders"}]}
_LACKS: dict[str, Any] = {"topics": []}
_DOWN = httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("lookup", "stats", "allowed"),
    [
        (_LISTED, _HAS, True),
        (_LISTED, _LACKS, False),
        (_LISTED, _DOWN, True),
        (lookup_json(nodes=["n2:4150"]), _HAS, False),
        ({"channels": ["ch"], "producers": []}, _HAS, False),
        (not_found("TOPIC_NOT_FOUND"), _HAS, False),
        (_DOWN, _HAS, True),
        (_DOWN, _LACKS, False),
        (_DOWN, _DOWN, True),
    ],
)
async def test_a_node_that_may_have_lost_a_topic_is_subscribed_if_lookup_and_the_node_know_it(
    nodes: LookupNodes, lookup: Any, stats: Any, allowed: bool
) -> None:
    cache = cache_of(nodes, max_pause=0)
    nodes.finds("a:4161", _LISTED)
    view = await cache.resolve("orders", "r")
    asked = nodes.finds("a:4161", lookup)
    nodes.route("n1:4151", "/stats", stats)
    before = asked.call_count
    assert await cache.may_subscribe("orders", view, N1) is allowed
    assert asked.call_count == before + 1, "what is cached does not count"


async def test_a_node_without_lookup_is_subscribed_always() -> None:
    cache = MetadataCache(nsqd="n1:4150")
    view = await cache.resolve("orders", "r")
    assert await cache.may_subscribe("orders", view, N1)


async def test_a_list_of_topics_may_be_as_old_as_is_asked_for(nodes: LookupNodes) -> None:
    listed = nodes.route("a:4161", "/topics", {"topics": ["one"]})
    cache = cache_of(nodes)
    for max_age, requests in ((60, 1), (60, 1), (0, 2)):
        assert await cache.topics(max_age=max_age) == ("one",)
        assert listed.call_count == requests
    assert cache.answer_age is not None


async def test_each_waiting_task_raises_its_own_error(nodes: LookupNodes) -> None:
    asked = nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
    cache = cache_of(nodes)
    errors: list[TopicNotFound] = []

    async def resolve() -> None:
        with pytest.raises(TopicNotFound) as caught:
            await cache.resolve("orders")
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(resolve)
    assert asked.call_count == 1
    assert len({id(error) for error in errors}) == 5
    assert {error.topic for error in errors} == {"orders"}


async def test_a_topic_without_leaders_is_after_error_again(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", lookup_json({}, num=1))
    cache = cache_of(nodes)
    assert (await cache.resolve("orders")).partition_num == 1
    nodes.finds("a:4161", leads("n1"))
    assert (await cache.resolve("orders")).leaders == {0: N1}


async def test_over_real_sockets(closed_address: Address) -> None:
    list_and_answer = answering(http(b'{"partitions":{"0":{"broadcast_address":"n1","tcp_port":4150}},"producers":[]}'))
    async with serving(list_and_answer) as address:
        cache = MetadataCache([str(address), str(closed_address)])
        view = await cache.resolve("orders")
        await cache.aclose()
    assert view.leaders == {0: N1}


async def test_an_address_that_is_down_is_a_clear_error_in_time(closed_address: Address) -> None:
    cache = MetadataCache(str(closed_address))
    with anyio.fail_after(25), pytest.raises(LookupFailed, match="no lookup node returned a usable response"):
        await cache.resolve("orders")
    await cache.aclose()


# Refreshing


async def test_refreshing_after_an_error(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes)
    old = await cache.resolve("orders")
    asked = nodes.finds("a:4161", leads("n2"))
    async with anyio.create_task_group() as tasks:
        for _ in range(64):
            tasks.start_soon(cache.refresh, "orders", "w", old)
    new = cache.cached("orders")
    assert new is not None
    assert new.leaders == {0: N2}
    assert new.version > old.version
    assert asked.call_count == 2, "one lookup of the topic, one refresh for all errors"


@pytest.mark.parametrize(
    "answer",
    [
        lookup_json({}, num=1),
        lookup_json(),
        not_found("TOPIC_NOT_FOUND"),
        httpx.Response(500, text="boom"),
        httpx.Response(200, html="<html>"),
    ],
)
async def test_failures_never_empty_a_map(nodes: LookupNodes, answer: Any) -> None:
    nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes)
    view = await cache.resolve("orders")
    nodes.finds("a:4161", answer)
    await cache.refresh("orders", failed=view)
    kept = cache.cached("orders")
    assert kept is not None
    assert (kept.leaders, kept.meta) == (view.leaders, view.meta)
    assert (await cache.resolve("orders")).leaders == view.leaders


async def test_the_accesses_are_separate(nodes: LookupNodes) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=leads("n1" if request.url.params["access"] == "w" else "n2"))

    nodes.finds("a:4161", answer)
    cache = cache_of(nodes)
    assert (await cache.resolve("orders", "w")).leaders == {0: N1}
    assert (await cache.resolve("orders", "r")).leaders == {0: N2}


# Watching and polling


async def test_watchers_are_called_for_changes_only(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes, max_pause=0)
    seen: list[PartitionMap] = []
    unwatch = cache.watch("orders", "r", seen.append)
    await cache.resolve("orders", "r")
    await cache.refresh("orders", "r")
    assert [view.leaders for view in seen] == [{0: N1}]
    assert seen[0] is cache.cached("orders", "r")
    nodes.finds("a:4161", leads("n2"))
    await cache.refresh("orders", "r")
    assert [view.leaders for view in seen] == [{0: N1}, {0: N2}]
    unwatch()
    unwatch()
    nodes.finds("a:4161", leads("n1"))
    await cache.refresh("orders", "r")
    assert len(seen) == 2


async def test_a_watched_topic_is_found_and_followed_by_polling(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
    cache = cache_of(nodes, poll_interval=0.01)
    seen: list[PartitionMap] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.run)
        await anyio.wait_all_tasks_blocked()
        cache.watch("orders", "r", seen.append)
        nodes.finds("a:4161", leads("n1"))
        await eventually(lambda: len(seen) == 1)
        nodes.finds("a:4161", leads("n2"))
        await eventually(lambda: len(seen) == 2)
        tasks.cancel_scope.cancel()
    assert [view.leaders for view in seen] == [{0: N1}, {0: N2}]


@pytest.mark.parametrize("act", ["poll", "announce", "switch"])
async def test_a_topic_is_polled_soon_on_request(nodes: LookupNodes, act: str) -> None:
    nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes, poll_interval=3600.0)
    async with anyio.create_task_group() as tasks:
        cache.acquire()
        tasks.start_soon(cache.run)
        await cache.resolve("orders")
        await anyio.wait_all_tasks_blocked()
        nodes.finds("b:4161" if act == "switch" else "a:4161", leads("n2"))
        if act == "switch":
            nodes.lists("b:4161", "b:4161")
            cache.switch("b:4161")
        elif act == "announce":
            module.topic_changed("orders")
        else:
            cache.poll_soon("unknown")
            cache.poll_soon("orders")
        await eventually(lambda: (found := cache.cached("orders")) is not None and found.leaders == {0: N2})
        await cache.release()


async def test_names_are_checked_before_they_are_known(nodes: LookupNodes) -> None:
    asked = nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes)
    for access in ("w", "r"):
        with pytest.raises(InvalidName):
            cache.watch("a b", access, lambda view: None)
        with pytest.raises(InvalidName):
            await cache.refresh("a b", access)
    assert asked.call_count == 0


@pytest.mark.parametrize(("answer", "lacks"), [(not_found("Topic has no channel"), True), (leads("n1"), False)])
async def test_a_partition_without_a_channel(nodes: LookupNodes, answer: Any, lacks: bool) -> None:
    asked = nodes.finds("a:4161", answer)
    assert await cache_of(nodes).lacks_channel("orders", 3) is lacks
    assert dict(asked.calls.last.request.url.params) == {"topic": "orders", "access": "w", "partition": "3"}


async def test_resolved_topics_are_polled_and_unknown_ones_are_not(nodes: LookupNodes) -> None:
    polled: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        topic = request.url.params["topic"]
        polled.append(topic)
        return httpx.Response(200, json=leads("n1")) if topic == "orders" else not_found("TOPIC_NOT_FOUND")

    nodes.finds("a:4161", answer)
    cache = cache_of(nodes, poll_interval=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.run)
        with pytest.raises(TopicNotFound):
            await cache.resolve("missing")
        await cache.resolve("orders")
        await eventually(lambda: polled.count("orders") > 3)
        tasks.cancel_scope.cancel()
    assert polled.count("missing") == 1


async def test_a_slow_topic_does_not_delay_others(nodes: LookupNodes) -> None:
    polled: list[str] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        topic = request.url.params["topic"]
        if topic == "slow":
            await anyio.sleep_forever()
        polled.append(topic)
        return httpx.Response(200, json=leads("n1"))

    nodes.finds("a:4161", answer)
    cache = cache_of(nodes, poll_interval=0.01, request_timeout=30)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.run)
        for topic in ("slow", "quick"):
            cache.watch(topic, "r", lambda view: None)
        await eventually(lambda: polled.count("quick") > 3)
        tasks.cancel_scope.cancel()


async def test_polling_ends_when_the_cache_is_closed(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes)
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cache.run)
            await cache.resolve("orders")
            await cache.aclose()
            await cache.aclose()
    for ask in (cache.resolve("other"), cache.refresh("orders")):
        with pytest.raises(InvalidState, match="closed"):
            await ask
    with pytest.raises(InvalidState, match="closed"):
        cache.watch("orders", "r", lambda view: None)
    assert cache.cached("orders") is not None


async def test_closing_fails_pending_lookups() -> None:
    async def hang(stream: object) -> None:
        await anyio.sleep_forever()

    async with serving(hang) as address:
        cache = MetadataCache(str(address), options=LookupOptions(request_timeout=30))

        async def resolve() -> None:
            with pytest.raises(InvalidState, match="closed before a response was received"):
                await cache.resolve("orders")

        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(resolve)
                await anyio.wait_all_tasks_blocked()
                await cache.aclose()


async def test_a_poll_ends_when_the_cache_is_closed_meanwhile(nodes: LookupNodes) -> None:
    held = Held(not_found())
    nodes.route("a:4161", "/listlookup", held)
    never = nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes)
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cache.run)
            cache.watch("orders", "r", lambda view: None)
            cache.watch("orders", "r", lambda view: None)()
            await held.asked.wait()
            await cache.aclose()
            held.open.set()
    assert not never.called


async def test_unknown_topics_are_forgotten(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 5)
    nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
    cache = cache_of(nodes)
    cache.watch("watched", "w", lambda view: None)
    topics = ["watched", *(f"missing{number}" for number in range(20))]
    for topic in topics:
        with pytest.raises(TopicNotFound):
            await cache.resolve(topic)
        assert sum(map(cache.is_unknown, topics)) <= 5
    assert cache.is_unknown("watched")


def test_an_unknown_topic_is_not_polled_after_its_last_watcher_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch_and_leave() -> None:
        nodes = LookupNodes()
        nodes.lists("a:4161", "a:4161")
        asked = nodes.finds("a:4161", not_found("TOPIC_NOT_FOUND"))
        cache = cache_of(nodes, poll_interval=10.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cache.run)
            one, other = (cache.watch("orders", "r", lambda view: None) for _ in range(2))
            one()
            await anyio.sleep(25.0)
            assert asked.call_count > 2
            other()
            with pytest.raises(TopicNotFound):
                await cache.resolve("orders", "r")
            before = asked.call_count
            await anyio.sleep(100.0)
            assert asked.call_count == before
            await cache.aclose()

    run_in_virtual_time(monkeypatch, watch_and_leave)


def test_a_topic_that_lookup_does_not_know_is_published_to_the_nodes_that_accept_it() -> None:
    cache = MetadataCache("a:4161", options=LookupOptions(node_filter=lambda node: node != "n2:4150"))
    nodes = [NodeInfo(N1, Address("n1", 4151)), NodeInfo(N2, Address("n2", 4151)), NodeInfo(Address("n3", 4150))]
    view = cache.of_nodes("new", nodes)
    assert (view.nodes, view.filtered, view.led) == ((N1, Address("n3", 4150)), ((None, N2),), frozenset())
    assert view.http == {N1: Address("n1", 4151), N2: Address("n2", 4151)}
