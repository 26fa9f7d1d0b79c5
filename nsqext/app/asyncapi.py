"""Describe an app as a document of AsyncAPI 3.0: topics, bodies, headers, keys, tags and dead letters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from attrs import field, frozen

from nsqext.client.consumer.handlers.dead_letter import DEAD_LETTER_PREFIX
from nsqext.client.consumer.typed.parameters import HeaderInput, Inputs
from nsqext.client.consumer.typed.schema import body_schemas, content_type
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.messages import KEY_HEADER
from nsqext.protocol.names import is_topic_pattern

if TYPE_CHECKING:
    from nsqext.app.app import App
    from nsqext.app.router import HandlerSpec

_T = TypeVar("_T")

_SCHEMAS = "#/components/schemas/"
_BINDING = "x-nsq"  # an extension: the standard has no binding of NSQ
_OUTSIDE = re.compile(r"[^a-zA-Z0-9._-]")
_HEADER_TYPES = {str: "string", int: "integer", float: "number"}
_DEAD_LETTER_HEADERS = ("error", "topic", "channel", "partition", "attempts", "id", "time")


@frozen
class _Message:
    """Messages of a topic."""

    topic: str
    kind: Any = field(default=None, eq=str)  #: type of the bodies, which may have no hash; None if not known
    headers: tuple[HeaderInput, ...] = ()
    key: str | None = None  #: header of the key
    tag: str | None = None
    dead: bool = False  #: dead letters

    @property
    def name(self) -> str:
        if self.dead:
            return "DeadLetter"
        if isinstance(self.kind, type) and not get_args(self.kind):
            return self.kind.__name__
        return "Message" if self.kind is None else _as_id(str(self.kind).replace("typing.", ""))


@frozen
class _Operation:
    """What a handler or publisher does with messages."""

    action: str  #: receive or send
    name: str
    message: _Message
    function: object = None
    binding: Mapping[str, object] = field(factory=dict)


def asyncapi_document(
    app: App, *, title: str | None = None, version: str = "1.0.0", description: str = ""
) -> dict[str, Any]:
    """Return the document of AsyncAPI 3.0 that describes an app, as JSON values.

    Handlers are operations that receive; publishers, topics of `Router.publishes` and dead letters are operations that
    send. Handlers of messages or batches, and functions without a return annotation, leave the bodies open. What is
    particular to NSQ is in the extension ``x-nsq`` of bindings.

    Args:
        title: name of the service; by default the module of its first handler.
        version: version of the service, not of AsyncAPI.
        description: text in CommonMark.

    Raises:
        InvalidSetting: the result of a handler with publishers is of a type that bodies cannot have.
    """
    operations = list(_operations(app))
    ids = _unique({one.message: f"{_as_id(one.message.topic)}.{one.message.name}" for one in operations})
    messages = {name: message for message, name in ids.items()}
    channels = _unique({one.topic: _as_id(one.topic) for one in ids})
    typed = [name for name, one in messages.items() if one.kind is not None]
    schemas = body_schemas([messages[name].kind for name in typed], _SCHEMAS)
    payloads = dict(zip(typed, schemas.bodies, strict=True))
    module = str(getattr(app.specs[0].function, "__module__", "app")) if app.specs else "app"
    info = {"title": title or module, "version": version, **({"description": description} if description else {})}
    return {
        "asyncapi": "3.0.0",
        "info": info,
        "defaultContentType": "application/json",
        "servers": _servers(app),
        "channels": _channels(ids, channels),
        "operations": _named(operations, ids, channels),
        "components": {
            "messages": {name: _message_object(one, payloads.get(name)) for name, one in messages.items()},
            "schemas": dict(schemas.definitions),
        },
    }


def _as_id(text: str) -> str:
    return _OUTSIDE.sub("_", text)


def _servers(app: App) -> dict[str, Any]:
    return {
        f"{program}-{number}": {"host": address, "protocol": "nsq", "bindings": {_BINDING: {"program": program}}}
        for number, (program, address) in enumerate(app.addresses, 1)
    }


def _operations(app: App) -> Iterator[_Operation]:
    for spec in app.specs:
        qualified = getattr(spec.function, "__qualname__", type(spec.function).__qualname__)
        name = _as_id(qualified.rpartition("<locals>.")[2])
        inputs = Inputs() if spec.plan is None else spec.plan.inputs
        options = app.options_of(spec)
        key = options.key if isinstance(options.key, str) else None
        if key is None and (inputs.key or options.dispatch == KEY_FAILOVER):
            key = KEY_HEADER
        for topic in spec.topics.given:
            message = _Message(topic, inputs.body, inputs.headers, key, options.tag)
            yield _Operation("receive", name, message, spec.function, _receiving(app, spec))
            if isinstance(options.failure.dead_letter, str):
                dead = _Message(options.failure.dead_letter, inputs.body, inputs.headers, key, dead=True)
                yield _Operation("send", f"{name}.dead-letters", dead)
        for topic in app.publishers.get(spec.function, ()):
            yield _Operation("send", f"{name}.result", _Message(topic, _result_of(spec.function)), spec.function)
    for one in app.published:
        headers = tuple(HeaderInput(name, kind, True) for name, kind in one.headers.items())
        message = _Message(one.topic, one.kind, headers, KEY_HEADER if one.key else None, one.tag)
        yield _Operation("send", f"publish.{_as_id(one.topic)}", message)


def _receiving(app: App, spec: HandlerSpec) -> dict[str, object]:
    """Return the binding of a handler's operation."""
    options = app.options_of(spec)
    failure = options.failure
    known = {
        "channel": spec.channel,
        "tag": options.tag,
        "ordered": options.ordered,
        "dispatch": options.dispatch,
        "partitions": list(options.partitions) if options.partitions is not None else None,
        "concurrency": options.concurrency if options.concurrency > 1 else None,
        "batch": spec.batch.max_count if spec.batch is not None else None,
        "maxAttempts": failure.max_attempts or None,
        "deadLetter": failure.dead_letter if isinstance(failure.dead_letter, str) else None,
    }
    return {name: value for name, value in known.items() if value is not None}


