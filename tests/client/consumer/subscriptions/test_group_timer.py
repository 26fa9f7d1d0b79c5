"""When the timer of a consumer ticks, what a tick does, and what its subscriptions add up to, without connections."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import BackoffOptions
from nsqext.client.consumer.statistics import ConsumerConnection, connections_of, statistics_of
from nsqext.client.consumer.subscriptions import flush_schedule
from nsqext.client.consumer.subscriptions import subscription_group as module
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.errors import InvalidState
from nsqext.transport.options import ConnectionOptions
from tests.support.subscription_bench import Bench, Connection, ready

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.tasks import BackgroundTasks

_NOW = 1000.0


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the clock."""
    time = [_NOW]
    for each in (module, flush_schedule):
        monkeypatch.setattr(each, "_clock", lambda: time[0])
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
    bench, connection = Bench(100), Connection()
    bench.flow._initial = 1
    bench.add(connection)
    one, group = cast("Subscription", connection), bench.group
    assert ready(connection) == [1]
    group.idle = True
    woken = group._due_at = inf
    connection.received_at, connection.unrecorded, connection.in_flight = _NOW + 1, (1, 10), 1
    group.received(one)
    assert (group.idle, group._due_at, group._received_at) == (False, _NOW, _NOW + 1)
    assert ready(connection) == [1], "no task waits for messages"
    group._due_at = woken
    group.flush_before_wait(["a message"])
    assert ready(connection) == [1]
    group.flush_before_wait([])
    assert ready(connection) == [2]
    group.received(one)
    assert group._due_at == inf, "it is awake"
    group.flush_before_wait([])
    assert ready(connection) == [2], "the window was not exhausted"
    connection.unrecorded, connection.in_flight = (2, 20), 2
    group.received(one)
    group.flush_before_wait([])
    assert ready(connection) == [4]


def test_a_backoff_is_reported_once_also_when_its_connection_is_replaced(now: list[float]) -> None:
    bench = Bench(mode="consumer")
    one, two = (Connection(partition=number, backoff=bench.backoff) for number in (1, 2))
    bench.add(one)
    bench.backoff.failed(_NOW)
    bench.group.rebalance()
    bench.remove(one)
    bench.add(two)
    assert [event.detail for event in bench.events] == ["level 1"]


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
    ticked = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.group.run_timer, lambda *_: ticked.set())
        await anyio.lowlevel.checkpoint()
        bench.group.wake_timer()
        now[0] += 4.0
        with anyio.fail_after(25):
            await ticked.wait()
        tasks.cancel_scope.cancel()
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


def test_how_long_the_timer_rests(now: list[float]) -> None:
    bench, one, two = Bench(10), Connection(partition=1), Connection(partition=2)
    group = bench.group
    assert (group._pause(_NOW), group.idle) == (60.0, True)
    bench.add(one)
    bench.add(two)
    assert group._pause(_NOW) == 0.25, "what the first gave up is given to the second"
    for step in (0.0, 0.3, 0.6):
        now[0] = _NOW + step
        group.rebalance()
    assert group._pause(_NOW) == 60.0
    for busy in (one, two):
        busy.busy = True
        assert (group._pause(_NOW), group.idle) == (0.25, False)
        busy.busy = False
    for backoff in (bench.backoff, one.backoff, two.backoff):
        backoff.level = 1
        assert (group._pause(_NOW), group.idle) == (0.25, False)
        backoff.level = 0
    group._received_at = _NOW
    assert (group._pause(_NOW + 0.2), group.idle) == (0.25, False), "it has just received messages"
    assert group._pause(_NOW + 0.3) == pytest.approx(9.71), "until its window is reset"
    assert group.idle
    assert group._pause(_NOW + 9.9) == 0.25
    assert group._pause(_NOW + 10.1) == 60.0
    two.silence_due = _NOW + 50.0
    assert group._pause(_NOW + 20.0) == 30.0
    assert group._pause(_NOW + 49.9) == 0.25
    bench.flow.max_in_flight = 1
    assert group._pause(_NOW + 20.0) == pytest.approx(0.26), "the turn of an idle connection ends"


def test_what_a_connection_gave_up_wakes_the_timer_which_gives_it_to_others(now: list[float]) -> None:
    bench, one = Bench(10), Connection()
    group = bench.group
    bench.add(one)
    group.idle, group._due_at = True, inf
    group.rebalance()
    assert (group.idle, group._due_at) == (True, inf)
    bench.flow.pause(cast("Subscription", one), paused=True)
    group.rebalance()
    assert (group.idle, group._due_at) == (False, _NOW)
    assert group._pause(_NOW) == 0.25


