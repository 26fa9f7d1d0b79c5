"""Attributes are documented in one way, which Sphinx renders correctly.

Sphinx interprets text before a colon in the first line of an attribute or property as a type.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

from tests.support.programs import ROOT

_LITERAL = re.compile(r"`+[^`]*`+")
_BESIDE = re.compile(r"\S  (#[: ]) ?(?!noqa|type:|pragma|pyright)\S.*$")
_MODULES = sorted((ROOT / "nsqext").rglob("*.py"))


def public(name: str) -> bool:
    """Return whether a name is public."""
    return not name.startswith("_")


def described(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield attributes and properties with their docstrings."""
    for statement, following in pairwise([*body, ast.Pass()]):
        if isinstance(statement, ast.ClassDef) and public(statement.name):
            yield from described(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.FunctionDef) and public(statement.name):
            decorators = {ast.unparse(decorator) for decorator in statement.decorator_list}
            if decorators & {"property", "cached_property"}:
                yield f"{prefix}{statement.name}", ast.get_docstring(statement) or ""
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            said = following.value if isinstance(following, ast.Expr) else None
            if isinstance(said, ast.Constant) and isinstance(said.value, str) and public(name := ast.unparse(target)):
                yield f"{prefix}{name}", said.value


def commented(source: str) -> Iterator[tuple[str, str]]:
    """Yield comments that describe an attribute; of longer ones the first line."""
    previous = ""
    for number, line in enumerate(source.splitlines(), 1):
        before, mark, said = line.partition("#: ")
        if mark and not (before.isspace() and previous.lstrip().startswith("#: ")):
            yield f"line {number}", said
        previous = line


@cache
def parsed() -> dict[str, tuple[str, ast.Module]]:
    """Return the source and the syntax tree of each module of the package."""
    sources = {str(module.relative_to(ROOT)): module.read_text(encoding="utf-8") for module in _MODULES}
    return {name: (source, ast.parse(source)) for name, source in sources.items()}


def test_no_first_line_is_taken_for_a_type() -> None:
    found = [
        (f"{module}: {name}", said)
        for module, (source, tree) in parsed().items()
        for name, said in (*described(tree.body), *commented(source))
    ]
    assert len(found) > 100
    assert [where for where, said in found if ":" in _LITERAL.sub("", said.partition("\n")[0])] == []


class Forms:
    """Forms in which a module documents its attributes and constants, and breaches of CONTRIBUTING's rule."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        lines = list(enumerate(source.splitlines(), 1))
        self.above = {number: line.strip()[:2] for number, line in lines if line.lstrip().startswith("#")}
        self.beside = {number: found[1] for number, line in lines if (found := _BESIDE.search(line))}
        self.count = 0
        self.wrong: list[str] = []
        self.compare(tree.body, "text")
        for statement in tree.body:
            self.enter(statement)

    def enter(self, statement: ast.stmt) -> None:
        """Compare the forms in a class and its `__init__`."""
        if isinstance(statement, ast.ClassDef):
            typed_dictionary = any(keyword.arg == "total" for keyword in statement.keywords)
            self.compare(statement.body, "text" if typed_dictionary else "#:")
            for inner in statement.body:
                self.enter(inner)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            self.compare(statement.body, "#:", why_above=True)

    def compare(self, body: Sequence[ast.stmt], form: str, *, why_above: bool = False) -> None:
        """Compare the forms of the names that a body assigns; a plain comment above may say why the value is so."""
        for statement, following in pairwise([*body, ast.Pass()]):
            if not isinstance(statement, ast.Assign | ast.AnnAssign):
                continue
            name = name_of(statement)
            if why_above and not name.startswith("self."):
                continue
            name = name.removeprefix("self.")
            if "." in name:
                continue
            forms = {self.beside.get(line) for line in lines_of(statement)}
            above = self.above.get(statement.lineno - 1)
            forms |= {None if why_above and above == "# " else above}
            forms |= {"text" if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) else None}
            forms -= {None}
            self.count += bool(forms)
            if forms - {form if public(name) else "# "}:
                self.wrong.append(f"line {statement.lineno}: {name}")


def name_of(statement: ast.Assign | ast.AnnAssign) -> str:
    """Return the name that a statement assigns; of several the first."""
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    return ast.unparse(target.elts[0] if isinstance(target, ast.Tuple) else target)


def lines_of(statement: ast.stmt) -> range:
    """Return the lines of a statement."""
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def test_attributes_and_constants_are_documented_in_one_form() -> None:
    modules = {name: Forms(source, tree) for name, (source, tree) in parsed().items()}
    assert sum(module.count for module in modules.values()) > 500
    assert [f"{name}: {wrong}" for name, module in modules.items() for wrong in module.wrong] == []
