"""Notice topics that may have been upgraded to extend support by another tool, because no message arrives.

After an upgrade, the first message stops the deliveries to connections without extend support: the server sends neither
messages nor heartbeats to them, and reports nothing (captured: upgrade_ext). A missing heartbeat shows it after 30 s.
So topics without extend support are looked up while no message arrives; a message shows that its topic was not
upgraded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.types import Address

_PAUSE = 4.0  # seconds without a message, and seconds between two lookups, of a topic
_JITTER = 1.0  # most seconds by which a pause is shorter, so that processes do not look topics up together
_RATE = 5.0  # most lookups per second, of all topics

_Key: TypeAlias = "tuple[frozenset[Address], str]"


class OpenSubscriptions(Protocol):
    """What the watch uses of the subscriptions of a consumer."""

    @property
    def metadata(self) -> MetadataCache:
        """Where topics are looked up."""

    @property
    def subscriptions(self) -> Iterable[Subscription]:
        """The subscriptions whose connections are open."""

    def received_at(self, topic: str) -> float:
        """Return when messages of a topic were received last, or when a subscription to it was opened."""


class SilenceWatch:
    """Looks up topics without extend support while no message arrives.

    One watch serves all consumers of an event loop, so that consumers of a topic share its lookups.
    """

    def __init__(self) -> None:
        self.due: float = inf  # time of the next `look_up`; infinity without such topics
        self._looked_up: dict[_Key, float] = {}

    def watch(self, subscription: Subscription, now: float) -> None:
        """Watch the topic of a subscription that was opened."""
        if subscription.upgradable:
            self.due = min(self.due, now + _PAUSE)

    def look_up(self, groups: Iterable[OpenSubscriptions], now: float) -> None:
        """Look up the topics of all consumers that are due."""
        topics: dict[_Key, tuple[float, MetadataCache]] = {}
        for group in groups:
            metadata = group.metadata
            service = frozenset(metadata.addresses)
            for topic in {one.topic for one in group.subscriptions if one.upgradable}:
                key = service, topic
                since = max(group.received_at(topic), topics.get(key, (-inf, metadata))[0])
                topics[key] = since, metadata
        pause = max(_PAUSE, len(topics) / _RATE)
        before, self._looked_up, self.due = self._looked_up, {}, inf
        for key, (since, metadata) in topics.items():
            looked_up = before.get(key, -inf)
            if max(since, looked_up) + pause <= now:
                metadata.poll_soon(key[1], "r")
                looked_up = now - random.uniform(0.0, _JITTER)
            self._looked_up[key] = looked_up
            self.due = min(self.due, max(since, looked_up) + pause)
