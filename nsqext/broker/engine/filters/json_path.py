r"""Paths by which header filters select a text of an extend header (github.com/tidwall/gjson).

A dot descends into an object or selects an element of an array; ``*`` and ``?`` match any characters of a name unless
escaped with a backslash. The first match counts, so the first of several members with one name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from nsqext.broker.engine.filters.go_regexp import compile_wildcard

__all__ = ("compile_path",)

_INDEX = re.compile(r"[0-9]+", re.ASCII)


class _Object(tuple[tuple[str, Any], ...]):
    """Members of a JSON object, in order, equal names included."""

    __slots__ = ()


def compile_path(path: str) -> Callable[[bytes], str | None]:
    """Return the function that finds the text at a path in a header; None if the value is missing or not a text."""
    return partial(_text_at, path)


def _text_at(path: str, header: bytes) -> str | None:
    try:
        document = json.loads(header.decode("utf-8", "surrogateescape"), object_pairs_hook=_Object, strict=False)
    except (ValueError, RecursionError):
        return None
    found = _find([document], path[2:]) if path.startswith("..") else _find(document, path)
    return found if isinstance(found, str) else None


def _find(value: Any, path: str) -> Any:
    """Return the value at a path inside an object or array; an empty tuple if it is missing."""
    if isinstance(value, _Object):
        name, wild, rest = _split(path)
        members = [member for key, member in value if (compile_wildcard(name)(key) if wild else name == key)]
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
    """Return the first name of a path, whether it has wildcards, and the rest; None if nothing follows."""
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
