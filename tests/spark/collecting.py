"""What lies in a topic, read without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsqext import ConsumerOptions
from nsqext.sync import Consumer

if TYPE_CHECKING:
    from nsqext.sync import Message
    from tests.spark.servers import Servers

__all__ = ("collect", "collect_all")

_END = b"this is the end"


def collect(servers: Servers, topic: str, count: int) -> list[Message]:
    """Return messages that were published to a topic since it was made, as many as there have to be."""
    found: list[Message] = []
    with _consumed(servers, topic) as messages:
        for message in messages:
            found.append(message)
            if len(found) == count:
                break
    return found


def collect_all(servers: Servers, topic: str) -> list[Message]:
    """Return all messages that were published to the only partition of a topic since it was made."""
    servers.publish(topic, [_END])
    found: list[Message] = []
    with _consumed(servers, topic) as messages:
        for message in messages:
            if message.body == _END:
                break
            found.append(message)
    return found


@contextmanager
def _consumed(servers: Servers, topic: str) -> Iterator[Iterator[Message]]:
    options = ConsumerOptions(queue_position=True)
    with Consumer(topic, servers.channel, lookupd=list(servers.lookupd), options=options) as consumer:
        yield _finished(servers, consumer)


def _finished(servers: Servers, consumer: Consumer) -> Iterator[Message]:
    for message in consumer:
        message.finish()
        if message.body != servers.probe:
            yield message
