"""Delivery: tags, windows, sampling, filters, clients that connect and disconnect."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from random import Random

import orjson
import pytest

from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.messages import EXT_JSON, EXT_TAG
from tests.support.engine_partition import Bench, Consumer, tagged


def test_tagged_messages_are_delivered_to_clients_of_that_tag() -> None:
    bench = Bench(extend=True)
    wanting = bench.consume(ready=10, tag="tagA", extend=True)
    other = bench.consume(2, ready=10, extend=True)
    bench.publish(tagged("A1", "tagA"), tagged("B1", "tagB"), "N1", tagged("A2", "tagA"))
    assert wanting.bodies() == ["A1", "A2"]
    assert other.bodies() == ["B1", "N1"]
    bench.channel().unsubscribe(wanting)
    bench.publish(tagged("A3", "tagA"))
    assert sorted(other.attempts()) == [("A1", 1), ("A2", 1), ("A3", 1)]  # requeued in random order


def test_a_busy_tagged_client_blocks_later_messages() -> None:
    bench = Bench(extend=True)
    wanting = bench.consume(ready=1, tag="tagA", extend=True)
    other = bench.consume(2, ready=10, extend=True)
    bench.publish(tagged("A1", "tagA"), tagged("A2", "tagA"), "N1")
    assert (wanting.bodies(), other.bodies()) == (["A1"], [])
    bench.finish(wanting, [2])
    assert (wanting.bodies(), other.bodies()) == (["A2"], ["N1"])


def test_a_new_client_with_the_tag_receives_the_message_read_ahead() -> None:
    bench = Bench(extend=True)
    other = bench.consume(ready=0, extend=True)
    bench.publish(tagged("B1", "B"))
    wanting = bench.consume(2, ready=1, tag="B", extend=True)
    assert wanting.bodies() == ["B1"]
    bench.channel().set_ready(other, 1)
    assert other.bodies() == []


@pytest.mark.parametrize(
    ("move", "arguments", "then"),
    [
        ("set_offset", [StartPosition("special", -1)], []),
        ("set_offset", [StartPosition("virtual_queue", 0)], ["N0"]),
        ("empty", [], []),
        ("set_skipped", [True], []),
        ("redeliver_unfinished", [], ["N0", "N1"]),
    ],
)
def test_the_position_moves_when_a_client_of_its_tag_has_taken_the_message_read_ahead(
    move: str, arguments: list[object], then: list[str]
) -> None:
    bench = Bench(extend=True)
    wanting = bench.consume(ready=1, tag="tagA", extend=True)
    other = bench.consume(2, ready=10, extend=True)
    bench.publish("N0", tagged("A1", "tagA"), tagged("A2", "tagA"), "N1")
    assert (wanting.bodies(), other.bodies()) == (["A1"], ["N0"])
    channel = bench.channel()
    getattr(channel, move)(*arguments)
    assert (channel.stats().depth, channel.stats().in_flight_count) == (4, 2)
    bench.finish(wanting, [3])
    assert (wanting.bodies()[:1], other.bodies()) == (["A2"], then)


def test_tags_of_clients_before_a_change_of_the_leader_do_not_count() -> None:
    bench = Bench(extend=True)
    bench.consume(ready=1, tag="A", extend=True)
    bench.channel("tmp#ephemeral")
    bench.publish(tagged("m0", "A"), tagged("m1", "A"))
    bench.partition.suspend()
    assert list(bench.partition.channels) == ["ch"]
    bench.partition.resume()
    assert bench.consume(2, ready=2, extend=True).bodies() == ["m0", "m1"]


def test_tags_are_ignored_on_plain_topics() -> None:
    bench = Bench()
    consumer = bench.consume(tag="tagA")
    bench.publish("m0")
    assert consumer.bodies() == ["m0"]


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


def test_clients_take_turns() -> None:
    bench = Bench()
    consumers = [bench.consume(number, ready=2) for number in (1, 2, 3)]
    bench.publish(*"abcdef")
    assert [consumer.bodies() for consumer in consumers] == [["a", "d"], ["b", "e"], ["c", "f"]]


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


def test_filters_count_on_topics_with_headers_only() -> None:
    bench = Bench()
    consumer = bench.consume(ext_filter={"type": 1, "filter_ext_key": "k", "filter_data": "v"})
    bench.publish("m0")
    assert consumer.bodies() == ["m0"]


def test_filtered_messages_are_finished() -> None:
    bench = Bench(extend=True)
    wanted = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    consumer = bench.consume(ready=10, extend=True, ext_filter=wanted)
    for value in ("v", "w"):
        bench.publish(NewMessage(value.encode(), header=orjson.dumps({"k": value}), version=EXT_JSON))
    assert consumer.bodies() == ["v"]
    bench.finish(consumer, [2])
    assert bench.channel().stats().depth == 0


def test_a_limit_over_http() -> None:
    bench = Bench()
    consumer = bench.consume(ready=0)
    bench.publish(*"abcdef")
    channel = bench.channel()
    channel.set_client_limit("127.", 2)
    assert consumer.bodies() == []
    channel.set_ready(consumer, 5)
    assert consumer.bodies() == ["a", "b"]
    channel.set_client_limit("127.", 0)
    bench.finish(consumer, [2, 3])
    assert consumer.bodies() == []
    channel.set_client_limit("10.", 9)
    assert consumer.bodies() == []
    channel.set_client_limit("", 1)
    assert consumer.bodies() == ["c"]


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


def test_timeouts_narrow_the_window_to_one() -> None:
    bench = Bench()
    bench.consume(ready=3, msg_timeout=1.0)
    bench.publish("a", "b", "c")
    for _ in range(4):
        bench.wait(1.1)
    client = bench.channel().clients[1]
    assert (client.window, client.in_flight, client.timed_out) == (1, 1, bench.channel().stats().timeout_count)


def test_pause_stops_delivery() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    bench.channel().set_paused(True)
    bench.publish("while paused")
    assert consumer.bodies() == []
    bench.channel().set_paused(False)
    assert consumer.bodies() == ["while paused"]


@pytest.mark.parametrize("switch", ["paused", "skipped"])
def test_a_switch_is_stored_at_once(tmp_path: Path, switch: str) -> None:
    bench = Bench(data_path=tmp_path)
    channel = bench.channel()
    bench.wait(1)
    for on in (True, False):
        getattr(channel, f"set_{switch}")(on)
        assert getattr(Bench(data_path=tmp_path).channel(), switch) is on


def test_skip_discards_messages_behind_one_that_was_read_ahead() -> None:
    bench = Bench()
    channel = bench.channel()
    bench.publish("read ahead", "behind")
    channel.set_skipped(True)
    assert channel.stats().depth == 0
    bench.publish("while skipped")
    assert channel.stats().depth == 0
    assert bench.consume(ready=5).bodies() == ["read ahead"]


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


def test_old_consumers_are_served_if_allowed() -> None:
    bench = Bench(extend=True, extend_compatible=lambda: True)
    consumer = bench.consume()
    bench.publish("m0")
    assert consumer.bodies() == ["m0"]


def test_a_start_position_counts_for_the_first_client_only() -> None:
    bench = Bench()
    bench.publish("m0", "m1", "m2")
    first = bench.consume(ready=10, start=StartPosition("msgcount", 2))
    assert first.bodies() == ["m1", "m2"]
    second = bench.consume(2, ready=10, start=StartPosition("virtual_queue", 0))
    assert second.bodies() == []


def test_a_refused_start_position_leaves_no_client() -> None:
    bench = Bench()
    with pytest.raises(Refusal):
        bench.consume(start=StartPosition("special", 5))
    assert bench.channel().clients == {}


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


@pytest.mark.parametrize("act", ["finish", "requeue", "ready"])
def test_a_client_with_a_new_window_moves_to_the_end(act: str) -> None:
    bench = Bench()
    first = bench.consume(1, ready=5)
    bench.publish("m0")
    second = bench.consume(2, ready=5)
    channel = bench.channel()
    if act == "finish":
        channel.finish(first, 2)
    elif act == "requeue":
        channel.requeue(first, 2, 0)
    else:
        channel.set_ready(first, 4)
    bench.publish("m1")
    assert second.bodies() == (["m0"] if act == "requeue" else ["m1"])
