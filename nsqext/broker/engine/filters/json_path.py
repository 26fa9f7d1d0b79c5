r"""Where a header filter looks in an extend header.

The server takes the name of a filter as a path: a dot leads into an object, or to a place in an array; ``*`` and ``?``
stand for any characters of a name, unless a backslash is before them. What is found first counts, so the first of equal
names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ("compile_path",)

_INDEX = re.compile(r"[0-9]+", re.ASCII)


class _Object(tuple[tuple[str, Any], ...]):
    """Members of a JSON object, in order, equal names included."""

    __slots__ = ()


def compile_path(path: str) -> Callable[[bytes], str | None]:
    """Return the function that finds the text at a path in a header; None when there is nothing, or something else."""
    return partial(_text_at, path)


def _text_at(path: str, header: bytes) -> str | None:
    try:
        document = json.loads(header.decode("utf-8", "surrogateescape"), object_pairs_hook=_Object, strict=False)
    except (ValueError, RecursionError):
        return None
    found = _find([document], path[2:]) if path.startswith("..") else _find(document, path)
    return found if isinstance(found, str) else None


def _find(value: Any, path: str) -> Any:
    """Return what is at a path inside an object or array; an empty tuple for nothing."""
    if isinstance(value, _Object):
        name, wild, rest = _split(path)
        members = [member for key, member in value if (_fits(name, key) if wild else name == key)]
    elif isinstance(value, list):
        place, dot, rest_text = path.partition(".")
        rest = rest_text if dot else None
        index = int(place) if _INDEX.fullmatch(place) and len(place) < 20 else len(value)
        members = value[index : index + 1]
    else:
        return ()
    if rest is None:
        return members[0] if members else ()
    for member in members:
        found = _find(member, rest)
        if found != ():
            return found
    return ()


def _split(path: str) -> tuple[str, bool, str | None]:
    """Return the first name of a path, whether it has wildcards, and the rest; None when there is none."""
    name, wild, at = "", False, 0
    while at < len(path):
        char = path[at]
        if char == ".":
            return name, wild, path[at + 1 :]
        if char == "\\":
            at += 1
            char = path[at : at + 1]
        elif char in "*?":
            wild = True
        name += char
        at += 1
    return name, wild, None


def _fits(name: str, key: str) -> bool:
    """Return whether a key is one that a name with wildcards means; ``?`` is a byte there, not a character."""
    expression = "".join({"*": ".*", "?": "."}.get(char) or re.escape(char) for char in name)
    return re.fullmatch(_bytes(expression), _bytes(key), re.DOTALL) is not None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
