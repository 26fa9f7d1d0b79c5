"""Commands that wait say for what, on standard error."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from nsqext.cli.waiting import Waits
from tests.support.command_line import lines, run, started

if TYPE_CHECKING:
    import pytest

    from nsqext.broker import Cluster

COMMANDS = (
    "topic list",
    "topic create orders",
    "topic delete orders --yes",
    "channel list orders",
    "node list",
    "stats orders",
    "lag orders",
    "key-ranges orders billing",
    "lookup",
    "doctor",
    "check orders billing",
    "spark anchors list orders",
    "pub orders hello",
    "tail orders",
    "trace orders 7",
    "record orders --to backup",
    "replay one.jsonl --topic orders",
    "relay orders --to copies",
    "deadletters replay orders_dead",
    "bench orders --count 1",
    "delay run --store delayed",
)


def test_each_command_says_what_it_waits_for_while_lookup_does_not_respond(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"body": "one"}\n')
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        running = {
            text: stack.enter_context(started(*text.split(), cwd=tmp_path, NSQEXT_LOOKUPD=address)) for text in COMMANDS
        }
        for text, process in running.items():
            assert process.stderr is not None
            assert any(line.startswith(b"nsqext: waiting for ") for line in process.stderr), text
            process.kill()


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
