"""Numbers of a channel and its clients at one moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import SHARED

if TYPE_CHECKING:
    from nsqext.broker.engine.channel import Channel
    from nsqext.broker.engine.classic import ClassicChannel

__all__ = (
    "ChannelStats",
    "ClientStats",
    "KeyRangeStats",
    "Latencies",
    "channel_stats",
    "client_stats",
    "original_stats",
)

_BUCKETS = 12


class Latencies:
    """Finished messages by how long they took: below 16 ms, 32 ms, 64 ms, … in twelve buckets.

    Attributes:
        consume: by the time since they were stored.
        delivery: by the time since they were given out.
    """

    __slots__ = ("consume", "delivery")

    def __init__(self) -> None:
        self.consume: list[int] = [0] * _BUCKETS
        self.delivery: list[int] = [0] * _BUCKETS

    def add(self, held: float, age: int) -> None:
        """Count a message.

        Args:
            held: seconds since it was given out.
            age: nanoseconds since it was stored.
        """
        self.delivery[_bucket(int(held * 1000))] += 1
        self.consume[_bucket(age // 1_000_000)] += 1


def _bucket(milliseconds: int) -> int:
    if milliseconds < 16:
        return 0
    return min((milliseconds >> 4).bit_length(), _BUCKETS - 1)


@define
class ClientStats:
    """Numbers of one client.

    Attributes:
        id: number of the client in its node.
        name: ``host:port``.
        ready: its RDY.
        in_flight: messages that it has.
        messages: messages that it was given.
        finished: messages that it finished.
        requeued: messages that went back from it.
        timed_out: messages that it did not answer in time.
        limit: messages that it may have at most, as set over HTTP.
        errors: failures that count against its window at present.
    """

    id: int
    name: str
    ready: int
    in_flight: int
    messages: int
    finished: int
    requeued: int
    timed_out: int
    limit: int
    errors: int


@define
class KeyRangeStats:
    """One range of the keys of a channel of type key_failover.

    Attributes:
        low: where it begins, 0 to 1.
        high: where it ends.
        tag: dispatch tag of the client; each tag has ranges of its own.
        client: number of the client in its node.
        name: ``host:port``.
        rate: messages a second that the client was given of late.
        waiting: messages of the replay set that wait for it.
    """

    low: float
    high: float
    tag: str
    client: int
    name: str
    rate: float
    waiting: int


@define
class ChannelStats:
    """Numbers of one channel; offsets and sizes in bytes, times in nanoseconds since 1970.

    Attributes:
        name: the channel.
        depth: messages that are not finished (redesigned server), or that wait to be given out (original).
        depth_size: their bytes in the queue.
        depth_timestamp: when the message that was read last was stored; 0 for none.
        backend_depth: the part of the depth that is on disk.
        backlogs: messages that nobody was given yet, the deferred ones included.
        in_flight_count: messages at clients; the redesigned server counts deferred ones too.
        deferred_count: messages that wait for their delay in memory.
        deferred_from_delay_count: messages on their way that came back from the delayed queue.
        message_count: messages that went into the channel.
        requeue_count: messages that went back into the channel.
        timeout_count: messages that were not answered in time.
        clients: numbers of each client.
        paused: nothing is given out.
        skipped: everything is dropped.
        ordered: one message at a time.
        delayed_queue_count: messages in the delayed queue.
        delayed_queue_recent: when the first of them is due; 0 for none.
        read_offset: what is read next.
        read_count: messages before it.
        confirmed_offset: everything before is finished.
        confirmed_count: messages before it.
        end_offset: end of what may be read.
        end_count: messages before it.
        intervals: what was finished out of order: first offset, end offset, last message's number.
        consume_latency: finished messages by the time since they were stored, see `Latencies`.
        delivery_latency: finished messages by the time since they were given out.
        dispatch: its type.
        key_header: the extend header that carries keys.
        replay_count: messages that were read and wait for the client of their key.
        held_keys: keys that a client has messages of.
        key_ranges: which client serves which keys.
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
    confirmed_offset: int = 0
    confirmed_count: int = 0
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


def channel_stats(channel: Channel) -> ChannelStats:
    """Return the numbers of a channel of the redesigned server."""
    backlog, partition = channel.backlog, channel.partition
    confirmed, flights = backlog.confirmed, backlog.flights
    depth = partition.readable - confirmed.count
    return ChannelStats(
        channel.name,
        depth=depth,
        depth_size=partition.readable_offset - confirmed.offset,
        depth_timestamp=backlog.timestamp,
        backend_depth=depth,
        backlogs=depth if channel.ordered else flights.deferred + max(partition.readable - backlog.count, 0),
        in_flight_count=len(flights.table),
        deferred_count=flights.deferred,
        deferred_from_delay_count=len(backlog.from_delay),
        message_count=partition.readable,
        requeue_count=backlog.requeues,
        timeout_count=channel.timeouts,
        clients=client_stats(channel),
        paused=channel.paused,
        skipped=channel.skipped,
        ordered=channel.ordered,
        delayed_queue_count=len(backlog.delayed.messages),
        delayed_queue_recent=backlog.delayed.first_due,
        read_offset=backlog.offset,
        read_count=backlog.count,
        confirmed_offset=confirmed.offset,
        confirmed_count=confirmed.count,
        end_offset=partition.readable_offset,
        end_count=partition.readable,
        intervals=confirmed.intervals,
        consume_latency=list(channel.latencies.consume),
        delivery_latency=list(channel.latencies.delivery),
    )


def client_stats(channel: Channel) -> list[ClientStats]:
    """Return the numbers of each client of a channel."""
    return [
        ClientStats(
            client.subscriber.id,
            client.subscriber.name,
            client.subscriber.ready,
            client.in_flight,
            client.messages,
            client.finished,
            client.requeued,
            client.timed_out,
            client.limit,
            client.errors,
        )
        for client in channel.clients.values()
    ]


def original_stats(channel: ClassicChannel) -> ChannelStats:
    """Return the numbers of a channel of the original server."""
    backlog, partition = channel.backlog, channel.partition
    confirmed, flights = backlog.confirmed, backlog.flights
    depth = channel.depth
    return ChannelStats(
        channel.name,
        depth=depth,
        backend_depth=0 if channel.ephemeral else max(depth - partition.options.mem_queue_size, channel.kept_depth, 0),
        in_flight_count=len(flights.table) - flights.deferred,
        deferred_count=flights.deferred,
        message_count=partition.readable - channel.first_count,
        requeue_count=backlog.requeues,
        timeout_count=channel.timeouts,
        clients=client_stats(channel),
        paused=channel.paused,
        read_offset=backlog.offset,
        read_count=backlog.count,
        confirmed_offset=confirmed.offset,
        confirmed_count=confirmed.count,
        end_offset=partition.readable_offset,
        end_count=partition.readable,
        intervals=confirmed.intervals,
    )
