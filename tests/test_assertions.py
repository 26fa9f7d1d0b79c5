"""Every test can fail: it asserts something, expects an error, or calls a function that does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parent
_CHECK = re.compile(r"\b(?:assert|fail|fail_after|raise|raises|warns)\b")

# their calls raise where they should not
SILENT = {
    "test_any_bytes_are_read_or_refused_as_documented",
    "test_a_new_pyspark_is_accepted",
    "test_rows_can_be_written_as_they_were_read",
    "test_the_largest_sizes_pass",
    "test_the_redesigned_programs_take_numbers",
}


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _called(node: ast.AST) -> set[str]:
    """Return the names of what is called, or given to a call as a function."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return {_name(part) for call in calls for part in (call.func, *call.args)}


def _defined(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield functions, classes and their methods."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body)


def silent_tests(sources: Iterable[str]) -> set[str]:
    """Return the names of tests in which nothing can fail but a call by itself."""
    checking, others = set[str](), list[tuple[str, set[str]]]()
    for source in sources:
        lines = source.splitlines()
        for node in _defined(ast.parse(source).body):
            if _CHECK.search("\n".join(lines[node.lineno - 1 : node.end_lineno]).partition(":")[2]):
                checking.add(node.name)
            else:
                others.append((node.name, _called(node)))
    while more := {name for name, called in others if name not in checking and called & checking}:
        checking |= more
    return {name for name, _ in others if name.startswith("test_")} - checking


def test_every_test_can_fail() -> None:
    found = silent_tests(path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    assert found - SILENT == set(), "assert what these tests find"
    assert SILENT - found == set(), "delete these from SILENT"


def test_a_test_without_an_assertion_is_found() -> None:
    source = """
def helper(value):
    assert value
def test_by_helper():
    helper(1)
def test_by_callback(): call(helper)
async def test_nothing():
    for value in []:
        call(value)
"""
    assert silent_tests([source]) == {"test_nothing"}