@pytest.mark.parametrize(
    ("timeout", "heartbeat", "pause"), [(60.0, 30.0, 3.75), (16.0, 30.0, 2.0), (60.0, 60.0, 5.0), (1.0, 30.0, 0.25)]
)
def test_subscriptions_without_messages_are_ticked_some_times_in_a_timeout(
    now: list[float], timeout: float, heartbeat: float, pause: float
) -> None:
    bench, one, two = Bench(), Connection(partition=1), Connection(partition=2)
    assert bench.group.longest_pause() == 5.0
    one.msg_timeout = two.msg_timeout = 100.0
    one.request.options.connection = ConnectionOptions(heartbeat_interval=60.0)
    two.msg_timeout, two.request.options.connection = timeout, ConnectionOptions(heartbeat_interval=heartbeat)
    bench.add(one, two)
    assert bench.group.longest_pause() == pause
    for time, ticked in ((_NOW, 1), (_NOW + pause - 0.01, 1), (_NOW + pause, 2)):
        bench.group._tick(time)
        assert len(one.ticks) == ticked
    one.busy = True
    bench.group._tick(_NOW + pause + 0.01)
    assert (len(one.ticks), len(two.ticks)) == (3, 2)


def test_a_pause_of_a_backoff_wakes_the_timer_in_time(now: list[float]) -> None:
    bench = Bench()
    short, long = Backoff(BackoffOptions(base=0.1)), Backoff(BackoffOptions(base=1.0))
    group = bench.group
    assert group._until_probe(_NOW) == inf
    bench.add(Connection(partition=1, backoff=long), Connection(partition=2, backoff=short))
    group._due_at = inf
    long.failed(_NOW)
    group.rebalance()
    assert (group._due_at, group._until_probe(_NOW + 0.5)) == (inf, 1.5)
    short.failed(_NOW)
    group.rebalance()
    assert (group._due_at, group._until_probe(_NOW)) == pytest.approx((_NOW, 0.2))
    assert group._until_probe(_NOW + 3.0) == 0.0
    group._due_at = inf
    now[0] += 3.0
    group.rebalance()
    assert group._due_at == now[0]


def test_silent_topics_are_looked_up_by_the_ticks_of_any_consumer(now: list[float]) -> None:
    other, bench, connection = Bench(), Bench(), Connection()
    other.add(Connection())
    assert other.group._pulse.silence.due == inf, "its topic has extend support"
    connection.upgradable, connection.received_at, connection.msg_timeout = True, _NOW, 100.0
    connection.request.options.connection = ConnectionOptions(heartbeat_interval=60.0)
    pulse = bench.group._pulse
    pulse.members[bench.group] = None
    pulse.due_at = _NOW + 60.0
    bench.group._due_at = inf
    bench.add(connection)
    assert (pulse.silence.due, bench.group._due_at) == (_NOW + 4.0, _NOW)
    assert pulse.limit(bench.group, 60.0, _NOW) == pytest.approx(4.01)
    assert (pulse.ticked_at, pulse.due_at) == pytest.approx((_NOW, _NOW + 4.01))
    assert pulse.limit(bench.group, 60.0, _NOW + 5.0) == 0.0
    bench.group._tick(_NOW + 3.9)
    assert bench.looked_up == []
    bench.group._tick(_NOW + 4.0)
    assert bench.looked_up == ["t"]
    assert _NOW + 7.0 <= pulse.silence.due <= _NOW + 8.0


def test_bytes_that_are_read_after_a_standstill_may_have_arrived_before_it() -> None:
    group = Bench().group
    pulse = group._pulse
    group._ticked_at, group._due_at = 98.0, 100.0
    pulse.ticked_at, pulse.due_at = 99.0, 99.9
    for now, received in ((100.0, 100.0), (100.14, 100.14), (100.2, 99.0), (100.3, 98.0)):
        assert group.earliest_receipt(now) == received
    assert group.on_time_until == pytest.approx(100.39), "a quarter of a second after the last read that was on time"
    pulse.stood_since, pulse.stood_until = 97.0, 101.0
    assert [group.earliest_receipt(now) for now in (100.9, 101.0)] == [97.0, 98.0]


@pytest.mark.anyio
async def test_a_timer_that_rests_is_woken_and_ends_with_its_consumer() -> None:
    bench, other = Bench(), Bench()
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for one in (bench, other):
                tasks.start_soon(one.group.run_timer, one.ticked)
                while one.group not in one.group._pulse.members:
                    await checkpoint()
            assert other.group._pulse is bench.group._pulse
            for _ in range(5):
                await checkpoint()
            assert (bench.late, other.late) == ([], [])
            other.group.wake_timer()
            while not other.late:
                await checkpoint()
            assert bench.late == []
            assert other.late[0] < 0.25
            tasks.cancel_scope.cancel()
    assert not bench.group._pulse.members
