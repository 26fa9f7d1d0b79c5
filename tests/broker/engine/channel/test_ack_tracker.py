"""The acknowledged position of a channel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.engine.channel.in_flight import AckTracker


def test_out_of_order_is_kept_until_the_gap_closes() -> None:
    confirmed = AckTracker(0, 0)
    assert not confirmed.add(20, 10, 3)
    assert not confirmed.add(30, 10, 4)
    assert not confirmed.add(50, 10, 6)
    assert confirmed.intervals == [(20, 40, 4), (50, 60, 6)]
    assert confirmed.covers(30, 10)
    assert not confirmed.covers(40, 10)
    assert not confirmed.add(10, 10, 2)
    assert confirmed.add(0, 10, 1)
    assert (confirmed.offset, confirmed.count, confirmed.intervals) == (40, 4, [(50, 60, 6)])


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "add", "reset", "clear", "cut", "restore"]), st.integers(0, 9)),
        max_size=20,
    )
)
def test_after_any_steps_it_knows_the_position_and_what_is_finished_behind_it(steps: list[tuple[str, int]]) -> None:
    confirmed, position, done = AckTracker(0, 0), 0, set[int]()
    for step, number in steps:
        if step == "add":
            moved = confirmed.add(number * 7, 7, number + 1)
            assert moved == (number == position)
            done.add(number)
        elif step == "cut":
            confirmed.cut(number * 7, number)
            position, done = min(position, number), {one for one in done if one < number}
        elif step == "restore":
            kept, confirmed = confirmed.intervals, AckTracker(0, 0)
            confirmed.add(70, 7, 11)
            confirmed.restore(number * 7, number, kept)
            done, position = {one for one in done if one >= position}, number
        else:
            done = set()
            if step == "reset":
                confirmed.reset(number * 7, number)
                position = number
            else:
                confirmed.clear()
        done = {one for one in done if one >= position}
        while position in done:
            position += 1
        behind = sorted(one for one in done if one >= position)
        starts = [one for one in behind if one - 1 not in behind]
        ends = [one + 1 for one in behind if one + 1 not in behind]
        assert (confirmed.offset, confirmed.count) == (position * 7, position)
        assert confirmed.intervals == [(start * 7, end * 7, end) for start, end in zip(starts, ends, strict=True)]


def test_cut_drops_removed_records() -> None:
    confirmed = AckTracker(0, 0)
    for offset, count in ((20, 3), (30, 4), (60, 7)):
        confirmed.add(offset, 10, count)
    confirmed.cut(35, 3)
    assert confirmed.intervals == [(20, 35, 3)]
    confirmed.cut(0, 0)
    assert (confirmed.offset, confirmed.count, confirmed.intervals) == (0, 0, [])
    confirmed.reset(90, 9)
    confirmed.cut(50, 5)
    assert (confirmed.offset, confirmed.count) == (50, 5)