def _result_of(function: Any) -> Any:
    """Return the annotated type of a function's result, besides None; None if not known."""
    plain = inspect.unwrap(function) if inspect.isroutine(function) else type(function).__call__
    try:
        found = get_type_hints(plain).get("return")
    except NameError:
        return None  # of another function, or imported for the type checker only
    parts = get_args(found) if get_origin(found) in (Union, UnionType) else (found,)
    kinds = [part for part in parts if part is not NoneType]
    if not kinds or any(kind is None or kind is object or kind is OutgoingMessage for kind in kinds):
        return None
    return kinds[0] if len(kinds) == 1 else Union[tuple(kinds)]  # noqa: UP007 - made of values


def _unique(wanted: Mapping[_T, str]) -> dict[_T, str]:
    """Return the identifiers; repeated identifiers get a number."""
    found: dict[_T, str] = {}
    for one, name in wanted.items():
        names = (name, *(f"{name}-{number}" for number in range(2, len(wanted) + 1)))
        found[one] = next(free for free in names if free not in found.values())
    return found


def _channels(ids: Mapping[_Message, str], channels: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for message, name in ids.items():
        channel = found.setdefault(channels[message.topic], {**_address(message.topic), "messages": {}})
        channel["messages"][name] = {"$ref": f"#/components/messages/{name}"}
    return found


def _address(topic: str) -> dict[str, Any]:
    """Return the address of a topic; wildcards of a pattern are parameters."""
    if not is_topic_pattern(topic):
        return {"address": topic}
    pieces = re.split(r"([*?])", topic)
    parameters: dict[str, Any] = {}
    for index in range(1, len(pieces), 2):
        name = f"part{index // 2 + 1}"
        parameters[name] = {"description": "any characters" if pieces[index] == "*" else "any character"}
        pieces[index] = f"{{{name}}}"
    return {"address": "".join(pieces), "parameters": parameters, "bindings": {_BINDING: {"pattern": topic}}}


def _named(
    operations: Sequence[_Operation], ids: Mapping[_Message, str], channels: Mapping[str, str]
) -> dict[str, Any]:
    names = _unique({number: one.name for number, one in enumerate(operations)})
    found: dict[str, Any] = {}
    for number, one in enumerate(operations):
        channel = f"#/channels/{channels[one.message.topic]}"
        found[names[number]] = {
            "action": one.action,
            "channel": {"$ref": channel},
            "messages": [{"$ref": f"{channel}/messages/{ids[one.message]}"}],
            **_texts(one.function),
            **({"bindings": {_BINDING: dict(one.binding)}} if one.binding else {}),
        }
    return found


def _texts(function: object) -> dict[str, str]:
    """Return summary and description of an operation, from a docstring."""
    text = inspect.getdoc(function) if inspect.isroutine(function) else None
    summary, _, rest = (text or "").partition("\n\n")
    texts = {"summary": " ".join(summary.split()), "description": rest.strip()}
    return {name: value for name, value in texts.items() if value}


def _message_object(message: _Message, payload: dict[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"name": message.name}
    if payload is not None:
        found |= {"contentType": content_type(message.kind), "payload": payload}
    headers = _headers(message)
    if headers is not None:
        found["headers"] = headers
    binding: dict[str, Any] = {"key": {"type": "string"}} if message.key is not None else {}
    if message.tag is not None:
        binding["tag"] = {"type": "string", "const": message.tag}
    if binding:
        found["bindings"] = {_BINDING: binding}
    return found


def _headers(message: _Message) -> dict[str, Any] | None:
    """Return the schema of the extend headers."""
    properties: dict[str, Any] = {one.name: {"type": _HEADER_TYPES[one.kind]} for one in message.headers}
    required = [one.name for one in message.headers if one.required]
    if message.dead:
        added = [DEAD_LETTER_PREFIX + name for name in _DEAD_LETTER_HEADERS]
        properties |= {key: {"type": "string"} for key in added}
        required = []  # a topic without extend support keeps no header
    if message.key is not None:
        properties[message.key] = {"type": "string", "description": "the key of the message"}
    if not properties:
        return None
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}
