"""How a read shows whether its server has more messages than the window lets it send."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.subscriptions.backlog import TOLERANCE, Backlog

_SKEWS = st.floats(-1e8, 1e8)
"""Seconds by which the clocks of two machines differ."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of day of this machine, which may be changed."""
    now = [0.0]
    monkeypatch.setattr("nsqext.client.consumer.subscriptions.backlog.time.time", lambda: now[0])
    return now


@given(skew=_SKEWS, pauses=st.lists(st.floats(0.0001, 30.0), min_size=1, max_size=60), data=st.data())
def test_a_message_that_is_sent_at_once_shows_no_backlog(skew: float, pauses: list[float], data: st.DataObject) -> None:
    backlog, published = Backlog(), 1e9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{Backlog.__module__}.time.time", lambda: published + skew)
        backlog.excess(published + skew, published)
    for pause in pauses:
        published += pause
        late = data.draw(st.floats(0.0, TOLERANCE * 0.9))
        assert backlog.excess(published + skew, published + late) <= TOLERANCE


@pytest.mark.parametrize("skew", [-5e6, 0.0, 5e6])
def test_messages_that_wait_show_how_long(clock: list[float], skew: float) -> None:
    backlog = Backlog()
    clock[0] = 1000.0 + skew
    backlog.excess(1000.0 + skew, 1000.0)
    waits = [backlog.excess(1000.001 + skew, 1000.0 + read) for read in (0.002, 0.005, 0.012, 0.4)]
    assert waits == [pytest.approx(wait, abs=1e-6) for wait in (0.001, 0.004, 0.011, 0.399)]


@pytest.mark.parametrize("skew", [-5e6, 0.0, 5e6])
@pytest.mark.parametrize("speed", [1.05, 2.0, 1000.0])
def test_a_backlog_that_shrinks_is_noticed(speed: float, skew: float) -> None:
    """The messages of a day are read faster than they were published: each has waited less than the last."""
    backlog, now = Backlog(), 1e6
    found = []
    for read in range(500):
        now += 0.001
        found.append(backlog.excess(1000.0 + read * 0.001 * speed + skew, now))
    assert set(found[250:]) == {inf}


def test_a_few_reads_do_not_keep_a_backlog_that_has_ended(clock: list[float]) -> None:
    backlog, found = Backlog(), []
    for read in range(12):
        now = 0.06 * read
        found.append(backlog.excess(now - (0.5 if read < 6 else 0.1), now))
    assert (found[5], found[6], found[-1]) == (0.0, inf, 0.0)


def test_a_delay_that_ends_is_no_backlog(clock: list[float]) -> None:
    """Messages were as late before: the difference falls because a process or a server stood still."""
    backlog, found = Backlog(), []
    for read in range(400):
        now = 0.01 * read
        late = 0.03 if 150 <= read < 200 else 0.0
        found.append(backlog.excess(now - late, now))
    assert found == [0.0] * 150 + [pytest.approx(0.03)] * 50 + [0.0] * 200


@given(rate=st.floats(0.1, 1e6), excess=st.floats(0.0, 10.0), counts=st.lists(st.integers(1, 200), min_size=1))
def test_a_window_is_as_wide_as_messages_are_published_soon(rate: float, excess: float, counts: list[int]) -> None:
    backlog, received, found = Backlog(), 0, inf
    for count in counts:
        received += count
        found = backlog.width(1e9 + received / rate, count, excess)
    assert found == (pytest.approx(rate * (excess + 0.001), rel=0.05) if found < inf else inf)


def test_messages_of_one_moment_do_not_bound_a_window() -> None:
    backlog = Backlog()
    assert [backlog.width(5.0, 1, 0.0), backlog.width(5.0, 3, 0.0)] == [inf, inf]
    assert backlog.width(6.0, 4, 0.0) == pytest.approx(0.007)


def test_the_rate_of_the_latest_reads_counts() -> None:
    backlog = Backlog()
    for second in range(20):
        backlog.width(float(second), 1, 0.0)
    for read in range(6):
        found = backlog.width(20.0 + 0.001 * read, 1, 0.002)
    assert found == pytest.approx(3.0)


def test_a_backlog_that_is_old_is_read_at_full_speed_from_the_start(clock: list[float]) -> None:
    """It was published slowly, so each message has waited less than the last."""
    backlog, clock[0] = Backlog(), 1e6
    found = [backlog.excess(1000.0 + 0.02 * read, 0.001 * read) for read in range(500)]
    assert set(found) == {inf}
    caught_up = [backlog.excess(1009.98 + 0.001 * read, 0.5 + 0.001 * read) for read in range(500)]
    assert max(caught_up[210:]) <= TOLERANCE


def test_a_first_message_shows_a_backlog_by_its_age(clock: list[float]) -> None:
    clock[0] = 1000.0
    assert Backlog().excess(998.9, 5.0) == inf
    assert Backlog().excess(999.1, 5.0) == 0.0
    assert Backlog().excess(1900.0, 5.0) == 0.0, "the clock of the server is ahead"


def test_a_backlog_that_shrinks_fast_is_noticed_at_once(clock: list[float]) -> None:
    """A few reads drain what a partition has, too few for a trend."""
    clock[0] = 1000.5
    young, old = Backlog(), Backlog()
    assert [young.excess(1000.0 + lead, 0.03 * read) for read, lead in enumerate((0.0, 0.031, 0.063))] == [
        0.0,
        0.0,
        inf,
    ]
    for read in range(30):
        old.excess(1000.0 + 0.05 * read, 0.05 * read)
    assert old.excess(1001.5 + 0.049, 1.5) == 0.0, "a delay that ended"
    assert old.excess(1001.55 + 0.101, 1.55) == inf


def test_a_clock_that_is_set_is_believed_within_ten_seconds(clock: list[float]) -> None:
    backlog = Backlog()
    found = [backlog.excess(now - (3.0 if now >= 5.5 else 0.0), now) for now in (0.5 * step for step in range(50))]
    assert found[:11] == [0.0] * 11
    assert found[11] == 3.0
    assert found[-18:] == [0.0] * 18


def test_after_a_minute_without_messages_nothing_is_compared(clock: list[float]) -> None:
    clock[0] = 1000.0
    backlog = Backlog()
    assert backlog.excess(1000.0, 0.0) == 0.0
    assert backlog.excess(1069.0, 70.0) == 0.0, "the clocks have drifted by a second"
