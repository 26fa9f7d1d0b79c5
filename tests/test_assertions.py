"""Every test asserts something, expects an error, or calls a function that does, and every assertion can fail."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
_CHECK = re.compile(r"\b(?:assert|fail|fail_after|raise|raises|warns)\b")

# their calls raise where they should not
SILENT = {
    "test_any_bytes_are_read_or_refused_as_documented",
    "test_a_new_pyspark_is_accepted",
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


def silent_tests(files: Iterable[tuple[str, ast.Module]]) -> set[str]:
    """Return the names of tests in which nothing can fail but a call by itself; files are sources and their trees."""
    checking, others = set[str](), list[tuple[str, set[str]]]()
    for source, tree in files:
        lines = source.splitlines()
        for node in _defined(tree.body):
            if _CHECK.search("\n".join(lines[node.lineno - 1 : node.end_lineno]).partition(":")[2]):
                checking.add(node.name)
            else:
                others.append((node.name, _called(node)))
    while more := {name for name, called in others if name not in checking and called & checking}:
        checking |= more
    return {name for name, _ in others if name.startswith("test_")} - checking


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
    assert silent_tests([(source, ast.parse(source))]) == {"test_nothing"}


# Assertions that hold whatever the program does

# calls that return neither None nor a negative number, and iterators, which are true without items
_NEVER_NONE = {
    "abs",
    "bool",
    "dict",
    "int",
    "isinstance",
    "len",
    "list",
    "repr",
    "set",
    "sorted",
    "str",
    "sum",
    "tuple",
}
_ITERATORS = {"filter", "iter", "map", "reversed", "zip"}


def _always_true(test: ast.expr) -> bool:
    match test:
        case ast.Constant(value):
            return bool(value)
        case ast.Tuple() | ast.List() | ast.Set() as found:
            return not all(isinstance(element, ast.Starred) for element in found.elts)
        case ast.Dict(keys):
            return bool(keys)
        case ast.GeneratorExp() | ast.Lambda() | ast.JoinedStr():
            return True
        case ast.Call(ast.Name(name)):
            return name in _ITERATORS
        case ast.ListComp(generators=[one]) | ast.SetComp(generators=[one]) | ast.DictComp(generators=[one]):
            return not one.ifs and isinstance(one.iter, (ast.Tuple, ast.List, ast.Set)) and _always_true(one.iter)
        case ast.BoolOp(ast.Or(), values):
            return any(map(_always_true, values))
        case ast.IfExp(_, body, orelse):
            return _always_true(body) or _always_true(orelse)
        case ast.Compare(ast.Name() | ast.Attribute() as left, [ast.Eq() | ast.Is() | ast.LtE() | ast.GtE()], [right]):
            return ast.dump(left) == ast.dump(right)
        case ast.Compare(ast.Call(ast.Name(name)), [ast.IsNot()], [ast.Constant(None)]):
            return name in _NEVER_NONE
        case ast.Compare(ast.Call(ast.Name("len" | "abs")), [ast.GtE()], [ast.Constant(0)]) | ast.Compare(
            ast.Constant(0), [ast.LtE()], [ast.Call(ast.Name("len" | "abs"))]
        ):
            return True
    return False


def _accepts_any_error(call: ast.expr) -> bool:
    """Return whether a call is ``pytest.raises`` of an error of any class with any text."""
    match call:
        case ast.Call(func, [expected, *_], keywords) if _name(func) == "raises":
            kinds = expected.elts if isinstance(expected, ast.Tuple) else [expected]
            is_any = any(_name(kind) in ("BaseException", "Exception") for kind in kinds)
            return is_any and not any(keyword.arg in ("check", "match") for keyword in keywords)
    return False


def _has_no_values(call: ast.expr) -> bool:
    """Return whether a call is ``pytest.mark.parametrize`` without values."""
    match call:
        case ast.Call(ast.Attribute(attr="parametrize"), [_, ast.Tuple(elts=[]) | ast.List(elts=[]), *_]):
            return True
    return False


def _statements(body: list[Any]) -> Iterator[ast.AST]:
    """Yield statements, those in them, and decorators; a walk through all expressions takes ten times as long."""
    for node in body:
        yield node
        for part in ("decorator_list", "body", "orelse", "handlers", "cases", "finalbody"):
            yield from _statements(getattr(node, part, [])) if not isinstance(node, ast.expr) else ()


def vain_assertions(tree: ast.Module) -> list[str]:
    """Return the first lines of assertions that cannot fail, and of those that are never reached."""
    found: list[ast.AST] = []
    for node in _statements(tree.body):
        match node:
            case ast.Assert(test) if _always_true(test):
                found.append(node)
            case ast.With(items, body) | ast.AsyncWith(items, body):
                calls = [item.context_expr for item in items]
                if any(_accepts_any_error(call) for call in calls):
                    found.append(node)
                if any(isinstance(call, ast.Call) and _name(call.func) == "raises" for call in calls):
                    found += [part for part in body[1:] if isinstance(part, ast.Assert)]  # after what raises
            case ast.For(iter=ast.Tuple(elts=[]) | ast.List(elts=[])):
                found.append(node)
            case ast.Expr(call) | (ast.Call() as call) if _has_no_values(call):
                found.append(call)
    return [ast.unparse(node).partition("\n")[0] for node in found]


def test_every_test_and_every_assertion_can_fail() -> None:
    vain: dict[str, list[str]] = {}

    def files() -> Iterator[tuple[str, ast.Module]]:
        for path in TESTS.rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            vain[str(path.relative_to(TESTS))] = vain_assertions(tree)
            yield source, tree

    found = silent_tests(files())
    assert found - SILENT == set(), "assert what these tests find"
    assert SILENT - found == set(), "delete these from SILENT"
    assert {path: lines for path, lines in vain.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "assert (value == 1, 'text')",
        "assert (item for item in items)",
        "assert map(call, items)",
        "assert value or 'text'",
        "assert value.name == value.name",
        "assert str(error) is not None",
        "assert [call(item) for item in (1, 2)]",
        "assert value == 1 if flag else [2]",
        "assert len(items) >= 0",
        "assert 0 <= len(items)",
        "with pytest.raises(Exception):",
        "with pytest.raises((ValueError, Exception)):",
        "for item in ():",
        "pytest.mark.parametrize('name', [])",
    ],
)
def test_an_assertion_that_cannot_fail_is_found(line: str) -> None:
    body = "    call()" if line.endswith(":") else ""
    assert vain_assertions(ast.parse(f"{line}\n{body}")) == [line]


def test_an_assertion_that_is_never_reached_is_found() -> None:
    source = "with pytest.raises(ValueError):\n    call()\n    assert done\nassert done"
    assert vain_assertions(ast.parse(source)) == ["assert done"]


@pytest.mark.parametrize("line", ["assert call()", "assert [item for item in items]", "assert value is not None"])
def test_an_assertion_that_can_fail_is_none_of_these(line: str) -> None:
    assert vain_assertions(ast.parse(line)) == []
