"""One view of lookup for several: opened by the first, closed by the last, switched while it is used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest

from nsqext import Lookup, LookupOptions
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.shared import find_directory
from nsqext.types import Address
from tests.support.fake_lookupd import LookupNodes, eventually, lookup_json, not_found

pytestmark = pytest.mark.anyio

N1, N2 = Address("n1", 4150), Address("n2", 4150)


@pytest.fixture
async def nodes() -> AsyncIterator[LookupNodes]:
    """Two lookup nodes of two clusters, a and b."""
    lookup_nodes = LookupNodes()
    for name in ("a:4161", "b:4161"):
        lookup_nodes.lists(name, name)
    yield lookup_nodes
    await lookup_nodes.client.aclose()


def leads(name: str) -> dict[str, Any]:
    """Return an answer in which a node leads partition 0."""
    return lookup_json({0: f"{name}:4150"}, num=1)


def directory_of(nodes: LookupNodes, **options: Any) -> MetadataCache:
    """Return a directory that asks node a."""
    return MetadataCache("a:4161", options=LookupOptions(**options), client=nodes.client)


# Who gets what


def test_addresses_make_a_directory_of_ones_own() -> None:
    assert find_directory("a:4161", (), LookupOptions()) is not find_directory("a:4161", (), LookupOptions())
    assert find_directory((), "n1:4150", LookupOptions()).peek("t") is not None


def test_a_lookup_gives_the_same_to_all() -> None:
    lookup = Lookup("a:4161, b:4161", options=LookupOptions(poll_interval=5))
    directory = find_directory(lookup, (), LookupOptions())
    assert directory is lookup.directory is find_directory(lookup, (), LookupOptions(poll_interval=5))
    assert lookup.addresses == (Address("a", 4161), Address("b", 4161))
    assert repr(lookup) == "Lookup('a:4161,b:4161')"
    with pytest.raises(InvalidSetting, match="both lookupd and nsqd"):
        find_directory(lookup, "n1:4150", LookupOptions())
    with pytest.raises(InvalidSetting, match="beside a Lookup that has others"):
        find_directory(lookup, (), LookupOptions(poll_interval=6))
    with pytest.raises(InvalidSetting, match="is not an address"):
        Lookup("a")


# From the first user to the last


async def test_the_last_one_out_closes_it_and_it_can_be_opened_again(nodes: LookupNodes) -> None:
    asked = nodes.finds("a:4161", leads("n1"))
    directory = directory_of(nodes)
    for round_ in (1, 2):
        directory.join()
        directory.join()
        assert (await directory.resolve("t")).leaders == {0: N1}
        await directory.leave()
        await directory.refresh("t")
        assert asked.call_count == 2 * round_
        await directory.leave()
        with pytest.raises(InvalidState, match="closed"):
            await directory.refresh("t")


async def test_fixed_nodes_can_be_used_again_too() -> None:
    directory = MetadataCache(nsqd="n1:4150")
    for _ in range(2):
        directory.join()
        assert (await directory.resolve("t")).nodes == (N1,)
        await directory.leave()


async def test_closing_is_not_kept_from_by_a_cancellation() -> None:
    directory = MetadataCache("127.0.0.1:1")
    directory.join()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await directory.leave()
    with pytest.raises(InvalidState, match="closed"):
        await directory.resolve("t")


async def test_a_topic_that_nobody_watches_any_more_is_forgotten(nodes: LookupNodes) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.params["topic"])
        return httpx.Response(200, json=leads("n1"))

    nodes.finds("a:4161", answer)
    directory = directory_of(nodes, poll_interval=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.run)
        first, second = (directory.watch("left", "r", lambda view: None) for _ in range(2))
        directory.watch("kept", "r", lambda view: None)
        await eventually(lambda: directory.peek("left", "r") is not None)
        first()
        assert directory.peek("left", "r") is not None
        second()
        assert directory.peek("left", "r") is None
        await anyio.wait_all_tasks_blocked()
        asked.clear()
        await eventually(lambda: len(asked) > 5)
        assert set(asked) == {"kept"}
        tasks.cancel_scope.cancel()


async def test_a_topic_that_is_forgotten_while_it_is_asked_for_stays_so(nodes: LookupNodes) -> None:
    go_on = anyio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        await go_on.wait()
        return httpx.Response(200, json=leads("n1"))

    nodes.finds("a:4161", answer)
    directory = directory_of(nodes)
    unwatch = directory.watch("t", "r", lambda view: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.refresh, "t", "r")
        await anyio.wait_all_tasks_blocked()
        unwatch()
        go_on.set()
    assert directory.peek("t", "r") is None


def test_it_is_used_in_one_event_loop_at_a_time() -> None:
    lookup = Lookup("a:4161")

    async def use(inner: bool = True) -> None:
        lookup.directory.join()
        if inner:
            with pytest.raises(InvalidState, match="in another event loop"):
                await anyio.to_thread.run_sync(anyio.run, use, False)
        await lookup.directory.leave()

    anyio.run(use)
    anyio.run(use, backend="trio")


# Other addresses


async def test_switching_to_another_cluster(nodes: LookupNodes) -> None:
    nodes.finds("a:4161", lookup_json({0: "n1:4150", 1: "n1:4150"}, num=2))
    nodes.finds("b:4161", not_found("TOPIC_NOT_FOUND"))
    directory = directory_of(nodes, poll_interval=0.01)
    seen: list[dict[int, Address]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.run)
        directory.watch("t", "r", lambda view: seen.append(dict(view.leaders)))
        await eventually(lambda: bool(seen))
        with pytest.raises(InvalidSetting, match="names no address"):
            directory.switch("")
        directory.switch("b:4161")
        assert directory.addresses == (Address("b", 4161),)
        await directory.refresh("t", "r")
        # it stays where it was found until it is found anew
        assert seen == [{0: N1, 1: N1}]
        nodes.finds("b:4161", leads("n2"))
        await eventually(lambda: len(seen) > 1)
        tasks.cancel_scope.cancel()
    assert seen[1] == {0: N2}


async def test_the_answer_of_those_who_are_not_asked_any_more_does_not_count(nodes: LookupNodes) -> None:
    go_on = anyio.Event()

    async def late(request: httpx.Request) -> httpx.Response:
        await go_on.wait()
        return httpx.Response(200, json=leads("n1"))

    nodes.finds("a:4161", late)
    nodes.finds("b:4161", leads("n2"))
    directory = directory_of(nodes)
    seen: list[dict[int, Address]] = []
    directory.watch("t", "r", lambda view: seen.append(dict(view.leaders)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(directory.refresh, "t", "r")
        await anyio.wait_all_tasks_blocked()
        directory.switch("b:4161")
        go_on.set()
    assert seen == [{0: N2}]


async def test_switching_from_another_thread(nodes: LookupNodes) -> None:
    lookup = Lookup("a:4161")
    directory = lookup.directory
    directory.join()
    await anyio.to_thread.run_sync(lookup.switch, "b:4161")
    assert lookup.addresses == (Address("b", 4161),)
    await directory.leave()
    await anyio.to_thread.run_sync(lookup.switch, "a:4161")
    assert lookup.addresses == (Address("a", 4161),)


async def test_fixed_nodes_cannot_be_switched() -> None:
    with pytest.raises(InvalidSetting, match="no lookup to switch"):
        MetadataCache(nsqd="n1:4150").switch("a:4161")
