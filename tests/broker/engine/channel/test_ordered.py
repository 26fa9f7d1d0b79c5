"""Ordered channels: one message at a time, redelivered until it is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.broker.coordinator.replication import hand_over_channels
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench
from tests.support.tables import table

if TYPE_CHECKING:
    import pytest

_PRIMED = "z sub 0 ordered id=99; z end;"
"""A channel after its first SUB_ORDERED."""
_BACKLOG = "channel; pub m0 m1 m2;"
"""A channel before its first SUB_ORDERED, with three unread messages."""


SCENES = {
    "one message is in flight for any RDY": f"""
        {_PRIMED} pub m0 m1; a sub 100 ordered; b sub 100 ordered; a gets m0; b gets; a fin 2; a gets; b gets m1""",
    "RDY 0 delivers nothing": f"{_PRIMED} a sub 0 ordered; pub m0; a gets; a rdy 1; a gets m0",
    "the backlog has the message in flight": f"{_PRIMED} a sub ordered; pub m0 m1; a gets m0; has depth=2 backlogs=2",
    "the first SUB_ORDERED delivers the first message twice, for any RDY": f"""
        {_BACKLOG} a sub 100 ordered; a gets m0/1 m0/1; a fin 2; a gets m1/1; a fin 3; a gets m2/1""",
    "a restarted server has no ordered channel and no counters": f"""
        {_BACKLOG} a sub ordered; a fin 2; a req 3 0; a gets m0/1 m0/1 m1/1 m1/2; topic do restart; a closed;
        has requeue_count=0 in_flight_count=0; b sub ordered; b gets m1/1 m1/1""",
    "the first message can be requeued": f"""
        {_BACKLOG} a sub ordered; a req 2 0; a gets m0/1 m0/1 m0/2; a fin 2; a gets m1/1""",
    "the first message survives its client": f"""
        {_BACKLOG} a sub ordered; b sub ordered; a gets m0/1 m0/1; b gets; a end; b gets m0/1""",
    "a delay is ignored until the timeout": f"""
        {_PRIMED} pub m0 m1; a sub 10 ordered msg_timeout=5.0; a req 2 1; a req 999 1; wait 4; a gets m0/1; wait 1;
        a gets m0/2""",
    "another client receives the same message": f"""
        {_PRIMED} pub m0 m1; a sub ordered; b sub ordered; a req 2 0; b gets m0/2; b end; a gets m0/1 m0/2""",
    "a plain subscription is ordered, too": f"{_PRIMED} pub m0 m1; a sub 10; a gets m0",
    "setoffset under a consumer": f"""
        {_PRIMED} pub m0 m1; a sub 5 ordered; a fin 2; a gets m0 m1; do set_offset virtual_queue:0; a gets m0;
        a fin 3 ! Message ID not in flight; a fin 2; a gets m1""",
    "setorder=false closes the clients": f"""
        {_PRIMED} pub m0 m1; a sub 5 ordered; do set_ordered False; a closed; a gets m0; a end; b sub 5;
        b gets m0 m1""",
}


@table(
    "script",
    [
        """given delayed_threshold=1.0; a sub 5; pub m0 m1; a req 2 100; a gets m0 m1; do set_ordered True; a gets m1;
        do set_offset virtual_queue:0; a gets m0; do requeue_delayed 3600.0; a gets; a fin 2; a gets m1""",
        """given delayed_threshold=1.0; a sub 5; pub m0 m1; a req 2 30; a gets m0 m1; a fin 3; do set_ordered True;
        wait 31; a gets; has delayed_queue_count=1 requeue_count=0""",
    ],
)
def test_a_channel_that_becomes_ordered_does_not_read_its_delayed_queue(script: str) -> None:
    assert ChannelScript.checks(script)


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script, ordered=True), scene


def test_a_channel_of_a_plain_topic_becomes_ordered() -> None:
    bench = ChannelScript.play("a sub 10; pub m0 m1; a gets m0 m1; do set_ordered True; a gets m0")
    assert bench.channel().ordered


def backlogged() -> Bench:
    """A channel before its first SUB_ORDERED, with three unread messages."""
    bench = Bench(ordered=True)
    bench.channel()
    bench.publish("m0", "m1", "m2")
    return bench


def test_a_new_leader_delivers_the_first_message_twice() -> None:
    old, new = backlogged(), backlogged()
    consumer = old.consume(ready=1, ordered=True)
    old.finish(consumer, [2])
    hand_over_channels(old.partition, new.partition)
    new.partition.resume()
    assert new.consume(2, ordered=True).attempts() == [("m1", 1), ("m1", 1)]


def test_messages_at_other_clients_are_redelivered_when_a_channel_becomes_ordered() -> None:
    bench = Bench()
    first = bench.consume(1, ready=1)
    bench.publish("m0", "m1", "m2")
    second = bench.consume(2, ready=1, ordered=True)
    bodies = first.bodies() + second.bodies()
    assert bodies.count("m0") == 2
    assert bodies.count("m2") == 0


def test_an_acknowledged_position_inside_a_message_moves_to_a_message(caplog: pytest.LogCaptureFixture) -> None:
    bench = backlogged()
    cursor = bench.channel().cursor
    cursor.acked.reset(7, 1)  # the log was another one when m0 was finished
    cursor.rewind(forget=True)
    before = bench.partition.changes
    consumer = bench.consume(ready=1, ordered=True)
    assert consumer.attempts()[-1] == ("m1", 1)
    assert bench.partition.changes == before + 2, "m0 is finished, and the position moves"
    assert [record.message for record in caplog.records] == [
        "ch: the acknowledged position 7 is not the start of a message; it moves to 32"
    ]
    assert bench.channel().acked.count == 1
    bench.finish(consumer, [3])
    assert consumer.attempts() == [("m2", 1)]
