"""Operators that change one place of a module: a comparison, a number, a condition, a statement that is left out.

Not drawn is what has no effect in any module: bounds between two moments (``now >= due`` and ``now > due`` differ when
the clock shows exactly that moment, for which there is no rule), log records and other texts, how classes are made,
sizes of caches, and large numbers outside of functions, which are chosen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from copy import deepcopy

from attrs import frozen

__all__ = ("Mutant", "mutants_of", "tree_of")

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_FORM = ("eq", "init", "frozen", "repr", "order", "kw_only", "slots", "alias", "compare", "strict", "total", "maxsize")
"""How a class is made, checks of equal lengths, sizes of caches: without an effect on right code."""
_CHOSEN = 8
"""Numbers outside of functions from which on they are chosen limits, sizes and times."""
_WORDS = ("logger.", "log(", "log.", "warnings.", "self._log(")
"""What only produces text: a changed log record loses no message."""
_BOUNDS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MOMENTS = re.compile(r"now|due|until|since|deadline|horizon|began|started|received|delivered|\w+_(at|due|until|since)")
_CLOCKS = ("_clock", "clock", "current_time", "monotonic")


@frozen
class Mutant:
    """One change of one module.

    Attributes:
        module: path of the module below the package.
        line: where.
        number: the place of the changed node in the walk over the module.
        operator: what is changed.
        before: the code there.
        text: the line, without its indentation.
    """

    module: str
    line: int
    number: int
    operator: str
    before: str
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} {self.operator}: {self.before}"


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    lines = source.splitlines()
    for number, node in enumerate(_places(ast.parse(source))):
        for operator in _operators(node):
            before, line = " ".join(ast.unparse(node).split())[:90], getattr(node, "lineno", 1)
            yield Mutant(module, line, number, operator, before, lines[line - 1].strip())


def tree_of(mutant: Mutant, source: str) -> ast.Module:
    """Return a module with one change; its other nodes keep their lines."""
    tree = ast.parse(source)
    node = next(node for number, node in enumerate(_places(tree)) if number == mutant.number)
    changed = ast.copy_location(_changed(deepcopy(node), mutant.operator), node)

    class Replace(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return changed if visited is node else self.generic_visit(visited)

    Replace().visit(tree)
    return ast.fix_missing_locations(tree)


def _places(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that may be changed, without annotations, texts and imports for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.arguments | ast.JoinedStr):
            continue
        if _only_words(node):
            continue
        if isinstance(node, ast.keyword) and node.arg in _FORM and isinstance(node.value, ast.Constant):
            continue
        if (
            isinstance(tree, ast.Module | ast.ClassDef)
            and isinstance(node, ast.Assign | ast.AnnAssign)
            and _chosen(node)
        ):
            continue
        yield node
        yield from _places(node.value if isinstance(node, ast.AnnAssign) and node.value is not None else node)


def _chosen(node: ast.Assign | ast.AnnAssign) -> bool:
    numbers = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and type(part.value) is int]
    return bool(numbers) and max(numbers) >= _CHOSEN


def _only_words(node: ast.AST) -> bool:
    """Return whether a statement is a text or a log record, perhaps under a condition."""
    match node:
        case ast.Expr(ast.Constant()):
            return True
        case ast.Expr(ast.Await(value) | value):
            return isinstance(value, ast.Call) and ast.unparse(value).startswith(_WORDS)
        case ast.If(body=body, orelse=[]):
            return all(map(_only_words, body))
        case _:
            return False


def _is_moment(*sides: ast.expr) -> bool:
    """Return whether one of some values is a moment, or a time since or until a moment."""
    for side in () if any(isinstance(side, ast.Name) and side.id == "inf" for side in sides) else sides:
        match side:
            case ast.Name(name) | ast.Attribute(attr=name) if _MOMENTS.fullmatch(name):
                return True
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name), args=[]) if name in _CLOCKS:
                return True
            case ast.BinOp(left, ast.Add() | ast.Sub(), right) if _is_moment(left, right):
                return True
            case ast.Call(ast.Name("max" | "min"), args=parts) if _is_moment(*parts):
                return True
            case _:
                pass
    return False


def _operators(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if isinstance(op, _BOUNDS) and _is_moment(node.left, *node.comparators):
            return
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            yield f"{type(op).__name__} to {_COMPARISONS[type(op)].__name__}"
        case ast.BoolOp(op=op):
            yield "and to or" if isinstance(op, ast.And) else "or to and"
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield "number + 1"
        case ast.Constant(value=bool()):
            yield "other bool"
        case ast.UnaryOp(op=ast.Not()):
            yield "without not"
        case ast.If() | ast.While() if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            yield "opposite condition"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "left out"
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            yield "plus and minus"


def _changed(node: ast.AST, operator: str) -> ast.AST:
    match node:
        case ast.Compare():
            node.ops = [_COMPARISONS[type(node.ops[0])]()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.Constant(value=bool(value)):
            return ast.Constant(not value)
        case ast.Constant(value=int(number)):
            return ast.Constant(number + 1)
        case ast.UnaryOp():
            return node.operand
        case ast.If() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.BinOp():
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        case _:
            return ast.Pass()
    return node
