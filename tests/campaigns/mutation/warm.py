"""A warm interpreter: the tests are collected once, and a process is forked for each mutant.

A mutant costs what its tests take until one of them fails, without a new interpreter, imports and collection.
"""

from __future__ import annotations

import ast
import hashlib
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.campaigns.mutation.code_swap import functions_by_file, swap
from tests.campaigns.mutation.reach import LineTrace, Reach

__all__ = ("Bug", "Result", "Room", "Warm")

ROOT = Path(__file__).parents[3]
_KEPT = ROOT / ".pytest_cache" / "reach"
_FORK = get_context("fork")
_PLAIN = ("asyncio", {"use_uvloop": False})
_MEMORY = 8 << 30
_FILE = 1 << 30
_PATIENCE = 3.0
"""Seconds that a test may take longer than five times as long as without a bug."""
_SERVER = 20.0
"""Seconds that it may take longer if it is the first of its process that uses PostgreSQL, and starts the server."""


@frozen
class Bug:
    """A change of one module.

    Attributes:
        name: what is changed.
        module: path of the module below the package.
        line: where.
        tree: returns the changed module.
    """

    name: str
    module: str
    line: int
    tree: Callable[[], ast.Module]


@frozen
class Room:
    """A folder or module of the package, and what is put into it.

    Attributes:
        name: path below the package.
        tests: folders and files of the tests that have to find its bugs.
        sources: path of a module below the package -> its source.
        bugs: what is put in.
    """

    name: str
    tests: tuple[str, ...]
    sources: dict[str, str]
    bugs: list[Bug]


@frozen
class Result:
    """What happened to a bug.

    Attributes:
        room: name of its room.
        bug: what was put in.
        found: the test that failed twice, or None.
        timed_out: whether this test reached its time limit.
        seconds: how long it took.
        tests: how many tests run its line.
        complete: whether all of them were run, or one has found it.
        swapped: whether it could be put into the running interpreter.
    """

    room: str
    bug: Bug
    found: str | None
    timed_out: bool
    seconds: float
    tests: int
    swapped: bool = True
    complete: bool = True


