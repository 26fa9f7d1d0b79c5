"""Ranges of the hash space: the timeline of the Key_Failover note, and invariants of any sequence of events."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.dispatch import KeyRanges, position_of
from nsqext.dispatch.ranges import SlidingWindow
from nsqext.errors import InvalidInput, InvalidSetting


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def key_at(low: float, high: float) -> bytes:
    """Return a key whose hash lies in a range."""
    return next(key for key in (b"key-%d" % n for n in range(10_000)) if low <= position_of(key) / (1 << 32) < high)


def test_the_timeline_of_the_note() -> None:
    clock = Clock()
    ranges = KeyRanges[str](clock=clock)
    # T0: the first consumer serves the whole space
    ranges.add_consumer("C1")
    assert ranges.ranges() == [(0.0, 1.0, "C1")]
    assert ranges.get_consumer(b"any") == "C1"
    ranges.record_dispatch("C1", 100)
    # T1: the second consumer receives half of the range
    clock.now += 20
    ranges.add_consumer("C2")
    assert ranges.ranges() == [(0.0, 0.5, "C1"), (0.5, 1.0, "C2")]
    # T2: C2 is busier than C1, so its range is split
    ranges.record_dispatch("C1", 10)
    ranges.record_dispatch("C2", 30)
    clock.now += 1
    ranges.add_consumer("C3")
    assert ranges.ranges() == [(0.0, 0.5, "C1"), (0.5, 0.75, "C2"), (0.75, 1.0, "C3")]
    # T3: C1 is removed; C2 is its only neighbour
    ranges.record_dispatch("C2", 1000)
    ranges.remove_consumer("C1")
    assert ranges.ranges() == [(0.0, 0.75, "C2"), (0.75, 1.0, "C3")]
    # T4: C2 is removed; C3 serves the whole space
    ranges.remove_consumer("C2")
    assert ranges.ranges() == [(0.0, 1.0, "C3")]
    assert ranges.get_consumer(b"any") == "C3"
    ranges.remove_consumer("C3")
    assert ranges.ranges() == []
    assert ranges.get_consumer(b"any") is None


def test_a_key_is_delivered_to_the_consumer_of_its_range() -> None:
    ranges = KeyRanges[str](clock=Clock())
    for name in ("C1", "C2"):
        ranges.add_consumer(name)
    assert ranges.get_consumer(key_at(0.0, 0.5)) == "C1"
    assert ranges.get_consumer(key_at(0.5, 1.0)) == "C2"
    assert (ranges.at(0), ranges.at((1 << 31) - 1), ranges.at(1 << 31), ranges.at((1 << 32) - 1)) == (
        "C1",
        "C1",
        "C2",
        "C2",
    )


def test_the_less_busy_neighbour_inherits() -> None:
    for busy, heir in (("C1", "C3"), ("C3", "C1")):
        ranges = KeyRanges[str](clock=Clock())
        ranges.add_consumer("C1")
        ranges.add_consumer("C3")
        ranges.record_dispatch("C1", 2)
        ranges.add_consumer("C2")
        ranges.record_dispatch(busy, 50)
        ranges.record_dispatch(heir, 5)
        ranges.remove_consumer("C2")
        assert [owner for _, _, owner in ranges.ranges()] == ["C1", "C3"]
        assert ranges.ranges()[0].high == (0.5 if heir == "C1" else 0.25)


def test_the_line_is_no_ring() -> None:
    """The range of the first consumer goes to the second, never to the last, even if the last one is idle."""
    ranges = KeyRanges[int](clock=Clock())
    for number in range(4):
        ranges.add_consumer(number)
    owners = [owner for _, _, owner in ranges.ranges()]
    ranges.record_dispatch(owners[1], 1000)
    ranges.remove_consumer(owners[0])
    assert ranges.ranges()[0] == (0.0, 0.5, owners[1])


def test_rates_are_of_the_window_only() -> None:
    clock = Clock()
    ranges = KeyRanges[str](clock=clock, window=5.0)
    ranges.add_consumer("C1")
    ranges.add_consumer("C2")
    ranges.record_dispatch("C1", 100)
    clock.now += 3
    ranges.record_dispatch("C2", 10)
    assert (ranges.rate("C1"), ranges.rate("C2")) == (20, 2)
    clock.now += 3
    assert (ranges.rate("C1"), ranges.rate("C2")) == (0, 2)
    ranges.add_consumer("C3")
    assert [owner for _, _, owner in ranges.ranges()] == ["C1", "C2", "C3"]


def test_consecutive_newcomers_share_the_range_of_a_busy_consumer() -> None:
    ranges = KeyRanges[int](clock=Clock())
    ranges.add_consumer(0)
    ranges.record_dispatch(0, 800)
    for number in range(1, 8):
        ranges.add_consumer(number)
    assert {high - low for low, high, _ in ranges.ranges()} == {0.125}
    assert {ranges.rate(number) for number in range(8)} == {10}


def test_a_new_owner_counts_inherited_messages() -> None:
    ranges = KeyRanges[str](clock=Clock())
    for name in ("C1", "C2"):
        ranges.add_consumer(name)
    ranges.record_dispatch("C1", 30)
    ranges.record_dispatch("C2", 10)
    ranges.remove_consumer("C1")
    assert ranges.rate("C2") == 4


def test_refusals() -> None:
    ranges = KeyRanges[str](clock=Clock())
    ranges.add_consumer("C1")
    with pytest.raises(InvalidInput, match="has a range already"):
        ranges.add_consumer("C1")
    for call in (ranges.remove_consumer, ranges.record_dispatch, ranges.rate):
        with pytest.raises(InvalidInput, match="has no range"):
            call("C2")
    assert ("C1" in ranges, "C2" in ranges, len(ranges)) == (True, False, 1)
    with pytest.raises(InvalidSetting, match="window"):
        KeyRanges(window=0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 12), st.just(0.0)),
        st.tuples(st.just("remove"), st.integers(0, 12), st.just(0.0)),
        st.tuples(st.just("dispatch"), st.integers(0, 12), st.floats(0, 8)),
    ),
    max_size=60,
)


def check_cover(ranges: KeyRanges[int], members: set[int]) -> dict[int, Fraction]:
    """Assert that the ranges are disjoint and cover the space, one for each consumer; return their widths."""
    found = ranges.ranges()
    assert {consumer for _, _, consumer in found} == members
    assert len(found) == len(members)
    assert [low for low, _, _ in found[1:]] == [high for _, high, _ in found[:-1]]
    if found:
        assert (found[0].low, found[-1].high) == (0.0, 1.0)
    widths = {consumer: Fraction(high) - Fraction(low) for low, high, consumer in found}
    assert sum(widths.values()) == (1 if members else 0)
    for low, high, consumer in found:
        assert low < high
        assert ranges.at(int(low * (1 << 32))) == ranges.at(int(high * (1 << 32)) - 1) == consumer
    return widths


def check_add(before: dict[int, Fraction], after: dict[int, Fraction], rates: dict[int, float], new: int) -> None:
    """Assert that the busiest range was split in half, and among equally busy ones the widest."""
    changed = [consumer for consumer in before if after[consumer] != before[consumer]]
    if not before:
        assert after == {new: 1}
        return
    [giver] = changed
    assert rates[giver] == max(rates.values())
    assert before[giver] == max(before[consumer] for consumer, rate in rates.items() if rate == rates[giver])
    assert after[new] == after[giver] == before[giver] / 2


def check_remove(ranges: list[int], before: dict[int, Fraction], after: dict[int, Fraction], gone: int) -> list[int]:
    """Assert that one neighbour received the range; return the neighbours, that one first."""
    place = ranges.index(gone)
    neighbours = [ranges[other] for other in (place - 1, place + 1) if 0 <= other < len(ranges)]
    changed = [consumer for consumer in after if after[consumer] != before[consumer]]
    if not after:
        return []
    [heir] = changed
    assert heir in neighbours
    assert after[heir] == before[heir] + before[gone]
    return sorted(neighbours, key=lambda consumer: consumer != heir)


@given(EVENTS)
def test_the_cover_is_exact_disjoint_and_as_balanced_as_the_rule_allows(events: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    ranges = KeyRanges[int](clock=clock)
    widths: dict[int, Fraction] = {}
    for event, number, pause in events:
        rates = {consumer: ranges.rate(consumer) for consumer in widths}
        order = [consumer for _, _, consumer in ranges.ranges()]
        before = dict(widths)
        if event == "add" and number not in widths:
            ranges.add_consumer(number)
            widths = check_cover(ranges, {*before, number})
            check_add(before, widths, rates, number)
        elif event == "remove" and number in widths:
            ranges.remove_consumer(number)
            widths = check_cover(ranges, {*before} - {number})
            heirs = check_remove(order, before, widths, number)
            assert heirs == [] or rates[heirs[0]] == min(rates[consumer] for consumer in heirs)
        elif event == "dispatch" and number in widths:
            ranges.record_dispatch(number, 1 + number)
            clock.now += pause
            assert check_cover(ranges, set(before)) == before


@given(st.integers(1, 200))
def test_shares_of_joining_consumers_differ_by_a_factor_of_two_at_most(count: int) -> None:
    """All ranges are as busy as they are wide, as under an even load."""
    ranges = KeyRanges[int](clock=Clock())
    for number in range(count):
        ranges.add_consumer(number)
    widths = [high - low for low, high, _ in ranges.ranges()]
    assert max(widths) <= 2 * min(widths)


@given(st.lists(st.binary(max_size=24), max_size=50), st.integers(1, 12))
def test_every_key_has_exactly_one_consumer_and_keeps_it(keys: list[bytes], count: int) -> None:
    ranges = KeyRanges[int](clock=Clock())
    for number in range(count):
        ranges.add_consumer(number)
    for key in keys:
        place = position_of(key) / (1 << 32)
        [owner] = [consumer for low, high, consumer in ranges.ranges() if low <= place < high]
        assert ranges.get_consumer(key) == owner


def test_a_range_of_one_value_is_not_split() -> None:
    clock = Clock()
    ranges = KeyRanges[int](clock=clock)
    ranges.add_consumer(0)
    for number in range(1, 40):
        ranges.record_dispatch(0, 1 << 40)
        ranges.add_consumer(number)
    widths = [high - low for low, high, _ in ranges.ranges()]
    assert min(widths) == 1 / (1 << 32)
    assert sum(widths) == 1.0


# Sliding windows


def test_a_rate_is_taken_over_the_whole_window() -> None:
    window = SlidingWindow(10.0)
    assert window.rate(100.0) == 0
    window.add(100.0, 20)
    assert window.rate(100.0) == 2
    window.add(105.0, 10)
    assert window.rate(105.0) == 3


def test_old_counts_are_dropped() -> None:
    window = SlidingWindow(10.0)
    window.add(100.0, 20)
    window.add(105.0, 10)
    assert window.rate(109.9) == 3
    assert window.rate(110.5) == 1
    assert window.rate(200.0) == 0


def test_halves_add_up_and_expire_like_the_sum() -> None:
    window = SlidingWindow(10.0)
    window.add(100.0, 20)
    window.add(105.0, 11)
    other = window.halve()
    assert window.rate(105.0) == other.rate(105.0) == pytest.approx(1.55)
    other.add(106.0, 10)
    window.merge(other)
    assert window.rate(106.0) == pytest.approx(4.1)
    assert window.rate(111.0) == pytest.approx(2.1)


def test_a_stopped_clock_fills_one_slot() -> None:
    window = SlidingWindow(1.0)
    for _ in range(1000):
        window.add(5.0, 1)
    assert window.rate(5.0) == 1000
    assert window.rate(6.1) == 0
