"""HTTP of nsqlookupd of the redesigned generation, compared with recorded responses of the real server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from nsqext.broker.engine.options import ChannelKind
from nsqext.broker.lookupd.api import lookupd_app
from nsqext.broker.lookupd.lookupd import Lookupd, LookupdGroup
from nsqext.types import Address
from tests.support.coordinators import hosted, make_coordinator

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator

pytestmark = pytest.mark.anyio

V1 = {"Accept": "application/vnd.nsq; version=1.0"}
NO_NODE = "ErrType:9 ErrCode:1 : No node is available for topic"


@asynccontextmanager
async def talk(
    coordinator: Coordinator | None = None, *, leads: bool = True
) -> AsyncIterator[tuple[Coordinator, httpx.AsyncClient]]:
    coordinator = coordinator or make_coordinator()
    group = LookupdGroup()
    lookupd = Lookupd(coordinator, group, name="l1", tcp=Address("127.0.0.1", 4160), http=Address("127.0.0.1", 4161))
    group.nodes.append(lookupd)
    if leads:
        group.elect()
    transport = httpx.ASGITransport(lookupd_app(lookupd))
    async with httpx.AsyncClient(transport=transport, base_url="http://lookup") as client:
        yield coordinator, client


async def create(client: httpx.AsyncClient, name: str, query: str = "partition_num=1&replicator=1") -> None:
    answer = await client.post(f"/topic/create?topic={name}&{query}")
    assert (answer.status_code, answer.text) == (200, "")


def add_channel(coordinator: Coordinator, topic: str, partition: int = 0, channel: str = "ch") -> None:
    leader = coordinator.replica_sets[topic, partition].state.leader
    hosted(coordinator, leader, topic, partition).partition.channel(channel)


ERRORS = [
    ("POST", "/topic/create?", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/create?topic=a", 400, "MISSING_ARG_TOPIC_PARTITION_NUM"),
    ("POST", "/topic/create?topic=a&partition_num=1", 400, "MISSING_ARG_TOPIC_REPLICATOR"),
    ("POST", "/topic/create?topic=bad!name&partition_num=1&replicator=1", 400, "INVALID_ARG_TOPIC"),
    ("POST", "/topic/create?topic=a&partition_num=0&replicator=1", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("POST", "/topic/create?topic=a&partition_num=256&replicator=1", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("POST", "/topic/create?topic=a&partition_num=255&replicator=1", 400, "max partition allowed exceed"),
    ("POST", "/topic/create?topic=a&partition_num=x&replicator=1", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
    ("POST", "/topic/create?topic=a&partition_num=1&replicator=6", 400, "INVALID_ARG_TOPIC_REPLICATOR"),
    ("POST", "/topic/create?topic=a&partition_num=1&replicator=1&suggestload=x", 400, "INVALID_ARG_TOPIC_LOAD_FACTOR"),
    ("POST", "/topic/create?topic=a&partition_num=1&replicator=1&syncdisk=x", 400, "INVALID_ARG_TOPIC_SYNC_DISK"),
    (
        "POST",
        "/topic/create?topic=a&partition_num=1&replicator=1&retention=x",
        400,
        'strconv.Atoi: parsing "x": invalid syntax',
    ),
    ("POST", "/topic/create?topic=a&partition_num=4&replicator=1", 400, NO_NODE),
    ("POST", "/topic/creat?topic=x", 404, "NOT_FOUND"),
    ("GET", "/topic/create?topic=a", 405, "METHOD_NOT_ALLOWED"),
    ("POST", "/topic/delete", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/delete?topic=t", 400, "MISSING_ARG_TOPIC_PARTITION"),
    ("POST", "/topic/delete?topic=t&partition=0", 400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED"),
    ("POST", "/topic/delete?topic=no_such&partition=**", 500, "Key not found"),
    ("POST", "/topic/meta/update?topic=no_such&upgradeext=true", 400, "topic is not created"),
    ("POST", "/topic/meta/update?upgradeext=true", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/meta/update?topic=t&replicator=9", 400, "INVALID_ARG_TOPIC_REPLICATOR"),
    ("POST", "/topic/meta/update?topic=t&syncdisk=x", 400, "INVALID_ARG_TOPIC_SYNC_DISK"),
    ("POST", "/topic/meta/update?topic=bad!", 400, "invalid topic name"),
    ("POST", "/topic/partition/expand?topic=t", 400, "MISSING_ARG_TOPIC_PARTITION_NUM"),
    ("POST", "/topic/partition/expand?partition_num=2", 400, "MISSING_ARG_TOPIC"),
    ("POST", "/topic/partition/expand?topic=no_such&partition_num=2", 500, "topic is not created"),
    ("POST", "/topic/tombstone?topic=t", 400, "MISSING_ARG_NODE"),
    ("POST", "/channel/create?topic=t&channel=x", 400, "channel auto create NOT disabled in topic t"),
    ("POST", "/channel/create?topic=r&channel=reg1", 400, "channel reg1 already registered"),
    ("POST", "/channel/create?topic=r", 400, "MISSING_ARG_CHANNEL"),
    ("POST", "/channel/create?topic=r&channel=bad!", 400, "INVALID_ARG_CHANNEL"),
    ("POST", "/channel/create?topic=no_such&channel=x", 400, "Key not found"),
    ("POST", "/channel/delete?topic=r&channel=nochan", 400, "channel nochan not registered"),
]


@pytest.mark.parametrize(("method", "path", "status", "text"), ERRORS)
async def test_refusals(method: str, path: str, status: int, text: str) -> None:
    async with talk() as (_, client):
        await create(client, "t")
        await create(client, "r", "partition_num=1&replicator=1&disable_channel_auto_create=true")
        assert (await client.post("/channel/create?topic=r&channel=reg1")).status_code == 200
        answer = await client.request(method, path)
    assert (answer.status_code, answer.text) == (status, f'{{"message":"{text}"}}')


def entry(coordinator: Coordinator, topic: str, partition: int = 0) -> dict[str, Any]:
    member = coordinator.members[coordinator.replica_sets[topic, partition].state.leader]
    return {
        "id": f"127.0.0.1:{member.tcp.port}",
        "remote_address": f"127.0.0.1:{member.tcp.port}",
        "hostname": "host",
        "broadcast_address": "127.0.0.1",
        "tcp_port": member.tcp.port,
        "http_port": member.http.port,
        "version": "0.3.7-HA.1.13.0",
        "distributed_id": f"127.0.0.1:{member.http.port}:{member.tcp.port}:{member.number}",
    }


async def test_lookup_in_all_its_forms() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t", "partition_num=2&replicator=1&extend=true")
        for partition in range(2):
            add_channel(coordinator, "t", partition)
        nodes = [entry(coordinator, "t", partition) for partition in range(2)]
        whole = {"channels": ["ch"], "partitions": {"0": nodes[0], "1": nodes[1]}, "producers": nodes}
        meta = {
            "disable_channel_auto_create": False,
            "extend_support": True,
            "multi_part": False,
            "ordered": False,
            "partition_num": 2,
            "replica": 1,
        }
        second = {"channels": ["ch"], "partitions": {"1": nodes[1]}, "producers": [nodes[1]]}
        cases = [
            ("", whole),
            ("&metainfo=", whole),
            ("&access=r&metainfo=false", whole | {"meta": meta}),
            ("&access=w&metainfo=true", whole | {"meta": meta}),
            ("&access=r&partition=1", second),
            ("&access=w&partition=1&metainfo=true&consistent=true", second | {"meta": meta}),
            ("&access=r&partition=7", {"channels": [], "partitions": {}, "producers": []}),
            ("&access=w&partition=7", {"channels": [], "partitions": {}, "producers": []}),
        ]
        for query, expected in cases:
            answer = await client.get(f"/lookup?topic=t{query}")
            assert answer.json() == {"status_code": 200, "status_txt": "OK", "data": expected}
            assert (await client.get(f"/lookup?topic=t{query}", headers=V1)).json() == expected


async def test_a_reader_finds_a_partition_however_it_is_spelled() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        add_channel(coordinator, "t")
        for query, label in (("00", "00"), ("%2B0", "+0"), ("-0", "-0")):
            found = (await client.get(f"/lookup?topic=t&partition={query}", headers=V1)).json()
            node = entry(coordinator, "t")
            assert found == {"channels": [], "partitions": {label: node}, "producers": [node]}
            found = (await client.get(f"/lookup?topic=t&partition={query}&access=w", headers=V1)).json()
            assert found["partitions"] == {}
        for query in ("x", "7", "0.0"):
            found = (await client.get(f"/lookup?topic=t&partition={query}", headers=V1)).json()
            assert found == {"channels": [], "partitions": {}, "producers": []}


async def test_lookup_of_a_missing_topic() -> None:
    none: dict[str, object] = {"disable_channel_auto_create": False, "extend_support": False, "multi_part": False}
    none |= {"ordered": False, "partition_num": 0, "replica": 0}
    async with talk() as (_, client):
        answer = await client.get("/lookup?topic=nope&access=r&metainfo=true", headers=V1)
        assert answer.json() == {"channels": [], "meta": none, "partitions": {}, "producers": []}
        answer = await client.get("/lookup?topic=nope&access=w")
        assert (answer.status_code, answer.json()["status_txt"]) == (500, "Key not found")
        answer = await client.get("/lookup?topic=nope&access=w", headers=V1)
        assert (answer.status_code, answer.text) == (404, '{"message":"Key not found"}')
        for path, text in (("/lookup", "MISSING_ARG_TOPIC"), ("/lookup?topic=t&access=x", "INVALID_ACCESS_MODE")):
            assert (await client.get(path)).json()["status_txt"] == text


async def test_writers_need_a_channel() -> None:
    text = "Topic has no channel, should init at least one for the new topic"
    async with talk() as (coordinator, client):
        await create(client, "t", "partition_num=2&replicator=1")
        assert len((await client.get("/lookup?topic=t&access=r", headers=V1)).json()["partitions"]) == 2
        answer = await client.get("/lookup?topic=t&access=w", headers=V1)
        assert (answer.status_code, answer.json()) == (404, {"message": text})
        add_channel(coordinator, "t", 1)
        answer = await client.get("/lookup?topic=t&access=w", headers=V1)
        assert list(answer.json()["partitions"]) == ["1"]


async def test_tombstones_hide_a_node_from_writers() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        add_channel(coordinator, "t")
        await create(client, "u", "partition_num=3&replicator=1")
        for partition in range(3):
            add_channel(coordinator, "u", partition)
        node = f"127.0.0.1:{entry(coordinator, 't')['http_port']}"
        for path in (f"/topic/tombstone?topic=t&node={node}", "/topic/tombstone?topic=t&node=1.2.3.4:5"):
            assert (await client.post(path)).text == ""
        hidden = {"channels": ["ch"], "partitions": {}, "producers": []}
        assert (await client.get("/lookup?topic=t&access=w", headers=V1)).json() == hidden
        assert (await client.get("/lookup?topic=t&access=r", headers=V1)).json()["producers"]
        assert len((await client.get("/lookup?topic=u&access=w", headers=V1)).json()["producers"]) == 3
        nodes = (await client.get("/nodes", headers=V1)).json()["producers"]
        assert sorted(found["tombstones"] for found in nodes) == [[False], [False], [True, False]]
        await client.post(f"/topic/tombstone?topic=t&node={node}&restore=true")
        assert (await client.get("/lookup?topic=t&access=w", headers=V1)).json()["producers"]
        await client.post(f"/topic/tombstone?topic=t&node={node}")
        await client.post("/topic/delete?topic=t&partition=**")
        await create(client, "t")
        add_channel(coordinator, "t")
        assert (await client.get("/lookup?topic=t&access=w", headers=V1)).json()["producers"], "it is a new topic"


async def test_a_tombstone_needs_a_node_that_leads_the_topic_at_that_time() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t", "partition_num=1&replicator=2")
        add_channel(coordinator, "t")
        state = coordinator.replica_sets["t", 0].state
        other = next(name for name in state.replicas if name != state.leader)
        await client.post(f"/topic/tombstone?topic=t&node=127.0.0.1:{coordinator.members[other].http.port}")
        coordinator.elect(coordinator.replica_sets["t", 0], other)
        found = (await client.get("/lookup?topic=t&access=w", headers=V1)).json()
        assert found["producers"] == [entry(coordinator, "t")]


async def test_lists() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        await create(client, "x", "partition_num=1&replicator=1&extend=true&orderedmulti=true")
        add_channel(coordinator, "t", channel="one")
        add_channel(coordinator, "t", channel="two")
        assert (await client.get("/topics")).json()["data"] == {"topics": ["t", "x"]}
        infos = (await client.get("/topics?metaInfo=true", headers=V1)).json()["meta_info"]
        assert infos[1] == {
            "topic_name": "x",
            "extend_support": True,
            "ordered": True,
            "multi_part": False,
            "disable_channel_auto_create": False,
            "registered_channels": None,
        }
        assert (await client.get("/channels?topic=t")).json()["data"] == {"channels": ["one", "two"]}
        assert (await client.get("/channels?topic=nope", headers=V1)).json() == {"channels": []}
        assert (await client.get("/channels", headers=V1)).status_code == 400
        nodes = (await client.get("/nodes", headers=V1)).json()["producers"]
        assert len(nodes) == 3
        led = {topic: parts for found in nodes for topic, parts in found["partitions"].items()}
        assert led == {"t": ["0"], "x": ["0"]}


async def test_a_leader_without_a_majority_unregisters_its_topic_and_channels() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t", "partition_num=1&replicator=2")
        add_channel(coordinator, "t")
        state = coordinator.replica_sets["t", 0].state
        state.in_sync.remove(next(name for name in state.replicas if name != state.leader))
        node = entry(coordinator, "t")
        found = (await client.get("/lookup?topic=t", headers=V1)).json()
        assert found == {"channels": [], "partitions": {"0": node}, "producers": [node]}
        found = (await client.get("/lookup?topic=t&access=w", headers=V1)).json()
        assert found == {"channels": [], "partitions": {}, "producers": []}
        assert (await client.get("/channels?topic=t", headers=V1)).json() == {"channels": []}
        assert (await client.get("/topics", headers=V1)).json() == {"topics": []}
        assert (await client.get("/topics?metaInfo=true", headers=V1)).json() == {"meta_info": None, "topics": []}
        assert not any(found["topics"] for found in (await client.get("/nodes", headers=V1)).json()["producers"])


async def test_a_leader_that_died_leaves_its_topic_in_the_list() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        add_channel(coordinator, "t")
        coordinator.members[coordinator.replica_sets["t", 0].state.leader].alive = False
        assert (await client.get("/topics", headers=V1)).json() == {"topics": ["t"]}
        for access in "rw":
            found = (await client.get(f"/lookup?topic=t&access={access}", headers=V1)).json()
            assert found == {"channels": [], "partitions": {}, "producers": []}
        assert len((await client.get("/cluster/stats")).json()["node_stat_list"]) == 2


async def test_information() -> None:
    leader = {"ID": "127.0.0.1:4161:4160:nsqlookup", "NodeIP": "127.0.0.1", "TcpPort": "4160", "HttpPort": "4161"}
    leader |= {"RpcPort": "4161"}
    async with talk() as (_, client):
        assert (await client.get("/ping")).text == "OK"
        assert (await client.get("/info", headers=V1)).json() == {"version": "0.3.7-HA.1.13.0", "ha_support": True}
        found = json.loads((await client.get("/listlookup", headers=V1)).text)
        assert found == {"lookupdleader": leader | {"Epoch": 0}, "lookupdnodes": [leader | {"Epoch": 0}]}


async def test_topics_are_changed_and_deleted() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        await create(client, "t")
        update = "/topic/meta/update?topic=t"
        for query in ("&syncdisk=10&retention=2", "&upgradeext=true", "&upgradeext=true", "&upgradeext=false"):
            assert (await client.post(update + query)).text == ""
        spec = coordinator.topics["t"].spec
        assert (spec.extend, spec.sync_every, spec.retention_days) == (True, 10, 2)
        await client.post(update + "&syncdisk=0&retention=0")
        spec = coordinator.topics["t"].spec
        assert (spec.extend, spec.sync_every, spec.retention_days) == (True, 0, 0)
        await client.post(update + "&disable_channel_auto_create=true")
        assert coordinator.topics["t"].spec.disable_channel_auto_create
        assert (await client.post("/topic/partition/expand?topic=t&partition_num=2")).text == ""
        assert coordinator.topics["t"].spec.partition_num == 2
        assert (await client.post("/topic/delete?topic=t&partition=**")).text == ""
        assert (await client.post("/topic/delete?topic=t&partition=**&force=true")).text == ""
        assert coordinator.topics == {}


async def test_registered_channels() -> None:
    async with talk() as (_, client):
        await create(client, "r", "partition_num=1&replicator=1&disable_channel_auto_create=true")
        for channel in ("reg2", "reg1"):
            assert (await client.post(f"/channel/create?topic=r&channel={channel}")).text == ""
        assert (await client.get("/channels?topic=r", headers=V1)).json() == {"channels": ["reg2", "reg1"]}
        assert (await client.post("/channel/delete?topic=r&channel=reg2")).text == ""
        assert (await client.get("/channels?topic=r", headers=V1)).json() == {"channels": ["reg1"]}


async def test_only_registered_and_ephemeral_channels_are_left_to_a_registering_topic() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t")
        for channel in ("own", "passing#ephemeral"):
            add_channel(coordinator, "t", channel=channel)
        assert (await client.post("/topic/meta/update?topic=t&disable_channel_auto_create=true")).text == ""
        assert (await client.get("/channels?topic=t", headers=V1)).json() == {"channels": ["passing#ephemeral"]}
        await client.post("/channel/create?topic=t&channel=reg")
        await client.post("/channel/delete?topic=t&channel=reg")
        assert (await client.get("/channels?topic=t", headers=V1)).json() == {"channels": ["passing#ephemeral"]}


@pytest.mark.parametrize("closed", ["false", "true"])
async def test_a_typed_channel_is_made_on_every_partition(closed: str) -> None:
    async with talk() as (coordinator, client):
        await create(client, "t", f"partition_num=3&replicator=1&disable_channel_auto_create={closed}")
        path = "/channel/create?topic=t&channel=ch&dispatch=key_failover&key_header=user"
        for _ in range(2):
            answer = await client.post(path)
            assert (answer.status_code, answer.text) == (200, "")
        kinds = [replicas.leader.channels["ch"].kind for replicas in coordinator.partitions("t")]
        assert kinds == [ChannelKind("key_failover", "user", fixed=True)] * 3
        assert coordinator.topics["t"].registered == (["ch"] if closed == "true" else [])


async def test_a_type_refused_by_one_partition_is_set_on_no_partition() -> None:
    async with talk() as (coordinator, client):
        await create(client, "t", "partition_num=2&replicator=1")
        await create(client, "o", "partition_num=1&replicator=1&orderedmulti=true")
        add_channel(coordinator, "t", 1)
        leader = coordinator.replica_sets["t", 1].leader
        leader.channels["ch"].kind = ChannelKind("shared", fixed=True)
        leader.channels["ch"].set_ordered(True)
        for topic, dispatch, text in (
            ("t", "key_failover", "channel ch of topic t is ordered and cannot become key_failover"),
            ("o", "key_failover", "channel ch of topic o is ordered and cannot become key_failover"),
            ("t", "odd", "dispatch type odd is unknown, use shared or key_failover"),
            ("no", "key_failover", "Key not found"),
        ):
            answer = await client.post(f"/channel/create?topic={topic}&channel=ch&dispatch={dispatch}")
            assert (answer.status_code, answer.text) == (400, f'{{"message":"{text}"}}')
        assert not coordinator.replica_sets["t", 0].leader.channels
        coordinator.members[coordinator.replica_sets["t", 0].state.leader].alive = False
        answer = await client.post("/channel/create?topic=t&channel=other&dispatch=key_failover")
        assert answer.json() == {"message": "partition 0 of topic t has no leader"}
        assert list(leader.channels) == ["ch"]


async def test_metrics_in_the_format_of_prometheus() -> None:
    async with talk() as (coordinator, client):
        await create(client, "a", "partition_num=2&replicator=1")
        add_channel(coordinator, "a")
        answer = await client.get("/metrics")
        for number in (0, 1):
            coordinator.members[coordinator.replica_sets["a", number].state.leader].alive = False
        later = (await client.get("/metrics")).text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        "nsqlookupd_leader 1",
        "nsqlookupd_topics 1",
        'nsqlookupd_topic_partitions{topic="a"} 2',
        'nsqlookupd_topic_partitions_led{topic="a"} 2',
        'nsqlookupd_topic_channels{topic="a"} 1',
    ):
        assert f"{line}\n" in answer.text
    assert 'nsqlookupd_topic_partitions_led{topic="a"} 0\n' in later
