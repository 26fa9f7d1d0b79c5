"""Channels of the original server: what came back goes to the end, and a client that leaves keeps its messages until
they time out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.channel import Channel
from nsqext.broker.engine.cursor import Cursor
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.in_flight import Flight
from nsqext.broker.engine.stats import ChannelStats, original_stats

if TYPE_CHECKING:
    from nsqext.broker.engine.consumer_state import Client, Subscriber
    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.engine.start_position import StartPosition
    from nsqext.broker.engine.storage.log import Entry

__all__ = ("ClassicChannel", "ClassicCursor")


class ClassicCursor(Cursor):
    """Messages of a channel of the original server, seen from its read position."""

    count: int
    offset: int

    def __init__(self, partition: Partition, offset: int, count: int, channel: ClassicChannel) -> None:
        super().__init__(partition, offset, count, channel.let_go)
        self._taken: set[int] = set()  # numbers of messages ahead that are not to be read: deferred or dropped

    def unread(self, end: int) -> int:
        """Return how many messages up to this number were not read yet."""
        return end - self.count - len(self._taken)

    def take(self) -> Flight | None:
        """Return the next message, None when there is none; what came back waits for what was there before it."""
        if self.back and self.back[0].behind <= self.count:
            return self.back.popleft()
        while self.count + 1 in self._taken:
            self._taken.remove(self.count + 1)
            self._skip()
        flight = self._read()
        return flight if flight is not None or not self.back else self.back.popleft()

    def _skip(self) -> None:
        entry = self._partition.log.at(self.count + 1)
        self.count += 1
        if entry is not None:
            self.offset = entry.offset + entry.size

    def _must_wait(self) -> bool:
        return False

    def give_back(self, flight: Flight) -> None:
        """Put a message behind everything that is there."""
        flight.owner = None
        flight.deferred = False
        flight.behind = self._partition.readable
        self.back.append(flight)

    def put_off(self, entry: Entry, deadline: float) -> None:
        """Let a message that was just published wait, before anything that was published before it."""
        self._taken.add(entry.count)
        self.flights.defer(Flight(entry), deadline)

    def drop(self, entry: Entry) -> None:
        """Do without a message that was just published."""
        self._taken.add(entry.count)
        self.confirmed.add(entry.offset, entry.size, entry.count)

    def skip_finished(self) -> None:
        """Do not count what was finished out of order as waiting."""
        for start, _, last in self.confirmed.intervals:
            self._taken.update(range(self._partition.log.count_before(start) + 1, last + 1))

    def jump(self, offset: int, count: int) -> None:
        """Go to a position: everything before it counts as finished, nothing behind it."""
        self._taken.clear()
        super().jump(offset, count)


class ClassicChannel(Channel):
    """One channel of a topic of the original server.

    Attributes:
        first_count: messages of the topic that never went into the channel, or before the server was started.
    """

    backlog: ClassicCursor

    def __init__(self, partition: Partition, name: str, offset: int, count: int) -> None:
        super().__init__(partition, name, offset, count)
        self.first_count: int = count
        self._kept_count = 0

    def _make_backlog(self, partition: Partition, offset: int, count: int) -> ClassicCursor:
        return ClassicCursor(partition, offset, count, self)

    def let_go(self, flight: Flight) -> None:
        """Take a message from its client because the channel is emptied."""
        client = flight.owner
        flight.owner = None
        if client is not None:
            client.in_flight -= 1
            self._groups.offer(client)

    def subscribe(self, subscriber: Subscriber, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Take a client in; order and start do not exist here.

        Raises:
            Refusal: the channel is going away, or has all the clients that it may have.
        """
        if self._closed:
            raise Refusal("exiting")
        most = self._options.limits.max_channel_consumers
        if most and len(self.clients) >= most:
            raise Refusal(f"consumers for {self._partition.topic}:{self.name} exceeds limit of {most}")
        super().subscribe(subscriber)

    def _abandon(self, client: Client) -> None:
        """Leave what a client had in flight until it times out."""

    def _failed(self, client: Client) -> None:
        """Errors do not narrow a client's window here."""

    def _next_attempt(self, attempts: int) -> int:
        return (attempts + 1) & 0xFFFF

    def _owned(self, subscriber: Subscriber, internal_id: int) -> tuple[Flight, Client]:
        flight = self._flights.table.get(internal_id)
        if flight is None or flight.deferred:
            raise Refusal("ID not in flight")
        client = self.clients.get(subscriber.id)
        if client is None or flight.owner is not client:
            raise Refusal("client does not own message")
        return flight, client

    def finish(self, subscriber: Subscriber, internal_id: int) -> None:
        """Finish a message.

        Raises:
            Refusal: it is not in flight, or not at this client.
        """
        flight, client = self._owned(subscriber, internal_id)
        self._flights.pop(internal_id)
        self.backlog.confirm(flight)
        client.in_flight -= 1
        client.finished += 1
        self._groups.offer(client)
        self.pump()

    def requeue(self, subscriber: Subscriber, internal_id: int, delay: float) -> None:
        """Give a message back.

        Args:
            subscriber: who has it.
            internal_id: the message.
            delay: seconds after which it goes to the end of the queue.

        Raises:
            Refusal: it is not in flight, or not at this client.
        """
        flight, client = self._owned(subscriber, internal_id)
        self._flights.pop(internal_id)
        self.backlog.requeues += 1
        client.in_flight -= 1
        client.requeued += 1
        if delay > 0:
            self._flights.defer(flight, self._clock() + delay)
        else:
            self.backlog.give_back(flight)
        self._groups.offer(client)
        self.pump()

    def touch(self, subscriber: Subscriber, internal_id: int) -> None:
        """Begin the timeout of a message anew, up to the longest time that a message may be in flight.

        Raises:
            Refusal: it is not in flight, or not at this client.
        """
        self._owned(subscriber, internal_id)
        super().touch(subscriber, internal_id)

    def accept(self, entry: Entry, delay: float) -> None:
        """Take in a message that was just published.

        Args:
            entry: the message.
            delay: seconds before it is given out.
        """
        if delay > 0:
            self.backlog.put_off(entry, self._clock() + delay)
        elif self.ephemeral and self._depth(entry.count) > self._options.mem_queue_size:
            self.backlog.drop(entry)

    def begin_anew(self) -> None:
        """Count from here on, as a server does that was started again: what there is, is on the disk."""
        self.first_count = self._kept_count = self._partition.readable
        self.backlog.skip_finished()

    def pass_over(self, first: int) -> None:
        """Do without the messages behind a number, because the topic was emptied before it passed them on."""
        for count in range(first + 1, self._partition.readable + 1):
            entry = self._partition.log.at(count)
            if entry is not None:
                self.backlog.drop(entry)
        self.first_count += self._partition.readable - first
        self.pump()

    @property
    def depth(self) -> int:
        """Messages that wait to be given out."""
        return self._depth(self._partition.readable)

    @property
    def kept_depth(self) -> int:
        """Messages that wait since before the server was started."""
        return self._depth(self._kept_count) if self.backlog.count < self._kept_count else 0

    def _depth(self, end: int) -> int:
        return self.backlog.unread(end) + len(self.backlog.back) + (self.hand is not None)

    def empty(self) -> None:
        """Drop everything, what is at clients included."""
        self.hand: Flight | None = None
        self.backlog.jump(self._partition.readable_offset, self._partition.readable)
        self.pump()

    def stats(self) -> ChannelStats:
        """Return its numbers."""
        return original_stats(self)
