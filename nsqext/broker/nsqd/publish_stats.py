"""Statistics of publishes to a partition, in the redesigned server's buckets."""

from __future__ import annotations

from attrs import define, field

_BUCKETS = 16
_HOUR = 3600 * 1_000_000_000
_DAY = 24


@define(eq=False)
class Publisher:
    """Publishes of one client to one partition."""

    peer: str  # ``host:port`` of the client
    user_agent: str  # from its IDENTIFY
    published: int = 0  # messages
    failed: int = 0  # messages that were refused
    last: int = 0  # time of the last publish, in nanoseconds since 1970


@define(eq=False)
class PublishStats:
    """Counts of one partition."""

    # messages by size: below 100 bytes, 1 KiB, 2 KiB, 4 KiB, …
    sizes: list[int] = field(factory=lambda: [0] * _BUCKETS)
    # messages by the duration of their publish: below 1 ms, 2 ms, 4 ms, …
    batches: list[int] = field(factory=lambda: [0] * _BUCKETS)
    publishers: dict[str, Publisher] = field(factory=dict)  # clients that published over TCP, by ``host:port``
    _hours: dict[int, int] = field(factory=dict, alias="hours")

    def note(self, sizes: list[int], now: int) -> None:
        """Count messages by the sizes of their bodies, at a time in nanoseconds since 1970."""
        total = 0
        for size in sizes:
            total += size
            bucket = 0 if size < 100 else min((size >> 10).bit_length() + 1, _BUCKETS - 1)
            self.sizes[bucket] += 1
        self.batches[0] += len(sizes)
        hour = now // _HOUR
        self._hours[hour] = self._hours.get(hour, 0) + total
        if len(self._hours) > _DAY:
            del self._hours[min(self._hours)]

    def publisher(self, peer: str, user_agent: str) -> Publisher:
        found = self.publishers.get(peer)
        if found is None:
            found = self.publishers[peer] = Publisher(peer, user_agent)
        return found

    def hours(self, now: int) -> list[int]:
        """Return bytes published in each of 22 hours, oldest first; the two newest are left out."""
        hour = now // _HOUR
        return [self._hours.get(hour - back, 0) for back in range(_DAY - 1, 1, -1)]
