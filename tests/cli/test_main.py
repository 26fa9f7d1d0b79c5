"""The command line: imports, completion, unknown commands, missing extras."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from nsqext.cli import COMMANDS, main
from nsqext.cli.command import perform
from tests.support.command_line import environment, run, run_fresh

_LOADED = """
import json, sys
from nsqext.cli import main

try:
    main(["--help"])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def test_the_list_of_commands_imports_neither_commands_nor_clients() -> None:
    program = [sys.executable, "-c", _LOADED]
    done = subprocess.run(program, env=environment(), capture_output=True, check=False, timeout=50)
    loaded = json.loads(done.stderr)
    assert done.returncode == 0
    assert [name for name in loaded if name.startswith("nsqext.cli.")] == []
    assert not {"nsqext.client", "nsqext.lookup.client", "nsqext.broker", "httpx", "anyio", "asyncio"} & set(loaded)
    assert all(name in done.stdout.decode() for name in COMMANDS)


def test_an_unknown_command() -> None:
    done = run("topics")
    assert (done.returncode, b"topics" in done.stderr) == (2, True)


def complete(line: str) -> list[str]:
    """Return the completions of a command line."""
    number = str(len(line.split(" ")) - 1)
    done = run(_NSQEXT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=number)
    return done.stdout.decode().split()


def test_completion_of_commands_and_options() -> None:
    assert set(COMMANDS) == set(complete("nsqext "))
    assert complete("nsqext channel se") == ["seek"]
    assert complete("nsqext tail orders --until") == ["--until-end", "--until"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as end:
        main(["topic", "list"])
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


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nsqext.cli.import_module", interrupt)
    with pytest.raises(SystemExit) as end:
        main(["topic", "list"])
    assert end.value.code == 130
