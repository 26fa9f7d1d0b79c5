"""Rows with the column ``header``: messages are published as they were stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from nsqext import OutgoingMessage
from nsqext.client.producer.given_header import trace_id_of
from nsqext.errors import InvalidHeader, ProtocolError
from nsqext.protocol.headers import decode_headers, header_json
from nsqext.protocol.messages import RESERVED_PREFIX, tag_of


class Pair(TypedDict):
    """A header of a row that has its headers as an array."""

    key: str | None
    value: bytes | None


def as_stored(
    value: bytes,
    header: bytes,
    headers: Mapping[str, str | None] | Sequence[Pair | None] | None,
    trace_id: int | None,
    tag: str | None,
    key: bytes | None,
) -> OutgoingMessage:
    """Return the message of a row with an extend header in bytes; other columns must agree with it.

    Raises InvalidHeader.
    """
    try:
        full = decode_headers(header)
    except ProtocolError as error:
        raise InvalidHeader(f"column header: {error.message}") from error
    own = {name: header_json(item) for name, item in full.items() if not name.startswith(RESERVED_PREFIX)}
    if headers is not None and _as_mapping(headers) != own:
        raise _contradiction("headers")
    if tag is not None and tag != tag_of(full):
        raise _contradiction("tag")
    if header and trace_id and trace_id != trace_id_of(header):
        raise _contradiction("trace_id")
    return OutgoingMessage(value, None, None, None if header else trace_id, key, header=header)


def _as_mapping(headers: Mapping[str, str | None] | Sequence[Pair | None]) -> Mapping[Any, Any]:
    if isinstance(headers, Mapping):
        return headers
    texts = ((pair["key"], pair["value"]) for pair in headers if pair is not None)
    return {name: None if value is None else value.decode("utf-8", "replace") for name, value in texts}


def _contradiction(column: str) -> InvalidHeader:
    return InvalidHeader(
        f"the columns header and {column} contradict each other",
        hint=f"set header to null to publish the changed {column}, or drop {column}",
    )
