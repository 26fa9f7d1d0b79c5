"""Distribution of max_in_flight over connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from heapq import heappop, heappush
from math import ceil, inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import SETTLED, TURN, RdyDistributor


def make(total: int, *limits: int) -> RdyDistributor[int]:
    """Return a distributor with connections 0, 1, … whose windows are open, without backoff."""
    flow = RdyDistributor[int](total, Backoff(BackoffOptions()))
    for number, limit in enumerate(limits):
        add(flow, number, limit)
    return flow


def add(flow: RdyDistributor[int], number: int, limit: int, backoff: Backoff | None = None, now: float = 0.0) -> None:
    """Add a connection whose window is open."""
    flow.add(number, limit, backoff or Backoff(BackoffOptions()), now)
    widen(flow, number)


def widen(flow: RdyDistributor[int], number: int, times: int = 12) -> None:
    """Double the window of a connection, up to its limit."""
    for _ in range(times):
        flow.widen_window(number)


def settled(flow: RdyDistributor[int], now: float) -> Mapping[int, int]:
    """Return the counts at a time at which servers have read all that was sent before."""
    for steps in (3, 2, 1):
        flow.shares(now - steps * SETTLED)
    return flow.shares(now)


def receive(flow: RdyDistributor[int], number: int, now: float, count: int = 1, size: int = 1) -> bool:
    """Receive messages that are finished immediately."""
    return flow.received(number, count, size * count, 0, now)


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
        (6.2, 6, 2),
        (6.3, 6, 4),
        (7.0, 5, 4),
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
        flow.fit(lambda _: 1)
    assert seen == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_a_window_that_is_not_exhausted_does_not_grow() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    fill(flow, 0, 0.0)
    assert flow.exhausted
    flow.fit(lambda _: 1)
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
        flow.fit(lambda _: 1)
    assert flow.shares(0.01)[0] >= 4


def test_up_to_the_concurrency_no_handler_has_to_wait() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.concurrency = 6
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    assert [fill(flow, 0, 0.0) for _ in range(4)] == [True, True, True, False]
    assert flow.shares(0.0) == {0: 8}


class Flow(RdyDistributor[int]):
    """A distributor that knows when messages were received last."""

    received_at = 0.0

    def received(self, member: int, count: int, size: int, in_flight: int, now: float, *rest: float) -> bool:
        self.received_at = now
        return super().received(member, count, size, in_flight, now, *rest)


def read(flow: Flow, in_flight: int, *, count: int = 1, waited: float = 0.5, excess: float = 0.0) -> int:
    """Receive messages of a server without a backlog, if nothing else is given; return the RDY count after the read."""
    now = flow.received_at + 0.1
    flow.shares(now)
    flow.received(0, count, count, in_flight, now, waited, excess)
    return flow.shares(now)[0]


def one_connection(window: int = 1, concurrency: int = 1) -> Flow:
    """Return a distributor with a connection that handlers share."""
    flow = Flow(200, Backoff(BackoffOptions()))
    flow.concurrency = concurrency
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    widen(flow, 0, (window - 1).bit_length())
    return flow


def test_messages_that_were_sent_at_once_do_not_widen_a_window() -> None:
    flow = one_connection()
    for _ in range(5):
        assert read(flow, 1) == 1
        assert not flow.fit(lambda _: 0)


@pytest.mark.parametrize(
    ("waited", "excess", "widens"),
    [
        (0.0, 0.0021, True),
        (0.0, 0.0019, False),
        (0.02, 0.021, True),
        (0.02, 0.019, False),
        (0.2, 0.051, True),
        (30.0, inf, True),
    ],
)
def test_messages_that_waited_at_the_server_widen_a_window(waited: float, excess: float, widens: bool) -> None:
    """They waited for an answer if they were published before the server became quiet."""
    flow = one_connection(4)
    read(flow, 4, count=4, waited=waited, excess=excess)
    flow.fit(lambda _: 0)
    assert (flow.shares(1.0)[0] == 8) is widens


def test_a_window_wider_than_the_backlog_shrinks_within_a_few_reads() -> None:
    """A server that collects messages until RDY is used up sends them when its timer fires, here after 25 ms."""
    flow, widths = one_connection(200), []
    for _ in range(9):
        width = flow.shares(1.0)[0]
        widths.append(read(flow, min(25, width), count=min(25, width), waited=0.025, excess=0.02))
    assert widths == [12, 6, 3, 1, 1, 1, 1, 1, 1]


def test_parts_of_a_burst_do_not_shrink_a_window() -> None:
    flow = one_connection(200)
    assert read(flow, 70, count=70, waited=0.0004, excess=0.01) == 200
    assert read(flow, 60, count=60, waited=0.004, excess=0.01) == 200


def after_burst(concurrency: int = 1, round_trip: float = 0.0, excess: float = 0.0) -> Flow:
    """Return a distributor whose connection has room for 64 messages at 1 s, with none in flight and a handler idle."""
    flow = one_connection(1, concurrency)
    flow.shares(0.0)
    flow.received(0, 1, 1, 1, 1.0, round_trip, inf)
    while flow.shares(1.0)[0] < 64:
        widen(flow, 0, 1)
    flow.exhausted.clear()
    flow.received(0, 1, 1, 1, 1.0, 0.0, excess)
    flow.fit(lambda _: 0)
    assert list(flow.wide) == [0]
    return flow


@pytest.mark.parametrize(
    ("round_trip", "excess", "quiet"), [(0.0, 0.0, 0.002), (0.03, 0.05, 0.032), (5.0, 0.0, 0.252), (0.0, inf, 0.05)]
)
def test_a_window_shrinks_while_nothing_is_sent_to_a_handler_that_waits(
    round_trip: float, excess: float, quiet: float
) -> None:
    """The server may hold a message back; an answer of the client takes a round trip to bring the next."""
    flow = after_burst(round_trip=round_trip, excess=excess)
    changed, due = flow.narrow(0.0, lambda _: 0)
    assert (changed, flow.shares(1.0)) == (False, {0: 64})
    assert due == pytest.approx(quiet)
    assert flow.narrow(quiet + 1e-6, lambda _: 0) == (True, inf)
    assert (flow.shares(2.0), flow.wide) == ({0: 1}, {})


def test_a_window_does_not_shrink_while_no_handler_waits() -> None:
    flow = after_burst(concurrency=2)
    assert flow.narrow(8.0, lambda _: 2) == (False, inf)
    assert (flow.shares(9.0), flow.wide) == ({0: 64}, {})
    flow = after_burst(concurrency=2)
    assert flow.narrow(8.0, lambda _: 1) == (True, inf)
    assert flow.shares(9.0) == {0: 2}


def test_a_removed_connection_is_not_narrowed() -> None:
    flow = after_burst()
    flow.remove(0)
    assert flow.narrow(8.0, lambda _: 0) == (False, inf)


def test_a_window_grows_to_what_the_server_has_and_shrinks_to_it() -> None:
    flow = one_connection(4)
    flow.shares(1.0)
    flow.received(0, 4, 4, 4, 1.0, 0.0, 0.003, 5.5)
    flow.fit(lambda _: 0)
    assert flow.shares(1.0) == {0: 5}
    flow.received(0, 5, 5, 5, 1.1, 0.0, 0.0, 2.9)
    assert flow.shares(1.1) == {0: 2}
    flow.received(0, 2, 2, 2, 1.2, 0.0, 0.003, 0.4)
    assert flow.shares(1.2) == {0: 1}, "a message at least"


def test_each_handler_that_waits_has_room_for_a_message() -> None:
    flow = one_connection(concurrency=3)
    assert [read(flow, in_flight) for in_flight in (1, 2, 3)] == [2, 3, 1]
    flow = one_connection(concurrency=3)
    assert [read(flow, in_flight, waited=0.0) for in_flight in (1, 2, 3)] == [2, 3, 3], "it did not wait for the server"


def test_reads_of_a_connection_for_one_message_are_not_watched() -> None:
    flow = make(100, 1, 10)
    flow.concurrency = 4
    flow.shares(1000.0)
    for key in (0, 1):
        flow.received(key, 1, 1, 1, 1000.0, waited=1.0, excess=1.0)
    assert [flow.watches(key) for key in (0, 1)] == [False, True], "RDY of an ordered topic is always 1"


def test_after_an_answer_the_next_message_is_sent_at_once_again() -> None:
    flow = one_connection(concurrency=3)
    assert [read(flow, in_flight) for in_flight in (1, 2)] == [2, 3]
    for unanswered, room in ((1, 2), (0, 1)):
        assert flow.fit(lambda _, count=unanswered: count)  # type: ignore[misc]
        assert flow.shares(1.0)[0] == room
    assert not flow.fit(lambda _: 0)


def test_a_handler_that_waits_behind_messages_in_flight_has_room() -> None:
    """As a batch that is not full."""
    flow = one_connection()
    read(flow, 1, waited=0.0)
    assert flow.fit(lambda _: 1)
    assert flow.shares(1.0)[0] == 2


def test_a_connection_that_was_removed_or_retired_has_no_window() -> None:
    flow = one_connection()
    read(flow, 1, excess=inf)
    flow.retire(0)
    assert not flow.fit(lambda _: 1)
    flow.remove(0)
    flow.widen_window(0)
    assert flow.shares(1.0) == {}


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


def test_what_a_connection_used_to_do_does_not_count_after_it_was_removed() -> None:
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    widen(flow, 0, 2)
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


class Servers:
    """Servers that read commands late, with messages for all connections, and handlers that take some time.

    Attributes:
        waited: the longest time without a message of a connection that has some.
    """

    def __init__(self, flow: RdyDistributor[int], chance: Random, busy: set[int], handling: float) -> None:
        self.flow = flow
        self.chance = chance
        self.busy = busy
        self.handling = handling
        self.now = 0.0
        self.ready: Counter[int] = Counter()
        self.in_flight: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.read_at: dict[int, float] = {}
        self.last: dict[int, float] = {}
        self.sent: dict[int, int] = {}
        self.waited = 0.0

    def at(self, when: float, act: Callable[[], None]) -> None:
        self.number += 1
        heappush(self.events, (when, self.number, act))

    def send(self, key: int, act: Callable[[], None]) -> None:
        """Let a server read a command, in order, after less than `SETTLED`."""
        due = max(self.read_at.get(key, 0.0), self.now + self.chance.random() * SETTLED * 0.99)
        self.read_at[key] = due
        self.at(due, act)

    def rebalance(self) -> None:
        for key, share in self.flow.shares(self.now, self.received).items():
            if self.sent.get(key) != share:
                self.sent[key] = share
                self.send(key, partial(self.set_ready, key, share))

    def set_ready(self, key: int, share: int) -> None:
        self.ready[key] = share
        self.pump(key)

    def pump(self, key: int) -> None:
        while key in self.busy and self.in_flight[key] < self.ready[key]:
            self.in_flight[key] += 1
            self.waited = max(self.waited, self.now - self.last.get(key, 0.0))
            self.last[key] = self.now
            self.at(self.now + self.chance.random() * 0.01, partial(self.receive, key))

    def receive(self, key: int) -> None:
        self.received[key] += 1
        if self.flow.received(key, 1, 1, self.received[key], self.now):
            self.rebalance()
        self.flow.fit(self.in_flight.__getitem__)
        self.at(self.now + self.chance.random() * self.handling, partial(self.answer, key))

    def answer(self, key: int) -> None:
        self.received[key] -= 1
        self.send(key, partial(self.finish, key))

    def finish(self, key: int) -> None:
        self.in_flight[key] -= 1
        self.pump(key)

    def run(self, seconds: float, check: Callable[[], None]) -> None:
        """Run for some seconds, with a tick each quarter of a second."""
        end = self.now + seconds
        for tick in range(int(seconds * 4)):
            self.at(self.now + tick / 4, self.rebalance)
        while self.events and self.events[0][0] < end:
            self.now, _, act = heappop(self.events)
            act()
            check()
        self.now = end


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 20), st.sampled_from([0.001, 0.5, 20.0]))
def test_the_messages_in_flight_by_the_count_of_the_servers_are_never_more(
    seed: int, total: int, count: int, handling: float
) -> None:
    chance, backoff = Random(seed), Backoff(BackoffOptions())
    flow = RdyDistributor[int](total, backoff)
    servers = Servers(flow, chance, set(), handling)

    allowed, lowered_at = total, 0.0

    def check() -> None:
        nonlocal allowed
        in_flight = sum(servers.in_flight.values())
        if servers.now > lowered_at + 3 * SETTLED:
            allowed = max(flow.max_in_flight, min(allowed, in_flight))
        assert in_flight <= allowed

    for number in range(count):
        flow.add(number, 2500, backoff, servers.now)
        servers.busy.add(number)
        servers.rebalance()
        if chance.random() < 0.3:
            servers.run(2.0, check)
    for _ in range(6):
        chosen = chance.randrange(count)
        what = chance.choice(["pause", "busy", "backoff", "retire", "change"])
        if what == "pause":
            flow.pause(chosen, paused=chance.random() < 0.5)
        elif what == "busy":
            servers.busy ^= {chosen}
        elif what == "change":
            flow.max_in_flight, lowered_at = chance.randint(1, total), servers.now
            allowed = max(allowed, flow.max_in_flight)
        elif what == "retire" and chance.random() < 0.2:
            flow.retire(chosen)
        else:
            backoff.failed(servers.now)
        servers.rebalance()
        servers.run(chance.random() * 8, check)
        backoff.tick(servers.now)
        if chance.random() < 0.5:
            backoff.level, backoff.until = 0, 0.0


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 12), st.sampled_from([0.01, 1.0, 8.0]))
def test_no_connection_with_messages_starves(seed: int, total: int, count: int, handling: float) -> None:
    backoff = Backoff(BackoffOptions())
    flow = RdyDistributor[int](total, backoff)
    servers = Servers(flow, Random(seed), set(range(0, count, 2)) | {count - 1}, handling)
    for number in range(count):
        flow.add(number, 2500, backoff, 0.0)
    bound = ceil(count / total) * (TURN + handling + 4 * SETTLED)
    servers.run(3 * bound, lambda: None)
    assert servers.last.keys() == servers.busy
    assert servers.waited <= bound
    assert min(servers.last.values()) >= 2 * bound


def test_a_window_does_not_grow_during_the_backoff_of_its_connection() -> None:
    backoff = Backoff(BackoffOptions(jitter=False))
    flow = RdyDistributor[int](100, Backoff(BackoffOptions()))
    flow.add(0, 2500, backoff, 0.0)
    assert flow.shares(0.0) == {0: 1}
    backoff.failed(0.0)
    flow.received(0, 1, 1, 1, 1.0, 0.0, 10.0)
    assert not flow.fit(lambda _: 1)
    backoff.tick(inf)
    backoff.succeeded(2.0)
    assert flow.shares(2.0) == {0: 1}
