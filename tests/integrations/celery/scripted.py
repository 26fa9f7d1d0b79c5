"""Clients without servers, which record what the transport of kombu does with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.errors import TopicNotFound

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvent
    from nsqext.types import TopicMeta

__all__ = ("ScriptedConsumer", "ScriptedMessage", "ScriptedServers")


@define(eq=False)
class ScriptedMessage:
    """A message that records its answers."""

    body: bytes = b"x"
    headers: Mapping[str, Any] = field(factory=dict)
    age: float = 0.0  #: seconds
    attempts: int = 1
    expired: bool = False
    error: Exception | None = None  #: raised by each answer
    answers: list[Any] = field(factory=list)

    @property
    def timestamp(self) -> int:
        """Nanoseconds since 1970."""
        return round((time.time() - self.age) * 1e9)

    def finish(self) -> None:
        self._answer("finish")

    def requeue(self, delay: float = 0.0) -> None:
        self._answer(delay)

    def _answer(self, answer: Any) -> None:
        self.answers.append(answer)
        if self.error is not None:
            raise self.error


class ScriptedConsumer:
    """A consumer whose messages a test hands over with `handle`."""

    def __init__(self, topics: Iterable[str], channel: str, max_in_flight: int) -> None:
        self.topics = tuple(topics)
        self.channel = channel
        self.max_in_flight = max_in_flight
        self.calls: list[str] = []
        self.handle: Callable[[Any], None] = lambda message: None

    def handler(self, *, auto_finish: bool) -> Callable[[Callable[[Any], None]], None]:
        assert not auto_finish

        def keep(function: Callable[[Any], None]) -> None:
            self.handle = function

        return keep

    def on_event(self, callback: Callable[[ClientEvent], object]) -> None:
        self.note = callback

    def start(self) -> None:
        self.calls.append("start")

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")


@define(eq=False)
class _Channel:
    lag: int
    in_flight: int
    connections: int = 0


@define(eq=False)
class _Partition:
    depth: int
    channels: dict[str, _Channel]


@define(eq=False)
class _Stats:
    partitions: list[_Partition]


class ScriptedServers:
    """Producer, admin and consumers of the clients of a connection."""

    def __init__(self) -> None:
        self.meta_of: dict[str, TopicMeta] = {}
        # lag, messages in flight and perhaps connections by topic and channel
        self.queues: dict[str, dict[str, tuple[int, ...]]] = {}
        self.depth = 0  # messages of each topic without a channel
        self.calls: list[tuple[Any, ...]] = []
        self.published: list[tuple[str, bytes, Any, float | None]] = []
        self.consumers: list[ScriptedConsumer] = []

    def consumer(self, topics: Iterable[str], channel: str, max_in_flight: int) -> ScriptedConsumer:
        self.consumers.append(ScriptedConsumer(topics, channel, max_in_flight))
        return self.consumers[-1]

    # Producer

    def ping(self) -> None:
        """Respond."""

    def meta(self, topic: str) -> TopicMeta:
        try:
            return self.meta_of[topic]
        except KeyError:
            raise TopicNotFound("not found", topic=topic) from None

    def publish(self, topic: str, body: bytes, *, headers: Any, delay: float | None) -> None:
        self.meta(topic)
        self.published.append((topic, body, headers, delay))

    # Admin

    def _channels(self, topic: str) -> dict[str, tuple[int, ...]]:
        try:
            return self.queues[topic]
        except KeyError:
            raise TopicNotFound("not found", topic=topic) from None

    def channels(self, topic: str) -> list[str]:
        return list(self._channels(topic))

    def stats(self, topic: str, channel: str) -> _Stats:
        found = {name: _Channel(*counts) for name, counts in self._channels(topic).items() if name == channel}
        return _Stats([_Partition(self.depth, found)] * 2)

    def create_topic(self, topic: str, **arguments: Any) -> None:
        self.calls.append(("create", topic, *arguments["channels"]))

    def empty_channel(self, topic: str, channel: str) -> None:
        self._channels(topic)
        self.calls.append(("empty", topic, channel))

    def delete_channel(self, topic: str, channel: str, *, missing_ok: bool) -> None:
        assert missing_ok
        self._channels(topic).pop(channel, None)
        self.calls.append(("delete", topic, channel))

    def delete_topic(self, topic: str, *, missing_ok: bool) -> None:
        assert missing_ok
        del self.queues[topic]
        self.calls.append(("delete", topic))
