"""Ranges of the hash space: the timeline of the Key_Failover note, and invariants of any sequence of events."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.key_ranges import CELL_BITS, SPACE, KeyLoad, KeyRanges, position_of
from tests.support.clock import Clock

C = TypeVar("C")


def record(ranges: KeyRanges[C], consumer: C, count: int) -> None:
    """Record messages spread over the range of a consumer."""
    [(low, high)] = [(low, high) for low, high, owner in ranges.ranges() if owner == consumer]
    for number in range(8):
        ranges.record(int((low + (high - low) * number / 8) * SPACE), (count + number) // 8)


def key_at(low: float, high: float) -> bytes:
    """Return a key whose hash lies in a range."""
    return next(key for key in (b"key-%d" % n for n in range(10_000)) if low <= position_of(key) / (1 << 32) < high)


def test_the_timeline_of_the_note() -> None:
    clock = Clock()
    ranges = KeyRanges[str](clock=clock)
    # T0: the first consumer serves the whole space
    ranges.add_consumer("C1")
    assert ranges.ranges() == [(0.0, 1.0, "C1")]
    assert ranges.at(position_of(b"any")) == "C1"
    record(ranges, "C1", 100)
    # T1: the second consumer receives half of the range
    clock.now += 20
    ranges.add_consumer("C2")
    assert ranges.ranges() == [(0.0, 0.5, "C1"), (0.5, 1.0, "C2")]
    # T2: C2 is busier than C1, so its range is split
    record(ranges, "C1", 80)
    record(ranges, "C2", 240)
    clock.now += 1
    ranges.add_consumer("C3")
    assert ranges.ranges() == [(0.0, 0.5, "C1"), (0.5, 0.75, "C2"), (0.75, 1.0, "C3")]
    # T3: C1 is removed; C2 is its only neighbour
    record(ranges, "C2", 1000)
    ranges.remove_consumer("C1")
    assert ranges.ranges() == [(0.0, 0.75, "C2"), (0.75, 1.0, "C3")]
    # T4: C2 is removed; C3 serves the whole space
    ranges.remove_consumer("C2")
    assert ranges.ranges() == [(0.0, 1.0, "C3")]
    assert ranges.at(position_of(b"any")) == "C3"
    ranges.remove_consumer("C3")
    assert ranges.ranges() == []
    assert ranges.at(position_of(b"any")) is None


def test_a_key_is_delivered_to_the_consumer_of_its_range() -> None:
    ranges = KeyRanges[str](clock=Clock())
    for name in ("C1", "C2"):
        ranges.add_consumer(name)
    assert ranges.at(position_of(key_at(0.0, 0.5))) == "C1"
    assert ranges.at(position_of(key_at(0.5, 1.0))) == "C2"
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
        record(ranges, "C1", 2)
        ranges.add_consumer("C2")
        record(ranges, busy, 50)
        record(ranges, heir, 5)
        ranges.remove_consumer("C2")
        assert [owner for _, _, owner in ranges.ranges()] == ["C1", "C3"]
        assert ranges.ranges()[0].high == (0.5 if heir == "C1" else 0.25)


def test_the_line_is_no_ring() -> None:
    """The range of the first consumer goes to the second, never to the last, even if the last one is idle."""
    ranges = KeyRanges[int](clock=Clock())
    for number in range(4):
        ranges.add_consumer(number)
    owners = [owner for _, _, owner in ranges.ranges()]
    record(ranges, owners[1], 1000)
    ranges.remove_consumer(owners[0])
    assert ranges.ranges()[0] == (0.0, 0.5, owners[1])


def test_rates_are_of_the_window_only() -> None:
    clock = Clock()
    ranges = KeyRanges[str](clock=clock, window=8.0)
    ranges.add_consumer("C1")
    ranges.add_consumer("C2")
    record(ranges, "C1", 80)
    clock.now += 4
    record(ranges, "C2", 40)
    assert (ranges.rate("C1"), ranges.rate("C2")) == (20, 10)
    clock.now += 4
    assert (ranges.rate("C1"), ranges.rate("C2")) == (0, 10)
    clock.now += 8
    assert (ranges.rate("C1"), ranges.rate("C2")) == (0, 0)


def test_consecutive_newcomers_share_the_range_of_a_busy_consumer() -> None:
    ranges = KeyRanges[int](clock=Clock(), window=2.0)
    ranges.add_consumer(0)
    record(ranges, 0, 800)
    for number in range(1, 8):
        ranges.add_consumer(number)
    assert {high - low for low, high, _ in ranges.ranges()} == {0.125}
    assert {ranges.rate(number) for number in range(8)} == {100}


def test_a_few_messages_do_not_decide() -> None:
    ranges = KeyRanges[int](clock=Clock())
    for number in range(8):
        ranges.record(SPACE - 1)
        ranges.add_consumer(number)
    assert {high - low for low, high, _ in ranges.ranges()} == {0.125}


def test_a_new_owner_has_the_messages_of_its_range() -> None:
    ranges = KeyRanges[str](clock=Clock(), window=2.0)
    for name in ("C1", "C2"):
        ranges.add_consumer(name)
    record(ranges, "C1", 32)
    record(ranges, "C2", 16)
    ranges.remove_consumer("C1")
    assert ranges.rate("C2") == 48


# Balance


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 13])
def test_without_messages_every_consumer_gets_the_same_part(count: int) -> None:
    ranges = KeyRanges[int](clock=Clock())
    for number in range(count):
        ranges.add_consumer(number)
    assert ranges.balance() == bool(count & (count - 1))
    assert max(ranges.share(number) for number in range(count)) * count < 1.01
    assert not ranges.balance()


@given(st.integers(2, 12), st.floats(0, 1.5), st.integers(0, 5000), st.integers(0, 1 << 32))
def test_balance_comes_near_the_fair_share_or_is_stopped_by_one_key(
    count: int, skew: float, messages: int, seed: int
) -> None:
    """Keys are drawn by a Zipf distribution; what one cell has cannot be divided."""
    chance = random.Random(seed)
    ranges = KeyRanges[int](clock=Clock())
    keys = [chance.randrange(SPACE) for _ in range(500)]
    drawn = chance.choices(keys, cum_weights=list(accumulate(rank**-skew for rank in range(1, 501))), k=messages)
    for number in range(count):
        ranges.add_consumer(number)
    for key in drawn:
        ranges.record(key)
    before = max(ranges.share(number) for number in range(count))
    order = [owner for _, _, owner in ranges.ranges()]
    moved = ranges.balance()
    found = ranges.ranges()
    assert [owner for _, _, owner in found] == order
    assert [low for low, _, _ in found] == [0.0, *(high for _, high, _ in found[:-1])]
    assert all(low < high for low, high, _ in found)
    after = max(ranges.share(number) for number in range(count))
    heaviest = max(Counter(key >> CELL_BITS for key in drawn).values(), default=0) / (messages + 50 * count)
    if moved:
        assert after <= 0.9 * before + 1e-9
    else:
        assert after == before
        assert before * count <= 1.2 + 1e-9 or heaviest * count > 0.3
    assert not ranges.balance()


@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_balance_finds_the_cells_that_divide_the_messages_evenly(count: int) -> None:
    ranges = KeyRanges[int](clock=Clock())
    for consumer in range(count):
        ranges.add_consumer(consumer)
    for cell in range(12):
        ranges.record(cell << CELL_BITS, 1_000_000)
    assert ranges.balance()
    starts = [int(low * SPACE) >> CELL_BITS for low, _, _ in ranges.ranges()]
    assert starts == [consumer * 12 // count for consumer in range(count)]


@pytest.mark.parametrize("count", [2, 4])
def test_keys_at_the_end_of_the_hash_space_are_divided(count: int) -> None:
    ranges = KeyRanges[int](clock=Clock(), window=2.0)
    for number in range(count):
        ranges.add_consumer(number)
    for position in (SPACE - 1, SPACE - 1 - (1 << CELL_BITS)):
        ranges.record(position, 500)
    assert ranges.balance()
    assert all(low < high for low, high, _ in ranges.ranges())
    assert sorted(map(ranges.rate, range(count)))[-2:] == [500, 500]
    ranges.record(SPACE - 1, 1_000_000)
    assert not ranges.balance(), "one key cannot be divided"


def test_a_border_is_where_the_share_comes_nearest_to_the_fair_one() -> None:
    ranges = KeyRanges[int](clock=Clock())
    for consumer in range(2):
        ranges.add_consumer(consumer)
    for cell, messages in enumerate((11_000_000, 6_000_000, 10_000_000)):
        ranges.record(cell << CELL_BITS, messages)
    assert ranges.balance()
    assert int(ranges.ranges()[1].low * SPACE) >> CELL_BITS == 1


@pytest.mark.parametrize(("first", "moves"), [(590_000, False), (610_000, True)])
def test_borders_stay_until_a_consumer_has_a_fifth_more_than_its_share(first: int, moves: bool) -> None:
    ranges = KeyRanges[int](clock=Clock())
    for consumer in range(2):
        ranges.add_consumer(consumer)
    for number in range(100):
        ranges.record(number * (SPACE // 200), first // 100)
        ranges.record(SPACE // 2 + number * (SPACE // 200), (1_000_000 - first) // 100)
    assert ranges.balance() is moves


def test_one_consumer_has_nothing_to_give_away() -> None:
    ranges = KeyRanges[int](clock=Clock())
    assert not ranges.balance()
    ranges.add_consumer(0)
    assert not ranges.balance()


def test_refusals() -> None:
    ranges = KeyRanges[str](clock=Clock())
    ranges.add_consumer("C1")
    with pytest.raises(InvalidInput, match="has a range already"):
        ranges.add_consumer("C1")
    for call in (ranges.remove_consumer, ranges.share, ranges.rate):
        with pytest.raises(InvalidInput, match="has no range"):
            call("C2")
    assert ("C1" in ranges, "C2" in ranges, len(ranges)) == (True, False, 1)
    with pytest.raises(InvalidSetting, match="window"):
        KeyRanges(window=0)
    KeyRanges[str](window=0.5)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 12), st.just(0.0)),
        st.tuples(st.just("remove"), st.integers(0, 12), st.just(0.0)),
        st.tuples(st.just("dispatch"), st.integers(0, 12), st.floats(0, 8)),
        st.tuples(st.just("balance"), st.just(0), st.just(0.0)),
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


def check_add(before: dict[int, Fraction], after: dict[int, Fraction], shares: dict[int, float], new: int) -> None:
    """Assert that the busiest range was split in half, and among equally busy ones the widest."""
    changed = [consumer for consumer in before if after[consumer] != before[consumer]]
    if not before:
        assert after == {new: 1}
        return
    [giver] = changed
    assert shares[giver] == max(shares.values())
    assert before[giver] == max(before[consumer] for consumer, share in shares.items() if share == shares[giver])
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
        shares = {consumer: ranges.share(consumer) for consumer in widths}
        order = [consumer for _, _, consumer in ranges.ranges()]
        before = dict(widths)
        if event == "add" and number not in widths:
            ranges.add_consumer(number)
            widths = check_cover(ranges, {*before, number})
            check_add(before, widths, shares, number)
        elif event == "remove" and number in widths:
            ranges.remove_consumer(number)
            widths = check_cover(ranges, {*before} - {number})
            heirs = check_remove(order, before, widths, number)
            assert heirs == [] or shares[heirs[0]] == min(shares[consumer] for consumer in heirs)
        elif event == "dispatch" and number in widths:
            record(ranges, number, 1 + number)
            clock.now += pause
            assert check_cover(ranges, set(before)) == before
        elif event == "balance":
            ranges.balance()
            widths = check_cover(ranges, set(before))


def test_shares_of_joining_consumers_differ_by_a_factor_of_two_at_most() -> None:
    """All ranges are as busy as they are wide, as under an even load."""
    ranges = KeyRanges[int](clock=Clock())
    for number in range(200):
        ranges.add_consumer(number)
        widths = [high - low for low, high, _ in ranges.ranges()]
        assert len(widths) == number + 1
        assert max(widths) <= 2 * min(widths)


@given(st.lists(st.binary(max_size=24), max_size=50), st.integers(1, 12))
def test_every_key_has_exactly_one_consumer_and_keeps_it(keys: list[bytes], count: int) -> None:
    ranges = KeyRanges[int](clock=Clock())
    for number in range(count):
        ranges.add_consumer(number)
    for key in keys:
        place = position_of(key) / (1 << 32)
        [owner] = [consumer for low, high, consumer in ranges.ranges() if low <= place < high]
        assert ranges.at(position_of(key)) == owner


# Load


def test_messages_are_counted_by_place() -> None:
    load = KeyLoad(Clock(), 10.0)
    load.add(0, 8)
    load.add(SPACE - 1, 4)
    cell = 1 << CELL_BITS
    assert (load.between(0, SPACE), load.between(0, cell), load.between(cell, SPACE)) == (12, 8, 4)
    assert (load.between(0, cell // 4), load.between(cell // 4, cell // 2), load.between(5, 5)) == (2, 2, 0)
    assert (sum(load.cells()), load.cells()[0], load.cells()[-1]) == (12, 8, 4)


def test_the_older_half_is_dropped() -> None:
    clock = Clock()
    load = KeyLoad(clock, 10.0)
    load.add(7, 10)
    clock.now += 5
    load.add(7, 20)
    assert (load.between(0, SPACE), sum(load.cells())) == (30, 30)
    clock.now += 4.9
    assert load.between(0, SPACE) == 30
    clock.now += 0.1
    assert load.between(0, SPACE) == 20
    clock.now += 100
    assert (load.between(0, SPACE), sum(load.cells())) == (0, 0)
    load.add(7, 40)
    clock.now += 10
    assert (sum(load.cells()), load.between(0, SPACE)) == (0, 0)


@pytest.mark.parametrize("pause", [0.1, 0.7, 3.0])
def test_an_even_flow_has_an_even_rate(pause: float) -> None:
    clock = Clock()
    load = KeyLoad(clock, 10.0)
    for turn in range(200):
        load.add(turn << 20, 10)
        clock.now += pause
        if turn * pause > 10:
            assert load.rate(0, SPACE) * pause == pytest.approx(10, rel=pause / 5 + 0.01)


def test_messages_between_two_positions_of_a_cell_are_its_part_of_them() -> None:
    load = KeyLoad(Clock(), 10.0)
    size = 1 << CELL_BITS
    for cell in (0, 1, 3):
        load.add(cell << CELL_BITS, size)  # one for each position
    for start, stop in [(0, 1), (1, 2), (5, size), (size - 1, size + 1), (1, 2 * size), (3 * size + 7, 3 * size + 9)]:
        assert load.between(start, stop) == stop - start
    assert load.between(2 * size, 3 * size) == 0
    assert load.between(0, SPACE) == 3 * size


def test_shares_are_of_the_window_only_without_further_messages() -> None:
    clock = Clock()
    ranges = KeyRanges[str](clock=clock)
    for consumer in ("C1", "C2"):
        ranges.add_consumer(consumer)
    ranges.record(0, 1_000_000)
    assert ranges.share("C1") > 0.9
    clock.now += 20
    assert ranges.share("C1") == 0.5


def test_a_rate_counts_the_seconds_since_the_older_half_began() -> None:
    clock = Clock()
    ranges = KeyRanges[str](clock=clock, window=8.0)
    ranges.add_consumer("a")
    ranges.record(0, 12)
    clock.now += 6.0
    assert ranges.rate("a") == 2.0
