"""JSON objects as Go's ``encoding/json`` parses them into the servers' structures.

Names match case-insensitively. Of equal names the last counts, and objects are merged. Null and unknown names are
ignored. A value of another type refuses the whole object. Invalid UTF-8 becomes replacement characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, NoReturn

from nsqext.arguments import is_whole

Schema = Mapping[str, Any]
"""By name ``str``, ``bool``, ``int``, a largest ``int`` value, a schema, or a list of a kind."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64 = (1 << 63) - 1
_DEEPEST = 10_000  # levels that Go's library reads
_SHALLOW = 100  # more levels than schemas have, fewer than Python's recursion limit
_TEXT = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(rf"{_TEXT}|[\[\]{{}}]", re.DOTALL)
_NO_BRACKETS = re.compile(rf'{_TEXT}|"|[^\[\]{{}}"]+', re.DOTALL)


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON allows and UTF-8 does not, by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


class UnreadableFields(ValueError):
    """The body is not JSON, not an object, or does not match the schema."""


def read_fields(body: bytes, schema: Schema) -> dict[str, Any]:
    """Return an object's members by the schema's names, none for null; raises `UnreadableFields`."""
    value = _load(body)
    return {} if value is None else _object(value, schema)


class Members(tuple[tuple[str, Any], ...]):
    """Members of a JSON object, with all values of equal names."""

    __slots__ = ()


def _load(body: bytes) -> Any:
    text = body.decode("utf-8", "replace")
    try:
        return _parse(text)
    except ValueError as error:
        raise UnreadableFields(f"not JSON: {error}") from error


def _parse(text: str) -> Any:
    if text.count("{") + text.count("[") > _DEEPEST and _depth(text) > _DEEPEST:
        raise ValueError("nested too deeply")
    with suppress(RecursionError):
        return _parse_shallow(text)
    return _parse_shallow(_flattened(text))


def _depth(text: str) -> int:
    brackets = _NO_BRACKETS.sub("", text)
    return max(accumulate(1 if bracket in "{[" else -1 for bracket in brackets), default=0)


def _parse_shallow(text: str) -> Any:
    return json.loads(text, object_pairs_hook=Members, parse_constant=refuse_constant)


def _flattened(text: str) -> str:
    """Replace deeply nested values by 0; raises `ValueError` if they are not JSON."""
    open_parts: list[list[str]] = [[]]
    end = 0
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        if bracket in ("{", "["):
            open_parts[-1].append(text[end : token.start()])
            end = token.start()
            open_parts.append([])
        elif bracket in ("}", "]") and len(open_parts) > 1:
            whole = "".join((*open_parts.pop(), text[end : token.end()]))
            end = token.end()
            if len(open_parts) > _SHALLOW:
                _parse_shallow(whole)
                whole = "0"
            open_parts[-1].append(whole)
    return "".join((*(part for parts in open_parts for part in parts), text[end:]))


def refuse_constant(constant: str) -> NoReturn:
    """Raise ValueError for ``NaN``, ``Infinity`` and ``-Infinity``, which Python accepts."""
    raise ValueError(f"{constant} is not JSON")


def _object(value: Any, schema: Schema) -> dict[str, Any]:
    if not isinstance(value, Members):
        raise UnreadableFields(f"{type(value).__name__} in place of an object")
    found: dict[str, Any] = {}
    folded = {name.casefold(): name for name in schema}
    for name, member in value:
        known = name if name in schema else folded.get(name.casefold())
        if known is not None and member is not None:
            read = _member(known, member, schema[known])
            found[known] = {**found.get(known, {}), **read} if isinstance(read, dict) else read
    return found


def _member(name: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return _object(value, kind)
    if isinstance(kind, list) and isinstance(value, list):
        return [_item(name, item, kind[0]) for item in value]
    if kind is str and isinstance(value, str):
        return encodable(value)
    if kind is bool and isinstance(value, bool):
        return value
    if is_whole(value, -math.inf):
        largest = _INT64 if kind is int else kind
        if isinstance(largest, int) and -largest - 1 <= value <= largest:
            return value
    raise UnreadableFields(f"{name} cannot be {type(value).__name__}")


def _item(name: str, value: Any, kind: Any) -> Any:
    """Convert an item of a list; null is its type's zero value."""
    if value is None:
        return {} if isinstance(kind, Mapping) else kind()
    return _member(name, value, kind)
