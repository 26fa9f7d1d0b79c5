"""The rooms of the package and the direction of their imports, read from the sources without importing them.

Three levels are checked: rooms (the folders directly below ``nsqext``), the folders inside a room, and single files. No
circle is allowed at any level, by any kind of import.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import nsqext

PACKAGE = Path(nsqext.__file__).parent
ROOT = "nsqext"  # the package itself: its public names

BASE = {"arguments", "errors", "types"}
PROTOCOL = BASE | {"protocol"}
TRANSPORT = PROTOCOL | {"transport", "waits"}
LOOKUP = TRANSPORT | {"http", "lookup", "settings", "settings_text"}
CLIENT = LOOKUP | {"client", "key_ranges", "waits"}
PUBLIC = CLIENT | {"admin", ROOT}

# room -> the rooms it may import, besides itself and private modules of the package (`nsqext._version`)
ALLOWED: dict[str, set[str]] = {
    ROOT: CLIENT | {"admin", "app", "sync"},
    "__main__": {"cli"},
    "errors": {"types"},  # one level: which of the two imports the other is free, and a cycle is an error of its own
    "types": {"errors"},
    "key_ranges": {
        "arguments",
        "errors",
        "protocol",
    },  # one hash for partitions and key ranges: nsqext.protocol.hashing, see below
    "protocol": BASE,
    "transport": PROTOCOL | {"waits"},
    "arguments": {"errors"},
    "waits": BASE,
    "lookup": TRANSPORT | {"http", "settings", "settings_text", "waits"},
    "settings": BASE | {"settings_text"},
    "settings_text": BASE,
    "client": CLIENT,
    "admin": CLIENT,
    "partitions": CLIENT | {"admin"},
    "golang": PROTOCOL,
    "http": PROTOCOL | {"golang"},
    "broker": PROTOCOL | {"golang", "http", "key_ranges", "waits"},
    "sync": PUBLIC,
    "middleware": PUBLIC,
    "observability": PUBLIC | {"delays", "middleware", "transactions"},
    "app": PUBLIC | {"middleware", "broker"},  # tests of an app filter messages as servers do
    "delays": PUBLIC | {"app"},
    "transactions": PUBLIC | {"app"},
    "spark": PUBLIC | {"partitions", "sync"},
    "arrow": PUBLIC | {"spark"},
    "testing": PUBLIC | {"broker", "sync"},
    "integrations": PUBLIC | {"sync"},
    "web": PUBLIC | {"broker", "delays"},
    "cli": PUBLIC
    | {
        "app",
        "arrow",
        "broker",
        "delays",
        "golang",
        "observability",
        "spark",
        "sync",
        "testing",
        "transactions",
        "web",
    },
}

CORE = {"anyio", "attrs", "httpcore", "httpx", "msgspec", "orjson", "tenacity"}

# room -> third-party packages it may import at the top of a module; a room that is not named here may import CORE
THIRD_PARTY: dict[str, set[str]] = {
    "errors": set(),
    "types": {"attrs"},
    "arguments": {"attrs"},
    "key_ranges": set(),
    "protocol": {"attrs", "msgspec", "orjson"},
    "broker": CORE | {"re2", "starlette"},
    "golang": CORE | {"h11", "starlette", "uvicorn"},
    "http": CORE | {"starlette", "uvicorn"},
    "spark": CORE | {"numpy", "pandas", "pyarrow", "pyspark"},
    "arrow": CORE | {"pyarrow"},
    "observability": CORE | {"opentelemetry", "prometheus_client"},
    "testing": CORE | {"pytest"},
    "integrations": CORE | {"kombu", "taskiq"},
    "web": CORE | {"jinja2", "markupsafe", "starlette"},
    "cli": CORE | {"prometheus_client", "pyarrow", "rich", "typer"},
}

# packages of extras, imported by the function that needs them
LAZY: dict[str, set[str]] = {
    "protocol": {"cramjam"},
    "transport": {"cramjam"},
    "broker": {"cramjam"},
    "cli": {"prometheus_client", "pyarrow", "shellingham"},
    "transactions": {"opentelemetry", "psycopg", "sqlalchemy"},
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
        """The imported room; for a third-party package its top-level name."""
        head, _, rest = self.module.partition(".")
        if head != ROOT:
            return head
        return rest.partition(".")[0] or ROOT


def room_of(file: Path) -> str:
    """Name the room of a source file: its folder below the package, or the module itself."""
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return ROOT if first == "__init__" else first


def is_module(name: str) -> bool:
    """Return whether ``nsqext.<name>`` is a module and not a name that the package exports."""
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


class Source(NamedTuple):
    """What is read of a source file.

    Attributes:
        imports: import statements, and whether they are outside of functions.
        groups: lines with ``except*``.
        names: dotted names in texts, which are modules that are loaded by name.
    """

    imports: list[tuple[ast.Import | ast.ImportFrom, bool]]
    groups: list[int]
    names: set[str]


def _statements(body: list[ast.stmt], at_top: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    """Yield statements and those in them, each with whether it is outside of functions; expressions have none."""
    for node in body:
        yield node, at_top
        inside = at_top and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for part in ("body", "orelse", "handlers", "cases", "finalbody"):
            yield from _statements(getattr(node, part, []), inside)


_NAME = re.compile(rf"""["']{ROOT}\.([\w.]+)""")


