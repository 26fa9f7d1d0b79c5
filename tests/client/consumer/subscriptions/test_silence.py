"""Topics without extend support are looked up while no message arrives; others are not."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING, cast

from attrs import define, field

from nsqext.client.consumer.subscriptions.subscription_group import SilenceWatch, SubscriptionGroup

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription


@define
class Stand:
    """The members of a subscription that the watch reads."""

    topic: str = "t"
    delivered_at: float = 100.0
    upgradable: bool = True


@define
class Lookups:
    """The metadata of a consumer: records what is looked up."""

    addresses: tuple[str, ...] = ("lookup:4161",)
    topics: list[str] = field(factory=list)
    lists: list[list[str]] = field(factory=list)
    long: bool = False

    def lists_cheaply(self, count: int) -> bool:
        return not self.long

    def poll_extended(self, topics: Iterable[str]) -> None:
        self.lists.append(sorted(topics))

    def poll_soon(self, topic: str, accesses: str) -> None:
        assert accesses == "r"
        self.topics.append(topic)


@define
class Group:
    """The members of the subscriptions of a consumer that the watch reads."""

    metadata: Lookups
    subscriptions: list[Stand]

    def received_at(self) -> dict[str, float]:
        in_order = sorted(self.subscriptions, key=lambda stand: stand.delivered_at)
        return {stand.topic: stand.delivered_at for stand in in_order}


class Consumers:
    """Consumers of an event loop, each with its metadata and subscriptions, and their watch."""

    def __init__(self, consumers: list[tuple[Lookups, list[Stand]]]) -> None:
        self.groups = [Group(lookups, stands) for lookups, stands in consumers]
        self.watch = SilenceWatch()
        for _, stands in consumers:
            for stand in stands:
                self.watch.watch(cast("Subscription", stand), stand.delivered_at)

    def look_up(self, now: float) -> None:
        self.watch.look_up(cast("list[SubscriptionGroup]", self.groups), now)

    def run(self, until: float) -> list[float]:
        """Look up whenever it is due; return the times at which something was looked up."""
        found = []
        while self.watch.due <= until:
            now = self.watch.due
            before = self.looked_up
            self.look_up(now)
            if self.looked_up > before:
                found.append(now)
        return found

    @property
    def looked_up(self) -> int:
        return sum(len(group.metadata.topics) + len(group.metadata.lists) for group in self.groups)


def test_a_silent_topic_is_looked_up_every_four_seconds_at_the_latest() -> None:
    found = Consumers([(Lookups(), [Stand()])]).run(200.0)
    assert found[0] == 104.0
    pauses = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert 3.0 <= min(pauses) <= max(pauses) <= 4.0
    assert len(set(pauses)) > 1  # processes do not stay in step


def test_a_message_begins_a_new_silence() -> None:
    first, second = Stand(), Stand()
    consumers = Consumers([(Lookups(), [first, second])])
    second.delivered_at = 103.0
    assert consumers.run(106.9) == []
    assert consumers.run(107.1) == [107.0]


def test_consumers_of_a_topic_share_its_lookups() -> None:
    consumers = Consumers([(Lookups(), [Stand()]) for _ in range(100)])
    found = consumers.run(200.0)
    assert consumers.looked_up == len(found) <= 33


def test_a_topic_of_two_services_is_looked_up_at_both() -> None:
    here, there = Lookups(("here:4161",)), Lookups(("there:4161",))
    Consumers([(here, [Stand()]), (there, [Stand()])]).run(104.0)
    assert (here.topics, there.topics) == (["t"], ["t"])


def test_many_topics_are_looked_up_with_one_list() -> None:
    lookups, names = Lookups(), [f"t{number}" for number in range(200)]
    stands = [Stand(name, delivered_at=100.0 + number / 100) for number, name in enumerate(names)]
    consumers = Consumers([(lookups, stands)])
    consumers.run(200.0)
    assert lookups.topics == []
    assert lookups.lists == [sorted(names)] * len(lookups.lists)
    assert 24 <= len(lookups.lists) <= 33


def test_a_hundred_topics_of_a_large_cluster_are_looked_up_one_by_one_every_four_seconds() -> None:
    lookups = Lookups(long=True)
    consumers = Consumers([(lookups, [Stand(f"t{number}") for number in range(100)])])
    consumers.run(124.0)
    assert lookups.lists == []
    counts = Counter(lookups.topics)
    assert len(counts) == 100
    assert all(5 <= count <= 7 for count in counts.values())


def test_more_topics_of_a_large_cluster_are_looked_up_less_often() -> None:
    lookups = Lookups(long=True)
    consumers = Consumers([(lookups, [Stand(f"t{number}") for number in range(150)])])
    consumers.run(122.0)  # 25 lookups a second from 106.0 on
    counts = Counter(lookups.topics)
    assert len(counts) == 150
    assert min(counts.values()) >= max(counts.values()) - 1
    assert 25 * 16 <= len(lookups.topics) <= 30 * 16 + 150


def test_other_topics_are_not_looked_up() -> None:
    assert Consumers([(Lookups(), [Stand(upgradable=False)])]).watch.due == inf
    stand = Stand()
    consumers = Consumers([(Lookups(), [stand])])
    stand.upgradable = False
    assert (consumers.run(200.0), consumers.watch.due) == ([], inf)


def test_a_topic_that_was_left_is_forgotten() -> None:
    lookups, stands = Lookups(), [Stand()]
    consumers = Consumers([(lookups, stands)])
    consumers.run(150.0)
    stands.clear()
    assert (consumers.run(200.0), consumers.watch.due) == ([], inf)
