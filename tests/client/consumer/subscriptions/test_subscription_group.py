"""Shares of max_in_flight, as they change with time."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import call, patch
from weakref import ref

import anyio
import anyio.lowlevel
import pytest

from nsqext.client.events import ClientEvent
from tests.support.clock import replace_clock
from tests.support.consumers import eventually
from tests.support.subscription_bench import Bench, Connection, ready, running

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription

pytestmark = pytest.mark.anyio


def settle(bench: Bench, now: list[float]) -> None:
    """Let servers read what was sent."""
    for _ in range(3):
        now[0] += 0.3
        bench.group.rebalance()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the clock."""
    time = [1000.0]
    replace_clock(monkeypatch, lambda: time[0])
    return time


async def test_rdy_is_shared_once_when_many_connections_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of them it took 3 s of the event loop with 1500 connections."""
    bench, connections = Bench(), [Connection(partition=number) for number in range(9)]
    bench.add(*connections)
    shares, calls = bench.group.flow.shares, list[float]()

    def counted(now: float, *counts: Any) -> Any:
        calls.append(now)
        return shares(now, *counts)

    monkeypatch.setattr(bench.group.flow, "shares", counted)
    for connection in connections:
        bench.group.remove(cast("Subscription", connection))
    bench.group.flush()
    assert len(calls) == 1


async def test_rdy_is_shared_as_connections_come_and_go(now: list[float]) -> None:
    bench, connections = Bench(), [Connection(partition=number) for number in range(3)]
    one, two, three = connections
    bench.add(one)
    assert ready(one) == [10]
    bench.add(two)
    assert ready(one, two) == [5, 0], "the server of the first may not have read its lower count"
    settle(bench, now)
    assert ready(one, two) == [5, 5]
    bench.add(three)
    settle(bench, now)
    assert sorted(ready(*connections)) == [3, 3, 4]
    one.received, one.requeued, one.timed_out, one.in_flight, one.received_bytes = 9, 2, 3, 4, 500
    assert bench.remove(one)
    assert not bench.remove(one)
    assert ready(two, three) == [5, 5]
    assert bench.group.closed_counts == (18, 4, 14, 1000)
    taking_over = Connection(partition=3)
    taking_over.ready = 4
    bench.group.retire([cast("Subscription", two), cast("Subscription", taking_over)])
    assert taking_over.ready == 0, "a bucket is not added before it is taken over"
    settle(bench, now)
    assert ready(two, three) == [0, 10]
    two.received, two.timed_out, two.in_flight, two.stopped = 9, 1, 5, True
    assert bench.remove(two)
    assert bench.group.closed_counts == (27, 9, 15, 1000), "what this client returned is not lost"
    assert bench.group.opened == 3


async def test_the_share_of_a_connection_is_two_messages_or_more() -> None:
    bench, shares = Bench(9), [Bench(9).group.share]
    for number in range(6):
        bench.add(Connection(partition=number))
        shares.append(bench.group.share)
    assert shares == [9, 9, 4, 3, 2, 2, 2]


async def test_a_paused_topic_gets_no_messages_on_connections_of_now_and_later(now: list[float]) -> None:
    bench, other = Bench(), Connection("u")
    before, after = Connection("t", 0), Connection("t", 1)
    bench.add(other, before)
    bench.group.pause("t", paused=True)
    settle(bench, now)
    assert ready(other, before) == [10, 0]
    bench.add(after)
    assert ready(other, before, after) == [10, 0, 0]
    bench.group.pause("t", paused=False)
    settle(bench, now)
    assert sorted(ready(other, before, after)) == [3, 3, 4]
    bench.add(Connection("t", 2), Connection("t", 3))
    settle(bench, now)
    assert ready(other, before, after) == [2, 2, 2]


async def test_a_backoff_gives_back_the_messages_that_are_not_due(now: list[float]) -> None:
    bench = Bench()
    one, two, other = Connection(partition=1), Connection(partition=2), Connection(partition=3)
    two.backoff = one.backoff
    bench.add(one, two, other)
    with patch.object(bench.group.early_messages(), "release") as release:
        for _ in range(2):
            one.backoff.failed(now[0])
            one.backoff.tick(inf)
            bench.group.rebalance()
    assert release.call_args_list == [call({one, two})], "when its level rises above 0"


async def test_each_change_of_a_backoff_is_reported_once(now: list[float]) -> None:
    bench = Bench(mode="consumer")
    one, two = Connection(partition=1, backoff=bench.backoff), Connection(partition=2)
    bench.add(one, two)
    bench.backoff.failed(now[0])
    two.backoff.failed(now[0])
    for _ in range(2):
        bench.group.rebalance()
    assert bench.events == [
        ClientEvent("backoff", None, None, "", "level 1"),
        ClientEvent("backoff", "t", 2, "n:2", "level 1"),
    ]
    assert ready(one, two) == [0, 0]
    bench.events.clear()
    for backoff in (bench.backoff, two.backoff):
        backoff.tick(inf)
        backoff.succeeded(now[0])
    settle(bench, now)
    assert [(event.node, event.detail) for event in bench.events] == [("", "level 0"), ("n:2", "level 0")]
    assert ready(one, two) == [5, 5]
    ended = ref(backoff)
    bench.remove(two)
    del two, backoff
    assert ended() is None, "the backoff of a connection that ended is not remembered"


async def test_a_tick_looks_silent_topics_up_and_ends_pauses(now: list[float]) -> None:
    bench = Bench()
    one, two = Connection("t", 1), Connection("u", 2)
    async with running(now, bench) as timers:
        bench.add(one, two)
        two.silent = True
        one.backoff.failed(now[0] + 1.0)
        until = one.backoff.until
        await timers.advance(2.0)
        assert ready(one, two) == [0, 10]
        await timers.advance(until - 0.001 - now[0])
        assert ready(one, two) == [0, 10]
        await timers.advance(1.0)
        assert ready(one, two) == [1, 9]
    assert bench.looked_up[0] == "u"
    one.live = False
    assert bench.group.subscriptions == [cast("Subscription", two)]


async def test_a_tick_knows_how_late_it_is(now: list[float]) -> None:
    bench, connection = Bench(), Connection()
    async with running(now, bench) as timers:
        bench.add(connection)
        await timers.advance(0.0)
        connection.busy = True
        now[0] += 0.1
        bench.group.wake_timer()
        await timers.settle()
        assert (bench.late, connection.ticks) == ([0.0, 0.0], 2)
        assert bench.group.earliest_receipt(now[0]) == now[0]
        await timers.stand_still(9.9)
        assert bench.late[2:] == pytest.approx([9.9 - 0.25])
        assert bench.group.earliest_receipt(now[0]) == 1000.1
    assert connection.ticks == 3


async def test_the_reads_of_a_turn_share_one_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, connections = Bench(100), [Connection(partition=number) for number in range(20)]
    bench.add(*connections)
    distributed = 0

    def shares(*_: object) -> dict[Subscription, int]:
        nonlocal distributed
        distributed += 1
        return {}

    monkeypatch.setattr(bench.flow, "received", lambda *_: True)
    monkeypatch.setattr(bench.flow, "shares", shares)
    for connection in connections:
        connection.unrecorded = 1, 10
        bench.group.received(cast("Subscription", connection))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.group.schedule.run)
        await eventually(lambda: distributed == 1)
        tasks.cancel_scope.cancel()


def widened(bench: Bench, connection: Connection) -> None:
    """Widen the window of a connection to its RDY limit."""
    while ready(connection) != [connection.max_ready]:
        bench.group.make_room(cast("Subscription", connection))


async def test_a_window_keeps_its_room_while_messages_of_any_connection_or_answers_pass(now: list[float]) -> None:
    """A server that is busy with other connections does not hold messages back."""
    bench, (wide, other) = Bench(100, initial_ready=1), (Connection(partition=1), Connection(partition=2))
    wide.max_ready = 50
    bench.add(wide, other)
    group = bench.group
    widened(bench, wide)
    wide.unrecorded, wide.excess, wide.received_at, wide.in_flight = (1, 10), 0.0, now[0], 1
    group.received(cast("Subscription", wide))
    wide.in_flight = 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.run_narrow)
        for step in range(20):
            now[0] += 0.0025
            if step % 2:
                other.unrecorded, other.received_at = (1, 10), now[0]
                group.received(cast("Subscription", other))
            else:
                group.flush_before_wait([])
            await anyio.sleep(0.005)
            assert ready(wide) == [50]
        now[0] += 1.0
        await eventually(lambda: ready(wide) == [1])
        tasks.cancel_scope.cancel()


async def test_pending_commands_of_a_turn_are_sent_together() -> None:
    bench, (one, two) = Bench(), (Connection(partition=1), Connection(partition=2))
    bench.add(one, two)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.group.schedule.run)
        for _ in range(2):
            for connection in (one, two):
                bench.group.needs_flush(cast("Subscription", connection))
            assert (one.flushes, two.flushes) == (0, 0)
            await eventually(lambda: (one.flushes, two.flushes) == (1, 1))
            one.flushes = two.flushes = 0
        tasks.cancel_scope.cancel()
