"""When the timer of a consumer ticks, what a tick does, and what its subscriptions add up to, without connections."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.statistics import ConsumerConnection, connections_of, statistics_of
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.pulse import Pulse
from nsqext.errors import InvalidState
from nsqext.transport.options import ConnectionOptions
from tests.support.clock import replace_clock
from tests.support.subscription_bench import Bench, Connection, ready, running

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.tasks import BackgroundTasks

_NOW = 1000.0
_LONG = 54.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the clock."""
    time = [_NOW]
    replace_clock(monkeypatch, lambda: time[0])
    return time


def test_statistics_add_up_open_and_ended_subscriptions(now: list[float]) -> None:
    bench, one, two = Bench(), Connection(partition=1), Connection("u", 2)
    bench.add(one, two)
    one.received, one.requeued, one.timed_out, one.in_flight, one.received_bytes = 20, 2, 3, 4, 500
    bench.remove(one)
    two.received, two.requeued, two.timed_out, two.in_flight, two.received_bytes = 100, 10, 20, 30, 1000
    bench.group.reconnects = 7
    two.backoff.level = 1
    found = statistics_of(bench.group)
    assert (found.received, found.requeued, found.lost, found.in_flight) == (120, 12, 27, 30)
    assert (found.finished, found.bytes_received, found.reconnects) == (51, 1500, 7)
    assert (found.lookup_age, found.lookup_failures) == (1.5, 2)
    assert found.connections == (
        ConsumerConnection(topic="u", partition=2, node="n:2", ready=two.ready, in_flight=30, backoff=1),
    )
    two.live = False
    assert connections_of(bench.group) == ()


def test_the_last_receipt_of_a_topic_is_that_of_any_of_its_subscriptions(now: list[float]) -> None:
    bench, times = Bench(), [("t", 5.0), ("t", 7.0), ("t", 6.0), ("u", 9.0)]
    for number, (topic, time) in enumerate(times):
        connection = Connection(topic, number)
        connection.received_at, connection.upgradable = time, number == 2
        bench.add(connection)
    assert bench.group.upgradable_topics() == {"t": 7.0}


def test_a_bucket_of_keys_never_waits_for_a_turn(now: list[float]) -> None:
    bench, connections = Bench(1), [Connection(partition=number) for number in range(3)]
    for connection in connections:
        connection.key_sharing = KeySharing.TAGS
    bench.add(*connections)
    assert ready(*connections) == [1, 1, 1]
    assert [one.watched for one in connections] == [False] * 3


def test_reads_are_recorded_where_they_change_something(now: list[float]) -> None:
    bench, connection = Bench(100, initial_ready=1), Connection()
    bench.add(connection)
    one, group = cast("Subscription", connection), bench.group
    assert ready(connection) == [1]
    connection.received_at, connection.unrecorded, connection.in_flight = _NOW + 1, (1, 10), 1
    group.received(one)
    assert ready(connection) == [1], "no task waits for messages"
    group.flush_before_wait(["a message"])
    assert ready(connection) == [1]
    group.flush_before_wait([])
    assert ready(connection) == [2]
    group.received(one)
    group.flush_before_wait([])
    assert ready(connection) == [2], "the window was not exhausted"
    connection.unrecorded, connection.in_flight = (2, 20), 2
    group.received(one)
    group.flush_before_wait([])
    assert ready(connection) == [4]


@pytest.mark.anyio
async def test_a_read_wakes_a_timer_that_rests_and_no_other_read_does(now: list[float]) -> None:
    first, bench, connection = Bench(), Bench(100), Connection()
    async with running(now, first, bench) as timers:
        bench.add(connection)
        await timers.advance(12.0)
        assert (bench.pause, bench.group.idle) == (60.0, True)
        bench.ticks.clear()
        for _ in range(40):
            connection.received_at, connection.unrecorded, connection.in_flight = now[0], (1, 10), 1
            bench.group.received(cast("Subscription", connection))
            connection.in_flight = 0
            bench.group.flush_before_wait([])
            await timers.advance(0.01)
        assert bench.ticks == pytest.approx([_NOW + 12.0, _NOW + 12.25])
        assert (bench.pause, bench.group.idle) == (0.25, False)
        connection.received_at, connection.unrecorded = _NOW, (1, 10)
        bench.group.received(cast("Subscription", connection))  # the last read of a connection that ended, for example
        await timers.advance(0.2)
        assert (bench.ticks[-1], bench.pause) == pytest.approx((_NOW + 12.5, 0.25)), "it received 0.11 s ago"


