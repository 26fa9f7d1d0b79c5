"""The lists of bugs, equivalents and tests name what exists."""

from __future__ import annotations

from tests.campaigns.mutation.__main__ import named
from tests.campaigns.mutation.equivalent import EQUIVALENT
from tests.campaigns.mutation.rooms import NAMED, ROOMS
from tests.campaigns.mutation.warm import ROOT


def test_named_bugs_replace_code_that_exists() -> None:
    assert [trial.name for trial in named()] == [bug.name for bug in NAMED]


def test_tests_of_rooms_and_of_named_bugs_exist() -> None:
    paths = [path for tests in ROOMS.values() for path in tests] + [path for bug in NAMED for path in bug.tests]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_equivalent_mutants_are_in_lines_that_exist() -> None:
    lines = {}
    for module in {key[0] for key in EQUIVALENT}:
        path = ROOT / "nsqext" / module
        lines[module] = {line.strip() for line in path.read_text().splitlines()} if path.exists() else set()
    assert [key for key in EQUIVALENT if key[2] not in lines[key[0]]] == []
