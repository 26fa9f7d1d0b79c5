"""What nodes of a cluster take over from its options, and what a restart, a fault or the clock does to them."""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nsqext.broker import Cluster, ClusterOptions
from nsqext.broker.cluster_fault_injection import coordinated
from nsqext.broker.listeners import ListenError
from nsqext.broker.runtime import Clock, Runtime
from tests.support import plain_http
from tests.support.blocking_client import BlockingClient, eventually


def _channel(http: str, topic: str = "t") -> dict[str, Any]:
    stats = plain_http.get(f"http://{http}/stats", params={"format": "json", "topic": topic}).json()
    found: dict[str, Any] = stats.get("data", stats)["topics"][0]["channels"][0]
    return found


def _advance_machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the machine's clock of the module by a clock whose ``now`` a test sets."""
    machine = SimpleNamespace(now=100.0)
    machine.monotonic = lambda: machine.now
    machine.time_ns = lambda: round(machine.now * 1e9)
    monkeypatch.setattr("nsqext.broker.runtime.time", machine)
    return machine


def test_a_stopped_clock_runs_again_from_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = _advance_machine(monkeypatch)
    clock = Clock()
    clock.stop()
    machine.now += 50
    clock.stop()  # no effect
    assert (clock.now(), clock.wall()) == (100, 100_000_000_000)
    clock.run()
    assert (clock.now(), clock.wall()) == (100, 100_000_000_000)
    machine.now += 1
    clock.advance(5)
    assert (clock.now(), clock.wall()) == (106, 106_000_000_000)


def test_messages_have_the_time_of_the_clusters_clock() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        cluster.faults.clock.advance(3600)
        with BlockingClient(cluster.nodes["n1"].tcp) as client:
            assert client.subscribe("t") == b"OK"
            client.send("PUB t 0", b"x")
            frames = dict([client.frame(), client.frame()])
        (timestamp,) = struct.unpack_from(">q", frames[2])
        assert timestamp > time.time_ns() + 3590 * 10**9


def test_what_the_clock_causes_is_sent_when_advance_returns() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        cluster.faults.clock.stop()
        with BlockingClient(cluster.nodes["n1"].tcp) as client:
            assert client.subscribe("t") == b"OK"
            cluster.faults.clock.advance(31)
            client.socket.setblocking(False)
            assert client.socket.recv(100)[8:] == b"_heartbeat_"
        cluster.faults.clock.run()


def test_a_terminated_node_accepts_publishes_when_it_runs_again() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        cluster.terminate("n1")
        cluster.restart("n1")
        with BlockingClient(cluster.nodes["n1"].tcp) as client:
            assert client.ask("PUB t 0", b"x") == b"OK"


def test_a_restarted_node_counts_from_0() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        http = cluster.nodes["n1"].http
        with BlockingClient(cluster.nodes["n1"].tcp) as client:
            assert client.ask("PUB t 0", b"x") == b"OK"
            assert client.subscribe("t") == b"OK"
            number, _, _ = client.message()
            client.socket.sendall(b"REQ " + number + b" 0\n")
            client.message()
        assert _channel(http)["requeue_count"] >= 1
        cluster.kill("n1")
        cluster.restart("n1")
        assert _channel(http)["requeue_count"] == 0


def test_the_bound_of_a_nodes_memory_refuses_publishes() -> None:
    with Cluster(1, options=ClusterOptions(node_memory_bound=5000)) as cluster:
        cluster.create_topic("t", channels=["ch"])
        with BlockingClient(cluster.nodes["n1"].tcp) as client:
            answers = [client.ask("PUB t 0", b"x" * 2000) for _ in range(5)]
        assert answers[0] == b"OK"
        assert answers[-1].startswith(b"E_PUB_FAILED the node holds ")


def _redelivered(seed: int) -> list[bytes]:
    with Cluster(1, options=ClusterOptions(seed=seed)) as cluster:
        cluster.create_topic("t", channels=["ch"])
        address = cluster.nodes["n1"].tcp
        with BlockingClient(address) as client:
            for number in range(12):
                assert client.ask("PUB t 0", b"%d" % number) == b"OK"
        with BlockingClient(address) as client:
            assert client.subscribe("t", ready=12) == b"OK"
            for _ in range(12):
                client.message()
        eventually(lambda: _channel(cluster.nodes["n1"].http)["client_num"], lambda count: count == 0)
        with BlockingClient(address) as client:
            assert client.subscribe("t", ready=12) == b"OK"
            return [client.message()[2] for _ in range(12)]


def test_the_seed_repeats_the_order_of_redeliveries() -> None:
    assert _redelivered(7) == _redelivered(7) != _redelivered(8)


@pytest.mark.parametrize("guard", [True, False])
def test_the_guard_of_nodes_and_lookup_nodes_can_be_switched_off(guard: bool) -> None:
    options = ClusterOptions(http_guard=guard, broadcast_address="broker.test", http_hosts=("other.test",))
    with Cluster(1, options=options) as cluster:
        for port in (address.rpartition(":")[2] for address in (cluster.lookupd[0], cluster.nodes["n1"].http)):
            hosts = {"evil.test": 403 if guard else 200, "other.test": 200, "broker.test": 200, "localhost": 200}
            for host, status in hosts.items():
                assert plain_http.get(f"http://127.0.0.1:{port}/ping", headers={"Host": host}).status_code == status