def test_no_command_is_recorded_in_another_event_loop(now: list[float]) -> None:
    bench, connection = Bench(), Connection()

    def refuse() -> None:
        raise InvalidState("another event loop")

    bench.group.tasks = cast("BackgroundTasks", SimpleNamespace(check_event_loop=refuse))
    with pytest.raises(InvalidState):
        bench.group.needs_flush(cast("Subscription", connection))
    bench.group.flush()
    assert connection.flushes == 0


@pytest.mark.anyio
async def test_every_answer_is_sent_at_once_for_a_minute_after_a_block_of_the_event_loop(now: list[float]) -> None:
    bench, connection = Bench(), cast("Subscription", Connection())
    async with running(now, bench) as timers:
        await timers.stand_still(64.0)
    assert bench.late == [59.0], "it rests for five seconds as the first consumer of its event loop"
    for pause, expected in ((0.0, True), (0.0, True), (59.0, True), (0.0, True), (2.0, True), (0.0, False)):
        now[0] += pause
        assert bench.group.needs_flush(connection, answer=True) is expected


def test_pending_answers_are_sent_before_a_wait(now: list[float]) -> None:
    bench, connection = Bench(), Connection()
    bench.add(connection)
    bench.group.needs_flush(cast("Subscription", connection))
    bench.group.flush_before_wait(["a message"])
    bench.group.flush_before_wait([])
    assert connection.flushes == 1


@pytest.mark.anyio
async def test_how_long_the_timer_rests(now: list[float]) -> None:
    # the timer of the first consumer of an event loop notices standstills, and rests for 5 seconds at most
    first, bench, one, two = Bench(), Bench(10), Connection(partition=1), Connection(partition=2)
    async with running(now, first, bench) as timers:

        async def pause() -> tuple[float, bool]:
            bench.group.wake_timer()
            await timers.settle()
            return round(bench.pause, 6), bench.group.idle

        assert (first.pause, bench.pause) == (5.0, 60.0)
        bench.add(one)
        bench.add(two)
        assert await pause() == (0.25, False), "what the first gave up is given to the second"
        await timers.advance(1.0)
        assert await pause() == (60.0, True)
        for busy in (one, two):
            busy.busy = True
            assert await pause() == (0.25, False)
            busy.busy = False
        for backoff in (bench.backoff, one.backoff, two.backoff):
            backoff.level = 1
            await pause()
            await timers.advance(1.0)
            assert (bench.group.flow.unsettled, await pause()) == (False, (0.25, False))
            backoff.level = 0
        await timers.advance(1.0)
        for each in (one, two):
            each.received_at, each.unrecorded = now[0], (1, 10)
            bench.group.received(cast("Subscription", each))
        await timers.advance(0.2)
        assert await pause() == (0.25, False), "it has just received messages"
        await timers.advance(0.1)
        assert await pause() == (9.71, True), "until its window is reset"
        await timers.advance(9.6)
        assert await pause() == (0.25, True)
        await timers.advance(0.2)
        assert await pause() == (60.0, True)
        two.silence_due = now[0] + 30.0
        assert await pause() == (30.0, True)
        await timers.advance(29.9)
        assert await pause() == (0.25, True)
        bench.flow.max_in_flight = 1
        two.silence_due = inf
        bench.group.rebalance()
        await timers.advance(1.0)
        assert await pause() == (0.26, True), "the turn of an idle connection ends"


@pytest.mark.anyio
async def test_what_a_connection_gave_up_wakes_the_timer_which_gives_it_to_others(now: list[float]) -> None:
    bench, one = Bench(10), Connection()
    group = bench.group
    async with running(now, bench) as timers:
        bench.add(one)
        await timers.advance(1.0)
        bench.ticks.clear()
        group.rebalance()
        await timers.settle()
        assert (group.idle, bench.ticks) == (True, [])
        bench.flow.pause(cast("Subscription", one), paused=True)
        group.rebalance()
        await timers.settle()
        assert (group.idle, bench.ticks, bench.pause) == (False, [now[0]], 0.25)


