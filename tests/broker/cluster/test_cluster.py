"""The public interface of the cluster."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import (
    InvalidInput,
    InvalidName,
    InvalidSetting,
    InvalidState,
    PartitionUnavailable,
    TopicNotFound,
)
from tests.support import plain_http
from tests.support.blocking_client import BlockingClient, eventually, lookup, partitions
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker.runtime import Runtime


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_stop_leaves_nothing() -> None:
    threads = set(threading.enumerate())
    with Cluster(nodes=3, lookupds=2) as cluster:
        addresses = [*cluster.lookupd, *(node.tcp for node in cluster.nodes.values())]
        addresses += [node.http for node in cluster.nodes.values()]
        talker = BlockingClient(cluster.nodes["n1"].tcp)
    with talker, pytest.raises((EOFError, ConnectionError)):
        talker.ask("NOP")
    for address in addresses:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port(address)), 1).close()
    assert set(threading.enumerate()) <= threads


def _waiting_requests(runtime: Runtime) -> int:
    servers = [running.server for running in runtime.lookupds.values()]
    for running in runtime.nodes.values():
        servers += running.server._https if running.server is not None else []
    return sum(len(server._server.server_state.tasks) for server in servers if server is not None)


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_stop_ends_requests_that_wait_without_a_traceback(
    generation: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with Cluster(nodes=1, lookupds=2, generation=generation) as cluster:
        cluster.faults.slow_lookup(3600)
        cluster.faults.freeze("n1")
        clients = []
        for address in [*cluster.lookupd, cluster.nodes["n1"].http]:
            clients += [socket.create_connection(("127.0.0.1", port(address)), 5) for _ in range(3)]
        for client in clients:
            client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
        eventually(lambda: cluster._run(_waiting_requests), lambda count: count == len(clients))
        cluster.stop()
    for client in clients:
        with client, suppress(ConnectionError):
            assert client.recv(1) == b""
    assert (caplog.text, capfd.readouterr().err) == ("", "")


@pytest.mark.parametrize("end", ["", "del cluster", "raise SystemExit", "if os.fork(): os.wait()"])
def test_a_cluster_that_is_not_stopped_does_not_keep_the_program(end: str) -> None:
    """The program waited for ever for the cluster's thread, a forked child for a thread that it does not have."""
    code = (
        f"import os\nfrom nsqext.broker import Cluster\ncluster = Cluster(1).start()\nprint('run', flush=True)\n{end}"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout) == (0, b"run\n"), ended.stderr


def test_a_forked_process_has_the_addresses_of_its_parents_cluster_only() -> None:
    code = """if True:
        import os
        from nsqext.broker import Cluster
        with Cluster(1) as cluster:
            child = os.fork()
            if not child:
                try:
                    cluster.create_topic("orders")
                except Exception as error:
                    print(len(cluster.lookupd), error, flush=True)
                raise SystemExit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            cluster.create_topic("orders")
        """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert ended.stdout == "1 the cluster runs in the process that forked this one: call it there\n7\n", ended.stderr


def test_it_can_be_stopped_and_started_again() -> None:
    cluster = Cluster(1)
    for _ in range(2):
        cluster.start()
        with pytest.raises(InvalidState):
            cluster.start()
        cluster.create_topic("t")
        cluster.stop()
        cluster.stop()
    with pytest.raises(InvalidState, match="not running"):
        cluster.create_topic("t")
    with pytest.raises(InvalidState):
        _ = cluster.lookupd


def test_a_topic_is_writable_when_create_returns() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("orders", 2, channels=["billing"])
        leaders = {str(number): cluster.nodes[cluster.leader("orders", number)].tcp for number in range(2)}
        assert len(set(leaders.values())) == 2
        assert partitions(cluster.lookupd[0], "orders") == {key: port(tcp) for key, tcp in leaders.items()}
        with BlockingClient(leaders["0"]) as talker, BlockingClient(leaders["0"]) as consumer:
            assert consumer.subscribe("orders", "billing") == b"OK"
            assert talker.ask("PUB orders 0", b"hi") == b"OK"
            assert consumer.message()[1:] == (1, b"hi")
        cluster.delete_topic("orders")
        assert lookup(cluster.lookupd[0], "/topics") == {"topics": []}
        with pytest.raises(TopicNotFound):
            cluster.delete_topic("orders")
        with pytest.raises(TopicNotFound):
            cluster.leader("orders")


