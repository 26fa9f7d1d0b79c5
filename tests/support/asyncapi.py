"""Check documents against the official JSON schema of AsyncAPI 3.0.0, and their references."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import orjson

__all__ = ("checked",)

_OFFICIAL = Path(__file__).parents[1] / "app/data/asyncapi-3.0.0.json"


@cache
def _validator() -> Any:
    return jsonschema.Draft7Validator(orjson.loads(_OFFICIAL.read_bytes()))


def _references(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _references(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name == "$ref":
                yield one
            else:
                yield from _references(one)


def checked(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document after the checks."""
    _validator().validate(orjson.loads(orjson.dumps(document)))
    for reference in _references(document):
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    return document
