"""Describe bodies by JSON schemas, as `nsqext.client.consumer.typed.body` decodes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from nsqext.client.consumer.typed.body import body_decoder, is_pydantic, uses_pydantic

Schema = dict[str, Any]

_TEXTS: dict[Any, tuple[str, Schema]] = {
    bytes: ("application/octet-stream", {"type": "string", "format": "binary"}),
    str: ("text/plain", {"type": "string"}),
}
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # keywords whose members are schemas by name


@frozen
class BodySchemas:
    """The schemas of types, in the dialect of AsyncAPI: draft 07 of JSON Schema."""

    bodies: Sequence[Schema]  #: of the types, in their order
    definitions: Mapping[str, Schema]  #: classes by name, to which the schemas refer


def content_type(kind: Any) -> str:
    """Return the media type of bodies of a type."""
    return _TEXTS[kind][0] if kind in (bytes, str) else "application/json"


def body_schemas(kinds: Sequence[Any], place: str) -> BodySchemas:
    """Return the schemas of types of bodies; see `nsqext.app.decode_body`. Raises InvalidSetting.

    Args:
        place: prefix of references to classes, such as ``#/components/schemas/``.
    """
    bodies: list[Schema] = []
    models: list[int] = []  # places of types of pydantic
    others: list[int] = []
    for number, kind in enumerate(kinds):
        body_decoder(kind)  # raises InvalidSetting
        bodies.append(_TEXTS[kind][1] if kind in (bytes, str) else {})
        if kind not in (bytes, str, Any, object):
            (models if uses_pydantic(kind) else others).append(number)
    plain = [kinds[number] for number in others]
    inner = _models_in(plain)
    chosen = [*inner, *(kinds[number] for number in models)]
    for ending in ("", ".pydantic"):
        found, named = _of_pydantic(chosen, place, ending)
        described, definitions = _of_msgspec(plain, place, dict(zip(inner, found[: len(inner)], strict=True)))
        if not named.keys() & definitions.keys():
            break
    described, definitions = [*described, *found[len(inner) :]], {**definitions, **named}
    for number, schema in zip((*others, *models), described, strict=True):
        bodies[number] = schema
    return BodySchemas(
        [_draft_07(schema) for schema in bodies],
        {name: _draft_07(schema) for name, schema in sorted(definitions.items())},
    )


def _models_in(kinds: Sequence[Any]) -> list[Any]:
    """Return the models of pydantic that dataclasses, attrs classes and structs contain."""
    found: dict[Any, Schema] = {}
    _of_msgspec(kinds, "", found)
    return [kind for kind in found if is_pydantic(kind)]


def _of_msgspec(kinds: Sequence[Any], place: str, others: dict[Any, Schema]) -> tuple[list[Schema], dict[str, Schema]]:
    """Return the schemas of types, and of their classes; ``others`` has those of classes that msgspec does not know."""
    bodies, named = msgspec.json.schema_components(
        kinds,
        ref_template=place + "{name}",
        schema_hook=lambda kind: others.setdefault(kind, {"title": kind.__name__}),
    )
    return list(bodies), named


def _of_pydantic(kinds: Sequence[Any], place: str, ending: str) -> tuple[list[Schema], dict[str, Schema]]:
    """Return the schemas of types with models, and of their classes, whose names get an ending."""
    if not kinds:
        return [], {}
    pydantic = sys.modules["pydantic"]
    # bodies have what validation accepts
    given = [(str(number), "validation", pydantic.TypeAdapter(kind)) for number, kind in enumerate(kinds)]
    found, rest = pydantic.TypeAdapter.json_schemas(given, ref_template=place + "{model}" + ending)
    bodies = [found[str(number), "validation"] for number in range(len(kinds))]
    return bodies, {name + ending: schema for name, schema in rest.get("$defs", {}).items()}


def _draft_07(schema: Any) -> Any:
    """Return a schema of the 2020-12 dialect in the words of draft 07 and of AsyncAPI."""
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema and len(schema) > 1:  # draft 07 ignores what stands beside a reference
        schema = {**schema, "allOf": [{"$ref": schema["$ref"]}]}
        del schema["$ref"]
    return dict(_members(schema))


def _members(schema: Schema) -> Iterator[tuple[str, Any]]:
    first = schema.get("prefixItems")
    for name, value in schema.items():
        if name == "prefixItems":
            yield "items", [_draft_07(one) for one in value]
        elif name == "items" and first is not None:
            yield "additionalItems", _draft_07(value)
        elif name == "discriminator" and isinstance(value, dict):
            yield name, value["propertyName"]
        elif name in _OF_NAMES:
            yield name, {key: _draft_07(one) for key, one in value.items()}
        elif name in ("anyOf", "oneOf", "allOf"):
            yield name, [_draft_07(one) for one in value]
        elif name in ("items", "additionalProperties", "not", "contains", "propertyNames"):
            yield name, _draft_07(value)
        else:
            yield name, value
