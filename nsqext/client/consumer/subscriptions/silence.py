"""Notice topics that may have been upgraded to extend support, because their messages stopped.

After an upgrade the server sends neither messages nor heartbeats to a connection without extend support, and reports
nothing (captured: upgrade_ext). A missing heartbeat shows it after 30 s. So a topic whose messages stop is looked up
after a few seconds, and again after pauses that grow with the silence, until the missing heartbeat is earlier.
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
_LONGEST = 30.0  # seconds; a missing heartbeat is noticed within this time


@define
class _Topic:
    received: int
    since: float
    due: float


class SilenceWatch:
    """Counts the messages of topics without extend support on the redesigned NSQ.

    Attributes:
        due: time of the next `silent`; infinity if there is no such topic, or all are silent for long.
    """

    def __init__(self) -> None:
        self.due: float = inf
        self._topics: dict[str, _Topic] = {}

    def silent(self, subscriptions: Iterable[Subscription], received_at: float, now: float) -> list[str]:
        """Return the topics to look up.

        Args:
            subscriptions: the open subscriptions.
            received_at: time of the last received message, of any topic.
            now: the time.
        """
        totals: dict[str, int] = {}
        for subscription in subscriptions:
            if subscription.upgradable:
                totals[subscription.topic] = totals.get(subscription.topic, 0) + subscription.received
        for topic in self._topics.keys() - totals.keys():
            del self._topics[topic]
        found = []
        for topic, total in totals.items():
            known = self._topics.get(topic)
            if known is None or known.received != total:
                since = min(now, received_at) if known else now
                self._topics[topic] = _Topic(total, since, max(now, since + _FIRST))
            elif now >= known.due:
                found.append(topic)
                pause = max(_FIRST, (now - known.since) / _SHARE)
                known.due = now + pause if pause < _LONGEST else inf
        self.due = min((one.due for one in self._topics.values()), default=inf)
        return found
