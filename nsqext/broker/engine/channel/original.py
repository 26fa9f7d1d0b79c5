"""Channels of the original server.

Requeued messages go to the end; messages of a disconnected client stay in flight until they time out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.channel.channel import Channel
from nsqext.broker.engine.channel.cursor import ChannelCounters, Cursor, PartitionView
from nsqext.broker.engine.channel.in_flight import Delivery, SubscribedClient
from nsqext.broker.engine.storage.log import LogEntry, Refusal, StartPosition

if TYPE_CHECKING:
    from nsqext.broker.engine.storage.delayed_queue import DelayedJournal


class OriginalCursor(Cursor):
    """The messages of a channel of the original server."""

    count: int
    offset: int

    def __init__(self, partition: PartitionView, position: tuple[int, int], channel: OriginalChannel) -> None:
        super().__init__(partition, channel.name, position, channel.release)
        self._passed_over: set[int] = set()  # numbers of deferred or discarded messages ahead

    def _journal(self, partition: PartitionView, channel: str) -> DelayedJournal | None:
        return None

    def unread(self, end: int) -> int:
        return end - self.count - len(self._passed_over)

    def take(self) -> Delivery | None:
        """Return the next message; a requeued message follows messages that were in the channel before."""
        while self.count + 1 in self._passed_over:
            self._passed_over.remove(self.count + 1)
            self.count += 1
        if self.requeued and self.requeued[0].behind <= self.count:
            return self.requeued.popleft()
        delivery = self._read()
        return delivery if delivery is not None or not self.requeued else self.requeued.popleft()

    def _must_wait(self) -> bool:
        return False

    def requeue(self, delivery: Delivery) -> None:
        delivery.owner = None
        delivery.deferred = False
        delivery.behind = self._partition.readable
        self.requeued.append(delivery)

    def defer_new(self, entry: LogEntry, deadline: float) -> None:
        self._passed_over.add(entry.count)
        self.in_flight.defer(Delivery(entry), deadline)

    def discard_new(self, entry: LogEntry) -> None:
        self._passed_over.add(entry.count)
        self.acked.add(entry.offset, entry.size, entry.count)

    def pass_over_finished(self) -> None:
        """Exclude messages finished out of order from the depth."""
        for start, _, last in self.acked.intervals:
            self._passed_over.update(range(self._partition.log.count_before(start) + 1, last + 1))

    def jump(self, offset: int, count: int) -> None:
        self._passed_over.clear()
        super().jump(offset, count)


class OriginalChannel(Channel):
    """A channel of a topic of the original server."""

    cursor: OriginalCursor

    def __init__(self, partition: PartitionView, name: str, offset: int, count: int) -> None:
        super().__init__(partition, name, offset, count)
        #: messages that never entered the channel, or precede the server's start
        self.first_count: int = count
        self._stored_count = 0  # messages stored when the server started
        self._started = 0.0

    def _make_cursor(self, partition: PartitionView, position: tuple[int, int]) -> OriginalCursor:
        return OriginalCursor(partition, position, self)

    def release(self, delivery: Delivery) -> None:
        client = delivery.owner
        delivery.owner = None
        if client is not None:
            client.in_flight -= 1
            self._selector.offer(client)

    def subscribe(self, client: SubscribedClient, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Add a client, up to the bound; ignore order and start position."""
        if self._closed:
            raise Refusal("exiting")
        most = self._options.limits.max_channel_consumers
        if most and len(self.clients) >= most:
            raise Refusal(f"consumers for {self._partition.topic}:{self.name} exceeds limit of {most}")
        super().subscribe(client)

    def _requeue_all_of(self, client: SubscribedClient) -> None:
        """Leave the messages in flight until they time out."""

    def _failed(self, client: SubscribedClient) -> None:
        """Do nothing: errors do not reduce the original server's window."""

    def _next_attempt(self, attempts: int) -> int:
        return (attempts + 1) & 0xFFFF

    def _owned(self, client: SubscribedClient, internal_id: int) -> Delivery:
        delivery = self._in_flight.table.get(internal_id)
        if delivery is None or delivery.deferred:
            raise Refusal("ID not in flight")
        if delivery.owner is not client:
            raise Refusal("client does not own message")
        return delivery

    def finish(self, client: SubscribedClient, internal_id: int) -> None:
        delivery = self._owned(client, internal_id)
        self._in_flight.remove(internal_id)
        self.cursor.acknowledge(delivery)
        client.in_flight -= 1
        client.finished += 1
        self._selector.offer(client)
        self.pump()

    def requeue(self, client: SubscribedClient, internal_id: int, delay: float) -> None:
        delivery = self._owned(client, internal_id)
        self._in_flight.remove(internal_id)
        self.cursor.requeues += 1
        client.in_flight -= 1
        client.requeued += 1
        if delay > 0:
            self._in_flight.defer(delivery, self._clock() + delay)
        else:
            self.cursor.requeue(delivery)
        self._selector.offer(client)
        self.pump()

    def touch(self, client: SubscribedClient, internal_id: int) -> None:
        self._owned(client, internal_id)
        super().touch(client, internal_id)

    def accept(self, entry: LogEntry, delay: float) -> None:
        if delay > 0:
            self.cursor.defer_new(entry, self._clock() + delay)
        elif self.ephemeral and self._unread_depth(entry.count) > self._options.mem_queue_size:
            self.cursor.discard_new(entry)

    def reset_counters(self) -> None:
        """Count from 0, as a restarted server; all messages count as stored on disk."""
        self.first_count = self._stored_count = self._partition.readable
        self._started = self._clock()
        self.cursor.requeues = self.timeouts = 0

    def restart(self) -> None:
        """Continue as a restarted server: messages in flight or deferred follow waiting messages."""
        self._close_clients()
        self.clients.clear()
        if self.ephemeral:
            self._partition.delete_channel(self.name)
            return
        for delivery in self._in_flight.clear():
            self.cursor.requeue(delivery)
        self.reset_counters()

    def discard_after(self, first: int) -> None:
        """Discard messages behind a number, because the topic was emptied."""
        for before in range(first, self._partition.readable):
            entry = self._partition.log.at(before + 1)
            if entry is not None:
                self.cursor.discard_new(entry)
        self.first_count += self._partition.readable - first

    @property
    def depth(self) -> int:
        return self._unread_depth(self._partition.readable)

    @property
    def stored_depth(self) -> int:
        """Waiting messages from before the server's start."""
        if not self._stored_count:
            return 0
        taken = [*self.cursor.requeued, *([self.read_ahead] if self.read_ahead else [])]
        return max(self.cursor.unread(self._stored_count), 0) + sum(map(self._is_stored, taken))

    def _is_stored(self, delivery: Delivery) -> bool:
        return delivery.entry.count <= self._stored_count and delivery.delivered < self._started

    def _unread_depth(self, end: int) -> int:
        return self.cursor.unread(end) + len(self.cursor.requeued) + (self.read_ahead is not None)

    def empty(self) -> None:
        self.read_ahead: Delivery | None = None
        self.cursor.jump(self._partition.readable_offset, self._partition.readable)

    def stats(self) -> ChannelCounters:
        stats, depth = super().stats(), self.depth
        stats.depth = depth
        stats.backend_depth = 0 if self.ephemeral else max(depth - self._options.mem_queue_size, self.stored_depth, 0)
        stats.in_flight_count -= stats.deferred_count
        stats.message_count -= self.first_count
        return stats