@pytest.mark.parametrize(
    ("timeout", "heartbeat", "pause"), [(60.0, 30.0, 3.75), (16.0, 30.0, 2.0), (60.0, 60.0, 5.0), (1.0, 30.0, 0.25)]
)
@pytest.mark.anyio
async def test_subscriptions_without_messages_are_ticked_some_times_in_a_timeout(
    now: list[float], timeout: float, heartbeat: float, pause: float
) -> None:
    bench, one, two = Bench(), Connection(partition=1), Connection(partition=2)
    assert bench.group.longest_pause() == 5.0
    one.msg_timeout = two.msg_timeout = 100.0
    one.request.options.connection = ConnectionOptions(heartbeat_interval=60.0)
    two.msg_timeout, two.request.options.connection = timeout, ConnectionOptions(heartbeat_interval=heartbeat)
    async with running(now, bench) as timers:
        bench.group.wake_timer()
        await timers.advance(1.0)
        bench.add(one, two)
        assert bench.group.longest_pause() == pause
        for seconds, ticks in ((0.0, 0), (0.25, 1), (pause - 0.01, 1), (0.01, 2)):  # soon: its timeout may be shorter
            await timers.advance(seconds)
            bench.group.wake_timer()
            await timers.settle()
            assert one.ticks == ticks
        one.busy = True
        bench.group.wake_timer()
        await timers.settle()
        assert (one.ticks, two.ticks) == (3, 2)


@pytest.mark.anyio
async def test_a_pause_of_a_backoff_wakes_the_timer_in_time(now: list[float]) -> None:
    bench = Bench()
    short, long = (Backoff(BackoffOptions(base=base, jitter=False)) for base in (0.1, 1.0))
    async with running(now, bench) as timers:
        bench.add(one := Connection(partition=1, backoff=long), Connection(partition=2, backoff=short))
        one.busy = True
        await timers.advance(1.0)
        bench.ticks.clear()
        long.failed(now[0])
        bench.group.rebalance()
        await timers.settle()
        assert bench.ticks == [], "the next tick is early enough"
        bench.group.wake_timer()
        await timers.advance(0.1)
        bench.ticks.clear()
        short.failed(now[0])
        bench.group.rebalance()
        await timers.settle()
        assert (bench.ticks, round(bench.pause, 6)) == ([now[0]], 0.2)
        await timers.advance(0.2)
        assert (short.until, round(long.until, 6)) == (0.0, _NOW + 3.0)
        await timers.advance(2.0)
        assert long.until == 0.0
        assert min(abs(tick - _NOW - 3.0) for tick in bench.ticks) < 1e-6, "not a tick later"


@pytest.mark.anyio
async def test_silent_topics_are_looked_up_by_the_ticks_of_any_consumer(now: list[float]) -> None:
    first, bench, connection = Bench(), Bench(), Connection()
    extended = [Connection("u"), Connection("u")]
    for each in (connection, *extended):
        each.msg_timeout, each.request.options.connection = 100.0, ConnectionOptions(heartbeat_interval=60.0)
    connection.upgradable, connection.received_at = True, _NOW + 0.5
    first.add(extended[0])
    bench.add(extended[1])
    async with running(now, first, bench) as timers:
        await timers.advance(0.5)
        assert first.pause == 5.0, "its topic has extend support"
        bench.add(connection)
        await timers.settle()
        assert first.pause == pytest.approx(4.0 + 0.01), "the timer that ticks for all is woken"
        await timers.advance(3.9)
        assert (first.looked_up, bench.looked_up) == ([], [])
        await timers.advance(0.2)
        assert (first.looked_up, bench.looked_up) == ([], ["t"])
        await timers.advance(2.8)
        assert bench.looked_up == ["t"]
        await timers.advance(1.2)
        assert bench.looked_up == ["t", "t"]


@pytest.mark.anyio
async def test_bytes_that_are_read_after_a_standstill_may_have_arrived_before_it(now: list[float]) -> None:
    first, second = Bench(), Bench()
    async with running(now, first, second) as timers:
        await timers.advance(_LONG)
        since, due, group = first.ticks[-1], first.ticks[-1] + first.pause, second.group
        for at, received in ((due, due), (due + 0.24, due + 0.24), (due + 0.26, since), (_NOW + 60.3, _NOW)):
            assert group.earliest_receipt(at) == received
        assert group.on_time_until == pytest.approx(due + 0.49), "a quarter of a second after the last that was on time"
        now[0] = due
        await timers.stand_still(4.0)
        assert (round(first.late[-1], 6), second.late) == (4.0, [])
        stood = now[0]
        for at, received in ((stood + 0.04, since), (stood + 0.06, stood + 0.06)):
            assert [one.group.earliest_receipt(at) for one in (first, second)] == [received, received]


@pytest.mark.anyio
async def test_a_timer_that_rests_is_woken_and_ends_with_its_consumer(now: list[float]) -> None:
    bench, other = Bench(), Bench()
    async with running(now, bench, other) as timers:
        pulse = Pulse.current()
        assert list(pulse.members) == [bench.group, other.group]
        assert (bench.late, other.late) == ([], [])
        other.group.wake_timer()
        await timers.settle()
        assert (bench.late, other.late) == ([], [0.0])
    assert not pulse.members
