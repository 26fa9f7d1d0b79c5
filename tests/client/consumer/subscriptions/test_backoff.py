"""Backoff: levels and pauses, without a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff


def test_pauses_double_and_stop_growing_at_the_longest() -> None:
    backoff = Backoff(BackoffOptions(base=1.0, max_wait=120.0))
    now, pauses = 0.0, []
    for _ in range(8):
        assert backoff.failed(now)
        pauses.append(backoff.until - now)
        now = backoff.until
        assert backoff.tick(now)
    assert pauses == [2, 4, 8, 16, 32, 64, 64, 64]
    assert (backoff.level, backoff.state) == (6, "probing")


def test_results_during_a_pause_change_nothing() -> None:
    backoff = Backoff(BackoffOptions())
    assert backoff.failed(0.0)
    assert not backoff.failed(0.5)
    assert not backoff.succeeded(0.5)
    assert not backoff.passed(0.5)
    assert not backoff.tick(1.9)
    assert (backoff.level, backoff.until, backoff.state) == (1, 2.0, "waiting")


def test_successes_lead_back_level_by_level() -> None:
    backoff = Backoff(BackoffOptions())
    for now in (0.0, 2.0):
        backoff.tick(now)
        backoff.failed(now)
    assert backoff.level == 2
    backoff.tick(6.0)
    assert backoff.succeeded(6.0)
    assert (backoff.level, backoff.until) == (1, 8.0)
    backoff.tick(8.0)
    assert backoff.succeeded(8.0)
    assert (backoff.level, backoff.state) == (0, "running")
    assert not backoff.succeeded(9.0)


def test_a_probe_without_a_result_waits_again() -> None:
    backoff = Backoff(BackoffOptions())
    assert not backoff.passed(0.0)
    backoff.failed(0.0)
    backoff.tick(2.0)
    assert backoff.passed(2.0)
    assert (backoff.level, backoff.until) == (1, 4.0)


def test_jitter_waits_a_part() -> None:
    backoff = Backoff(BackoffOptions(jitter=True), chance=lambda: 0.25)
    backoff.failed(10.0)
    assert backoff.until == 10.5


def test_a_backoff_that_is_off_never_pauses() -> None:
    backoff = Backoff(BackoffOptions(mode="off"))
    assert not backoff.failed(0.0)
    assert backoff.state == "running"
    assert repr(backoff) == "<Backoff running level=0>"


@given(st.lists(st.tuples(st.sampled_from(["failed", "succeeded", "passed", "tick"]), st.floats(0, 100))))
def test_any_sequence_stays_within_bounds(steps: list[tuple[str, float]]) -> None:
    options = BackoffOptions(base=0.5, max_wait=30.0)
    backoff = Backoff(options)
    now = 0.0
    for name, pause in steps:
        now += pause
        getattr(backoff, name)(now)
        assert 0 <= backoff.level <= 5
        assert backoff.until <= now + options.max_wait
        assert bool(backoff.until) <= bool(backoff.level)
