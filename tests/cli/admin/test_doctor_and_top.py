"""`nsqext doctor`, `check` and `top`, as programs."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from secrets import token_hex
from threading import Thread
from typing import TYPE_CHECKING

import httpx
import pytest
from attrs import evolve

from nsqext import Admin, sync
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.admin.doctor import examine_lookup
from nsqext.cli.admin.stats import Rates, View
from nsqext.lookup.client import LookupClient
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import Terminal, lines, run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.admin import TopicInfo, TopicStats
    from nsqext.lookup.responses import LookupNode

NODES = 2


def make_topic(cluster: Cluster, *channels: str) -> str:
    """Return a topic with channels."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, channels=channels)
    return name


def test_the_doctor_says_what_to_do(cluster: Cluster) -> None:
    waiting, empty, quiet = make_topic(cluster, "billing"), make_topic(cluster), make_topic(cluster, "quiet")
    where = ("--lookupd", cluster.lookupd[0])
    lines("pub", waiting, "one", *where)
    lines("channel", "create", waiting, "audit", *where)
    lines("channel", "pause", waiting, "audit", "--yes", *where)
    findings = {one["subject"]: one for one in lines("doctor", *where)}
    assert findings["lookup"]["status"] == "ok"
    assert findings["client without TLS"]["status"] == "ok"
    assert {findings[f"nsqd {node.tcp}"]["status"] for node in cluster.nodes.values()} == {"ok"}
    assert findings[f"channel {waiting}/billing"]["hint"].endswith(f"nsqext channel delete {waiting} billing")
    assert findings[f"channel {waiting}/audit"]["hint"] == f"nsqext channel unpause {waiting} audit"
    assert findings[f"topic {empty}"]["hint"].endswith(f"nsqext channel create {empty} default")
    assert f"channel {quiet}/quiet" not in findings


def test_the_doctor_finds_what_is_paused_or_skipped(cluster: Cluster) -> None:
    topic, where = f"t_{token_hex(4)}", ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, partitions=2, channels=["skips", "waits"])
    lines("channel", "skip", topic, "skips", "--yes", *where)
    leader = cluster.nodes[cluster.leader(topic, 1)]
    paused = plain_http.post(f"http://{leader.http}/channel/pause?topic={topic}&channel=waits&partition=1")
    assert paused.status_code == 200
    findings = {one["subject"]: one for one in lines("doctor", *where)}
    assert findings[f"channel {topic}/skips"]["hint"] == f"nsqext channel unskip {topic} skips"
    assert findings[f"channel {topic}/waits"]["text"] == "is paused in 1 of 2 places with 0 waiting messages"
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("orders", channels=["ch"])
        where = ("--lookupd", original.lookupd[0])
        lines("topic", "pause", "orders", "--yes", *where)
        findings = {one["subject"]: one for one in lines("doctor", *where)}
    assert findings["topic orders"]["hint"] == "nsqext topic unpause orders"


def test_the_doctor_finds_partitions_that_lack_a_channel_or_its_consumer(cluster: Cluster) -> None:
    """Their messages wait for ever, or are lost to the channel, while its other partitions are in order."""
    topic, where = f"t_{token_hex(4)}", ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, partitions=2, channels=["billing", "audit"])
    leader = cluster.nodes[cluster.leader(topic, 1)]
    place = f"topic={topic}&channel=audit&partition=1"
    assert plain_http.post(f"http://{leader.http}/channel/delete?{place}").status_code == 200
    lines("pub", topic, "one", "--partition", "1", *where)
    with sync.Consumer(topic, "billing", lookupd=cluster.lookupd, partitions=(0,)):
        findings = {one["subject"]: one for one in lines("doctor", *where)}
    waiting, absent = findings[f"channel {topic}/billing"], findings[f"channel {topic}/audit"]
    assert (waiting["status"], absent["status"]) == ("warning", "warning")
    assert waiting["text"] == "has no consumer on partition 1, and 1 waiting messages there"
    assert absent["text"] == "does not exist on partition 1, and gets no message that is published there"
    probed = run("check", topic, "audit", *where)
    assert (probed.returncode, json.loads(probed.stdout)["problems"]) == (1, [f"the channel {absent['text']}"])
    assert run("check", topic, "billing", *where).returncode == 0
    assert absent["hint"] == f"nsqext channel create {topic} audit"
    lines("channel", "create", topic, "audit", *where)
    assert f"channel {topic}/audit" not in {one["subject"] for one in lines("doctor", *where)}


