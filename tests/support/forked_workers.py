"""Fork the workers of a parallel run from one process that has imported and collected the tests.

Each worker did both: 8 seconds of CPU time, and 17 in a fresh clone, where each one compiled the tests too.
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
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import _pytest.config
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
    """Run something in a forked process, which ends then; return its process id."""
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
    """Collect the tests as a worker does, and fork workers until the process that starts them ends."""
    os.close(end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(_THREADS)
    compiler = _compiler(config)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # what this session prints
    os.close(nothing)
    from xdist.remote import setup_config  # type: ignore[import-untyped]

    prepared = _pytest.config._prepareconfig([str(word) for word in config.invocation_params.args])
    setup_config(prepared, None)
    prepared.workerinput = {"workerid": "collects"}  # type: ignore[attr-defined]
    workers = _Workers(prepared, lambda: _fork_workers(control, owner), compiler)
    prepared.pluginmanager.register(workers)
    with suppress(Exception, SystemExit, KeyboardInterrupt):
        prepared.hook.pytest_cmdline_main(config=prepared)
    _fork_workers(control, owner)()  # this session could not collect: each worker tries, and reports why


def _fork_workers(control: socket.socket, owner: int) -> Callable[[], None]:
    """Fork workers. Returns in a worker: what it runs; the process itself ends."""
    from tests.support.command_server import end as end_process
    from tests.support.command_server import serve

    gc.freeze()
    request = serve(control, owner)
    if request is None:
        os._exit(0)
    control.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger().handlers.clear()  # those of the other process
    *_, program = request["words"]

    def run() -> None:
        try:
            exec(program, {"__name__": "__main__"})  # noqa: S102 (execnet's)
            end_process(0)
        except BaseException:
            traceback.print_exc()
        finally:  # what called this is the business of the other process
            os._exit(1)

    return run


def _compiler(config: pytest.Config) -> int | None:
    """Start a second process that compiles the sources of a fresh clone; return its process id."""
    files = _files(config)
    if not files or any(map(_is_compiled, files)):
        return None

    def compile_last() -> None:
        with warnings.catch_warnings():
            apply_warning_filters(config.getini("filterwarnings"), config.known_args_namespace.pythonwarnings or [])
            for file in reversed(files[len(files) // 2 :]):
                # a worker reports what a module raises, because the tests are imported again
                with suppress(Exception, pytest.skip.Exception):
                    import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))

    return _forked(compile_last)


def _is_compiled(file: Path) -> bool:
    cached = Path(cache_from_source(str(file)))
    return any(cached.parent.glob(f"{cached.stem}-pytest-*"))


def _files(config: pytest.Config) -> list[Path]:
    """Return the modules of the tests that are run, and of their configuration."""
    found: dict[Path, None] = {}
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.partition("::")[0])
        files = sorted([*path.rglob("conftest.py"), *path.rglob("test_*.py")]) if path.is_dir() else [path]
        found |= dict.fromkeys(file for file in files if file.is_relative_to(config.rootpath))
    return list(found)


class _Workers:
    """A plugin that forks workers when a session has collected, and gives them the session.

    Args:
        config: of the session.
        fork: returns in each worker: what it runs.
        compiler: process id of the second process, which has ended before.
    """

    def __init__(self, config: pytest.Config, fork: Callable[[], Callable[[], None]], compiler: int | None) -> None:
        self._config = config
        self._fork = fork
        self._compiler = compiler
        self._session: pytest.Session | None = None
        self._failed: list[pytest.CollectReport] = []
        self._warnings: list[dict[str, Any]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a report for the workers."""
        if self._session is None and not report.passed:
            self._failed.append(report)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: Any, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Keep a warning for the workers."""
        if self._session is None:
            found = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
            self._warnings.append(found)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Fork instead of running the tests; a worker runs them within this call."""
        if self._session is not None:
            return
        self._session = session
        if self._compiler is not None:
            os.waitpid(self._compiler, 0)
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()
        run = self._fork()
        module: Any = _pytest.config
        prepare = module._prepareconfig

        def prepared(*_: object) -> pytest.Config:
            module._prepareconfig = prepare  # tests start sessions too
            return self._config

        module._prepareconfig = prepared
        run()

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int | None:
        """Run the tests of a worker, where pytest would begin a session and collect again."""
        session = self._session
        if session is None:
            return None
        capture: Any
        folders: Any
        capture, folders = map(config.pluginmanager.get_plugin, ("capturemanager", "tmpdir"))
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folders.pytest_configure(config)  # the worker has its own
        (interactor,) = (found for found in config.pluginmanager.get_plugins() if hasattr(found, "torun"))
        interactor.pytest_sessionstart(session=session)
        interactor.pytest_collection()
        for report in self._failed:
            interactor.pytest_collectreport(report=report)
        for warning in self._warnings:
            interactor.pytest_warning_recorded(**warning)
        interactor.pytest_collection_finish(session=session)
        session.exitstatus = _run(config, session)
        config.hook.pytest_sessionfinish(session=session, exitstatus=session.exitstatus)
        config._ensure_unconfigure()
        return session.exitstatus


def _run(config: pytest.Config, session: pytest.Session) -> pytest.ExitCode:
    try:
        config.hook.pytest_runtestloop(session=session)
    except KeyboardInterrupt:
        return pytest.ExitCode.INTERRUPTED
    except BaseException:
        config.notify_exception(pytest.ExceptionInfo.from_current(), config.option)
        return pytest.ExitCode.INTERNAL_ERROR
    return pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
