"""The lists of mistakes, equivalents and tests name what exists."""

from __future__ import annotations

import pytest

from tests.campaigns.mutation.__main__ import sources_of
from tests.campaigns.mutation.equivalent import EQUIVALENT
from tests.campaigns.mutation.mistake import Mistake, mistakes_of
from tests.campaigns.mutation.rooms import ROOMS
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
    assert [path for tests in ROOMS.values() for path in tests if not (ROOT / path).exists()] == []


def test_equivalent_mutants_are_in_lines_that_exist() -> None:
    lines = {}
    for module in {key[0] for key in EQUIVALENT}:
        path = ROOT / "nsqext" / module
        lines[module] = {line.strip() for line in path.read_text().splitlines()} if path.exists() else set()
    assert [key for key in EQUIVALENT if key[2] not in lines[key[0]]] == []
