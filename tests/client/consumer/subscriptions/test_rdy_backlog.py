"""How a read shows whether its server has more messages than the window lets it send."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.subscriptions.rdy_distributor import TOLERANCE, Backlog

_SKEWS = st.floats(-1e8, 1e8)
"""Seconds by which the clocks of two machines differ."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of day of this machine, which may be changed."""
    now = [0.0]
    monkeypatch.setattr("nsqext.client.consumer.subscriptions.rdy_distributor.time.time", lambda: now[0])
    return now


@given(skew=_SKEWS, pauses=st.lists(st.floats(0.0001, 30.0), min_size=1, max_size=60), data=st.data())
def test_a_message_that_is_sent_at_once_shows_no_backlog(skew: float, pauses: list[float], data: st.DataObject) -> None:
    backlog, published = Backlog(), 1e9
    backlog.excess(published + skew, published)
    for pause in pauses:
        published += pause
        late = data.draw(st.floats(0.0, TOLERANCE * 0.9))
        assert backlog.excess(published + skew, published + late) <= TOLERANCE


@pytest.mark.parametrize("skew", [-5e6, 0.0, 5e6])
def test_messages_that_wait_show_how_long(skew: float) -> None:
    backlog = Backlog()
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


def test_a_first_message_shows_a_backlog_by_its_age(clock: list[float]) -> None:
    clock[0] = 1000.0
    assert Backlog().excess(998.9, 5.0) == inf
    assert Backlog().excess(999.1, 5.0) == 0.0
    assert Backlog().excess(1900.0, 5.0) == 0.0, "the clock of the server is ahead"


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