@cache
def tree_of(file: Path) -> ast.Module:
    """Parse a source file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache  # at the first test, not at collection
def source_of(file: Path) -> Source:
    """Read a source file."""
    text = file.read_text(encoding="utf-8")
    statements = [*_statements(tree_of(file).body)]
    imports = [(node, at_top) for node, at_top in statements if isinstance(node, (ast.Import, ast.ImportFrom))]
    groups = [node.lineno for node, _ in statements if isinstance(node, ast.TryStar)]
    return Source(imports, groups, set(_NAME.findall(text)))


def imports_of(file: Path) -> list[Import]:
    """List what a file imports, in functions and under TYPE_CHECKING too."""
    found: list[Import] = []
    for node, at_top in source_of(file).imports:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module or ""]
            if node.module == ROOT:
                names = [f"{ROOT}.{alias.name}" if is_module(alias.name) else ROOT for alias in node.names]
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        found += [Import(file, node.lineno, name, at_top, relative) for name in names]
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def all_imports() -> list[Import]:
    """List the imports of the package."""
    return [found for file in FILES for found in imports_of(file)]


@cache
def own_imports() -> list[Import]:
    """List the imports of modules of the package."""
    return [found for found in all_imports() if found.module.partition(".")[0] == ROOT]


@cache
def foreign_imports() -> list[Import]:
    """List the imports of third-party packages."""
    known = sys.stdlib_module_names | {ROOT}
    return [found for found in all_imports() if found.module.partition(".")[0] not in known]


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(file) for file in FILES}
    assert {room for room in rooms if not room.startswith("_")} <= ALLOWED.keys()


def test_imports_are_absolute() -> None:
    assert [found.where for found in all_imports() if found.relative] == []


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    wrong = [
        f"{found.where} imports {found.module}"
        for found in own_imports()
        if found.room == room
        and found.target not in ALLOWED[room] | {room}
        and not (found.target.startswith("_") and is_module(found.target))
    ]
    assert wrong == []


def test_private_modules_import_only_errors_and_types() -> None:
    private = [found for found in own_imports() if found.room.startswith("_") and found.room not in ALLOWED]
    assert [f"{found.where} imports {found.module}" for found in private if found.target not in BASE] == []


def test_rooms_form_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for found in own_imports():
        if found.target not in {ROOT, found.room} and found.room != ROOT:
            graph.setdefault(found.room, set()).add(found.target)
    assert set(TopologicalSorter(graph).static_order()) >= graph.keys() > set()  # a cycle raises


# files that may import an event loop
LOOP_IMPORTS = {
    "testing/simulation/private_parts.py": "the simulation is an asyncio event loop with virtual time",
    "testing/simulation/runner.py": "it runs that loop, and cancels remaining tasks",
}


def test_nothing_imports_an_event_loop() -> None:
    loops = {"asyncio", "trio", "uvloop"}
    users = {
        found.file.relative_to(PACKAGE).as_posix() for found in all_imports() if found.module.partition(".")[0] in loops
    }
    assert sorted(users) == sorted(LOOP_IMPORTS)


def test_only_the_room_of_tests_imports_the_simulation() -> None:
    users = {found.room for found in own_imports() if found.module.startswith("nsqext.testing.simulation")}
    assert users == {"testing"}


def test_no_module_catches_parts_of_groups() -> None:
    """Python before 3.11.4 wraps an error that is raised in ``except*`` in a group, where a single one is promised."""
    found = [f"{path.relative_to(PACKAGE)}:{line}" for path in FILES for line in source_of(path).groups]
    assert found == [], "catch BaseExceptionGroup and split it"


def test_third_party_packages_are_the_ones_that_a_room_may_need() -> None:
    wrong: list[str] = []
    for found in foreign_imports():
        allowed = THIRD_PARTY.get(found.room, CORE)
        if not found.at_top:
            allowed = allowed | LAZY.get(found.room, set())
        if found.target not in allowed:
            wrong.append(f"{found.where} imports {found.module}")
    assert wrong == []


def test_rooms_above_the_client_subscribe_through_its_public_modules() -> None:
    """What subscribes without a consumer uses `nsqext.partitions`."""
    users = {found.room for found in own_imports() if found.module.startswith("nsqext.client.consumer.subscriptions")}
    assert users == {"app", "client", "partitions"}


def test_key_ranges_import_only_the_hash_of_the_protocol() -> None:
    found = {found.module for found in own_imports() if found.room == "key_ranges" and found.target == "protocol"}
    assert found == {"nsqext.protocol.hashing"}


def test_the_walk_sees_imports() -> None:
    """Guard against a test that passes because it finds nothing."""
    assert any(found.room == "protocol" and found.target == "errors" for found in own_imports())
    assert any(found.room == "types" and found.target == "attrs" for found in foreign_imports())


# --- inside a room ------------------------------------------------------------------------------------------------

_CONSUMER_BASE = {
    f"client.consumer.{name}" for name in ("handler_functions", "message", "options", "position", "unpacking")
}
_SERVER_TOOLS = {f"broker.{name}" for name in ("fault_injection", "listeners")}
_ENGINE = {f"broker.engine{name}" for name in ("", ".channel", ".storage")}
_NSQD = {"broker.nsqd", "broker.nsqd.original", "broker.nsqd.http"}
_COMMANDS = ("admin", "demo", "files", "messages", "servers", "workers")
_SPARK_BASE = {"spark.columns", "spark.option_values", "spark.options", "spark.pyspark_features"}

# folder (or one of its files) -> folders and files of the same room that it may import; the room's own folder is
# always allowed, and so is everything for a folder that is not named
INSIDE: dict[str, set[str]] = {
    "protocol": set(),
    "protocol.client": {"protocol"},
    "protocol.server": {"protocol"},
    "protocol.lookupd_tcp": {"protocol", "protocol.server"},  # both roles of a small protocol, in one file
    "client": _CONSUMER_BASE | {"client.producer.options"},
    "client.middleware": _CONSUMER_BASE | {"client", "client.consumer.handlers", "client.producer.publishing"},
    "client.producer": {"client"},
    # reads the log as a consumer does
    "client.producer.settling": {
        *("client", "client.producer", "client.consumer.options", "client.consumer.position"),
        "client.consumer.subscriptions",
    },
    "client.consumer": {
        *("client", "client.consumer.handlers", "client.consumer.subscriptions", "client.consumer.typed"),
        "client.producer",
    },
    "client.consumer.typed": _CONSUMER_BASE | {"client.producer.publishing"},
    "client.consumer.subscriptions": _CONSUMER_BASE | {"client"},
    "client.consumer.handlers": _CONSUMER_BASE | {"client", "client.consumer.subscriptions", "client.producer"},
    "cli": set(),
    **{f"cli.{name}": {"cli"} for name in _COMMANDS},
    "spark.cluster": set(),
    "spark.read": _SPARK_BASE | {"spark.cluster"},
    "spark.write": _SPARK_BASE | {"spark.cluster"},
    "broker.engine.header_filter": set(),
    "broker.engine.storage": set(),
    "broker.engine.options": {"broker.engine.storage"},
    "broker.engine.channel": {"broker.engine.options", "broker.engine.header_filter", "broker.engine.storage"},
    "broker.engine": _ENGINE,
    **dict.fromkeys(_NSQD, _ENGINE | _NSQD | _SERVER_TOOLS),
    "broker.coordinator": _ENGINE | {"broker.nsqd"},
    "broker.lookupd": _ENGINE | _SERVER_TOOLS | {"broker.coordinator", "broker.nsqd"},
    **dict.fromkeys(_SERVER_TOOLS, _SERVER_TOOLS),
}

# rooms that may import one role of the protocol; `protocol` itself is in the table above
ROLES: dict[str, set[str]] = {
    "protocol.client": {"client", "lookup", "middleware", "spark", "transport"},
    "protocol.server": {"broker", "golang", "http"},
}

# imports against the direction of the tables, to be removed: add none, delete each one that is gone
KNOWN_UPWARD: set[tuple[str, str]] = set()

# circles of files, to be removed: add none, delete each one that is gone, narrow each one that shrinks
KNOWN_CIRCLES: list[set[str]] = []

# files that are loaded from outside of the package: by `python -m nsqext`, pytest, and users
ENTRY_POINTS = {
    "__main__",
    "arrow",
    "integrations.taskiq",
    "observability.otel",
    "observability.prometheus",
    "testing.plugin",
}

# files that no file of the package imports, to be used or removed: add none, delete each one that is gone
KNOWN_UNUSED: set[str] = set()


def name_of(file: Path) -> str:
    """Return a file's dotted name below the package; ``""`` for the package itself."""
    parts = list(file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def folder_of(name: str) -> str:
    """Return the dotted name of the folder of a file; a package's own file belongs to the package."""
    return name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]


