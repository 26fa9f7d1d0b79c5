"""Extend headers: the JSON object of a message in an extend topic (extend header note)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import orjson

from nsqext.errors import InvalidHeader, ProtocolError
from nsqext.protocol.messages import DUE_HEADER, KEY_HEADER, RESERVED_PREFIX, TAG_HEADER, TRACE_ID_HEADER
from nsqext.protocol.names import check_tag, check_trace_id

__all__ = (
    "MAX_HEADER_BYTES",
    "add_key",
    "decode_headers",
    "encode_headers",
    "header_json",
    "message_header",
)

MAX_STORED_HEADER = 65_506
"""Bytes; servers crash on larger headers (captured in ext_max_header)."""
MAX_HEADER_BYTES = 60_000
"""Largest header that this package makes, well below `MAX_STORED_HEADER`."""

# the note allows [0-9a-zA-Z_-#], the Go client's headers also need the dot, servers check nothing
_HEADER_NAME = re.compile(r"[0-9a-zA-Z_.#-]+")
_END_OF_VALUE = "\0"  # JSON escapes it


def encode_headers(
    headers: Mapping[str, str] | None = None,
    *,
    tag: str | None = None,
    trace_id: int | None = None,
    reserved: Mapping[str, str] | None = None,
) -> bytes:
    """Return the JSON bytes of an extend header; the mapping stays unchanged.

    Args:
        headers: names match ``[0-9a-zA-Z_.#-]+`` and do not begin with ``##``, values are text.
        tag: becomes ``##client_dispatch_tag``.
        trace_id: becomes ``##trace_id``, a decimal string (captured: pub_ext_errors).
        reserved: further names with the ``##`` prefix.

    Raises:
        InvalidHeader: invalid name or value, or more than `MAX_HEADER_BYTES`.
        InvalidName: invalid tag.
        InvalidInput: invalid trace id.
    """
    full: dict[str, str] = {}
    if headers is not None:
        if type(headers) is not dict and not isinstance(headers, Mapping):  # a check of an ABC costs more than the rest
            raise InvalidHeader(f"headers must be a mapping, not {type(headers).__name__}", hint="give a dict")
        for name, value in headers.items():
            if not (type(name) is str and type(value) is str and _is_free(name)):
                _check(name, value)
            full[name] = value
    if tag is not None:
        full[TAG_HEADER] = check_tag(tag)
    if trace_id is not None:
        full[TRACE_ID_HEADER] = str(check_trace_id(trace_id))
    if reserved:
        full.update(reserved)
    try:
        encoded = orjson.dumps(full)
    except TypeError as error:
        raise InvalidHeader(f"headers cannot be written as JSON: {error}", hint="values must be valid text") from error
    if len(encoded) > MAX_HEADER_BYTES:
        raise InvalidHeader(
            f"headers take {len(encoded)} bytes, more than {MAX_HEADER_BYTES}", hint="put large values into the body"
        )
    return encoded


def encode_header_columns(columns: Mapping[str, Sequence[str]]) -> list[bytes] | None:
    """Return what `encode_headers` returns for several messages, at a tenth of the cost.

    Args:
        columns: by header name, a text per message.

    Returns:
        None where `encode_headers` must check each message: for invalid or reserved names, and values that are no text
        or that JSON escapes.
    """
    parts: list[list[bytes]] = []
    for name, values in columns.items():
        try:
            joined = _END_OF_VALUE.join(values)
        except TypeError:
            return None
        plain = joined.replace(_END_OF_VALUE, "")
        if len(joined) - len(plain) != len(values) - 1 or not (plain.isascii() and plain.isprintable()):
            return None
        if not _is_free(name) or '"' in plain or "\\" in plain:
            return None
        begin = f'{"," if parts else "{"}"{name}":"'
        end = '"}' if len(parts) + 1 == len(columns) else '"'
        text = f"{begin}{joined.replace(_END_OF_VALUE, f'{end}{_END_OF_VALUE}{begin}')}{end}"
        parts.append(text.encode().split(_END_OF_VALUE.encode()))
    encoded = parts[0] if len(parts) == 1 else list(map(b"".join, zip(*parts, strict=True)))
    return encoded if max(map(len, encoded), default=0) <= MAX_HEADER_BYTES else None


def add_key(encoded: bytes, key: bytes) -> bytes:
    """Return an encoded header with a key (``##key``).

    Args:
        encoded: result of `encode_headers`; empty for no other headers.
        key: UTF-8 text; other bytes are sent as Latin-1.

    Raises:
        InvalidHeader: more than `MAX_HEADER_BYTES`.
    """
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = key.decode("latin-1")
    member = orjson.dumps({KEY_HEADER: text})
    full = encoded[:-1] + b"," + member[1:] if len(encoded) > len(b"{}") else member
    if len(full) > MAX_HEADER_BYTES:
        raise InvalidHeader(
            f"headers with the key take {len(full)} bytes, more than {MAX_HEADER_BYTES}", hint="use a shorter key"
        )
    return full


def message_header(
    headers: Mapping[str, str] | None, tag: str | None, trace_id: int | None, due: int | None, key: bytes | None
) -> bytes:
    """Return the extend header of a message; see `encode_headers` and `add_key`.

    Args:
        due: of a delayed message, in milliseconds since 1970.
    """
    header = b""
    if headers or tag is not None or due is not None:
        reserved = None if due is None else {DUE_HEADER: str(due)}
        header = encode_headers(headers, tag=tag, trace_id=trace_id, reserved=reserved)
    if key is None:
        return header
    if trace_id is not None and not header:
        header = encode_headers(trace_id=trace_id)
    return add_key(header, key)


@lru_cache(maxsize=4096)
def _is_free(name: str) -> bool:
    """Return whether users may set this header; cached: many messages use few names."""
    return _HEADER_NAME.fullmatch(name) is not None and not name.startswith(RESERVED_PREFIX)


def _check(name: object, value: object) -> None:
    if isinstance(name, str) and _is_free(name) and isinstance(value, str):
        return
    if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
        raise InvalidHeader(f"header name {name!r} is not valid", hint="use letters, digits, '_', '-', '.' and '#'")
    if name.startswith(RESERVED_PREFIX):
        raise InvalidHeader(
            f"header name {name!r} is reserved", hint="names that begin with '##' belong to NSQ; use tag= or trace_id="
        )
    if not isinstance(value, str):
        raise InvalidHeader(
            f"value of header {name!r} is {type(value).__name__}, not str", hint="convert it to text first"
        )


# types of values with whole numbers beyond 64 bits, which orjson reads as floats
_MAY_BE_INEXACT = frozenset((float, list, dict))


def decode_headers(encoded: bytes) -> dict[str, Any]:
    """Return the headers of a delivered message.

    Servers store any JSON value unchanged (captured: pub_ext): values may be of any JSON type, and a header that is not
    an object gives an empty dict. Whole numbers are exact. Of equal names the last counts.

    Servers also accept some invalid JSON. Invalid UTF-8 and half a surrogate pair become replacement characters. A
    value that is not JSON, such as ``NaN``, ``1e400`` or ``01``, becomes a `nsqext.RawJson` with its text.

    Raises:
        ProtocolError: servers cannot parse the bytes either.
    """
    if not encoded:
        return {}
    try:
        value = orjson.loads(encoded)
    except orjson.JSONDecodeError as error:
        from nsqext.protocol.extjson import UnreadableHeader, read_values  # few headers are no JSON

        try:
            return read_values(encoded)
        except UnreadableHeader:
            raise ProtocolError(f"extend header is not JSON: {error}") from error
    if not isinstance(value, dict):
        return {}
    for item in value.values():
        if type(item) in _MAY_BE_INEXACT:
            return _with_exact_numbers(encoded, value)
    return value


def _with_exact_numbers(encoded: bytes, value: dict[str, Any]) -> dict[str, Any]:
    from nsqext.protocol.extjson import UnreadableHeader, read_values

    try:
        return read_values(encoded)
    except UnreadableHeader:  # nested more deeply than servers read
        return value


def header_json(value: Any) -> str | None:
    """Return a header's value as text: text and None unchanged, other values as JSON."""
    return (
        value
        if value is None or isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )
