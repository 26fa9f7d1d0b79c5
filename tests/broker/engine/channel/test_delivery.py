"""Delivery: tags, windows, sampling, filters, clients that connect and disconnect."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from random import Random

import orjson
import pytest

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.messages import EXT_JSON, EXT_TAG
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench, Consumer
from tests.support.tables import table

_READ_AHEAD = """given extend=True; a sub tag=A extend; b sub 10 extend; pub N0 A1@A A2@A N1; a gets A1;
    b gets N0;"""

SCENES = {
    "tagged messages are delivered to clients of that tag": """
        given extend=True; a sub 10 tag=A extend; b sub 10 extend; pub A1@A B1@B N1 A2@A; a gets A1 A2;
        b gets B1 N1; a end; pub A3@A; b has A1/1 A2/1 A3/1""",
    "a busy client of a tag blocks later messages": """
        given extend=True; a sub tag=A extend; b sub 10 extend; pub A1@A A2@A N1; a gets A1; b gets; a fin 2;
        a gets A2; b gets N1""",
    "a new client of the tag receives the message read ahead": """
        given extend=True; a sub 0 extend; pub B1@B; b sub tag=B extend; b gets B1; a rdy 1; a gets""",
    "set_offset special:-1: the position moves when a client of its tag has taken the message read ahead": f"""
        {_READ_AHEAD} do set_offset special:-1; has depth=4 in_flight_count=2; a fin 3; a gets A2; b gets""",
    "set_offset virtual_queue:0: the position moves when a client of its tag has taken the message read ahead": f"""
        {_READ_AHEAD} do set_offset virtual_queue:0; has depth=4 in_flight_count=2; a fin 3; a gets A2 A1; b gets N0""",
    "empty: the position moves when a client of its tag has taken the message read ahead": f"""
        {_READ_AHEAD} do empty; has depth=4 in_flight_count=2; a fin 3; a gets A2; b gets""",
    "set_skipped True: the position moves when a client of its tag has taken the message read ahead": f"""
        {_READ_AHEAD} do set_skipped True; has depth=4 in_flight_count=2; a fin 3; a gets A2; b gets""",
    "redeliver_unfinished: the position moves when a client of its tag has taken the message read ahead": f"""
        {_READ_AHEAD} do redeliver_unfinished; has depth=4 in_flight_count=2; a fin 3; a gets A2 A2; b gets N0 N1""",
    "two moves of the position follow each other when a client of its tag has taken the message read ahead": f"""
        {_READ_AHEAD} do set_offset virtual_queue:0; do set_offset special:-1; a fin 3; a gets A2; b gets""",
    "tags of clients before a change of the leader do not count": """
        given extend=True; a sub tag=A extend; channel tmp#ephemeral; pub m0@A m1@A; topic do suspend; channels ch;
        topic do resume; b sub 2 extend; b gets m0 m1""",
    "tags are ignored on plain topics": "a sub tag=A; pub m0; a gets m0",
    "filters are ignored on plain topics": """
        a sub ext_filter={'type':1,'filter_ext_key':'k','filter_data':'v'}; pub m0; a gets m0""",
    "clients take turns": "a sub 2; b sub 2; c sub 2; pub a b c d e f; a gets a d; b gets b e; c gets c f",
    "a limit over HTTP": """
        a sub 0; pub a b c d e f; do set_client_limit '127.' 2; a gets; a rdy 5; a gets a b;
        do set_client_limit '127.' 0; a fin 2 3; a gets; do set_client_limit '10.' 9; a gets;
        do set_client_limit '' 1; a gets c""",
    "timeouts narrow the window to one": """
        a sub 3 msg_timeout=1.0; pub a b c; wait 1.1; wait 1.1; wait 1.1; wait 1.1;
        client a window=1 in_flight=1 timed_out=9; has timeout_count=9""",
    "messages that time out together come back by the ends of their timeouts": """
        a sub 2 msg_timeout=10.0; pub m0 m1; a gets m0 m1; wait 5; a touch 2; wait 20; a gets m1 m0""",
    "pause stops delivery": "a sub 5; do set_paused True; pub m0; a gets; do set_paused False; a gets m0",
    "skip discards messages behind the message read ahead": """
        channel; pub m0 m1; do set_skipped True; has depth=0; pub m2; has depth=0; a sub 5; a gets m0""",
    "a start position counts for the first client only": """
        pub m0 m1 m2; a sub 10 start=msgcount:2; a gets m1 m2; b sub 10 start=virtual_queue:0; b gets;
        a gets""",
    "a client with a new window moves to the end: a fin 2": "a sub 5; pub m0; b sub 5; a fin 2; pub m1; b gets m1",
    "a client with a new window moves to the end: a req 2 0": "a sub 5; pub m0; b sub 5; a req 2 0; pub m1; b gets m0",
    "a client with a new window moves to the end: a rdy 4": "a sub 5; pub m0; b sub 5; a rdy 4; pub m1; b gets m1",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script), scene


@pytest.mark.parametrize(
    ("header", "version", "goes_to_tagged"),
    [
        (b'{"##client_dispatch_tag":"t"}', EXT_JSON, True),
        (b'{"##client_dispatch_tag":"t","a":"\xff"}', EXT_JSON, True),  # invalid JSON, observed on the real server
        (b'{"a":"x\ny","##client_dispatch_tag":"t"}', EXT_JSON, True),
        (b'{"##client_dispatch_tag":5}', EXT_JSON, False),
        (b'{"##client_dispatch_tag":', EXT_JSON, False),
        (b"[]", EXT_JSON, False),
        (b"t", EXT_TAG, True),
    ],
)
def test_headers_that_contain_a_tag(header: bytes, version: int, goes_to_tagged: bool) -> None:
    bench = Bench(extend=True)
    wanting = bench.consume(ready=1, tag="t", extend=True)
    other = bench.consume(2, ready=1, extend=True)
    bench.publish(NewMessage(b"m", header=header, version=version))
    assert bool(wanting.got) is goes_to_tagged
    assert bool(other.got) is not goes_to_tagged


@pytest.mark.parametrize(("rate", "rolls"), [(10, [0.1099, 0.11, 0.12, 0.99]), (1, [0.0199, 0.02, 0.10, 0.99])])
def test_sampling_finishes_other_messages(rate: int, rolls: list[float]) -> None:
    drawn = cycle(rolls)

    class Rolls(Random):
        def random(self) -> float:
            return next(drawn)

    bench = Bench(random=Rolls())
    consumer = bench.consume(ready=10, sample_rate=rate)
    bench.publish("m0", "m1", "m2", "m3")
    assert consumer.bodies() == ["m0"]
    bench.finish(consumer, [2])
    assert bench.channel().stats().depth == 0


def test_a_message_that_was_delayed_is_no_longer_sampled() -> None:
    class Highest(Random):
        def random(self) -> float:
            return 0.99

    bench = Bench(random=Highest())
    first = bench.consume(1)
    bench.publish("m0")
    bench.channel().requeue(first, 2, 1000)
    bench.channel().unsubscribe(first)
    sampling = bench.consume(2, sample_rate=1)
    bench.wait(1000)
    assert sampling.bodies() == ["m0"]


def test_filtered_messages_are_finished() -> None:
    bench = Bench(extend=True)
    wanted = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    consumer = bench.consume(ready=10, extend=True, ext_filter=wanted)
    for value in ("v", "w"):
        bench.publish(NewMessage(value.encode(), header=orjson.dumps({"k": value}), version=EXT_JSON))
    assert consumer.bodies() == ["v"]
    bench.finish(consumer, [2])
    assert bench.channel().stats().depth == 0


def test_failures_narrow_the_window_and_successes_open_it_again() -> None:
    bench = Bench()
    consumer = bench.consume(ready=6)
    bench.publish(*"abcdefghijklmnopqr")
    channel = bench.channel()
    for counter in range(100, 109):
        with pytest.raises(Refusal):
            channel.finish(consumer, counter)
    assert channel.clients[1].window == 2
    for counter in range(2, 7):
        bench.finish(consumer, [counter])
    assert channel.clients[1].window == 6
    assert len(consumer.take()) == 6 + 5


@pytest.mark.parametrize("switch", ["paused", "skipped"])
def test_a_switch_is_stored_at_once(tmp_path: Path, switch: str) -> None:
    bench = Bench(data_path=tmp_path)
    channel = bench.channel()
    bench.wait(1)
    for on in (True, False):
        getattr(channel, f"set_{switch}")(on)
        assert getattr(Bench(data_path=tmp_path).channel(), switch) is on


def test_an_ephemeral_channel_is_deleted_with_its_last_client() -> None:
    bench = Bench()
    gone: list[str] = []
    bench.partition.on_channel_deleted = gone.append
    first, second = bench.consume(channel="tmp#ephemeral"), bench.consume(2, channel="tmp#ephemeral")
    channel = bench.channel("tmp#ephemeral")
    channel.unsubscribe(first)
    assert gone == []
    channel.unsubscribe(second)
    assert gone == ["tmp#ephemeral"]
    assert bench.partition.channels == {}


def test_a_deleted_channel_closes_its_clients_and_refuses_new_ones() -> None:
    bench = Bench()
    consumer, channel = bench.consume(), bench.channel()
    bench.partition.delete_channel("ch")
    bench.partition.delete_channel("ch")
    assert consumer.has_closed
    bench.publish("m0")
    assert consumer.bodies() == []
    with pytest.raises(Refusal, match=r"^Consume is disabled currently$"):
        channel.subscribe(Consumer(2))
    channel.unsubscribe(consumer)
    assert bench.channel() is not channel


def test_an_upgrade_stalls_old_consumers() -> None:
    bench = Bench()
    old = bench.consume(ready=5)
    bench.publish("before")
    bench.partition.upgrade_extend()
    bench.publish("after")
    channel = bench.channel()
    assert old.bodies() == ["before"]
    assert channel.clients[old.id].stalled
    assert channel.stats().in_flight_count == 2
    new = bench.consume(2, ready=5, extend=True)
    assert not channel.clients[new.id].stalled
    channel.unsubscribe(old)
    messages = sorted(new.take(), key=lambda message: message.offset)  # requeued in random order
    assert [(message.body, message.version, message.size) for message in messages] == [
        (b"before", 0, 36),
        (b"after", 0, 36),
    ]


def test_a_subscriber_may_finish_inside_deliver() -> None:
    bench = Bench()

    class Eager(Consumer):
        def deliver(self, message: object) -> None:
            super().deliver(message)  # type: ignore[arg-type]
            bench.finish(self, [self.got[-1].internal_id])

    eager = Eager()
    bench.channel().subscribe(eager)
    bench.channel().set_ready(eager, 1)
    bench.publish(*"abcdef" * 200)
    assert eager.bodies() == list("abcdef" * 200)
