"""Topics whose messages stop are looked up, ever less often; others are not."""

from __future__ import annotations

import itertools
from math import inf
from typing import TYPE_CHECKING, cast

from attrs import define

from nsqext.client.consumer.subscriptions.silence import SilenceWatch

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription


@define
class Stand:
    """The members of a subscription that the watch reads."""

    topic: str = "t"
    received: int = 1
    upgradable: bool = True


def looks(watch: SilenceWatch, stands: list[Stand], received_at: float, until: float) -> list[float]:
    """Return the times at which a topic is looked up when the watch is asked whenever it is due."""
    found = []
    subscriptions = cast("list[Subscription]", stands)
    while watch.due <= until:
        now = watch.due
        if watch.silent(subscriptions, received_at, now):
            found.append(now)
    return found


def started(*stands: Stand) -> SilenceWatch:
    """Return a watch that has seen the subscriptions at time 100."""
    watch = SilenceWatch()
    assert watch.silent(cast("list[Subscription]", stands), 0.0, 100.0) == []
    return watch


def test_a_silent_topic_is_looked_up_ever_less_often_until_a_heartbeat_is_earlier() -> None:
    stand = Stand()
    watch = started(stand)
    found = looks(watch, [stand], 0.0, 1000.0)
    assert found[:5] == [103.0, 106.0, 109.0, 112.0, 115.0]
    pauses = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert pauses == sorted(pauses)
    assert (max(pauses) < 30, found[-1] < 300, watch.due) == (True, True, inf)


def test_a_message_begins_a_new_silence() -> None:
    stand = Stand()
    watch = started(stand)
    stand.received = 2
    assert watch.silent(cast("list[Subscription]", [stand]), 101.0, 102.0) == []
    assert watch.due == 104.0
    assert looks(watch, [stand], 101.0, 105.0) == [104.0]


def test_a_silence_as_long_as_the_one_before_is_usual() -> None:
    stand = Stand()
    watch = started(stand)
    assert looks(watch, [stand], 0.0, 110.0) == [103.0, 106.0, 109.0]
    for at in (110.0, 120.0, 130.0):  # a message every ten seconds
        stand.received += 1
        assert watch.silent(cast("list[Subscription]", [stand]), at, at) == []
        assert looks(watch, [stand], at, at + 9.9) == []
    (longer,) = looks(watch, [stand], 130.0, 143.0)
    assert longer > 140


def test_a_topic_without_a_message_so_far_is_not_looked_up() -> None:
    assert started(Stand(received=0)).due == inf


def test_messages_of_another_topic_or_partition_count_for_their_topic() -> None:
    quiet, first, second = Stand("quiet"), Stand("busy"), Stand("busy")
    watch = started(quiet, first, second)
    second.received += 1
    found = watch.silent(cast("list[Subscription]", [quiet, first, second]), 102.9, 103.0)
    assert found == ["quiet"]


def test_other_topics_are_not_looked_up() -> None:
    assert started(Stand(upgradable=False)).due == inf
    watch = started(Stand())
    assert watch.silent([], 0.0, 104.0) == []
    assert watch.due == inf
