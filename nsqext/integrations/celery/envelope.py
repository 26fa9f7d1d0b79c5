"""Kombu's messages as NSQ messages, without loss.

On topics with extend support the body is stored as it is, and an extend header holds the rest; otherwise the body is an
envelope of JSON with both. Bodies of other publishers, which have neither, are received as binary data.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

_HEADER = "kombu"
_MARK = "kombu"  # name of the member that tells an envelope from a body of another publisher; its value is the version
_VERSION = 1
_PROPERTIES = frozenset(
    {
        "app_id",
        "content_encoding",
        "content_type",
        "correlation_id",
        "delivery_info",
        "delivery_mode",
        "expiration",
        "message_id",
        "priority",
        "reply_to",
        "timestamp",
        "type",
        "user_id",
    }
)
"""Those of AMQP, and where a message goes; others are for the publisher alone, as with brokers of AMQP."""


def encode_message(message: Mapping[str, Any], *, extend: bool) -> tuple[bytes, dict[str, str] | None]:
    """Return body and extend headers of a message of `kombu.transport.virtual.Channel.prepare_message`."""
    given = message["body"]
    body: bytes = given.encode() if isinstance(given, str) else bytes(given)
    rest = {name: value for name, value in message.items() if name != "body"}
    rest["properties"] = {name: value for name, value in message["properties"].items() if name in _PROPERTIES}
    rest["text"] = isinstance(given, str)
    if extend and body:
        return body, {_HEADER: orjson.dumps(rest).decode()}
    return orjson.dumps({_MARK: _VERSION, "body": base64.b64encode(body).decode(), **rest}), None


def decode_message(body: bytes, headers: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a message as `kombu.transport.virtual.Message` reads it, without ``delivery_tag``.

    Returns None for a message of another publisher; see `foreign_message`.
    """
    rest, content = _read_rest(body, headers)
    if rest is None:
        return None
    is_text = rest.pop("text", False)
    return {**rest, "body": content.decode() if is_text else content}


def foreign_message(body: bytes, queue: str) -> dict[str, Any]:
    """Return a message of another publisher: its body as binary data, sent to the queue by name."""
    return {
        "body": body,
        "content-type": "application/data",
        "content-encoding": "binary",
        "headers": {},
        "properties": {"delivery_info": {"exchange": "", "routing_key": queue}},
    }


def _read_rest(body: bytes, headers: Mapping[str, Any]) -> tuple[dict[str, Any] | None, bytes]:
    header = headers.get(_HEADER)
    try:
        if isinstance(header, str):
            return _checked(orjson.loads(header)), body
        envelope = orjson.loads(body) if body.startswith(b'{"kombu":') else None
        if not isinstance(envelope, dict) or envelope.pop(_MARK, None) != _VERSION:
            return None, body
        return _checked(envelope), base64.b64decode(envelope.pop("body"), validate=True)
    except (binascii.Error, KeyError, TypeError, ValueError):
        return None, body


def _checked(rest: Any) -> dict[str, Any]:
    """Return the members; raise KeyError or TypeError if they are not those of a message."""
    rest["properties"]["delivery_info"]["routing_key"]
    if not isinstance(rest["headers"], dict):
        raise TypeError("headers are not an object")
    return dict(rest)


def due_time(message: Mapping[str, Any]) -> float | None:
    """Return when Celery is to run the task, in seconds since 1970; None if at once.

    The worker would keep such a message in flight until then, for longer than servers allow.
    """
    eta = (message.get("headers") or {}).get("eta")
    if not isinstance(eta, str):
        return None
    try:
        time = datetime.fromisoformat(eta)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def expires_after(message: Mapping[str, Any]) -> float | None:
    """Return how many seconds a message may wait in its queue, from the ``expiration`` of its publisher; or None."""
    try:
        return int(message["properties"]["expiration"]) / 1000  # milliseconds as text, as in AMQP
    except (KeyError, TypeError, ValueError):
        return None
