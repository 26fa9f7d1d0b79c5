"""`nsqext relay`, `deadletters`, `trace` and `config`."""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from nsqext.admin import Admin, TopicStats
from nsqext.broker import Cluster
from nsqext.cli import main
from nsqext.cli.connection import Contexts, load_contexts
from nsqext.cli.messages.relay import TargetCluster
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import Terminal, lines, run, started, unexpected

if TYPE_CHECKING:
    from nsqext import Lookup


def make_topic(cluster: Cluster, *channels: str) -> str:
    """Return an extend topic with channels."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, extend=True, channels=channels or ["ch"])
    return name


def test_a_topic_is_relayed_to_another_one(cluster: Cluster) -> None:
    source, target, where = make_topic(cluster, "relay"), make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", source, "one", "two", "--key", "k", "--header", "user=42", *where)
    assert lines("relay", source, "--to", target, "--until-end", *where) == [{"topic": source, "relayed": 2}]
    found = lines("tail", target, "--channel", "ch", "--until-end", *where)
    assert [(one["body"], one["key"], one["headers"]) for one in found] == [
        ("one", "k", {"user": "42"}),
        ("two", "k", {"user": "42"}),
    ]


def test_a_new_channel_is_relayed_until_its_end_from_the_earliest_message(cluster: Cluster) -> None:
    """It began at the latest message: nothing was relayed, with exit code 0."""
    source, target, where = make_topic(cluster), make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", source, "one", "two", *where)
    assert lines("relay", source, "--to", target, "--until-end", *where) == [{"topic": source, "relayed": 2}]
    assert lines("relay", source, "--to", target, "--until-end", *where) == [{"topic": source, "relayed": 0}]


def test_a_topic_is_relayed_to_the_original_generation(cluster: Cluster) -> None:
    source = make_topic(cluster, "relay")
    lines("pub", source, "one", "--header", "user=42", "--lookupd", cluster.lookupd[0])
    with Cluster(nodes=1, generation="original") as original:
        other = ("--lookupd", original.lookupd[0])
        lines("topic", "create", "copy", "--channel", "ch", *other)
        lines(
            *("relay", source, "--to", "copy", "--without-headers", "--until-end"),
            *("--to-lookupd", original.lookupd[0], "--lookupd", cluster.lookupd[0]),
        )
        (found,) = lines("tail", "copy", "--channel", "ch", "--until-end", *other)
    assert found["body"] == "one"


@contextmanager
def web_hook(answers: list[int], wait: Callable[[], None] = lambda: None) -> Iterator[tuple[str, list[bytes]]]:
    """Run an HTTP server that waits, and responds with these statuses, then 200; yield its URL and accepted bodies."""
    accepted: list[bytes] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            wait()
            status = answers.pop(0) if answers else 200
            if status == 200:
                accepted.append(body)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook", accepted
        finally:
            server.shutdown()
            thread.join()


def test_a_topic_is_relayed_to_a_url_with_retries(cluster: Cluster) -> None:
    topic = make_topic(cluster, "relay")
    lines("pub", topic, "one", "two", "--lookupd", cluster.lookupd[0])
    url = f"nsq://{cluster.lookupd[0]}?requeue_delay=0.1&backoff_base=0.1&backoff_max_wait=0.2"
    with web_hook([503, 302]) as (hook, accepted):
        done = run("relay", topic, "--to-http", hook, "--until-end", "--url", url)
    assert (done.returncode, sorted(accepted)) == (0, [b"one", b"two"])


def test_a_relay_whose_url_accepts_messages_again_is_ready(cluster: Cluster) -> None:
    topic = make_topic(cluster, "relay")
    lines("pub", topic, "one", "--lookupd", cluster.lookupd[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    words = ("relay", topic, "--http", address, "--url", f"nsq://{cluster.lookupd[0]}?requeue_delay=0.1&backoff=off")
    with web_hook([503]) as (hook, accepted), started(*words, "--to-http", hook):
        eventually(lambda: accepted, seconds=30.0)
        eventually(lambda: plain_http.get(f"http://{address}/readyz").status_code == 200)


def test_a_relay_sends_what_it_has_received_before_it_stops() -> None:
    """The original NSQ would redeliver it in another order."""
    slowly = partial(time.sleep, 0.005)  # many messages wait in the relay when the signal arrives
    with Cluster(nodes=1, generation="original") as original, web_hook([], slowly) as (hook, accepted):
        original.create_topic("orders", channels=["relay"])
        where = ("--lookupd", original.lookupd[0])
        lines("pub", "orders", stdin=b"x\n" * 150, NSQEXT_LOOKUPD=original.lookupd[0])
        words = ("--to-http", hook, "--concurrency", "1", "--report", "0.1", *where)
        with started("relay", "orders", *words) as process:
            assert process.stdout is not None
            reports = (json.loads(line) for line in process.stdout)
            report = next(report for report in reports if report["in_flight"] > 20)
            process.send_signal(signal.SIGTERM)
            output, errors = process.communicate()
    assert (process.returncode, unexpected(errors)) == (0, b"")
    relayed = json.loads(output.splitlines()[-1])["relayed"]
    assert report["relayed"] + report["in_flight"] <= relayed == len(accepted)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_relay_waits_for_a_topic_that_is_created_again_or_for_a_signal(cluster: Cluster, stopped: bool) -> None:
    source, target, where = make_topic(cluster, "relay"), make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("channel", "pause", source, "relay", "--yes", *where)
    lines("pub", source, "never delivered", *where)
    with started("relay", source, "--to", target, "--until-end", "--report", "0.1", *where) as process:
        eventually(lambda: any(one["consumers"] for one in lines("stats", source, *where)), seconds=30.0)
        cluster.delete_topic(source)
        assert process.stderr is not None
        assert any(b"is consumed again in 1 s" in line for line in process.stderr)
        if stopped:
            process.send_signal(signal.SIGTERM)
        else:
            cluster.create_topic(source, extend=True, channels=["relay"])
            lines("pub", source, "one", *where)
        output, errors = process.communicate()
    status, relayed = (128 + signal.SIGTERM, 0) if stopped else (0, 1)
    assert process.returncode == status, errors
    assert json.loads(output.splitlines()[-1]) == {"topic": source, "relayed": relayed}


@pytest.mark.parametrize("option", ["to_lookupd", "to_nsqd", "to_url", "to_context"])
def test_each_option_of_the_target_gives_another_cluster(option: str) -> None:
    found = TargetCluster(**{option: "other"}).connection()
    assert found is not None
    assert getattr(found, option.removeprefix("to_")) == "other"
    assert TargetCluster().connection() is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("relay", "t"), "exactly one of --to and --to-http"),
        (("relay", "t", "--to", "t"), "relayed to itself"),
        (("relay", "t", "--to-http", "http://h", "--to-lookupd", "h:1"), "cannot be combined with the address"),
        (("relay", "t", "--to", "u", "--content-type", "text/plain"), "without --to-http would be ignored"),
        (("relay", "t", "--to-http", "http://h", "--content-type", "text/ü"), "is not the value of a header"),
        (("relay", "t", "--to-http", "ftp://h"), "not an HTTP URL"),
        (("relay", "t", "--to-http", "http://[::1"), "not an HTTP URL"),
        (("relay", "t", "--to-http", "http://1.2.3.999/hook"), "not an HTTP URL"),
        (("relay", "t", "--to-http", "example.com/hook"), "not an HTTP URL"),
    ],
)
def test_mistakes_of_relay(words: tuple[str, ...], reason: str) -> None:
    done = run(*words, "--lookupd", "h:1")
    assert (done.returncode, reason in done.stderr.decode()) == (2, True), done.stderr


def test_a_relay_names_what_its_health_page_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "nsqext.observability.prometheus", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["relay", "t", "--to-http", "http://h", "--http", "127.0.0.1:0", "--lookupd", "h:1"])
    assert end.value.code == 2
    assert "--http needs prometheus_client: pip install 'nsqext[prometheus]'" in capsys.readouterr().err


def test_dead_letters_return_to_their_topic(cluster: Cluster) -> None:
    dead, origin, where = make_topic(cluster, "replay"), make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", dead, "one", "--header", f"dead-letter-topic={origin}", *where)
    headers = lines("tail", dead, "--start", "earliest", "--until-end", *where)[0]["headers"]
    assert headers == {"dead-letter-topic": origin}
    done = lines("deadletters", "replay", dead, "--idle", "2", *where)
    assert done == [{"topic": dead, "replayed": 1}]
    (found,) = lines("tail", origin, "--channel", "ch", "--until-end", *where)
    assert (found["body"], found["headers"]) == ("one", {})


def test_a_replay_of_dead_letters_has_the_options_of_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def replay(topic: str, *, lookupd: Lookup, **given: object) -> int:
        found.append((topic, given))
        return 3

    found: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr("nsqext.replay_dead_letters", replay)
    words = ("--channel", "again", "--idle", "2.5", "--url", "nsq://h:1?connect_timeout=7")
    with pytest.raises(SystemExit, match="0"):
        main(["deadletters", "replay", "dead", *words])
    assert found == [("dead", {"channel": "again", "idle": 2.5, "connect_timeout": 7.0})]
    assert json.loads(capsys.readouterr().out) == {"topic": "dead", "replayed": 3}


def test_the_state_of_a_channel_is_unknown_while_its_leader_does_not_deliver_the_last_messages(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def stats(admin: Admin, topic: str, channel: str | None = None) -> TopicStats:
        found = await of_cluster(admin, topic, channel)
        if channel is not None:
            return found
        (part,) = found.partitions
        behind = {name: evolve(channel, unreadable=1) for name, channel in part.channels.items()}
        return evolve(found, partitions=(evolve(part, channels=behind),))

    topic, where = make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", "--trace-id", "7", *where)
    of_cluster = Admin.stats
    monkeypatch.setattr(Admin, "stats", stats)
    with pytest.raises(SystemExit, match="0"):
        main(["trace", topic, "7", *where])
    states = json.loads(capsys.readouterr().out)["channels"]
    assert states == {"ch": "unknown, the leader does not deliver its last messages yet"}


def test_messages_are_found_by_trace_id_and_message_id(cluster: Cluster) -> None:
    topic, where = make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", topic, "one", "--trace-id", "7", *where)
    lines("pub", topic, "two", "--trace-id", "8", *where)
    (found,) = lines("trace", topic, "8", *where)
    assert (found["body"], found["offset"] > 0) == ("two", True)
    assert found["channels"] == {"ch": "not finished, or finished before an earlier message"}
    lines("tail", topic, "--channel", "ch", "--count", "1", *where)
    assert lines("trace", topic, "7", *where)[0]["channels"] == {"ch": "finished"}
    assert lines("trace", topic, "8", *where)[0]["channels"] == found["channels"]
    (again,) = lines("trace", topic, found["id"], *where)
    assert again["body"] == "two"
    missing = run("trace", topic, "9", *where)
    assert b"stores no message with the id 9" in missing.stderr
    assert (missing.returncode, missing.stdout) == (1, b"")
    (whole,) = lines("trace", topic, "8", *where, NSQEXT_SAMPLE_RATE="1")  # meant for a service
    assert whole["id"] == found["id"]


def test_contexts(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    topic = make_topic(cluster)
    (made,) = lines("config", "set", "here", f"nsq://{cluster.lookupd[0]}?auth_secret=s3cret")
    assert "s3cret" not in made["url"]
    lines("config", "set", "there", "nsq://127.0.0.1:1")
    listed = lines("config", "list")
    assert [(one["context"], one["current"]) for one in listed] == [("here", True), ("there", False)]
    assert "s3cret" not in str(listed)
    replaced = run("config", "set", "here", "nsq://127.0.0.1:1")
    assert (replaced.returncode, b"not done without a confirmation" in replaced.stderr) == (2, True)
    assert run("config", "use", "nowhere").returncode == 2
    assert lines("config", "list") == listed
    assert topic in [one["topic"] for one in lines("topic", "list")]
    lines("config", "use", "there")
    assert run("topic", "list").returncode == 2
    unnamed = run("bench")
    assert (unnamed.returncode, b"no topic is given" in unnamed.stderr) == (2, True)
    assert lines("topic", "list", "--context", "here")
    assert lines("topic", "list", NSQEXT_LOOKUPD=cluster.lookupd[0])
    assert lines("topic", "list", "--url", f"nsq://{cluster.lookupd[0]}")
    lines("config", "delete", "there", "--yes")
    assert load_contexts().current is None
    unknown = run("topic", "list", "--context", "there")
    assert (unknown.returncode, b"there is no context 'there': known: here" in unknown.stderr) == (2, True)
    stored = tmp_path / "nsqext" / "contexts.toml"
    assert stored.stat().st_mode & 0o077 == 0
    stored.write_text("contexts = 1")
    broken = run("topic", "list")
    assert (broken.returncode, b"is not a contexts file" in broken.stderr) == (2, True)
    refused = run("config", "set", "x", "nsq://h?colour=red")
    assert (refused.returncode, b"unknown setting 'colour'" in refused.stderr) == (2, True)


def test_names_and_urls_of_contexts_may_have_any_character(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(tmp_path / "contexts.toml")
    monkeypatch.setenv("NSQEXT_CONTEXTS_FILE", file)
    known = {'prod 🚀"\\\x7f': "nsq://h:1?auth_secret=🔑", "other": "nsq://h:2"}
    for name, url in known.items():
        lines("config", "set", name, url, NSQEXT_CONTEXTS_FILE=file)
    assert load_contexts() == Contexts(known, next(iter(known)))
    refused = run("config", "set", "\udcff", "nsq://h:3", NSQEXT_CONTEXTS_FILE=file)
    assert (refused.returncode, b"is no text" in refused.stderr) == (2, True)
    assert load_contexts().urls == known


def test_ctrl_c_ends_a_relay(cluster: Cluster) -> None:
    source, target, where = make_topic(cluster, "relay"), make_topic(cluster), ("--lookupd", cluster.lookupd[0])
    lines("pub", source, "one", *where)
    with Terminal("relay", source, "--to", target, *where) as terminal:
        lines("tail", target, "--channel", "ch", "--count", "1", *where)
        terminal.type("\x03")
        assert terminal.end(20) == 0
    assert "1 messages" not in terminal.shown
    assert "1 message of" in terminal.shown


def test_trace_needs_stored_messages() -> None:
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("orders", channels=["ch"])
        done = run("trace", "orders", "7", "--lookupd", original.lookupd[0])
    assert (done.returncode, b"nsqext tail --trace-id" in done.stderr) == (2, True)


def test_an_endless_http_response_times_out(cluster: Cluster) -> None:
    topic = make_topic(cluster, "relay")
    lines("pub", topic, "one", "--lookupd", cluster.lookupd[0])
    url = f"nsq://{cluster.lookupd[0]}?requeue_delay=0.1&backoff_base=0.1&backoff_max_wait=0.2"
    with slow_hook() as (hook, asked), started("relay", topic, "--to-http", hook, "--timeout", "1", "--url", url):
        eventually(lambda: len(asked) >= 2, seconds=30.0)  # the message was requeued after the first attempt
    assert set(asked) == {b"one"}


@contextmanager
def slow_hook() -> Iterator[tuple[str, list[bytes]]]:
    """Run an HTTP server that sends one byte of an endless response every 50 ms; yield its URL and the bodies."""
    asked: list[bytes] = []
    ended = threading.Event()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                while not ended.wait(0.05):
                    self.wfile.write(b".")

        def log_message(self, *words: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hook", asked
        finally:
            ended.set()
            server.shutdown()
            thread.join()
