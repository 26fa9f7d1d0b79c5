"""Fault injection into a cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx
import pytest

from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, TopicNotFound
from tests.support import plain_http
from tests.support.blocking_client import BlockingClient, eventually, lookup, partitions


def test_a_frozen_leader_is_replaced_and_returns_as_follower() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        first = cluster.leader("t")
        with BlockingClient(cluster.nodes[first].tcp) as talker:
            assert talker.ask("PUB t 0", b"one") == b"OK"
            cluster.faults.freeze(first)
            talker.send("PUB t 0", b"two")
            with pytest.raises(TimeoutError):
                talker.frame(timeout=0.1)
            second = cluster.wait_writable("t")
            assert second != first
            cluster.create_topic("new", 2)  # no partition of it waits for a node that does not answer
            assert first not in {cluster.leader("new", number) for number in range(2)}
            cluster.faults.thaw(first)
            assert talker.frame()[1] == b"E_FAILED_ON_NOT_LEADER "
        eventually(lambda: len(cluster.in_sync("t")), lambda count: count == 3)
        assert cluster.leader("t") == second


def test_a_follower_that_is_frozen_for_a_moment_only_delays() -> None:
    with Cluster(2, options=ClusterOptions(lease=20)) as cluster:
        cluster.create_topic("t", replicas=2)
        leader = cluster.leader("t")
        follower = "n2" if leader == "n1" else "n1"
        with BlockingClient(cluster.nodes[leader].tcp) as talker:
            cluster.faults.freeze(follower)
            talker.send("PUB t 0", b"one")
            with pytest.raises(TimeoutError):
                talker.frame(timeout=0.1)
            cluster.faults.thaw(follower)
            assert talker.frame()[1] == b"OK"
        assert cluster.in_sync("t") == [leader, follower]


def test_a_frozen_node_answers_no_http() -> None:
    with Cluster(1, options=ClusterOptions(lease=20)) as cluster:
        url = f"http://{cluster.nodes['n1'].http}/ping"
        cluster.faults.freeze("n1")
        with pytest.raises(httpx.ReadTimeout):
            plain_http.get(url, timeout=httpx.Timeout(10, read=0.1))
        cluster.faults.heal()
        assert plain_http.get(url).text == "OK"


def test_a_frozen_cluster_stops() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t")
        talker = BlockingClient(cluster.nodes["n1"].tcp)
        cluster.faults.freeze("n1")
        talker.send("PUB t 0", b"x")
    talker.socket.close()


def test_injected_answers() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            cluster.faults.answer("n1", "E_PUB_FAILED", "broken", times=2, command="PUB")
            assert talker.ask("SUB t ch 0") == b"OK"
            answers = [talker.ask("PUB t 0", b"x") for _ in range(3)]
            assert answers == [b"E_PUB_FAILED broken", b"E_PUB_FAILED broken", b"OK"]
            cluster.faults.answer("n1", "E_TOPIC_NOT_EXIST")
            assert talker.ask("PUB t 0", b"x") == b"E_TOPIC_NOT_EXIST "
            with pytest.raises(EOFError):
                talker.frame()


def test_an_injected_answer_closes_the_connection_as_given_or_as_the_real_server() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t")
        for code, closes, ends in (
            ("E_TOPIC_NOT_EXIST", False, False),
            ("E_PUB_FAILED", True, True),
            ("E_NEW", None, True),
            ("E_NEW", False, False),
        ):
            with BlockingClient(cluster.nodes["n1"].tcp) as talker:
                cluster.faults.answer("n1", code, closes=closes)
                assert talker.ask("PUB t 0", b"x") == f"{code} ".encode()
                if ends:
                    with pytest.raises((EOFError, ConnectionError)):
                        talker.frame()
                else:
                    assert talker.ask("PUB t 0", b"x") == b"OK"


def test_truncated_messages_are_lost_on_every_node() -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        with BlockingClient(cluster.nodes[cluster.leader("t")].tcp) as talker:
            assert [talker.ask("PUB t 0", b"%d" % number) for number in range(3)] == [b"OK"] * 3
        cluster.faults.truncate("t", 0, 1)
        for name in cluster.in_sync("t"):
            cluster.move_leader("t", 0, name)
            with BlockingClient(cluster.nodes[name].tcp) as consumer:
                assert consumer.subscribe("t") == b"OK"
                assert consumer.message()[2] == b"0"
                with pytest.raises(TimeoutError):
                    consumer.message(timeout=0.05)
        with pytest.raises(TopicNotFound, match="no running node has the partition"):
            cluster.faults.truncate("t", 1, 0)


def test_half_a_frame() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t")
        with BlockingClient(cluster.nodes["n1"].tcp) as talker, BlockingClient(cluster.nodes["n1"].tcp) as other:
            cluster.faults.cut("n1", peer=talker.peer)
            assert other.ask("PUB t 0", b"x") == b"OK"
            with pytest.raises(EOFError) as error:
                talker.ask("PUB t 0", b"x")
            assert error.value.args == (b"\0",)
            assert other.ask("PUB t 0", b"x") == b"OK"


def test_a_request_that_is_cut_on_its_way_in_is_not_run() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.ask("PUB t 0", b"one") == b"OK"
            cluster.faults.cut("n1", "in")
            with pytest.raises((EOFError, ConnectionError)):
                talker.ask("PUB t 0", b"x" * 100)
        with BlockingClient(cluster.nodes["n1"].tcp) as consumer:
            consumer.subscribe("t")
            assert consumer.message()[2] == b"one"
            with pytest.raises(TimeoutError):
                consumer.message(timeout=0.1)


def test_a_fault_replaces_the_last_fault_of_its_kind() -> None:
    with Cluster(2) as cluster:
        faults = cluster.faults
        for _ in range(3):
            faults.cut("n1", connections=2)
        faults.cut("n1", "in")
        faults.delay("n1", "out", 0.5, peer="127.0.0.1:1")
        faults.drop("n1", "out", size=9)
        faults.answer("n2", "E_FIN_FAILED", command="FIN")
        for times in (3, 1):
            faults.answer("n2", "E_PUB_FAILED", times=times, command="PUB")
        for code in ("E_INVALID", "E_BAD_TOPIC"):
            faults.answer("n2", code)
        faults.refuse("n2")
        assert faults.pending() == {
            "n1": [
                "cut out: 2 connections",
                "cut in: 1 connections",
                "delay out of 127.0.0.1:1: 0.5 s",
                "drop out: 9 bytes",
            ],
            "n2": [
                "refuse connections",
                "answer FIN with E_FIN_FAILED: 1 commands",
                "answer PUB with E_PUB_FAILED: 1 commands",
                "answer any command with E_BAD_TOPIC: 1 commands",
            ],
        }
        faults.heal()
        assert faults.pending() == {}


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_killed_servers_lookup_faults_and_a_stopped_clock_are_pending(generation: str) -> None:
    with Cluster(2, lookupds=4, generation=generation) as cluster:
        faults = cluster.faults
        cluster.kill("n1")
        cluster.kill("l1")
        faults.stale_lookup("l2")
        faults.empty_lookup("l3")
        faults.slow_lookup(2.5, "l3")
        faults.slow_lookup(0.5, "l4")
        faults.clock.stop()
        slow = "each response after {} s"
        assert faults.pending() == {
            "n1": ["down"],
            "l1": ["down"],
            "l2": ["stale"],
            "l3": ["empty", slow.format(2.5)],
            "l4": [slow.format(0.5)],
            "clock": ["stopped"],
        }
        faults.heal()
        faults.clock.run()
        assert faults.pending() == {"n1": ["down"], "l1": ["down"]}
        cluster.restart("n1")
        cluster.restart("l1")
        assert faults.pending() == {}


def test_swallowed_bytes() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t")
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            cluster.faults.drop("n1", "out")
            talker.send("PUB t 0", b"x")
            with pytest.raises(TimeoutError):
                talker.frame(timeout=0.1)
            cluster.faults.heal()
            assert talker.ask("PUB t 0", b"x") == b"OK"


def test_late_bytes() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t")
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            for direction in ("in", "out"):
                cluster.faults.delay("n1", direction, 0.1)
                begun = time.monotonic()
                assert talker.ask("PUB t 0", b"x") == b"OK"
                assert time.monotonic() - begun > 0.08
                cluster.faults.heal()


def test_refused_connections() -> None:
    with Cluster(1) as cluster:
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            cluster.faults.refuse("n1")
            with pytest.raises((EOFError, ConnectionError)), BlockingClient(cluster.nodes["n1"].tcp) as refused:
                refused.ask("PUB t 0", b"x")
            assert talker.ask("PUB t 0", b"x").startswith(b"E_TOPIC_NOT_EXIST")
        cluster.faults.refuse("n1", False)
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.ask("PUB t 0", b"x").startswith(b"E_TOPIC_NOT_EXIST")


@pytest.mark.parametrize("replicas", [1, 2])
def test_messages_of_a_busy_node_are_delivered_when_they_are_flushed(replicas: int) -> None:
    with Cluster(2) as cluster:
        cluster.create_topic("t", replicas=replicas, channels=["ch"])
        address = cluster.nodes["n1"]
        with BlockingClient(address.tcp) as talker, BlockingClient(address.tcp) as listener:
            listener.subscribe("t")
            cluster.faults.hold_flush("n1")
            assert cluster.faults.pending() == {"n1": ["flush held"]}
            for body in (b"one", b"two"):
                assert talker.ask("PUB t 0", body) == b"OK"
            with pytest.raises(TimeoutError):
                listener.message(timeout=0.1)
            (topic,) = plain_http.get(f"http://{address.http}/stats?format=json").json()["data"]["topics"]
            (channel,) = topic["channels"]
            assert [topic["message_count"], channel["message_count"], channel["depth"]] == [2, 0, 0]
            cluster.faults.hold_flush("n1", False)
            assert [listener.message()[2] for _ in range(2)] == [b"one", b"two"]
            cluster.faults.hold_flush("n1")
            talker.ask("PUB t 0", b"six")
            cluster.faults.heal()
            assert (listener.message()[2], cluster.faults.pending()) == (b"six", {})


@pytest.mark.parametrize("change", ["move", "kill", "restart"])
def test_messages_that_were_not_flushed_are_delivered_by_the_next_leader(change: str) -> None:
    with Cluster(1 if change == "restart" else 3) as cluster:
        cluster.create_topic("t", replicas=len(cluster.nodes), channels=["ch"])
        leader = cluster.leader("t")
        cluster.faults.hold_flush(leader)
        with BlockingClient(cluster.nodes[leader].tcp) as talker:
            assert talker.ask("PUB t 0", b"stored") == b"OK"
        if change == "move":
            cluster.move_leader("t", 0, "n2" if leader == "n1" else "n1")
        else:
            cluster.kill(leader)
        if change == "restart":
            cluster.restart(leader)
            assert cluster.faults.pending() == {}
        with BlockingClient(cluster.nodes[cluster.wait_writable("t")].tcp) as listener:
            listener.subscribe("t")
            assert listener.message()[2] == b"stored"


def test_the_original_nsq_holds_no_flush() -> None:
    """A topic without channels keeps its messages for the first one, also after the end of all faults."""
    with Cluster(1, generation="original") as cluster:
        with pytest.raises(InvalidState):
            cluster.faults.hold_flush("n1")
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.ask("PUB t", b"stored") == b"OK"
            cluster.faults.heal()
            talker.subscribe("t")
            assert talker.message()[2] == b"stored"


def test_lookup_that_is_stale_empty_or_slow() -> None:
    with Cluster(3, lookupds=2) as cluster:
        first, second = cluster.lookupd
        cluster.create_topic("t", channels=["ch"])
        before = partitions(first, "t")
        cluster.faults.stale_lookup("l2")
        target = next(name for name in cluster.nodes if name != cluster.leader("t"))
        cluster.move_leader("t", 0, target)
        assert partitions(second, "t") == before
        assert partitions(first, "t") != before
        cluster.faults.empty_lookup("l2")
        assert (partitions(second, "t", "r"), lookup(second, "/nodes")["producers"]) == ({}, [])
        cluster.faults.stale_lookup("l2")
        assert partitions(second, "t") == partitions(first, "t"), "it repeats the present state"
        cluster.faults.empty_lookup("l2")
        cluster.faults.slow_lookup(0.1)
        begun = time.monotonic()
        assert partitions(first, "t") != before
        assert lookup(first, "/cluster/stats")["stable"]
        assert time.monotonic() - begun > 0.18
        cluster.faults.heal_lookup("l2")
        assert partitions(second, "t") == partitions(first, "t")


def test_a_test_moves_the_clock() -> None:
    with Cluster(1) as cluster:
        cluster.create_topic("t", channels=["ch"])
        cluster.faults.clock.stop()
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.ask("PUB t 0", b"x") == b"OK"
            assert talker.subscribe("t") == b"OK"
            assert talker.message()[1] == 1
            for _ in range(4):
                cluster.faults.clock.advance(20)
                talker.send("NOP")
            assert talker.message()[1] == 2
        cluster.faults.clock.run()


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_a_frozen_node_that_is_restarted_is_not_frozen(end: str) -> None:
    with Cluster(3) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        cluster.faults.freeze("n1")
        getattr(cluster, end)("n1")
        with pytest.raises(InvalidState, match="'n1' is down, and cannot be frozen: restart it first"):
            cluster.faults.freeze("n1")  # there is no process to stop: it ran when it was restarted
        assert cluster.state("n1") == "down"
        cluster.restart("n1")
        eventually(lambda: sorted(cluster.in_sync("t")), lambda names: names == ["n1", "n2", "n3"])
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            talker.send("NOP")
            assert talker.ask("PUB x 0", b"one").startswith(b"E_TOPIC_NOT_EXIST")


def test_invalid_faults() -> None:
    with Cluster(1) as cluster:
        with pytest.raises(InvalidInput, match="unknown node 'n2'"):
            cluster.faults.freeze("n2")
        with pytest.raises(InvalidInput, match="is a lookup node"):
            cluster.faults.freeze("l1")
        with pytest.raises(InvalidInput, match="not a lookup node"):
            cluster.faults.empty_lookup("n1")
        with pytest.raises(InvalidSetting, match="direction"):
            cluster.faults.drop("n1", "up")  # type: ignore[arg-type]
        faults = cluster.faults
        without_effect: list[tuple[str, Callable[[], None]]] = [
            ("connections=0", lambda: faults.cut("n1", connections=0)),
            ("size=0", lambda: faults.drop("n1", "in", size=0)),
            ("size='9'", lambda: faults.drop("n1", "in", size="9")),  # type: ignore[arg-type]
            ("seconds=-1", lambda: faults.delay("n1", "in", -1)),
            ("seconds=nan", lambda: faults.delay("n1", "out", float("nan"))),
            ("seconds=nan", lambda: faults.slow_lookup(float("nan"))),
            ("times=0", lambda: faults.answer("n1", "E_BAD_TOPIC", times=0)),
            ("code='PUB_FAILED'", lambda: faults.answer("n1", "PUB_FAILED")),
            ("command='pub'", lambda: faults.answer("n1", "E_PUB_FAILED", command="pub")),
            ("closes='no'", lambda: faults.answer("n1", "E_PUB_FAILED", closes="no")),  # type: ignore[arg-type]
            ("refusing='no'", lambda: faults.refuse("n1", "no")),  # type: ignore[arg-type]
            ("holding=1", lambda: faults.hold_flush("n1", 1)),  # type: ignore[arg-type]
            ("peer='127.0.0.1'", lambda: faults.drop("n1", "in", peer="127.0.0.1")),
            ("peer='n2'", lambda: faults.cut("n1", peer="n2")),
            ("command='DPUB'", lambda: faults.answer("n1", "E_PUB_FAILED", command="DPUB")),
            ("count=-1", lambda: faults.truncate("t", 0, -1)),
        ]
        for text, fault in without_effect:
            with pytest.raises(InvalidSetting, match=re.escape(text)):
                fault()
        assert faults.pending() == {}
        for seconds in (-1, float("nan"), float("inf"), "5", True):
            with pytest.raises(InvalidInput, match="cannot advance the clock by"):
                cluster.faults.clock.advance(seconds)  # type: ignore[arg-type]
