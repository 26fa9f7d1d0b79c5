"""Decode bodies by type, and encode objects as bodies."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.errors import InvalidBody, InvalidSetting

T = TypeVar("T")

_DUMP = {"by_alias": True, "round_trip": True}  # without computed fields, which validation may refuse

_FIELDS = ("__struct_fields__", "__dataclass_fields__", "__pydantic_fields__")

BodyDecoder = Callable[[bytes], Any]
"""Decodes a body; raises ValueError if it is not valid, RecursionError if it is nested too deeply."""


def body_decoder(kind: Any) -> BodyDecoder | None:
    """Return the decoder for a type; None for bytes. Raises InvalidSetting.

    ``str`` is UTF-8; every other type is JSON. msgspec checks plain values, dataclasses, attrs classes and msgspec
    structs with nested, optional, list, dict, Enum, datetime, Decimal and UUID members (without converting ``"3"`` to a
    number); pydantic checks types that contain a pydantic model; ``Any`` is not checked.
    """
    if kind is bytes:
        return None
    if kind is str:
        return bytes.decode
    if kind is Any or kind is object:
        return msgspec.json.decode  # orjson reads whole numbers above 2**64 as floats
    if uses_pydantic(kind):
        return _pydantic_decoder(kind)
    try:
        described = msgspec.inspect.type_info(kind)
        decoder = msgspec.json.Decoder(kind, dec_hook=_decode_other)
    except (TypeError, NameError, AttributeError) as error:
        raise _unknown(kind, str(error)) from None
    if isinstance(described, msgspec.inspect.CustomType):
        raise _unknown(kind, "it is not a type of JSON values")
    try:
        for part in _parts(kind):
            if isinstance(part, type):
                _check_names(part)
    except TypeError as error:
        raise _unknown(kind, str(error)) from None
    return decoder.decode


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a body; see `body_decoder`.

    Raises:
        InvalidSetting: no decoder knows the type.
        ValueError: the body is not valid for the type.
    """
    decode = body_decoder(kind)
    try:
        found: T = body if decode is None else decode(body)  # type: ignore[assignment]
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return found


