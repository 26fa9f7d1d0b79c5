"""`nsqext pub`, `tail`, `lookup`, `topic` and `bench`, as programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest

from nsqext.cli.command import perform
from nsqext.errors import NotSent
from nsqext.spark.cluster.admin import MARK, QUERY_MARK
from nsqext.sync import Consumer
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import ROOT, Terminal, lines, run, started, unexpected

if TYPE_CHECKING:
    from nsqext.broker import Cluster

NODES = 2

_PATIENCE = 50.0


def test_publish_and_tail(cluster: Cluster, topic: str) -> None:
    address = cluster.lookupd[0]
    words = ("--header", "user=4=2", "--trace-id", "7", "--partition", "1", "--lookupd", address)
    first, second = lines("pub", topic, "one", "two", *words)
    assert (first["topic"], first["partition"], first["trace_id"]) == (topic, 1, 7)
    assert second["offset"] > first["offset"] == 0
    got = lines("tail", topic, "--channel", "ch", "--count", "2", "--url", f"nsq://{address}")
    assert [(one["body"], one["headers"], one["trace_id"]) for one in got] == [
        ("one", {"user": "4=2"}, 7),
        ("two", {"user": "4=2"}, 7),
    ]


def test_lines_of_standard_input(cluster: Cluster, topic: str) -> None:
    address = cluster.lookupd[0]
    expected = lines("pub", topic, "--key", "k", stdin=b"a\n\n\xff\r\nlast", NSQEXT_LOOKUPD=address)
    assert expected == [{"topic": topic, "published": 3}]
    got = lines("tail", topic, "--channel", "ch", "--count", "3", NSQEXT_LOOKUPD=address)
    assert [one.get("body", one.get("body_base64")) for one in got] == ["a", "/w==", "last"]


def test_a_closed_pipe_ends_tail_quietly(cluster: Cluster, topic: str) -> None:
    address = cluster.lookupd[0]
    # more than fits into a pipe, so that tail is still writing when head ends
    lines("pub", topic, *(str(number) * 2000 for number in range(50)), "--lookupd", address)
    program = f"{sys.executable} -m nsqext tail {topic} --channel ch --lookupd {address} | head -n 1"
    environment = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(program, shell=True, env=environment, capture_output=True, timeout=_PATIENCE, check=False)  # noqa: S602
    assert (unexpected(done.stderr), len(done.stdout.splitlines())) == (b"", 1)


def test_tail_does_not_report_pauses_of_the_machine(cluster: Cluster) -> None:
    topic, address = f"t_{token_hex(4)}", cluster.lookupd[0]
    cluster.create_topic(topic)
    with started("tail", topic, "--channel", "tail", "--count", "1", "--lookupd", address) as tail:
        eventually(lambda: clients(cluster, topic, "tail") == 1, seconds=_PATIENCE)
        tail.send_signal(signal.SIGSTOP)
        time.sleep(1.6)
        tail.send_signal(signal.SIGCONT)
        lines("pub", topic, "one", "--lookupd", address)
        output, errors = tail.communicate(timeout=_PATIENCE)
    assert (json.loads(output)["body"], unexpected(errors)) == ("one", b"")


def clients(cluster: Cluster, topic: str, channel: str) -> int:
    """Return the number of consumers of a channel on partition 0."""
    address = cluster.nodes[cluster.leader(topic)].http
    (found,) = plain_http.get(f"http://{address}/stats?format=json&topic={topic}").json()["data"]["topics"]
    return sum(len(one["clients"]) for one in found["channels"] if one["channel_name"] == channel)


def test_bench_counts_its_publishes() -> None:
    published, consumed = lines("bench", "--count", "300", "--in-flight", "8")
    assert (published["mode"], published["messages"], consumed["mode"], consumed["messages"]) == (
        "publish",
        300,
        "consume",
        300,
    )
    assert 0 < published["p50_ms"] <= published["p99_ms"]
    assert published["per_second"] == pytest.approx(300 / published["seconds"])


def test_bench_prints_json_at_a_terminal_if_it_is_wanted() -> None:
    with Terminal("bench", "--count", "10", "--json") as terminal:
        assert terminal.end() == 0
    assert [json.loads(line)["mode"] for line in terminal.shown.splitlines()] == ["publish", "consume"]


def test_bench_in_batches_on_a_given_cluster(cluster: Cluster, topic: str) -> None:
    words = ("--channel", "ch", "--count", "250", "--batch", "100", "--lookupd", cluster.lookupd[0])
    published, consumed = lines("bench", topic, *words)
    assert (published["messages"], consumed["messages"]) == (250, 250)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("pub", "orders", "x"), "the address of the servers is unknown: give --lookupd"),
        (("tail", "orders"), "the address of the servers is unknown: give --lookupd"),
        (("broker", "--data-path", "/dev/null/x"), "/dev/null/x"),
        (("broker", "--tls-cert", "/no/cert", "--tls-key", "/no/key"), "/no/cert"),
        (("pub", "orders", "x", "--header", "user", "--nsqd", "h:1"), "is not NAME=VALUE"),
        (("pub", "orders", "--partition", "1", "--nsqd", "h:1"), "--partition and --delay need messages as arguments"),
        (("pub", "orders", "x", "--url", "nsq://h?colour=red"), "unknown setting 'colour'"),
        (("tail", "orders", "--nsqd", "h:1", "--start", "nowhere"), "write earliest"),
        (("lookup",), "the address of the servers is unknown"),
        (("topic", "list", "--nsqd", "h:1"), "needs the lookup service, not nsqd"),
        (("topic", "list", "--url", "nsq://h", "--context", "a"), "both --url and --context"),
        (("topic", "list", "--context", "a"), "there is no context 'a'"),
        (("channel", "seek", "orders", "billing", "nowhere", "--yes", "--lookupd", "h:1"), "or a time in ISO form"),
        (("bench", "--nsqd", "h:1"), "no topic is given"),
        (("stats", "--count", "3", "--lookupd", "h:1"), "--count without --watch would be ignored"),
        (("stats", "--interval", "3", "--lookupd", "h:1"), "--interval without --watch would be ignored"),
        (("lag", "--interval", "3", "--lookupd", "h:1"), "--interval without --watch would be ignored"),
        (("key-ranges", "t", "c", "--once", "--interval", "3", "--lookupd", "h:1"), "--interval with --once would be"),
        (
            ("topic", "create", "t", "--wait", "0", "--lookupd", "h:1"),
            "once the topic accepts publishes",
        ),
        (("bench", "t", "--batch", "9", "--in-flight", "9", "--nsqd", "h:1"), "--in-flight with --batch would be"),
        (("web", "--url", "nsqd://h:4150"), "needs the lookup service, not nsqd"),
        (("tail", "t", "--until-end", "--nsqd", "h:1"), "needs the lookup service, not nsqd"),
        (("trace", "t", "7", "--nsqd", "h:1"), "needs the lookup service, not nsqd"),
        (("relay", "t", "--to", "u", "--until-end", "--nsqd", "h:1"), "needs the lookup service, not nsqd"),
        (("lookup", "--access", "w", "--lookupd", "h:1"), "--access without a topic would be ignored"),
        (("tail", "t", "--raw", "--json", "--nsqd", "h:1"), "--json contradicts --raw and --format"),
        (("tail", "t", "--format", "{body}", "--json", "--nsqd", "h:1"), "--json contradicts --raw and --format"),
        (("delay", "list", "--topic", "t", "--refused"), "--topic with --refused would be ignored"),
        (("broker", "--topic", "t", "--topic", "t:extend"), "--topic is given twice for one topic"),
        (("broker", "--generation", "original", "--lease", "1"), "--lease with the original NSQ would be ignored"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], reason: str) -> None:
    done = run(*words)
    assert (done.returncode, reason in done.stderr.decode(), len(done.stderr.splitlines())) == (2, True, 1), done.stderr


def test_an_error_of_the_program_is_not_hidden_by_one_of_a_server() -> None:
    async def fail() -> None:
        raise ExceptionGroup("two tasks", [NotSent("no node"), ZeroDivisionError()])

    with pytest.raises(ExceptionGroup, match="two tasks"):
        perform(fail)


def test_anchor_channels_of_spark(cluster: Cluster) -> None:
    address, topic = cluster.lookupd[0], f"t_{token_hex(4)}"
    channels = ["query", "service", "tail#ephemeral", f"query{MARK}", f"query{QUERY_MARK}"]
    cluster.create_topic(topic, partitions=2, extend=True, channels=channels)
    lines("pub", topic, "one", "two", "three", "--partition", "1", "--lookupd", address)
    words = ("--lookupd", address)
    lines("tail", topic, "--channel", "service", "--count", "3", *words)
    lines("channel", "create", topic, "later", *words)
    found = lines("spark", "anchors", "list", topic, *words)
    places = [(one["partition"], one["channel"], one["behind"]) for one in found]
    assert places == [(0, "later", 0), (0, "query", 0), (1, "later", 0), (1, "query", 3)]
    with Consumer(topic, "later", cluster.lookupd) as consumer:
        eventually(lambda: len(consumer.connections) == 2)
        connected = run("spark", "anchors", "delete", topic, "--channel", "later", "--yes", *words)
        assert b"has 1 consumer, and consumers processed 0 messages: it is not" in connected.stderr
    unconfirmed = run("spark", "anchors", "delete", topic, "--channel", "query", *words)
    assert (unconfirmed.returncode, b"not done without a confirmation" in unconfirmed.stderr) == (2, True)
    assert lines("spark", "anchors", "list", topic, "--channel", "service", *words) == []
    missing = run("spark", "anchors", "delete", topic, "--channel", "other", "--yes", *words)
    assert (missing.returncode, b"the channel other does not exist" in missing.stderr) == (2, True)
    stopped = run("spark", "anchors", "delete", topic, "--channel", "service", "--yes", *words)
    assert (stopped.returncode, b"consumers processed 3 messages: it is not an anchor" in stopped.stderr) == (2, True)
    deleted = lines("spark", "anchors", "delete", topic, "--channel", "query", "--yes", *words)
    assert [one["deleted"] for one in deleted] == [True, True]
    assert {one["channel"] for one in lines("spark", "anchors", "list", topic, *words)} == {"later"}
    unnamed = run("spark", "anchors", "delete", topic, *words)
    assert b"use --channel NAME" in unnamed.stderr
    bounded = run("spark", "anchors", "list", topic, "--url", f"nsq://{address}?lookup_max_answer_size=10")
    assert (bounded.returncode, b"longer than 10 bytes" in bounded.stderr) == (2, True)  # settings of the URL apply
