"""Run `nsqext` as a process: in pipes, or under a pseudo terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ("ROOT", "Terminal", "command", "environment", "lines", "run", "started")

ROOT = str(Path(__file__).parents[2])
_LIMIT = 50.0
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def command(*words: str) -> list[str]:
    """Return the command line of a command."""
    return [sys.executable, "-W", "error", "-m", "nsqext", *words]


def environment(**variables: str) -> dict[str, str]:
    """Return an environment without the settings of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSQEXT_")}
    return {"XDG_CONFIG_HOME": "/nonexistent", **clean, "PYTHONPATH": ROOT, **variables}


def run(*words: str, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, in pipes."""
    return subprocess.run(
        command(*words), input=stdin, env=environment(**variables), capture_output=True, timeout=_LIMIT, check=False
    )


def lines(*words: str, stdin: bytes = b"", **variables: str) -> list[dict[str, Any]]:
    """Run a command that has to succeed; returns the JSON lines that it printed."""
    done = run(*words, stdin=stdin, **variables)
    assert (done.returncode, done.stderr) == (0, b""), (words, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def started(*words: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start a command in pipes."""
    return subprocess.Popen(
        command(*words),
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


class Terminal:
    """A command under a pseudo terminal of 200 columns.

    Attributes:
        shown: what it has printed, standard error included.
    """

    def __init__(self, *words: str, **variables: str) -> None:
        self._side, other = pty.openpty()
        self.shown = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command(*words)],
            env=environment(TERM="xterm", COLUMNS="200", LINES="50", **variables),
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._side)

    def type(self, text: str) -> None:
        r"""Press keys; ``\x03`` is ^C."""
        os.write(self._side, text.encode())

    def wait_for(self, text: str, seconds: float = _LIMIT) -> None:
        """Read until a text was printed."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} is not printed: {self.shown!r}"

    def end(self, seconds: float = _LIMIT) -> int:
        """Read until the command ends; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        return self._process.wait(max(deadline - time.monotonic(), 0.1))

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._side], [], [], max(deadline - time.monotonic(), 0))
        try:
            data = os.read(self._side, 65536) if ready else b""
        except OSError:  # the other side is closed
            data = b""
        self.shown += data.decode(errors="replace")
        return bool(data)
