"""`nsqext lag`: records, the limit, and --watch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest

from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.admin.lag import excess
from nsqext.lookup.node_stats import read_stats
from nsqext.sync import Producer
from tests.support.command_line import Terminal, lines, run, started

if TYPE_CHECKING:
    from typing import Any

    from nsqext.lookup.node_stats import PartitionStats
    from nsqext.types import Address


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Lookup address of a cluster."""
    with Cluster(nodes=1) as cluster:
        yield cluster.lookupd[0]


@pytest.fixture
def topic(address: str) -> str:
    """A topic with two channels."""
    name = f"t_{token_hex(4)}"
    lines("topic", "create", name, "--channel", "slow", "--channel", "other", "--lookupd", address)
    return name


def publish(address: str, topic: str, count: int) -> None:
    with Producer(address) as producer:
        producer.publish_many(topic, [b"x"] * count)


def test_the_lag_of_channels_and_a_limit_for_the_exit_code(address: str, topic: str) -> None:
    publish(address, topic, 3)
    lines("tail", topic, "--channel", "other", "--count", "2", "--lookupd", address)
    where = ("--lookupd", address)
    found = lines("lag", topic, *where)
    assert [(one["topic"], one["channel"], one["lag"]) for one in found] == [(topic, "slow", 3), (topic, "other", 1)]
    assert [one["channel"] for one in lines("lag", topic, "other", *where)] == ["other"]
    assert lines("lag", topic, "--max", "3", *where) == found
    above = run("lag", topic, "--max", "2", *where)
    assert [json.loads(line) for line in above.stdout.splitlines()] == found
    assert (above.returncode, above.stderr.decode()) == (1, f"the lag of {topic}/slow is 3, more than 2\n")
    assert run("lag", "missing", *where).returncode == 2


def test_watch_repeats_until_a_lag_is_above_the_limit(address: str, topic: str) -> None:
    words = ("lag", topic, "--watch", "--interval", "0.1", "--max", "2", "--lookupd", address)
    with started(*words) as process:
        assert process.stdout is not None
        records = [json.loads(process.stdout.readline()) for _ in range(4)]  # two refreshes
        assert {record["lag"] for record in records} == {0}
        assert all(record["time"] > 0 for record in records)
        publish(address, topic, 3)
        output, errors = process.communicate()
        assert process.wait() == 1
    assert json.loads(output.splitlines()[-1])["lag"] == 3
    assert b"is 3, more than 2" in errors


def test_a_lag_that_is_not_known_is_above_a_limit() -> None:
    record = {"topic": "orders", "channel": "billing", "lag": 1, "unreachable": ["n1:4150"]}
    assert excess([record], None) == []
    assert excess([record], 5) == ["the lag of orders/billing is not known: no response of n1:4150"]


def test_a_channel_that_the_topic_lacks_has_no_lag_to_check(address: str, topic: str) -> None:
    publish(address, topic, 1)
    for words in (("lag", topic, "slwo", "--max", "0"), ("stats", topic, "slwo")):
        found = run(*words, "--lookupd", address)
        assert (found.returncode, found.stdout) == (2, b"")
        assert found.stderr.decode() == f"nsqext: the topic has no channel slwo (topic {topic})\n"


def test_partitions_without_a_leader_make_a_lag_unknown() -> None:
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=2, channels=["billing"])
        where = ("--lookupd", cluster.lookupd[0], "--max", "100")
        lines("lag", "orders", *where)
        cluster.kill(cluster.leader("orders", 1))
        for words in (("orders", "billing"), ("orders",), ()):
            found = run("lag", *words, *where)
            assert found.returncode == 1
            assert found.stderr == b"the lag of orders/billing is not known: no node reports partition 1\n"
            (record,) = lines("stats", *words, *where[:2])
            assert record["missing"] == [1]
        assert [one["missing"] for one in lines("channel", "list", "orders", *where[:2])] == [[1]]
        with Terminal("stats", *where[:2]) as terminal:
            assert terminal.end() == 0
        assert "missing" in terminal.shown
        cluster.kill(cluster.leader("orders", 0))
        for words, place, channel in (((), "orders", None), (("orders", "billing"), "orders/billing", "billing")):
            found = run("lag", *words, *where)
            text = f"the lag of {place} is not known: no node reports partition 0, 1\n"
            assert (found.returncode, found.stderr.decode()) == (1, text)
            record = {"topic": "orders", "channel": channel, "lag": None, "missing": [0, 1]}
            assert json.loads(found.stdout) == record


def test_a_partition_that_its_leader_does_not_report_makes_the_lag_of_any_topic_unknown(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is as for a while after an election: the lag of the other partitions was the whole."""
    topic = f"t_{token_hex(4)}"
    lines("topic", "create", topic, "--partitions", "2", "--multipart", "--channel", "ch", "--lookupd", address)

    def read_one(data: Any, node: Address) -> dict[str, list[PartitionStats]]:
        found = read_stats(data, node)
        return {**found, topic: [part for part in found.get(topic, []) if part.partition == 0]}

    monkeypatch.setattr("nsqext.admin.stats.read_stats", read_one)
    with pytest.raises(SystemExit) as end:
        main(["lag", "--max", "5", "--lookupd", address])
    assert (end.value.code, capsys.readouterr().err) == (
        1,
        f"the lag of {topic}/ch is not known: no node reports partition 1\n",
    )


def test_a_topic_of_the_original_nsq_without_a_node_is_not_healthy() -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        cluster.create_topic("orders", channels=["billing"])
        cluster.kill("n1")
        where = ("--lookupd", cluster.lookupd[0])
        found = run("lag", "orders", "--max", "0", *where)
        assert (found.returncode, found.stderr) == (1, b"the lag of orders is not known: no node has the topic\n")
        found = run("check", "orders", *where)
        assert found.returncode == 1
        assert json.loads(found.stdout)["problems"] == ["lookup lists no node with the topic"]
        texts = [one["text"] for one in map(json.loads, run("doctor", *where).stdout.splitlines())]
        assert "lookup lists no node with it" in texts
        assert "1, every partition has a leader" not in texts