def test_all_servers_listen_on_the_host_of_the_options() -> None:
    with Cluster(1, options=ClusterOptions(host="localhost")) as cluster:
        shown = [cluster.lookupd[0], cluster.nodes["n1"].tcp, cluster.nodes["n1"].http]
        assert [address.rpartition(":")[0] for address in shown] == ["localhost"] * 3


def test_a_frozen_node_that_is_killed_is_only_down() -> None:
    with Cluster(1) as cluster:
        cluster.faults.freeze("n1")
        cluster.kill("n1")
        assert cluster.faults.pending() == {"n1": ["down"]}


def test_heal_takes_a_frozen_node_back() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3)
        first = cluster.leader("t")
        cluster.faults.freeze(first)
        eventually(lambda: cluster.leader("t"), lambda name: name != first)
        cluster.faults.heal()
        assert cluster.faults.pending() == {}
        eventually(lambda: sorted(cluster.in_sync("t")), lambda names: names == ["n1", "n2", "n3"])


def test_an_isolated_node_that_is_restarted_is_reached_again() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3)
        follower = cluster.in_sync("t")[1]
        cluster._run(lambda runtime: coordinated(runtime).isolate(follower))
        eventually(lambda: cluster.in_sync("t"), lambda names: follower not in names)
        cluster.restart(follower)
        eventually(lambda: sorted(cluster.in_sync("t")), lambda names: names == ["n1", "n2", "n3"])


@pytest.mark.parametrize("ended", ["thaw", "rejoin"])
def test_a_node_that_is_isolated_and_frozen_returns_when_both_have_ended(ended: str) -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3)
        follower = cluster.in_sync("t")[1]
        last = {"thaw": "rejoin", "rejoin": "thaw"}[ended]

        def apply(runtime: Runtime, fault: str) -> None:
            getattr(runtime, fault)(follower)

        for fault in ("isolate", "freeze", ended):
            cluster._run(partial(apply, fault=fault))
        eventually(lambda: cluster.in_sync("t"), lambda names: follower not in names)
        cluster._run(partial(apply, fault=last))
        eventually(lambda: sorted(cluster.in_sync("t")), lambda names: names == ["n1", "n2", "n3"])


def test_auth_servers_demand_authentication() -> None:
    with Cluster(1, options=ClusterOptions(auth_addresses=("127.0.0.1:1",))) as cluster:
        cluster.create_topic("t")
        with BlockingClient(cluster.nodes["n1"].tcp) as client:
            assert client.ask("PUB t 0", b"x").startswith(b"E_AUTH_FIRST")


def _waits_for_writes(runtime: Runtime) -> bool:
    return bool(coordinated(runtime).replicas("t", 0).changes._waiting)


@pytest.mark.parametrize(
    ("end", "result"),
    [
        (lambda cluster: cluster.restart(cluster.leader("t")), "None"),
        (lambda cluster: cluster.delete_topic("t"), "the topic was deleted while it was created (topic t)"),
        (Cluster.stop, "the cluster is not running: use it inside `with Cluster() as cluster:`"),
    ],
)
def test_a_topic_that_exists_accepts_publishes_when_it_is_created_again(
    end: Callable[[Cluster], None], result: str
) -> None:
    with ThreadPoolExecutor(1) as threads, Cluster(2) as cluster:
        cluster.create_topic("t")
        cluster.kill(cluster.leader("t"))
        created = threads.submit(cluster.create_topic, "t")
        eventually(lambda: cluster._run(_waits_for_writes))
        assert not created.done()
        end(cluster)
        assert str(created.exception(25)) == result


def test_an_error_of_the_end_is_raised_by_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("nsqext.broker.runtimes.RuntimeRedesigned._end", fail)
    cluster = Cluster(1).start()
    with pytest.raises(BaseExceptionGroup) as caught:
        cluster.stop()
    assert caught.group_contains(RuntimeError, match="broken")
    assert "not running" in repr(cluster)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reserves the port of a socket that does not listen")
def test_the_port_of_a_node_that_is_down_stays_reserved() -> None:
    with Cluster(1) as cluster:
        host, _, port = cluster.nodes["n1"].tcp.rpartition(":")
        cluster.kill("n1")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.create_server((host, int(port))), pytest.raises(ListenError):  # with SO_REUSEADDR it can
            cluster.restart("n1")
        assert cluster.state("n1") == "down"
        cluster.restart("n1")
        assert cluster.state("n1") == "up"


def test_a_failed_write_of_the_topics_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.broker.coordinator.state_file._RETRY", 0.01)
    with Cluster(1, data_path=tmp_path) as cluster:
        with monkeypatch.context() as patch:
            patch.setattr("nsqext.broker.coordinator.state_file.write_atomically", _full)
            cluster.create_topic("orders")
        eventually(lambda: b"orders" in (tmp_path / "cluster.json").read_bytes())


def _full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")
