"""Responses to messages and switches of a channel, as captured from the real server."""

from __future__ import annotations

from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench
from tests.support.tables import table

SCENES = {
    "RDY is a window": """
        a sub 2; pub m0 m1 m2 m3; a gets m0 m1; a fin 2; a gets m2; a rdy 0; a fin 3 4; a gets; a rdy 1; a gets m3""",
    "a new channel starts at the end": "pub before; a sub; a gets; pub after; a gets after",
    "REQ follows the message read ahead": "a sub; pub m0 m1 m2; a req 2 0; a gets m0/1 m1/1; a fin 3; a gets m0/2",
    "REQ with a delay": "a sub; pub m0; a req 2 1.5; wait 1.4; a gets m0/1; wait 0.2; a gets m0/2",
    "messages that are not in flight": """
        a sub; a fin 99 ! Message ID not in flight; a touch 99 ! Message ID not in flight;
        a req 99 0 ! Message ID not in flight""",
    "messages of other clients": """
        a sub id=7; b sub id=8; pub m0; a gets m0; b fin 2 ! client does not own message : 7 vs 8;
        b req 2 0 ! client does not own message : 7 vs 8; b req 2 1 ! client does not own message 2: 7 vs 8;
        b touch 2 ! client does not own message : 7 vs 8; a fin 2""",
    "a deferred message has no owner": """
        a sub id=10; pub m0; a req 2 60; a req 2 0 ! client does not own message : 0 vs 10;
        a req 2 0.1 ! Message is deferred; a fin 2 ! client does not own message : 0 vs 10; do finish_forced 2;
        has depth=0""",
    "setoffset discards messages in flight except the message read ahead": """
        a sub 2; pub m0 m1 m2 m3; a fin 2; a gets m0 m1 m2; do set_offset virtual_queue:0; a gets m3 m0;
        a fin 3 ! Message ID not in flight; a fin 4 ! Message ID not in flight; a fin 2; a gets m1; a rdy 10;
        a gets m2""",
    "empty keeps the message read ahead": "channel; pub m0 m1 m2; do empty; a sub 10; pub new; a gets m0 new",
    "TOUCH extends a timeout up to 15 minutes": """
        a sub msg_timeout=600.0; pub m0; wait 500; a touch 2; wait 399; a gets m0/1; wait 2; a gets m0/2""",
    "a timeout": """
        a sub msg_timeout=1.0; pub m0; wait 0.9; a touch 2; wait 0.9; a gets m0/1; wait 0.2; a gets m0/2;
        has timeout_count=1""",
    "TOUCH may shorten the timeout": """
        a sub msg_timeout=60.0 touch_timeout=1.0; pub m0; wait 3; a touch 2; wait 1.1; a gets m0/1 m0/2""",
    "a finished message that was read ahead is not delivered": """
        a sub 2; pub m0 m1; a fin 3; topic do suspend; topic do resume; b sub; b gets m0; b fin 2; b gets""",
    "messages of a client are counted by their outcome": """
        a sub 10; pub a b c d; a fin 2; a req 3 60; client a messages=4 finished=1 requeued=1 in_flight=2""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script), scene


def test_a_message_has_all_fields() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    stored = bench.publish("one", "second")
    first, second = consumer.take()
    assert (first.internal_id, first.attempts, first.offset, first.size) == (2, 1, 0, 33)
    assert (second.internal_id, second.offset, second.size) == (3, 33, 36)
    assert (stored.message_id, stored.offset, stored.size) == (2, 0, 69)


def test_messages_of_a_lost_client_are_redelivered_with_their_attempts() -> None:
    bench = Bench()
    first = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2")
    assert first.bodies() == ["m0", "m1"]
    bench.channel().unsubscribe(first)
    second = bench.consume(2, ready=10)
    (ahead, *requeued) = second.attempts()
    assert ahead == ("m2", 1), "the message that was read ahead is delivered first"
    assert sorted(requeued) == [("m0", 1), ("m1", 1)]
