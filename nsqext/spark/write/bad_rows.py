"""Rows that cannot be published, described as JSON: ``badRows=topic`` publishes that instead."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from nsqext.errors import NsqError


def describe_row(row: int, task: int, error: NsqError, fields: Mapping[str, Any], max_size: int) -> bytes:
    """Return why a row cannot be published, and what it contains, as a JSON object.

    Args:
        fields: the row by name of its columns; null ones are left out. Bytes that are not UTF-8 are in Base64, in a
            member whose name ends with ``_base64``.
        max_size: largest number of bytes; value and headers of longer descriptions are left out, with the size of the
            value in ``value_size``.
    """
    about: dict[str, Any] = {"error": f"{type(error).__name__}: {error.message}", "row": row, "task": task}
    described = orjson.dumps({**about, **_members(fields)}, default=str)
    if len(described) <= max_size:
        return described
    kept = {name: value for name, value in fields.items() if name not in ("value", "headers")}
    return orjson.dumps({**about, "value_size": len(fields.get("value") or b""), **_members(kept)}, default=str)


def _members(fields: Mapping[str, Any]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, bytes):
            members.update(_text_of(name, value))
        elif isinstance(value, list):  # headers as an array
            members[name] = [
                {part: found for key, one in (pair or {}).items() for part, found in _pair(key, one)} for pair in value
            ]
        elif value is not None:
            members[name] = value
    return members


def _pair(key: str, value: Any) -> Any:
    return (_text_of(key, value) if isinstance(value, bytes) else {key: value}).items()


def _text_of(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value).decode()}
