"""The command line: imports, completion, unknown commands, missing extras."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

import nsqext
from nsqext.broker import Cluster
from nsqext.cli import COMMANDS, main
from nsqext.cli.command import perform
from nsqext.cli.connection import load_settings
from nsqext.errors import UnknownSetting
from nsqext.settings import Given
from tests.support import plain_http
from tests.support.blocking_client import eventually
from tests.support.command_line import environment, run, run_fresh, started

_LOADED = """
import json, sys
from nsqext.cli import main

try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""

_LATER = ("asyncio", "concurrent.futures", "httpx", "ssl", "email", "pydantic", "rich", "starlette", "uvicorn")
"""Takes as long to import as the rest of the help; typer imports pydantic for an option that it parses."""


def loaded_by(*words: str) -> tuple[str, set[str]]:
    """Return what a command prints, and the modules that it imports."""
    program = [sys.executable, "-c", _LOADED, *words]
    done = subprocess.run(program, env=environment(), capture_output=True, check=False, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(), set(json.loads(done.stderr))


def test_the_list_of_commands_imports_neither_commands_nor_clients() -> None:
    shown, loaded = loaded_by("--help")
    assert {name for name in loaded if name.startswith("nsqext.cli.")} == {
        "nsqext.cli.parameters",
        "nsqext.cli.typer_app",
    }
    assert not {"nsqext.client", "nsqext.lookup.client", "nsqext.broker", "anyio", *_LATER} & loaded
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("command", ["pub", "tail", "topic", "stats"])
def test_the_help_of_a_command_imports_neither_clients_nor_what_only_its_call_needs(command: str) -> None:
    shown, loaded = loaded_by(command, "--help")
    clients = {"nsqext.client.producer.producer", "nsqext.client.consumer.consumer", "nsqext.admin.admin"}
    clients |= {"nsqext.transport.event_loop", "anyio.lowlevel"}
    assert not {"nsqext.broker", *clients, *_LATER} & loaded
    assert f"Usage: nsqext {command}" in shown


def test_a_command_imports_only_what_its_request_needs() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", channels=["billing"])
        shown, loaded = loaded_by("topic", "list", "--lookupd", cluster.lookupd[0])
    assert json.loads(shown)["topic"] == "orders"
    assert "httpcore" in loaded
    assert not {"typer", "pydantic", "rich", "pygments", "trio", "httpx"} & loaded
    other = {"nsqext.client.producer.options", "nsqext.client.consumer.options"}
    assert not other & loaded


def test_a_publish_imports_no_consumer() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", channels=["billing"])
        shown, loaded = loaded_by("pub", "orders", "hello", "--lookupd", cluster.lookupd[0])
    assert json.loads(shown)["topic"] == "orders"
    assert not {name for name in loaded if name.startswith(("nsqext.client.consumer.", "nsqext.admin."))}


def test_settings_are_read_where_there_are_any() -> None:
    assert load_settings(None, "n:1", None, {}) == Given("n:1", (), {})
    assert load_settings(None, None, None, {"NSQEXT_NSQD": "n:1"}) == Given((), "n:1", {})
    assert load_settings(None, None, None, {"NSQEXT_URL": "nsqd://n:1?timeout=7"}) == Given((), "n:1", {"timeout": 7.0})
    assert load_settings("nsqd://n:1?timeout=7", None, None, {}) == Given((), "n:1", {"timeout": 7.0})
    assert load_settings(None, "n:1", None, {"NSQEXT_TIMEOUT": "7"}) == Given("n:1", (), {"timeout": 7.0})
    with pytest.raises(UnknownSetting, match="timeuot"):
        load_settings(None, "n:1", None, {"NSQEXT_TIMEUOT": "7"})


def test_help_in_a_pipe_shows_brackets_as_they_are_written() -> None:
    shown = loaded_by("tail", "--help")[0]
    assert "{headers[user]}" in shown
    assert "\\[" not in shown


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("topics", "topic"),
        ("doctr", "doctor"),
        ("publish", "pub"),
        ("consume", "tail"),
        ("lags", "lag"),
        ("nsq-lookupd", "nsqlookupd"),
        ("deadletter", "deadletters"),
    ],
)
def test_an_unknown_command_suggests_the_right_one(word: str, suggested: str) -> None:
    done = run(word, "orders")
    assert (done.returncode, done.stdout) == (2, b"")
    expected = f"nsqext: there is no command '{word}': did you mean `nsqext {suggested}`? `nsqext --help` lists all\n"
    assert done.stderr.decode() == expected


def test_an_unknown_command_that_resembles_no_other_names_the_help() -> None:
    done = run("xyzzy")
    assert (done.returncode, done.stderr) == (2, b"nsqext: there is no command 'xyzzy': `nsqext --help` lists all\n")


def test_an_unknown_command_of_a_group_suggests_the_right_one() -> None:
    done = run("topic", "lst")
    assert (done.returncode, b"Did you mean 'list'" in done.stderr) == (2, True), done.stderr


def complete(line: str, **variables: Any) -> list[str]:
    """Return the completions of a command line."""
    number = str(len(line.split(" ")) - 1)
    done = run(_NSQEXT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number, **variables)
    return done.stdout.decode().split()


def test_completion_of_commands_and_options() -> None:
    assert set(COMMANDS) == set(complete("nsqext "))
    assert complete("nsqext channel see") == ["seek"]
    assert complete("nsqext tail orders --until") == ["--until-end", "--until"]


