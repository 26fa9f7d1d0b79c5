"""A throw-away PostgreSQL server: its own data, a Unix socket, no port."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ("PACKAGED", "PostgresMissing", "postgres_server")

PACKAGED = "/usr/lib/postgresql"
"""Where Debian keeps the programs, by version."""
_USER = "postgres"
_START = 30.0
"""Seconds."""


class PostgresMissing(SystemExit):
    """A program of PostgreSQL is not installed."""


def _program(name: str) -> str:
    """Return the path of a program of the server, which Debian's packages keep out of PATH."""
    versions = sorted(Path(PACKAGED).glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which(name)
    if found is None:
        raise PostgresMissing(f"PostgreSQL is missing ({name} was not found): apt-get install postgresql")
    return found


def _account() -> pwd.struct_passwd | None:
    """Return the account of the server: it refuses to run as root; `None` stays with the user of this process."""
    if os.geteuid() != 0:
        return None
    accounts = {account.pw_name: account for account in pwd.getpwall() if account.pw_uid != 0}
    if not accounts:
        raise SystemExit("PostgreSQL does not run as root, and there is no other account: useradd postgres")
    return accounts.get(_USER) or max(accounts.values(), key=lambda account: account.pw_uid)


@contextmanager
def postgres_server() -> Iterator[str]:
    """Run a server with an empty database; return what libpq connects to.

    Raises:
        PostgresMissing: PostgreSQL is not installed.
    """
    initdb, postgres, is_ready = map(_program, ("initdb", "postgres", "pg_isready"))
    account = _account()
    user, group = (account.pw_uid, account.pw_gid) if account else (None, None)
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: the path of a socket has 107 characters at most
    try:
        if account is not None:
            os.chown(folder, account.pw_uid, account.pw_gid)
        data = folder / "data"
        init = (initdb, "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        subprocess.run(init, user=user, group=group, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        settings = ("listen_addresses=", f"unix_socket_directories={folder}", "fsync=off")
        command = (postgres, "-D", str(data), *(word for one in settings for word in ("-c", one)))
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, user=user, group=group, cwd=folder, stdout=log, stderr=log)
        try:
            address = f"host={folder} user={_USER} dbname=postgres"
            _wait_ready(server, (is_ready, "-q", "-d", address), folder / "log")
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


def _wait_ready(server: subprocess.Popen[bytes], ready: tuple[str, ...], log: Path) -> None:
    deadline = time.monotonic() + _START
    while subprocess.run(ready, check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"PostgreSQL did not start: {log.read_text(errors='replace')}")
        time.sleep(0.05)
