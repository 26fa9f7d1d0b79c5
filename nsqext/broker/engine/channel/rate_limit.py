"""The rate limit of a channel (`/channel/ratelimit`), as the real server counts it."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.in_flight import Delivery

_KIB = 1024
_BURST = 4.0  # seconds
_LONGEST = 1.0  # seconds that one message waits
_IGNORED = 0.001  # seconds that are not worth a pause


class RateLimit:
    """Limits the KiB of large messages a second; messages up to 1 KiB are not counted.

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
