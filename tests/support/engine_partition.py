"""A partition on a scripted clock, with consumers that record received messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from nsqext.broker.engine.channel.in_flight import SubscribedClient
from nsqext.broker.engine.options import PartitionOptions
from nsqext.broker.engine.partition import Partition
from nsqext.broker.engine.storage.partition_store import NewMessage, Stored
from nsqext.protocol.messages import EXT_JSON, TAG_HEADER, RawMessage
from nsqext.protocol.server.negotiate import ServerLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.broker.engine.channel.channel import Channel

__all__ = ("Bench", "Consumer", "original", "tagged")

START = 1_700_000_000_000_000_000


class Consumer(SubscribedClient):
    """A client that records its messages."""

    def __init__(self, number: int = 1, **settings: Any) -> None:
        settings = {"touch_timeout": settings.get("msg_timeout", 60.0), **settings}
        super().__init__(number, f"127.0.0.1:{40000 + number}", **settings)
        self.got: list[RawMessage] = []
        self.has_closed = False

    def deliver(self, message: RawMessage) -> None:
        """Record a message."""
        self.got.append(message)

    def closed(self) -> None:
        """Record that the channel was closed."""
        self.has_closed = True

    def take(self) -> list[RawMessage]:
        """Return the messages received since the last call."""
        got, self.got = self.got, []
        return got

    def bodies(self) -> list[str]:
        """Return the bodies received since the last call."""
        return [message.body.decode() for message in self.take()]

    def attempts(self) -> list[tuple[str, int]]:
        """Return bodies and attempts received since the last call."""
        return [(message.body.decode(), message.attempts) for message in self.take()]


def tagged(body: str, tag: str) -> NewMessage:
    """Return a message with a dispatch tag."""
    return NewMessage(body.encode(), header=orjson.dumps({TAG_HEADER: tag}), version=EXT_JSON)


class Bench:
    """A partition whose clock advances only in `wait`."""

    def __init__(self, **options: Any) -> None:
        self.now = 1000.0
        number, topic = options.pop("number", 0), options.pop("topic", "orders")
        self.options = PartitionOptions(**{"clock": self.clock, "wall": self.wall, **options})
        self.partition = Partition(topic, number, self.options)

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now

    def wall(self) -> int:
        """Return the time of day in nanoseconds."""
        return START + round((self.now - 1000) * 1e9)

    def wait(self, seconds: float) -> None:
        """Advance the clock and tick the partition."""
        self.now += seconds
        self.partition.tick()

    def publish(self, *messages: str | NewMessage) -> Stored:
        """Store and commit messages as one publish."""
        new = [message if isinstance(message, NewMessage) else NewMessage(message.encode()) for message in messages]
        stored = self.partition.put(new)
        self.partition.commit(stored)
        return stored

    def channel(self, name: str = "ch") -> Channel:
        """Return a channel."""
        return self.partition.channel(name)

    def consume(self, number: int = 1, ready: int = 1, channel: str = "ch", **settings: Any) -> Consumer:
        """Subscribe a consumer."""
        how = {name: settings.pop(name) for name in ("ordered", "start") if name in settings}
        consumer = Consumer(number, **settings)
        self.channel(channel).subscribe(consumer, **how)
        if ready:
            self.channel(channel).set_ready(consumer, ready)
        return consumer

    def finish(self, consumer: Consumer, counters: Iterable[int], channel: str = "ch") -> None:
        """Finish messages of partition 0 by their counters."""
        for counter in counters:
            self.channel(channel).finish(consumer, counter)


def original(**options: Any) -> Bench:
    """Return a partition of the original server."""
    return Bench(limits=ServerLimits.original(), **options)
