"""What was published and what came of it, and what a schedule's outcome is judged by."""

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
        topic: where to.
        key: key, or the publisher's name where order means nothing.
        number: place among the publishes of its key.
        tag: its tag.
        began: when it was called.
        ended: when it returned or raised.
        error: what it raised.
        receipt: what it returned.
        seen: deliveries whose handler returned: id of the message, and of the subscription.
        first: place of the first of them among all of its topic; -1 for none.
        waited: seconds from the end of the publish to that.
    """

    topic: str
    key: str
    number: int
    tag: str | None
    began: float = field(factory=time.monotonic)
    ended: float = 0.0
    error: NsqError | None = None
    receipt: Receipt | None = None
    seen: list[tuple[bytes, int, int]] = field(factory=list)
    first: int = -1
    waited: float = 0.0

    @property
    def stored(self) -> bool:
        """Whether the publish returned."""
        return self.ended > 0 and self.error is None


@define
class Outcome:
    """What came of a schedule; ``faults_found`` is empty when all is well.

    Attributes:
        published: publishes that returned.
        unknown: publishes whose fate was unknown.
        failed: publishes that said that nothing was stored.
        lost: publishes that returned and were never consumed.
        reordered: messages that were consumed before an earlier one of their key.
        twice_stored: messages that are in the queue more than once.
        redelivered: deliveries beyond the first of the same message.
        unexplained: duplicates that nothing explains.
        phantoms: publishes that said that nothing was stored, and were consumed.
        publish_stall: longest publish, in seconds.
        consume_stall: longest time from a publish to its consumption, in seconds.
        leaks: tasks, sockets and warnings that were left over.
    """

    published: int = 0
    unknown: int = 0
    failed: int = 0
    lost: list[str] = field(factory=list)
    reordered: list[str] = field(factory=list)
    twice_stored: int = 0
    redelivered: int = 0
    unexplained: list[str] = field(factory=list)
    phantoms: list[str] = field(factory=list)
    publish_stall: float = 0.0
    consume_stall: float = 0.0
    leaks: list[str] = field(factory=list)

    @property
    def faults_found(self) -> list[str]:
        """Everything that must not be."""
        found = []
        for name in ("lost", "reordered", "unexplained", "phantoms", "leaks"):
            found += [f"{name}: {text}" for text in getattr(self, name)]
        return found


class Ledger:
    """Everything that was published and consumed in a schedule.

    Args:
        on_unknown: what the producers do; with ``raise`` nothing may be stored twice.
    """

    def __init__(self, on_unknown: str) -> None:
        self._on_unknown = on_unknown
        self._began = time.monotonic()
        self.entries: dict[bytes, Entry] = {}
        self._order: dict[str, int] = defaultdict(int)

    def begin(self, topic: str, key: str, number: int, tag: str | None) -> tuple[bytes, Entry]:
        """Note a publish that begins; returns its body, too."""
        body = f"{topic}/{key}/{number}".encode()
        entry = self.entries[body] = Entry(topic, key, number, tag)
        return body, entry

    def consumed(self, message: Message) -> None:
        """Note a message whose handler returns."""
        entry = self.entries[message.body]
        if entry.first < 0:
            self._order[entry.topic] += 1
            entry.first = self._order[entry.topic]
            entry.waited = time.monotonic() - max(entry.ended, entry.began)
        entry.seen.append((message.id, id(message.owner), message.attempts))

    @property
    def missing(self) -> int:
        """Publishes that returned and were not consumed so far."""
        return sum(entry.stored and entry.first < 0 for entry in self.entries.values())

    def judge(self) -> Outcome:
        """Return what came of it."""
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
                outcome.phantoms.append(f"{name}: {entry.error!r}")
        copies = {message for message, _, _ in entry.seen}
        outcome.twice_stored += max(len(copies) - 1, 0)
        outcome.redelivered += len(entry.seen) - len(copies)
        if len(copies) > 1 and self._on_unknown == "raise":
            outcome.unexplained.append(f"{name} is stored {len(copies)} times, although nothing was retried")
        if len(set(entry.seen)) < len(entry.seen):
            outcome.unexplained.append(f"{name} came twice over one subscription as the same delivery")

    def _overtaken(self) -> list[str]:
        """Return the messages that came before an earlier one of their key, where keys keep their order."""
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
