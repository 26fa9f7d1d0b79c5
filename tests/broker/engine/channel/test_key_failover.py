"""Channels of type key_failover: one client per key; order is kept when clients connect and disconnect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nsqext.broker.engine.options import ChannelKind, make_kind
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.messages import EXT_JSON, TAG_HEADER
from tests.support.channel_scripts import KEYS, ChannelScript, keyed
from tests.support.engine_partition import Bench, Consumer
from tests.support.tables import table

SCENES = {
    "messages of a key are delivered to one client": """
        a sub 10 extend; b sub 10 extend; keyed A1 C1 B1 D1 A2 C2; a gets A1 B1 A2; b gets C1 D1 C2""",
    "a client without permits blocks only its own keys": """
        a sub 0 extend; b sub extend; keyed A1 B1 C1 A2 D1 C2; b gets C1; b fin 4; b gets D1; b fin 6; b gets C2;
        has replay_count=3 held_keys=1 backlogs=3; a rdy 2; a gets A1 B1; a fin 2; a gets A2""",
    "the replay set is bounded": """
        given replay_limit=3; a sub 0 extend; b sub 5 extend; keyed A1 A2 B1 A3 C1; b gets; has replay_count=3;
        a rdy 2; a gets A1 A2; b gets C1""",
    "a key moves after its messages in flight": """
        a sub 2 extend; keyed C1 C2 C3 D1; a gets C1 C2; b sub 5 extend; b gets D1; a fin 2; a gets; b gets;
        a fin 3; a gets; b gets C3""",
    "requeued messages are delivered to the new owner first": """
        a sub 2 extend; keyed C1 C2 C3; b sub 5 extend; a gets C1 C2; a req 2 0; b gets; a req 3 0;
        b gets C1/2 C2/2 C3/1""",
    "messages that timed out are delivered to the new owner": """
        a sub extend msg_timeout=1.0; keyed D1 D2; b sub 5 extend; a gets D1; b gets; wait 1.1; a gets;
        b gets D1/2 D2/1""",
    "keys of a lost client keep their order": """
        a sub 10 extend; b sub 2 extend; keyed C1 C2 C3 D1 A1; a gets A1; b gets C1 C2; b end;
        a gets C1/1 C2/1 C3/1 D1/1""",
    "a delay blocks only its key": """
        a sub extend; keyed A1 A2 B1; a req 2 5; a gets A1 B1; has held_keys=1; a fin 4; a gets; wait 5.1; a gets A1/2;
        a fin 2; a gets A2""",
    "pause, skip and positions": """
        a sub extend; keyed A1 A2 B1; do set_paused True; a fin 2; a gets A1; do set_paused False; a gets A2;
        do set_offset msgcount:1; a gets A1; do set_skipped True; keyed C1; do set_skipped False; keyed C2;
        a gets C2; a fin 6; a gets; has depth=0 replay_count=0""",
    "a forced finish releases the next message of the key": """
        a sub extend; keyed A1 A2; a req 2 60; do finish_forced 2; a gets A1 A2""",
    "the queue is read while a client has room": """
        a sub extend; keyed A1 A2 B1 B2; has replay_count=0; cursor count=1; a end; keyed C1; cursor count=1""",
    "a requeued message is delivered before a deferred message of its key": """
        a sub 2 extend; keyed A1 A2 A3; a gets A1 A2; a req 3 50; a req 2 0; a gets A1; has requeue_count=1;
        a req 2 1200; has deferred_count=2 delayed_queue_count=0; a gets""",
    "a client that leaves a paused channel is forgotten": """
        a sub 5 extend; b sub 5 extend; do set_paused True; keyed A1 D1; a rdy 4; a end; do set_paused False;
        b gets A1 D1""",
    "a move discards what waits for a client": """
        a sub extend; b sub extend; keyed A1 A2 A3 D1; a gets A1; b gets D1; do set_offset special:-1; a rdy 9;
        keyed A4; a gets A4""",
    "a suspended channel discards messages in flight": """
        a sub extend; keyed A1 A2; topic do suspend; a closed; topic do resume; b sub 5 extend; b gets A1/1 A2/1""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    given, _, steps = script.partition(";") if script.strip().startswith("given") else ("given", "", script)
    assert ChannelScript.checks(f"{given} extend=True; kind key_failover; {steps}"), scene


