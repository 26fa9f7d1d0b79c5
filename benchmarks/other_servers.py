"""Servers of other message systems, each in a process of its own, with its data in a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

__all__ = ("Server", "installed", "nats", "rabbitmq", "redis")

_RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Debian's; the program of this name in the path runs it as another user."""
_PATIENT = 120.0


class Server(NamedTuple):
    """A running server: its URL, and the id of its process."""

    url: str
    pid: int


def installed(name: str) -> bool:
    """Return whether the program of a server is on this machine."""
    return _RABBITMQ.exists() if name == "rabbitmq-server" else shutil.which(name) is not None


@contextmanager
def redis() -> Iterator[Server]:
    """Run a Redis that appends to a file."""
    port = _free_port()
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "yes"]
    with tempfile.TemporaryDirectory() as folder, _running(command, port, cwd=folder) as pid:
        yield Server(f"redis://127.0.0.1:{port}/0", pid)


@contextmanager
def nats() -> Iterator[Server]:
    """Run a NATS with JetStream."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["nats-server", "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", folder]
        with _running(command, port) as pid:
            yield Server(f"nats://127.0.0.1:{port}", pid)


@contextmanager
def rabbitmq() -> Iterator[Server]:
    """Run a RabbitMQ."""
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "RABBITMQ_NODENAME": f"bench_{token_hex(4)}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(_free_port()),
            "RABBITMQ_MNESIA_BASE": folder,
            "RABBITMQ_LOG_BASE": folder,
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
            "HOME": folder,
        }
        with _running([str(_RABBITMQ)], port, env=env) as pid:
            yield Server(f"amqp://guest:guest@127.0.0.1:{port}//", pid)


@contextmanager
def _running(
    command: list[str], port: int, *, cwd: str | None = None, env: dict[str, str] | None = None
) -> Iterator[int]:
    process = subprocess.Popen(  # noqa: S603
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + _PATIENT
        while not _listens(port):
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"{command[0]} does not start")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0
