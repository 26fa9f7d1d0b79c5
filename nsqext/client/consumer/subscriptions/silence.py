"""Notice topics that may have been upgraded to extend support, because their messages stopped.

After an upgrade the server sends neither messages nor heartbeats to a connection without extend support, and reports
nothing (captured: upgrade_ext). A missing heartbeat shows it after 30 s. So a topic whose messages stop is looked up
after a few seconds, and again after pauses that grow with the silence, until the missing heartbeat is earlier. A topic
that has had such a silence before is looked up when this one is longer: sparse messages cause no lookups.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription

__all__ = ("SilenceWatch",)

_FIRST = 3.0  # seconds of silence
_SHARE = 5  # a pause is this share of the silence
_LONGER = 1.5  # times the usual silence
_KEPT = 0.9  # of the usual silence, after a shorter one
_LONGEST = 30.0  # seconds; a missing heartbeat is noticed within this time


@define
class _Topic:
    """The messages of a topic.

    Attributes:
        received: number of received messages.
        since: time of the last one.
        due: when to look the topic up.
        looked: it was looked up in this silence.
        usual: seconds of the last silence in which it was looked up, less after each one in which it was not.
    """

    received: int
    since: float
    due: float = inf
    looked: bool = False
    usual: float = 0.0


class SilenceWatch:
    """Counts the messages of topics without extend support on the redesigned NSQ.

    Attributes:
        due: time of the next `silent`; infinity if there is no such topic, or all are silent for long.
    """

    def __init__(self) -> None:
        self.due: float = inf
        self._topics: dict[str, _Topic] = {}

    def silent(self, subscriptions: Iterable[Subscription], received_at: float, now: float) -> list[str]:
        """Return the topics to look up."""
        totals: dict[str, int] = {}
        for subscription in subscriptions:
            if subscription.upgradable:
                totals[subscription.topic] = totals.get(subscription.topic, 0) + subscription.received
        for topic in self._topics.keys() - totals.keys():
            del self._topics[topic]
        found = []
        for topic, total in totals.items():
            known = self._topics.get(topic)
            if known is None:
                self._topics[topic] = _Topic(total, now, now + _FIRST if total else inf)
            elif known.received != total:
                since = min(now, received_at)
                usual = min(since - known.since, _LONGEST / _LONGER) if known.looked else known.usual * _KEPT
                due = max(now, since + max(_FIRST, _LONGER * usual))
                self._topics[topic] = _Topic(total, since, due if due < since + _LONGEST else inf, usual=usual)
            elif now >= known.due:
                found.append(topic)
                known.looked = True
                pause = max(_FIRST, (now - known.since) / _SHARE)
                known.due = now + pause if pause < _LONGEST else inf
        self.due = min((one.due for one in self._topics.values()), default=inf)
        return found
