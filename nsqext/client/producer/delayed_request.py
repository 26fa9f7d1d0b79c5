"""Publish requests of messages that consumers, or servers of the original NSQ, delay."""

from __future__ import annotations

import time
from math import ceil
from typing import TYPE_CHECKING

from nsqext.arguments import is_delay
from nsqext.client.producer.request import MessageRequest, default_trace_id, encode_message
from nsqext.errors import DelayNotSupported, InvalidInput
from nsqext.protocol.client.commands import publish_line, sized

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.publishing import OutgoingMessage
    from nsqext.client.producer.route import Target
    from nsqext.protocol.client.commands import Command
    from nsqext.types import TopicMeta

_clock = time.monotonic


def check_delay(delay: float, topic: str) -> float:
    """Return a publish's delay in seconds; raises InvalidInput."""
    if not is_delay(delay):
        raise InvalidInput(f"delay={delay!r} is not a number of seconds from 0 to 1e9", topic=topic)
    return delay


def due_after(delay: float) -> int:
    """Return the due time after ``delay`` seconds, in milliseconds since 1970."""
    return ceil((time.time() + delay) * 1000)


def delayed(
    options: ProducerOptions,
    topic: str,
    message: bytes | OutgoingMessage,
    delay: float | None,
    *,
    key: bytes | None = None,
    partition: int | None = None,
) -> MessageRequest:
    """Return the request of a message with a delay in seconds; None and 0 are no delay. Raises InvalidInput."""
    if delay is None or not check_delay(delay, topic):
        return MessageRequest(options, topic, message, key=key, partition=partition)
    request = DelayedRequest(options, topic, message, key=key, partition=partition)
    request.begin(delay)
    return request


class DelayedRequest(MessageRequest):
    """A message that is delivered later, from `delayed`."""

    __slots__ = ("_delay", "_due")

    def begin(self, delay: float) -> None:
        """Delay the message by some seconds from now on."""
        self._delay = delay
        self._due: int = due_after(delay)

    @property
    def due(self) -> int:
        return self._due

    def joinable(self, meta: TopicMeta) -> bool:
        return False

    def command(self, target: Target) -> Command:
        if target.meta.partition_num or target.node.redesigned:
            self._check_consumers_can_delay(target.meta)
            return super().command(target)
        default_trace_id(self._options, self.topic, target.meta)  # refuses to settle it
        return self._deferred_command(target, self._delay)

    def _deferred_command(self, target: Target, delay: float) -> Command:
        """Return the delayed publish of the original NSQ.

        A refused delay would end the connection, and leave other publishes' outcomes unknown.
        """
        if delay > self._options.max_delay:
            raise DelayNotSupported(
                f"the original NSQ delays a message for {self._options.max_delay:g} s at most, not {delay:g}",
                topic=self.topic,
                hint='let a relay delay it: via="relay"; or set max_delay, if the servers accept more',
            )
        body, header, trace_id = encode_message(self._options, target.meta, self.message)
        if header or trace_id is not None:
            raise DelayNotSupported(
                "a delayed message of the original NSQ has neither headers nor tag nor trace id", topic=self.topic
            )
        waited = _clock() - self.started  # for lookup, or in failed attempts
        return sized(publish_line("DPUB", self.topic, delay=max(0.0, delay - waited)), body)

    def _check_consumers_can_delay(self, meta: TopicMeta) -> None:
        """Raise DelayNotSupported where consumers of the redesigned NSQ cannot requeue a message until it is due."""
        if meta.ordered or not meta.extend_support:
            reason = "is ordered" if meta.ordered else "does not support extend headers"
            raise DelayNotSupported(
                f"consumers cannot delay messages of a topic that {reason}",
                topic=self.topic,
                hint='let a relay delay it: via="relay"',
            )
