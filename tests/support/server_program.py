"""Run `nsqext nsqd`, `nsqlookupd` and `broker` like a test harness."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.command_line import Process, started

__all__ = ("LOCAL", "Program", "running")

LOCAL = ("-tcp-address", "127.0.0.1:0", "--http-address=127.0.0.1:0")


class Program:
    """A running program and the addresses that it logged on stderr."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lines: list[str] = []

    def address(self, kind: str) -> str:
        """Return the address that it listens on for ``TCP``, ``HTTP`` or ``HTTPS``."""
        assert self.process.stderr is not None
        marker = f" INFO: {kind}: listening on "
        while not (found := [line for line in self.lines if marker in line]):
            line = self.process.stderr.readline().decode()
            assert line, self.lines
            self.lines.append(line)
        return found[0].rpartition(" ")[2].strip()

    def printed(self) -> str:
        """Return the next line of standard output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line, self.lines
        return line.strip()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; return the exit status after stderr was closed."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        self.lines += errors.decode().splitlines()
        return self.process.wait()


@contextmanager
def running(*words: str, cwd: Path | None = None) -> Iterator[Program]:
    with started(*words, cwd=cwd) as process:
        yield Program(process)
