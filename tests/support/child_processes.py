"""The processes that a process has started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ("children", "kill_children")


def children(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes that a running process has started, oldest first; its threads may end meanwhile."""
    found: list[int] = []
    for task in (proc / str(pid) / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def kill_children(pid: int) -> None:
    """Kill the processes that a running process has started, by kill -9."""
    for child in children(pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
