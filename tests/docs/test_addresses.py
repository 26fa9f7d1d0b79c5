"""Examples give the address in one way: as the keyword ``lookupd``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import ROOT, snippets_of

# client -> number of its positional arguments before the address
_BEFORE = {"Admin": 0, "App": 0, "Consumer": 2, "Producer": 0}
_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def positional_addresses(code: str) -> Iterator[ast.expr]:
    """Yield the addresses that a program gives without their keyword."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            before = _BEFORE.get(name, len(node.args))
            if len(node.args) > before and not any(isinstance(given, ast.Starred) for given in node.args):
                yield node.args[before]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_the_keyword_of_the_address(page: Path) -> None:
    found = [
        f"{snippet.where}: {ast.unparse(address)}"
        for snippet in snippets_of(page)
        for address in positional_addresses(snippet.code)
    ]
    assert found == []


def test_the_example_programs_name_the_keyword_of_the_address() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): [ast.unparse(address) for address in positional_addresses(text)]
        for path in sorted((ROOT / "examples").rglob("*.py"))
        if (text := path.read_text(encoding="utf-8"))
    }
    assert {name: addresses for name, addresses in found.items() if addresses} == {}


def test_an_address_without_its_keyword_is_found() -> None:
    found = positional_addresses("nsqext.Producer('a:1')\nConsumer('t', 'c', x)\nApp(lookupd='b')\nConsumer('t', 'c')")
    assert [ast.unparse(address) for address in found] == ["'a:1'", "x"]