def test_a_cluster_whose_lookup_nodes_have_no_leader_is_not_healthy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No partition gets another leader then."""

    async def lookup_nodes(client: LookupClient) -> tuple[LookupNode, ...]:
        return tuple(evolve(node, leader=False) for node in await known(client))

    known = LookupClient.lookup_nodes
    monkeypatch.setattr(LookupClient, "lookup_nodes", lookup_nodes)
    with pytest.raises(SystemExit, match="1"):
        main(["check", "--lookupd", cluster.lookupd[0]])
    assert json.loads(capsys.readouterr().out)["problems"] == ["no lookup node is the leader"]


def test_a_channel_that_is_paused_or_skips_messages_is_not_healthy(cluster: Cluster) -> None:
    topic, where = make_topic(cluster, "billing"), ("--lookupd", cluster.lookupd[0])
    for change, undone, problem in (
        ("pause", "unpause", "the channel is paused"),
        ("skip", "unskip", "the channel finishes messages without delivering them"),
    ):
        lines("channel", change, topic, "billing", "--yes", *where)
        found = run("check", topic, "billing", "--max-lag", "0", *where)
        assert (found.returncode, json.loads(found.stdout)["problems"]) == (1, [problem])
        lines("channel", undone, topic, "billing", "--yes", *where)
        assert lines("check", topic, "billing", *where) == [{"healthy": True, "problems": []}]
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("orders", channels=["ch"])
        where = ("--lookupd", original.lookupd[0])
        lines("topic", "pause", "orders", "--yes", *where)
        found = run("check", "orders", *where)
    assert (found.returncode, json.loads(found.stdout)["problems"]) == (1, ["the topic is paused"])


def test_a_topic_without_a_leader_is_not_said_to_lack_channels() -> None:
    """Only leaders report channels."""
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", channels=["ch"])
        where = ("--lookupd", cluster.lookupd[0])
        cluster.kill(cluster.leader("orders"))
        eventually(lambda: not lines("topic", "show", "orders", *where)[0]["leaders"])
        found = [json.loads(line) for line in run("doctor", *where).stdout.splitlines()]
        probed = json.loads(run("check", "orders", "ch", *where).stdout)
    assert [one["text"] for one in found if one["subject"] == "topic orders"] == ["partition 0 has no leader"]
    assert probed["problems"] == ["partition 0 has no leader", "no node reports the channel ch"]


def test_the_doctor_finds_a_dead_node_and_check_fails() -> None:
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=2, replicas=1, channels=["ch"])
        where = ("--lookupd", cluster.lookupd[0])
        assert lines("check", *where) == [{"healthy": True, "problems": []}]
        dead = cluster.nodes[cluster.leader("orders", 1)]
        cluster.faults.freeze(dead.name)
        silent = run("check", "orders", *where, "--timeout", "2")
        assert (silent.returncode, f"node {dead.tcp} does not respond" in silent.stdout.decode()) == (1, True)
        assert silent.stdout.decode().count(dead.tcp) == 1
        cluster.faults.thaw(dead.name)
        cluster.kill(dead.name)
        found = run("doctor", *where)
        assert (found.returncode, b'"status":"error"' in found.stdout) == (1, True)
        unhealthy = run("check", "orders", *where)
        assert (unhealthy.returncode, b'"healthy":false' in unhealthy.stdout) == (1, True)


@pytest.mark.parametrize(
    ("address", "text"),
    [("nohost.invalid:4161", "is unknown"), ("127.0.0.1:1", "is not reached")],
)
def test_the_doctor_explains_wrong_addresses(address: str, text: str) -> None:
    done = run("doctor", "--lookupd", address)
    assert (done.returncode, text in done.stdout.decode()) == (1, True)


def test_the_doctor_examines_a_cluster_by_the_lookup_node_that_responds(cluster: Cluster) -> None:
    done = run("doctor", "--lookupd", f"127.0.0.1:1,{cluster.lookupd[0]}")
    findings = {one["subject"]: one["status"] for one in map(json.loads, done.stdout.splitlines())}
    assert (done.returncode, findings["lookup 127.0.0.1:1"]) == (1, "error")
    assert {findings[name] for name in ("nodes", "client without TLS")} == {"ok"}


def test_the_doctor_recognizes_a_tcp_port(cluster: Cluster) -> None:
    node = next(iter(cluster.nodes.values()))
    done = run("doctor", "--lookupd", node.tcp)
    assert (done.returncode, "is it the HTTP port" in done.stdout.decode()) == (1, True)


class _Gateway(httpx.AsyncHTTPTransport):
    """Removes the path prefix of a gateway."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.url = request.url.copy_with(path=request.url.path.removeprefix("/nsq"))
        return await super().handle_async_request(request)


@pytest.mark.anyio
async def test_the_doctor_does_not_look_for_a_leader_behind_a_gateway(cluster: Cluster) -> None:
    async with (
        _Gateway() as gateway,
        LookupClient(f"http://{cluster.lookupd[0]}/nsq", transport=gateway) as client,
    ):
        assert any(node.redesigned for node in await client.lists.nodes())
        finding = await examine_lookup(client)
    assert (finding.status, "behind a gateway" in finding.text) == ("ok", True)


