"""Channels of type key_failover: many consumers, one for each key (Key_Failover note, dispatcher in the broker)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.channel import Channel
from nsqext.broker.engine.cursor import Cursor
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.key_selector import KeySelector
from nsqext.broker.engine.stats import ChannelStats, KeyRangeStats, channel_stats

if TYPE_CHECKING:
    from nsqext.broker.engine.channel_types import ChannelKind
    from nsqext.broker.engine.consumer_state import Client, Subscriber
    from nsqext.broker.engine.in_flight import Flight
    from nsqext.broker.engine.partition import Partition
    from nsqext.broker.engine.start_position import StartPosition

__all__ = ("KeyFailoverChannel", "KeyFailoverCursor")

_NOT_ORDERED = "channel {name} is dispatched by key_failover and cannot be consumed in order"


class KeyFailoverCursor(Cursor):
    """What comes back goes to the replay set, at its place in the order of the queue."""

    requeues: int

    def __init__(self, partition: Partition, offset: int, count: int, channel: KeyFailoverChannel) -> None:
        journal = None if channel.ephemeral else partition.journal(channel.name)
        super().__init__(partition, offset, count, channel.let_go, journal)
        self._keys = channel.keys

    def _must_wait(self) -> bool:
        return self._keys.waiting >= self._options.rules.replay_limit

    def is_full(self) -> bool:
        """Return whether as many messages wait for delays as may wait in the replay set."""
        return self.flights.deferred >= self._options.rules.replay_limit

    def confirm(self, flight: Flight) -> None:
        """Note that a message is finished."""
        self._keys.release(flight)
        super().confirm(flight)

    def give_back(self, flight: Flight) -> None:
        """Let a message come again, before the later ones of its key."""
        flight.owner = None
        flight.deferred = False
        self.requeues += 1
        self._keys.put(flight)
        self._keys.release(flight)

    def drain(self) -> None:
        """Forget what is on its way."""
        super().drain()
        self._keys.clear()


class KeyFailoverChannel(Channel):
    """A channel whose messages of one key go to one client.

    Args:
        partition: where its messages come from.
        name: its name.
        offset: where it begins to read.
        count: messages before that.
        kind: its type, with the name of the header that carries the key.

    Attributes:
        keys: the replay set and the ranges.
    """

    backlog: KeyFailoverCursor

    def __init__(self, partition: Partition, name: str, offset: int, count: int, kind: ChannelKind) -> None:
        self.keys: KeySelector = KeySelector(partition.options.clock, kind.key_header)
        super().__init__(partition, name, offset, count)
        self.kind = kind
        self._groups = self.keys

    def _make_backlog(self, partition: Partition, offset: int, count: int) -> KeyFailoverCursor:
        return KeyFailoverCursor(partition, offset, count, self)

    def let_go(self, flight: Flight) -> None:
        """Take a message from its client because the position is moved."""
        self._dropped(flight)

    def subscribe(self, subscriber: Subscriber, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Take a client in; it gets a range of the keys.

        Raises:
            Refusal: it wants order, or "Consume is disabled currently".
        """
        if ordered:
            raise Refusal(_NOT_ORDERED.format(name=self.name))
        super().subscribe(subscriber, start=start)

    def set_ordered(self, ordered: bool) -> None:
        """Refuse to become ordered.

        Raises:
            Refusal: always, when order is wanted.
        """
        if ordered:
            raise Refusal(_NOT_ORDERED.format(name=self.name))

    def _abandon(self, client: Client) -> None:
        """Requeue what a client had in flight; the replay set restores the order of each key."""
        for flight in self._flights.of(client):
            self._flights.pop(flight.entry.record.internal_id)
            flight.attempts -= 1
            self.backlog.give_back(flight)

    def _dropped(self, flight: Flight) -> None:
        self.keys.block(flight)
        super()._dropped(flight)

    def _belongs_to_delayed(self, flight: Flight, delay: float, now: float) -> bool:
        return False  # what comes behind it of its key has to wait, so it stays in sight

    def pump(self) -> None:
        """Hand out what can be handed out; read on while any client can take more."""
        if self._pumping:
            return
        self._pumping = True
        keys = self.keys
        try:
            while not self.paused:
                client = keys.next_ready()
                if client is not None:
                    self._serve(client)
                    continue
                flight = self._take() if keys.hungry or self.skipped else None
                if flight is None:
                    return
                keys.put(flight)
        finally:
            self._pumping = False

    def _serve(self, client: Client) -> None:
        keys = self.keys
        while client.in_flight < client.window and (flight := keys.next_for(client)) is not None:
            self._hand_over(client, flight)
            if flight.owner is client:
                keys.delivered(client, flight)
            else:
                keys.release(flight)
            if client.stalled:  # the topic was extended under it: its keys go to others
                keys.remove(client)

    def stats(self) -> ChannelStats:
        """Return its numbers."""
        stats, keys = channel_stats(self), self.keys
        waiting = keys.waiting_for()
        stats.backlogs += keys.waiting
        stats.dispatch = self.kind.type
        stats.key_header = self.kind.key_header
        stats.replay_count = keys.waiting
        stats.held_keys = keys.held
        stats.key_ranges = [
            KeyRangeStats(low, high, tag, client.subscriber.id, client.subscriber.name, rate, waiting.get(client, 0))
            for tag, low, high, client, rate in keys.ranges()
        ]
        return stats