def test_more_copies_than_nodes_share_them() -> None:
    with Cluster(2) as cluster:
        cluster.create_topic("many", 4, replicas=2)
        cluster.create_topic("ordered", 4, ordered=True)
        metas = {
            name: lookup(cluster.lookupd[0], "/lookup", topic=name, metainfo="true")["meta"]
            for name in ("many", "ordered")
        }
    assert (metas["many"]["multi_part"], metas["many"]["ordered"], metas["many"]["replica"]) == (True, False, 2)
    assert (metas["ordered"]["multi_part"], metas["ordered"]["ordered"]) == (False, True)


def test_an_upgrade_shows_in_lookup() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t")
        cluster.upgrade_topic("t")
        assert lookup(cluster.lookupd[0], "/lookup", topic="t", metainfo="1")["meta"]["extend_support"] is True
        with pytest.raises(TopicNotFound):
            cluster.upgrade_topic("none")


def test_registered_channels_are_the_only_ones() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["known"], register_channels=True)
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.subscribe("t", "other").startswith(b"E_SUB_CHANNEL_NOT_REGISTERED")
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.subscribe("t", "known") == b"OK"


@table(
    ("make", "text"),
    [
        (lambda: Cluster(0), "nodes=0"),
        (lambda: Cluster(lookupds=99), "lookupds=99"),
        (lambda: Cluster(generation="new"), "generation='new'"),
        (lambda: Cluster(options={"lease": 1}), "options={'lease': 1} is not a ClusterOptions"),  # type: ignore[arg-type]
        (
            lambda: Cluster(2, options=ClusterOptions(nsqd_http=(":1", ":2", ":3"))),
            "nsqd_http has 3 addresses, and nod",
        ),
        (
            lambda: Cluster(2, options=ClusterOptions(lookupd_tcp=(":1", ":2"))),
            "lookupd_tcp has 2 addresses, and lo",
        ),
        (lambda: ClusterOptions(lease=-1), "lease=-1"),
        (lambda: ClusterOptions(memory_bound=0), "memory_bound=0 is not a positive number"),
        (lambda: ClusterOptions(node_memory_bound=0), "node_memory_bound=0 is not a positive number"),
        (lambda: ClusterOptions(nsqd_tcp=":4150"), "nsqd_tcp=':4150' is not a tuple of texts"),  # type: ignore[arg-type]
        (lambda: ClusterOptions(http_hosts=(4150,)), "http_hosts=(4150,) is not a tuple"),  # type: ignore[arg-type]
        (lambda: ClusterOptions(http_guard="no"), "http_guard='no'"),  # type: ignore[arg-type]
        (lambda: ClusterOptions(host=None), "host is a NoneType"),  # type: ignore[arg-type]
        (lambda: ClusterOptions(tls="cert.pem"), "tls='cert.pem' is not an ssl.SSLContext"),  # type: ignore[arg-type]
        (lambda: ClusterOptions(seed="7"), "seed='7' is not a whole number"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_setting_is_named(make: Callable[[], object], text: str) -> None:
    with pytest.raises(InvalidSetting, match=re.escape(text)):
        make()


def test_bad_arguments_are_named() -> None:
    with Cluster(1) as cluster:
        with pytest.raises(InvalidName):
            cluster.create_topic("bad!")
        with pytest.raises(InvalidName):
            cluster.create_topic("t", channels=["bad!"])
        with pytest.raises(InvalidSetting, match="list of names"):
            cluster.create_topic("t", channels="ch")
        for flag in ("extend", "ordered", "register_channels"):
            with pytest.raises(InvalidSetting, match=f"{flag}='no' is not True or False"):
                cluster.create_topic("t", **{flag: "no"})  # type: ignore[arg-type]
        with pytest.raises(InvalidSetting, match="dispatch='key_failover' has no effect without channels"):
            cluster.create_topic("t", dispatch="key_failover")
        with pytest.raises(InvalidSetting, match="timeout='1' is text"):
            cluster.wait_writable("t", timeout="1")  # type: ignore[arg-type]
        assert cluster.topics == {}
        with pytest.raises(InvalidInput, match=r"No node is available.*: check partitions and replicas"):
            cluster.create_topic("t", replicas=2)
        cluster.create_topic("t")
        with pytest.raises(InvalidInput, match=r"already exist.*: delete it first, or choose another name"):
            cluster.create_topic("t", 2)
        with pytest.raises(InvalidInput, match="unknown node 'n7'"):
            cluster.kill("n7")


def test_an_address_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        threads = set(threading.enumerate())
        with pytest.raises(InvalidSetting, match="cannot listen"):
            Cluster(1, options=ClusterOptions(lookupd_http=(address,))).start()
        assert set(threading.enumerate()) <= threads
    with pytest.raises(InvalidSetting, match="another server of this cluster has the address"):
        Cluster(2, options=ClusterOptions(nsqd_tcp=(address, address))).start()
    with pytest.raises(InvalidSetting, match="not an address"):
        Cluster(1, options=ClusterOptions(lookupd_http=("here",))).start()


def test_clients_receive_the_broadcast_host() -> None:
    with Cluster(1, options=ClusterOptions(host="0.0.0.0", broadcast_address="localhost")) as cluster:  # noqa: S104
        cluster.create_topic("t", channels=["ch"])
        address = cluster.lookupd[0]
        node = cluster.nodes["n1"]
        assert {shown.rpartition(":")[0] for shown in (address, node.tcp, node.http)} == {"localhost"}
        assert lookup(address, "/lookup", topic="t")["producers"][0]["broadcast_address"] == "localhost"
        assert lookup(node.http, "/info")["broadcast_address"] == "localhost"
        with BlockingClient(node.tcp) as talker:
            assert talker.ask("PUB t 0", b"x") == b"OK"


def test_it_is_used_from_several_threads() -> None:
    with Cluster(2) as cluster:
        names = [f"t{number}" for number in range(20)]
        threads = [threading.Thread(target=cluster.create_topic, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(lookup(cluster.lookupd[0], "/topics")["topics"]) == sorted(names)


def test_the_state_of_a_node_is_up_frozen_or_down() -> None:
    with Cluster(nodes=2) as cluster:
        assert (cluster.state("n1"), cluster.state("n2")) == ("up", "up")
        cluster.faults.freeze("n1")
        cluster.kill("n2")
        assert (cluster.state("n1"), cluster.state("n2")) == ("frozen", "down")
        cluster.faults.thaw("n1")
        cluster.restart("n2")
        assert (cluster.state("n1"), cluster.state("n2")) == ("up", "up")
        with pytest.raises(InvalidInput, match="unknown node"):
            cluster.state("n9")


@pytest.mark.parametrize("name", ["n1", "l1"])
def test_a_server_that_is_restarted_by_several_threads_runs_afterwards(name: str) -> None:
    with Cluster(1) as cluster, ThreadPoolExecutor(4) as threads:
        cluster.kill(name)
        list(threads.map(cluster.restart, [name] * 4))
        http = cluster.nodes["n1"].http if name == "n1" else cluster.lookupd[0]
        assert plain_http.get(f"http://{http}/ping").text == "OK"


def test_a_killed_node_restarts_with_its_messages() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        tcp = cluster.nodes["n1"].tcp
        with BlockingClient(tcp) as talker:
            assert talker.ask("PUB t 0", b"kept") == b"OK"
            cluster.kill("n1")
            with pytest.raises((EOFError, ConnectionError)):
                talker.ask("PUB t 0", b"late")
        with pytest.raises(OSError, match="refused"):
            BlockingClient(tcp)
        assert partitions(cluster.lookupd[0], "t", "r") == {}
        cluster.restart("n1")
        assert cluster.nodes["n1"].tcp == tcp
        with BlockingClient(tcp) as talker:
            assert talker.subscribe("t") == b"OK"
            assert talker.message()[1:] == (1, b"kept")


def test_the_death_of_a_leader_of_three() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        first = cluster.leader("t")
        with BlockingClient(cluster.nodes[first].tcp) as talker:
            assert talker.ask("PUB t 0", b"one") == b"OK"
            cluster.kill(first)
        second = cluster.wait_writable("t")
        assert (second != first, cluster.epoch("t"), first in cluster.in_sync("t")) == (True, 2, False)
        with BlockingClient(cluster.nodes[second].tcp) as talker, BlockingClient(cluster.nodes[second].tcp) as consumer:
            assert talker.ask("PUB t 0", b"two") == b"OK"
            assert consumer.subscribe("t") == b"OK"
            assert [consumer.message()[2] for _ in range(2)] == [b"one", b"two"]
        cluster.restart(first)
        eventually(lambda: len(cluster.in_sync("t")), lambda count: count == 3)
        with BlockingClient(cluster.nodes[first].tcp) as talker:
            assert talker.ask("PUB t 0", b"x") == b"E_FAILED_ON_NOT_LEADER "


def test_a_silent_leader_is_not_listed() -> None:
    with Cluster(3, options=ClusterOptions(lease=30)) as cluster:
        cluster.create_topic("t", replicas=3)
        cluster.kill(cluster.leader("t"))
        assert (partitions(cluster.lookupd[0], "t", "w"), partitions(cluster.lookupd[0], "t", "r")) == ({}, {})


def test_the_survivor_of_two_refuses_writes() -> None:
    with Cluster(2) as cluster:
        cluster.create_topic("t", replicas=2, channels=["ch"])
        first = cluster.leader("t")
        second = "n2" if first == "n1" else "n1"
        cluster.kill(first)
        eventually(lambda: cluster.leader("t"), lambda name: name == second)
        with BlockingClient(cluster.nodes[second].tcp) as talker:
            assert talker.ask("PUB t 0", b"x") == b"E_FAILED_ON_NOT_WRITABLE "
        with BlockingClient(cluster.nodes[second].tcp) as talker:
            assert talker.subscribe("t") == b"E_FAILED_ON_NOT_WRITABLE "
        assert partitions(cluster.lookupd[0], "t", "w") == {}
        assert partitions(cluster.lookupd[0], "t", "r") == {"0": port(cluster.nodes[second].tcp)}
        with pytest.raises(PartitionUnavailable, match=r"no writes accepted within 0\.01 s"):
            cluster.wait_writable("t", timeout=0.01)
        cluster.restart(first)
        assert cluster.wait_writable("t") == second


def test_a_lost_follower_of_two_makes_a_publish_hang() -> None:
    with Cluster(2, options=ClusterOptions(lease=0.3)) as cluster:
        cluster.create_topic("t", replicas=2, channels=["ch"])
        leader = cluster.leader("t")
        follower = "n2" if leader == "n1" else "n1"
        with BlockingClient(cluster.nodes[leader].tcp) as talker, BlockingClient(cluster.nodes[leader].tcp) as consumer:
            assert consumer.subscribe("t") == b"OK"
            begun = time.monotonic()
            cluster.kill(follower)
            assert talker.ask("PUB t 0", b"x") == b"E_FAILED_ON_NOT_LEADER "
            assert time.monotonic() - begun >= 0.29
            with pytest.raises((EOFError, ConnectionError)):
                consumer.frame()
            assert talker.ask("PUB t 0", b"x") == b"E_FAILED_ON_NOT_LEADER "
        assert partitions(cluster.lookupd[0], "t", "r") == {"0": port(cluster.nodes[leader].tcp)}
        assert partitions(cluster.lookupd[0], "t", "w") == {}
        cluster.restart(follower)
        assert cluster.wait_writable("t") == leader


def test_a_drained_leader_hands_over_at_once() -> None:
    with Cluster(3, options=ClusterOptions(lease=30)) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        first = cluster.leader("t")
        with BlockingClient(cluster.nodes[first].tcp) as talker, BlockingClient(cluster.nodes[first].tcp) as consumer:
            assert talker.ask("PUB t 0", b"x") == b"OK"
            assert consumer.subscribe("t") == b"OK"
            assert consumer.message()[2] == b"x"
            ending = threading.Thread(target=cluster.terminate, args=(first,))
            ending.start()
            with pytest.raises((EOFError, ConnectionError)):
                consumer.frame()
            assert cluster.wait_writable("t") != first
            assert talker.ask("PUB t 0", b"x") == b"E_PUB_FAILED exiting"
            with pytest.raises((EOFError, ConnectionError)):
                talker.frame()
            ending.join()
        cluster.restart(first)
        eventually(lambda: len(cluster.in_sync("t")), lambda count: count == 3)


def test_a_leader_is_moved_with_and_without_a_copy() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("single", channels=["ch"])
        cluster.create_topic("triple", replicas=3, channels=["ch"])
        for topic in ("single", "triple"):
            first = cluster.leader(topic)
            target = next(name for name in cluster.nodes if name != first)
            with BlockingClient(cluster.nodes[first].tcp) as talker:
                assert talker.ask(f"PUB {topic} 0", b"kept") == b"OK"
                cluster.move_leader(topic, 0, target)
                assert cluster.leader(topic) == target
                assert talker.ask(f"PUB {topic} 0", b"x").startswith(b"E_")
            with BlockingClient(cluster.nodes[target].tcp) as talker:
                assert talker.ask(f"PUB {topic} 0", b"more") == b"OK"
                assert talker.subscribe(topic) == b"OK"
                assert [talker.message()[2] for _ in range(2)] == [b"kept", b"more"]
            cluster.move_leader(topic, 0, target)


def test_several_lookup_nodes_have_one_leader() -> None:
    with Cluster(1, lookupds=3) as cluster:
        first, second, _ = cluster.lookupd
        cluster.create_topic("t", channels=["ch"])
        found = lookup(second, "/listlookup")
        assert len(found["lookupdnodes"]) == 3
        assert found["lookupdleader"]["HttpPort"] == first.rpartition(":")[2]
        refused = plain_http.post(f"http://{second}/topic/create?topic=u&partition_num=1&replicator=1")
        assert (refused.status_code, refused.text) == (400, '{"message":"E_FAILED_ON_NOT_LEADER"}')
        assert partitions(second, "t") == partitions(first, "t") != {}
        cluster.kill("l1")
        found = lookup(second, "/listlookup")
        assert (len(found["lookupdnodes"]), found["lookupdleader"]["Epoch"]) == (2, 1)
        assert found["lookupdleader"]["HttpPort"] == second.rpartition(":")[2]
        made = plain_http.post(f"http://{second}/topic/create?topic=u&partition_num=1&replicator=1")
        assert made.status_code == 200
        cluster.restart("l1")
        assert lookup(first, "/topics")["topics"] == ["t", "u"]
        assert lookup(first, "/listlookup")["lookupdleader"]["HttpPort"] == second.rpartition(":")[2]


def test_channels_have_the_dispatch_type_of_their_topic_if_it_is_valid() -> None:
    with Cluster(1) as cluster:
        with pytest.raises(InvalidInput, match="ordered topic"):
            cluster.create_topic("t", ordered=True, channels=["ch"], dispatch="key_failover")
        with pytest.raises(InvalidSetting, match="dispatch type nope"):
            cluster.create_topic("t", channels=["ch"], dispatch="nope")
        assert lookup(cluster.lookupd[0], "/topics") == {"topics": []}
        cluster.create_topic("keyed", channels=["ch"], dispatch="key_failover")
        url = f"http://{cluster.nodes['n1'].http}/stats?format=json&topic=keyed"
        assert '"key_failover"' in plain_http.get(url).text
        cluster.create_topic("t", channels=["ch"])
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.subscribe("t") == b"OK"
            with pytest.raises(InvalidInput, match="channel ch of topic t is dispatched by shared, not key_failover"):
                cluster.create_topic("t", channels=["ch"], dispatch="key_failover")


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_topics_have_partitions_and_replicas(generation: str) -> None:
    with Cluster(1, generation=generation) as cluster:
        for partitions, replicas in ((0, 1), (-1, 1), (255, 1), (1.5, 1), (1, 0)):
            with pytest.raises(InvalidInput, match=r"is not within 1\.\.254"):
                cluster.create_topic("t", partitions, replicas=replicas)  # type: ignore[arg-type]
        cluster.create_topic("t")