def test_check_of_a_channel(cluster: Cluster) -> None:
    topic, where = make_topic(cluster, "billing"), ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", "two", *where)
    assert lines("check", topic, "billing", "--max-lag", "2", *where) == [{"healthy": True, "problems": []}]
    late = run("check", topic, "billing", "--max-lag", "1", "--min-consumers", "1", *where)
    assert late.returncode == 1
    assert b"2 messages are unfinished; at most 1 may be" in late.stdout
    assert b"0 consumers; at least 1 are required" in late.stdout
    missing = run("check", topic, "nothing", *where)
    assert (missing.returncode, b"no channel nothing" in missing.stdout) == (1, True)
    refused = run("check", topic, "--max-lag", "1", *where)
    assert (refused.returncode, b"need a channel" in refused.stderr) == (2, True)


def test_a_consumer_of_several_partitions_counts_once(cluster: Cluster) -> None:
    topic, where = f"t_{token_hex(4)}", ("--lookupd", cluster.lookupd[0])
    cluster.create_topic(topic, partitions=2, channels=["billing"])
    with sync.Consumer(topic, "billing", lookupd=cluster.lookupd) as consumer:
        assert len(consumer.connections) == 2
        assert lines("check", topic, "billing", "--min-consumers", "1", *where) == [{"healthy": True, "problems": []}]
        few = run("check", topic, "billing", "--min-consumers", "2", *where)
        assert [one["consumers"] for one in lines("stats", topic, *where)] == [1]
        with sync.Consumer(topic, "billing", lookupd=cluster.lookupd):
            assert [one["consumers"] for one in lines("stats", topic, *where)] == [2]
    assert (few.returncode, b"1 consumers; at least 2 are required" in few.stdout) == (1, True)


