"""Where exchanges, queues and bindings are in NSQ.

A queue is a channel. Its topics depend on the exchange:

- the default exchange: one topic for each queue, with the name of the queue;
- a durable direct exchange: one topic for each routing key, so that a queue receives only its messages;
- fanout, topic and transient direct exchanges: one topic for the exchange; consumers drop what no binding selects.

Neither side needs to know the bindings of the other: a publish names exchange and routing key, and the topic follows
from them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from attrs import define, field, frozen

_NAME = re.compile(r"[.a-zA-Z0-9_-]{1,64}")
_INVALID = re.compile(r"[^.a-zA-Z0-9_-]")
_DIGEST = 12  # characters of a digest that keep two names apart whose replacements are equal
_EPHEMERAL = "#ephemeral"
_LONGEST = 64 - len(_EPHEMERAL)  # the redesigned NSQ counts the suffix of ephemeral channels as a part of the name


@frozen
class Exchange:
    """A declared exchange."""

    name: str = ""  # its name; empty for the default exchange
    type: str = "direct"  # `direct`, `fanout` or `topic`
    durable: bool = True  # whether it outlives its clients; transient ones are for replies and events

    @property
    def has_one_topic(self) -> bool:
        """Whether all messages of the exchange are in one topic."""
        return self.type != "direct" or (bool(self.name) and not self.durable)


@frozen
class Binding:
    """The binding of a queue to an exchange."""

    exchange: Exchange
    # its routing key; a pattern for exchanges of type `topic`, where `*` is a word and `#` is any number of words
    routing_key: str

    @property
    def topic(self) -> str:
        """The NSQ topic with the messages of the binding."""
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
    transient: bool = False  # whether it ends with its consumer: exclusive or deleted automatically
    bindings: list[Binding] = field(factory=list)  # its bindings besides that of the default exchange

    @property
    def channel(self) -> str:
        """The NSQ channel."""
        return channel_name(self.name, transient=self.transient)

    @property
    def topics(self) -> list[str]:
        """The NSQ topics; without one for the default exchange if the queue is transient and has bindings."""
        found = [binding.topic for binding in self.bindings]
        if not (self.transient and found):
            found.append(nsq_name(self.name))
        return list(dict.fromkeys(found))

    def selects(self, exchange: str, routing_key: str) -> bool:
        """Return whether a message is for this queue."""
        if not exchange:
            return routing_key == self.name
        return any(binding.selects(exchange, routing_key) for binding in self.bindings)


def topic_of(exchange: Exchange, routing_key: str) -> str:
    """Return the NSQ topic for messages with an exchange and a routing key."""
    if exchange.has_one_topic or not routing_key or routing_key == exchange.name:
        return nsq_name(exchange.name)
    return nsq_name(f"{exchange.name}.{routing_key}" if exchange.name else routing_key)


def channel_name(queue: str, *, transient: bool) -> str:
    """Return the NSQ channel of a queue; servers delete that of a transient one with its last connection."""
    return nsq_name(queue) + (_EPHEMERAL if transient else "")


def nsq_name(name: str) -> str:
    """Return a name that NSQ accepts: the same one, or one with a digest if it is too long or has other characters."""
    if _NAME.fullmatch(name) and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST]
    return f"{_INVALID.sub('-', name)[: _LONGEST - _DIGEST - 1]}.{digest}"


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether the words of a routing key match those of a pattern."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_matches(pattern[1:], words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and _matches(pattern[1:], words[1:])


def _words(routing_key: str) -> list[str]:
    return routing_key.split(".") if routing_key else []
