"""Filters, a channel's rate limit, rules for REQ."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from nsqext.protocol.record import MAX_ATTEMPTS

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.cursor import Cursor, PartitionView
    from nsqext.broker.engine.channel.in_flight import Delivery, SubscribedClient
    from nsqext.broker.engine.options import PartitionOptions

_KIB = 1024
_BURST = 4.0  # seconds
_LONGEST = 1.0  # seconds that a message waits
_IGNORED = 0.001  # seconds, not worth a pause
NOT_IN_FLIGHT = "Message ID not in flight"
_MANY_ATTEMPTS = 100
_SHORTEST_THRESHOLD = 0.001  # seconds; replaces a shorter `ChannelRules.delayed_threshold`
_DEFAULT_THRESHOLD = 60.0
_BLOCKING = 120.0  # seconds; longer delays leave the memory while the confirm window is full


def passes_filters(client: SubscribedClient, delivery: Delivery, partition: PartitionView) -> bool:
    """Return whether a message passes sample rate and header filter."""
    rate = client.sample_rate
    # as the real server, which delivers a percent more
    if rate and not delivery.delayed and int(partition.options.random.random() * 100) > rate:
        return False
    return client.matches is None or not partition.extend or client.matches(delivery.entry.record)


class ChannelRateLimit:
    """The rate limit of a channel (`/channel/ratelimit`), counted as by the real server: messages up to 1 KiB are free.

    A message may exceed the rate; the next messages then wait, each at most a second.
    """

    def __init__(self, rate: int, now: float) -> None:
        self.until: float = -inf  #: clock time until which the last counted message waits
        self._rate = rate  # KiB per second
        self._left = rate * _BURST
        self._counted = now  # clock time
        self._last: Delivery | None = None

    def holds(self, delivery: Delivery, now: float) -> bool:
        """Return whether the next message waits; count it once."""
        if delivery is not self._last:
            self._last = delivery
            self.until = now + self._delay(len(delivery.entry.record.body), now)
        return now < self.until

    def _delay(self, size: int, now: float) -> float:
        if size <= _KIB:
            return 0.0
        wanted, most = size // _KIB, self._rate * _BURST
        self._left = min(self._left + (now - self._counted) * self._rate, most)
        self._counted = now
        if wanted > most:  # it would wait forever
            return 0.0
        self._left -= wanted
        delay = min(-self._left / self._rate, _LONGEST)
        return delay if delay > _IGNORED else 0.0


def not_owned(delivery: Delivery, client: SubscribedClient, internal_id: str = "") -> str:
    """Return the refusal of a command about another client's message."""
    owner = delivery.owner.id if delivery.owner is not None else 0
    return f"client does not own message {internal_id}: {owner} vs {client.id}"


class RequeueRules:
    """A channel's rules for REQ."""

    def __init__(self, options: PartitionOptions, cursor: Cursor, *, on_disk: bool) -> None:
        self._options = options
        self._cursor = cursor
        self._on_disk = on_disk  # a long delay moves a message to the delayed queue

    def refusal(self, delivery: Delivery, client: SubscribedClient, delay: float, now: float) -> str:
        """Return the text of the refusal or "", checked in the real server's order (captured: many_attempts)."""
        if delay <= 0:
            too_soon = delivery.attempts > _MANY_ATTEMPTS and now - delivery.delivered < 0.1
            if too_soon or delivery.attempts >= MAX_ATTEMPTS // 2:
                return "Message too much requeue"
            return "" if delivery.owner is client else not_owned(delivery, client)
        if delivery.deferred:
            return "Message is deferred"
        if delivery.owner is not client:
            return not_owned(delivery, client, str(delivery.entry.record.internal_id))
        if self._cursor.is_full() and now + delay >= delivery.deadline and not self.leaves_memory(delivery, delay, now):
            return "Too much deferred messages in flight"
        return ""

    def leaves_memory(self, delivery: Delivery, delay: float, now: float) -> bool:
        rules, longest = self._options.rules, self._options.limits.max_req_timeout
        is_full = len(self._cursor.delayed.messages) >= max(rules.delayed_most, 1)
        if not self._on_disk or delivery.delayed or is_full:
            return False
        threshold = rules.delayed_threshold
        if threshold < _SHORTEST_THRESHOLD:
            threshold = _DEFAULT_THRESHOLD
        if delay > threshold or now + delay - delivery.delivered >= longest:
            return True
        return self._cursor.is_blocked() and delay > min(threshold / 2, _BLOCKING)

    def deferred_until(self, delivery: Delivery, delay: float, now: float) -> float:
        """Return when a message in memory is redelivered; after many attempts, in a second at the earliest."""
        if delivery.attempts > _MANY_ATTEMPTS and now + delay - delivery.delivered < 1:
            delay += 1
        return now + delay
