"""Messages as JSON records, written by `tail` and `record`, read by `pub` and `replay`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nsqext import OutgoingMessage
from nsqext.errors import InvalidInput, ProtocolError

if TYPE_CHECKING:
    from nsqext import Message


def message_record(message: Message) -> dict[str, Any]:
    """Return a message as a record: position, time, body and all properties of the publish."""
    record: dict[str, Any] = {
        "topic": message.topic,
        "partition": message.partition,
        "id": message.id.hex(),
        "attempts": message.attempts,
        "timestamp": message.timestamp,
        "trace_id": message.trace_id,
        "offset": message.offset if message.offset >= 0 else None,
    }
    try:
        record |= {"tag": message.tag, "key": message.key, "headers": dict(message.headers)}
    except ProtocolError:
        # a header that is not JSON is kept unchanged
        shown = base64.b64encode(message.header).decode()
        record |= {"tag": None, "key": None, "headers": {}, "header_base64": shown}
    return record | _body_fields(message.body)


def outgoing_message(record: object) -> OutgoingMessage:
    """Return the message of a record: body, headers, tag, key and trace id."""
    if not isinstance(record, Mapping):
        raise InvalidInput("a message record must be a JSON object")
    body, encoded = record.get("body"), record.get("body_base64")
    if encoded is not None:
        try:
            content = base64.b64decode(encoded, validate=True)
        except (TypeError, ValueError, binascii.Error) as error:
            raise InvalidInput(f"body_base64 cannot be decoded: {error}") from error
    elif isinstance(body, str):
        content = body.encode()
    else:
        raise InvalidInput("a message record needs body (text) or body_base64")
    headers = record.get("headers")
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidInput("headers must be a JSON object")
    trace_id = record.get("trace_id") or None
    if trace_id is not None and not isinstance(trace_id, int):
        raise InvalidInput("trace_id must be a number")
    texts = {name: str(value) for name, value in headers.items()} if headers else None
    return OutgoingMessage(content, texts, _text(record, "tag"), trace_id, _text(record, "key"))


def _text(record: Mapping[str, Any], name: str) -> str | None:
    value = record.get(name)
    return None if value is None else str(value)


def _body_fields(body: bytes) -> dict[str, str]:
    """Return a body for JSON: ``body`` where it is text, ``body_base64`` otherwise."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
