"""Read a document of AsyncAPI 3.0 for the page of an app."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from nsqext.errors import InvalidSetting

_EXTENSION = "x-nsq"
_MOST_VALUES = 6  # of an enumeration that are shown


@frozen
class FieldRow:
    """A member of a body, or a header."""

    name: str
    kind: str
    required: bool
    text: str


@frozen
class MessageRow:
    """Messages of a topic."""

    identity: str
    topic: str
    name: str
    content_type: str  #: or empty
    payload: str  #: type of the body
    headers: tuple[FieldRow, ...]
    key: bool
    tag: str


@frozen
class OperationRow:
    """A handler or publisher."""

    name: str
    action: str  #: receive or send
    topic: str
    pattern: bool
    channel: str  #: empty if it sends
    summary: str
    messages: tuple[str, ...]  #: identities
    notes: tuple[str, ...]


@frozen
class AppDocument:
    """What the page of an app shows of its document."""

    document: Mapping[str, Any]
    title: str
    version: str
    text: str
    operations: tuple[OperationRow, ...]
    messages: tuple[MessageRow, ...]
    schemas: Mapping[str, tuple[FieldRow, ...]]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> AppDocument:
        """Read a document; raises InvalidSetting."""
        try:
            info, parts = document["info"], document.get("components", {})
            return cls(
                document,
                info["title"],
                info["version"],
                info.get("description", ""),
                tuple(_operations(document)),
                tuple(_messages(document)),
                {name: _fields(schema) for name, schema in parts.get("schemas", {}).items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidSetting(
                f"the document of the app cannot be read: {error!r}", hint="nsqext app schema writes such documents"
            ) from error


def _last(reference: Mapping[str, Any]) -> str:
    return str(reference["$ref"]).rpartition("/")[2]


def _extension(value: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = value.get("bindings", {}).get(_EXTENSION, {})
    return found


def _topic(channel: Mapping[str, Any]) -> str:
    return str(_extension(channel).get("pattern") or channel["address"])


def _operations(document: Mapping[str, Any]) -> Iterator[OperationRow]:
    for name, one in document.get("operations", {}).items():
        channel = document["channels"][_last(one["channel"])]
        known = dict(_extension(one))
        yield OperationRow(
            name=name,
            action=str(one["action"]),
            topic=_topic(channel),
            pattern="pattern" in _extension(channel),
            channel=str(known.pop("channel", "")),
            summary=str(one.get("summary", "")),
            messages=tuple(_last(channel["messages"][_last(message)]) for message in one.get("messages", ())),
            notes=tuple(f"{key}: {value}" for key, value in known.items()),
        )


def _messages(document: Mapping[str, Any]) -> Iterator[MessageRow]:
    for channel in document.get("channels", {}).values():
        for reference in channel.get("messages", {}).values():
            identity = _last(reference)
            one = document["components"]["messages"][identity]
            binding = _extension(one)
            yield MessageRow(
                identity=identity,
                topic=_topic(channel),
                name=str(one.get("name", identity)),
                content_type=str(one.get("contentType", "")),
                payload=type_text(one["payload"]) if "payload" in one else "",
                headers=_fields(one.get("headers", {})),
                key="key" in binding,
                tag=str(binding.get("tag", {}).get("const", "")),
            )


def _fields(schema: Mapping[str, Any]) -> tuple[FieldRow, ...]:
    required = schema.get("required", ())
    return tuple(
        FieldRow(name, type_text(one), name in required, str(one.get("description", "")))
        for name, one in schema.get("properties", {}).items()
    )


def type_text(schema: Any) -> str:
    """Return a schema in a few words, such as ``array of Item or null``."""
    if not isinstance(schema, Mapping) or not schema:
        return "any"
    if "$ref" in schema:
        return _last(schema)
    for name, word in (("anyOf", " or "), ("oneOf", " or "), ("allOf", " and ")):
        if name in schema:
            return word.join(map(type_text, schema[name]))
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        values = [repr(value) for value in schema["enum"][:_MOST_VALUES]]
        return " or ".join([*values, "…"] if len(schema["enum"]) > _MOST_VALUES else values)
    return _plain_type(schema)


def _plain_type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "any")
    if kind == "array" and "items" in schema:
        items = schema["items"]
        return f"array of {', '.join(map(type_text, items)) if isinstance(items, list) else type_text(items)}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {type_text(schema['additionalProperties'])}"
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{text} ({schema['format']})" if "format" in schema else text