def _imported_names(file: Path) -> set[str]:
    """Return the files of the package that a file imports, in functions and under TYPE_CHECKING too."""
    wanted: set[str] = set()
    for node, _ in source_of(file).imports:
        if isinstance(node, ast.Import):
            wanted.update(alias.name for alias in node.names)
        elif node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            wanted.update(name if name.removeprefix("nsqext.") in MODULES else node.module for name in whole)
    below = {name.removeprefix(ROOT).removeprefix(".") for name in wanted if name.partition(".")[0] == ROOT}
    return {name for name in below if name in MODULES} - {name_of(file)}


@cache
def graph_of_files() -> dict[str, set[str]]:
    """Map each file to the files that it imports."""
    return {name: _imported_names(file) for name, file in MODULES.items()}


def all_edges() -> list[tuple[str, str]]:
    """List pairs of a file and a file that it imports."""
    return sorted((name, target) for name, targets in graph_of_files().items() for target in targets)


def circles_of(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the largest sets of nodes that reach each other (Tarjan's algorithm, without recursion)."""
    found: list[set[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    for root in graph:
        if root in order:
            continue
        order[root] = lowest[root] = len(order)
        open_.append(root)
        path = [(root, iter(sorted(graph[root])))]
        while path:
            node, rest = path[-1]
            child = next(rest, None)
            if child is None:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == order[node]:
                    circle = set(open_[open_.index(node) :])
                    del open_[open_.index(node) :]
                    found += [circle] if len(circle) > 1 else []
            elif child not in order:
                order[child] = lowest[child] = len(order)
                open_.append(child)
                path.append((child, iter(sorted(graph[child]))))
            elif child in open_:
                lowest[node] = min(lowest[node], order[child])
    return found


def _allows(allowed: Iterable[str], target: str) -> bool:
    return any(entry in (target, folder_of(target)) for entry in allowed)


def _points_upward(name: str, target: str) -> bool:
    """Return whether an import goes against the tables."""
    room = name.partition(".")[0]
    users = ROLES.get(folder_of(target))
    if users is not None and room not in users | {"protocol"}:
        return True
    if target.partition(".")[0] != room:
        return False  # the table of the rooms decides
    table = name if name in INSIDE else folder_of(name)
    if table not in INSIDE or folder_of(target) == folder_of(name):
        return False
    return not _allows(INSIDE[table], target)


def test_files_form_no_circle() -> None:
    new = [circle for circle in circles_of(graph_of_files()) if not any(circle <= known for known in KNOWN_CIRCLES)]
    assert [sorted(circle) for circle in new] == []


def test_known_circles_exist() -> None:
    found = circles_of(graph_of_files())
    gone = [sorted(known) for known in KNOWN_CIRCLES if not any(circle <= known for circle in found)]
    assert gone == [], "delete these from KNOWN_CIRCLES: they are no circles any more"


def test_folders_import_only_the_folders_below_them() -> None:
    upward = {edge for edge in all_edges() if _points_upward(*edge)}
    assert sorted(upward - KNOWN_UPWARD) == []


def test_known_upward_imports_exist() -> None:
    gone = sorted(edge for edge in KNOWN_UPWARD if edge not in all_edges() or not _points_upward(*edge))
    assert gone == [], "delete these from KNOWN_UPWARD: they are imported no more, or allowed by now"


def test_the_tables_name_existing_files() -> None:
    named = {*INSIDE, *ROLES, *ENTRY_POINTS, *(entry for allowed in INSIDE.values() for entry in allowed)}
    assert sorted(named - MODULES.keys()) == []


def test_every_file_is_imported_or_an_entry_point() -> None:
    """A module that is loaded by name counts: commands of the program and lazily exported names are such."""
    imported = {target for targets in graph_of_files().values() for target in targets}
    imported |= {name for file in FILES for name in source_of(file).names}
    folders = {folder_of(name) for name in MODULES}
    unused = [name for name in MODULES if name not in imported | folders | ENTRY_POINTS]
    assert sorted(unused) == sorted(KNOWN_UNUSED)


def test_circles_are_found() -> None:
    """Guard against a test that passes because it finds nothing."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(sorted(circle) for circle in circles_of(graph)) == [["a", "b", "c"], ["d", "e"]]
    assert len(all_edges()) > len(MODULES)


# --- private members ------------------------------------------------------------------------------------------------


@cache
def _nodes_of(file: Path) -> list[ast.AST]:
    """Return every node of a file's tree."""
    return list(ast.walk(tree_of(file)))


def _is_private(name: str) -> bool:
    named_tuple = ("_asdict", "_fields", "_make", "_replace")  # public, with an underscore against clashes
    return name.startswith("_") and not name.startswith("__") and name not in named_tuple


def test_no_room_uses_a_private_member_of_another_room() -> None:
    """A member that is private in other rooms only is a back door: the room that has it offers a port instead."""
    owners: dict[str, set[str]] = {}
    uses: list[tuple[str, str, Path, int]] = []
    for file in FILES:
        room = room_of(file)
        for node in _nodes_of(file):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _is_private(node.name):
                owners.setdefault(node.name, set()).add(room)
            elif isinstance(node, ast.Attribute) and _is_private(node.attr):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    owners.setdefault(node.attr, set()).add(room)
                else:
                    uses.append((node.attr, room, file, node.lineno))
    wrong = [
        f"nsqext/{file.relative_to(PACKAGE).as_posix()}:{line} uses {name}"
        for name, room, file, line in uses
        if name in owners and room not in owners[name]
    ]
    assert wrong == []
    assert len(owners) > 1000


# --- names ----------------------------------------------------------------------------------------------------------

# blocking classes, which mirror the asynchronous classes by name
MIRRORS = {"Admin", "Batcher", "Consumer", "Message", "MessageBatch", "Producer"}


def test_a_class_name_stands_for_one_class() -> None:
    """A reader who searches for a class finds one; the blocking mirrors of `nsqext.sync` are the exception."""
    homes: dict[str, list[Path]] = {}
    for file in FILES:
        for node in _nodes_of(file):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(file)
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    mirrored = {name for name, files in twice.items() if len(files) == 2 and "sync" in map(room_of, files)}
    assert {name: sorted(map(str, files)) for name, files in twice.items() if name not in mirrored} == {}
    assert mirrored == MIRRORS
