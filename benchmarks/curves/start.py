"""CPU time to import the package and to start the command line, with a warm cache."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.curves.curve import Curve, Points

__all__ = ("CURVES",)

_PROGRAMS = {
    "python -c pass": ["-c", "pass"],
    "import attrs, anyio, orjson": ["-c", "import attrs, anyio, orjson"],
    "import httpx": ["-c", "import httpx"],
    "import nsqext; nsqext.Producer": ["-c", "import nsqext; nsqext.Producer"],
    "import nsqext; nsqext.Consumer": ["-c", "import nsqext; nsqext.Consumer"],
    "nsqext --help": ["-m", "nsqext", "--help"],
}


def _cpu(words: list[str], cache: str) -> float:
    """Return the milliseconds of CPU of a Python process, whose compiled modules are cached in a folder."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"COLUMNS": "100", "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True, env=environment)  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


@contextmanager
def _points() -> Iterator[Points]:
    with tempfile.TemporaryDirectory() as cache:
        for words in _PROGRAMS.values():
            _cpu(words, cache)  # writes the compiled modules
        yield {(name, 1.0): partial(_cpu, words, cache) for name, words in _PROGRAMS.items()}


CURVES = (
    Curve(
        "start",
        "Start of a process",
        "",
        "ms of CPU",
        "Modules that are imported: the package loads its parts when their names are first used, httpx with the first "
        "lookup, and TLS with the first connection that uses it.",
        _points,
        digits=0,
        note="User and system time of the whole process, the start of Python included; compiled modules are cached. "
        "Typer and rich take nine tenths of `--help`.",
    ),
)
