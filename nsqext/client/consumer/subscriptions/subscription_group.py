"""The open subscriptions of a consumer: share RDY, send answers, run the timer, count messages."""

from __future__ import annotations

import logging
import time
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

import anyio
from attrs import define

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.flush_schedule import FlushSchedule
from nsqext.client.consumer.subscriptions.rdy_distributor import IDLE, IDLE_TURN, RdyDistributor
from nsqext.client.pulse import PAST_DUE, Pulse
from nsqext.waits import Waiters, Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized

    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.consumer.unpacking import UnpackBudget
    from nsqext.client.events import ClientEvents
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.lookup.metadata import MetadataCache


@define(eq=False)
class RejectedCounts:
    """Counters of messages that failed permanently."""

    dropped: int = 0  #: finished without a dead letter
    dead_letters: int = 0


logger: logging.Logger = logging.getLogger("nsqext.consumer")

_TICK = 0.25  # seconds between two ticks while messages are received or unsent commands wait
_IDLE_TICK = 5.0  # longest time between two ticks of a `Pulse`, and of a connection without messages
_LONGEST_REST = 60.0  # the same, while nothing is in flight or due
_TICKS_PER_TIMEOUT = 8

_clock = time.monotonic

_in_flight: Callable[[Subscription], int] = attrgetter("in_flight")


