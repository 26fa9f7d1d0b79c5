"""Kombu's messages as NSQ messages, without loss; exchanges, queues and bindings in NSQ.

On topics with extend support the body is stored unchanged, and an extend header has the rest; otherwise, and where that
is too long for a header, the body is a JSON envelope with both. Bodies of other publishers, with neither, are received
as binary data.

A queue is a channel. Its topics depend on the exchange:

- the default exchange: one topic per queue, with the queue's name;
- a durable direct exchange: one topic per routing key, so that a queue receives only its messages;
- fanout, topic and transient direct exchanges: one topic per exchange; consumers drop what no binding selects.

Exchange and routing key of a publish decide its topic: publishers do not know bindings.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson
from attrs import define, field, frozen

_HEADER = "kombu"
_MARK = "kombu"  # member of envelopes only; its value is the version
_VERSION = 1
_LONGEST_HEADER = 25_000  # bytes; a header of JSON text doubles at most, and servers accept 60,000
# AMQP's properties, and where a message goes; other members stay with the publisher, as with AMQP brokers
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


def encode_message(message: Mapping[str, Any], *, extend: bool) -> tuple[bytes, dict[str, str] | None]:
    """Return body and extend headers for a message of `kombu.transport.virtual.Channel.prepare_message`."""
    given = message["body"]
    body: bytes = given.encode() if isinstance(given, str) else bytes(given)
    rest = {name: value for name, value in message.items() if name != "body"}
    rest["properties"] = {name: value for name, value in message["properties"].items() if name in _PROPERTIES}
    rest["text"] = isinstance(given, str)
    header = orjson.dumps(rest)
    if extend and body and len(header) <= _LONGEST_HEADER:
        return body, {_HEADER: header.decode()}
    return orjson.dumps({_MARK: _VERSION, "body": base64.b64encode(body).decode(), **rest}), None


def decode_message(body: bytes, headers: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a message for `kombu.transport.virtual.Message` without ``delivery_tag``; None for other publishers."""
    rest, content = _read_rest(body, headers)
    if rest is None:
        return None
    found = {**rest, "body": content}
    if found.pop("text", False):
        with suppress(UnicodeDecodeError):  # bytes of another publisher: the receiver's decoding fails, and reports it
            found["body"] = content.decode()
    return found


def foreign_message(body: bytes, queue: str) -> dict[str, Any]:
    """Return another publisher's message: binary data sent to the queue by name."""
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
    """Return the members; raise KeyError or TypeError if they are not a message's."""
    route = rest["properties"]["delivery_info"]
    if not isinstance(rest["headers"], dict):
        raise TypeError("headers are not an object")
    if not (isinstance(route["routing_key"], str) and isinstance(route.get("exchange", ""), str)):
        raise TypeError("exchange and routing key are not text")
    properties = {name: value for name, value in rest["properties"].items() if name in _PROPERTIES}
    return {**rest, "properties": properties}


def due_time(message: Mapping[str, Any]) -> float | None:
    """Return when Celery should run the task, in seconds since 1970; None for at once."""
    eta = (message.get("headers") or {}).get("eta")
    if not isinstance(eta, str):
        return None
    try:
        time = datetime.fromisoformat(eta)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def expires_after(message: Mapping[str, Any]) -> float | None:
    """Return the seconds that a message may wait in its queue (``expiration``), or None."""
    try:
        return int(message["properties"]["expiration"]) / 1000  # milliseconds as text, as in AMQP
    except (KeyError, OverflowError, TypeError, ValueError):
        return None


_NAME = re.compile(r"[.a-zA-Z0-9_-]{1,64}")
_INVALID = re.compile(r"[^.a-zA-Z0-9_-]")
_DIGEST = 12  # characters of a digest for names with equal replacements
_EPHEMERAL = "#ephemeral"
_LONGEST = 64 - len(_EPHEMERAL)  # the redesigned NSQ counts an ephemeral channel's suffix as part of its name


@frozen
class Exchange:
    """A declared exchange."""

    name: str = ""  #: empty for the default exchange
    type: str = "direct"  #: `direct`, `fanout` or `topic`
    durable: bool = True  #: transient exchanges are for replies and events

    @property
    def has_one_topic(self) -> bool:
        return self.type != "direct" or (bool(self.name) and not self.durable)


@frozen
class Binding:
    """The binding of a queue to an exchange."""

    exchange: Exchange
    #: a pattern for exchanges of type `topic`, where `*` is one word and `#` any number of words
    routing_key: str

    @property
    def topic(self) -> str:
        return topic_of(self.exchange, self.routing_key)

    def selects(self, exchange: str, routing_key: str) -> bool:
        """Return whether a message with this exchange and routing key is for the queue."""
        if exchange != self.exchange.name:
            return False
        if self.exchange.type == "topic":
            return _matches(_words(self.routing_key), _words(routing_key))
        return self.exchange.type == "fanout" or routing_key == self.routing_key


@define(eq=False)
class QueueSpec:
    """A declared queue."""

    name: str
    transient: bool = False  #: ends with its consumer, as it is exclusive or deleted automatically
    bindings: list[Binding] = field(factory=list)  #: except the default exchange's

    @property
    def channel(self) -> str:
        return channel_name(self.name, transient=self.transient)

    @property
    def topics(self) -> list[str]:
        """The NSQ topics; without the default exchange's if the queue is transient and has bindings."""
        found = [binding.topic for binding in self.bindings]
        if not (self.transient and found):
            found.append(nsq_name(self.name))
        return list(dict.fromkeys(found))

    def selects(self, exchange: str, routing_key: str) -> bool:
        if not exchange:
            return routing_key == self.name
        return any(binding.selects(exchange, routing_key) for binding in self.bindings)


def topic_of(exchange: Exchange, routing_key: str) -> str:
    """Return the NSQ topic of an exchange and a routing key."""
    if exchange.has_one_topic or not routing_key or routing_key == exchange.name:
        return nsq_name(exchange.name)
    return nsq_name(f"{exchange.name}.{routing_key}" if exchange.name else routing_key)


def channel_name(queue: str, *, transient: bool) -> str:
    """Return a queue's NSQ channel; servers delete a transient queue's channel with its last connection."""
    return nsq_name(queue) + (_EPHEMERAL if transient else "")


def nsq_name(name: str) -> str:
    """Return a name for NSQ: unchanged, or with a digest if it is too long or has other characters."""
    if _NAME.fullmatch(name) and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{_INVALID.sub('-', name)[: _LONGEST - _DIGEST - 1]}.{digest}"


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    if not pattern:
        return not words
    first, *rest = pattern
    if first == "#":
        return any(_matches(rest, words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _matches(rest, words[1:])


def _words(routing_key: str) -> list[str]:
    return routing_key.split(".") if routing_key else []
