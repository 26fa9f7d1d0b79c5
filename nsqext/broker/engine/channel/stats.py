"""Counters of a channel at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import SHARED

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.client import ClientStats

__all__ = ("ChannelCounters", "KeyRangeStats", "Latencies")

_BUCKETS = 12


class Latencies:
    """Histogram of finished messages: below 16 ms, 32 ms, 64 ms, … in twelve buckets.

    Attributes:
        consume: by the time since the message was stored.
        delivery: by the time since the message was delivered.
    """

    __slots__ = ("consume", "delivery")

    def __init__(self) -> None:
        self.consume: list[int] = [0] * _BUCKETS
        self.delivery: list[int] = [0] * _BUCKETS

    def add(self, held: float, age: int) -> None:
        """Count a message.

        Args:
            held: seconds since it was delivered.
            age: nanoseconds since it was stored.
        """
        self.delivery[_bucket(int(held * 1000))] += 1
        self.consume[_bucket(age // 1_000_000)] += 1


def _bucket(milliseconds: int) -> int:
    if milliseconds < 16:
        return 0
    return min((milliseconds >> 4).bit_length(), _BUCKETS - 1)


@define
class KeyRangeStats:
    """One key range of a channel of type key_failover.

    Attributes:
        low: lower bound, 0 to 1.
        high: upper bound.
        tag: dispatch tag of the client; each tag has ranges of its own.
        client: number of the client in its node.
        name: ``host:port``.
        rate: messages per second that were read for it recently.
        waiting: messages of the replay set that wait for this client.
    """

    low: float
    high: float
    tag: str
    client: int
    name: str
    rate: float
    waiting: int


@define
class ChannelCounters:
    """Counters of one channel; offsets and sizes in bytes, times in nanoseconds since 1970.

    Attributes:
        name: the channel.
        depth: messages that are not finished (redesigned server), or not delivered (original).
        depth_size: their bytes in the queue.
        depth_timestamp: time stamp of the message that was read last; 0 for none.
        backend_depth: the part of the depth that is on disk.
        backlogs: messages that were never delivered, deferred ones included.
        in_flight_count: messages at clients; the redesigned server includes deferred ones.
        deferred_count: messages that wait for their delay in memory.
        deferred_from_delay_count: messages that were taken from the delayed queue and are not finished.
        message_count: messages that entered the channel.
        requeue_count: requeued messages.
        timeout_count: messages that timed out.
        clients: counters of each client.
        paused: nothing is delivered.
        skipped: every message is discarded.
        ordered: one message at a time.
        delayed_queue_count: messages in the delayed queue.
        delayed_queue_recent: when the first of them is due; 0 for none.
        read_offset: the read position.
        read_count: messages before it.
        acked_offset: the acknowledged position.
        acked_count: messages before it.
        end_offset: end of the readable part of the queue.
        end_count: messages before it.
        intervals: finished out of order: first offset, end offset, number of the last message.
        consume_latency: finished messages by the time since they were stored, see `Latencies`.
        delivery_latency: finished messages by the time since they were delivered.
        dispatch: type of the channel.
        key_header: extend header that carries keys.
        replay_count: messages that were read and wait for the client of their key.
        held_keys: keys with messages in flight.
        key_ranges: ranges of the clients.
    """

    name: str
    depth: int = 0
    depth_size: int = 0
    depth_timestamp: int = 0
    backend_depth: int = 0
    backlogs: int = 0
    in_flight_count: int = 0
    deferred_count: int = 0
    deferred_from_delay_count: int = 0
    message_count: int = 0
    requeue_count: int = 0
    timeout_count: int = 0
    clients: list[ClientStats] = field(factory=list)
    paused: bool = False
    skipped: bool = False
    ordered: bool = False
    delayed_queue_count: int = 0
    delayed_queue_recent: int = 0
    read_offset: int = 0
    read_count: int = 0
    acked_offset: int = 0
    acked_count: int = 0
    end_offset: int = 0
    end_count: int = 0
    intervals: list[tuple[int, int, int]] = field(factory=list)
    consume_latency: list[int] = field(factory=list)
    delivery_latency: list[int] = field(factory=list)
    dispatch: str = SHARED
    key_header: str = KEY_HEADER
    replay_count: int = 0
    held_keys: int = 0
    key_ranges: list[KeyRangeStats] = field(factory=list)
