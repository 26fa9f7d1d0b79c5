"""Distribution of max_in_flight over connections."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import TURN, RdyDistributor
from tests.support.rdy import add, make, receive, settled, widen


def test_rdy_is_lowered_by_a_new_connection_and_raised_by_a_lost_one() -> None:
    flow = make(10, 2500)
    assert flow.shares(0) == {0: 10}
    add(flow, 1, 2500)
    for now in (0.0, 0.2, 0.3):
        assert flow.shares(now) == {0: 5, 1: 0}, "the server of the first may not have read its lower count"
    assert flow.shares(0.6) == {0: 5, 1: 5}
    flow.remove(0)
    assert flow.shares(0.6) == {1: 10}
    assert len(flow) == 1


def test_no_first_count_is_above_the_limit_of_the_server() -> None:
    for sole, first in ((False, 100), (True, 200)):
        flow = RdyDistributor[int](200, Backoff(BackoffOptions()), initial_ready=100)
        flow.add(0, 2500, Backoff(BackoffOptions()), 0.0, sole=sole)
        assert flow.shares(0.0) == {0: first}
        flow.remove(0)
        flow.add(1, 50, Backoff(BackoffOptions()), 1.0, sole=sole)
        assert flow.shares(1.0) == {1: 50}


def test_what_a_connection_gives_up_is_given_away_when_its_messages_are_answered() -> None:
    flow = make(10, 2500)
    flow.shares(0.0)
    add(flow, 1, 2500)
    for now, first, granted in (
        (0.0, 8, 0),
        (0.3, 8, 0),
        (0.5, 8, 0),
        (0.6, 8, 2),
        (5.0, 8, 2),
        (6.0, 6, 2),
        (6.2, 7, 2),
        (6.3, 6, 3),
        (7.0, 5, 3),
        (7.3, 0, 5),
    ):
        assert flow.shares(now, {0: first}) == {0: 5, 1: granted}, now
    assert not flow.unsettled


def test_a_connection_that_is_about_to_be_closed_keeps_what_it_has_in_flight() -> None:
    flow = make(4, 2500, 2500)
    assert flow.shares(0.0) == {0: 2, 1: 2}
    flow.retire(0)
    flow.retire(7)
    assert flow.shares(0.0, {0: 2}) == {0: 0, 1: 2}
    flow.pause(0, paused=False)
    for now in (1.0, 1.3, 1.6):
        flow.shares(now, {0: 1})
    assert flow.shares(1.6, {0: 1}) == {0: 0, 1: 3}
    flow.remove(0)
    assert flow.shares(1.6) == {1: 4}


def test_no_count_is_raised_while_more_is_in_flight_than_a_lowered_bound() -> None:
    flow = make(10, 2500, 2500)
    assert flow.shares(0.0) == {0: 5, 1: 5}
    flow.max_in_flight = 4
    assert flow.shares(0.0, {0: 5, 1: 5}) == {0: 2, 1: 2}
    flow.retire(1)
    assert flow.shares(0.1, {0: 5, 1: 5}) == {0: 2, 1: 0}
    flow.remove(1)
    for now in (0.4, 0.7):
        flow.shares(now, {0: 2})
    assert flow.shares(1.0, {0: 2}) == {0: 4}


def test_the_rest_of_a_division_stays_where_it_is() -> None:
    """Moving a count would exceed ``max_in_flight``, because messages for the lowered count are in flight already."""
    flow = RdyDistributor[int](3, Backoff(BackoffOptions()))
    for number in range(2):
        flow.add(number, 2500, Backoff(BackoffOptions()), 0.0)
    widen(flow, 0, 1)
    assert flow.shares(0) == {0: 2, 1: 1}
    widen(flow, 1, 1)
    assert flow.shares(0) == {0: 2, 1: 1}
    widen(flow, 1)
    assert flow.shares(0) == {0: 2, 1: 1}


def test_idle_connections_yield_until_a_message_is_received() -> None:
    flow = make(100, 2500, 2500, 2500)
    assert not receive(flow, 0, 9.0)
    assert flow.shares(11.0) == {0: 98, 1: 1, 2: 1}
    assert receive(flow, 1, 12.0)
    assert flow.shares(12.0) == {0: 98, 1: 1, 2: 1}, "its window starts again"
    widen(flow, 1)
    assert settled(flow, 12.75) == {0: 50, 1: 49, 2: 1}
    assert sorted(flow.shares(60.0).values()) == [1, 1, 1], "the windows of idle connections start again"
    assert not receive(flow, 99, 60.0)


def test_a_backoff_of_the_consumer_pauses_all_connections_then_one_probes() -> None:
    backoff = Backoff(BackoffOptions())
    flow = RdyDistributor[int](100, backoff)
    for number in range(3):
        add(flow, number, 2500, backoff)
    backoff.failed(0.0)
    assert flow.shares(1.0) == {0: 0, 1: 0, 2: 0}
    receive(flow, 1, 1.5)
    backoff.tick(2.0)
    assert flow.shares(2.0) == {0: 0, 1: 1, 2: 0}, "it received a message last"
    assert flow.shares(2.2) == {0: 0, 1: 1, 2: 0}
    assert flow.shares(2.3) == {0: 1, 1: 1, 2: 1}, "it receives nothing"
    assert all(map(flow.watches, range(3)))
    assert receive(flow, 2, 2.4)
    for now in (2.4, 3.0, 5.0):
        assert flow.shares(now, {2: 1}) == {0: 0, 1: 0, 2: 1}, "its message is tried"
    assert flow.shares(5.1) == {0: 0, 1: 0, 2: 1}, "it was answered without an outcome"
    assert flow.shares(5.4) == {0: 1, 1: 1, 2: 1}, "and no other one came"
    backoff.succeeded(6.0)
    assert sorted(settled(flow, 7.0).values()) == [33, 33, 34]
    assert not receive(flow, 2, 7.1), "messages change no counts any more"


def test_a_backoff_asks_every_connection_if_the_one_that_received_last_has_no_message() -> None:
    backoff = Backoff(BackoffOptions())
    flow = RdyDistributor[int](1, backoff)
    for member in range(3):
        add(flow, member, 2500, backoff)
    flow.shares(0.0)
    receive(flow, 0, 0.5)
    backoff.failed(1.0)
    flow.shares(1.0)
    backoff.tick(3.0)
    asked = [{number for number, share in flow.shares(3.0 + 0.25 * step).items() if share} for step in range(20)]
    assert asked[0] == {0}
    assert set[int]().union(*asked) == {0, 1, 2}


def test_a_backoff_of_one_connection_does_not_slow_the_others() -> None:
    own = Backoff(BackoffOptions())
    flow = make(10, 2500)
    add(flow, 1, 2500, own)
    own.failed(0.0)
    assert flow.shares(0.0) == {0: 10, 1: 0}
    own.tick(2.0)
    assert flow.shares(2.0) == {0: 9, 1: 0}
    assert settled(flow, 2.75) == {0: 9, 1: 1}


@given(
    total=st.integers(1, 50),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "delivered", "fail", "tick", "own", "wait"]), st.integers(0, 9)),
        max_size=60,
    ),
)
def test_the_sum_is_never_too_much(total: int, steps: list[tuple[str, int]]) -> None:
    backoff = Backoff(BackoffOptions())
    flow = RdyDistributor[int](total, backoff)
    own: dict[int, Backoff] = {}
    now = 0.0
    for name, number in steps:
        if name == "add":
            own[number] = Backoff(BackoffOptions())
            add(flow, number, 1 if number % 3 else 2500, own[number], now)
        elif name == "remove":
            flow.remove(number)
            own.pop(number, None)
        elif name == "delivered":
            receive(flow, number, now)
        elif name == "fail":
            backoff.failed(now)
        elif name == "own" and number in own:
            own[number].failed(now)
        else:
            now += number
            for state in (backoff, *own.values()):
                state.tick(now)
        shares = flow.shares(now)
        assert set(shares) == set(own)
        assert sum(shares.values()) <= total
        assert all(0 <= share <= (1 if key % 3 else 2500) for key, share in shares.items())
        if backoff.state == "running" and any(state.state == "running" for state in own.values()):
            assert any(shares.values()), "one of them gets a share"


def test_held_messages_raise_the_total_to_twice_its_value_at_most() -> None:
    flow = make(10, 2500)
    flow.widen(4)
    assert flow.shares(0) == {0: 14}
    flow.widen(50)
    assert flow.shares(0) == {0: 20}
    flow.paused = True
    assert flow.shares(0) == {0: 0}


def test_large_messages_lower_the_counts() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()), max_bytes=1000)
    for number in range(2):
        add(flow, number, 2500)
    assert flow.shares(0.0) == {0: 50, 1: 50}
    receive(flow, 0, 0.0, 1, size=100)
    assert settled(flow, 0.75) == {0: 5, 1: 95}
    receive(flow, 1, 0.75, 1, size=10_000)
    assert flow.shares(0.75) == {0: 5, 1: 1}, "each may have one message"


@given(st.integers(6, 30), st.lists(st.integers(1, 10), min_size=1, max_size=6))
def test_shares_use_what_there_is_within_their_limits_and_are_as_equal_as_these_allow(
    total: int, limits: list[int]
) -> None:
    shares = list(make(total, *limits).shares(0.0).values())
    assert sum(shares) == min(total, sum(limits))
    assert all(share <= limit for share, limit in zip(shares, limits, strict=True))
    hungry = [share for share, limit in zip(shares, limits, strict=True) if share < limit]
    assert max(shares) <= min(hungry, default=10) + 1


def test_connections_whose_messages_no_other_consumer_receives_never_wait_for_a_turn() -> None:
    flow = RdyDistributor[int](2, Backoff(BackoffOptions()))
    for number in range(5):
        flow.add(number, 2500, Backoff(BackoffOptions()), 0.0, sole=True)
    assert not flow.takes_turns
    assert flow.shares(0) == dict.fromkeys(range(5), 1)
    for number in range(3):
        flow.remove(number)
    assert sum(flow.shares(0).values()) == 2
    flow.paused = True
    assert sum(flow.shares(0).values()) == 0


def test_counts_change_when_an_idle_connection_receives_and_not_with_each_message() -> None:
    flow = make(100, 2500)
    flow.shares(1000.0)
    assert [receive(flow, 0, now) for now in (1000.0, 1001.0, 1011.1, 1012.0)] == [True, False, True, False]


def test_the_size_of_a_message_is_a_moving_average_that_a_larger_message_raises_at_once() -> None:
    flow = RdyDistributor[int](10_000, Backoff(BackoffOptions()), max_bytes=100_000)
    add(flow, 0, 2500)
    receive(flow, 0, 0.0, size=1000)
    assert flow.shares(0.0) == {0: 100}
    receive(flow, 0, 0.0, size=10)
    assert 100 < flow.shares(0.0)[0] < 110
    for _ in range(100):
        receive(flow, 0, 0.0, size=10)
    assert flow.shares(0.0)[0] > 2000
    receive(flow, 0, 0.0, size=2000)
    assert flow.shares(0.0) == {0: 50}
    receive(flow, 0, 0.0, size=1_000_000)
    assert flow.shares(0.0) == {0: 1}, "each may have one message"


def test_idle_connections_yield_to_busy_ones_only() -> None:
    flow = RdyDistributor[int](30, Backoff(BackoffOptions()), initial_ready=8)
    for number in range(3):
        flow.add(number, 2500, Backoff(BackoffOptions()), 0.0)
    assert flow.shares(11.0) == {0: 8, 1: 8, 2: 8}, "all are idle"
    receive(flow, 0, 11.0)
    widen(flow, 0)
    assert settled(flow, 11.75) == {0: 28, 1: 1, 2: 1}
    flow.pause(0, paused=True)
    assert settled(flow, 12.5) == {0: 0, 1: 8, 2: 8}, "those that may receive are idle"


def test_a_turn_ends_after_a_while_and_earlier_without_messages() -> None:
    flow = make(1, 2500, 2500)
    (first,) = [key for key, share in flow.shares(1000.0).items() if share]
    receive(flow, first, 1000.04)
    for now in (1000.05, 1000.08):
        assert flow.shares(now)[first] == 1
    begun = 1000.0
    while flow.shares(begun)[first]:
        receive(flow, first, begun)
        begun += 0.5
    assert TURN <= begun - 1000.0 <= TURN + 0.5
    for now in (begun, begun + 60.0):
        assert flow.shares(now, {first: 1}) == {first: 0, 1 - first: 0}, "its message is in flight"
    begun += 60.0
    for now, other in ((0.1, 0), (0.3, 0), (0.4, 1), (0.6, 1), (0.7, 0)):
        assert flow.shares(begun + now) == {first: 0, 1 - first: other}, "it received nothing"
    assert [flow.shares(begun + now)[first] for now in (0.9, 1.0, 1.3)] == [0, 0, 1]


def test_a_turn_with_slow_handlers_is_not_idle() -> None:
    flow = make(1, 2500, 2500)
    (first,) = [key for key, share in flow.shares(1000.0).items() if share]
    for number in range(8):
        now = 1000.0 + number * 0.5
        flow.received(first, 1, 1, 1, now)
        assert flow.shares(now + 0.3, {first: 1})[first] == 1
        assert flow.shares(now + 0.4)[first] == 1, "it was answered, and its server has not sent the next"
    assert flow.shares(1003.8)[first] == 1
    assert flow.shares(1004.2)[first] == 0
