"""A second judge, written from docs/explanation/guarantees.md alone, sentence by sentence.

It shares no code with the other checkers, so that a mistake in one of them does not hide what this one finds.

A history cannot show these sentences; other tests check them:

- on how many replicas a message is stored, and with which replicas it is available (`tests/broker/coordinator/`)
- a new channel starts at the end of the queue, `Consumer.seek` and ``/channel/setoffset``, messages that wait for busy
  consumers of their tag, the original NSQ (`tests/client/consumer/`, `tests/contract/`)
- clients continue while lookup is down (`tests/contract/`; the faults ``lookup_kill`` and ``lookup_empty`` show that
  nothing is lost)
- that lanes finish a redelivery without the handler: the same may happen after a change of the leader, which a history
  does not tell apart (`tests/client/consumer/`)
- Spark (`tests/spark/`)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.campaigns.simulation.history import Delivery, History, Publish

__all__ = ("broken_promises",)

_CLOSE = 30.0 + 15.0
_AFTER_FAULT, _UNNOTICED = 20.0, 50.0


def broken_promises(history: History) -> Iterator[str]:
    """Yield each sentence of the page that a history contradicts."""
    for book in (_Topic(history, name) for name in sorted({publish.topic for publish in history.publishes})):
        if not (history.recreated and book.name == "recreated"):
            yield from book.publishing()
            yield from book.consuming()
            yield from book.ordered()
            yield from book.tags()
    if history.close_seconds > _CLOSE:
        yield f"'Handlers have close_timeout seconds to end': closing took {history.close_seconds:.3f} s"


class _Topic:
    """What happened to one topic."""

    def __init__(self, history: History, name: str) -> None:
        self.name = name
        self.history = history
        self.publishes = {publish.body: publish for publish in history.publishes if publish.topic == name}
        self.deliveries = [delivery for delivery in history.deliveries if delivery.topic == name]
        self.copies: dict[bytes, set[tuple[int, int]]] = {}
        for delivery in self.deliveries:
            self.copies.setdefault(delivery.body, set()).add((delivery.partition, delivery.message_id))

    def publishing(self) -> Iterator[str]:
        """Check the section about publishing."""
        channels = {channel.name: channel.color for channel in self.history.channels if channel.topic == self.name}
        for body, publish in self.publishes.items():
            if publish.outcome == "failed" and body in self.copies:
                yield f"'A publish that raised is not stored': {body!r}, {publish.error}"
            if len(self.copies.get(body, ())) > 1 and not self._may_be_sent_again(publish):
                yield f"'A message may be stored twice in one case': {body!r} is {sorted(self.copies[body])}"
            history = self.history
            longest = history.timeout + history.settle_timeout + publish.patience + history.paused + 2.0
            if longest < publish.end - publish.begin < inf:
                yield f"'A publish that takes longer than timeout fails': {body!r} took until {publish.end:.3f} s"
        for channel, color in channels.items():
            delivered = {delivery.body for delivery in self.deliveries if delivery.channel == channel}
            stored = [publish for publish in self.publishes.values() if publish.outcome == "stored"]
            due = [publish for publish in stored if not color or publish.headers.get("color") == color]
            missing = [publish.body for publish in due if publish.body not in delivered]
            if missing:
                yield f"'A publish that returned is stored': {channel} never received {missing[:3]!r}"
        yield from self._keys()

    def _may_be_sent_again(self, publish: Publish) -> bool:
        """Return whether a response may have been lost while a message was published."""
        return self.history.on_unknown == "retry" and any(
            begin <= publish.end and end >= publish.begin - _AFTER_FAULT for begin, end in self.history.disturbances
        )

    def _keys(self) -> Iterator[str]:
        """Check that keys stay in one partition, and are stored in their order."""
        stored = [found for found in self.publishes.values() if found.outcome == "stored" and found.key]
        by_key = sorted(stored, key=lambda publish: (publish.key, publish.begin, publish.number))
        for key, group in groupby(by_key, key=lambda publish: publish.key):
            row = list(group)
            if len({publish.partition for publish in row}) > 1:
                yield f"'Messages of one key keep their order in one partition': {key} is in several"
            numbered = [publish for publish in row if publish.body in self.copies]
            for earlier, later in pairwise(numbered):
                if earlier.end <= later.begin and self._first(earlier) > self._first(later):
                    yield f"'Messages of one key keep their order': {later.body!r} is stored before {earlier.body!r}"
                    break

    def _first(self, publish: Publish) -> int:
        return min(number for _, number in self.copies[publish.body])

    def consuming(self) -> Iterator[str]:
        """Check the section about consuming."""
        known: dict[tuple[str, int, int], list[Delivery]] = {}
        channels = {channel.name for channel in self.history.channels if channel.topic == self.name}
        letters = {channel.letters for channel in self.history.channels if channel.topic == self.name}
        handled = {found.body for found in self.history.deliveries if found.topic in letters}
        for delivery in self.deliveries:
            if delivery.body not in self.publishes:
                yield f"{delivery.body!r} was delivered and never published"
            if delivery.channel not in channels:
                continue  # it was deleted
            known.setdefault((delivery.channel, delivery.partition, delivery.message_id), []).append(delivery)
        for place, row in known.items():
            due = self._is_kept(row[0]) and row[0].body not in handled
            if due and not any(delivery.outcome == "returned" for delivery in row):
                yield f"'A message is finished after its handler returned, never before': {place} was not handled again"
            for before, again in pairwise(row):
                if before.outcome == "returned" and not self._has_cause(before, again):
                    yield f"'A message is redelivered when …': {again.body!r} at {again.begin:.3f} s without a cause"

    def _is_kept(self, delivery: Delivery) -> bool:
        """Return whether no loss of power may have removed a message; the next one has its id then."""
        publish = self.publishes.get(delivery.body)
        return publish is None or not publish.unsynced

    def tags(self) -> Iterator[str]:
        """Check *a consumer with a tag receives messages of that tag and no others*; `checkers` has the reverse."""
        for delivery in self.deliveries:
            tag, publish = self.history.tags.get(delivery.consumer), self.publishes.get(delivery.body)
            if tag is not None and publish is not None and publish.tag != tag:
                yield f"'A consumer with a tag receives messages of that tag': {delivery.consumer} got {publish.body!r}"

    def _has_cause(self, before: Delivery, again: Delivery) -> bool:
        """Return whether a consumer, connection or leader was lost between two deliveries, or a timeout passed."""
        return self.history.may_be_read_again(self.publishes.get(again.body), again) or any(
            begin <= again.begin + 1.0
            and end >= before.begin - (_UNNOTICED if self.history.half_open else _AFTER_FAULT)
            for begin, end in self.history.disturbances
        )

    def ordered(self) -> Iterator[str]:
        """Check the section about order."""
        for channel in self.history.channels:
            if channel.topic != self.name or not channel.order:
                continue
            mine = [found for found in self.deliveries if found.channel == channel.name and self._is_kept(found)]
            yield from self._first_time_in_order(mine, channel.order)
            if channel.order == "partition":
                yield from self._one_at_a_time(mine)

    def _first_time_in_order(self, mine: list[Delivery], order: str) -> Iterator[str]:
        """Check *no handler begins a message after a later one of its key and partition has begun*."""
        latest: dict[tuple[int, str], Delivery] = {}
        begun: set[tuple[int, int]] = set()
        for delivery in sorted(mine, key=lambda delivery: delivery.begin):
            known = delivery.partition, delivery.message_id
            if known in begun or delivery.body not in self.publishes:
                continue
            begun.add(known)
            row = delivery.partition, self.publishes[delivery.body].key if order == "key" else ""
            later = latest.get(row)
            if later is None or later.message_id < delivery.message_id:
                latest[row] = delivery
            elif not self._announced(delivery):
                yield f"'No handler begins a message after a later one': {delivery.body!r} after {later.body!r}"
                return

    def _announced(self, delivery: Delivery) -> bool:
        """Return whether *a warning is logged, and the later messages are handled*."""
        return any(
            (topic, partition) == (self.name, delivery.partition) and when <= delivery.begin + 0.01
            for topic, partition, when in self.history.order_given_up
        )

    def _one_at_a_time(self, mine: list[Delivery]) -> Iterator[str]:
        """Check *ordered topic: within a partition, one message at a time*."""
        for before, after in pairwise(sorted(mine, key=lambda delivery: (delivery.partition, delivery.begin))):
            same = before.partition == after.partition and before.message_id != after.message_id
            if same and after.begin < before.end and not self._has_cause(before, after):
                yield f"'One message at a time': {after.body!r} began while {before.body!r} was handled"
                return