def test_completion_of_topics() -> None:
    with Cluster(nodes=1) as cluster:
        for name in ("orders", "orders.eu", "refunds"):
            cluster.create_topic(name, channels=["ch"])
        given = {"NSQEXT_LOOKUPD": cluster.lookupd[0]}
        assert sorted(complete("nsqext tail ord", **given)) == ["orders", "orders.eu"]
        assert complete("nsqext topic show ref", **given) == ["refunds"]
        assert complete(f"nsqext pub --lookupd {cluster.lookupd[0]} ref") == ["refunds"]


@pytest.mark.parametrize("given", [{}, {"NSQEXT_LOOKUPD": "127.0.0.1:1"}, {"NSQEXT_URL": "nonsense"}])
def test_completion_without_a_cluster_is_empty_and_silent(given: dict[str, Any]) -> None:
    done = run(_NSQEXT_COMPLETE="complete_bash", COMP_WORDS="nsqext tail ord", COMP_CWORD="2", **given)
    assert (done.stdout.strip(), done.stderr) == (b"", b"")


def test_completion_does_not_wait_for_a_lookup_service_that_does_not_respond() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        assert complete("nsqext tail ord", NSQEXT_LOOKUPD=f"127.0.0.1:{silent.getsockname()[1]}") == []
        assert time.monotonic() - started < 25  # the requests of a client wait longer in all


def test_the_version_is_printed_without_typer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    main(["--version"])
    assert capsys.readouterr().out == f"nsqext {nsqext.__version__}\n"


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "nsqext.cli.typer_app", raising=False)
    with pytest.raises(SystemExit) as end:
        main(["topic", "--help"])
    assert end.value.code == 2
    assert "this command needs typer: pip install 'nsqext[cli]'" in capsys.readouterr().err


def test_a_missing_extra_of_one_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('No module named uvicorn', name='uvicorn')")
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('No module named starlette', name='starlette')")
    done = run_fresh("bench", "--count", "1", PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}")
    assert (done.returncode, b"pip install 'nsqext[broker]'" in done.stderr) == (2, True), done.stderr


def test_errors_with_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["topic", "list", "--url", "nsq://h?\x1b[2J=1"])
    assert "\x1b" not in capsys.readouterr().err


def test_logs_with_control_characters_are_escaped() -> None:
    async def log() -> None:
        await anyio.lowlevel.checkpoint()

    perform(log)
    assert logging.lastResort is not None
    record = logging.LogRecord("nsqext", logging.WARNING, "", 0, "refused: %s\nnext", ("\x1b]0;owned\x07",), None)
    assert logging.lastResort.format(record) == "refused: \\x1b]0;owned\\x07\nnext"


@pytest.mark.parametrize(
    ("streams", "words", "error"),
    [
        ("<&-", ("topic", "delete", "orders"), b"there is no terminal: give --yes"),
        ("2>&-", ("topic", "delete", "orders"), b""),
        (">&-", ("outbox", "sql"), b"nsqext: standard output is closed"),
        (">/dev/full", ("outbox", "sql"), b"nsqext: [Errno 28] No space left on device"),
        (">/dev/full", ("config", "list", "--json"), b"nsqext: [Errno 28] No space left on device"),
    ],
)
def test_streams_that_are_closed_or_full(tmp_path: Path, streams: str, words: tuple[str, ...], error: bytes) -> None:
    contexts = tmp_path / "contexts.toml"
    contexts.write_text('[contexts]\nprod = "nsq://127.0.0.1:1"\n')
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -W error -m nsqext "$@" {streams}', sys.executable, *words],
        env=environment(NSQEXT_CONTEXTS_FILE=str(contexts), NSQEXT_LOOKUPD="127.0.0.1:1", PYTHONUNBUFFERED=""),
        capture_output=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", bool(error)), done.stderr
    assert error in done.stderr


def test_ctrl_c_ends_a_command_with_130() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", channels=["billing"])
        with started("stats", "orders", "--watch", "--json", NSQEXT_LOOKUPD=cluster.lookupd[0]) as watching:
            assert watching.stdout is not None
            assert b"orders" in watching.stdout.readline()
            watching.send_signal(signal.SIGINT)
            assert watching.wait(30) == 130


def test_ctrl_c_ends_commands_that_run_until_then_with_0(tmp_path: Path) -> None:
    with Cluster(nodes=1) as cluster:
        for name in ("orders", "copies"):
            cluster.create_topic(name, extend=True, channels=["ch"])
        commands = {
            "tail": ("orders", "--channel", "a"),
            "record": ("orders", "--channel", "b", "--to", str(tmp_path)),
        }
        for command, words in commands.items():
            with started(command, *words, NSQEXT_LOOKUPD=cluster.lookupd[0]) as running:
                eventually(lambda wanted=words[2]: has_consumer(cluster, "orders", wanted))  # type: ignore[misc]
                running.send_signal(signal.SIGINT)
                assert running.wait(30) == 0, command


def has_consumer(cluster: Cluster, topic: str, channel: str) -> bool:
    """Return whether a consumer is connected to a channel."""
    node = cluster.nodes[cluster.leader(topic)]
    found = plain_http.get(f"http://{node.http}/stats", params={"format": "json", "topic": topic}).json()
    channels = [one for listed in found["data"]["topics"] for one in listed["channels"]]
    return any(one["channel_name"] == channel and one["clients"] for one in channels)


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nsqext.cli.import_module", interrupt)
    with pytest.raises(SystemExit) as end:
        main(["topic", "list"])
    assert end.value.code == 130
