"""One cache for several users: opened by the first, closed by the last, switched while in use."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from nsqext import Lookup, Producer
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.lookup.lookup import share_lookup
from nsqext.lookup.metadata import MetadataCache, metadata_cache
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.poller import Poller
from nsqext.settings import Given
from nsqext.types import Address
from tests.support.fake_lookupd import Held, LookupNodes, eventually, lookup_json, not_found

pytestmark = pytest.mark.anyio

N1, N2 = Address("n1", 4150), Address("n2", 4150)


@pytest.fixture
async def nodes() -> AsyncIterator[LookupNodes]:
    """Two lookup nodes of two clusters, a and b."""
    lookup_nodes = LookupNodes()
    for name in ("a:4161", "b:4161"):
        lookup_nodes.lists(name, name)
    yield lookup_nodes


def leads(name: str) -> dict[str, Any]:
    """Return an answer in which a node leads partition 0."""
    return lookup_json({0: f"{name}:4150"}, num=1)


def cache_of(nodes: LookupNodes, **options: Any) -> MetadataCache:
    """Return a cache that uses node a, with timeouts that a busy machine does not reach."""
    given = {"request_timeout": 30.0, "straggler_timeout": 30.0, **options}
    return MetadataCache("a:4161", options=LookupOptions(**given), transport=nodes.transport)


def test_it_needs_lookup() -> None:
    with pytest.raises(InvalidSetting, match="nsqd addresses were given: give addresses of nsqlookupd"):
        Lookup("nsq://?nsqd=a:4150")


# Sharing


def test_addresses_make_a_cache_of_their_own() -> None:
    given, options = Given("a:4161", (), {}), LookupOptions()
    assert metadata_cache(given, options) is not metadata_cache(given, options)
    assert metadata_cache(Given((), "n1:4150", {}), options).cached("t") is not None


def test_a_lookup_shares_its_cache() -> None:
    lookup = Lookup("a:4161, b:4161", lookup_poll_interval=5)
    assert metadata_cache(Given(lookup, (), {}), LookupOptions()) is lookup.metadata
    assert lookup.settings["lookup_poll_interval"] == 5
    assert lookup.addresses == (Address("a", 4161), Address("b", 4161))
    assert repr(lookup) == "Lookup('a:4161,b:4161')"
    with pytest.raises(InvalidSetting, match="both lookupd and nsqd"):
        Producer(lookup, nsqd="n1:4150")
    with pytest.raises(InvalidSetting, match="lookup_poll_interval is given for a client that shares a Lookup"):
        Producer(lookup, lookup_poll_interval=5)
    with pytest.raises(InvalidSetting, match="is not an address"):
        Lookup("a:x")


def test_a_lookup_reads_the_environment_and_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_LOOKUP_AUTH_SECRET", "hush")
    monkeypatch.setenv("SHOP_LOOKUP_AUTH_OVER_HTTP", "true")
    settings = Lookup("a:4161", env="SHOP_").settings
    assert (settings["lookup_auth_secret"], settings["lookup_auth_over_http"]) == ("***", True)


def test_clients_of_an_app_share_a_lookup_of_their_addresses() -> None:
    shared = share_lookup(Given("a:4161", (), {"lookup_poll_interval": 5.0, "max_in_flight": 7}))
    assert isinstance(shared.lookupd, Lookup)
    assert (shared.lookupd.settings["lookup_poll_interval"], shared.values) == (5.0, {"max_in_flight": 7})
    assert share_lookup(shared) is shared
    fixed = Given((), "n1:4150", {})
    assert share_lookup(fixed) is fixed


# Opening and closing


async def test_the_last_user_closes_it_and_it_can_be_opened_again(nodes: LookupNodes) -> None:
    asked = nodes.finds("a:4161", leads("n1"))
    cache = cache_of(nodes)
    for round_ in (1, 2):
        cache.acquire()
        cache.acquire()
        assert (await cache.resolve("t")).leaders == {0: N1}
        await cache.release()
        await cache.refresh("t")
        assert asked.call_count == 2 * round_
        await cache.release()
        with pytest.raises(InvalidState, match="closed"):
            await cache.refresh("t")


async def test_the_list_of_topics_is_read_again_when_it_is_opened_again(nodes: LookupNodes) -> None:
    listed = nodes.route("a:4161", "/topics", {"topics": ["one"]})
    cache = cache_of(nodes)
    for count in (1, 2):
        cache.acquire()
        assert await cache.topics(max_age=60) == ("one",)
        assert listed.call_count == count
        await cache.release()


async def test_fixed_nodes_can_be_used_again() -> None:
    cache = MetadataCache(nsqd="n1:4150")
    for _ in range(2):
        cache.acquire()
        assert (await cache.resolve("t")).nodes == (N1,)
        await cache.release()


async def test_a_cancelled_release_closes() -> None:
    cache = MetadataCache("127.0.0.1:1")
    cache.acquire()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await cache.release()
    with pytest.raises(InvalidState, match="closed"):
        await cache.resolve("t")


async def test_an_unwatched_topic_is_forgotten(nodes: LookupNodes) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["topic"])
        return httpx.Response(200, json=leads("n1"))

    nodes.finds("a:4161", answer)
    cache = cache_of(nodes, poll_interval=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.run)
        first, second = (cache.watch("left", "r", lambda view: None) for _ in range(2))
        cache.watch("kept", "r", lambda view: None)
        await eventually(lambda: cache.cached("left", "r") is not None)
        first()
        assert cache.cached("left", "r") is not None
        second()
        assert cache.cached("left", "r") is None
        await anyio.wait_all_tasks_blocked()
        asked.clear()
        await eventually(lambda: len(asked) > 5)
        assert set(asked) == {"kept"}
        tasks.cancel_scope.cancel()


async def test_a_topic_forgotten_during_a_round_stays_forgotten(nodes: LookupNodes) -> None:
    held = Held(httpx.Response(200, json=leads("n1")))
    nodes.finds("a:4161", held)
    cache = cache_of(nodes)
    unwatch = cache.watch("t", "r", lambda view: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.refresh, "t", "r")
        await anyio.wait_all_tasks_blocked()
        unwatch()
        held.open.set()
    assert cache.cached("t", "r") is None


def test_it_is_used_in_one_event_loop_at_a_time() -> None:
    lookup = Lookup("a:4161")

    async def use(inner: bool = True) -> None:
        lookup.metadata.acquire()
        if inner:
            with pytest.raises(InvalidState, match="in another event loop"):
                await anyio.to_thread.run_sync(anyio.run, use, False)
        await lookup.metadata.release()

    anyio.run(use)
    anyio.run(use, backend="trio")


# Switching


async def test_switching_to_another_cluster(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", lookup_json({0: "n1:4150", 1: "n1:4150"}, num=2))
    nodes.finds("b:4161", not_found("TOPIC_NOT_FOUND"))
    cache = cache_of(nodes, poll_interval=0.01)
    seen: list[dict[int, Address]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.run)
        cache.watch("t", "r", lambda view: seen.append(dict(view.leaders)))
        await eventually(lambda: bool(seen))
        with pytest.raises(InvalidSetting, match="has no address"):
            cache.switch("")
        cache.switch("b:4161")
        assert cache.addresses == (Address("b", 4161),)
        await cache.refresh("t", "r")
        # it keeps its leader until the other nodes find the topic
        assert seen == [{0: N1, 1: N1}]
        nodes.finds("b:4161", leads("n2"))
        await eventually(lambda: len(seen) > 1)
        tasks.cancel_scope.cancel()
    assert seen[1] == {0: N2}


async def test_after_a_switch_the_topics_are_those_of_the_other_cluster(nodes: LookupNodes) -> None:
    for name in "ab":
        nodes.route(f"{name}:4161", "/topics", {"topics": [name]})
    cache = cache_of(nodes)
    assert await cache.topics(max_age=60) == ("a",)
    cache.switch("b:4161")
    assert await cache.topics(max_age=60) == ("b",)


async def test_late_answers_of_former_lookup_nodes_are_discarded(nodes: LookupNodes) -> None:
    held = Held(httpx.Response(200, json=leads("n1")))
    nodes.finds("a:4161", held)
    nodes.finds("b:4161", leads("n2"))
    cache = cache_of(nodes)
    seen: list[dict[int, Address]] = []
    cache.watch("t", "r", lambda view: seen.append(dict(view.leaders)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.refresh, "t", "r")
        await anyio.wait_all_tasks_blocked()
        cache.switch("b:4161")
        held.open.set()
    assert seen == [{0: N2}]


async def test_switching_from_another_thread(nodes: LookupNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Lookup("a:4161")
    cache = lookup.metadata
    threads: list[int] = []
    monkeypatch.setattr(Poller, "wake", lambda poller: threads.append(threading.get_ident()))
    cache.acquire()
    await anyio.to_thread.run_sync(lookup.switch, "b:4161")
    assert lookup.addresses == (Address("b", 4161),)
    assert set(threads) == {threading.get_ident()}, "the thread of the event loop switches"
    await cache.release()
    await anyio.to_thread.run_sync(lookup.switch, "a:4161")
    assert lookup.addresses == (Address("a", 4161),)


async def test_fixed_nodes_cannot_be_switched() -> None:
    with pytest.raises(InvalidSetting, match="no lookup service is used"):
        MetadataCache(nsqd="n1:4150").switch("a:4161")
