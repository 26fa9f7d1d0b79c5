"""The rooms of the package and the direction of their imports, read from the sources without running them."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import nsqext

PACKAGE = Path(nsqext.__file__).parent
ROOT = "nsqext"  # the package itself: its public names

BASE = {"errors", "types"}
PROTOCOL = BASE | {"protocol"}
TRANSPORT = PROTOCOL | {"transport"}
LOOKUP = TRANSPORT | {"lookup"}
CLIENT = LOOKUP | {"client", "dispatch", "settings"}
PUBLIC = CLIENT | {ROOT}

# room -> the rooms it may import, besides itself and private modules of the package (`nsqext._version`)
ALLOWED: dict[str, set[str]] = {
    ROOT: CLIENT | {"app", "observability", "sync"},
    "__main__": {"cli"},
    "errors": {"types"},  # one level: which of the two imports the other is free, and a cycle is an error of its own
    "types": {"errors"},
    "dispatch": {"errors", "protocol"},  # one hash for partitions and key ranges: nsqext.protocol.hashing, see below
    "protocol": BASE,
    "transport": PROTOCOL,
    "lookup": TRANSPORT,
    "settings": BASE,
    "client": CLIENT,
    "broker": PROTOCOL | {"dispatch"},
    "sync": PUBLIC,
    "app": PUBLIC | {"observability"},
    "observability": PUBLIC,
    "spark": PUBLIC | {"sync"},
    "testing": PUBLIC | {"broker", "sync"},
    "cli": PUBLIC | {"app", "broker", "observability", "sync", "testing"},
}

CORE = {"anyio", "attrs", "httpx", "orjson", "tenacity"}

# room -> third-party packages it may import at the top of a module; a room that is not named here may import CORE
THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "types": {"attrs"},
    "dispatch": set(),
    "protocol": {"attrs", "orjson"},
    "broker": CORE | {"starlette", "uvicorn"},
    "spark": CORE | {"numpy", "pandas", "pyarrow", "pyspark"},
    "observability": CORE | {"opentelemetry", "prometheus_client"},
    "testing": CORE | {"pytest"},
    "cli": CORE | {"rich", "typer"},
}

# packages of extras, imported by the function that needs them
LAZY: dict[str, set[str]] = {
    "protocol": {"cramjam"},
    "transport": {"cramjam"},
    "broker": {"cramjam"},
}


class Import(NamedTuple):
    """One imported module of one source file."""

    file: Path
    line: int
    module: str
    at_top: bool
    relative: bool

    @property
    def where(self) -> str:
        """File and line, for a message."""
        return f"nsqext/{self.file.relative_to(PACKAGE).as_posix()}:{self.line}"

    @property
    def room(self) -> str:
        """The room that the importing file belongs to."""
        return room_of(self.file)

    @property
    def target(self) -> str:
        """The room that is imported; the top-level name of a package that is not ours."""
        head, _, rest = self.module.partition(".")
        if head != ROOT:
            return head
        return rest.partition(".")[0] or ROOT


def room_of(file: Path) -> str:
    """Name the room of a source file: its folder below the package, or the module itself."""
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return ROOT if first == "__init__" else first


def is_module(name: str) -> bool:
    """Tell whether ``nsqext.<name>`` is a module and not a name that the package exports."""
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def imports_of(file: Path) -> list[Import]:
    """List what a file imports, in functions and under TYPE_CHECKING too."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    found: list[Import] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == ROOT:
                names = [f"{ROOT}.{alias.name}" if is_module(alias.name) else ROOT for alias in node.names]
        else:
            continue
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        found += [Import(file, node.lineno, name, id(node) not in inside, relative) for name in names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [found for file in FILES for found in imports_of(file)]
OWN = [found for found in IMPORTS if found.module.partition(".")[0] == ROOT]
FOREIGN = [found for found in IMPORTS if found.target not in sys.stdlib_module_names | {ROOT} and found not in OWN]


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file) for file in FILES}
    assert {room for room in rooms if not room.startswith("_")} <= ALLOWED.keys()


def test_imports_are_absolute() -> None:
    assert [found.where for found in IMPORTS if found.relative] == []


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    wrong = [
        f"{found.where} imports {found.module}"
        for found in OWN
        if found.room == room
        and found.target not in ALLOWED[room] | {room}
        and not (found.target.startswith("_") and is_module(found.target))
    ]
    assert wrong == []


def test_private_modules_import_only_errors_and_types() -> None:
    private = [found for found in OWN if found.room.startswith("_") and found.room not in ALLOWED]
    assert [f"{found.where} imports {found.module}" for found in private if found.target not in BASE] == []


def test_rooms_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for found in OWN:
        if found.target not in {ROOT, found.room} and found.room != ROOT:
            graph.setdefault(found.room, set()).add(found.target)
    assert list(TopologicalSorter(graph).static_order()) != [] or graph == {}


def test_nothing_imports_an_event_loop() -> None:
    loops = {"asyncio", "trio", "uvloop"}
    assert [found.where for found in IMPORTS if found.module.partition(".")[0] in loops] == []


def test_third_party_packages_are_the_ones_that_a_room_may_need() -> None:
    wrong: list[str] = []
    for found in FOREIGN:
        allowed = THIRD_PARTY.get(found.room, CORE)
        if not found.at_top:
            allowed = allowed | LAZY.get(found.room, set())
        if found.target not in allowed:
            wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


def test_dispatch_takes_nothing_but_the_hash_from_the_protocol() -> None:
    found = {found.module for found in OWN if found.room == "dispatch" and found.target == "protocol"}
    assert found == {"nsqext.protocol.hashing"}


def test_the_walk_sees_imports() -> None:
    """Guard against a test that passes because it finds nothing."""
    assert any(found.room == "protocol" and found.target == "errors" for found in OWN)
    assert any(found.room == "types" and found.target == "attrs" for found in FOREIGN)
