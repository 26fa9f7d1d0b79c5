"""What is delivered when: rate limit, filters, sampling, and messages that are finished after too many attempts."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.client import Client
    from nsqext.broker.engine.channel.in_flight import Delivery
    from nsqext.broker.engine.channel.partition_view import PartitionView

_KIB = 1024
_BURST = 4.0  # seconds
_LONGEST = 1.0  # seconds that one message waits
_IGNORED = 0.001  # seconds that are not worth a pause


class DeliveryRules:
    """The rules of one channel for the next message."""

    def __init__(self, partition: PartitionView) -> None:
        self._partition = partition
        self._options = partition.options
        self.rate_limit: RateLimit | None = None
        self.set_rate_limit(partition.options.rules.rate_limit)

    def set_rate_limit(self, rate: int) -> None:
        """Limit the KiB of large messages a second; a rate of zero or less changes nothing."""
        if rate > 0:
            self.rate_limit = RateLimit(rate, self._options.clock())

    def is_ignored(self, delivery: Delivery) -> bool:
        """Return whether a message is finished instead of delivered again; see `ChannelRules.ignores`."""
        age = self._options.wall() - delivery.entry.record.timestamp
        return self._options.rules.ignores(delivery.attempts, age / 1e9)

    def passes_filters(self, client: Client, delivery: Delivery) -> bool:
        """Return whether the sample of a client and its header filter let a message through."""
        rate = client.subscriber.sample_rate
        # the real server compares so, and delivers one percent more
        if rate and not delivery.delayed and int(self._options.random.random() * 100) > rate:
            return False
        matches = client.matches
        return matches is None or not self._partition.extend or matches(delivery.entry.record)


class RateLimit:
    """The rate limit of a channel (`/channel/ratelimit`), as the real server counts it: up to 1 KiB, nothing.

    A message may take more than there is: the following ones wait then, each one second at most.
    """

    def __init__(self, rate: int, now: float) -> None:
        self.until: float = -inf  # clock time at which the last message that was held back may be delivered
        self._rate = rate  # KiB a second
        self._left = rate * _BURST
        self._counted = now  # clock time
        self._last: Delivery | None = None

    def holds(self, delivery: Delivery, now: float) -> bool:
        """Return whether the next message has to wait; it is counted once."""
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
        if wanted > most:  # could never be delivered: not limited
            return 0.0
        self._left -= wanted
        delay = min(-self._left / self._rate, _LONGEST)
        return delay if delay > _IGNORED else 0.0
