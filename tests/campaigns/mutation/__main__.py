"""Draw bugs from operators over the rooms that hold promises, and run the tests of their room.

``python -m tests.campaigns.mutation --count 60`` prints what found each mutant, and lists the survivors. A mutant meets
the tests that run its line. ``--at lookup/responses.py:70`` puts in every mutant of a line. ``--tests FILE`` runs the
tests of a file instead. ``--mistakes`` puts in those of the folder ``mistakes``, ``--named TEXT`` only some of them.
``--part 2/5`` puts in every fifth bug, from the second.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Queue
from random import Random
from typing import Any

import pytest
from attrs import frozen

from tests.campaigns.mutation.equivalent import reason_of
from tests.campaigns.mutation.mistake import Mistake, mistakes_of
from tests.campaigns.mutation.operators import Mutant, mutants_of, tree_of
from tests.campaigns.mutation.rooms import OTHER_TESTS, PROGRAMS, ROOMS
from tests.campaigns.mutation.warm import ROOT, Bug, Result, Room, Warm

COPIED = ("nsqext", "tests", "docs", "examples", "pyproject.toml", "pyspark_nsqext.py")


@frozen
class Trial:
    """A module with a bug, for which a new interpreter is started, and the tests that have to find it.

    Attributes:
        name: the bug.
        room: its room.
        module: path of the module below the package.
        source: the wrong source.
        tests: files, folders and names of tests; none if no test runs the line.
    """

    name: str
    room: str
    module: str
    source: str
    tests: tuple[str, ...]


def sources_of(room: str) -> dict[str, str]:
    """Return path below the package -> source of each module of a room: a module, or a folder without inner rooms."""
    folder = ROOT / "nsqext" / room
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    inner = [ROOT / "nsqext" / other for other in ROOMS if other.startswith(f"{room}/")]
    paths = [path for path in paths if not any(path.is_relative_to(other) for other in inner)]
    return {str(path.relative_to(ROOT / "nsqext")): path.read_text() for path in paths}


def mutants_in(sources: dict[str, str], places: list[str] | None, count: int, random: Random) -> list[Mutant]:
    """Return every mutant of some lines (``module:line``), or as many drawn ones if no lines are given."""
    every = [mutant for module, source in sources.items() for mutant in mutants_of(module, source)]
    if places:
        return [mutant for mutant in every if f"{mutant.module}:{mutant.line}" in places]
    return random.sample(every, min(len(every), count))


def drawn(sources: dict[str, str], mutants: list[Mutant]) -> list[Bug]:
    """Return the bugs that mutants are."""
    return [
        Bug(str(mutant), mutant.module, mutant.line, partial(tree_of, mutant, sources[mutant.module]))
        for mutant in mutants
    ]


def chosen(sources: dict[str, str], mistakes: tuple[Mistake, ...], named: list[str]) -> list[Bug]:
    """Return the bugs that mistakes with one of some texts in their names are."""
    return [
        Bug(mistake.name, mistake.module, mistake.line(source), partial(mistake.tree, source))
        for mistake in mistakes
        if any(text in mistake.name for text in named)
        for source in [sources[mistake.module]]
    ]


def apart(room: str, bug: Bug) -> Trial:
    """Return the trial of a bug that needs a new interpreter: its code runs at import, or in programs of the tests."""
    own = f"test_*{Path(bug.module).stem}*.py"
    first = [str(path.relative_to(ROOT)) for tests in ROOMS[room] for path in (ROOT / tests).rglob(own)]
    first += OTHER_TESTS.get(bug.module, ())
    # programs are slow: their module's tests are enough
    tests = first if first and room in PROGRAMS else [*first, *ROOMS[room]]
    return Trial(bug.name, room, bug.module, ast.unparse(bug.tree()), tuple(tests))


def run(trial: Trial, folders: Queue[Path], limit: float) -> tuple[Trial, str, float]:
    """Return by what a bug was found: a test, or nothing."""
    folder, began = folders.get(), time.monotonic()
    path = folder / "nsqext" / trial.module
    right = path.read_text()
    path.write_text(trial.source)
    arguments = folder / "arguments"
    arguments.write_text("\n".join(trial.tests))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--timeout=40",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-k",
        "not trio and not uvloop",
        "--keep-duplicates",  # the first file is a part of a folder that follows, and is run before it
        f"@{arguments}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "mutate",
    }
    process = started(command, cwd=folder, env=environment)
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        found = ""  # the tests that were left may have found it
    else:
        lines = [line for line in output.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
        found = (lines[0].split(" - ")[0] if lines else "an error of pytest") if process.returncode else ""
    finally:
        end(process)
        path.write_text(right)
        folders.put(folder)
    return trial, found, time.monotonic() - began


def started(command: list[str], **settings: Any) -> subprocess.Popen[str]:
    """Start a program in a session of its own, for `end`."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True, **settings
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the mutants and list the survivors; 1 if a mistake survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="mutants that are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", action="append", choices=tuple(ROOMS), help="only this room; may be repeated")
    parser.add_argument("--at", action="append", help="every mutant of module:line, none drawn; may be repeated")
    parser.add_argument("--mistakes", action="store_true", help="those of the folder mistakes, no mutants")
    parser.add_argument("--named", action="append", help="only mistakes with this in their name; may be repeated")
    parser.add_argument("--part", default="1/1", help="N/M: every M-th bug of a room, from the N-th")
    parser.add_argument("--tests", action="append", help="other tests than those of the room; may be repeated")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for the tests of a mutant")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    names = given.room or list(ROOMS)
    os.environ["HYPOTHESIS_PROFILE"] = "mutate"
    os.environ["NSQEXT_TEST_LOOPS"] = "every"  # and of these asyncio's
    first, step = map(int, given.part.split("/"))
    part = slice(first - 1, None, step)
    totals: Counter[tuple[str, str]] = Counter()
    rooms: list[Room] = []
    for name in names:
        sources, random = sources_of(name), Random(f"{name} {given.seed}")
        tests = tuple(given.tests or ROOMS[name])
        if given.mistakes:
            rooms.append(Room(name, tests, sources, chosen(sources, mistakes_of(name), given.named or [""])[part]))
            continue
        wanted = mutants_in(sources, given.at, -(-given.count // len(names)), random)[part]
        mutants = [mutant for mutant in wanted if not reason_of(mutant)]
        totals[name, "equivalent"] = len(wanted) - len(mutants)
        rooms.append(Room(name, tests, sources, drawn(sources, mutants)))
    later = [apart(room.name, bug) for room in rooms if room.name in PROGRAMS for bug in room.bugs]
    rooms = [room for room in rooms if room.name not in PROGRAMS]

    def report(result: Result) -> None:
        if result.swapped:
            count(result, totals)
        else:
            later.append(apart(result.room, result.bug))

    paths = sorted({path for room in rooms if room.bugs for path in room.tests})
    options = ["-s", "-qqq", "-p", "no:cacheprovider", "-o", "timeout=0"]
    if paths:
        pytest.main([*options, *paths], plugins=[Warm(rooms, given.processes, given.limit, say, report)])
    try_again(later, given.processes, 5 * given.limit, totals)
    for name in names:
        put_in = totals[name, "found"] + totals[name, "survived"]
        if put_in:
            say(
                f"{name:20} {totals[name, 'found']} of {put_in} found ({totals[name, 'timed out']} by the time limit), "
                f"{totals[name, 'equivalent']} more have no effect"
            )
    return given.mistakes and any(totals[name, "survived"] for name in names)


def try_again(trials: list[Trial], processes: int, limit: float, totals: Counter[tuple[str, str]]) -> None:
    """Run each of some trials in an interpreter of its own, and count what is found."""
    with tempfile.TemporaryDirectory(prefix="nsqext-mutants-") as temporary, ThreadPoolExecutor(processes) as pool:
        folders: Queue[Path] = Queue()
        for number in range(processes):
            folders.put(copied(Path(temporary, str(number))))
        for trial, found, seconds in pool.map(partial(run, folders=folders, limit=limit), trials):
            totals[trial.room, "found" if found else "survived"] += 1
            say(f"{'found' if found else 'SURVIVED':8} {seconds:6.1f} s  {trial.name}  {found}")


def copied(folder: Path) -> Path:
    """Copy what the tests need to a new folder; return the folder."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    return folder


def count(result: Result, totals: Counter[tuple[str, str]]) -> None:
    """Print and count a result."""
    totals[result.room, "found" if result.found else "survived"] += 1
    totals[result.room, "timed out"] += result.timed_out
    how = result.found or (f"{result.tests} tests run it" if result.tests else "no test runs it")
    how += " (time limit)" * result.timed_out
    verdict = "found" if result.found else "SURVIVED" if result.complete else "UNKNOWN"
    how += ", and not all have run: a larger --limit may find it" * (not result.complete)
    say(f"{verdict:8} {result.seconds:6.1f} s  {result.bug.name}  {how}")


if __name__ == "__main__":
    sys.exit(main())
