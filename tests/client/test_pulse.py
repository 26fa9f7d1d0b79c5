"""The timers of consumers share a pulse; topics without extend support are looked up while no message arrives."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import cast

import pytest
from attrs import define, field

from nsqext.client.pulse import Pulse, PulseMember, SilenceWatch


@define
class Stand:
    """A topic that a consumer has subscribed to."""

    topic: str = "t"
    delivered_at: float = 100.0
    upgradable: bool = True


@define
class Lookups:
    """The metadata of a consumer: records what is looked up."""

    service: frozenset[str] = frozenset(("lookup:4161",))
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


@define(eq=False)
class Member:
    """The subscriptions of a consumer."""

    metadata: Lookups = field(factory=Lookups)
    stands: list[Stand] = field(factory=list)
    longest: float = 4.0
    woken: int = 0

    def upgradable_topics(self) -> dict[str, float]:
        in_order = sorted(self.stands, key=lambda stand: stand.delivered_at)
        return {stand.topic: stand.delivered_at for stand in in_order if stand.upgradable}

    def longest_pause(self) -> float:
        return self.longest

    def wake_timer(self) -> None:
        self.woken += 1


def member(of: Member) -> PulseMember:
    return cast("PulseMember", of)


class Consumers:
    """Consumers of an event loop, each with its metadata and subscriptions, and their watch."""

    def __init__(self, consumers: list[tuple[Lookups, list[Stand]]]) -> None:
        self.members = [Member(lookups, stands) for lookups, stands in consumers]
        self.watch = SilenceWatch()
        for _, stands in consumers:
            for stand in stands:
                self.watch.watch(stand.delivered_at)

    def look_up(self, now: float) -> None:
        self.watch.look_up(map(member, self.members), now)

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
        return sum(len(one.metadata.topics) + len(one.metadata.lists) for one in self.members)


def test_a_silent_topic_is_looked_up_every_four_seconds_at_the_latest() -> None:
    found = Consumers([(Lookups(), [Stand()])]).run(200.0)
    assert found[0] == 104.0
    pauses = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert 3.0 <= min(pauses) <= max(pauses) <= 4.0
    assert len(set(pauses)) > 1  # processes do not stay in step


def test_each_topic_is_looked_up_after_its_own_silence() -> None:
    lookups = Lookups()
    assert Consumers([(lookups, [Stand("a"), Stand("b", 102.0)])]).run(106.5) == [104.0, 106.0]
    assert lookups.topics == ["a", "b"]


def test_a_message_begins_a_new_silence() -> None:
    first, second = Stand(), Stand()
    consumers = Consumers([(Lookups(), [first, second])])
    second.delivered_at = 103.0
    assert consumers.run(106.9) == []
    assert consumers.run(107.1) == [107.0]


@pytest.mark.parametrize("later", [0, 1])
def test_a_topic_is_silent_when_no_consumer_receives_a_message_of_it(later: int) -> None:
    stands = [Stand(), Stand()]
    stands[later].delivered_at = 103.0
    consumers = Consumers([(Lookups(), [stand]) for stand in stands])
    assert consumers.run(106.9) == []
    assert consumers.run(107.1) == [107.0]


def test_consumers_of_a_topic_share_its_lookups() -> None:
    consumers = Consumers([(Lookups(), [Stand()]) for _ in range(100)])
    found = consumers.run(200.0)
    assert consumers.looked_up == len(found) <= 33


def test_a_topic_of_two_services_is_looked_up_at_both() -> None:
    here, there = Lookups(frozenset({"here:4161"})), Lookups(frozenset({"there:4161"}))
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


def test_one_of_the_idle_consumers_wakes_often() -> None:
    members = one, two, three = Member(), Member(), Member(longest=1.0)
    pulse = Pulse(dict.fromkeys(map(member, members)))
    assert pulse.limit(member(two), 30.0, 100.0) == 30.0
    assert one.woken == 1  # it has not ticked so far
    assert pulse.limit(member(one), 30.0, 100.0) == 1.0  # the shortest of all
    assert (pulse.ticked_at, pulse.due_at) == (100.0, 101.0)
    assert pulse.limit(member(three), 30.0, 100.5) == 30.0
    assert pulse.limit(member(one), 0.25, 101.0) == 0.25
    assert [one.woken for one in members] == [1, 0, 0]
    pulse.leave(member(one))
    assert two.woken == 1
    assert pulse.limit(member(two), 30.0, 101.5) == 1.0
    for subscribed, woken in ((101.5, 1), (98.0, 2)):  # the look-up at 102.0 is before the next tick
        pulse.watch_silence(subscribed)
        assert two.woken == woken
    assert pulse.limit(member(two), 30.0, 101.5) == pytest.approx(0.51), "behind the time at which it is due"


def test_a_standstill_begins_with_the_last_tick_of_any_consumer() -> None:
    pulse = Pulse()
    pulse.ticked_at = 90.0
    pulse.notice(80.0, 100.0)
    assert (pulse.stood_since, pulse.stood_until) == pytest.approx((90.0, 100.05))
    pulse.notice(99.0, 100.04)
    assert (pulse.stood_since, pulse.stood_until) == pytest.approx((90.0, 100.05)), "a timer of the same standstill"
    pulse.notice(95.0, 101.0)
    assert (pulse.stood_since, pulse.stood_until) == pytest.approx((95.0, 101.05))
