"""Distribution of max_in_flight over connections."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.rdy_distributor import Backoff, RdyDistributor, _share_out


def make(total: int, *limits: int) -> RdyDistributor[int]:
    """Return a distributor with connections 0, 1, … whose windows are open, without backoff."""
    flow = RdyDistributor[int](total, Backoff(BackoffOptions()))
    for number, limit in enumerate(limits):
        add(flow, number, limit)
    return flow


def add(flow: RdyDistributor[int], number: int, limit: int, backoff: Backoff | None = None, now: float = 0.0) -> None:
    """Add a connection whose window is open."""
    flow.add(number, limit, backoff or Backoff(BackoffOptions()), now)
    flow._members[number].window = limit


def receive(flow: RdyDistributor[int], number: int, now: float, count: int = 1, size: int = 1) -> bool:
    """Receive messages that are finished immediately."""
    return flow.received(number, count, size * count, 0, now)


def test_connections_get_equal_shares_up_to_their_limits() -> None:
    assert make(200, 2500).shares(0) == {0: 200}
    assert sorted(make(10, 2500, 2500, 2500).shares(0).values()) == [3, 3, 4]
    assert make(5000, 2500).shares(0) == {0: 2500}


def test_messages_beyond_one_consumers_capacity_are_delivered_to_others() -> None:
    assert make(10, 1, 2500, 2500).shares(0) == {0: 1, 1: 4, 2: 5}


def test_rdy_is_lowered_by_a_new_connection_and_raised_by_a_lost_one() -> None:
    flow = make(10, 2500)
    add(flow, 1, 2500)
    assert flow.shares(0) == {0: 5, 1: 5}
    flow.remove(0)
    assert flow.shares(0) == {1: 10}
    assert len(flow) == 1


def test_the_rest_of_a_division_stays_where_it_is() -> None:
    """Moving a count would exceed ``max_in_flight``, because messages for the lowered count are in flight already."""
    flow = make(3, 2500, 2500)
    flow._members[0].window, flow._members[1].window = 2, 1
    assert flow.shares(0) == {0: 2, 1: 1}
    flow._members[1].window = 2
    assert flow.shares(0) == {0: 2, 1: 1}
    flow._members[1].window = 2500
    assert flow.shares(0) == {0: 2, 1: 1}


def test_idle_connections_yield_until_a_message_is_received() -> None:
    flow = make(100, 2500, 2500, 2500)
    assert not receive(flow, 0, 9.0)
    assert flow.shares(11.0) == {0: 98, 1: 1, 2: 1}
    assert receive(flow, 1, 12.0)
    assert flow.shares(12.0) == {0: 98, 1: 1, 2: 1}, "its window starts again"
    flow._members[1].window = 2500
    assert flow.shares(12.0) == {0: 50, 1: 49, 2: 1}
    assert sorted(flow.shares(60.0).values()) == [1, 1, 1], "the windows of idle connections start again"
    assert not receive(flow, 99, 60.0)


def test_pause() -> None:
    flow = make(100, 2500, 2500)
    flow.paused = True
    assert flow.shares(0) == {0: 0, 1: 0}


def test_a_backoff_of_the_consumer_pauses_all_connections_then_one_probes() -> None:
    backoff = Backoff(BackoffOptions())
    flow = RdyDistributor[int](100, backoff)
    for number in range(3):
        add(flow, number, 2500, backoff)
    backoff.failed(0.0)
    assert flow.shares(1.0) == {0: 0, 1: 0, 2: 0}
    backoff.tick(2.0)
    probes = Counter[int]()
    for step in range(30):
        now = 2.0 + step * 0.5
        shares = flow.shares(now)
        assert sorted(shares.values()) == [0, 0, 1]
        probes[max(shares, key=shares.__getitem__)] += 1
    assert set(probes) == {0, 1, 2}, "no message is received, so they take turns"


def test_a_backoff_of_one_connection_does_not_slow_the_others() -> None:
    own = Backoff(BackoffOptions())
    flow = make(10, 2500)
    add(flow, 1, 2500, own)
    own.failed(0.0)
    assert flow.shares(0.0) == {0: 10, 1: 0}
    own.tick(2.0)
    assert flow.shares(2.0) == {0: 9, 1: 1}


def test_busy_connections_keep_their_turn_for_a_while_and_are_not_pinned() -> None:
    flow = make(1, 2500, 2500, 2500)
    first = max(flow.shares(0.0).items(), key=lambda item: item[1])[0]
    held = 0
    for step in range(100):
        now = step * 0.1
        receive(flow, first, now)
        if not flow.shares(now)[first]:
            break
        held += 1
    assert 40 < held < 60


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


@given(st.integers(1, 5), st.integers(6, 30))
def test_no_consumer_starves(total: int, count: int) -> None:
    flow = make(total, *[2500] * count)
    seen: set[int] = set()
    now = 0.0
    for _ in range(count * 20):
        now += 0.25
        shares = flow.shares(now)
        seen |= {key for key, share in shares.items() if share}
        for key in (key for key, share in shares.items() if share and key % 2):
            receive(flow, key, now)
    assert seen == set(range(count))


def test_held_messages_raise_the_total_to_twice_its_value_at_most() -> None:
    flow = make(10, 2500)
    flow.widen(4)
    assert flow.shares(0) == {0: 14}
    flow.widen(50)
    assert flow.shares(0) == {0: 20}
    flow.paused = True
    assert flow.shares(0) == {0: 0}


def fill(flow: RdyDistributor[int], number: int, now: float) -> bool:
    """Receive as many messages as RDY allows, and finish none."""
    share = flow.shares(now)[number]
    return flow.received(number, share, share, share, now)


def test_a_window_starts_at_one_and_doubles_while_a_handler_waits() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    seen = []
    for step in range(9):
        seen.append(flow.shares(step)[0])
        fill(flow, 0, step)
        assert bool(flow.exhausted) == (step < 7)
        flow.grow()
    assert seen == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_a_window_that_is_not_exhausted_does_not_grow() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    fill(flow, 0, 0.0)
    assert flow.exhausted
    flow.grow()
    for step in range(1, 20):
        assert flow.shares(step)[0] == 2
        flow.received(0, 1, 1, 1, step)
        assert not flow.exhausted


def test_messages_that_are_answered_at_once_exhaust_a_window_too() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    for number in range(8):
        flow.shares(0.0)
        flow.received(0, 1, 1, 1, 0.001 * number)
        flow.grow()
    assert flow.shares(0.01)[0] >= 4


def test_up_to_the_concurrency_no_handler_has_to_wait() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.concurrency = 6
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    assert [fill(flow, 0, 0.0) for _ in range(4)] == [True, True, True, False]
    assert flow.shares(0.0) == {0: 8}


def test_large_messages_lower_the_counts() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()), max_bytes=1000)
    for number in range(2):
        add(flow, number, 2500)
    assert flow.shares(0.0) == {0: 50, 1: 50}
    receive(flow, 0, 0.0, 1, size=100)
    assert flow.shares(0.0) == {0: 5, 1: 95}
    receive(flow, 1, 0.0, 1, size=10_000)
    assert flow.shares(0.0) == {0: 5, 1: 1}, "each may have one message"


def test_small_messages_raise_the_counts_again_after_large_ones() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()), max_bytes=1000)
    add(flow, 0, 2500)
    receive(flow, 0, 0.0, 1, size=500)
    assert flow.shares(0.0) == {0: 2}
    for step in range(1, 200):
        receive(flow, 0, step * 0.001, 1, size=10)
    assert flow.shares(0.2)[0] > 90


def test_a_lost_connection_limits_nothing() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    fill(flow, 0, 0.0)
    assert flow.exhausted
    flow.remove(0)
    assert not flow.exhausted


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), min_size=1, max_size=6),
)
def test_shares_use_what_there_is_within_their_limits_and_are_as_equal_as_these_allow(
    total: int, members: list[tuple[int, int]]
) -> None:
    limits = {number: limit for number, (limit, _) in enumerate(members)}
    shares = _share_out(total, limits, {number: current for number, (_, current) in enumerate(members)})
    assert sum(shares.values()) == min(total, sum(limits.values()))
    assert all(0 <= shares[number] <= limit for number, limit in limits.items())
    hungry = [shares[number] for number, limit in limits.items() if shares[number] < limit]
    assert max(shares.values()) <= min(hungry, default=10) + 1


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


def test_what_a_connection_used_to_do_does_not_count_after_it_was_removed() -> None:
    flow = make(100, 2500)
    flow._members[0].window = 4
    flow.shares(0.0)
    flow.received(0, 4, 4, 4, 0.0)
    assert len(flow.exhausted) == 1
    flow.pause(7, paused=True)
    flow.remove(7)
    assert len(flow.exhausted) == 1
    flow.remove(0)
    assert not flow.exhausted


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
    flow._members[0].window = 2500
    assert flow.shares(11.0) == {0: 28, 1: 1, 2: 1}
    flow.pause(0, paused=True)
    assert flow.shares(11.0) == {0: 0, 1: 8, 2: 8}, "those that may receive are idle"


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
        assert begun < 1100.0
    assert flow.shares(begun) == {first: 0, 1 - first: 1}
    assert flow.shares(begun + 0.9)[1 - first] == 1
    assert flow.shares(begun + 1.1) == {first: 1, 1 - first: 0}, "it received nothing"


def test_no_share_is_above_its_limit() -> None:
    assert _share_out(7, {0: 3, 1: 10}, {0: 3, 1: 0}) == {0: 3, 1: 4}
    assert _share_out(6, {0: 3, 1: 10}, {0: 3, 1: 0}) == {0: 3, 1: 3}
    assert _share_out(9, {0: 3, 1: 3}, {0: 3, 1: 0}) == {0: 3, 1: 3}
