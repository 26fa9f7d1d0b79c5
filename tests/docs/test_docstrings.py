"""Docstrings of attributes and properties are rendered correctly by Sphinx.

Sphinx interprets text before a colon in their first line as a type.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from tests.support.programs import ROOT

_LITERAL = re.compile(r"`+[^`]*`+")
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


def test_no_first_line_is_taken_for_a_type() -> None:
    sources = {module.relative_to(ROOT): module.read_text(encoding="utf-8") for module in _MODULES}
    found = [
        (f"{module}: {name}", said)
        for module, source in sources.items()
        for name, said in (*described(ast.parse(source).body), *commented(source))
    ]
    assert len(found) > 100
    assert [where for where, said in found if ":" in _LITERAL.sub("", said.partition("\n")[0])] == []
