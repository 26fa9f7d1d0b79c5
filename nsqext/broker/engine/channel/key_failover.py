"""Channels of type key_failover: many clients, and one at a time for each key (Key_Failover note)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.channel.channel import Channel
from nsqext.broker.engine.channel.cursor import Cursor
from nsqext.broker.engine.channel.key_selector import KeySelector
from nsqext.broker.engine.channel.rules import RequeueRules
from nsqext.broker.engine.channel.stats import ChannelCounters, KeyRangeStats
from nsqext.broker.engine.errors import Refusal

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.client import Client, Subscriber
    from nsqext.broker.engine.channel.cursor import PartitionView
    from nsqext.broker.engine.channel.in_flight import Delivery
    from nsqext.broker.engine.options import ChannelKind
    from nsqext.broker.engine.start_position import StartPosition

_NOT_ORDERED = "channel {name} is dispatched by key_failover and cannot be consumed in order"


class KeyFailoverCursor(Cursor):
    """Requeued messages go to the replay set, at their place in the order of the queue."""

    requeues: int

    def __init__(self, partition: PartitionView, position: tuple[int, int], channel: KeyFailoverChannel) -> None:
        super().__init__(partition, channel.name, position, channel._dropped)
        self._keys = channel.keys

    def _must_wait(self) -> bool:
        return self._keys.waiting >= self._options.rules.replay_limit

    def is_full(self) -> bool:
        """Return whether as many messages are deferred as the replay set may hold."""
        return self.in_flight.deferred >= self._options.rules.replay_limit

    def acknowledge(self, delivery: Delivery) -> None:
        self._keys.release(delivery)
        super().acknowledge(delivery)

    def requeue(self, delivery: Delivery) -> None:
        """Queue a message for redelivery before later messages of its key."""
        delivery.owner = None
        delivery.deferred = False
        self.requeues += 1
        self._keys.put(delivery)
        self._keys.release(delivery)

    def drain(self) -> None:
        super().drain()
        self._keys.clear()


class KeyFailoverChannel(Channel):
    """A channel that sends all messages of one key to one client."""

    cursor: KeyFailoverCursor

    def __init__(self, partition: PartitionView, name: str, offset: int, count: int, kind: ChannelKind) -> None:
        # the replay set and the key ranges
        self.keys: KeySelector = KeySelector(partition.options.clock, kind.key_header)
        super().__init__(partition, name, offset, count)
        self.kind = kind  # its type, with the name of the header that carries the key
        self._selector = self.keys
        # later messages of a key wait for a requeued one, so it stays in memory
        self._requeue_rules = RequeueRules(partition.options, self.cursor, on_disk=False)

    def _make_cursor(self, partition: PartitionView, position: tuple[int, int]) -> KeyFailoverCursor:
        return KeyFailoverCursor(partition, position, self)

    def subscribe(self, subscriber: Subscriber, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Add a client, which is assigned a range of the keys; raises `Refusal` if it requests order."""
        if ordered:
            raise Refusal(_NOT_ORDERED.format(name=self.name))
        super().subscribe(subscriber, start=start)

    def set_ordered(self, ordered: bool) -> None:
        if ordered:
            raise Refusal(_NOT_ORDERED.format(name=self.name))

    def _requeue_all_of(self, client: Client) -> None:
        """Requeue what a client had in flight; the replay set keeps the order of each key."""
        for delivery in self._in_flight.of(client):
            self._in_flight.remove(delivery.entry.record.internal_id)
            delivery.attempts -= 1
            self.cursor.requeue(delivery)

    def _dropped(self, delivery: Delivery) -> None:
        self.keys.block(delivery)
        super()._dropped(delivery)

    def set_rate_limit(self, rate: int) -> None:
        """Refuse a rate limit: messages of many keys are read ahead."""
        raise Refusal(f"channel {self.name} is dispatched by {self.kind} and has no rate limit")

    def pump(self) -> None:
        """Deliver messages, and read further while any client can take more."""
        if self._must_not_pump():
            return
        self._pumping = True
        keys = self.keys
        try:
            while not self.paused:
                client = keys.next_ready()
                if client is not None:
                    self._serve(client)
                    continue
                delivery = self._take() if keys.can_take or self.skipped else None
                if delivery is None:
                    return
                keys.put(delivery)
        finally:
            self._pumping = False

    def _serve(self, client: Client) -> None:
        keys = self.keys
        while client.in_flight < client.window and (delivery := keys.next_for(client)) is not None:
            self._deliver(client, delivery)
            if delivery.owner is client:
                keys.delivered(delivery)
            else:
                keys.release(delivery)
            if client.stalled:  # the topic was upgraded: the keys of this client go to others
                keys.remove(client)

    def tick(self) -> float:
        """Move keys from clients that are busier than others, then as in other channels."""
        if self.keys.balance_due <= self._clock():
            self.keys.balance()
        return min(super().tick(), self.keys.balance_due)

    def stats(self) -> ChannelCounters:
        stats, keys = super().stats(), self.keys
        waiting = keys.waiting_for()
        stats.backlogs += keys.waiting
        stats.replay_count = keys.waiting
        stats.held_keys = keys.held
        stats.key_ranges = [
            KeyRangeStats(low, high, tag, client.subscriber.id, client.subscriber.name, rate, waiting.get(client, 0))
            for tag, low, high, client, rate in keys.ranges()
        ]
        return stats
