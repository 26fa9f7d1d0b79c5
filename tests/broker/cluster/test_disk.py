"""A cluster with a data path: stopped, killed, and started again."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from pathlib import Path

import orjson
import pytest

from nsqext.broker import Cluster
from nsqext.errors import InvalidSetting
from tests.support.blocking_client import BlockingClient, eventually, lookup, partitions
from tests.support.command_line import started


def publish(cluster: Cluster, topic: str, *bodies: bytes) -> None:
    with BlockingClient(cluster.nodes[cluster.leader(topic)].tcp) as talker:
        for body in bodies:
            assert talker.ask(f"PUB {topic} 0", body) == b"OK"


def consume(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    with BlockingClient(cluster.nodes[cluster.leader(topic)].tcp) as talker:
        assert talker.subscribe(topic) == b"OK"
        found = []
        for _ in range(count):
            message_id, _, body = talker.message()
            talker.finish(message_id)
            found.append(body)
        talker.send("CLS")
        # closing with unread messages would reset the connection, and the server would lose the last commands
        while talker.frame()[1] != b"CLOSE_WAIT":
            pass
        return found


def test_everything_is_restored_after_a_restart(tmp_path: Path) -> None:
    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.create_topic("t", replicas=2, extend=True, channels=["ch"])
        cluster.create_topic("gone")
        cluster.delete_topic("gone")
        publish(cluster, "t", b"one", b"two", b"three")
        leader, epoch = cluster.leader("t"), cluster.epoch("t")
    with Cluster(3, data_path=tmp_path) as cluster:
        assert (cluster.leader("t"), cluster.epoch("t") > epoch) == (leader, True)
        found = lookup(cluster.lookupd[0], "/lookup", topic="t", access="w", metainfo="true")
        assert (found["meta"]["extend_support"], found["meta"]["replica"], list(found["partitions"])) == (
            True,
            2,
            ["0"],
        )
        assert lookup(cluster.lookupd[0], "/topics") == {"topics": ["t"]}
        assert cluster.topics == {"t": ["ch"]}
        with BlockingClient(cluster.nodes[leader].tcp) as talker:
            talker.send("IDENTIFY", orjson.dumps({"extend_support": True}))
            assert talker.frame()[1] == b"OK"
            assert talker.subscribe("t") == b"OK"
            assert [talker.message()[2][1:] for _ in range(3)] == [b"one", b"two", b"three"]


def test_finished_messages_stay_finished(tmp_path: Path) -> None:
    with Cluster(1, data_path=tmp_path) as cluster:
        cluster.create_topic("t", channels=["ch"])
        publish(cluster, "t", b"one", b"two", b"three")
        assert consume(cluster, "t", 2) == [b"one", b"two"]
    with Cluster(1, data_path=tmp_path) as cluster:
        assert consume(cluster, "t", 1) == [b"three"]


def test_a_deleted_topic_is_empty_when_created_again(tmp_path: Path) -> None:
    for _ in range(2):
        with Cluster(1, data_path=tmp_path) as cluster:
            cluster.create_topic("t", channels=["ch"])
            publish(cluster, "t", b"old")
            cluster.delete_topic("t")
            cluster.create_topic("t", channels=["ch"])
            publish(cluster, "t", b"new")
            assert consume(cluster, "t", 1) == [b"new"]


def test_a_follower_keeps_unread_messages_of_channels(tmp_path: Path) -> None:
    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        publish(cluster, "t", *(b"%d" % number for number in range(50)))
        assert len(consume(cluster, "t", 20)) == 20
        first = cluster.leader("t")
        followers = [name for name in cluster.nodes if name != first]
        eventually(lambda: [_finished(tmp_path / name) for name in followers], lambda counts: counts == [20, 20])
        cluster.kill(first)
        eventually(lambda: cluster.leader("t"), lambda name: name != first)
        cluster.wait_writable("t")
        assert consume(cluster, "t", 30) == [b"%d" % number for number in range(20, 50)]


def _finished(node: Path) -> int:
    """Return the position of the channel on a node's disk."""
    kept = orjson.loads((node / "t" / "t-0.channels.json").read_bytes())["content"]
    return sum(channel["count"] for channel in kept["channels"])