class SubscriptionGroup:
    """The open subscriptions of a consumer, to all topics."""

    def __init__(
        self, options: ConsumerOptions, metadata: MetadataCache, events: ClientEvents, tasks: BackgroundTasks
    ) -> None:
        self.options: ConsumerOptions = options
        self.metadata: MetadataCache = metadata
        self.events: ClientEvents = events
        self.tasks: BackgroundTasks = tasks
        self.backoff: Backoff = Backoff(options.backoff)
        self.flow: RdyDistributor[Subscription] = RdyDistributor(
            options.max_in_flight, self.backoff, options.max_in_flight_bytes, options.initial_ready
        )
        self.unpack_budget: UnpackBudget | None = None  #: None before the first compressed message
        self.early: EarlyMessages | None = None  #: None before the first message that is not due
        self.live: dict[Subscription, None] = {}  #: an ordered set
        self.unrecorded: dict[Subscription, None] = {}  #: with reads that are not recorded yet
        self.rejected: RejectedCounts = RejectedCounts()
        self.opened: int = 0  #: subscriptions that were opened
        self.reconnects: int = 0  #: of these, after the end of an earlier connection
        #: messages received, requeued and lost, and bytes received, of ended subscriptions
        self.closed_counts: tuple[int, int, int, int] = (0, 0, 0, 0)
        self.paused_topics: set[str] = set()
        self.idle: bool = False  #: the timer rests until something is due, and the next read has to wake it
        #: messages read before this time arrived when they were read; later, ask `earliest_receipt`
        self.on_time_until: float = -inf
        self.schedule: FlushSchedule = FlushSchedule(self.flush)
        self._shares_due = False  # whether the next flush distributes RDY
        self._narrow_due = Wakeup()
        self._tick_due = Waiters()
        self._ticked_at = 0.0
        self._due_at = inf
        self._pulse = Pulse()
        self._all_due = 0.0
        self._longest_pause: float | None = None  # None if connections have changed
        self._received_at = 0.0
        self._waiting_since = 0.0  # when a handler waited last, and a window was wide
        self._levels: dict[Backoff, int] = {}

    @property
    def subscriptions(self) -> list[Subscription]:
        return [subscription for subscription in tuple(self.live) if subscription.live]

    def add(self, subscription: Subscription) -> None:
        self.live[subscription] = None
        self._longest_pause = None
        self.opened += 1
        sole = subscription.key_sharing is KeySharing.TAGS
        self.flow.add(subscription, subscription.max_ready, subscription.backoff, _clock(), sole=sole)
        self.flow.pause(subscription, paused=subscription.topic in self.paused_topics)
        self._distribute_soon()
        # its message timeout may be shorter than the current pause; hundreds that are added share a tick
        self._all_due = min(self._all_due, _clock() + _TICK)
        self.wake_timer()
        if subscription.upgradable:
            self._pulse.watch_silence(_clock())

    def remove(self, subscription: Subscription) -> bool:
        """Remove an ended subscription; return whether it had been added."""
        added = subscription in self.live
        if added:
            del self.live[subscription]
            self._longest_pause = None
        received, requeued, lost, size = self.closed_counts
        self.closed_counts = (
            received + subscription.received,
            requeued + subscription.requeued + (subscription.in_flight if subscription.stopped else 0),
            lost + subscription.timed_out + (0 if subscription.stopped else subscription.in_flight),
            size + subscription.received_bytes,
        )
        self.unrecorded.pop(subscription, None)
        self.flow.remove(subscription)
        self._distribute_soon()  # once for all connections of a node that was lost
        return added

    def retire(self, subscriptions: Iterable[Subscription]) -> None:
        """Request no further messages of subscriptions that will be closed."""
        for subscription in subscriptions:
            self.flow.retire(subscription)
            subscription.set_ready(0)  # also if it was never added
        self.rebalance()

    def upgradable_topics(self) -> dict[str, float]:
        """Return the subscribed topics without extend support, with the time of their last message or subscription."""
        found: dict[str, float] = {}
        upgradable: set[str] = set()
        for subscription in self.live:
            topic = subscription.topic
            found[topic] = max(subscription.received_at, found.get(topic, 0.0))
            if subscription.upgradable and subscription.live:
                upgradable.add(topic)
        return found if len(upgradable) == len(found) else {topic: found[topic] for topic in upgradable}

    def unpacking(self) -> UnpackBudget:
        if self.unpack_budget is None:
            from nsqext.client.consumer.unpacking import UnpackBudget

            self.unpack_budget = UnpackBudget(self.options.delivery.max_unpacked_bytes)
        return self.unpack_budget

    def early_messages(self) -> EarlyMessages:
        if self.early is None:
            from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages

            self.early = EarlyMessages()
        return self.early

    # RDY

    def pause(self, topic: str, *, paused: bool) -> None:
        """Stop or resume requesting messages of a topic."""
        (self.paused_topics.add if paused else self.paused_topics.discard)(topic)
        for subscription in self.live:
            if subscription.topic == topic:
                self.flow.pause(subscription, paused=paused)
        self.rebalance()

    @property
    def share(self) -> int:
        """Messages that each connection may have in flight if all receive equally; 2 or more."""
        return max(2, self.flow.max_in_flight // max(1, len(self.live)))

    def received(self, subscription: Subscription) -> None:
        """Record a read while the timer rests, or the subscription is watched."""
        if self.idle:
            self.idle = False
            self.wake_timer()
        if self._record(subscription):
            self._distribute_soon()

    def _distribute_soon(self) -> None:
        self._shares_due = True
        self.schedule.wake()

    def _record(self, subscription: Subscription) -> bool:
        """Report messages since the last call to the distributor; return whether RDY counts change."""
        count, size, excess, width = subscription.take_unrecorded()
        if not count:
            return False
        now = subscription.received_at
        self._received_at = max(self._received_at, now)
        in_flight, waited = subscription.in_flight, subscription.waited
        return self.flow.received(subscription, count, size, in_flight, now, waited, excess, width)

    def _record_reads(self) -> bool:
        changed = [self._record(subscription) for subscription in self.unrecorded]
        self.unrecorded.clear()
        return any(changed)

    def fit_windows(self) -> None:
        """Fit RDY counts to what handlers can take, with the next flush: a handler or the caller waits for messages."""
        changed = self._record_reads()
        if self.flow.fit(_in_flight) or changed:
            self._shares_due = True
        if self.flow.wide:
            self._waiting_since = _clock()
            self._narrow_due.wake()

    def make_room(self, subscription: Subscription) -> None:
        """Raise the RDY count of a subscription: its messages wait in flight until they are due."""
        self.flow.widen_window(subscription)
        self.rebalance()

    def flush_before_wait(self, waiting: Sized) -> None:
        """Send pending answers; first fit RDY if no received message waits."""
        if not waiting:
            self.fit_windows()
        self.flush()

    def rebalance(self) -> None:
        """Set the RDY count of every connection."""
        self._shares_due = False
        now = _clock()
        self._record_reads()
        in_flight = {subscription: subscription.in_flight for subscription in self.live}
        for subscription, share in self.flow.shares(now, in_flight).items():
            if share != subscription.ready:
                subscription.set_ready(share)
            subscription.watched = self.flow.watches(subscription)
        if self._note_backoffs() and self._until_probe(now) < _TICK:
            self.wake_timer()
        if self.idle and self.flow.unsettled:
            self.idle = False
            self.wake_timer()

    def _note_backoffs(self) -> bool:
        """Report changed backoff levels; return whether any backoff is active."""
        active = self.backoff.level > 0
        for subscription in self.live:
            backoff = subscription.backoff
            level, before = backoff.level, self._levels.get(backoff, 0)
            active = active or level > 0
            if level != before:
                self._levels[backoff] = level
                if not before and self.early is not None:
                    self.early.release({one for one in self.live if one.backoff is backoff})
                own = backoff is not self.backoff
                topic, partition = (subscription.topic, subscription.partition) if own else (None, None)
                self.events.emit("backoff", topic, partition, subscription.node if own else "", f"level {level}")
        if not active:
            self._levels.clear()
        return active

    def earliest_receipt(self, now: float) -> float:
        """Return since when bytes read now may have been in the socket: the last tick if the timer is late."""
        pulse = self._pulse
        if now < pulse.stood_until:
            return pulse.stood_since
        if now - self._due_at >= _TICK:
            return self._ticked_at
        if now - pulse.due_at >= _TICK:
            return pulse.ticked_at
        self.on_time_until = now + _TICK  # shorter stalls are not noticed anyway
        return now

    # Sending

    def needs_flush(self, subscription: Subscription, *, answer: bool = False) -> bool:
        """Record that a subscription has commands to send; see `FlushSchedule.add`.

        Raises InvalidState outside of the event loop.
        """
        self.tasks.check_event_loop()
        return self.schedule.add(subscription, answer=answer)

    def flush(self) -> None:
        """Send all pending commands now, and RDY counts that follow reads: many reads share one distribution."""
        if self._shares_due:
            self.rebalance()
        self.schedule.flush_added()

    async def run_narrow(self) -> None:
        """Shrink windows until cancelled, after which servers send at once what they collect."""
        while True:
            await self._narrow_due.wait()
            while self.flow.wide:
                quiet = _clock() - max(self._received_at, self._waiting_since)
                changed, pause = self.flow.narrow(quiet, _in_flight)
                if changed:
                    self.rebalance()
                    self.flush()
                if pause < inf:
                    await anyio.sleep(pause)

    # Timer

    async def run_timer(self, ticked: Callable[[float, float], object]) -> None:
        """Tick until cancelled: a few times a second while messages are in flight, otherwise when something is due.

        Args:
            ticked: called at each tick before RDY is distributed, with its time and its delay in seconds.
        """
        self._pulse = pulse = Pulse.current()
        pulse.members[self] = None
        try:
            while True:
                self._ticked_at = started = _clock()
                pause = pulse.limit(self, min(self._pause(started), self._until_probe(started)), started)
                self._due_at = started + pause
                with anyio.move_on_after(pause):
                    await self._tick_due.wait()
                now = _clock()
                late = max(0.0, now - self._due_at)
                if late >= _TICK:
                    self.schedule.blocked(now)
                    pulse.notice(self._ticked_at, now)
                self._tick(now)
                ticked(now, late)
                self.rebalance()
        finally:
            pulse.leave(self)

    def wake_timer(self) -> None:
        """Tick in the next turn of the event loop."""
        self._due_at = min(self._due_at, _clock())
        self._tick_due.wake()

    def _tick(self, now: float) -> None:
        every = now >= self._all_due
        if every:
            self._all_due = now + self.longest_pause()
        for subscription in self.subscriptions:
            if every or subscription.busy:
                subscription.tick()
                if subscription.misses_heartbeat(now):
                    self.metadata.poll_soon(subscription.topic)
        self._pulse.look_up_silent(now)
        for backoff in self._backoffs():
            backoff.tick(now)

    def _pause(self, now: float) -> float:
        """Return the seconds until the next tick.

        A consumer that finishes its messages at once is busy for another tick: not every read wakes the timer.
        """
        busy = now - self._received_at < _TICK or self.flow.unsettled
        busy = busy or any(subscription.busy for subscription in self.live)
        self.idle = not (busy or any(backoff.level for backoff in self._backoffs()))
        return self._rest(now) if self.idle else _TICK

    def _rest(self, now: float) -> float:
        """Return the seconds until an idle consumer ticks: a turn ends, a window is reset, a heartbeat is missing."""
        due = min((subscription.silence_due for subscription in self.live), default=inf)
        if self.flow.takes_turns:
            due = min(due, now + IDLE_TURN + PAST_DUE)
        reset = self._received_at + IDLE
        if now < reset:
            due = min(due, reset + PAST_DUE)
        return max(_TICK, min(due - now, _LONGEST_REST))

    def longest_pause(self) -> float:
        """Return the seconds between two ticks of a subscription without messages in flight."""
        if self._longest_pause is None:
            self._longest_pause = self._make_longest_pause()
        return self._longest_pause

    def _make_longest_pause(self) -> float:
        shortest = min(
            (
                min(subscription.msg_timeout, subscription.request.options.connection.heartbeat_interval)
                for subscription in self.live
            ),
            default=inf,
        )
        return max(_TICK, min(_IDLE_TICK, shortest / _TICKS_PER_TIMEOUT))

    def _backoffs(self) -> list[Backoff]:
        return list(dict.fromkeys((self.backoff, *(subscription.backoff for subscription in self.live))))

    def _until_probe(self, now: float) -> float:
        """Return the seconds until the pause of a backoff ends."""
        return min((max(0.0, backoff.until - now) for backoff in self._backoffs() if backoff.until), default=inf)
