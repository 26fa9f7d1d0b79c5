"""What lies in a topic, read without Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext import ConsumerOptions
from nsqext.sync import Consumer

if TYPE_CHECKING:
    from nsqext.sync import Message
    from tests.support.spark_cluster import Servers

__all__ = ("collect",)


def collect(servers: Servers, topic: str, count: int) -> list[Message]:
    """Return messages that were published to a topic since it was made, as many as there have to be."""
    found: list[Message] = []
    options = ConsumerOptions(queue_position=True)
    with Consumer(topic, servers.channel, lookupd=list(servers.lookupd), options=options) as consumer:
        for message in consumer:
            message.finish()
            if message.body != servers.probe:
                found.append(message)
            if len(found) == count:
                break
    return found
