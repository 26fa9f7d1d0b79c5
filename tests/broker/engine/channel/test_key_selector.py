"""Ranges and order of a key_failover channel: when borders are moved, and which message a client receives first."""

from __future__ import annotations

from math import inf

import orjson
import pytest

from nsqext.broker.engine.channel.in_flight import Delivery
from nsqext.broker.engine.channel.key_failover import KeyFailoverChannel, KeySelector
from nsqext.broker.engine.options import ChannelKind
from nsqext.broker.engine.storage.log import LogEntry, StartPosition
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.key_ranges import position_of
from nsqext.protocol.messages import EXT_JSON, KEY_HEADER
from nsqext.protocol.record import Record
from tests.support.engine_partition import Bench, Consumer

LOW = [name for name in map(str, range(400)) if position_of(name.encode()) >> 31 == 0]
"""Keys of the lower half of the hash space."""
HIGH = next(name for name in map(str, range(400)) if position_of(name.encode()) >> 31)


def keyed(key: str, body: str = "") -> NewMessage:
    """Return a message with a key."""
    return NewMessage((body or key).encode(), header=orjson.dumps({KEY_HEADER: key}), version=EXT_JSON)


def make_channel() -> tuple[Bench, KeyFailoverChannel]:
    """Return an extend topic and its channel of the type."""
    bench = Bench(extend=True)
    channel = bench.partition.channel("ch", ChannelKind("key_failover", fixed=True))
    assert isinstance(channel, KeyFailoverChannel)
    return bench, channel


def test_borders_are_looked_at_two_seconds_after_a_change_of_the_clients() -> None:
    bench = Bench()
    keys = KeySelector(bench.clock, KEY_HEADER)
    clients = [Consumer(number) for number in range(4)]
    keys.add(clients[0])
    assert keys.balance_due == inf, "one client has nothing to give away"
    for client in clients[1:3]:
        bench.now += 1
        keys.add(client)
        assert keys.balance_due == bench.now + 2
    bench.now += 1
    keys.remove(clients[2])
    keys.remove(clients[3])
    assert keys.balance_due == bench.now + 2
    keys.remove(clients[1])
    assert keys.balance_due == inf


def test_borders_are_looked_at_again_while_messages_are_read() -> None:
    bench, channel = make_channel()
    for number in (1, 2):
        bench.consume(number, 9, extend=True)
    began = bench.now
    bench.wait(1)
    bench.publish(keyed(HIGH))
    assert bench.partition.tick() == channel.keys.balance_due == began + 2
    bench.wait(1)
    assert channel.keys.balance_due == inf
    bench.wait(3)
    bench.publish(keyed(LOW[0]))
    assert channel.keys.balance_due == bench.now + 2


def test_messages_that_wait_follow_the_borders() -> None:
    bench, channel = make_channel()
    busy, idle = bench.consume(1, 0, extend=True), bench.consume(2, 400, extend=True)
    bench.publish(*map(keyed, LOW))
    bench.wait(1.9)
    assert idle.bodies() == []
    bench.wait(0.1)
    (low, high) = channel.stats().key_ranges
    assert 0.2 < low.high == high.low < 0.4
    moved = [key for key in LOW if position_of(key.encode()) >= low.high * 2**32]
    assert idle.bodies() == moved
    channel.set_ready(busy, 400)
    assert busy.bodies() == [key for key in LOW if key not in moved]


@pytest.mark.parametrize("joins", [False, True])
def test_a_client_receives_messages_of_its_keys_in_the_order_of_the_queue(joins: bool) -> None:
    bench, channel = make_channel()
    only = bench.consume(1, 0, extend=True)
    bench.consume(2, 9, extend=True)
    bench.publish(*[keyed(LOW[number], body) for number, body in ((0, "A1"), (1, "B1"), (0, "A2"), (1, "B2"))])
    if joins:
        bench.consume(3, 0, extend=True, tag="red")
    channel.set_ready(only, 9)
    assert only.bodies() == ["A1", "B1", "A2", "B2"]


def test_messages_are_counted_when_they_are_read_not_when_they_are_requeued() -> None:
    bench, channel = make_channel()
    only = bench.consume(1, 10, extend=True)
    bench.publish(*[keyed(LOW[0])] * 10)
    channel.requeue(only, 2, 0)
    assert [found.rate for found in channel.stats().key_ranges] == [2.0], "ten messages in five seconds"


def test_a_removed_client_takes_nothing() -> None:
    keys = KeySelector(lambda: 0.0, KEY_HEADER)
    gone = Consumer(1)
    gone.window = 1
    keys.add(gone)
    keys.offer(gone)
    keys.put(Delivery(LogEntry(Record(0, 1, 0, b""), 0, 30, 1)))
    assert (keys.can_take, keys.next_ready()) == (True, gone)
    keys.remove(gone)
    keys.offer(gone)
    assert (keys.can_take, keys.next_ready(), keys.next_for(gone)) == (False, None, None)


def test_a_move_to_the_start_delivers_in_order_what_waited_before() -> None:
    bench, channel = make_channel()
    only = bench.consume(1, 1, extend=True)
    bench.consume(2, 9, extend=True)
    bench.publish(keyed(LOW[0], "m0"), keyed(LOW[1], "m1"), keyed(LOW[1], "m2"), keyed(HIGH))
    assert (only.bodies(), channel.stats().replay_count) == (["m0"], 2)
    channel.set_offset(StartPosition("virtual_queue", 0))
    channel.set_ready(only, 9)
    assert only.bodies() == ["m0", "m1", "m2"]
    assert channel.stats().replay_count == 0


def test_a_delay_blocks_later_messages_but_not_earlier_ones() -> None:
    bench, channel = make_channel()
    old = bench.consume(1, 2, extend=True)
    bench.publish(keyed(HIGH, "m0"), keyed(HIGH, "m1"))
    new = bench.consume(2, 9, extend=True)
    channel.requeue(old, 3, 50)
    channel.requeue(old, 2, 0)
    assert (new.bodies(), channel.stats().held_keys) == (["m0"], 1), "the new owner does not wait for the delay"
    bench.finish(new, [2])
    assert channel.stats().held_keys == 0
    bench.publish(keyed(HIGH, "m2"))
    assert new.bodies() == []
    bench.wait(50)
    assert new.bodies() == ["m1", "m2"]
    bench.finish(new, [3, 4])
    assert channel.keys._key_queues == {}, "keys without messages take no memory"


def test_an_earlier_delayed_message_blocks_although_a_later_one_is_delayed_too() -> None:
    bench, channel = make_channel()
    only = bench.consume(1, 3, extend=True)
    bench.publish(*[keyed(HIGH, body) for body in ("m0", "m1", "m2")])
    assert only.bodies() == ["m0", "m1", "m2"]
    channel.requeue(only, 4, 50)
    channel.requeue(only, 2, 50)
    channel.requeue(only, 3, 0)
    assert only.bodies() == []
    bench.wait(50)
    assert only.bodies() == ["m0", "m1", "m2"]
