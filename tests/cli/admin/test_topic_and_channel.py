"""`nsqext topic`, `channel`, `lookup` and `stats` on both generations, as programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

import pytest

from nsqext import Admin
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.lookup.client import LookupClient
from nsqext.sync import Consumer
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import Terminal, lines, run, started

NODES = 2


@pytest.fixture(scope="module")
def original() -> Iterator[Cluster]:
    """An original cluster of one node."""
    with Cluster(nodes=1, generation="original") as cluster:
        yield cluster


def fresh() -> str:
    """Return an unused topic name."""
    return f"t_{token_hex(4)}"


def test_a_topic_from_creation_to_deletion(cluster: Cluster) -> None:
    name, where = fresh(), ("--lookupd", cluster.lookupd[0])
    assert lines("topic", "create", name, "--partitions", "2", "--channel", "c", *where) == [
        {"topic": name, "created": True},
        {"topic": name, "channel": "c", "created": True},
    ]
    refused = run("topic", "create", name, *where)
    assert (refused.returncode, b"the topic exists" in refused.stderr) == (2, True)
    assert b"--if-not-exists" in refused.stderr
    assert lines("topic", "create", name, "--if-not-exists", *where) == [{"topic": name, "created": False}]
    lines("topic", "upgrade", name, "--yes", *where)
    (shown,) = lines("topic", "show", name, *where)
    assert (shown["partitions"], shown["extend"], shown["channels"]) == (2, True, ["c"])
    assert sorted(shown["in_sync"]) == ["0", "1"]
    lines("pub", name, "one", "two", *where)
    lines("topic", "empty", name, "--yes", *where)
    (stats,) = lines("stats", name, *where)
    assert (stats["channel"], stats["lag"], stats["messages"]) == ("c", 0, 2)
    assert name in [one["topic"] for one in lines("topic", "list", *where)]
    assert lines("topic", "delete", name, "--yes", *where) == [{"topic": name, "deleted": True}]
    assert lines("topic", "delete", name, "--if-exists", "--yes", *where) == [{"topic": name, "deleted": False}]
    gone = run("topic", "show", name, *where)
    assert (gone.returncode, b"does not know the topic" in gone.stderr) == (2, True)
    assert run("topic", "delete", name, "--yes", *where).returncode == 2


def test_a_topic_created_without_channels_can_be_published_to(cluster: Cluster) -> None:
    name, address = fresh(), cluster.lookupd[0]
    assert lines("topic", "create", name, "--lookupd", address) == [
        {"topic": name, "created": True},
        {"topic": name, "channel": "default", "created": True},
    ]
    assert len(lines("pub", name, "hello", "--lookupd", address)) == 1


def test_too_few_nodes_are_explained(cluster: Cluster) -> None:
    where = ("--lookupd", cluster.lookupd[0])
    for words, text in (
        (("--partitions", "3"), b"3 partitions need 3 nodes, but the cluster has 2"),
        (("--partitions", "2", "--replicas", "2"), b"2 partitions with 2 replicas need 4 nodes"),
        (("--replicas", "3"), b"3 replicas need 3 nodes, but the cluster has 2"),
    ):
        refused = run("topic", "create", fresh(), *words, *where)
        assert (refused.returncode, text in refused.stderr) == (2, True), refused.stderr
    assert b"--multipart" in run("topic", "create", fresh(), "--partitions", "3", *where).stderr
    assert lines("topic", "create", fresh(), "--partitions", "3", "--multipart", *where)


def test_options_that_the_original_nsq_ignores_are_refused(original: Cluster) -> None:
    """The topic was created without them, with exit code 0."""
    name, where = fresh(), ("--lookupd", original.lookupd[0])
    refused = run("topic", "create", name, "--partitions", "4", "--extend", "--retention-days", "2", *where)
    text = b"the original NSQ has no partitions, extend, retention_days of topics"
    assert (refused.returncode, text in refused.stderr) == (2, True), refused.stderr
    assert name not in [one["topic"] for one in lines("topic", "list", *where)]


def test_a_topic_of_the_original_nsq_is_paused(original: Cluster) -> None:
    name, where = fresh(), ("--lookupd", original.lookupd[0])
    assert lines("topic", "create", name, *where) == [{"topic": name, "created": True}]
    lines("topic", "pause", name, "--yes", *where)
    (paused,) = lines("stats", name, *where)
    lines("channel", "create", name, "c", *where)
    (channel,) = lines("stats", name, *where)
    assert (channel["channel"], channel["paused"]) == ("c", True)
    lines("topic", "unpause", name, "--yes", *where)
    (resumed,) = lines("stats", name, *where)
    assert (paused["paused"], resumed["paused"]) == (True, False)
    refused = run("topic", "upgrade", name, "--yes", *where)
    assert (refused.returncode, b"not supported" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "method", "given"),
    [
        (("trace", "t", "--off"), "trace_topic", {"channel": None, "enabled": False}),
        (("trace", "t", "--channel", "c"), "trace_topic", {"channel": "c", "enabled": True}),
        (("tombstone", "t", "h:1"), "tombstone", {"restore": False}),
        (("tombstone", "t", "h:1", "--restore"), "tombstone", {"restore": True}),
    ],
)
def test_a_change_is_switched_on_and_off(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], method: str, given: dict[str, object]
) -> None:
    async def change(admin: Admin, topic: str, *_: str, **options: object) -> None:
        changes.append(options)

    changes: list[object] = []
    monkeypatch.setattr(Admin, method, change)
    with pytest.raises(SystemExit):
        main(["topic", *words, "--yes", "--lookupd", "127.0.0.1:1"])
    assert changes == [given]


def test_a_channel_from_creation_to_deletion(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, channels=["c"])
    made = lines("channel", "create", topic, "a", "c", "b", *where)
    assert [(one["channel"], one["created"]) for one in made] == [("a", True), ("c", False), ("b", True)]
    lines("pub", topic, "one", "two", *where)
    lines("channel", "pause", topic, "a", "--yes", *where)
    lines("channel", "skip", topic, "b", "--yes", *where)
    lines("channel", "empty", topic, "c", "--yes", *where)
    by_name = {one["channel"]: one for one in lines("channel", "list", topic, *where)}
    assert (by_name["a"]["paused"], by_name["a"]["lag"]) == (True, 2)
    assert (by_name["b"]["skipped"], by_name["c"]["lag"]) == (True, 0)
    lines("channel", "unpause", topic, "a", "--yes", *where)
    lines("channel", "unskip", topic, "b", "--yes", *where)
    lines("channel", "seek", topic, "c", "earliest", "--partition", "0", "--yes", *where)
    deleted = {"topic": topic, "channel": "a", "deleted": True}
    assert lines("channel", "delete", topic, "a", "--yes", *where) == [deleted]
    assert run("channel", "delete", topic, "a", "--yes", *where).returncode == 2
    assert lines("channel", "delete", topic, "a", "--if-exists", "--yes", *where) == [{**deleted, "deleted": False}]
    by_name = {one["channel"]: one for one in lines("channel", "list", topic, *where)}
    assert (sorted(by_name), by_name["b"]["skipped"], by_name["c"]["lag"]) == (["b", "c"], False, 2)


def test_a_channel_is_changed(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, extend=True, channels=["c"])
    changed = [{"topic": topic, "channel": "c", "changed": True}]
    assert lines("channel", "set", topic, "c", "--rate-limit-kib", "1024", "--ordered", "--yes", *where) == changed
    for words in (("limit-consumers", topic, "c", "10"), ("redeliver", topic, "c"), ("deliver-delayed", topic, "c")):
        assert len(lines("channel", *words, "--yes", *where)) == 1
    assert len(lines("channel", "empty-delayed", topic, "c", "--yes", *where)) == 1
    for message, text in (("7", b"not in flight"), ("0" * 32, b"message=0 is not within"), ("x", b"no message id")):
        refused = run("channel", "finish", topic, "c", message, "--yes", *where)
        assert (refused.returncode, text in refused.stderr) == (2, True), refused.stderr
    lines("channel", "create", topic, "k", "--dispatch", "key_failover", *where)
    assert [one["channel"] for one in lines("key-ranges", topic, "k", "--once", *where)] == ["k"]


def test_consumers_at_other_addresses_are_not_limited(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, channels=["c"])
    bodies = []
    with Consumer(topic, "c", lookupd=cluster.lookupd) as consumer:
        for body in ("before", "after"):
            lines("pub", topic, body, *where)
            for message in consumer.fetch(1, timeout=20):
                bodies.append(message.body)
                message.finish()
            # a limit is for consumers that are connected already
            lines("channel", "limit-consumers", topic, "c", "0", "--address-prefix", "10.", "--yes", *where)
    assert bodies == [b"before", b"after"]


def test_a_message_in_flight_is_finished(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, channels=["c"])
    lines("pub", topic, "stuck", *where)
    with Consumer(topic, "c", lookupd=cluster.lookupd) as consumer:
        message = next(iter(consumer))
        finished = lines("channel", "finish", topic, "c", message.id.hex(), "--yes", *where)
        assert finished == [{"topic": topic, "channel": "c", "finished": True}]
        assert [one["lag"] for one in lines("channel", "list", topic, *where)] == [0]


def test_lookup_shows_nodes_topics_and_partitions(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, partitions=2, extend=True, channels=["c"])
    everything = lines("lookup", *where)
    assert {"lookupd": cluster.lookupd[0], "leader": True} in everything
    assert {"topic": topic} in everything
    assert {one["nsqd"] for one in everything if "nsqd" in one} == {node.tcp for node in cluster.nodes.values()}
    meta, *partitions = lines("lookup", topic, *where)
    assert (meta["meta"]["partition_num"], meta["meta"]["extend_support"]) == (2, True)
    leaders = {one["partition"]: one["leader"] for one in partitions}
    assert leaders == {number: cluster.nodes[cluster.leader(topic, number)].tcp for number in (0, 1)}


def test_a_partition_without_a_leader_is_named_and_hides_no_other() -> None:
    """A topic of which one partition had no leader could not be shown, and its list looked complete."""
    with Cluster(nodes=4) as cluster:
        cluster.create_topic("orders", partitions=2, replicas=2, channels=["ch"])
        where = ("--lookupd", cluster.lookupd[0])
        first, second = ({*cluster.in_sync("orders", number)} for number in (0, 1))
        assert not first & second
        for name in second:
            cluster.kill(name)
        eventually(lambda: lines("topic", "list", *where)[0]["leaderless"] == [1], seconds=30.0)
        (shown,) = lines("topic", "show", "orders", *where)
        assert {*shown["in_sync"]["0"]} == {cluster.nodes[name].tcp for name in first}
        assert (shown["in_sync"]["1"], shown["leaderless"], [*shown["leaders"]]) == ([], [1], ["0"])
        for access, text in (("r", "partition 1: no leader"), ("w", "partition 1: not offered to producers")):
            _, zero, one = lines("lookup", "orders", "--access", access, *where)
            assert (zero["leader"], one["partition"], one["leader"]) == (shown["leaders"]["0"], 1, None)
            with Terminal("lookup", "orders", "--access", access, *where) as terminal:
                assert terminal.end() == 0
            assert text in terminal.shown
        for words, text in ((("show", "orders"), "no leader"), (("list",), "leaderless")):
            with Terminal("topic", *words, *where) as terminal:
                assert terminal.end() == 0
            assert text in terminal.shown


def test_a_channel_that_is_paused_on_one_partition_is_shown(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, partitions=2, channels=["c"])
    for action, partition in (("pause", 0), ("skip", 1)):
        leader = cluster.nodes[cluster.leader(topic, partition)]
        place = f"topic={topic}&channel=c&partition={partition}"
        assert plain_http.post(f"http://{leader.http}/channel/{action}?{place}").status_code == 200
    for words in (("channel", "list"), ("stats",)):
        (shown,) = lines(*words, topic, *where)
        assert (shown["paused"], shown["paused_on"], shown["skipped"], shown["skipped_on"]) == (False, [0], False, [1])
        with Terminal(*words, topic, *where) as terminal:
            assert terminal.end() == 0
        assert "skipped on" in terminal.shown
    refused = run("channel", "redeliver", topic, "c", "--yes", *where)
    assert (refused.returncode, b"it does not read again" in refused.stderr) == (2, True), refused.stderr


def test_lookup_shows_the_partitions_for_producers_or_consumers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(client: LookupClient, topic: str, access: str) -> Any:
        accesses.append(access)
        return await known(client, topic, access)

    accesses: list[str] = []
    known, topic = LookupClient.lookup, fresh()
    cluster.create_topic(topic, channels=["c"])
    monkeypatch.setattr(LookupClient, "lookup", look)
    for words in ((), ("--access", "w")):
        with pytest.raises(SystemExit, match="0"):
            main(["lookup", topic, *words, "--lookupd", cluster.lookupd[0]])
    assert accesses == ["r", "w"]


def test_what_is_confirmed_at_a_terminal_is_deleted(cluster: Cluster) -> None:
    topic, address = fresh(), cluster.lookupd[0]
    cluster.create_topic(topic, channels=["billing"])
    with Terminal("channel", "delete", topic, "billing", "--lookupd", address) as terminal:
        terminal.wait_for("[y/N]")
        terminal.type("y\n")
        assert terminal.end() == 0
    (shown,) = lines("topic", "show", topic, "--lookupd", address)
    assert shown["channels"] == []


def test_settings_that_the_original_nsq_lacks_are_refused_when_its_nodes_start_later() -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        where = ("--lookupd", cluster.lookupd[0])
        cluster.terminate("n1")
        eventually(lambda: not lines("node", "list", *where))
        with started("topic", "create", "orders", "--partitions", "4", *where) as creating:
            time.sleep(2.0)
            assert creating.poll() is None
            cluster.restart("n1")
            _, errors = creating.communicate(timeout=30)
        assert (creating.returncode, b"has no partitions of topics" in errors) == (2, True), errors
        assert cluster.topics == {}


def test_statistics_of_an_unknown_channel_are_an_error(cluster: Cluster) -> None:
    topic, where = fresh(), ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, channels=["c"])
    assert [one["channel"] for one in lines("stats", topic, "c", *where)] == ["c"]
    unknown = run("stats", topic, "absent", *where)
    assert (unknown.returncode, b"the topic has no channel absent" in unknown.stderr) == (2, True), unknown.stderr


def test_statistics_are_watched_with_rates(cluster: Cluster) -> None:
    topic, address = fresh(), cluster.lookupd[0]
    cluster.create_topic(topic, channels=["c"])
    with started("stats", topic, "--watch", "--interval", "0.1", "--count", "2", "--lookupd", address) as watching:
        output, errors = watching.communicate(timeout=30)
    first, second = map(json.loads, output.splitlines())
    assert (errors, "per_second" in first, second["per_second"]) == (b"", False, 0.0)


@pytest.mark.parametrize("words", [("stats", "--watch"), ("stats", "--watch", "--json")])
def test_ctrl_c_ends_a_watch_at_once(cluster: Cluster, words: tuple[str, ...]) -> None:
    topic = fresh()
    cluster.create_topic(topic, channels=["c"])
    with Terminal(*words, "--lookupd", cluster.lookupd[0]) as terminal:
        terminal.wait_for(topic)
        began = time.monotonic()
        terminal.type("\x03")
        assert terminal.end() == 130
    assert time.monotonic() - began < 10
    assert "Traceback" not in terminal.shown