def encode_body(value: object) -> bytes:
    """Return a body for a value: bytes as they are, text in UTF-8, everything else as JSON.

    JSON values, dataclasses, attrs classes, msgspec structs, pydantic models and pydantic dataclasses are encoded so
    that `decode_body` reads them: fields of pydantic have the aliases that validation accepts.

    Raises:
        InvalidBody: JSON cannot express the value, or it would be decoded as another value: a float that is not finite,
            an alias only for serialization, an excluded required field, a private field.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        raise InvalidBody(f"a {type(value).__name__} would be encoded as text of JSON", hint="give bytes(value)")
    parts = value if isinstance(value, (list, tuple)) else (value,)
    if parts and isinstance(parts[0], OutgoingMessage):
        raise InvalidBody(
            "an OutgoingMessage is not a body",
            hint="publish its body with headers=, tag=, trace_id= and key=, or several by Producer.publish_many",
        )
    kind: Any = type(value)
    try:
        if isinstance(value, str):
            return value.encode()
        if is_pydantic(kind):
            body: bytes = _pydantic_adapter(kind).dump_json(value, **_DUMP)
        else:
            _check_parts(value)
            body = msgspec.json.encode(value, enc_hook=_encode_other)
        if b"null" in body:
            _check_finite(value)
        return body
    except (TypeError, ValueError, NotImplementedError, OverflowError, RecursionError) as error:
        raise InvalidBody(
            f"a {type(value).__qualname__} cannot be encoded as a body: {error}",
            hint="publish bytes, str, JSON values, a dataclass, or an attrs, msgspec or pydantic object",
        ) from error


def type_name(kind: Any) -> str:
    """Return a type as written in code."""
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _unknown(kind: Any, reason: str) -> InvalidSetting:
    return InvalidSetting(
        f"bodies cannot be decoded as {type_name(kind)}: {reason}",
        hint="use bytes, str, JSON types, a dataclass, or an attrs, msgspec or pydantic class, defined in a module",
    )


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for argument in get_args(kind):
        yield from _parts(argument)


def uses_pydantic(kind: Any) -> bool:
    """Return whether a type contains a pydantic model."""
    pydantic = sys.modules.get("pydantic")  # types of pydantic exist only after its import
    if pydantic is None:
        return False
    return any(is_pydantic(part) for part in _parts(kind))


def is_pydantic(kind: Any) -> bool:
    """Return whether a type is a pydantic model or dataclass."""
    return isinstance(kind, type) and hasattr(kind, "__pydantic_validator__")


def _pydantic_decoder(kind: Any) -> BodyDecoder:
    pydantic = sys.modules["pydantic"]
    adapter = pydantic.TypeAdapter(kind)

    def decode(body: bytes) -> Any:
        try:
            return adapter.validate_json(body, by_alias=True, by_name=True)
        except pydantic.ValidationError as error:
            # the error's text would repeat the body
            places = error.errors(include_url=False, include_context=False, include_input=False)
            reasons = (f"{place['msg']} - at `{'.'.join(map(str, place['loc'])) or '$'}`" for place in places)
            raise ValueError("; ".join(reasons)) from None

    return decode


@lru_cache(maxsize=256)
def _member_decoder(kind: Any) -> BodyDecoder:
    return _pydantic_decoder(kind)


def _decode_other(kind: Any, value: object) -> object:
    """Return a member of a type that msgspec does not know, such as a pydantic model in a dataclass."""
    return _member_decoder(kind)(msgspec.json.encode(value)) if is_pydantic(kind) else value


def _encode_other(value: object) -> object:
    kind: Any = type(value)
    if not is_pydantic(kind):
        raise TypeError(f"{kind.__qualname__} is not a JSON value")
    return _pydantic_adapter(kind).dump_python(value, mode="json", **_DUMP)


@lru_cache(maxsize=256)
def _pydantic_adapter(kind: Any) -> Any:
    _check_aliases(kind)
    return sys.modules["pydantic"].TypeAdapter(kind)


@lru_cache(maxsize=256)
def _check_aliases(kind: Any) -> None:
    """Raise TypeError if validation does not accept the names that serialization writes, also of nested models."""
    waiting, checked = [kind], set[Any]()
    while waiting:
        one = waiting.pop()
        if one in checked:  # models may contain each other
            continue
        checked.add(one)
        fields = getattr(one, "model_fields", None) or getattr(one, "__pydantic_fields__", {})
        for name, field in fields.items():
            if field.exclude and field.is_required():
                raise TypeError(f"the required field {name} of {one.__qualname__} is excluded from serialization")
            written, read = field.serialization_alias or name, field.validation_alias
            choices = getattr(read, "choices", [read])
            accepted = {name, *(choice for choice in choices if isinstance(choice, str))}
            if written not in accepted:
                raise TypeError(
                    f"the field {name} of {one.__qualname__} is written as {written!r}, which validation does not "
                    "accept; add it to validation_alias"
                )
            waiting += filter(is_pydantic, _parts(field.annotation))


@lru_cache(maxsize=256)
def _check_names(kind: type) -> None:
    """Raise TypeError if a field of a dataclass or attrs class, also nested, has a private name."""
    waiting, checked = [kind], set[type]()
    while waiting:
        one = waiting.pop()
        fields: Any = getattr(one, "__dataclass_fields__", None) or getattr(one, "__attrs_attrs__", None)
        if fields is None or one in checked:  # classes may contain each other
            continue
        checked.add(one)
        for name in list(fields) if isinstance(fields, Mapping) else [field.name for field in fields]:
            if name.startswith("_"):
                raise TypeError(f"the field {name} of {one.__qualname__} begins with an underscore and is not encoded")
        with suppress(NameError):  # of a class in a function, or imported for type checkers only
            for hint in get_type_hints(one).values():
                waiting += [part for part in _parts(hint) if isinstance(part, type)]


def _check_parts(value: object) -> None:
    """Raise TypeError if a field of a value, or of the values of a list or dict, is not encoded."""
    parts: Iterable[object] = (value,)
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = value
    elif isinstance(value, Mapping):
        parts = value.values()
    for kind in set(map(type, parts)):
        _check_names(kind)


def _check_finite(value: object) -> None:
    """Refuse floats that JSON cannot express and msgspec would write as null; raises ValueError."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            raise ValueError(f"{one} is not a number of JSON")
        if isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += one
        elif not isinstance(one, (str, bytes, int, float, type(None))):
            waiting += _members(one)


def _members(value: object) -> list[object]:
    kind: Any = type(value)
    names = [name for kinds in _FIELDS for name in getattr(kind, kinds, ())]
    names += [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    extra = getattr(value, "__pydantic_extra__", None) or {}
    return [*(getattr(value, name) for name in names if hasattr(value, name)), *extra.values()]
