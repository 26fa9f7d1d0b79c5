"""Run `nsqext`, or a Python program, as a process: in pipes, or under a pseudo terminal."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, Self
from zlib import crc32

if TYPE_CHECKING:
    from types import TracebackType

__all__ = (
    "ROOT",
    "Process",
    "Terminal",
    "environment",
    "lines",
    "run",
    "run_code",
    "run_fresh",
    "started",
    "unexpected",
)

ROOT = str(Path(__file__).parents[2])
_LIMIT = 50.0


def environment(**variables: str) -> dict[str, str]:
    """Return an environment without the settings of this process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NSQEXT_")}
    return {"XDG_CONFIG_HOME": "/nonexistent", **clean, "PYTHONPATH": ROOT, **variables}


@cache
def _server(*modules: str) -> socket.socket:
    """Connect to the process that commands are forked from, which has imported modules; one for all workers of a run.

    It ends when they have ended.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
    address = f"\0nsqext-{run}-{crc32(repr((ROOT, modules)).encode()):08x}"
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Path(__file__).with_name("command_server.py").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one worker starts it, and it does not end while another one connects
        try:
            control.connect(address)
        except ConnectionRefusedError:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(address)
                listener.listen()
                listener.set_inheritable(True)
                words = ["-W", "error", "-m", "tests.support.command_server", str(listener.fileno()), *modules]
                nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
                # not a subprocess of Python, which would warn when this worker ends before others; Ctrl+C has to work
                # in it, although a shell starts its background jobs with SIGINT ignored
                os.posix_spawn(
                    sys.executable,
                    [sys.executable, *words],
                    environment(),
                    file_actions=[nothing],
                    setsid=True,
                    setsigdef=[signal.SIGINT],
                )
                control.connect(address)
    atexit.register(control.close)
    return control


class Process:
    """A running command.

    Attributes:
        pid: process id.
        returncode: exit code, or the negative number of the signal that ended the process; None while it runs.
        stdin: standard input; None at a terminal, and with descriptors for the output.
        stdout: standard output; None as well.
        stderr: standard error; None as well, and where it goes to standard output.
    """

    def __init__(
        self,
        words: tuple[str, ...],
        variables: dict[str, str],
        cwd: Path | None = None,
        terminal: int | None = None,
        *,
        joined: bool = False,
        whole: bool = False,
        imports: tuple[str, ...] = (),
        output: tuple[int, int] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        if output is not None:
            streams = [os.open(os.devnull, os.O_RDONLY), *map(os.dup, output)]
        elif terminal is None:
            pipes = [os.pipe() for _ in range(2 if joined else 3)]
            streams = [pipes[0][0], pipes[1][1], os.dup(pipes[1][1]) if joined else pipes[2][1]]
            self.stdin, self.stdout = os.fdopen(pipes[0][1], "wb"), os.fdopen(pipes[1][0], "rb")
            self.stderr = None if joined else os.fdopen(pipes[2][0], "rb")
        else:
            streams = [os.dup(terminal) for _ in range(3)]
        self._replies, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "words": words,
            "environment": variables,
            "folder": str(cwd or Path.cwd()),
            "terminal": terminal is not None,
            "leads": True,
            "whole": whole,
        }
        socket.send_fds(_server(*imports), [json.dumps(request).encode()], [*streams, other.fileno()])
        other.close()
        for stream in streams:
            os.close(stream)
        self.pid = int(self._replies.recv(32))

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has ended."""
        return self._replies.fileno()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code.

        Raises:
            TimeoutExpired: the command runs longer than ``timeout`` seconds.
        """
        if self.returncode is None:
            if not select.select([self._replies], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("nsqext", timeout or 0)
            self.returncode = int(self._replies.recv(32))
            self._replies.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now: its exit code follows
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, stdin: bytes = b"", timeout: float = _LIMIT) -> tuple[bytes, bytes]:
        """Write standard input, and read the rest of standard output and error until the end."""
        assert self.stdin is not None and self.stdout is not None and self.stderr is not None
        found: dict[str, bytes] = {}
        threads = [
            Thread(target=lambda name=name, stream=stream: found.setdefault(name, stream.read()))
            for name, stream in (("stdout", self.stdout), ("stderr", self.stderr))
            if not stream.closed
        ]
        for thread in threads:
            thread.start()
        with suppress(BrokenPipeError):
            self.stdin.write(stdin)
            self.stdin.close()
        try:
            self.wait(timeout)
        except BaseException:  # its own limit, or that of the test, after which the threads would read for ever
            self.kill()
            raise
        finally:
            for thread in threads:
                thread.join()
        return found.get("stdout", b""), found.get("stderr", b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self.wait()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def started(*words: str, cwd: Path | None = None, **variables: str) -> Process:
    """Start a command in pipes; leaving the context kills it."""
    return Process(words, environment(**variables), cwd)


def run(
    *words: str, stdin: bytes = b"", cwd: Path | None = None, limit: float = _LIMIT, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, in pipes; ``limit`` is in seconds.

    What it says to wait for on a busy machine is left out of its errors.
    """
    with started(*words, cwd=cwd, **variables) as process:
        output, errors = process.communicate(stdin, limit)
    return subprocess.CompletedProcess(words, process.wait(), output, unexpected(errors))


def unexpected(errors: bytes) -> bytes:
    """Return what a command wrote to standard error, without what it says to wait for on a busy machine."""
    lines = errors.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"nsqext: waiting for "))


def run_code(program: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to the end of its interpreter, in pipes.

    Args:
        program: its text.
        folder: for its file.
        variables: of its environment.
    """
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    with Process((str(file),), environment(**variables), folder, whole=True) as process:
        output, errors = process.communicate()
        return subprocess.CompletedProcess(str(file), process.wait(), output.decode(), errors.decode())


def run_fresh(*words: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a new interpreter, to test its imports and the installed program."""
    command = [sys.executable, "-W", "error", "-m", "nsqext", *words]
    return subprocess.run(command, env=environment(**variables), capture_output=True, timeout=_LIMIT, check=False)


def lines(*words: str, stdin: bytes = b"", limit: float = _LIMIT, **variables: str) -> list[dict[str, Any]]:
    """Run a command that must succeed; return the JSON lines that it printed."""
    done = run(*words, stdin=stdin, cwd=None, limit=limit, **variables)
    assert (done.returncode, done.stderr) == (0, b""), (words, done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


class Terminal:
    """A command under a pseudo terminal of 200 columns.

    Attributes:
        shown: output so far, including standard error.
    """

    def __init__(self, *words: str, cwd: Path | None = None, **variables: str) -> None:
        self._side, other = pty.openpty()
        self.shown = ""
        sized = {"TERM": "xterm", "COLUMNS": "200", "LINES": "50", **variables}
        self._process = Process(words, environment(**sized), cwd, terminal=other)
        os.close(other)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.__exit__(kind, error, trace)
        os.close(self._side)

    def type(self, text: str) -> None:
        r"""Press keys; ``\x03`` is ^C."""
        os.write(self._side, text.encode())

    def wait_for(self, text: str, seconds: float = _LIMIT) -> None:
        """Read until a text is printed."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} was not printed: {self.shown!r}"

    def end(self, seconds: float = _LIMIT) -> int:
        """Read until the command ends; return its exit code."""
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