class Warm:
    """A plugin of pytest that runs mutants instead of the collected tests.

    Only tests on asyncio's own loop are run, and those that need no JVM.

    Args:
        rooms: what is put in.
        processes: mutants at a time.
        limit: seconds for a mutant.
        say: prints a line.
        report: is called with each result.
    """

    def __init__(
        self,
        rooms: Sequence[Room],
        processes: int,
        limit: float,
        say: Callable[[str], None],
        report: Callable[[Result], None],
    ) -> None:
        self._rooms, self._processes, self._limit = rooms, processes, limit
        self._say, self._report = say, report
        self._items: dict[str, pytest.Item] = {}
        self._files: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the mutants of all rooms."""
        if session.testsfailed:
            raise session.Interrupted("the tests cannot be collected")
        self._items = {item.nodeid: item for item in session.items if _suits(item)}
        self._files = {name: str(item.path.relative_to(ROOT)) for name, item in self._items.items()}
        for room in self._rooms:
            for module in room.sources if room.bugs else ():
                import_module(_name_of(module))  # some are imported when they are used
        self._functions = functions_by_file()
        for room in self._rooms:
            if room.bugs:
                self._run_room(room)
        return True

    def _run_room(self, room: Room) -> None:
        began = time.monotonic()
        folders = [Path(path) for path in room.tests]
        tests = [n for n, file in self._files.items() if any(Path(file).is_relative_to(path) for path in folders)]
        reach, unknown = Reach(), defaultdict[str, list[str]](list)
        for test in tests:
            unknown[self._files[test]].append(test)
        for file in list(unknown):
            with suppress(FileNotFoundError):
                reach.add(pickle.loads(self._kept(room, file, unknown[file]).read_bytes()))  # noqa: S301 - own file
                del unknown[file]
        for part, file in self._forks(self._measure, [(room, file, some) for file, some in unknown.items()]):
            reach.add(part)
            if not part.failed:
                self._kept(room, file, unknown[file]).write_bytes(pickle.dumps(part))
        self._say(f"{room.name}: {len(tests)} tests, {time.monotonic() - began:.0f} s")
        for test in sorted(reach.failed):
            self._say(f"fails without a bug: {test}")
        kills: Counter[str] = Counter()

        def parts() -> Iterator[tuple[object, ...]]:
            for bug in room.bugs:
                ordered = reach.of(bug.module, room.sources[bug.module], bug.line, self._files, kills)
                yield room, bug, ordered, reach.seconds

        for result, test in self._forks(self._try, parts()):
            kills[test] += 1
            self._report(result)

    def _forks(self, function: Callable[..., object], parts: Any) -> Iterator[Any]:
        """Yield what a function returns for each part, in a process of its own."""
        waiting = iter(parts)
        running: dict[Connection, ForkProcess] = {}
        while True:
            while len(running) < self._processes and (part := next(waiting, None)) is not None:
                mine, theirs = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_send, args=(theirs, function, part))
                process.start()
                theirs.close()
                running[mine] = process
            if not running:
                return
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                yield ready.recv()
                running.pop(ready).join()
                ready.close()

    def _kept(self, room: Room, file: str, tests: list[str]) -> Path:
        """Return where the reach of a test file is kept, as long as what it depends on stays the same."""
        _KEPT.mkdir(parents=True, exist_ok=True)
        key = room.name, sorted(room.sources.items()), tests, (ROOT / file).read_bytes(), _shared()
        return _KEPT / hashlib.sha256(repr(key).encode()).hexdigest()

    def _measure(self, room: Room, file: str, tests: list[str]) -> tuple[Reach, str]:
        """Run the tests of a file without a bug."""
        reach, begun = Reach(), 0.0
        trace = LineTrace(f"{ROOT}/nsqext/{room.name}")
        with trace:
            for event, test in self._events(tests, lambda test: trace.ran.clear(), stop=False):
                if event == "begin":
                    begun = time.monotonic()
                elif event == "failed":
                    reach.failed.add(test)
                else:
                    reach.seconds[test] = time.monotonic() - begun
                    for path, line in tuple(trace.ran):  # other threads add to it
                        module = str(Path(path).relative_to(ROOT / "nsqext"))
                        reach.tests.setdefault(module, {}).setdefault(line, set()).add(test)
        return reach, file

    def _try(self, room: Room, bug: Bug, tests: list[str], seconds: dict[str, float]) -> tuple[Result, str | None]:
        """Put a bug in, and run tests until one of them fails twice."""
        began = time.monotonic()
        file, source = str(ROOT / "nsqext" / bug.module), room.sources[bug.module]
        if not swap(self._functions[file], file, source, bug.tree()):
            return Result(room.name, bug, None, False, 0.0, len(tests), swapped=False), None
        left, found, timed_out = deque(tests), None, False
        while left and found is None and time.monotonic() - began < self._limit:
            failed, _ = self._fails(list(left), seconds, 1, began + self._limit)
            if failed is None:
                break
            while left.popleft() != failed:
                pass
            again, timed_out = self._fails([failed], seconds, 2, inf)
            found = failed if again is not None else None
        took = time.monotonic() - began
        complete = found is not None or took < self._limit
        return Result(room.name, bug, found, timed_out, took, len(tests), complete=complete), found

    def _fails(self, tests: list[str], seconds: dict[str, float], patience: int, end: float) -> tuple[str | None, bool]:
        """Return the first test that fails in a new process until a time, and whether it reached its time limit."""
        mine, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=self._run_tests, args=(theirs, tests))
        process.start()
        theirs.close()
        running = tests[0]
        first = next((test for test in tests if self._uses_postgres(test)), None)
        try:
            while time.monotonic() < end:
                starts = _SERVER if running == first else 0.0
                if not mine.poll(patience * (_PATIENCE + 5 * seconds.get(running, 0.0)) + starts):
                    return running, True
                try:
                    event, running = mine.recv()
                except EOFError:  # the process ended in the middle of a test
                    return running, False
                if event == "failed":
                    return running, False
                if event == "done":
                    break
            return None, False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            mine.close()
            shutil.rmtree(_folder(process.pid), ignore_errors=True)

    def _uses_postgres(self, test: str) -> bool:
        return "postgresql" in test or "postgres" in getattr(self._items[test], "fixturenames", ())

    def _run_tests(self, results: Connection, tests: list[str]) -> None:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        folder = _folder(os.getpid())
        folder.mkdir(exist_ok=True)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        for event in self._events(tests, lambda test: None, stop=True):
            results.send(event)
        results.send(("done", tests[-1]))
        os._exit(0)

    def _events(self, tests: list[str], begin: Callable[[str], None], *, stop: bool) -> Iterator[tuple[str, str]]:
        """Run tests in this process; yield when each of them begins and ends, and that it failed."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        failures: list[str] = []

        class Listener:
            def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
                if report.failed:
                    failures.append(report.nodeid)

        config = self._items[tests[0]].config
        config.pluginmanager.register(Listener())
        for number, test in enumerate(tests):
            begin(test)
            yield "begin", test
            item = self._items[test]
            following = self._items[tests[number + 1]] if number + 1 < len(tests) else None
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if failures:
                yield "failed", test
                if stop:
                    os._exit(1)
                failures.clear()
            yield "end", test


@cache
def _shared() -> str:
    """Return a hash of what tests share and of this measurement; other rooms hardly change what a test runs."""
    content = hashlib.sha256(Path(__file__).with_name("reach.py").read_bytes())
    shared = ROOT.glob("tests/**/conftest.py"), ROOT.glob("tests/support/*.py")
    for path in (*sorted(shared[0]), *sorted(shared[1])):
        content.update(path.read_bytes())
    return content.hexdigest()


def _send(results: Connection, function: Callable[..., object], part: tuple[object, ...]) -> None:
    results.send(function(*part))
    results.close()


def _folder(pid: int | None) -> Path:
    return Path(tempfile.gettempdir(), f"nsqext-mutant-{pid}")


def _name_of(module: str) -> str:
    return f"nsqext.{module.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"


def _suits(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("anyio_backend", _PLAIN) in (_PLAIN, _PLAIN[0]) and "spark" not in getattr(
        item, "fixturenames", ()
    )
