"""The page of HTTP routes lists exactly the served routes as served."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette

from docs.commands_table import commands
from nsqext import Admin
from nsqext.broker import Cluster
from nsqext.http import api as web
from tests.support import plain_http
from tests.support.programs import ROOT

if TYPE_CHECKING:
    from starlette.routing import Route

_SECTION = re.compile(r"^## (nsqd|nsqlookupd)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(
    r"^\| (GET|POST|PUT) `(\S+)` \| (?:both|redesigned|original) \| [^|]+ \| ([^|]*) \| ([^|]*) \| "
    r"(served|checked|left out)[ ;]",
    re.MULTILINE,
)
_GENERATION = re.compile(r"^\| \S+ \S+ \| (both|redesigned|original) \|", re.MULTILINE)
_PAGE = (ROOT / "docs" / "reference" / "routes.md").read_text(encoding="utf-8")
_LISTED = {
    (program, generation): [
        (method, path, fate)
        for (method, path, _, _, fate), found in zip(_ROW.findall(text), _GENERATION.findall(text), strict=True)
        if found in ("both", generation)
    ]
    for program, text in _SECTION.findall(_PAGE)
    for generation in ("redesigned", "original")
}


def _routes_of(generation: str, patch: pytest.MonkeyPatch) -> dict[str, set[tuple[str, str]]]:
    """Start a cluster, and return the methods and paths that its servers handle."""
    served: dict[str, set[tuple[str, str]]] = {}

    def make(*, routes: Sequence[Route], **others: Any) -> Starlette:
        found = {(method, route.path) for route in routes for method in route.methods or ()}
        served["nsqlookupd" if ("GET", "/lookup") in found else "nsqd"] = found
        return Starlette(routes=routes, **others)

    patch.setattr(web, "Starlette", make)
    with Cluster(nodes=1, generation=generation) as cluster:
        (node,) = cluster.nodes.values()
        assert plain_http.get(f"http://{node.http}/ping").text == "OK"  # the first request makes the application
        return served


@pytest.mark.parametrize(("name", "generation"), [("redesigned", "redesigned"), ("original", "original")])
def test_the_page_lists_the_served_routes(name: str, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _routes_of(generation, monkeypatch)
    for program in ("nsqd", "nsqlookupd"):
        listed = {(method, path): fate != "left out" for method, path, fate in _LISTED[program, name]}
        assert {route for route, there in listed.items() if there} == served[program]
        left_out = {path for (_, path), there in listed.items() if not there}
        assert [path for _, path in served[program] if any(fnmatchcase(path, pattern) for pattern in left_out)] == []


def test_every_row_is_read() -> None:
    assert len(_LISTED) == 4
    assert len(_ROW.findall(_PAGE)) == len(re.findall("^\\| [A-Z]+ `", _PAGE, re.MULTILINE))


def test_the_methods_and_commands_exist() -> None:
    rows = _ROW.findall(_PAGE)
    methods = {name for row in rows for name in re.findall(r"`(\w+)", row[2])}
    assert {name for name in methods if not hasattr(Admin, name)} == set()
    known = {name for name, _ in commands()}
    listed = {" ".join(word for word in text.split() if word[0] != "-") for row in rows for text in _texts(row[3])}
    assert listed - known == set()


def test_every_route_has_a_method_and_a_command_or_a_reason() -> None:
    for _, path, method, command, _ in _ROW.findall(_PAGE):
        for cell in (method.strip(), command.strip()):
            assert re.fullmatch(r"`[^()]+`|\([^()]+\)", re.sub(r"\(\w+=\w*\)", "", cell)), path


def test_every_method_and_every_command_of_a_server_is_listed() -> None:
    rows = _ROW.findall(_PAGE)
    methods = {name for row in rows for name in re.findall(r"`(\w+)", row[2])}
    public = {name for name in dir(Admin) if not name.startswith("_") and callable(getattr(Admin, name))}
    assert public - methods == {"aclose"}
    listed = {" ".join(word for word in text.split() if word[0] != "-") for row in rows for text in _texts(row[3])}
    groups = {name for name, _ in commands() if name.split()[0] in ("topic", "channel", "node")}
    assert groups - listed == set()


def test_every_method_is_called_by_a_contract_test() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests" / "contract").glob("test_*.py"))
    methods = {name for row in _ROW.findall(_PAGE) for name in re.findall(r"`(\w+)", row[2])}
    assert [name for name in sorted(methods) if not re.search(rf"\.{name}\b", text)] == []


def _texts(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)
