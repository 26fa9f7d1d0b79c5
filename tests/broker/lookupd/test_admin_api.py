"""Administration of a cluster over lookup's HTTP API."""

from __future__ import annotations

import anyio
import pytest

from nsqext.broker.engine.storage.partition_store import NewMessage
from tests.broker.lookupd.test_api import V1, add_channel, create, talk
from tests.support.coordinators import hosted, make_coordinator, running, until

pytestmark = pytest.mark.anyio

ERRORS = [
    ("/cluster/lookupd/tombstone", 400, "MISSING_ARG_NODE"),
    ("/cluster/lookupd/tombstone?node=x", 404, "lookup node id not found"),
    ("/cluster/lookupd/tombstone?node=x&restore=1", 404, "lookup node id not found"),
    ("/loglevel/set", 400, "MISSING_ARG_LEVEL"),
    ("/loglevel/set?loglevel=x", 400, "BAD_LEVEL_STRING"),
    ("/topic/partition/move", 400, "MISSING_ARG_TOPIC"),
    ("/topic/partition/move?topic=a", 400, "MISSING_ARG_TOPIC_PARTITION"),
    ("/topic/partition/move?topic=a&partition=x", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("/topic/partition/move?topic=a&partition=-1&move_from=a&move_to=b", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("/topic/partition/move?topic=a&partition=0&move_from=a&move_to=b", 400, "Key not found"),
]


@pytest.mark.parametrize(("path", "status", "text"), ERRORS)
async def test_refusals(path: str, status: int, text: str) -> None:
    async with talk() as (_, client):
        answer = await client.post(path)
    assert (answer.status_code, answer.text) == (status, f'{{"message":"{text}"}}')


@pytest.mark.parametrize(
    "path",
    [
        "/cluster/node/remove",
        "/cluster/node/remove?remove_node=nope",
        "/cluster/upgrade/done",
        "/loglevel/set?loglevel=2",
        "/disable/write?type=none",
    ],
)
async def test_routes_without_effect_are_accepted(path: str) -> None:
    async with talk() as (_, client):
        answer = await client.post(path)
    assert (answer.status_code, answer.text) == (200, "")


async def test_cluster_stats() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t", "partition_num=1&replicator=2")
        await create(client, "u")
        found = (await client.get("/cluster/stats")).json()
        members = {"hostname", "broadcast_address", "tcp_port", "http_port", "leader_load_factor", "node_load_factor"}
        assert (found["stable"], found["topn_topics"]) == (True, [])
        assert [set(node) for node in found["node_stat_list"]] == [members] * 3
        factors = ("leader_load_factor", "node_load_factor")
        loads = {node[name] for node in found["node_stat_list"] for name in factors}
        assert loads == {0.8}, "as of a real node without messages"
        for name in coordinator.replica_sets["t", 0].state.replicas:
            stored = hosted(coordinator, name).partition.put([NewMessage(bytes(1 << 20))])
        found = (await client.get("/cluster/stats?topn=1")).json()
        more = 0.8 + stored.size / (1 << 20)
        assert [sorted(node[name] for node in found["node_stat_list"]) for name in factors] == [
            [0.8, 0.8, more],
            [0.8, more, more],
        ]
        assert [entry["topic"] for entry in found["topn_topics"]] == ["t"]
        assert (await client.get("/cluster/stats?topn=x&y=%zz")).json()["topn_topics"] == []


async def test_an_announced_upgrade_makes_the_cluster_unstable() -> None:
    async with talk() as (_, client):
        await create(client, "t")
        await client.post("/cluster/upgrade/begin")
        answer = await client.post("/topic/partition/expand?topic=t&partition_num=2")
        assert (answer.status_code, answer.text) == (500, '{"message":"the cluster is unstable"}')
        answer = await client.post("/topic/partition/move?topic=t&partition=0")
        assert (answer.status_code, answer.text) == (400, '{"message":"the cluster is unstable"}')
        await client.post("/cluster/upgrade/done")
        assert (await client.post("/topic/partition/expand?topic=t&partition_num=2")).status_code == 200


async def test_disabled_writes_show_nothing_to_writers() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        await create(client, "o", "partition_num=1&replicator=1&orderedmulti=true")
        for topic in ("t", "o"):
            add_channel(coordinator, topic)

        async def shown(topic: str, access: str) -> bool:
            answer = await client.get(f"/lookup?topic={topic}&access={access}", headers=V1)
            return answer.json()["producers"] is not None

        await client.post("/disable/write?type=ordered")
        assert [await shown("t", "w"), await shown("o", "w"), await shown("o", "r")] == [True, False, True]
        await client.post("/disable/write?type=all")
        assert [await shown("t", "w"), await shown("t", "r")] == [False, True]
        await client.post("/disable/write")
        assert [await shown("t", "w"), await shown("o", "w")] == [True, True]


async def test_a_hidden_lookup_node_is_not_listed() -> None:
    async with talk() as (_, client):
        path = "/cluster/lookupd/tombstone?node=127.0.0.1:4161:4160:nsqlookup"
        assert (await client.post(path)).status_code == 200
        assert (await client.get("/listlookup", headers=V1)).json()["lookupdnodes"] == []
        assert (await client.post(path + "&restore=true")).status_code == 200
        assert len((await client.get("/listlookup", headers=V1)).json()["lookupdnodes"]) == 1


async def test_partitions_move_by_node_id() -> None:
    async with running() as coordinator, talk(coordinator) as (_, client):
        await create(client, "t")
        first = coordinator.replica_sets["t", 0].state.leader
        second = next(name for name in coordinator.members if name != first)
        ids = {name: member.distributed_id for name, member in coordinator.members.items()}
        path = "/topic/partition/move?topic=t&partition=0"
        answer = await client.post(f"{path}&move_from={ids[first]}&move_to={ids[second]}&move_leader=false")
        assert answer.text == '{"message":"can not move leader without moveleader param"}'
        answer = await client.post(f"{path}&move_from={ids[first]}&move_to={ids[second]}&move_leader=true")
        assert (answer.status_code, answer.text, coordinator.replica_sets["t", 0].state.leader) == (200, "", second)


async def test_a_removed_node_is_emptied() -> None:
    async with running() as coordinator, talk(coordinator) as (_, client):
        await create(client, "t", "partition_num=1&replicator=2")
        gone = coordinator.replica_sets["t", 0].state.leader
        answer = await client.post(f"/cluster/node/remove?remove_node={coordinator.members[gone].distributed_id}")
        assert answer.status_code == 200
        with anyio.fail_after(25):
            while gone in coordinator.replica_sets["t", 0].state.replicas:
                await coordinator.replica_sets["t", 0].changes.wait()
        await until(coordinator, "writable")
        await create(client, "u", "partition_num=1&replicator=2")
        assert gone not in coordinator.replica_sets["u", 0].state.replicas


_NOT_LEADER, _NO_LEADER = "E_FAILED_ON_NOT_LEADER", "Not nsqlookup leader"


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("POST", "/topic/create?topic=u&partition_num=1&replicator=1", 400, _NOT_LEADER),
        ("GET", "/cluster/stats", 400, _NOT_LEADER),
        ("POST", "/topic/delete?topic=t&partition=**", 500, _NO_LEADER),
        ("POST", "/topic/partition/expand?topic=t&partition_num=2", 500, _NO_LEADER),
        ("POST", "/topic/meta/update?topic=t&syncdisk=5", 400, _NO_LEADER),
        ("POST", "/topic/meta/update?topic=t&syncdisk=x", 400, "INVALID_ARG_TOPIC_SYNC_DISK"),
        ("POST", "/channel/create?topic=r&channel=new", 400, _NO_LEADER),
        ("POST", "/channel/delete?topic=r&channel=ch", 400, _NO_LEADER),
        ("POST", "/cluster/node/remove?remove_node=n1", 400, _NO_LEADER),
        ("POST", "/cluster/upgrade/begin", 400, _NO_LEADER),
    ],
)
async def test_a_lookup_node_that_does_not_lead_refuses_changes(method: str, path: str, status: int, text: str) -> None:
    coordinator = make_coordinator()
    async with talk(coordinator) as (_, leader):
        await create(leader, "t")
        await create(leader, "r", "partition_num=1&replicator=1&disable_channel_auto_create=true")
        await until(coordinator, "writable")
        answer = await leader.post("/channel/create?topic=r&channel=ch")
        assert (answer.status_code, answer.text) == (200, "")
    async with talk(coordinator, leads=False) as (_, client):
        answer = await client.request(method, path, headers=V1)
        assert (answer.status_code, answer.json()["message"]) == (status, text)
    assert sorted(coordinator.topics) == ["r", "t"]
    assert not coordinator.upgrading


async def test_debug_logs_everything() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        add_channel(coordinator, "t")
        found = (await client.get("/debug", headers=V1)).json()
        peer = f"127.0.0.1:{coordinator.members[coordinator.replica_sets['t', 0].state.leader].tcp.port}"
        assert len(found) == 5
        assert found["channel:t:0"] == [{"partitionID": "0", "channelName": "ch", "peerId": peer}]
        assert (found["topic:t"][0]["id"], found["topic:t"][0]["tombstoned"]) == (peer, False)
        assert found[f"peerInfo:{peer}"][0]["hostname"] == "host"
