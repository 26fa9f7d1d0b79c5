"""Records of the publishes and deliveries of a schedule, and the check of the guarantees."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.errors import DeliveryUnknown, NsqError

if TYPE_CHECKING:
    from nsqext import Message, Receipt

__all__ = ("Entry", "Ledger", "Outcome")


@define(eq=False)
class Entry:
    """One publish.

    Attributes:
        topic: topic of the publish.
        key: key, or the publisher's name in topics without keys.
        number: position among the publishes of the key.
        tag: tag of the message, or None.
        began: time of the call.
        ended: time when the call returned or raised.
        error: error that the call raised.
        receipt: receipt that the call returned.
        seen: deliveries whose handler returned: message id, subscription (not its `id`, which may be reused) and
            attempts.
        first: position of the first delivery among the topic's consumed messages; -1 if not consumed.
        waited: seconds from the end of the publish to the first delivery.
    """

    topic: str
    key: str
    number: int
    tag: str | None
    began: float = field(factory=time.monotonic)
    ended: float = 0.0
    error: NsqError | None = None
    receipt: Receipt | None = None
    seen: list[tuple[bytes, object, int]] = field(factory=list)
    first: int = -1
    waited: float = 0.0

    @property
    def stored(self) -> bool:
        """Whether the publish was acknowledged."""
        return self.ended > 0 and self.error is None


@define
class Outcome:
    """Outcome of a schedule; ``violations`` is empty if all guarantees held.

    Attributes:
        published: acknowledged publishes.
        unknown: publishes that raised `DeliveryUnknown`.
        failed: publishes that raised another error, which promises that nothing was stored.
        lost: acknowledged publishes that were never consumed.
        reordered: messages consumed after a later one of the same key.
        twice_stored: copies in the queue beyond the first of each message.
        redelivered: deliveries beyond the first of each copy.
        unexplained: duplicates that neither a retry nor a redelivery explains.
        stored_after_failure: failed publishes that were consumed.
        publish_stall: longest publish, in seconds.
        consume_stall: longest time from a publish to its consumption, in seconds.
        leaks: tasks, sockets and warnings left over.
    """

    published: int = 0
    unknown: int = 0
    failed: int = 0
    lost: list[str] = field(factory=list)
    reordered: list[str] = field(factory=list)
    twice_stored: int = 0
    redelivered: int = 0
    unexplained: list[str] = field(factory=list)
    stored_after_failure: list[str] = field(factory=list)
    publish_stall: float = 0.0
    consume_stall: float = 0.0
    leaks: list[str] = field(factory=list)

    @property
    def violations(self) -> list[str]:
        """Violations of the guarantees, with their kind."""
        found = []
        for name in ("lost", "reordered", "unexplained", "stored_after_failure", "leaks"):
            found += [f"{name}: {text}" for text in getattr(self, name)]
        return found


class Ledger:
    """Record of all publishes and deliveries of a schedule.

    Args:
        on_unknown: option of the producers; with ``raise`` no message may be stored twice.
    """

    def __init__(self, on_unknown: str) -> None:
        self._on_unknown = on_unknown
        self._began = time.monotonic()
        self.entries: dict[bytes, Entry] = {}
        self._order: dict[str, int] = defaultdict(int)

    def begin(self, topic: str, key: str, number: int, tag: str | None) -> tuple[bytes, Entry]:
        """Record the start of a publish; return its body and its entry."""
        body = f"{topic}/{key}/{number}".encode()
        entry = self.entries[body] = Entry(topic, key, number, tag)
        return body, entry

    def consumed(self, message: Message) -> None:
        """Record a message whose handler is about to return."""
        entry = self.entries[message.body]
        if entry.first < 0:
            self._order[entry.topic] += 1
            entry.first = self._order[entry.topic]
            entry.waited = time.monotonic() - max(entry.ended, entry.began)
        entry.seen.append((message.id, message.owner, message.attempts))

    @property
    def missing(self) -> int:
        """Number of acknowledged publishes that have not been consumed yet."""
        return sum(entry.stored and entry.first < 0 for entry in self.entries.values())

    def outcome(self) -> Outcome:
        """Return the outcome of the schedule."""
        outcome = Outcome()
        for body, entry in self.entries.items():
            self._count(outcome, body.decode(), entry)
        for text in self._overtaken():
            outcome.reordered.append(text)
        return outcome

    def _count(self, outcome: Outcome, name: str, entry: Entry) -> None:
        outcome.publish_stall = max(outcome.publish_stall, entry.ended - entry.began)
        outcome.consume_stall = max(outcome.consume_stall, entry.waited)
        if entry.stored:
            outcome.published += 1
            if entry.first < 0:
                outcome.lost.append(f"{name}, {entry.ended - self._began:.3f} s: {entry.receipt}")
        elif isinstance(entry.error, DeliveryUnknown):
            outcome.unknown += 1
        else:
            outcome.failed += 1
            if entry.first >= 0:
                outcome.stored_after_failure.append(f"{name}: {entry.error!r}")
        copies = {message for message, _, _ in entry.seen}
        outcome.twice_stored += max(len(copies) - 1, 0)
        outcome.redelivered += len(entry.seen) - len(copies)
        if len(copies) > 1 and self._on_unknown == "raise":
            outcome.unexplained.append(f"{name} is stored {len(copies)} times, although no publish was retried")
        if len(set(entry.seen)) < len(entry.seen):
            outcome.unexplained.append(
                f"{name} was received twice over one subscription with the same number of attempts"
            )

    def _overtaken(self) -> list[str]:
        """Return the messages consumed after a later one of their key, in topics that keep the order of keys."""
        found = []
        last: dict[tuple[str, str], Entry] = {}
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.topic, entry.key, entry.number)):
            if entry.topic not in ("keyed", "ordered") or not entry.stored or entry.first < 0:
                continue
            before = last.get((entry.topic, entry.key))
            if before is not None and entry.first < before.first:
                found.append(f"{entry.topic}/{entry.key}: {before.number} after {entry.number}")
            else:
                last[entry.topic, entry.key] = entry
        return found
