"""Commands that wait say for what, on standard error."""

from __future__ import annotations

import socket
from threading import Event
from typing import TYPE_CHECKING

from nsqext.broker import Cluster
from nsqext.cli.waiting import Waits
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


def test_demo_says_that_it_waits_for_a_running_cluster() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert waiting_text("demo", "--lookupd", address).startswith(f"a response of lookup at {address}")


def test_pub_says_that_it_waits_for_messages_to_read(nsq_cluster: Cluster, nsq_topic: str) -> None:
    text = waiting_text("pub", nsq_topic, NSQEXT_LOOKUPD=nsq_cluster.lookupd[0])
    assert text == "messages to read"


def test_a_text_is_said_once_and_not_after_output_or_in_a_pause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("nsqext.cli.waiting._SILENCE", 0.01)
    waits, looked = Waits(), Event()
    looks = 0

    def outer() -> str:
        nonlocal looks
        looks += 1
        if looks == 3:
            looked.set()
        return "a node\x1b"

    with waits.waiting(outer):
        with waits.waiting(None):
            assert not looked.wait(0.1)
        assert looks == 0
        assert looked.wait(20)
    assert capsys.readouterr().err == "nsqext: waiting for a node\\x1b\n"
