"""A cluster of the original generation: independent nodes that register with lookup."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest

from nsqext.broker import Cluster, ClusterOptions
from nsqext.broker.lookupd.registration_client import RegistrationClient, _LookupConnection
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, TopicNotFound
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support import plain_http
from tests.support.blocking_client import BlockingClient, eventually, lookup


def ports(address: str, topic: str) -> list[int]:
    answer = plain_http.get(f"http://{address}/lookup", params={"topic": topic}).json()
    return sorted(node["tcp_port"] for node in answer.get("producers", []))


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_nodes_register_created_topics() -> None:
    with Cluster(2, lookupds=2, generation="original") as cluster:
        cluster.create_topic("orders", channels=["billing"])
        everywhere = sorted(port(node.tcp) for node in cluster.nodes.values())
        for address in cluster.lookupd:
            assert ports(address, "orders") == everywhere
            assert lookup(address, "/channels", topic="orders") == {"channels": ["billing"]}
            assert sorted(node["tcp_port"] for node in lookup(address, "/nodes")["producers"]) == everywhere
        cluster.delete_topic("orders")
        eventually(lambda: [ports(address, "orders") for address in cluster.lookupd], lambda found: found == [[], []])
        with pytest.raises(TopicNotFound):
            cluster.delete_topic("orders")


def test_lookup_lists_the_nodes_when_the_cluster_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = RegistrationClient._connect

    async def slow(self: RegistrationClient, peer: Any) -> None:
        await anyio.sleep(0.2)
        await connect(self, peer)

    monkeypatch.setattr(RegistrationClient, "_connect", slow)
    with Cluster(2, lookupds=2, generation="original") as cluster:
        assert [len(lookup(address, "/nodes")["producers"]) for address in cluster.lookupd] == [2, 2]


def test_a_killed_node_is_not_listed_as_producer() -> None:
    with Cluster(2, generation="original") as cluster:
        cluster.create_topic("t")
        cluster.kill("n1")
        second = port(cluster.nodes["n2"].tcp)
        eventually(lambda: ports(cluster.lookupd[0], "t"), lambda found: found == [second])
        cluster.restart("n1")
        eventually(lambda: len(ports(cluster.lookupd[0], "t")), lambda count: count == 2)


def test_a_lookup_node_that_was_down_receives_all_registrations() -> None:
    with Cluster(1, lookupds=2, generation="original", options=ClusterOptions(lookup_ping=0.05)) as cluster:
        cluster.create_topic("t", channels=["c"])
        cluster.kill("l1")
        cluster.create_topic("u")
        cluster.restart("l1")
        first = cluster.lookupd[0]
        eventually(lambda: [len(ports(first, name)) for name in ("t", "u")], lambda counts: counts == [1, 1])
        assert lookup(first, "/channels", topic="t") == {"channels": ["c"]}


def test_a_frozen_node_becomes_inactive() -> None:
    options = ClusterOptions(lookup_ping=0.05, inactive_producer_timeout=30)
    with Cluster(1, generation="original", options=options) as cluster:
        cluster.create_topic("t")
        cluster.faults.freeze("n1")
        cluster.faults.clock.advance(31)
        if ports(cluster.lookupd[0], "t"):  # a PING that was sent before the freeze was received after it
            cluster.faults.clock.advance(31)
        assert ports(cluster.lookupd[0], "t") == []
        cluster.faults.thaw("n1")
        eventually(lambda: len(ports(cluster.lookupd[0], "t")), lambda count: count == 1)


def test_a_node_that_runs_stays_listed_when_the_clock_is_advanced() -> None:
    with Cluster(1, generation="original") as cluster:
        cluster.create_topic("t")
        cluster.faults.clock.advance(3600)
        assert ports(cluster.lookupd[0], "t") == [port(cluster.nodes["n1"].tcp)]


@pytest.mark.parametrize("end", ["kill", "terminate", "freeze"])
def test_a_topic_is_created_on_the_nodes_that_run(end: str) -> None:
    """With a node that was terminated or frozen, `create_topic` never returned."""
    with Cluster(3, generation="original") as cluster:
        getattr(cluster.faults if end == "freeze" else cluster, end)("n1")
        cluster.create_topic("orders", channels=["billing"])
        running = sorted(port(cluster.nodes[name].tcp) for name in ("n2", "n3"))
        assert ports(cluster.lookupd[0], "orders") == running
        if end != "freeze":
            cluster.restart("n1")
            assert _depths(cluster.nodes["n1"].http, "orders") == {}
            cluster.kill("n1")
        for name in ("n2", "n3"):
            cluster.kill(name)
        with pytest.raises(InvalidInput, match="cannot be created: no node runs"):
            cluster.create_topic("refunds")


def test_a_new_topic_gets_the_channels_that_other_nodes_have() -> None:
    with Cluster(2, generation="original") as cluster:
        plain_http.post(f"http://{cluster.lookupd[0]}/channel/create?topic=t&channel=known")
        cluster.create_topic("t")
        registered = eventually(lambda: lookup(cluster.lookupd[0], "/debug").get("channel:t:known", []), _is_pair)
        assert sorted(node["tcp_port"] for node in registered) == ports(cluster.lookupd[0], "t")


def test_the_publish_that_creates_a_topic_is_received_by_all_channels_that_lookup_knows() -> None:
    with Cluster(1, generation="original") as cluster:
        node, address = cluster.nodes["n1"], cluster.lookupd[0]
        for channel in ("audit", "billing", "preview#ephemeral"):
            plain_http.post(f"http://{address}/channel/create", params={"topic": "t", "channel": channel})
        with BlockingClient(node.tcp) as client:
            assert client.ask("PUB t", b"first") == b"OK"
        found = eventually(lambda: _depths(node.http, "t"), lambda depths: len(depths) == 2)
        assert found == {"audit": 1, "billing": 1}


def _depths(address: str, topic: str) -> dict[str, int]:
    shown = plain_http.get(f"http://{address}/stats", params={"format": "json", "topic": topic}).json()["topics"]
    return {channel["channel_name"]: channel["depth"] for channel in shown[0]["channels"]} if shown else {}


def _is_pair(found: list[dict[str, object]]) -> bool:
    return len(found) == 2


def test_a_new_topic_has_its_channels_on_every_node() -> None:
    with Cluster(2, generation="original") as cluster:
        cluster.create_topic("orders", channels=["billing", "audit"])
        for node in cluster.nodes.values():
            assert _depths(node.http, "orders") == {"audit": 0, "billing": 0}


def test_lookup_lists_a_topic_when_it_was_created(monkeypatch: pytest.MonkeyPatch) -> None:
    request = _LookupConnection.request

    async def slow(self: _LookupConnection, data: bytes) -> bytes:
        await anyio.sleep(0.1)
        return await request(self, data)

    with Cluster(2, lookupds=2, generation="original") as cluster:
        monkeypatch.setattr(_LookupConnection, "request", slow)
        cluster.create_topic("t", channels=["ch"])
        for address in cluster.lookupd:
            assert [len(lookup(address, "/debug")[key]) for key in ("topic:t:", "channel:t:ch")] == [2, 2]


def test_a_topic_that_is_deleted_before_lookup_lists_it_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(self: _LookupConnection, data: bytes) -> bytes:
        await anyio.sleep_forever()
        return data

    with ThreadPoolExecutor(1) as threads, Cluster(1, generation="original") as cluster:
        monkeypatch.setattr(_LookupConnection, "request", wait)
        created = threads.submit(cluster.create_topic, "t")
        eventually(lambda: "t" in cluster.topics)
        cluster.delete_topic("t")
        assert isinstance(created.exception(25), TopicNotFound)


def test_channels_that_only_a_dead_lookup_node_knew_are_not_created() -> None:
    with Cluster(1, lookupds=2, generation="original") as cluster:
        plain_http.post(f"http://{cluster.lookupd[1]}/channel/create?topic=t&channel=known")
        cluster.kill("l2")
        cluster.create_topic("t")
        assert _depths(cluster.nodes["n1"].http, "t") == {}


def test_a_restarted_lookup_node_has_forgotten_what_no_node_registers() -> None:
    with Cluster(1, generation="original") as cluster:
        address = cluster.lookupd[0]
        plain_http.post(f"http://{address}/topic/create?topic=t")
        assert lookup(address, "/topics") == {"topics": ["t"]}
        cluster.restart("l1")
        assert lookup(address, "/topics") == {"topics": []}


def test_a_tombstone_hides_a_node_for_its_lifetime() -> None:
    options = ClusterOptions(tombstone_lifetime=10, inactive_producer_timeout=1000)
    with Cluster(1, generation="original", options=options) as cluster:
        address, node = cluster.lookupd[0], cluster.nodes["n1"]
        cluster.create_topic("t")
        cluster.faults.clock.stop()
        plain_http.post(f"http://{address}/topic/tombstone", params={"topic": "t", "node": node.http})
        found = []
        for _ in range(3):
            found.append(ports(address, "t"))
            cluster.faults.clock.advance(9)
        assert found == [[], [], [port(node.tcp)]]
        cluster.faults.clock.run()


def test_topics_have_the_channels_of_all_nodes() -> None:
    with Cluster(2, generation="original") as cluster:
        cluster.create_topic("t")
        for node, channel in zip(cluster.nodes.values(), ("a", "b"), strict=True):
            with BlockingClient(node.tcp) as client:
                assert client.ask(f"SUB t {channel}") == b"OK"
        assert cluster.topics == {"t": ["a", "b"]}


def test_messages_flow() -> None:
    with Cluster(1, generation="original") as cluster:
        tcp = cluster.nodes["n1"].tcp
        with BlockingClient(tcp) as talker, BlockingClient(tcp) as consumer:
            assert talker.ask("PUB first", b"before") == b"OK"
            assert consumer.ask("SUB first ch") == b"OK"
            consumer.send("RDY 5")
            assert consumer.message()[1:] == (1, b"before")
        eventually(
            lambda: lookup(cluster.lookupd[0], "/channels", topic="first"), lambda found: found["channels"] == ["ch"]
        )


def test_operations_that_the_original_nsq_does_not_support() -> None:
    with Cluster(1, generation="original") as cluster:
        refused: list[dict[str, Any]] = [{"partitions": 2}, {"extend": True}, {"ordered": True}, {"replicas": 2}]
        for options in (*refused, {"register_channels": True}):
            with pytest.raises(InvalidInput, match="has no partitions"):
                cluster.create_topic("t", **options)
        with pytest.raises(InvalidState, match="no partition leaders"):
            cluster.leader("t")


@pytest.mark.parametrize(
    ("generation", "limits"), [("original", ServerLimits()), ("redesigned", ServerLimits.original())]
)
def test_limits_of_the_other_generation_are_refused(generation: str, limits: ServerLimits) -> None:
    cluster = Cluster(1, generation=generation, options=ClusterOptions(limits=limits))
    with pytest.raises(InvalidSetting, match="the limits are for the generation"):
        cluster.start()
