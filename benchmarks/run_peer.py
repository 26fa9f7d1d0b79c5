"""Run one peer in a separate process, and build the peer in Go if Go is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from itertools import count
from pathlib import Path

__all__ = ("CLIENTS", "available", "new_topic", "run_peer")

CLIENTS = ("raw", "nsqext", "uvloop", "go-nsq", "asyncnsq", "pynsq")
"""All peers; uvloop is nsqext on that event loop."""

_ROOT = Path(__file__).parents[1]
_MODULES = {"uvloop": "uvloop", "asyncnsq": "asyncnsq", "pynsq": "nsq", "gnsq": "gnsq", "faststream": "faststream.nats"}
_number = count(1)


def new_topic() -> str:
    """Return a topic that no other measurement uses."""
    return f"bench_{os.getpid()}_{next(_number)}"


@cache
def available(client: str) -> bool:
    """Return whether a peer can run on this machine."""
    if client == "go-nsq":
        return _go_peer() is not None
    module = _MODULES.get(client)
    if module is None:
        return True
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0  # noqa: S603


@cache
def _go_peer() -> Path | None:
    """Build the peer in Go below ``build``; return its path, or None if Go or its module is missing."""
    go = shutil.which("go")
    if go is None:
        return None
    program = _ROOT / "build" / "go_peer"
    source = _ROOT / "benchmarks" / "go_peer"
    built = subprocess.run([go, "build", "-o", str(program), "."], cwd=source, capture_output=True, text=True)  # noqa: S603
    if built.returncode:
        print(f"the Go client is left out: {built.stderr.strip()[:300]}", file=sys.stderr)
        return None
    return program


def run_peer(client: str, mode: str, amount: int, address: str, topic: str, **numbers: int) -> dict[str, float]:
    """Return ``rate`` (messages a second) and ``cpu`` (microseconds of the client's CPU per message).

    Args:
        client: one of `CLIENTS`.
        mode: see `benchmarks.peer`.
        amount: number of messages.
        address: address of nsqd, or that of lookup with a scheme.
        topic: name of the topic, or prefix of the names of several topics.
        numbers: size, topics, connections, handlers, threads.
    """
    words = [mode, str(amount), address, topic, *(f"{name}={value}" for name, value in numbers.items())]
    if client == "go-nsq":
        command = [str(_go_peer()), *words]
    else:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peer", client, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)  # noqa: S603
    if done.returncode or not done.stdout:
        raise SystemExit(f"{client} {mode} failed:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
