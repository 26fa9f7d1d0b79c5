"""When a node's timers run next."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.nsqd.node import SHORTEST_TICK, Node, PublishStats
from nsqext.protocol.frames import HEARTBEAT, FrameType
from tests.support.nsqd_sessions import Client, Clock, host, make_node, sized


class Due:
    """A scheduled thing with one deadline, as a partition with a message in flight."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.ticks = 0

    def tick(self) -> float | None:
        """Return the deadline once."""
        self.ticks += 1
        return self.deadline if self.ticks == 1 else None


class Times:
    """A node whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.node = Node("n1", NodeOptions(clock=lambda: self.now))
        self.node.tick()


def test_an_idle_node_ticks_often_enough_for_heartbeats() -> None:
    assert Times().node.seconds_to_tick() == 0.25


@pytest.mark.parametrize(("due_in", "seconds"), [(60.0, 0.25), (0.25, 0.25), (0.2, 0.2), (0.06, 0.06), (0.01, 0.05)])
def test_a_node_ticks_at_the_next_deadline_within_bounds(due_in: float, seconds: float) -> None:
    times = Times()
    times.node.schedule.add(Due(times.now + due_in))
    times.node.tick()
    assert times.node.seconds_to_tick() == pytest.approx(seconds)


def test_a_deadline_that_has_passed_or_changed_is_processed_at_the_shortest_interval() -> None:
    times = Times()
    item = Due(times.now + 10.0)
    times.node.schedule.add(item)
    assert times.node.seconds_to_tick() == SHORTEST_TICK
    times.node.tick()
    assert times.node.seconds_to_tick() == 0.25
    times.now += 11.0
    assert times.node.seconds_to_tick() == SHORTEST_TICK
    times.node.tick()
    assert item.ticks == 2
    assert times.node.seconds_to_tick() == 0.25


def test_a_node_ticks_when_a_heartbeat_is_due_or_a_silent_client_has_to_go() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node)
    client.send(sized("IDENTIFY", b'{"heartbeat_interval":1000}'))
    clock.seconds += 0.9
    node.tick()
    assert node.seconds_to_tick() == pytest.approx(0.1)  # heartbeat
    client.send(b"NOP\n")
    clock.seconds += 2.9
    node.tick()
    node.tick()
    clock.seconds += 0.03
    node.tick()
    assert node.seconds_to_tick() == pytest.approx(0.07)  # end of the three intervals without a command
    clock.seconds += 0.07
    node.tick()
    assert not client.open
    assert node.seconds_to_tick() == 0.25


def test_a_frozen_node_ticks_at_the_shortest_interval() -> None:
    times = Times()
    times.node.faults.freeze()
    assert times.node.seconds_to_tick() == SHORTEST_TICK
    times.node.faults.thaw()
    assert times.node.seconds_to_tick() == 0.25


def test_a_frozen_node_sends_nothing_and_continues_after_the_thaw() -> None:
    clock = Clock()
    node = make_node(clock)
    client = Client(node)
    assert client.ask(sized("IDENTIFY", b'{"heartbeat_interval":1000}')) == "OK"
    node.faults.freeze()
    clock.seconds += 1
    node.tick()
    assert client.receive() == []
    node.faults.thaw()
    node.tick()
    assert client.receive() == [(FrameType.RESPONSE, HEARTBEAT)]


def test_messages_are_counted_by_the_size_of_their_body() -> None:
    stats = PublishStats()
    stats.note([99, 100, 1023, 1024, 2047, 2048], 0)
    assert stats.sizes[:5] == [1, 2, 2, 1, 0]


def test_publishes_of_more_than_a_day_ago_are_forgotten() -> None:
    stats, hour = PublishStats(), 3600 * 1_000_000_000
    for number in range(30):
        stats.note([number], number * hour)
    assert stats.hours(29 * hour) == list(range(6, 28))
    assert stats.hours(23 * hour) == [0] * 6 + list(range(6, 22))


def test_a_seed_decides_what_a_consumer_samples_of_each_partition() -> None:
    def sampled(seed: int | None) -> list[list[bytes]]:
        node = make_node(seed=seed)
        found = []
        for partition in range(2):
            host(node, partition=partition)
            client = Client(node, f"127.0.0.1:{partition}")
            client.ask(sized("IDENTIFY", b'{"sample_rate":50,"output_buffer_size":-1}'))
            client.ask(b"SUB t ch %d\n" % partition)
            client.send(b"RDY 100\n")
            for number in range(100):
                Client(node).ask(sized(f"PUB t {partition}", b"%d" % number))
            found.append([data[26:] for data in client.messages()])
        return found

    first, second = sampled(1)
    assert 20 < len(first) < 80
    assert first != second
    assert sampled(1) == [first, second]
    assert sampled(2) != [first, second]
    assert sampled(None) != [first, second]


def test_a_deleted_topic_is_unregistered_with_its_channels() -> None:
    node = make_node()
    told: list[object] = []
    node.on_channel_deleted = lambda *names: told.append(names)
    node.on_topic_deleted = told.append
    for partition in range(2):
        host(node, partition=partition).partition.channel("ch")
    assert node.delete_topic("t")
    assert told == [("t", 0, "ch"), ("t", 1, "ch"), "t"]
    assert not node.delete_topic("t")
    assert len(told) == 3
