"""Windows of connections: how RDY grows to what handlers need, and shrinks to what servers have."""

from __future__ import annotations

from math import inf

import pytest

from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import RdyDistributor
from tests.support.rdy import make, widen


class Flow(RdyDistributor[int]):
    """A distributor that knows when messages were received last."""

    received_at = 0.0

    def received(self, member: int, count: int, size: int, in_flight: int, now: float, *rest: float) -> bool:
        self.received_at = now
        return super().received(member, count, size, in_flight, now, *rest)


def one_connection(window: int = 1, concurrency: int = 1, total: int = 200) -> Flow:
    """Return a distributor with a connection that handlers share."""
    flow = Flow(total, Backoff(BackoffOptions()))
    flow.concurrency = concurrency
    flow.add(0, 2500, Backoff(BackoffOptions()), 0.0)
    widen(flow, 0, (window - 1).bit_length())
    return flow


def fill(flow: RdyDistributor[int], number: int, now: float) -> bool:
    """Receive as many messages as RDY allows, and finish none."""
    share = flow.shares(now)[number]
    return flow.received(number, share, share, share, now)


def read(flow: Flow, in_flight: int, *, count: int = 1, waited: float = 0.5, excess: float = 0.0) -> int:
    """Receive messages of a server without a backlog, if nothing else is given; return the RDY count after the read."""
    now = flow.received_at + 0.1
    flow.shares(now)
    flow.received(0, count, count, in_flight, now, waited, excess)
    return flow.shares(now)[0]


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


def test_a_window_starts_at_one_and_doubles_while_a_handler_waits() -> None:
    flow = one_connection(total=100)
    seen = []
    for step in range(9):
        seen.append(flow.shares(step)[0])
        fill(flow, 0, step)
        assert bool(flow.exhausted) == (step < 7)
        flow.fit(lambda _: 1)
    assert seen == [1, 2, 4, 8, 16, 32, 64, 100, 100]


def test_a_window_that_is_not_exhausted_does_not_grow() -> None:
    flow = one_connection(total=100)
    fill(flow, 0, 0.0)
    assert flow.exhausted
    flow.fit(lambda _: 1)
    for step in range(1, 20):
        assert flow.shares(step)[0] == 2
        flow.received(0, 1, 1, 1, step)
        assert not flow.exhausted


def test_messages_that_are_answered_at_once_exhaust_a_window_too() -> None:
    flow = one_connection(total=100)
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


def test_what_a_connection_used_to_do_does_not_count_after_it_was_removed() -> None:
    flow = one_connection(total=100)
    widen(flow, 0, 2)
    flow.shares(0.0)
    flow.received(0, 4, 4, 4, 0.0)
    assert len(flow.exhausted) == 1
    flow.pause(7, paused=True)
    flow.remove(7)
    assert len(flow.exhausted) == 1
    flow.remove(0)
    assert not flow.exhausted


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
