"""Fork the workers of a parallel run from one process that has imported the tests.

Each worker imported all of them: 5 seconds of CPU time, and 14 in a fresh clone, where each one compiled them too.
"""

from __future__ import annotations

import gc
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import apply_warning_filters

__all__ = ("fork_workers",)

_LAUNCHER = Path(__file__).with_name("python_launcher.py")
_THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Libraries start no threads, which do not survive a fork."""


def fork_workers(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Let xdist start its workers by a program that has them forked.

    Args:
        config: of the process that starts them.
        specs: of the workers, as execnet takes them.
    """
    folder = tempfile.mkdtemp(prefix="workers")  # not a TemporaryDirectory, which workers would remove at their end
    address = Path(folder, "requests")
    owner, end = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as control:
        control.bind(str(address))
        pid = _forked(lambda: _serve(config, control, owner, end))
    os.close(owner)

    def stop() -> None:
        os.close(end)
        os.waitpid(pid, 0)
        shutil.rmtree(folder)

    config.add_cleanup(stop)
    for spec in specs:
        spec.python = shlex.join((sys.executable, "-I", "-S", str(_LAUNCHER), str(address)))


def _forked(action: Callable[[], None]) -> int:
    """Run something in a forked process, which ends then; returns its process id."""
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:  # what called this is the business of the other process
        os._exit(code)


def _serve(config: pytest.Config, control: socket.socket, owner: int, end: int) -> None:
    """Import the tests, and fork workers until the process that starts them ends."""
    os.close(end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(_THREADS)
    names = _names(config)
    with warnings.catch_warnings():
        apply_warning_filters(config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or [])
        # in a fresh clone the sources are compiled, by two processes
        other = _forked(lambda: _import(reversed(names[len(names) // 2 :])))
        _import(names)
    os.waitpid(other, 0)
    from tests.support.command_server import end as end_process
    from tests.support.command_server import serve

    gc.freeze()
    request = serve(control, owner)
    if request is None:
        return
    control.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()  # those of the other process
    *_, program = request["words"]
    exec(program, {"__name__": "__main__"})  # noqa: S102 (execnet's)
    end_process(0)


def _names(config: pytest.Config) -> list[str]:
    """Return the modules of the tests that are run, and of their configuration."""
    found: dict[str, None] = {}
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        files = sorted([*path.rglob("conftest.py"), *path.rglob("test_*.py")]) if path.is_dir() else [path]
        for file in files:
            if file.is_relative_to(config.rootpath):
                found[".".join(file.relative_to(config.rootpath).with_suffix("").parts)] = None
    return list(found)


def _import(names: Any) -> None:
    """Import modules; a worker reports what a module raises, because it imports that one again."""
    for name in names:
        with suppress(Exception, pytest.skip.Exception):
            import_module(name)
