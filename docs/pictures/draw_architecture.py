"""Draw the packages in layers: ``python -m docs.pictures.draw_architecture`` writes architecture.svg.

Packages and imports are read from the sources. Imports of a higher layer, or of the client by the broker, are errors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nsqext

__all__ = ("PATH", "architecture", "imports")

PATH = Path(__file__).with_name("architecture.svg")
_PACKAGE = Path(nsqext.__file__).parent

_LAYERS = (
    ("cli", "web", "spark", "testing", "integrations"),
    ("app", "sync", "admin", "observability", "delays", "partitions", "transactions"),
    ("middleware",),
    ("client",),
    ("lookup", "transport"),
    ("protocol", "key_ranges", "http", "golang"),
    ("arguments", "settings", "settings_text", "waits", "errors", "types"),
)
"""The layers, highest first; a package that is not listed belongs to the highest."""
_ROLES = {
    "admin": "topics, channels",
    "app": "handlers",
    "arguments": "checks of calls",
    "arrow": "tables",
    "broker": "in-process cluster",
    "cli": "commands",
    "client": "producer, consumer",
    "delays": "relay, store",
    "errors": "one tree, with flags",
    "golang": "as Go programs do",
    "http": "servers, requests",
    "integrations": "Celery, Taskiq",
    "key_ranges": "keys of consumers",
    "lookup": "leaders of partitions",
    "middleware": "around publishes and handlers",
    "observability": "logs, spans, metrics",
    "partitions": "leaders, logs",
    "protocol": "bytes, without I/O",
    "settings": "keywords",
    "settings_text": "URL, environment",
    "spark": "source and sink",
    "sync": "blocking code",
    "testing": "pytest plugin",
    "transactions": "outbox, inbox",
    "transport": "connections",
    "types": "small values",
    "waits": "pauses, wake-ups",
    "web": "live pages",
}
_COLOURS = ("#225588", "#2f6699", "#3a70a2", "#4477aa", "#4477aa", "#5f8fb8", "#7f8c99")
_BROKER = "#aa4455"
_WIDTH, _ROW, _GAP, _SIDE = 860, 52, 8, 180


@cache
def imports() -> dict[str, set[str]]:
    """Return which packages each package imports; modules directly below ``nsqext`` count as packages."""
    folders = {folder.name: tuple(folder.rglob("*.py")) for folder in _PACKAGE.iterdir() if any(folder.glob("*.py"))}
    modules = {path.stem: (path,) for path in _PACKAGE.glob("*.py") if not path.name.startswith("_")}
    rooms = folders | modules
    return {
        room: {name for path in rooms[room] for name in _imported(path) if name in rooms and name != room}
        for room in sorted(rooms)
    }


def _statements(parent: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(parent):
        if not isinstance(node, ast.expr):
            yield node
            yield from _statements(node)


def _imported(path: Path) -> Iterator[str]:
    for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("nsqext."):
            yield node.module.split(".")[1]


def _layers(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the packages by layer.

    Raises:
        ValueError: an import goes upwards, or from the broker to the client.
    """
    number = {room: next((n for n, names in enumerate(_LAYERS) if room in names), 0) for room in edges}
    for room, names in edges.items():
        for name in names - {"broker"}:
            if room == "broker" and number[name] < number["protocol"]:
                raise ValueError(f"the broker imports {name}")
            if room != "broker" and number[name] < number[room]:
                raise ValueError(f"{room} imports {name}, which is in a higher layer")
    return [[room for room in edges if number[room] == n and room != "broker"] for n in range(len(_LAYERS))]


def _box(room: str, x: float, y: float, width: float, height: float, colour: str) -> str:
    middle, top = x + width / 2, y + height / 2
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{colour}"/>'
        f'<text x="{middle:g}" y="{top - 3:g}" font-weight="bold" font-size="15">{room}</text>'
        f'<text x="{middle:g}" y="{top + 15:g}" font-size="12">{_ROLES.get(room, "")}</text>'
    )


def architecture() -> str:
    """Return the picture as SVG."""
    layers = _layers(imports())
    boxes = []
    for number, rooms in enumerate(layers):
        # the broker stands beside the client and what the client alone needs
        beside = _LAYERS[number] in (("client",), ("lookup", "transport"))
        space = _WIDTH - (_SIDE + _GAP if beside else 0)
        width = (space - (len(rooms) - 1) * _GAP) / len(rooms)
        y = number * (_ROW + _GAP)
        boxes += [
            _box(room, column * (width + _GAP), y, width, _ROW, _COLOURS[number]) for column, room in enumerate(rooms)
        ]
    first = _LAYERS.index(("client",))
    boxes.append(_box("broker", _WIDTH - _SIDE, first * (_ROW + _GAP), _SIDE, 2 * _ROW + _GAP, _BROKER))
    height = len(layers) * (_ROW + _GAP) - _GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-label="Packages of nsqext in layers" font-family="sans-serif" fill="#ffffff" text-anchor="middle">'
    )
    return "\n".join([head, *boxes, "</svg>", ""])


if __name__ == "__main__":
    PATH.write_text(architecture(), encoding="utf-8")
