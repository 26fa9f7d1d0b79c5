"""Decode bodies by type, and encode objects as bodies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, get_args

import msgspec
import orjson

from nsqext.errors import InvalidBody, InvalidSetting

__all__ = ("BodyDecoder", "body_decoder", "decode_body", "encode_body", "type_name")

T = TypeVar("T")

BodyDecoder = Callable[[bytes], Any]
"""Decodes a body; raises a ValueError where that is not possible."""


def body_decoder(kind: Any) -> BodyDecoder | None:
    """Return the decoder for a type; None for bytes, which need none.

    ``str`` is UTF-8. Every other type is JSON: plain values, dataclasses, attrs classes and msgspec structs, with
    nested, optional, list, dict, Enum, datetime, Decimal and UUID members, are checked by msgspec (without converting
    ``"3"`` to a number); types that contain a pydantic model are checked by pydantic; ``Any`` is not checked.

    Raises:
        InvalidSetting: no decoder knows the type.
    """
    if kind is bytes:
        return None
    if kind is str:
        return _decode_text
    if kind is Any or kind is object:
        return orjson.loads
    if _uses_pydantic(kind):
        return _pydantic_decoder(kind)
    try:
        described = msgspec.inspect.type_info(kind)
        decoder = msgspec.json.Decoder(kind)
    except (TypeError, NameError, AttributeError) as error:
        raise _unknown(kind, str(error)) from None
    if isinstance(described, msgspec.inspect.CustomType):
        raise _unknown(kind, "it is not a type of JSON values")
    return decoder.decode


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a body; for one body, see `body_decoder`.

    Raises:
        InvalidSetting: no decoder knows the type.
        ValueError: the body is not valid for the type.
    """
    decode = body_decoder(kind)
    found: T = body if decode is None else decode(body)  # type: ignore[assignment]
    return found


def encode_body(value: object) -> bytes:
    """Return a body for a value: bytes as they are, text in UTF-8, everything else as JSON.

    JSON values, dataclasses, attrs classes, msgspec structs and pydantic models can be encoded.

    Raises:
        InvalidBody: the value cannot be encoded.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    try:
        return msgspec.json.encode(value, enc_hook=_encode_other)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise InvalidBody(
            f"a {type(value).__qualname__} cannot be encoded as a body: {error}",
            hint="publish bytes, str, JSON values, a dataclass, or an attrs, msgspec or pydantic object",
        ) from error


def type_name(kind: Any) -> str:
    """Return a type as it is written in code."""
    return kind.__qualname__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _unknown(kind: Any, reason: str) -> InvalidSetting:
    return InvalidSetting(
        f"bodies cannot be decoded as {type_name(kind)}: {reason}",
        hint="use bytes, str, JSON types, a dataclass, or an attrs, msgspec or pydantic class, defined in a module",
    )


def _decode_text(body: bytes) -> str:
    return body.decode()


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for argument in get_args(kind):
        yield from _parts(argument)


def _uses_pydantic(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")  # a type of pydantic can only exist where it was imported
    if pydantic is None:
        return False
    return any(
        (isinstance(part, type) and issubclass(part, pydantic.BaseModel)) or hasattr(part, "__pydantic_validator__")
        for part in _parts(kind)
    )


def _pydantic_decoder(kind: Any) -> BodyDecoder:
    pydantic = sys.modules["pydantic"]
    adapter = pydantic.TypeAdapter(kind)

    def decode(body: bytes) -> Any:
        try:
            return adapter.validate_json(body)
        except pydantic.ValidationError as error:
            # the text of the error would repeat the body
            places = error.errors(include_url=False, include_context=False, include_input=False)
            reasons = (f"{place['msg']} - at `{'.'.join(map(str, place['loc'])) or '$'}`" for place in places)
            raise ValueError("; ".join(reasons)) from None

    return decode


def _encode_other(value: object) -> object:
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"{type(value).__qualname__} is not a JSON value")
    return dump(mode="json")
