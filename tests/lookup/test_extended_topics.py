"""Which of many topics have extend support, with one request."""

from __future__ import annotations

from math import inf
from typing import Any

import anyio
import httpx
import pytest

from nsqext.broker import Cluster
from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, NsqError
from nsqext.lookup.client import LookupClient
from nsqext.lookup.metadata import MetadataCache
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.poller import ExtendedTopics
from tests.support.fake_lookupd import LookupNodes, eventually, lookup_json

pytestmark = pytest.mark.anyio


class Reader:
    """Reads a list; records which topics are reported."""

    def __init__(self, answer: dict[str, bool] | NsqError) -> None:
        self.answer = answer
        self.reported: list[str] = []
        self.topics = ExtendedTopics(self.ask, self.reported.append)

    async def ask(self) -> dict[str, bool]:
        if isinstance(self.answer, NsqError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "reported"),
    [
        pytest.param({"a": True, "b": False, "c": True}, ["a", "missing"], id="listed"),
        pytest.param(LookupFailed("Key not found"), ["a", "b", "missing"], id="a topic is being deleted"),
        pytest.param(LookupUnreachable("down"), [], id="lookup is down"),
    ],
)
async def test_requested_topics_are_reported(answer: dict[str, bool] | NsqError, reported: list[str]) -> None:
    reader = Reader(answer)
    reader.topics.request(["a", "b"])
    reader.topics.request(["missing", "a"])
    assert reader.topics.poll_at == -inf
    await reader.topics.refresh()
    await reader.topics.refresh()
    assert reader.reported == reported


async def test_a_closed_client_ends_the_poll() -> None:
    with pytest.raises(InvalidState):
        await Reader(InvalidState("closed")).topics.refresh()


async def test_a_long_list_is_read_once() -> None:
    reader = Reader({f"t{number}": False for number in range(100)})
    assert reader.topics.cheap_for(4)
    await reader.topics.refresh()
    assert (reader.topics.cheap_for(9), reader.topics.cheap_for(10)) == (False, True)


async def test_topics_that_support_headers_by_now_are_looked_up_again() -> None:
    """The list is read once, and only the map for consumers is read again."""
    nodes = LookupNodes()
    nodes.lists("a:4161", "a:4161")
    looked_up = nodes.finds("a:4161", lookup_json({0: "n1:4150"}, num=1))
    read = nodes.route("a:4161", "/topics", listed(extended=True, plain=False))
    options = LookupOptions(poll_interval=1000.0, max_poll_interval=1000.0, poll_jitter=0, request_timeout=30.0)
    cache = MetadataCache("a:4161", options=options, transport=nodes.transport)
    cache.acquire()
    assert cache.lists_cheaply(4)
    for topic in ("extended", "plain"):
        for access in ("r", "w"):
            cache.watch(topic, access, lambda view: None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cache.run)
        await eventually(lambda: looked_up.call_count == 4)
        await anyio.wait_all_tasks_blocked()
        cache.poll_extended(["extended", "plain"])
        await eventually(lambda: looked_up.call_count == 5)
        await anyio.wait_all_tasks_blocked()
        assert (looked_up.call_count, read.call_count) == (5, 1)
        await cache.release()
    params = looked_up.calls.last.request.url.params
    assert (params["topic"], params["access"], read.calls.last.request.url.params["metaInfo"]) == (
        "extended",
        "r",
        "true",
    )


@pytest.mark.parametrize("data", [{"topics": ["a"]}, {"topics": None, "meta_info": None}])
async def test_the_original_nsq_tells_nothing(data: dict[str, Any]) -> None:
    nodes = LookupNodes()
    nodes.lists("a:4161")
    nodes.route("a:4161", "/topics", data)
    assert await LookupClient("a:4161", transport=nodes.transport).lists.extend_support() == {}


async def test_a_topic_is_extended_if_any_lookup_node_says_so() -> None:
    nodes = LookupNodes()
    nodes.lists("a:4161", "a:4161", "b:4161")
    nodes.route("a:4161", "/topics", listed(a=False, b=True))
    nodes.route("b:4161", "/topics", listed(a=True, b=False))
    client = LookupClient("a:4161", transport=nodes.transport)
    assert await client.lists.extend_support() == {"a": True, "b": True}


@pytest.mark.parametrize("answer", [{"topics": ["a"], "meta_info": [{}]}, {"topics": ["a"], "meta_info": ["a"]}, []])
async def test_an_invalid_list_is_an_error(answer: Any) -> None:
    nodes = LookupNodes()
    nodes.lists("a:4161")
    nodes.route("a:4161", "/topics", httpx.Response(200, json=answer))
    with pytest.raises(LookupFailed, match="invalid response to /topics"):
        await LookupClient("a:4161", transport=nodes.transport).lists.extend_support()


async def test_a_list_that_is_too_long_is_an_error() -> None:
    nodes = LookupNodes()
    nodes.lists("a:4161")
    nodes.route("a:4161", "/topics", listed(a=True, b=True))
    with pytest.raises(LookupFailed, match="lists 2 topics, more than max_topics=1"):
        await LookupClient("a:4161", LookupOptions(max_topics=1), nodes.transport).lists.extend_support()


async def test_the_embedded_cluster_lists_it() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("plain")
        cluster.create_topic("headers", extend=True)
        async with LookupClient(cluster.lookupd) as client:
            assert await client.lists.extend_support() == {"plain": False, "headers": True}


def listed(**extend: bool) -> dict[str, Any]:
    """Return the data of the list."""
    infos = [{"topic_name": topic, "extend_support": value} for topic, value in extend.items()]
    return {"topics": list(extend), "meta_info": infos}
