"""The sliding window on a scripted clock."""

from __future__ import annotations

import pytest

from nsqext.dispatch.window import SlidingWindow


def test_a_rate_is_taken_over_the_whole_window() -> None:
    window = SlidingWindow(10.0)
    assert window.rate(100.0) == 0
    window.add(100.0, 20)
    assert window.rate(100.0) == 2
    window.add(105.0, 10)
    assert window.rate(105.0) == 3


def test_what_is_too_old_does_not_count() -> None:
    window = SlidingWindow(10.0)
    window.add(100.0, 20)
    window.add(105.0, 10)
    assert window.rate(109.9) == 3
    assert window.rate(110.5) == 1
    assert window.rate(200.0) == 0


def test_halves_add_up_and_age_like_the_whole() -> None:
    window = SlidingWindow(10.0)
    window.add(100.0, 20)
    window.add(105.0, 11)
    other = window.halve()
    assert window.rate(105.0) == other.rate(105.0) == pytest.approx(1.55)
    other.add(106.0, 10)
    window.merge(other)
    assert window.rate(106.0) == pytest.approx(4.1)
    assert window.rate(111.0) == pytest.approx(2.1)


def test_a_clock_that_stands_still_fills_one_slot() -> None:
    window = SlidingWindow(1.0)
    for _ in range(1000):
        window.add(5.0, 1)
    assert window.rate(5.0) == 1000
    assert window.rate(6.1) == 0
