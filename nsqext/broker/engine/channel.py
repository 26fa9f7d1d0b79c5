"""A channel of the redesigned server: answers to messages, switches and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.engine.consumer_state import Client, Subscriber
from nsqext.broker.engine.dispatcher import Dispatcher
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.start_position import AT_END, StartPosition
from nsqext.broker.engine.stats import ChannelStats, channel_stats
from nsqext.broker.engine.storage.partition_store import ChannelState
from nsqext.protocol.record import MAX_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.broker.engine.in_flight import Flight
    from nsqext.broker.engine.storage.delayed_queue import Delayed

__all__ = ("Channel", "Refusal", "Subscriber")

_MANY_ATTEMPTS = 100
_NOT_IN_FLIGHT = "Message ID not in flight"


def _not_owned(flight: Flight, subscriber: Subscriber, internal_id: str = "") -> str:
    owner = flight.owner.subscriber.id if flight.owner is not None else 0
    return f"client does not own message {internal_id}: {owner} vs {subscriber.id}"


class Channel(Dispatcher):
    """One channel of one partition; see `Dispatcher` for its members."""

    # answers to messages

    def finish(self, subscriber: Subscriber, internal_id: int) -> None:
        """Finish a message.

        Raises:
            Refusal: it is not in flight, or not at this client.
        """
        flight = self._flights.table.get(internal_id)
        client = self.clients.get(subscriber.id)
        if flight is None or client is None or flight.owner is not client:
            raise self._refused(client, _NOT_IN_FLIGHT if flight is None else _not_owned(flight, subscriber))
        self._flights.pop(internal_id)
        self.backlog.confirm(flight)
        self.latencies.add(self._clock() - flight.delivered, self._options.wall() - flight.entry.record.timestamp)
        client.in_flight -= 1
        client.finished += 1
        if client.errors:
            client.recover()
        self._groups.renew(client)
        self.pump()

    def finish_forced(self, internal_id: int) -> None:
        """Finish a message whoever has it.

        Raises:
            Refusal: it is not in flight.
        """
        flight = self._flights.table.get(internal_id)
        if flight is None:
            raise Refusal(_NOT_IN_FLIGHT)
        self._flights.pop(internal_id)
        self.backlog.confirm(flight)
        self._dropped(flight)
        self.pump()

    def finish_deferred(self) -> None:
        """Finish all messages that wait for their delay in memory."""
        for flight in list(self._flights.waiting()):
            self.finish_forced(flight.entry.record.internal_id)

    def requeue(self, subscriber: Subscriber, internal_id: int, delay: float) -> None:
        """Give a message back.

        Args:
            subscriber: who has it.
            internal_id: the message.
            delay: seconds after which it comes again; on an ordered channel a delay means that nothing happens and the
                message comes again at its timeout (captured: sub_ordered_requeue).

        Raises:
            Refusal: it is not in flight, not at this client, deferred already, or given back too often.
        """
        if delay > 0 and (self.ordered or self._partition.ordered):
            return
        flight = self._flights.table.get(internal_id)
        client = self.clients.get(subscriber.id)
        if flight is None or client is None:
            raise self._refused(client, _NOT_IN_FLIGHT)
        now = self._clock()
        refusal = self._requeue_refusal(flight, client, delay, now)
        if refusal:
            raise self._refused(client, refusal)
        self._flights.pop(internal_id)
        self._dropped(flight)
        if delay <= 0:
            self.backlog.give_back(flight)
        elif not (self._belongs_to_delayed(flight, delay, now) and self.backlog.delay(flight, delay)):
            if flight.attempts > _MANY_ATTEMPTS and now + delay - flight.delivered < 1:
                delay += 1
            self._flights.defer(flight, now + delay)
        self.pump()

    def _requeue_refusal(self, flight: Flight, client: Client, delay: float, now: float) -> str:
        """Return the refusal, "" for none; the order of the checks is the real server's (captured: many_attempts)."""
        if delay <= 0:
            hasty = flight.attempts > _MANY_ATTEMPTS and now - flight.delivered < 0.1
            if hasty or flight.attempts >= MAX_ATTEMPTS // 2:
                return "Message too much requeue"
            return "" if flight.owner is client else _not_owned(flight, client.subscriber)
        if flight.deferred:
            return "Message is deferred"
        if flight.owner is not client:
            return _not_owned(flight, client.subscriber, str(flight.entry.record.internal_id))
        if (
            self.backlog.is_full()
            and now + delay >= flight.deadline
            and not self._belongs_to_delayed(flight, delay, now)
        ):
            return "Too much deferred messages in flight"
        return ""

    def _belongs_to_delayed(self, flight: Flight, delay: float, now: float) -> bool:
        if self.ephemeral or flight.delayed or not self.backlog.takes_delayed():
            return False
        longest = self._options.limits.max_req_timeout
        return delay > self._options.rules.delayed_threshold or now + delay - flight.delivered >= longest

    def touch(self, subscriber: Subscriber, internal_id: int) -> None:
        """Begin the timeout of a message anew, up to the longest time that a message may be in flight.

        Raises:
            Refusal: it is not in flight, or not at this client.
        """
        flight = self._flights.table.get(internal_id)
        client = self.clients.get(subscriber.id)
        if flight is None or client is None:
            raise Refusal(_NOT_IN_FLIGHT)
        if flight.owner is not client:
            raise Refusal(_not_owned(flight, subscriber))
        longest = flight.delivered + self._options.limits.max_msg_timeout
        flight.deadline = min(self._clock() + subscriber.touch_timeout, longest)
        self._flights.moved(flight)

    def _refused(self, client: Client | None, text: str) -> Refusal:
        if client is not None:
            self._failed(client)
        return Refusal(text)

    # switches

    def set_offset(self, position: StartPosition) -> None:
        """Read on elsewhere; what is on its way is forgotten, only the message in hand stays.

        Raises:
            Refusal: with the real server's text.
        """
        self._jump(position.find(self._partition.log, coordinated=self._options.coordinated))
        self.pump()

    def empty(self) -> None:
        """Go to the end and drop the delayed queue."""
        self.backlog.delayed.clear()
        self.set_offset(AT_END)

    def empty_delayed(self) -> None:
        """Drop the delayed queue; what came back from it already stays on its way."""
        self.backlog.delayed.clear()

    def requeue_delayed(self, ahead: float = 0) -> None:
        """Bring back what is due in the delayed queue within so many seconds."""
        self.backlog.bring_delayed(ahead)
        self.pump()

    def fix_confirmed(self) -> None:
        """Read again what is not finished (``/channel/fixconfirmed``)."""
        if not (self.skipped or self.paused or self.ordered):
            self.backlog.rewind(forget=False)
            self.pump()

    def set_ordered(self, ordered: bool) -> None:
        """Make the channel ordered, or make it not ordered, which closes its clients."""
        if ordered:
            self._order()
        elif self.ordered:
            self.backlog.ordered = False
            self._close_clients()
        self.pump()

    def pause(self) -> None:
        """Give nothing out."""
        self.paused = True
        self._partition.note_channels()

    def unpause(self) -> None:
        """Give out again."""
        self.paused = False
        self._partition.note_channels()
        self.pump()

    def skip(self) -> None:
        """Drop everything from now on."""
        self._skip(True)

    def unskip(self) -> None:
        """Take messages again, from the end."""
        self._skip(False)

    def _skip(self, skipped: bool) -> None:
        self.skipped = skipped
        self._partition.note_channels()
        self.empty()

    # the end

    def suspend(self) -> None:
        """Serve nobody: clients are closed, what is on its way is forgotten. Another node leads the partition now."""
        self._close_clients()
        for client in self.clients.values():
            self._groups.remove(client)
            client.leave()
        self.clients.clear()
        self.hand = None
        if self.ordered:
            self.backlog.confirmed.clear()
        self.backlog.drain()
        self.backlog.rewind(forget=False)
        if self.ephemeral:
            self._partition.delete_channel(self.name)

    def close(self) -> None:
        """Close the clients and hand out nothing any more."""
        self._closed = True
        self._close_clients()

    def _close_clients(self) -> None:
        for client in list(self.clients.values()):
            client.subscriber.closed()

    def state(self) -> ChannelState:
        """Return what is kept of it."""
        confirmed, kind = self.confirmed, self.kind
        return ChannelState(
            self.name,
            confirmed.offset,
            confirmed.count,
            confirmed.intervals,
            self.paused,
            self.skipped,
            kind.type,
            kind.key_header,
            kind.fixed,
        )

    def restore(self, state: ChannelState, delayed: Iterable[Delayed]) -> None:
        """Go on where the channel was when its state was kept.

        Args:
            state: the state.
            delayed: what its delayed queue held.
        """
        log = self._partition.log
        # the queue may have let go more than was written down, when the disk was full
        offset, count = max((state.offset, state.count), (log.start_offset, log.start_count))
        self.paused: bool = state.paused
        self.skipped: bool = state.skipped
        self.confirmed.restore(offset, count, state.intervals)
        for message in delayed:
            self.backlog.delayed.restore(message)
        self.cut(log.end_offset, log.end_count)
        self._partition.note_restored()

    def cut(self, offset: int, count: int) -> None:
        """Forget what lies behind the end of a queue that was cut off there."""
        if self.hand is not None and self.hand.entry.offset >= offset:
            self.hand: Flight | None = None
        self.backlog.cut(offset, count)

    def stats(self) -> ChannelStats:
        """Return its numbers."""
        return channel_stats(self)
