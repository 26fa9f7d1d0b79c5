"""Who gets the next message: a channel's clients, its hand, and the handing out.

The channel always holds one message that it has read ahead. Nobody but a client takes it out of the channel's hand, so
a message that no client may take now holds up what comes behind it (captured: tag_head_of_line).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.channel_types import PLAIN
from nsqext.broker.engine.consumer_state import Client, Subscriber
from nsqext.broker.engine.cursor import Cursor
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.sending import as_message, dispatch_tag
from nsqext.broker.engine.stats import Latencies
from nsqext.broker.engine.tag_selector import TagSelector
from nsqext.protocol.names import is_ephemeral
from nsqext.protocol.record import MAX_ATTEMPTS

if TYPE_CHECKING:
    from nsqext.broker.engine.ack_tracker import AckTracker
    from nsqext.broker.engine.in_flight import Flight
    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.engine.start_position import StartPosition

__all__ = ("Dispatcher",)


class Dispatcher:
    """The giving side of a channel of one partition.

    Args:
        partition: where its messages come from.
        name: its name.
        offset: where it begins to read.
        count: messages before that.

    Attributes:
        name: its name.
        ephemeral: it goes away with its last client.
        paused: nothing is given out.
        skipped: everything is dropped.
        backlog: what it has before it.
        hand: the message that it has read ahead.
        clients: its clients by their numbers.
        timeouts: messages that were not answered in time.
        latencies: how long finished messages took.
        kind: its type.
    """

    def __init__(self, partition: Partition, name: str, offset: int, count: int) -> None:
        self.name = name
        self.ephemeral: bool = is_ephemeral(name)
        self.paused = False
        self.skipped = False
        self.backlog: Cursor = self._make_backlog(partition, offset, count)
        self.hand: Flight | None = None
        self.clients: dict[int, Client] = {}
        self.timeouts: int = 0
        self.latencies: Latencies = Latencies()
        self.kind = PLAIN
        self._partition = partition
        self._options = partition.options
        self._clock = partition.options.clock
        self._flights = self.backlog.flights
        self._groups = TagSelector()
        self._pumping = False
        self._closed = False

    def _make_backlog(self, partition: Partition, offset: int, count: int) -> Cursor:
        journal = None if self.ephemeral else partition.journal(self.name)
        return Cursor(partition, offset, count, self._dropped, journal, ephemeral=self.ephemeral)

    @property
    def ordered(self) -> bool:
        """One message at a time, in the order of the queue, for all clients together."""
        return self.backlog.ordered

    @property
    def confirmed(self) -> AckTracker:
        """How far it has finished."""
        return self.backlog.confirmed

    @property
    def partition(self) -> Partition:
        """The partition that it belongs to."""
        return self._partition

    # clients

    def subscribe(self, subscriber: Subscriber, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Take a client in.

        Args:
            subscriber: its session.
            ordered: SUB_ORDERED; the channel is ordered for everybody from now on.
            start: where to read; only looked at when it is the first client.

        Raises:
            Refusal: the text for E_INVALID, or "Consume is disabled currently".
        """
        if self._closed or self._partition.suspended:
            raise Refusal("Consume is disabled currently")
        place = None
        if start is not None and not self.clients:
            place = start.find(self._partition.log, coordinated=self._options.coordinated)
        client = Client(subscriber, subscriber.tag if self._partition.extend else "")
        self.clients[subscriber.id] = client
        if ordered:
            self._order()
        if place is not None:
            self._jump(place)
        self._groups.add(client)
        self.pump()

    def _jump(self, place: tuple[int, int]) -> None:
        hand = self.hand
        self.backlog.jump(*place)
        if hand is not None:
            hand.kept = True
            if hand.delayed:
                self.backlog.from_delay.add(hand.entry.record.internal_id)

    def _order(self) -> None:
        """Become ordered: begin to read again from the confirmed position.

        The message in hand goes out before, so the first message comes twice with the same attempts to a client that
        has room for it (captured: sub_ordered_first_reset_duplicate), and once to one with RDY 1.
        """
        if not self.ordered:
            self.backlog.ordered = True
            self.backlog.rewind(forget=True)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Let a client go; what it had is given to others, with the attempts that it had."""
        client = self.clients.pop(subscriber.id, None)
        if client is None:
            return
        self._groups.remove(client)
        client.leave()
        self._abandon(client)
        if self.ephemeral and not self.clients and not self._closed:
            self._partition.delete_channel(self.name)
        self.pump()

    def _abandon(self, client: Client) -> None:
        """Requeue what a client had in flight, in random order, as the real server does (it iterates over a Go map).

        Its message pump runs at the same time, so other clients receive the first ones, and new messages between them,
        before the last one is requeued.
        """
        random = self._options.random
        flights = self._flights.of(client)
        random.shuffle(flights)
        for flight in flights:
            self._flights.pop(flight.entry.record.internal_id)
            flight.attempts -= 1
            self.backlog.give_back(flight)
            if random.random() < 0.5:
                self.pump()

    def set_ready(self, subscriber: Subscriber, count: int) -> None:
        """Set how many messages a client takes at a time."""
        subscriber.ready = count
        client = self.clients.get(subscriber.id)
        if client is not None:
            client.refresh()
            self._groups.renew(client)
            self.pump()

    def set_client_limit(self, prefix: str, limit: int) -> None:
        """Set how many messages the clients whose ``host:port`` begins so may have, whatever their RDY."""
        for client in self.clients.values():
            if client.subscriber.name.startswith(prefix):
                client.limit = limit
                client.refresh()
                self._groups.renew(client)
        self.pump()

    def is_stalled(self, subscriber: Subscriber) -> bool:
        """Return whether a client's sending side has stopped for good: no message and no heartbeat any more.

        That happens to a client without extend support when its topic is extended (captured: upgrade_ext).
        """
        client = self.clients.get(subscriber.id)
        return client is not None and client.stalled

    def _dropped(self, flight: Flight) -> None:
        """Take a message from its client without the client having finished it."""
        client = flight.owner
        flight.owner = None
        if client is not None:
            client.in_flight -= 1
            client.requeued += 1
            self._groups.renew(client)

    # handing out

    def pump(self) -> None:
        """Hand out what can be handed out."""
        if self._pumping:
            return
        self._pumping = True
        groups = self._groups
        try:
            while True:
                flight = self.hand
                if flight is None:
                    flight = self.hand = self._take()
                elif self.skipped:
                    self._pass_over()
                if flight is None or self.paused:
                    return
                client = groups.pick(dispatch_tag(flight) if groups.tagged else "")
                if client is None:
                    return
                self.hand = None
                self._hand_over(client, flight)
                if client.in_flight >= client.window:
                    self.backlog.spare_rewind(flight)
                groups.offer(client)
        finally:
            self._pumping = False

    def _take(self) -> Flight | None:
        partition = self._partition
        if self._closed or partition.suspended:
            return None
        if self.skipped:
            self._pass_over()
            return None
        return self.backlog.take()

    def _pass_over(self) -> None:
        """Drop what comes while the channel is skipped, also behind a message that was read ahead and still waits."""
        partition = self._partition
        if self.backlog.count < partition.readable:
            self.backlog.jump(partition.readable_offset, partition.readable)

    def _hand_over(self, client: Client, flight: Flight) -> None:
        subscriber = client.subscriber
        if not self._is_wanted(client, flight) or self.backlog.is_finished(flight):
            self.backlog.confirm(flight)
            return
        internal_id = flight.entry.record.internal_id
        known = self._flights.table.get(internal_id)
        if known is not None:  # read again because the position was moved, and still at a client
            if known.delayed and not flight.delayed:
                self.backlog.confirm(flight)
            return
        flight.owner = client
        flight.attempts = self._next_attempt(flight.attempts)
        flight.delivered = now = self._clock()
        flight.deadline = now + subscriber.msg_timeout
        self._flights.add(flight)
        client.in_flight += 1
        client.messages += 1
        if self._partition.extend and not (subscriber.extend or self._options.extend_compatible()):
            client.leave()
            return
        subscriber.deliver(as_message(flight))

    def _next_attempt(self, attempts: int) -> int:
        return min(attempts + 1, MAX_ATTEMPTS)

    def _is_wanted(self, client: Client, flight: Flight) -> bool:
        rate = client.subscriber.sample_rate
        # the real server compares so, and lets one percent more through
        if rate and not flight.delayed and int(self._options.random.random() * 100) > rate:
            return False
        matches = client.matches
        return matches is None or not self._partition.extend or matches(flight.entry.record)

    # time

    def tick(self) -> float:
        """Let what is due happen: timeouts, delays, the delayed queue; returns the clock time of the next."""
        for flight in self._flights.due(self._clock()):
            self._expire(flight)
        if self.clients and self.backlog.delayed_deadline() <= self._clock():
            self.backlog.bring_delayed()
        self.pump()
        return self.next_deadline()

    def next_deadline(self) -> float:
        """Return a clock time before which nothing is due; infinity when nothing waits."""
        due = self._flights.next_deadline()
        return min(due, self.backlog.delayed_deadline()) if self.clients else due

    def _expire(self, flight: Flight) -> None:
        client = flight.owner
        if not flight.deferred:
            self.timeouts += 1
        if client is not None:
            client.in_flight -= 1
            client.timed_out += 1
            self._failed(client)
            self._groups.renew(client)
        self.backlog.give_back(flight)

    def _failed(self, client: Client) -> None:
        client.fail()
