"""Draw bugs from operators over the rooms that hold promises, and run the tests of their room.

``python -m tests.mutation --count 60`` prints what each mutant was found by, and lists the survivors. A mutant meets
the tests that run its line. ``--at lookup/http.py:70`` puts in every mutant of a line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from random import Random

from attrs import frozen

from tests.mutation.equivalent import reason_of
from tests.mutation.operators import Mutant, mutants_of, source_of
from tests.mutation.reach import Reach
from tests.mutation.rooms import NAMED, ROOMS

ROOT = Path(__file__).parents[2]
COPIED = ("nsqext", "tests", "docs", "examples", "pyproject.toml", "pyspark_nsqext.py")

_TIMED_OUT = "the time limit"


@frozen
class Trial:
    """A module with a bug, and the tests that have to find it.

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


def named() -> Iterator[Trial]:
    """Yield the bugs that were not found once.

    Raises:
        LookupError: the code that a bug replaces does not exist any more.
    """
    for bug in NAMED:
        source = (ROOT / "nsqext" / bug.module).read_text()
        if bug.before not in source:
            raise LookupError(f"{bug.name}: {bug.module} has no {bug.before!r}")
        changed = source.replace(bug.before, bug.after, 1)
        if "DeliveryUnknown" in bug.after:
            changed = changed.replace(
                "import anyio\n", "import anyio\n\nfrom nsqext.errors import DeliveryUnknown\n", 1
            )
        yield Trial(bug.name, "named", bug.module, changed, bug.tests)


def sources_of(room: str) -> dict[str, str]:
    """Return path below the package -> source of each module of a room."""
    paths = sorted((ROOT / "nsqext" / room).rglob("*.py"))
    return {str(path.relative_to(ROOT / "nsqext")): path.read_text() for path in paths}


def mutants_in(sources: dict[str, str], places: list[str] | None, count: int, random: Random) -> list[Mutant]:
    """Return every mutant of some lines (``module:line``), or as many drawn ones if no lines are given."""
    every = [mutant for module, source in sources.items() for mutant in mutants_of(module, source)]
    if places:
        return [mutant for mutant in every if f"{mutant.module}:{mutant.line}" in places]
    return random.sample(every, min(len(every), count))


def trials(room: str, sources: dict[str, str], mutants: list[Mutant], reach: Reach) -> Iterator[Trial]:
    """Yield trials of mutants, with the tests that run their lines."""
    for mutant in mutants:
        source = source_of(mutant, sources[mutant.module])
        yield Trial(str(mutant), room, mutant.module, source, reach.of(mutant.module, mutant.line))


def run(trial: Trial, folders: Queue[Path], limit: float) -> tuple[Trial, str, float]:
    """Return by what a bug was found: a test, the time limit, or nothing."""
    if not trial.tests:
        return trial, "", 0.0
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
        f"@{arguments}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_PROFILE": "mutate",
    }
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        found = _TIMED_OUT
    else:
        lines = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
        found = (lines[0].split(" - ")[0] if lines else "an error of pytest") if ended.returncode else ""
    finally:
        path.write_text(right)
        folders.put(folder)
    return trial, found, time.monotonic() - began


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the mutants and list the survivors; 1 if one of the named bugs survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=60, help="mutants that are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--room", action="append", choices=tuple(ROOMS), help="only this room; may be repeated")
    parser.add_argument("--at", action="append", help="every mutant of module:line, none drawn; may be repeated")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of a mutant")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    rooms = given.room or list(ROOMS)
    totals: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="nsqext-mutants-") as temporary:
        folders: Queue[Path] = Queue()
        for number in range(given.processes + 1):
            folders.put(copied(Path(temporary, str(number))))
        unchanged = folders.get()
        try_one = partial(run, folders=folders, limit=given.limit)
        with ThreadPoolExecutor(given.processes) as pool:
            if not given.at:
                count_results(pool.map(try_one, named()), totals)
            for room in rooms:
                sources = sources_of(room)
                random = Random(f"{room} {given.seed}")
                wanted = mutants_in(sources, given.at, -(-given.count // len(rooms)), random)
                mutants = [mutant for mutant in wanted if not reason_of(mutant)]
                totals[room, "equivalent"] = len(wanted) - len(mutants)
                if mutants:
                    reach = Reach(unchanged, room, ROOMS[room], 10 * given.limit)
                    count_results(pool.map(try_one, trials(room, sources, mutants, reach)), totals)
    for room in ("named", *rooms):
        count = totals[room, "found"] + totals[room, "survived"]
        if count:
            say(
                f"{room:20} {totals[room, 'found']} of {count} found ({totals[room, 'timed out']} by the time limit), "
                f"{totals[room, 'equivalent']} more have no effect"
            )
    return bool(totals["named", "survived"])


def copied(folder: Path) -> Path:
    """Copy what the tests need to a new folder; return the folder."""
    folder.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    return folder


def count_results(results: Iterator[tuple[Trial, str, float]], totals: Counter[tuple[str, str]]) -> None:
    """Print and count results."""
    for trial, found, seconds in results:
        totals[trial.room, "found" if found else "survived"] += 1
        totals[trial.room, "timed out"] += found == _TIMED_OUT
        say(f"{'found' if found else 'SURVIVED':8} {seconds:6.1f} s  {trial.name}  {found or way(trial)}")


def way(trial: Trial) -> str:
    """Return how a mutant survived."""
    return f"{len(trial.tests)} tests run it" if trial.tests else "no test runs it"


if __name__ == "__main__":
    sys.exit(main())