KEYED = ChannelKind("key_failover", fixed=True)

A, B, C, D = KEYS.values()


def make_bench(**options: Any) -> Bench:
    """Return an extend topic with one channel of the type."""
    bench = Bench(extend=True, **options)
    bench.partition.channel("ch", KEYED)
    return bench


def consume(bench: Bench, number: int, ready: int = 1, **settings: Any) -> Consumer:
    """Subscribe a consumer that reads extend headers."""
    return bench.consume(number, ready, extend=True, **settings)


def publish(bench: Bench, *names: str) -> None:
    """Publish messages whose bodies are key and number, such as A1."""
    bench.publish(*(keyed(name, KEYS[name[0]]) for name in names))


def finish(bench: Bench, consumer: Consumer, *counters: int) -> list[str]:
    """Finish messages and return the messages received."""
    bench.finish(consumer, counters)
    return consumer.bodies()


def test_messages_without_a_key_spread_by_their_ids() -> None:
    bench = make_bench()
    first, second = consume(bench, 1, 100), consume(bench, 2, 100)
    bench.publish(*(f"m{number}" for number in range(60)))
    counts = len(first.take()), len(second.take())
    assert sum(counts) == 60
    assert min(counts) > 15


def test_another_header_carries_the_key() -> None:
    bench = Bench(extend=True)
    bench.partition.channel("ch", ChannelKind("key_failover", "flight", fixed=True))
    first, second = consume(bench, 1, 9), consume(bench, 2, 9)
    bench.publish(*(keyed(str(number), C, flight=A) for number in range(4)))
    bench.publish(NewMessage(b"number", header=b'{"flight":%s}' % A.encode(), version=EXT_JSON))
    assert (first.bodies(), second.bodies()) == (["0", "1", "2", "3", "number"], [])


def test_tags_have_their_own_ranges_and_a_key_has_one_owner() -> None:
    bench = make_bench()
    plain, canary = consume(bench, 1, 1), consume(bench, 2, 1, tag="canary")
    bench.publish(
        keyed("t1", A, **{TAG_HEADER: "canary"}), keyed("p1", A), keyed("p2", D), keyed("o1", B, **{TAG_HEADER: "x"})
    )
    assert (plain.bodies(), canary.bodies()) == (["p2"], ["t1"])
    assert finish(bench, canary, 2) == []
    assert finish(bench, plain, 4) == ["p1"]
    assert finish(bench, plain, 3) == ["o1"]
    assert {(found.tag, found.low, found.high) for found in bench.channel().stats().key_ranges} == {
        ("", 0.0, 1.0),
        ("canary", 0.0, 1.0),
    }


def test_untagged_messages_wait_while_all_clients_have_tags() -> None:
    bench = make_bench()
    canary = consume(bench, 1, 5, tag="canary")
    bench.publish(keyed("p1", A), keyed("t1", B, **{TAG_HEADER: "canary"}))
    assert canary.bodies() == ["t1"]
    plain = consume(bench, 2, 5)
    assert plain.bodies() == ["p1"]


def test_filters_apply() -> None:
    bench = make_bench()
    wanted = {"type": 1, "filter_ext_key": "kind", "filter_data": "good"}
    only = consume(bench, 1, 1, ext_filter=wanted)
    bench.publish(keyed("bad", A, kind="bad"), keyed("good", A, kind="good"), keyed("worse", B, kind="bad"))
    assert only.bodies() == ["good"]
    assert finish(bench, only, 3) == []
    assert bench.channel().stats().depth == 0


def test_statistics_count_what_waits_for_each_client() -> None:
    bench = make_bench()
    for number in (1, 2):
        consume(bench, number, 1)
    publish(bench, "A1", "A2", "A3", "C1")
    stats = bench.channel().stats()
    assert ([found.waiting for found in stats.key_ranges], stats.replay_count) == ([2, 0], 2)