def test_the_original_generation_finds_its_topics(tmp_path: Path) -> None:
    with (
        Cluster(1, generation="original", data_path=tmp_path) as cluster,
        BlockingClient(cluster.nodes["n1"].tcp) as talker,
    ):
        assert talker.ask("PUB t", b"kept") == b"OK"
    with Cluster(1, generation="original", data_path=tmp_path) as cluster:
        assert lookup(cluster.lookupd[0], "/topics") == {"topics": ["t"]}
        assert cluster.topics == {"t": []}
        with BlockingClient(cluster.nodes["n1"].tcp) as talker:
            assert talker.ask("SUB t ch") == b"OK"
            talker.send("RDY 1")
            assert talker.message()[2] == b"kept"


def test_an_original_cluster_that_lacks_a_node_with_topics_is_an_error(tmp_path: Path) -> None:
    with (
        Cluster(3, generation="original", data_path=tmp_path) as cluster,
        BlockingClient(cluster.nodes["n3"].tcp) as talker,
    ):
        assert talker.ask("PUB t", b"kept") == b"OK"
    for nodes in (1, 2):
        with pytest.raises(InvalidSetting, match="has topics of the nodes n3, which this cluster does not have"):
            Cluster(nodes, generation="original", data_path=tmp_path).start()
    with Cluster(4, generation="original", data_path=tmp_path) as cluster:
        assert lookup(cluster.lookupd[0], "/topics") == {"topics": ["t"]}


def test_an_original_cluster_may_lack_a_node_without_topics(tmp_path: Path) -> None:
    with Cluster(2, generation="original", data_path=tmp_path) as cluster:
        cluster.create_topic("t")
        cluster.delete_topic("t")
    assert (tmp_path / "n2").is_dir()
    with Cluster(1, generation="original", data_path=tmp_path) as cluster:
        assert cluster.topics == {}


def test_a_cluster_of_the_other_generation_leaves_the_messages_alone(tmp_path: Path) -> None:
    """It took the logs of two nodes for copies of each other: messages were lost, and others doubled."""
    with Cluster(2, generation="original", data_path=tmp_path / "original") as cluster:
        for node in cluster.nodes.values():
            with BlockingClient(node.tcp) as talker:
                assert talker.ask("PUB t", b"kept") == b"OK"
    with Cluster(1, data_path=tmp_path / "redesigned") as cluster:
        cluster.create_topic("t")
    kept = {path: path.read_bytes() for path in tmp_path.rglob("t-0.*")}
    assert len(kept) >= 6
    for own, other in (("original", "redesigned"), ("redesigned", "original")):
        with pytest.raises(InvalidSetting, match=f"a cluster of the {own} generation: give generation='{own}'"):
            Cluster(2, generation=other, data_path=tmp_path / own).start()
    assert {path: path.read_bytes() for path in tmp_path.rglob("t-0.*")} == kept
    with Cluster(2, generation="original", data_path=tmp_path / "original") as cluster:
        for node in cluster.nodes.values():
            with BlockingClient(node.tcp) as talker:
                assert talker.ask("SUB t ch") == b"OK"
                talker.send("RDY 1")
                assert talker.message()[2] == b"kept"


def test_a_cluster_that_is_too_small_is_an_error(tmp_path: Path) -> None:
    with Cluster(3, data_path=tmp_path) as cluster:
        for number in range(3):
            cluster.create_topic(f"t{number}")
    with pytest.raises(InvalidSetting, match="no node of this cluster has all messages"):
        Cluster(1, data_path=tmp_path).start()
    with Cluster(3, data_path=tmp_path) as cluster:
        assert len(partitions(cluster.lookupd[0], "t1", "r")) == 1


@pytest.mark.parametrize("damage", ["missing", "{}", "[]", '{"topics": {"t": 1}}', "\x00\x80 no JSON", ""])
def test_topics_are_rebuilt_from_the_nodes_when_the_state_file_is_missing_or_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.create_topic("t", partitions=2, replicas=2, extend=True, channels=["ch"])
        cluster.create_topic("o", partitions=2, ordered=True, channels=["ch"])
        cluster.create_topic("c", replicas=3, channels=["ch"])
        publish(cluster, "c", b"one", b"two", b"three")
        assert consume(cluster, "c", 1) == [b"one"]
    file = tmp_path / "cluster.json"
    if damage == "missing":
        file.unlink()
    else:
        file.write_text(damage)
    with Cluster(3, data_path=tmp_path) as cluster:
        meta = {name: lookup(cluster.lookupd[0], "/lookup", topic=name, metainfo="true")["meta"] for name in "to"}
        shape = ("partition_num", "replica", "extend_support", "ordered", "multi_part")
        assert [meta["t"][key] for key in shape] == [2, 2, True, False, True]
        assert [meta["o"][key] for key in shape] == [2, 1, False, True, False]
        assert sorted(cluster.in_sync("c")) == ["n1", "n2", "n3"]
        assert consume(cluster, "c", 2) == [b"two", b"three"]
    assert "rebuilt 3 topics with 5 partitions from the files of the nodes" in caplog.text
    aside = tmp_path / "cluster.json.damaged"
    assert aside.exists() == (damage != "missing")
    assert aside.name in caplog.text or damage == "missing"
    caplog.clear()
    with Cluster(3, data_path=tmp_path) as cluster:  # rebuilt files were written
        assert lookup(cluster.lookupd[0], "/topics")["topics"] == ["c", "o", "t"]
    assert caplog.text == ""


