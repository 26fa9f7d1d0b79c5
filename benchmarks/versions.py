"""Versions of what a run of all benchmarks measures: this package, its peers, the servers and the machine."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.request import urlopen

__all__ = ("commit", "is_dirty", "machine", "node_version", "versions")

_ROOT = Path(__file__).parents[1]
_PACKAGES = (
    "anyio",
    "uvloop",
    "asyncnsq",
    "pynsq",
    "gnsq",
    "celery",
    "faststream",
    "nats-py",
    "redis",
    "opentelemetry-sdk",
    "prometheus_client",
    "pyspark",
    "pyarrow",
    "sqlalchemy",
    "psycopg",
)
_SERVERS = {
    "redis-server": ("redis-server", "--version"),
    "nats-server": ("nats-server", "--version"),
    "postgres": ("postgres", "--version"),
    "java": ("java", "-version"),
    "go": ("go", "version"),
}
_RABBITMQ = Path("/usr/lib/rabbitmq/lib")
_MODULES = re.compile(r"^require (\S+) (\S+)$", re.MULTILINE)
_NUMBER = re.compile(r"\d+(\.\d+)+\S*")


def _git(*words: str) -> str:
    found = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return found.stdout.strip()


def commit() -> str:
    """Return the commit of this tree."""
    return _git("rev-parse", "--short=10", "HEAD")


def is_dirty() -> bool:
    """Return whether files of this tree differ from its commit."""
    return bool(_git("status", "--porcelain", "--untracked-files=no"))


def machine() -> str:
    """Return the cores, the processor, the memory and the kernel."""
    model = ""
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        model = f" ({found[1]})" if found else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores{model}, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def node_version(lookupd: str) -> str:
    """Return the version of the nodes that a lookup node lists."""
    with urlopen(f"http://{lookupd}/nodes") as response:
        answer = json.load(response)
    return str((answer.get("data") or answer)["producers"][0]["version"])


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    lines = (done.stdout or done.stderr).splitlines()
    found = _NUMBER.search(lines[0]) if lines else None
    return found[0].strip('"') if found else "unknown"


def versions(nsqd: str, redesigned: str, original: str) -> dict[str, str]:
    """Return versions by name; what is not installed or not given is missing.

    Args:
        nsqd: path of another nsqd.
        redesigned: lookup node of a real redesigned cluster.
        original: lookup node of a real cluster of the original generation.
    """
    found = {platform.python_implementation(): platform.python_version(), "nsqext": version("nsqext")}
    if nsqd:
        found["nsqd"] = _first_line(nsqd, "-version")
    for generation, lookupd in (("redesigned", redesigned), ("original", original)):
        if lookupd:
            found[f"real cluster, {generation}"] = node_version(lookupd)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found |= {name: _first_line(*words) for name, words in _SERVERS.items() if shutil.which(words[0])}
    for folder in sorted(_RABBITMQ.glob("rabbitmq_server-*")):
        found["rabbitmq-server"] = folder.name.partition("-")[2]
    for peer in ("go_peer", "go_peer_redesigned"):
        found |= _required(_ROOT / "benchmarks" / peer / "go.mod")
    return found


def _required(module: Path) -> dict[str, str]:
    names: Sequence[tuple[str, str]] = _MODULES.findall(module.read_text(encoding="utf-8"))
    return {name: number for name, number in names if name.endswith("go-nsq")}
