"""The order in which a bug meets the tests that run its line."""

from __future__ import annotations

from collections import Counter

import anyio
import anyio.lowlevel

from tests.campaigns.mutation.reach import LineTrace, Reach

SOURCE = """def double(number):
    return sum(
        (number, number),
    )
"""
FILES = {"own": "tests/test_double.py", "slow": "tests/test_double.py", "other": "tests/a.py", "kills": "tests/b.py"}


def reach() -> Reach:
    """Return what three tests run; another one runs the head of the function only."""
    tests = {"double.py": {1: {"head"}, 2: {"own", "slow"}, 3: {"other", "kills", "broken"}}}
    return Reach(tests, dict.fromkeys(FILES, 0.1) | {"slow": 2.0}, {"broken"})


def test_fast_tests_of_the_module_come_first_then_those_that_found_bugs() -> None:
    files = FILES | {"broken": "tests/a.py"}
    for line in (2, 3, 4):  # lines of one statement
        assert reach().of("double.py", SOURCE, line, files, Counter({"kills": 3})) == ["own", "kills", "other", "slow"]
    assert reach().of("double.py", SOURCE, 3, files, Counter())[:3] == ["own", "other", "kills"]


def test_a_constant_meets_the_tests_of_its_module() -> None:
    measured = Reach(
        {"double.py": {2: {"own"}, 3: {"other", "slow"}}}, dict.fromkeys(FILES, 0.1) | {"slow": 2.0}, set()
    )
    assert measured.of("double.py", f"{SOURCE}LIMIT = 3\n", 5, FILES, Counter()) == ["own", "other", "slow"]


def test_reaches_of_several_files_are_added() -> None:
    both = reach()
    both.add(Reach({"double.py": {2: {"new"}}}, {"new": 0.2}, set()))
    assert both.tests["double.py"][2] == {"own", "slow", "new"}
    assert (both.seconds["new"], both.failed) == (0.2, {"broken"})
    assert both.of("none.py", SOURCE, 2, FILES, Counter()) == []


async def _cancelled() -> None:
    with anyio.move_on_after(0.001):
        await anyio.sleep_forever()
    await anyio.lowlevel.checkpoint()


async def _caller() -> None:
    await _cancelled()
    await anyio.lowlevel.checkpoint()


def test_lines_behind_a_cancellation_are_seen() -> None:
    trace = LineTrace(__file__)
    with trace:
        anyio.run(_caller)
    for function, last in ((_cancelled, 3), (_caller, 2)):
        first = function.__code__.co_firstlineno
        lines = {line for _, line in trace.ran if first < line <= first + last}
        assert lines == set(range(first + 1, first + last + 1))
