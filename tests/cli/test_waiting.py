"""Commands that wait say for what, on standard error."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from nsqext.broker import Cluster
from nsqext.cli.waiting import Waits, wait_of, wait_of_app
from tests.support.command_line import lines, run, started

if TYPE_CHECKING:
    import pytest


def test_tail_says_that_it_waits_for_messages(nsq_cluster: Cluster, nsq_topic: str) -> None:
    with started("tail", nsq_topic, "--channel", "ch", NSQEXT_LOOKUPD=nsq_cluster.lookupd[0]) as process:
        assert process.stderr is not None
        expected = f"nsqext: waiting for messages of {nsq_topic}, channel ch\n".encode()
        assert any(line == expected for line in process.stderr)


def test_bench_creates_its_channel_and_refuses_a_missing_topic(nsq_cluster: Cluster, nsq_topic: str) -> None:
    where = ("--lookupd", nsq_cluster.lookupd[0])
    modes = [one["mode"] for one in lines("bench", nsq_topic, "--channel", "absent", "--count", "5", *where)]
    assert modes == ["publish", "consume"]
    missing = run("bench", f"{nsq_topic}_missing", "--count", "5", *where)
    assert (missing.returncode, b"_missing" in missing.stderr) == (2, True)


def test_bench_creates_topic_and_channel_without_lookup() -> None:
    with Cluster(nodes=1, generation="original") as cluster:
        (node,) = cluster.nodes.values()
        where = ("--channel", "absent", "--count", "5", "--nsqd", node.tcp)
        assert [one["mode"] for one in lines("bench", "new", *where)] == ["publish", "consume"]


def waiting_text(*words: str, **variables: str) -> str:
    """Return the first line that says what a command waits for."""
    with started(*words, cwd=None, **variables) as process:
        assert process.stderr is not None
        found = next(line for line in process.stderr if line.startswith(b"nsqext: waiting for "))
        process.kill()
    return found.decode().removeprefix("nsqext: waiting for ").strip()


def test_commands_that_wait_for_the_end_say_which_partition_has_no_leader(tmp_path: Path) -> None:
    """They said only that they wait for messages, and never ended."""
    with Cluster(nodes=2) as cluster:
        cluster.create_topic("orders", partitions=2, channels=["ch"])
        cluster.kill(cluster.leader("orders", 1))
        for words in (("tail", "orders"), ("record", "orders", "--to", str(tmp_path))):
            text = waiting_text(*words, "--channel", "ch", "--until-end", NSQEXT_LOOKUPD=cluster.lookupd[0])
            assert text == "a leader of partition 1 of orders", words


def test_demo_says_that_it_waits_for_a_running_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert waiting_text("demo", "--lookupd", address).startswith(f"a response of lookup at {address}")


def test_pub_says_that_it_waits_for_messages_to_read(nsq_cluster: Cluster, nsq_topic: str) -> None:
    text = waiting_text("pub", nsq_topic, NSQEXT_LOOKUPD=nsq_cluster.lookupd[0])
    assert text == "messages to read"


def test_a_text_is_said_once_after_two_seconds_without_output_and_not_in_a_pause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, timers, cancelled = [0.0], list[tuple[float, Callable[[], None]]](), set[int]()

    def timer(seconds: float, look: Callable[[], None]) -> SimpleNamespace:
        number = len(timers)
        timers.append((seconds, look))
        return SimpleNamespace(start=lambda: None, cancel=lambda: cancelled.add(number))

    def tick(seconds: float) -> None:
        now[0] += seconds
        assert len(timers) - 1 not in cancelled
        timers[-1][1]()

    monkeypatch.setattr("nsqext.cli.waiting.Timer", timer)
    monkeypatch.setattr("nsqext.cli.waiting.time", SimpleNamespace(monotonic=lambda: now[0]))
    waits = Waits()
    for text, shown in (("a node\x1b", "a node\\x1b"), ("a message", "a message")):
        before = len(timers)
        with waits.waiting(text):
            assert len(timers) == before + 1
            with waits.waiting(None):
                tick(2.0)
            now[0] += 1.5
            waits.spoke()
            tick(0.5)
            assert (timers[-1][0], capsys.readouterr().err) == (1.5, "")
            for _ in range(2):
                tick(2.0)
        assert capsys.readouterr().err == f"nsqext: waiting for {shown}\n"
        assert len(timers) - 1 in cancelled
    with waits.waiting(None):
        now[0] += 5.0
        with waits.waiting("a leader"):
            tick(1.0)
            assert capsys.readouterr().err == ""
            tick(1.0)
            assert capsys.readouterr().err == "nsqext: waiting for a leader\n"


def test_what_a_consumer_and_an_app_wait_for() -> None:
    obstacles: list[str] = []
    consumer: Any = SimpleNamespace(topics=("a", "b"), channel="ch", connections=(), subscribed=False)
    text = wait_of(consumer, obstacles)
    assert text() == "a partition of a, b to consume: no node is connected"
    consumer.connections = ("n1",)
    assert text() == "messages of a, b, channel ch"
    obstacles.append("a leader of partition 1 of a")
    assert text() == "a leader of partition 1 of a"
    ready: list[bool] = [False]
    app: Any = SimpleNamespace(consumers=(consumer,), health=lambda: SimpleNamespace(ready=ready[0]))
    assert wait_of_app(app)() == "messages of a, b, channel ch"
    consumer.subscribed = True
    assert wait_of_app(app)() == "the lifespans of the app to start"
    ready[0] = True
    assert wait_of_app(app)() is None