def test_check_fails_for_a_partition_that_its_leader_does_not_report(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, count = make_topic(cluster, "billing"), Admin.stats

    async def stats(admin: Admin, *names: str) -> TopicStats:
        return evolve(await count(admin, *names), partitions=(), missing=(0,))  # as for a while after an election

    monkeypatch.setattr(Admin, "stats", stats)
    with pytest.raises(SystemExit) as end:
        main(["check", topic, "--lookupd", cluster.lookupd[0]])
    assert end.value.code == 1
    leader = cluster.nodes[cluster.leader(topic, 0)].tcp
    assert f"partition 0 is not reported by {leader}, its leader" in capsys.readouterr().out


def test_the_doctor_finds_a_partition_that_its_leader_does_not_report(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    topic, count = make_topic(cluster, "billing"), Admin.all_stats

    async def all_stats(admin: Admin, topics: Mapping[str, TopicInfo] | None = None) -> dict[str, TopicStats]:
        found = await count(admin, topics)
        return {**found, topic: evolve(found[topic], partitions=(), missing=(0,))}

    monkeypatch.setattr(Admin, "all_stats", all_stats)
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--lookupd", cluster.lookupd[0]])
    assert end.value.code == 1
    (error,) = (one for one in map(json.loads, capsys.readouterr().out.splitlines()) if one["status"] == "error")
    leader = cluster.nodes[cluster.leader(topic, 0)].tcp
    assert (error["subject"], error["text"]) == (
        f"topic {topic}",
        f"partition 0 is not reported by {leader}, its leader",
    )


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        yield server


def address_of(server: socket.socket) -> str:
    """Return the address of a server."""
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_check_ends_in_time(silent: socket.socket) -> None:
    done = run("check", "--lookupd", address_of(silent), "--timeout", "0.5")
    assert (done.returncode, b"no response within 0.5 s" in done.stdout) == (1, True)
    words = ("--url", f"nsq://{address_of(silent)}?lookup_request_timeout=0.2", "--timeout", "300")
    done = run("check", *words)  # the time of a request is a setting
    assert (done.returncode, b"not within 0.2 s" in done.stdout) == (1, True)


@pytest.mark.parametrize("words", [("topic", "list"), ("record", "t", "--to", "/nonexistent"), ("pub", "t", "body")])
def test_ctrl_c_ends_a_command_that_waits_for_an_answer(silent: socket.socket, words: tuple[str, ...]) -> None:
    with Terminal(*words, "--url", f"nsq://{address_of(silent)}?lookup_request_timeout=40") as terminal:
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1024)  # its request: now it waits for the response
            terminal.type("\x03")
            assert terminal.end(20) == 130
    assert "Traceback" not in terminal.shown


def test_top_is_sorted_by_key_press_and_quit(cluster: Cluster) -> None:
    topic, where = make_topic(cluster, "billing"), ("--lookupd", cluster.lookupd[0])
    with Terminal("top", topic, *where, "--interval", "0.2") as terminal:
        terminal.wait_for("sorted by lag")
        terminal.wait_for("billing")
        terminal.type("m")
        terminal.wait_for("sorted by messages")
        terminal.type("\x1b[A\x1bOB\x1b[15~c")  # arrows and F5, which begin as the key Escape
        terminal.wait_for("sorted by channel")
        terminal.type("\x1b")
        assert terminal.end() == 0
    with Terminal("top", *where) as terminal:
        terminal.wait_for("sorted by lag")
        terminal.type("\x03")
        assert terminal.end() == 130
    assert "Traceback" not in terminal.shown
    piped = run("top", *where)
    assert (piped.returncode, b"top needs a terminal" in piped.stderr) == (2, True)


def test_top_shows_an_error_until_the_cluster_responds_again() -> None:
    with Cluster(nodes=1) as cluster, Terminal("top", "--interval", "0.1", "--lookupd", cluster.lookupd[0]) as terminal:

        def frame() -> str:
            terminal.shown = ""
            terminal.wait_for("q: quit")
            return terminal.shown

        assert "lookup" not in frame()
        cluster.kill("l1")
        eventually(lambda: "no lookup node" in frame(), seconds=30.0)
        cluster.restart("l1")
        eventually(lambda: "no lookup node" not in frame(), seconds=30.0)


def test_keys_choose_column_and_direction() -> None:
    view = View([{"topic": "a", "lag": 1}, {"topic": "b", "lag": 2}, {"topic": "c"}])
    assert [one["topic"] for one in view.sorted()] == ["b", "a", "c"]
    assert view.press("l")
    assert [one["topic"] for one in view.sorted()] == ["c", "a", "b"]
    assert view.press("t")
    assert [one["topic"] for one in view.sorted()] == ["a", "b", "c"]
    assert view.press("t")
    assert [one["topic"] for one in view.sorted()] == ["c", "b", "a"]
    assert not view.press("q")


class _Lookup(BaseHTTPRequestHandler):
    """A lookup node with another time, which lists two nodes of different versions that are down."""

    date: str

    def do_GET(self) -> None:
        nodes = [
            {"broadcast_address": "127.0.0.1", "tcp_port": 1, "http_port": 2, "version": version, "hostname": "n"}
            for version in ("1.2.0", "1.3.0")
        ]
        nodes[1] |= {"tcp_port": 3, "http_port": 4}
        body = json.dumps({"producers": nodes, "topics": []}).encode()
        self.send_response(404 if self.path.startswith("/listlookup") else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return self.date

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class _Gateway401(BaseHTTPRequestHandler):
    """A gateway that demands a secret."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def test_a_gateway_that_demands_a_secret_is_a_server() -> None:
    """The doctor doubted that it is one, and did not examine the cluster with the secret."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway401) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            done = run("doctor", "--lookupd", address, NSQEXT_LOOKUP_TIMEOUT="1")
        finally:
            server.shutdown()
            serving.join()
    first, second, *_ = map(json.loads, done.stdout.splitlines())
    assert (first["subject"], first["status"], done.returncode) == (f"lookup {address}", "ok", 1)
    assert "refuses access: 401" in second["text"]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0, None])
def test_clocks_and_versions_that_differ_are_reported(ahead: float | None) -> None:
    date = "of a proxy" if ahead is None else formatdate(time.time() + ahead, usegmt=True)
    handler = type("Shifted", (_Lookup,), {"date": date})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            address = f"127.0.0.1:{server.server_port}"
            done = run("doctor", "--lookupd", address, NSQEXT_TIMEOUT="1", NSQEXT_CONNECT_TIMEOUT="1")
        finally:
            server.shutdown()
            serving.join()
    found = [json.loads(line) for line in done.stdout.splitlines()]
    warnings = {one["subject"]: one["text"] for one in found if one["status"] == "warning"}
    assert warnings["nodes"] == "versions differ: 1.2.0, 1.3.0"
    found_clock = warnings.get(f"lookup {address}", "")
    assert re.fullmatch(r"its clock differs by 3\d{3} s from this machine's" if ahead else "", found_clock)
    assert done.returncode == 1, "nodes are down"


def test_a_rate_is_that_of_the_partitions_of_both_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all messages of a node that responds again counted as new."""
    clock = iter([0.0, 2.0, 4.0, 6.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    samples: list[dict[object, int]] = [{0: 5, 1: 500}, {0: 9}, {0: 9, 1: 500}, {1: 510}]
    rates = Rates()
    shown = [rates.add([{"topic": "t", "channel": "c"}], [counts])[0].get("per_second") for counts in samples]
    assert shown == [None, 2.0, 0.0, 5.0]
