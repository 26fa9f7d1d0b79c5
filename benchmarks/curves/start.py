"""CPU time to import the package and to start the command line, with a warm cache."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from benchmarks.curves.curve import Curve, Points
from benchmarks.servers import original_nsqd, redesigned_cluster

__all__ = ("CURVES", "PROGRAMS", "commands", "program_cpu", "server_cpu", "words_cpu")

PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "import attrs, anyio, orjson": ["-c", "import attrs, anyio, orjson"],
    "import httpx": ["-c", "import httpx"],
    "import nsqext; nsqext.Producer": ["-c", "import nsqext; nsqext.Producer"],
    "import nsqext; nsqext.Consumer": ["-c", "import nsqext; nsqext.Consumer"],
    "nsqext --help": ["-m", "nsqext", "--help"],
    "nsqext pub --help": ["-m", "nsqext", "pub", "--help"],
    "Cluster(nodes=3)": ["-c", "from nsqext.broker import Cluster; Cluster(nodes=3).start().stop()"],
}

_LISTENERS = ("TCP: listening on ", "HTTP: listening on ")


def _environment(cache: str) -> dict[str, str]:
    environment = os.environ | {"COLUMNS": "100", "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e3


def program_cpu(name: str, cache: str) -> float:
    """Return the milliseconds of CPU of one of `PROGRAMS`, whose compiled modules are cached in a folder."""
    return words_cpu(PROGRAMS[name], cache)


def words_cpu(words: Sequence[str], cache: str) -> float:
    """Return the milliseconds of CPU of Python with these arguments."""
    before = _children_cpu()
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(cache))  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
    return _children_cpu() - before


def commands(nsqd: str, lookupd: str) -> dict[str, list[str]]:
    """Return commands that need a server, by name: the arguments of Python."""
    return {
        "nsqext pub, one message": ["-m", "nsqext", "pub", "bench_start", "hello", "--nsqd", nsqd],
        "nsqext topic list": ["-m", "nsqext", "topic", "list", "--lookupd", lookupd],
    }


def server_cpu(cache: str) -> tuple[float, float]:
    """Start ``nsqext nsqd``, and end it once it listens.

    Returns:
        Milliseconds of CPU of the process, and milliseconds from the signal to its end.
    """
    before = _children_cpu()
    with tempfile.TemporaryDirectory() as folder:
        words = ("-tcp-address", "127.0.0.1:0", "-http-address", "127.0.0.1:0", "-data-path", folder)
        command = [sys.executable, "-m", "nsqext", "nsqd", *words]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment(cache)) as process:  # noqa: S603
            listening = 0
            while listening < len(_LISTENERS) and (line := process.stderr.readline() if process.stderr else ""):
                listening += any(listener in line for listener in _LISTENERS)
            began = time.perf_counter()
            process.terminate()
            process.wait()
            stop = time.perf_counter() - began
    return _children_cpu() - before, stop * 1e3


@contextmanager
def _points() -> Iterator[Points]:
    with tempfile.TemporaryDirectory() as cache, original_nsqd() as nsqd, redesigned_cluster() as cluster:
        programs = PROGRAMS | commands(nsqd.tcp, cluster.removeprefix("http://"))
        for words in programs.values():
            words_cpu(words, cache)  # writes the compiled modules
        yield {(name, 1.0): partial(words_cpu, words, cache) for name, words in programs.items()}


CURVES = (
    Curve(
        "start",
        "Start of a process",
        "",
        "ms of CPU",
        "Modules that are imported: the package loads its parts when their names are first used, httpcore with the "
        "first lookup, and TLS with the first connection that uses it.",
        _points,
        digits=0,
        note="User and system time of the whole process, the start of Python included; compiled modules are cached. "
        "Typer takes most of `--help`; at a terminal, rich takes 100 ms more.",
    ),
)
