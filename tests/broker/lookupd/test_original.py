"""HTTP of the original nsqlookupd; the answers were recorded from the original program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from nsqext.broker.lookupd.original import OriginalLookupd, original_app
from nsqext.broker.lookupd.registry import Registry
from tests.broker.lookupd.test_tcp_server import NODE, identify

pytestmark = pytest.mark.anyio

SECOND = 1_000_000_000
PEER = {
    "remote_address": "127.0.0.1:99",
    "hostname": "h",
    "broadcast_address": "b",
    "tcp_port": 5150,
    "http_port": 5151,
    "version": "1.0",
    "topology_zone": "",
    "topology_region": "",
}


class Time:
    """A clock in nanoseconds that tests set."""

    def __init__(self) -> None:
        self.now = 1_000 * SECOND

    def __call__(self) -> int:
        """Return the time."""
        return self.now


@asynccontextmanager
async def talk() -> AsyncIterator[tuple[OriginalLookupd, Time, httpx.AsyncClient]]:
    time = Time()
    lookupd = OriginalLookupd(Registry(time), "1.3.0")
    session = lookupd.session("127.0.0.1:99")
    session.receive(b"  V1" + identify(NODE) + b"REGISTER t1 c1\nREGISTER t1 c2\nREGISTER t2\n")
    transport = httpx.ASGITransport(original_app(lookupd))
    async with httpx.AsyncClient(transport=transport, base_url="http://lookup") as client:
        yield lookupd, time, client


REFUSALS = [
    ("GET", "/channels", 400, "MISSING_ARG_TOPIC"),
    ("GET", "/lookup", 400, "MISSING_ARG_TOPIC"),
    ("GET", "/lookup?topic=", 404, "TOPIC_NOT_FOUND"),
    ("GET", "/lookup?topic=none", 404, "TOPIC_NOT_FOUND"),
    ("GET", "/lookup?topic=%zz", 400, "INVALID_REQUEST"),
    ("GET", "/none", 404, "NOT_FOUND"),
    ("GET", "/topic/create", 405, "METHOD_NOT_ALLOWED"),
    ("POST", "/ping", 405, "METHOD_NOT_ALLOWED"),
    ("POST", "/topic/create", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/create?topic=", 400, "INVALID_ARG_TOPIC"),
    ("POST", "/topic/create?topic=bad!", 400, "INVALID_ARG_TOPIC"),
    ("POST", "/channel/create?topic=made", 400, "MISSING_ARG_CHANNEL"),
    ("POST", "/channel/create?topic=made&channel=", 400, "INVALID_ARG_CHANNEL"),
    ("POST", "/channel/create?channel=c", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/channel/delete?topic=made&channel=none", 404, "CHANNEL_NOT_FOUND"),
    ("POST", "/topic/tombstone", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/tombstone?topic=t1", 400, "MISSING_ARG_NODE"),
    ("POST", "/topic/delete", 400, "MISSING_ARG_TOPIC"),
]


@pytest.mark.parametrize(("method", "path", "status", "text"), REFUSALS)
async def test_refusals(method: str, path: str, status: int, text: str) -> None:
    async with talk() as (_, _, client):
        answer = await client.request(method, path)
    assert (answer.status_code, answer.text) == (status, f'{{"message":"{text}"}}')
    assert answer.headers["x-nsq-content-type"] == "nsq; version=1.0"


async def test_allowed_methods_are_listed_in_order() -> None:
    async with talk() as (_, _, client):
        assert (await client.get("/topic/create")).headers["allow"] == "OPTIONS, POST"


async def test_requests_without_side_effects() -> None:
    cases: list[tuple[str, object]] = [
        ("/info", {"version": "1.3.0"}),
        ("/topics", {"topics": ["t1", "t2"]}),
        ("/channels?topic=t1", {"channels": ["c1", "c2"]}),
        ("/channels?topic=", {"channels": []}),
        ("/lookup?topic=t1", {"channels": ["c1", "c2"], "producers": [PEER]}),
        ("/lookup?topic=t2", {"channels": [], "producers": [PEER]}),
        ("/nodes", {"producers": [PEER | {"tombstones": [False, False], "topics": ["t1", "t2"]}]}),
    ]
    async with talk() as (_, _, client):
        assert (await client.get("/ping")).text == "OK"
        for path, expected in cases:
            assert (await client.get(path)).json() == expected, path
        debug = (await client.get("/debug")).json()
    assert list(debug) == ["channel:t1:c1", "channel:t1:c2", "client::", "topic:t1:", "topic:t2:"]
    assert list(debug["client::"][0]) == sorted(debug["client::"][0])
    assert debug["client::"][0]["tombstoned_at"] == -6795364578871345152


async def test_members_of_a_node_have_the_order_of_the_real_server() -> None:
    async with talk() as (_, _, client):
        (found,) = (await client.get("/lookup?topic=t1")).json()["producers"]
        (listed,) = (await client.get("/nodes")).json()["producers"]
    assert (list(found), list(listed)) == (list(PEER), [*PEER, "tombstones", "topics"])


async def test_topics_and_channels_are_made_and_deleted() -> None:
    async with talk() as (_, _, client):
        for path in ("/topic/create?topic=made", "/channel/create?topic=other&channel=c", "/topic/delete?topic=t1"):
            answer = await client.post(path)
            assert (answer.status_code, answer.text) == (200, "")
        assert (await client.get("/topics")).json() == {"topics": ["t2", "made", "other"]}
        assert (await client.get("/lookup?topic=other")).json() == {"channels": ["c"], "producers": []}
        assert (await client.get("/channels?topic=t1")).json() == {"channels": []}
        assert (await client.post("/channel/delete?topic=other&channel=c")).status_code == 200
        assert (await client.get("/channels?topic=other")).json() == {"channels": []}


async def test_a_channel_is_deleted_in_its_own_topic() -> None:
    async with talk() as (_, _, client):
        assert (await client.post("/channel/create?topic=t2&channel=c1")).status_code == 200
        assert (await client.post("/channel/delete?topic=t2&channel=c1")).status_code == 200
        assert [(await client.get(f"/channels?topic={topic}")).json()["channels"] for topic in ("t1", "t2")] == [
            ["c1", "c2"],
            [],
        ]


async def test_tombstones_hide_for_a_while() -> None:
    async with talk() as (lookupd, time, client):
        assert (await client.post("/topic/tombstone?topic=t1&node=b:5151")).status_code == 200
        lookupd.session("127.0.0.1:99").receive(b"  V1" + identify(NODE) + b"REGISTER t1\n")
        assert (await client.get("/lookup?topic=t1")).json()["producers"] == []
        assert (await client.get("/lookup?topic=t2")).json()["producers"] == [PEER]
        assert (await client.get("/nodes")).json()["producers"][0]["tombstones"] == [True, False]
        time.now += 46 * SECOND
        assert (await client.get("/lookup?topic=t1")).json()["producers"] == [PEER]
        (shown,) = (await client.get("/debug")).json()["topic:t1:"]
        assert (shown["tombstoned"], shown["tombstoned_at"]) == (True, 1_000 * SECOND), "it stays in the logs"


async def test_a_silent_node_is_not_shown() -> None:
    async with talk() as (_, time, client):
        time.now += 300 * SECOND
        assert (await client.get("/lookup?topic=t1")).json()["producers"] == [PEER]
        time.now += SECOND
        assert (await client.get("/lookup?topic=t1")).json() == {"channels": ["c1", "c2"], "producers": []}
        assert (await client.get("/nodes")).json() == {"producers": []}


async def test_stale_and_empty_listings_can_be_injected() -> None:
    async with talk() as (lookupd, _, client):
        lookupd.show_snapshot()
        await client.post("/topic/create?topic=new")
        for change in (
            "/topic/tombstone?topic=t1&node=b:5151",
            "/channel/delete?topic=t1&channel=c1",
            "/topic/delete?topic=t2",
        ):
            assert (await client.post(change)).status_code == 200
        assert (await client.get("/topics")).json() == {"topics": ["t1", "t2"]}
        assert (await client.get("/lookup?topic=t1")).json() == {"channels": ["c1", "c2"], "producers": [PEER]}
        lookupd.show_nothing()
        assert (await client.get("/topics")).json() == {"topics": []}
        lookupd.show_current()
        assert (await client.get("/topics")).json() == {"topics": ["t1", "new"]}
        assert (await client.get("/lookup?topic=t1")).json() == {"channels": ["c2"], "producers": []}
        lookupd.clear()
        assert (await client.get("/topics")).json() == {"topics": []}


async def test_metrics_in_the_format_of_prometheus() -> None:
    async with talk() as (_, time, client):
        await client.post("/topic/tombstone?topic=t1&node=b:5151")
        answer = await client.get("/metrics")
        time.now += 400 * SECOND
        later = (await client.get("/metrics")).text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        'nsqlookupd_info{version="1.3.0",generation="original"} 1',
        "nsqlookupd_nsqd 1",
        "nsqlookupd_topics 2",
        'nsqlookupd_topic_producers{topic="t2"} 1',
        'nsqlookupd_topic_tombstones{topic="t1"} 1',
        'nsqlookupd_topic_channels{topic="t1"} 2',
    ):
        assert f"{line}\n" in answer.text
    assert "nsqlookupd_nsqd 0\n" in later
