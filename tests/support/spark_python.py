"""Start the Python processes of Spark by forking one that has imported PySpark and the package.

Spark starts an interpreter for the plan of each stream and for each kind of worker, which imports PySpark from a zip
file, without cached bytecode: more than a second of CPU time each. A new interpreter is still what
`tests.spark.exactly_once`, `tests.spark.cluster_run` and ``test_shipped_source.py`` run.
"""

from __future__ import annotations

import os
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import nsqext.spark
from tests.support.command_line import ROOT
from tests.support.command_server import run_requests

__all__ = ("forked_python",)

_LAUNCHER = Path(__file__).with_name("python_launcher.py")
_MODULES = (
    *("pandas", "pyspark.worker", "pyspark_nsqext", "anyio._backends._asyncio"),
    # not the module of filters that are pushed down, by which the source knows which process it is in
    *("pyspark.sql.worker.plan_data_source_read", "pyspark.sql.worker.write_into_data_source"),
)
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Libraries start no threads, which do not survive a fork."""


@contextmanager
def forked_python() -> Iterator[str]:
    """Give the path of a program for ``PYSPARK_PYTHON`` that runs ``-m`` and ``-c`` in a forked process."""
    with tempfile.TemporaryDirectory(prefix="spark") as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        address, program = Path(folder, "requests"), Path(folder, "python")
        own.bind(str(address))
        words = (sys.executable, "-I", "-S", str(_LAUNCHER), str(address))
        program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        program.chmod(0o755)
        # the hash seed is the one that Spark gives to its workers
        environment = os.environ | _THREADS | {"PYTHONPATH": ROOT, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.support.spark_python", str(own.fileno())]
        server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, pass_fds=[own.fileno()])
        with server:  # ends with its standard input
            yield str(program)


def _import_all() -> None:
    for name in _MODULES:
        import_module(name)
    for module in walk_packages(nsqext.spark.__path__, "nsqext.spark."):
        import_module(module.name)


def _run(option: str, name: str, *arguments: str) -> None:
    """Run ``python OPTION NAME ARGUMENTS`` in this process."""
    path = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = dict.fromkeys((str(Path.cwd()), *path, *sys.path[1:]))
    sys.argv = [option, *arguments]
    if option == "-c":
        exec(name, {"__name__": "__main__"})  # noqa: S102 (a program that PySpark or the package wrote)
        return
    assert option == "-m", f"the tests' Python for Spark has no option {option}"
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve requests; in a forked process, run what Spark asked for."""
    _import_all()
    run_requests(lambda request: _run(*request["words"]), sys.stdin.fileno())


if __name__ == "__main__":
    main()
