"""A throw-away PostgreSQL server: its own data, a Unix socket, no port."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ("postgres_server",)

_PACKAGED = "/usr/lib/postgresql"
_USER = "postgres"
_START = 30.0
"""Seconds."""


def _program(name: str) -> str:
    """Return the path of a program of the server, which Debian's packages keep out of PATH."""
    versions = sorted(Path(_PACKAGED).glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is missing: install PostgreSQL (apt-get install postgresql)")
    return found


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server with an empty database; return what libpq connects to."""
    user = _USER if os.geteuid() == 0 else None  # the server refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: the path of a socket has 107 characters at most
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        init = (_program("initdb"), "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        subprocess.run(init, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        settings = ("listen_addresses=", f"unix_socket_directories={folder}", "fsync=off")
        command = (_program("postgres"), "-D", str(data), *(word for one in settings for word in ("-c", one)))
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, user=user, cwd=folder, stdout=log, stderr=log)
        try:
            address = f"host={folder} user={_USER} dbname=postgres"
            _wait_ready(server, address, folder / "log")
            yield address
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_ready(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    ready = (_program("pg_isready"), "-q", "-d", address)
    deadline = time.monotonic() + _START
    while subprocess.run(ready, check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"PostgreSQL did not start: {log.read_text(errors='replace')}")
        time.sleep(0.05)
