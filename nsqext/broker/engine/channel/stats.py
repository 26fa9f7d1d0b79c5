"""Counters of a channel at one moment."""

from __future__ import annotations

from attrs import define, field

_BUCKETS = 12


@define(eq=False)
class Latencies:
    """Histogram of finished messages: below 16 ms, 32 ms, 64 ms, … in twelve buckets."""

    consume: list[int] = field(factory=lambda: [0] * _BUCKETS)  # by the time since the message was stored
    delivery: list[int] = field(factory=lambda: [0] * _BUCKETS)  # by the time since the message was delivered

    def add(self, held: float, age: int) -> None:
        """Count a message that was delivered so many seconds ago, and stored so many nanoseconds ago."""
        self.delivery[_bucket(int(held * 1000))] += 1
        self.consume[_bucket(age // 1_000_000)] += 1


def _bucket(milliseconds: int) -> int:
    return min((max(milliseconds, 0) >> 4).bit_length(), _BUCKETS - 1)


@define
class KeyRangeStats:
    """One key range of a channel of type key_failover."""

    low: float  # lower bound, 0 to 1
    high: float  # upper bound
    tag: str  # dispatch tag of the client; each tag has ranges of its own
    client_id: int  # number of the client in its node
    remote_address: str
    rate: float  # messages per second that were read for it recently
    waiting: int  # messages of the replay set that wait for this client


@define
class ChannelCounters:
    """Counters of one channel; offsets and sizes in bytes, times in nanoseconds since 1970."""

    depth: int = 0  # messages that are not finished (redesigned server), or not delivered (original)
    depth_size: int = 0  # their bytes in the queue
    depth_timestamp: int = 0  # time stamp of the message that was read last; 0 for none
    backend_depth: int = 0  # the part of the depth that is on disk
    backlogs: int = 0  # messages that were never delivered, deferred ones included
    in_flight_count: int = 0  # messages at clients; the redesigned server includes deferred ones
    deferred_count: int = 0  # messages that wait for their delay in memory
    deferred_from_delay_count: int = 0  # messages that were taken from the delayed queue and are not finished
    message_count: int = 0  # messages that entered the channel
    requeue_count: int = 0  # requeued messages
    timeout_count: int = 0  # messages that timed out
    delayed_queue_count: int = 0  # messages in the delayed queue
    delayed_queue_recent: int = 0  # when the first of them is due; 0 for none
    replay_count: int = 0  # messages that were read and wait for the client of their key
    held_keys: int = 0  # keys with messages in flight
    key_ranges: list[KeyRangeStats] = field(factory=list)  # ranges of the clients