def test_messages_with_a_tag_go_to_clients_without_one_when_the_last_of_the_tag_leaves() -> None:
    bench = make_bench()
    plain, tagged = consume(bench, 1, 9), consume(bench, 2, 9, tag="red")
    bench.publish(keyed("m0", A, **{TAG_HEADER: "red"}))
    assert (plain.bodies(), tagged.bodies()) == ([], ["m0"])
    bench.channel().unsubscribe(tagged)
    bench.publish(keyed("m1", A, **{TAG_HEADER: "red"}))
    assert plain.bodies() == ["m0", "m1"]


def test_a_client_may_finish_inside_of_a_delivery() -> None:
    bench = make_bench()

    class Eager(Consumer):
        def deliver(self, message: object) -> None:
            super().deliver(message)  # type: ignore[arg-type]
            bench.finish(self, [self.got[-1].internal_id])

    eager = Eager(extend=True)
    bench.channel().subscribe(eager)
    bench.channel().set_ready(eager, 1)
    publish(bench, *["A1", "B1"] * 600)
    assert len(eager.take()) == 1200


def test_the_first_subscriber_sets_the_type_of_a_channel() -> None:
    bench = Bench(extend=True)
    publish(bench, "A1")
    plain = bench.partition.channel("ch")
    publish(bench, "A2", "A3")
    channel = bench.partition.admit("ch", make_kind("key_failover"))
    assert channel is not plain
    assert channel.kind.type == "key_failover"
    assert consume(bench, 1, 9).bodies() == ["A2", "A3"]
    assert bench.partition.admit("ch", None) is channel
    with pytest.raises(Refusal, match=r"^channel ch of topic orders is dispatched by key_failover, not shared$"):
        bench.partition.admit("ch", make_kind("shared"))


def test_a_subscriber_of_another_type_is_refused() -> None:
    bench = Bench(extend=True)
    consume(bench, 1)
    with pytest.raises(Refusal, match="is dispatched by shared, not key_failover"):
        bench.partition.admit("ch", make_kind("key_failover"))
    bench.partition.channel("fixed", KEYED)
    with pytest.raises(Refusal, match="is dispatched by key_failover, not shared"):
        bench.partition.admit("fixed", make_kind("shared"))
    with pytest.raises(Refusal, match="not key_failover with keys in user"):
        bench.partition.admit("fixed", make_kind("key_failover", "user"))
    with pytest.raises(Refusal, match=r"^dispatch type exclusive is unknown, use shared or key_failover$"):
        make_kind("exclusive")


def test_the_type_of_a_channel_can_be_fixed_later_and_stays_fixed(tmp_path: Path) -> None:
    bench = Bench(extend=True, data_path=tmp_path)
    chosen = bench.partition.admit("ch", make_kind("key_failover"))
    assert not chosen.kind.fixed
    for fixed in (True, False):
        assert bench.partition.admit("ch", make_kind("key_failover", fixed=fixed)) is chosen
        assert chosen.kind.fixed
    assert Bench(extend=True, data_path=tmp_path).channel().kind == KEYED


def test_order_and_key_failover_exclude_each_other() -> None:
    bench = make_bench()
    with pytest.raises(Refusal, match="cannot be consumed in order"):
        consume(bench, 1, ordered=True)
    with pytest.raises(Refusal, match="cannot be consumed in order"):
        bench.channel().set_ordered(True)
    bench.channel().set_ordered(False)
    bench.channel("serial").set_ordered(True)
    with pytest.raises(Refusal, match="is ordered and cannot become key_failover"):
        bench.partition.admit("serial", make_kind("key_failover"))


def test_a_client_without_extend_support_loses_its_keys_when_the_topic_is_extended() -> None:
    bench = Bench()
    bench.partition.channel("ch", KEYED)
    old = bench.consume(1, 5)
    bench.partition.upgrade_extend()
    publish(bench, "A1", "B1", "C1")
    assert old.bodies() == []
    new = consume(bench, 2, 5)
    assert new.bodies() == ["B1", "C1"]
    bench.channel().unsubscribe(old)
    assert new.bodies() == ["A1"]
