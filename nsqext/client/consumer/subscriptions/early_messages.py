"""Requeue messages that are received before they are due.

The redesigned NSQ has no delayed publish. A delayed message carries the header ``##due``, and consumers requeue it
until then: for a part of the time, and again when it is due, because servers are late. They check requeued messages
twice a second, in new channels after up to five seconds, and in only 20 random channels (source: nsqd.go,
queueScanLoop). So a consumer keeps a message in flight during the last seconds.

The planned deliveries are always requeued, also after the due time: so every consumer knows from the message how many
to subtract from its attempts. Messages that the server keeps on disk are requeued once: there, a message in flight
blocks the others.

Messages requeued for longer than a server may accept have no such header; this process remembers them.
"""

from __future__ import annotations

import time
from contextlib import suppress
from heapq import heappop, heappush
from math import ceil
from typing import TYPE_CHECKING, Final, TypeVar

from nsqext.client.consumer.message import ACCEPTED_DELAY, MAX_DELAY
from nsqext.errors import MessageNotInFlight, ProtocolError
from nsqext.protocol.messages import DUE_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from nsqext.client.consumer.message import Message, Owner

T = TypeVar("T")

_clock = time.monotonic
KEPT: Final = 10.0
"""Seconds before the due time from which a consumer keeps a message in flight."""
MOST_KNOWN: int = 10_000
"""Remembered messages that may be delivered early again, at most."""

Name = tuple[str, bytes]
"""Topic and id of a message."""


class EarlyMessages:
    """Requeues messages that are not due, and corrects the attempts of the others."""

    def __init__(self) -> None:
        #: messages in flight that are requeued when due, with that monotonic time
        self.kept: dict[Message, float] = {}
        self._due: list[tuple[float, int, Message]] = []
        self._added = 0
        # unplanned early deliveries: the server allows only shorter requeues, refused a requeue, or clocks differ
        self._uncounted: dict[Name, int] = {}
        #: due time (monotonic) and early deliveries of messages requeued for long
        self.postponed: dict[Name, tuple[float, int]] = {}

    def postpone(self, message: Message, delay: float) -> None:
        """Remember a requeued message if a server may deliver it before the delay in seconds has passed."""
        name = (message.topic, message.id)
        if delay > ACCEPTED_DELAY or name in self.postponed:
            _, early = self.postponed.get(name, (0.0, 0))
            _remember(self.postponed, name, (_clock() + delay, early))

    def keep(self, message: Message, due: float) -> None:
        """Keep a message in flight, and requeue it at a monotonic time.

        For messages due soon, and ordered channels, where servers ignore the delay of a requeue (captured:
        sub_ordered_requeue).
        """
        self.kept[message] = due
        self._added += 1
        heappush(self._due, (due, self._added, message))

    def tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            message = heappop(self._due)[2]
            self.kept.pop(message, None)
            if not message.answered:
                message.requeue_now(0.0, backoff=None)

    def release(self, owners: Container[Owner]) -> None:
        """Requeue the messages of subscriptions with a backoff until they are due: in flight, they use up its RDY."""
        for message, due in tuple(self.kept.items()):
            if message.owner in owners and not message.in_order:
                del self.kept[message]
                if not message.answered:
                    message.requeue_now(ceil(max(0.0, due - _clock()) * 1000) / 1000, backoff=None)

    def without_early(
        self, messages: list[Message], send_requeue: Callable[[Message, float], None], *, keep: bool
    ) -> list[Message]:
        """Return the messages that are due; requeue the others until then.

        Args:
            send_requeue: sends REQ with a delay in seconds, without an effect on the backoff.
            keep: whether messages due soon may stay in flight.
        """
        now = time.time()
        ready = []
        for message in messages:
            left = self._time_left(message, now)
            if left is None:
                ready.append(message)
            elif message.in_order or (keep and 0 < left <= min(KEPT, message.owner.msg_timeout / 2)):
                self.keep(message, _clock() + left)
            else:
                with suppress(MessageNotInFlight):  # it timed out in the socket, while this process stood still
                    send_requeue(message, left)
                message.answered = True
        return ready

    def _time_left(self, message: Message, now: float) -> float | None:
        """Return for how many seconds to requeue a message; None if it is due, with corrected attempts."""
        due, name = due_time(message), (message.topic, message.id)
        if due is not None and self._is_early(message, name, due, now):
            left = ceil(max(due - now, 0.0) * 1000) / 1000
            if left > KEPT and message.attempts < _planned_deliveries(message, due):
                left -= KEPT
            return min(left, MAX_DELAY)
        if name not in self.postponed:
            return None
        again, early = self.postponed[name]
        left = ceil((again - _clock()) * 1000) / 1000
        if left > 0:
            self.postponed[name] = (again, early + 1)
            return min(left, MAX_DELAY)
        message.attempts -= early
        if not early:
            del self.postponed[name]
        return None

    def _is_early(self, message: Message, name: Name, due: float, now: float) -> bool:
        """Return whether to requeue a delayed message; otherwise correct its attempts."""
        planned = _planned_deliveries(message, due)
        if message.attempts <= planned:
            return True
        if due <= now:
            message.attempts -= self._uncounted.get(name, planned)
            return False
        _remember(self._uncounted, name, message.attempts)
        return True


def _planned_deliveries(message: Message, due: float) -> int:
    """Return how often a delayed message is requeued before its handler is called."""
    delay = due - message.timestamp / 1e9
    if KEPT < delay <= ACCEPTED_DELAY and not message.in_order:
        return 2
    return max(1, ceil(delay / MAX_DELAY))


def _remember(known: dict[Name, T], name: Name, value: T) -> None:
    """Store a value as the newest; forget the oldest beyond the bound."""
    known.pop(name, None)
    known[name] = value
    if len(known) > MOST_KNOWN:
        del known[next(iter(known))]


def due_time(message: Message) -> float | None:
    """Return when a delayed message is due, in seconds since 1970; None for other messages."""
    if message.header.find(DUE_HEADER.encode()) < 0:
        return None
    try:
        text = message.header_value(DUE_HEADER)
    except ProtocolError:  # a header that servers refuse to store
        return None
    return int(text) / 1000 if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None
