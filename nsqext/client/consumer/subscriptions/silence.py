"""Notice topics that may have been upgraded to extend support by another tool, because no message arrives.

After an upgrade, the first message stops the deliveries to connections without extend support: the server sends neither
messages nor heartbeats to them, and reports nothing (captured: upgrade_ext). A missing heartbeat shows it after 30 s.
So topics without extend support are looked up while no message arrives; a message shows that its topic was not
upgraded. Several topics are looked up with one request for the list of all topics, unless that is long.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.types import Address

_PAUSE = 4.0  # seconds without a message, and seconds between two lookups, of a topic
_JITTER = 1.0  # most seconds by which a pause is shorter, so that processes do not look topics up together
_RATE = 25.0  # most lookups per second, of topics that are looked up one by one
_LIST_FROM = 4  # topics of a service from which on the list of all topics is read, if it is not long

_Service: TypeAlias = "frozenset[Address]"


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


@frozen
class _Upgradable:
    """Topics without extend support that consumers of one lookup service have subscribed to."""

    metadata: MetadataCache  # where the topics are looked up
    since: dict[str, float] = field(factory=dict)  # when messages of each topic were received last

    def look_up(self, looked_up: dict[str, float], now: float) -> float:
        """Look up the topics that are due; return when the next one is. Updates when each was looked up last."""
        listed = len(self.since) >= _LIST_FROM and self.metadata.lists_cheaply(len(self.since))
        pause = _PAUSE if listed else max(_PAUSE, len(self.since) / _RATE)
        due = [topic for topic, since in self.since.items() if max(since, looked_up[topic]) + pause <= now]
        if due and listed:
            self.metadata.poll_extended(self.since)
            looked_up |= dict.fromkeys(self.since, now - random.uniform(0.0, _JITTER))
        elif due:
            for topic in due:
                self.metadata.poll_soon(topic, "r")
                looked_up[topic] = now - random.uniform(0.0, _JITTER)
        return min((max(since, looked_up[topic]) + pause for topic, since in self.since.items()), default=inf)


class SilenceWatch:
    """Looks up topics without extend support while no message arrives.

    One watch serves all consumers of an event loop, so that consumers share its lookups.
    """

    def __init__(self) -> None:
        self.due: float = inf  # time of the next `look_up`; infinity without such topics
        self._looked_up: dict[_Service, dict[str, float]] = {}

    def watch(self, subscription: Subscription, now: float) -> None:
        """Watch the topic of a subscription that was opened."""
        if subscription.upgradable:
            self.due = min(self.due, now + _PAUSE)

    def look_up(self, groups: Iterable[OpenSubscriptions], now: float) -> None:
        """Look up the topics of all consumers that are due."""
        services: dict[_Service, _Upgradable] = {}
        for group in groups:
            metadata = group.metadata
            found = services.setdefault(frozenset(metadata.addresses), _Upgradable(metadata))
            for topic in {one.topic for one in group.subscriptions if one.upgradable}:
                found.since[topic] = max(group.received_at(topic), found.since.get(topic, -inf))
        before, self._looked_up, self.due = self._looked_up, {}, inf
        for service, found in services.items():
            last = before.get(service, {})
            looked_up = self._looked_up[service] = {topic: last.get(topic, -inf) for topic in found.since}
            self.due = min(self.due, found.look_up(looked_up, now))