def test_any_damaged_file_of_a_cluster_is_survived(tmp_path: Path) -> None:
    """A bit flips in each file of a data path, one at a time."""
    with Cluster(1, data_path=tmp_path) as cluster:
        cluster.create_topic("t", channels=["ch"])
        publish(cluster, "t", b"old")
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size)
    assert {"cluster.json", "t-0.channels.json", "t-0.diskqueue.000000.dat"} <= {path.name for path in files}
    for number, file in enumerate(files):
        data = bytearray(file.read_bytes())
        data[len(data) * number // len(files)] ^= 1 << number % 8
        file.write_bytes(data)
        with Cluster(1, data_path=tmp_path) as cluster:
            publish(cluster, "t", b"new")
            while consume(cluster, "t", 1) != [b"new"]:
                pass


def test_a_damaged_state_file_of_an_empty_cluster_is_kept_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, kept in ((1, "cluster.json.damaged"), (2, "cluster.json.damaged.2")):
        (tmp_path / "cluster.json").write_text("{}")
        with Cluster(1, data_path=tmp_path) as cluster:
            cluster.create_topic(f"t{number}")
            cluster.delete_topic(f"t{number}")
        assert f"cluster.json is damaged (the checksum is wrong); it is kept as {tmp_path}" in caplog.text
        assert (tmp_path / kept).read_text() == "{}"
    assert "rebuilt" not in caplog.text


def test_a_rebuilt_cluster_names_the_partitions_without_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cluster(2, data_path=tmp_path) as cluster:
        cluster.create_topic("t", partitions=2, channels=["ch"])
        lost = cluster.leader("t", 0)
    shutil.rmtree(tmp_path / lost)
    (tmp_path / "cluster.json").unlink()
    with Cluster(2, data_path=tmp_path) as cluster:
        assert cluster.leader("t", 1) != lost
    assert "topic t: no node has files of partitions 0" in caplog.text


@pytest.mark.parametrize("damaged", [0, 1])
def test_an_intact_replica_replaces_the_messages_that_a_damaged_one_lost(tmp_path: Path, damaged: int) -> None:
    sent = [b"%d" % number for number in range(10)]
    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        publish(cluster, "t", *sent)
        assert consume(cluster, "t", 2) == sent[:2]
        name = cluster.in_sync("t")[damaged]
    file = tmp_path / name / "t" / "t-0.diskqueue.000000.dat"
    data = bytearray(file.read_bytes())
    data[5 * 31 : 5 * 31 + 4] = b"\xff" * 4
    file.write_bytes(data)
    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.wait_writable("t")
        assert cluster.leader("t") != name
        assert consume(cluster, "t", 8) == sent[2:]
    with Cluster(3, data_path=tmp_path) as cluster:
        assert sorted(cluster.in_sync("t")) == ["n1", "n2", "n3"]
    assert sum(path.stat().st_size for path in file.parent.glob("*.dat")) == len(data)
    assert file.with_name(file.name + ".damaged").read_bytes() == bytes(data)


@pytest.mark.parametrize("away", [1, 2])
def test_copies_that_were_not_in_sync_catch_up_after_a_restart(tmp_path: Path, away: int) -> None:
    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        leader = cluster.leader("t")
        publish(cluster, "t", b"one")
        for name in [name for name in cluster.nodes if name != leader][:away]:
            cluster.kill(name)
        eventually(lambda: len(cluster.in_sync("t")), lambda count: count == 3 - away)
        if away == 1:
            publish(cluster, "t", b"two")
    with Cluster(3, data_path=tmp_path) as cluster:
        assert cluster.wait_writable("t") == leader
        eventually(lambda: sorted(cluster.in_sync("t")), lambda names: names == ["n1", "n2", "n3"])
        publish(cluster, "t", b"three")
        left = [b"one", b"two", b"three"] if away == 1 else [b"one", b"three"]
        assert consume(cluster, "t", len(left)) == left


def test_two_clusters_do_not_share_a_path(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with Cluster(1, data_path=path) as cluster:
        with pytest.raises(InvalidSetting, match="possibly in use"):
            Cluster(1, data_path=path).start()
        cluster.create_topic("t", channels=["ch"])
        publish(cluster, "t", b"one")
    with Cluster(1, data_path=path) as cluster:
        assert consume(cluster, "t", 1) == [b"one"]


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_a_path_that_cannot_be_used_is_named(tmp_path: Path, generation: str) -> None:
    path = tmp_path / "data"
    path.write_text("no folder")
    with pytest.raises(InvalidSetting, match="data"):
        Cluster(1, generation=generation, data_path=path).start()


def test_a_full_disk_refuses_publishes_and_the_cluster_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Cluster(3, data_path=tmp_path) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        leader = tmp_path / cluster.leader("t")
        with BlockingClient(cluster.nodes[leader.name].tcp) as talker:
            assert talker.ask("PUB t 0", b"one") == b"OK"
            write = os.write
            with monkeypatch.context() as patch:
                works = {path.stat().st_ino for path in leader.rglob("*.dat")}
                patch.setattr(
                    "nsqext.broker.engine.storage.segments.os.write",
                    lambda out, data: write(out, data) if os.fstat(out).st_ino in works else refuse(),
                )
                assert talker.ask("PUB t 0", b"two").startswith(b"E_PUB_FAILED /")
                batch = b"\0\0\0\1" + b"\0\0\0\5three"
                assert talker.ask("MPUB t 0", batch).startswith(b"E_MPUB_FAILED /")
                patch.setattr(Path, "write_bytes", refuse)
                cluster.create_topic("u", channels=["ch"])
            assert talker.ask("PUB t 0", b"four") == b"OK"
        assert consume(cluster, "t", 4) == [b"one", b"two", b"three", b"four"]
        kept = tmp_path / "cluster.json"
        eventually(lambda: "u" in orjson.loads(kept.read_bytes())["content"]["topics"])


class Broker:
    """`nsqext broker` in a process of its own."""

    def __init__(self, path: Path) -> None:
        self.process = started("broker", "--data-path", str(path), "--topic", "t:replicas=3,channel=ch")
        assert self.process.stdout is not None
        self.lookupd = ""
        while (line := self.process.stdout.readline().decode()) != "ready\n":
            assert line, "the broker ended"
            if line.startswith("nsqlookupd"):
                self.lookupd = line.split()[-1]

    @property
    def leader(self) -> str:
        """Node that leads the partition."""
        return f"127.0.0.1:{eventually(lambda: partitions(self.lookupd, 't'))['0']}"

    def kill(self) -> None:
        """Kill the process."""
        with self.process:  # leaving it kills the process
            pass


def _publish_until_it_breaks(address: str, first: int, acknowledged: list[bytes]) -> None:
    with BlockingClient(address) as talker:
        for number in range(first, first + 1_000_000):
            body = b"%d" % number
            try:
                if talker.ask("PUB t 0", body) == b"OK":
                    acknowledged.append(body)
            except (OSError, EOFError):
                return


@pytest.mark.timeout(120)
def test_nothing_acknowledged_is_missing_after_kills(tmp_path: Path) -> None:
    rng = random.Random(7)
    acknowledged: list[bytes] = []
    for turn in range(int(os.environ.get("NSQEXT_KILLS", "2"))):
        broker = Broker(tmp_path)
        try:
            first = turn * 1_000_000
            publisher = threading.Thread(target=_publish_until_it_breaks, args=(broker.leader, first, acknowledged))
            publisher.start()
            enough = len(acknowledged) + 40
            eventually(lambda: len(acknowledged) > enough)  # noqa: B023 - it ends before the next round of the loop
            time.sleep(rng.uniform(0.0, 0.4))
        finally:
            broker.kill()
        publisher.join(60)
    broker = Broker(tmp_path)
    try:
        seen: set[bytes] = set()
        with BlockingClient(broker.leader) as talker:
            assert talker.subscribe("t", ready=2000) == b"OK"
            while not seen.issuperset(acknowledged):
                message_id, _, body = talker.message()
                talker.finish(message_id)
                seen.add(body)
    finally:
        broker.kill()
    assert len(acknowledged) > 80
