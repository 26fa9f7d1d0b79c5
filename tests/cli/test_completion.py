"""Completion in real shells: installed by the command, and asked for at a terminal with the tab key."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest

from nsqext.broker import Cluster
from nsqext.cli.completion import install_completion
from tests.support.command_line import ROOT
from tests.support.missing import skip_without

SHELLS = {
    "bash": (".bashrc", "PS1='ready> '"),
    "zsh": (".zshrc", "PROMPT='ready> '"),
    "fish": (".config/fish/config.fish", "function fish_prompt; echo -n 'ready> '; end"),
}
"""The settings of each shell, and what they contain before a completion is installed."""
_LIMIT = 60.0


class Shell:
    """An interactive shell with a home folder of its own, in which ``nsqext`` is a program."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.home = folder / "home"
        program = folder / "bin" / "nsqext"
        for one in (self.home, program.parent):
            one.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m nsqext "$@"\n')
        program.chmod(0o755)
        self.settings = self.home / SHELLS[name][0]
        self.settings.parent.mkdir(parents=True, exist_ok=True)
        self.settings.write_text(SHELLS[name][1])
        self._environment = {
            **{"HOME": str(self.home), "TERM": "dumb", "LANG": "C.UTF-8", "PYTHONPATH": ROOT},
            "PATH": f"{program.parent}:{os.environ['PATH']}",
        }

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        """Run a line in a shell that is not interactive."""
        # the shell would replace itself with a program that is alone in its line
        words = [self.name, "-c", f"{line}; true"]
        return subprocess.run(words, env=self._environment, capture_output=True, text=True, timeout=_LIMIT, check=True)

    def completes(self, typed: str, expected: str) -> str:
        """Type the beginning of a line and a tab in a new interactive shell; return what it showed.

        Raises:
            TimeoutError: the expected line was not shown.
        """
        master, slave = pty.openpty()
        with os.fdopen(master, "r+b", buffering=0) as terminal:
            termios.tcsetwinsize(slave, (40, 200))
            process = subprocess.Popen(
                [self.name, "-i"],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=self._environment,
                cwd=self.home,
                start_new_session=True,
                preexec_fn=_control_terminal,
            )
            os.close(slave)
            try:
                shown = self._read(terminal.fileno(), "ready> ", "")
                os.write(terminal.fileno(), f"{typed}\t".encode())
                return self._read(terminal.fileno(), expected, shown)
            finally:
                process.kill()
                process.wait()

    @staticmethod
    def _read(descriptor: int, expected: str, shown: str) -> str:
        limit = time.monotonic() + _LIMIT
        start = len(shown)
        while expected not in shown[start:]:
            if not select.select([descriptor], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise TimeoutError(f"{expected!r} is not in {shown!r}")
            shown += os.read(descriptor, 1 << 16).decode(errors="replace")
        return shown


def _control_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(params=list(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """Each shell."""
    if shutil.which(request.param) is None:
        skip_without(request.param, request.param)
    return Shell(request.param, tmp_path)


@pytest.fixture(scope="module")
def lookup() -> Iterator[str]:
    """The lookup address of a cluster with the topic ``refunds``."""
    with Cluster(nodes=1) as cluster:
        for name in ("orders", "refunds"):
            cluster.create_topic(name, channels=["ch"])
        yield cluster.lookupd[0]


def test_commands_options_and_topics_are_completed(shell: Shell, lookup: str) -> None:
    shell.run("nsqext --install-completion")
    shell.completes("nsqext channel see", "nsqext channel seek ")  # the first completion of a shell
    shell.completes("nsqext tail orders --until-e", "nsqext tail orders --until-end ")
    line = f"nsqext topic show --lookupd {lookup} "
    shell.completes(f"{line}ref", f"{line}refunds ")
    name = f"file_{token_hex(4)}"
    (shell.home / name).touch()
    shell.completes(f"nsqext replay {name[:8]}", f"nsqext replay {name}")


@pytest.mark.parametrize(
    ("shell", "variable", "written"),
    [
        ("zsh", "ZDOTDIR", [".zfunc/_nsqext", ".zshrc"]),
        ("fish", "XDG_CONFIG_HOME", ["fish/completions/nsqext.fish"]),
    ],
)
def test_a_completion_is_installed_in_the_folder_that_the_shell_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, variable: str, written: list[str]
) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv(variable, str(tmp_path))
    install_completion(shell)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == written


def test_a_completion_is_added_to_settings_in_another_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with a traceback, and wrote the whole file again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = tmp_path / ".bashrc"
    settings.write_bytes(b"# Gr\xfc\xdfe")
    for _ in range(2):
        install_completion("bash")
    assert settings.read_bytes() == b"# Gr\xfc\xdfe\nsource ~/.bash_completions/nsqext.sh\n"


def test_a_completion_is_installed_once_beside_what_the_user_has(shell: Shell) -> None:
    first, second = shell.run("nsqext --install-completion"), shell.run("nsqext --install-completion")
    assert (first.stderr, first.stdout) == ("", second.stdout)
    path = Path(first.stdout.partition(" is written")[0])
    assert path.is_relative_to(shell.home)
    assert path.read_text() == shell.run("nsqext --show-completion").stdout
    mine, *added = shell.settings.read_text().splitlines()
    assert mine == SHELLS[shell.name][1]
    assert len(added) == (0 if shell.name == "fish" else 1)
