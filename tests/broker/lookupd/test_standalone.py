"""HTTP of a redesigned nsqlookupd without a cluster; the answers were recorded from the real program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from nsqext.broker.lookupd.original import OriginalLookupd, standalone_app
from nsqext.broker.lookupd.registry import LookupSession, Registry
from nsqext.protocol.lookupd_tcp import PeerInfo
from tests.broker.lookupd.test_tcp_server import NODE, answers, identify

pytestmark = pytest.mark.anyio
BARE = {"Accept": "application/vnd.nsq; version=1.0"}
ENTRY = {"id": "127.0.0.1:99", "remote_address": "127.0.0.1:99", "distributed_id": "", **NODE}
HIDDEN_BODY = {"channels": ["c1"], "partitions": {}, "producers": []}


@asynccontextmanager
async def talk() -> AsyncIterator[tuple[LookupSession, httpx.AsyncClient]]:
    lookupd = OriginalLookupd(Registry(lambda: 1_000), "0.3.7-HA.1.13.0")
    session = lookupd.session("127.0.0.1:99", partitions=True)
    session.receive(b"  V1" + identify(NODE) + b"REGISTER ta 0\nREGISTER ta 1\nREGISTER tb 0 c1\n")
    transport = httpx.ASGITransport(standalone_app(lookupd))
    async with httpx.AsyncClient(transport=transport, base_url="http://lookup", headers=BARE) as client:
        yield session, client


ANSWERS: list[tuple[str, object]] = [
    ("/info", {"version": "0.3.7-HA.1.13.0", "ha_support": False}),
    ("/topics?metaInfo=true", {"topics": ["ta", "tb"]}),
    ("/channels?topic=tb", {"channels": ["c1"]}),
    ("/lookup?topic=ta", {"channels": [], "partitions": {"0": ENTRY, "1": ENTRY}, "producers": [ENTRY]}),
    (
        "/lookup?topic=tb&access=w&metainfo=true",
        {"channels": ["c1"], "partitions": {"0": ENTRY}, "producers": [ENTRY]},
    ),
    ("/lookup?topic=none&access=w", {"channels": [], "partitions": {}, "producers": []}),
    ("/cluster/stats", {"stable": False, "node_stat_list": [], "topn_topics": []}),
]


@pytest.mark.parametrize(("path", "body"), ANSWERS, ids=[path for path, _ in ANSWERS])
async def test_requests_without_side_effects(path: str, body: object) -> None:
    async with talk() as (_, client):
        answer = await client.get(path)
    assert (answer.status_code, answer.json()) == (200, body)


async def test_an_empty_group_of_lookup_nodes() -> None:
    async with talk() as (_, client):
        answer = await client.get("/listlookup", headers={"Accept": "*/*"})
    assert answer.text == '{"status_code":200,"status_txt":"OK","data":null}'


async def test_nodes_and_debug_name_partitions() -> None:
    async with talk() as (_, client):
        nodes = (await client.get("/nodes")).json()["producers"]
        debug: dict[str, Any] = (await client.get("/debug")).json()
    assert nodes[0]["partitions"] == {"ta": ["0", "1"], "tb": ["0"]}
    assert (nodes[0]["topics"], nodes[0]["tombstones"]) == (["ta", "tb"], [False, False])
    assert debug["channel:tb:0"] == [{"channelName": "c1", "partitionID": "0", "peerId": "127.0.0.1:99"}]
    assert [entry["partitionID"] for entry in debug["topic:ta"]] == ["0", "1"]
    assert [entry["id"] for name in debug for entry in debug[name] if name.startswith("peerInfo:")] == ["127.0.0.1:99"]


async def test_a_topic_without_channels_is_not_for_writers() -> None:
    async with talk() as (_, client):
        answer = await client.get("/lookup?topic=ta&access=w")
    assert (answer.status_code, "has no channel" in answer.text) == (404, True)


async def test_a_partition_without_channels_does_not_hide_the_others_from_writers() -> None:
    async with talk() as (session, client):
        session.receive(b"REGISTER ta 1 c1\n")
        answer = await client.get("/lookup?topic=ta&access=w")
    assert (answer.status_code, list(answer.json()["partitions"])) == (200, ["1"])


async def test_of_several_nodes_with_a_partition_the_last_is_shown() -> None:
    async with talk() as (first, client):
        session = LookupSession(first.registry, "127.0.0.1:98", PeerInfo(), partitions=True)
        session.receive(b"  V1" + identify(NODE) + b"REGISTER tb 0 c1\n")
        found = (await client.get("/lookup?topic=tb")).json()
    assert [node["id"] for node in found["producers"]] == ["127.0.0.1:98"]


async def test_a_tombstone_hides_a_node_from_writers_until_it_is_removed() -> None:
    async with talk() as (_, client):
        hide = await client.post("/topic/tombstone?topic=tb&node=b:5151")
        hidden = (await client.get("/lookup?topic=tb&access=w")).json()
        assert list((await client.get("/lookup?topic=tb")).json()["partitions"]) == ["0"], "consumers see it"
        await client.post("/topic/tombstone?topic=tb&node=b:5151&restore=true")
        shown = (await client.get("/lookup?topic=tb&access=w")).json()
    assert (hide.status_code, hide.content, hidden, list(shown["partitions"])) == (200, b"", HIDDEN_BODY, ["0"])


REFUSALS: list[tuple[str, int, str]] = [
    ("/topic/create", 400, "MISSING_ARG_TOPIC"),
    ("/topic/create?topic=n!&partition_num=1&replicator=9", 400, "INVALID_ARG_TOPIC"),
    ("/topic/create?topic=n", 400, "MISSING_ARG_TOPIC_PARTITION_NUM"),
    ("/topic/create?topic=n&partition_num=0&replicator=1", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("/topic/create?topic=n&partition_num=1", 400, "MISSING_ARG_TOPIC_REPLICATOR"),
    ("/topic/create?topic=n&partition_num=1&replicator=9", 400, "INVALID_ARG_TOPIC_REPLICATOR"),
    ("/topic/create?topic=n&partition_num=2&replicator=1", 500, "MISSING_COORDINATOR"),
    ("/topic/delete?topic=n", 400, "MISSING_ARG_TOPIC_PARTITION"),
    ("/topic/delete?topic=n&partition=0", 400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED"),
    ("/topic/delete?topic=n&partition=**", 500, "MISSING_COORDINATOR"),
    ("/topic/meta/update", 500, "MISSING_COORDINATOR"),
    ("/topic/partition/expand", 500, "MISSING_COORDINATOR"),
    ("/topic/partition/move", 500, "MISSING_COORDINATOR"),
    ("/channel/create?topic=t", 400, "MISSING_ARG_CHANNEL"),
    ("/channel/create?topic=t&channel=c!", 400, "INVALID_ARG_CHANNEL"),
    ("/channel/create?topic=tb&channel=c2", 500, "INTERNAL_ERROR"),
    ("/channel/delete?topic=t!&channel=c", 400, "INVALID_ARG_TOPIC"),
    ("/cluster/node/remove", 500, "MISSING_COORDINATOR"),
    ("/cluster/upgrade/begin", 500, "MISSING_COORDINATOR"),
    ("/cluster/upgrade/done", 500, "MISSING_COORDINATOR"),
    ("/cluster/lookupd/tombstone", 400, "MISSING_ARG_NODE"),
    ("/cluster/lookupd/tombstone?node=x", 500, "MISSING_COORDINATOR"),
    ("/cluster/lookupd/tombstone?node=x&restore=true", 404, "lookup node id not found"),
    ("/loglevel/set", 400, "MISSING_ARG_LEVEL"),
    ("/loglevel/set?loglevel=x", 400, "BAD_LEVEL_STRING"),
]


@pytest.mark.parametrize(("path", "status", "text"), REFUSALS, ids=[path for path, _, _ in REFUSALS])
async def test_changes_are_checked_and_need_a_cluster(path: str, status: int, text: str) -> None:
    async with talk() as (_, client):
        answer = await client.post(path)
    assert (answer.status_code, answer.json()) == (status, {"message": text})


@pytest.mark.parametrize("path", ["/loglevel/set?loglevel=2", "/disable/write", "/disable/write?type=all"])
async def test_switches_without_a_cluster_do_nothing(path: str) -> None:
    async with talk() as (_, client):
        before = (await client.get("/lookup?topic=tb&access=w")).json()
        answer = await client.post(path)
        after = (await client.get("/lookup?topic=tb&access=w")).json()
    assert (answer.status_code, answer.content, after) == (200, b"", before)


async def test_unregistered_and_lost_producers_are_not_listed() -> None:
    async with talk() as (session, client):
        assert answers(session.receive(b"REGISTER ta 0 c0\nUNREGISTER ta 1\nUNREGISTER tb 0 c1\n")) == [b"OK"] * 3
        assert (await client.get("/channels?topic=ta")).json() == {"channels": ["c0"]}
        left = (await client.get("/lookup?topic=ta")).json()
        channels = (await client.get("/channels?topic=tb")).json()
        session.end()
        topics = (await client.get("/topics")).json()
    assert (list(left["partitions"]), channels, topics) == (["0"], {"channels": []}, {"topics": []})


async def test_a_redesigned_nsqd_registers_partitions() -> None:
    async with talk() as (first, _):
        session = LookupSession(first.registry, "127.0.0.1:98", PeerInfo(), partitions=True)
        session.receive(b"  V1" + identify(NODE | {"version": "0.3.7-HA.1.13.0"}))
        assert answers(session.receive(b"REGISTER t x\n")) == [
            b"E_BAD_PARTITIONID REGISTER partition id 'x' is not valid"
        ]
        assert session.closing


async def test_an_original_nsqd_registers_topics_without_partitions() -> None:
    async with talk() as (session, client):
        assert answers(session.receive(b"REGISTER old c9\n")) == [b"OK"]
        found = (await client.get("/lookup?topic=old")).json()
    assert (found["channels"], list(found["partitions"])) == (["c9"], ["-11"])
