"""The lists of mistakes, equivalents and tests name what exists."""

from __future__ import annotations

import pytest

from tests.campaigns.mutation.__main__ import apart, chosen, sources_of
from tests.campaigns.mutation.equivalent import EQUIVALENT
from tests.campaigns.mutation.mistake import Mistake, mistakes_of
from tests.campaigns.mutation.rooms import OTHER_TESTS, PROGRAMS, ROOMS
from tests.campaigns.mutation.warm import ROOT


@pytest.mark.parametrize("room", ROOMS)
def test_mistakes_replace_code_that_occurs_once(room: str) -> None:
    sources, mistakes = sources_of(room), mistakes_of(room)
    assert sources
    assert len({mistake.name for mistake in mistakes}) == len(mistakes)
    assert len({(mistake.module, mistake.before, mistake.after) for mistake in mistakes}) == len(mistakes)
    for mistake in mistakes:
        source = sources[mistake.module]
        assert mistake.changed(source) != source, mistake.name
        assert mistake.tree(source).body, mistake.name  # it compiles


def test_files_of_mistakes_are_those_of_rooms() -> None:
    files = {path.stem for path in (ROOT / "tests/campaigns/mutation/mistakes").glob("*.diff")}
    assert files <= {room.replace("/", "_") for room in ROOMS}


def test_the_line_of_a_mistake_is_the_first_that_it_changes() -> None:
    mistake = Mistake("one statement less", "m.py", "a()\n    b()\n", "a()\n")
    assert mistake.line("def f():\n    a()\n    b()\n    c()\n") == 3
    with pytest.raises(LookupError, match="one statement less"):
        mistake.changed("a()\n    b()\n" * 2)


def test_tests_of_rooms_exist() -> None:
    named = (*ROOMS.values(), *OTHER_TESTS.values())
    assert [path for tests in named for path in tests if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("room", PROGRAMS)
def test_mistakes_in_programs_meet_the_tests_of_their_module(room: str) -> None:
    """All tests of such a room take minutes."""
    sources = sources_of(room)
    whole = [bug for bug in chosen(sources, mistakes_of(room), [""]) if set(apart(room, bug).tests) & {*ROOMS[room]}]
    assert [f"{bug.module}: {bug.name}" for bug in whole] == []


def test_equivalent_mutants_are_in_lines_that_exist() -> None:
    lines = {}
    for module in {key[0] for key in EQUIVALENT}:
        path = ROOT / "nsqext" / module
        lines[module] = {line.strip() for line in path.read_text().splitlines()} if path.exists() else set()
    assert [key for key in EQUIVALENT if key[2] not in lines[key[0]]] == []
