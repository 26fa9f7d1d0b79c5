"""Bugs that are put into functions of a module that is imported already."""

from __future__ import annotations

import ast
import gc
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from tests.campaigns.mutation.code_swap import swap
from tests.campaigns.mutation.operators import Mutant, mutants_of, tree_of

SOURCE = """
from functools import wraps

LIMIT = 3
DOUBLE = [LIMIT + LIMIT]


def logged(function):
    @wraps(function)
    def call(*args):
        return function(*args)

    return call


@logged
def below(number, limit=5):
    return number < limit


class Counter:
    first = 1

    def __init__(self):
        self.count = 0

    def add(self):
        def step(by):
            return self.count + by

        self.count = step(2)
        return self.count
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that is imported from a file."""
    path = tmp_path / "swapped.py"
    path.write_text(SOURCE)
    spec = spec_from_file_location("swapped", path)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "swapped", found)
    spec.loader.exec_module(found)
    return found


def put_in(module: Any, operator: str, before: str) -> bool:
    """Put a mutant in; return whether that was possible."""
    (mutant,) = (one for one in mutants_of("swapped.py", SOURCE) if (one.operator, one.before) == (operator, before))
    file = module.__file__
    functions = [
        found for found in gc.get_objects() if type(found) is FunctionType
    ]  # a dead weak proxy has no __class__
    mine = [function for function in functions if function.__code__.co_filename == file]
    return swap(mine, file, SOURCE, tree_of(mutant, SOURCE))


def test_a_function_behind_a_decorator_is_changed(module: Any) -> None:
    assert not module.below(5)
    assert put_in(module, "Lt to LtE", "number < limit")
    assert module.below(5)


def test_a_function_in_a_method_is_changed_for_existing_objects(module: Any) -> None:
    counter = module.Counter()
    assert counter.add() == 2
    assert put_in(module, "plus and minus", "self.count + by")
    assert counter.add() == 0


def test_a_constant_is_changed_also_where_it_was_imported(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    importer = ModuleType("importer")
    vars(importer).update(LIMIT=module.LIMIT, OTHER=module.LIMIT)
    monkeypatch.setitem(sys.modules, "importer", importer)
    assert put_in(module, "number + 1", "3")
    assert (module.LIMIT, module.DOUBLE, importer.LIMIT, importer.OTHER) == (4, [8], 4, 3)


def test_what_else_runs_while_the_module_is_imported_cannot_be_changed(module: Any) -> None:
    assert not put_in(module, "number + 1", "1")
    assert module.Counter.first == 1


def test_the_other_nodes_of_a_changed_tree_keep_their_lines() -> None:
    mutants: list[Mutant] = list(mutants_of("swapped.py", SOURCE))
    assert len({(mutant.line, mutant.operator, mutant.before) for mutant in mutants}) == len(mutants) > 5
    lines = [node.lineno for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.stmt)]
    for mutant in mutants:
        assert [node.lineno for node in ast.walk(tree_of(mutant, SOURCE)) if isinstance(node, ast.stmt)] == lines
