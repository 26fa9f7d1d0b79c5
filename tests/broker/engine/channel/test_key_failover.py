"""Channels of type key_failover: one client per key; order is kept when clients connect and disconnect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from nsqext.broker.engine.options import ChannelKind, ChannelRules, make_kind
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.key_ranges import position_of
from nsqext.protocol.messages import EXT_JSON, KEY_HEADER, TAG_HEADER
from tests.support.engine_partition import Bench, Consumer

KEYED = ChannelKind("key_failover", fixed=True)

# keys of the first, second, third and fourth quarter of the hash space
A, B, C, D = (
    next(name for name in map(str, range(1000)) if position_of(name.encode()) >> 30 == quarter) for quarter in range(4)
)


def keyed(body: str, key: str, **headers: str) -> NewMessage:
    """Return a message with a key."""
    return NewMessage(body.encode(), header=orjson.dumps({KEY_HEADER: key, **headers}), version=EXT_JSON)


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
    keys = {"A": A, "B": B, "C": C, "D": D}
    bench.publish(*(keyed(name, keys[name[0]]) for name in names))


def finish(bench: Bench, consumer: Consumer, *counters: int) -> list[str]:
    """Finish messages and return the messages received."""
    bench.finish(consumer, counters)
    return consumer.bodies()


def test_messages_of_one_key_are_delivered_to_one_client() -> None:
    bench = make_bench()
    first, second = consume(bench, 1, 10), consume(bench, 2, 10)
    publish(bench, "A1", "C1", "B1", "D1", "A2", "C2")
    assert first.bodies() == ["A1", "B1", "A2"]
    assert second.bodies() == ["C1", "D1", "C2"]


def test_a_client_without_permits_blocks_only_its_own_keys() -> None:
    bench = make_bench()
    first, second = consume(bench, 1, 0), consume(bench, 2, 1)
    publish(bench, "A1", "B1", "C1", "A2", "D1", "C2")
    assert second.bodies() == ["C1"]
    assert finish(bench, second, 4) == ["D1"]
    assert finish(bench, second, 6) == ["C2"]
    stats = bench.channel().stats()
    assert (stats.replay_count, stats.held_keys, stats.backlogs) == (3, 1, 3)
    bench.channel().set_ready(first, 2)
    assert first.bodies() == ["A1", "B1"]
    assert finish(bench, first, 2) == ["A2"]


def test_the_replay_set_is_bounded() -> None:
    bench = make_bench(rules=ChannelRules(replay_limit=3))
    first, second = consume(bench, 1, 0), consume(bench, 2, 5)
    publish(bench, "A1", "A2", "B1", "A3", "C1")
    assert second.bodies() == []
    assert bench.channel().stats().replay_count == 3
    bench.channel().set_ready(first, 2)
    assert (first.bodies(), second.bodies()) == (["A1", "A2"], ["C1"])


def test_a_key_moves_after_its_messages_in_flight() -> None:
    bench = make_bench()
    first = consume(bench, 1, 2)
    publish(bench, "C1", "C2", "C3", "D1")
    assert first.bodies() == ["C1", "C2"]
    second = consume(bench, 2, 5)
    assert second.bodies() == ["D1"]
    assert finish(bench, first, 2) == []
    assert second.bodies() == []
    assert finish(bench, first, 3) == []
    assert second.bodies() == ["C3"]


def test_requeued_messages_are_delivered_to_the_new_owner_first() -> None:
    bench = make_bench()
    first = consume(bench, 1, 2)
    publish(bench, "C1", "C2", "C3")
    second = consume(bench, 2, 5)
    assert first.bodies() == ["C1", "C2"]
    bench.channel().requeue(first, 2, 0)
    assert second.bodies() == []
    bench.channel().requeue(first, 3, 0)
    assert second.attempts() == [("C1", 2), ("C2", 2), ("C3", 1)]


def test_timed_out_messages_are_delivered_to_the_new_owner() -> None:
    bench = make_bench()
    first = consume(bench, 1, 1, msg_timeout=1.0)
    publish(bench, "D1", "D2")
    second = consume(bench, 2, 5)
    assert (first.bodies(), second.bodies()) == (["D1"], [])
    bench.wait(1.1)
    assert (first.bodies(), second.attempts()) == ([], [("D1", 2), ("D2", 1)])


def test_keys_of_a_lost_client_keep_their_order() -> None:
    bench = make_bench()
    first, second = consume(bench, 1, 10), consume(bench, 2, 2)
    publish(bench, "C1", "C2", "C3", "D1", "A1")
    assert (first.bodies(), second.bodies()) == (["A1"], ["C1", "C2"])
    bench.channel().unsubscribe(second)
    assert first.attempts() == [("C1", 1), ("C2", 1), ("C3", 1), ("D1", 1)]


def test_a_delay_blocks_only_its_key() -> None:
    bench = make_bench()
    only = consume(bench, 1, 1)
    publish(bench, "A1", "A2", "B1")
    bench.channel().requeue(only, 2, 5.0)
    assert only.bodies() == ["A1", "B1"]
    assert finish(bench, only, 4) == []
    bench.wait(5.1)
    assert only.attempts() == [("A1", 2)]
    assert finish(bench, only, 2) == ["A2"]


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


def test_pause_skip_and_positions() -> None:
    bench = make_bench()
    channel = bench.channel()
    only = consume(bench, 1, 1)
    publish(bench, "A1", "A2", "B1")
    channel.set_paused(True)
    assert finish(bench, only, 2) == ["A1"]
    channel.set_paused(False)
    assert only.bodies() == ["A2"]
    channel.set_offset(StartPosition("msgcount", 1))
    assert only.bodies() == ["A1"]
    channel.set_skipped(True)
    publish(bench, "C1")
    channel.set_skipped(False)
    publish(bench, "C2")
    assert only.bodies() == ["C2"]
    assert finish(bench, only, 6) == []
    assert (channel.stats().depth, channel.stats().replay_count) == (0, 0)


def test_forced_finish_releases_the_next_message_of_the_key() -> None:
    bench = make_bench()
    only = consume(bench, 1, 1)
    publish(bench, "A1", "A2")
    bench.channel().requeue(only, 2, 60)
    bench.channel().finish_forced(2)
    assert only.bodies() == ["A1", "A2"]


def test_statistics_count_what_waits_for_each_client() -> None:
    bench = make_bench()
    for number in (1, 2):
        consume(bench, number, 1)
    publish(bench, "A1", "A2", "A3", "C1")
    stats = bench.channel().stats()
    assert ([found.waiting for found in stats.key_ranges], stats.replay_count) == ([2, 0], 2)


def test_the_queue_is_read_while_a_client_has_room() -> None:
    bench = make_bench()
    only = consume(bench, 1, 1)
    publish(bench, "A1", "A2", "B1", "B2")
    assert (bench.channel().stats().replay_count, bench.channel().cursor.count) == (0, 1)
    bench.channel().unsubscribe(only)
    publish(bench, "C1")
    assert bench.channel().cursor.count == 1


def test_a_requeued_message_is_delivered_before_a_deferred_one_of_its_key() -> None:
    bench = make_bench()
    only = consume(bench, 1, 2)
    publish(bench, "A1", "A2", "A3")
    assert only.bodies() == ["A1", "A2"]
    bench.channel().requeue(only, 3, 50)
    bench.channel().requeue(only, 2, 0)
    assert only.bodies() == ["A1"]
    assert bench.channel().stats().requeue_count == 1
    bench.channel().requeue(only, 2, 1200)
    assert (bench.channel().stats().deferred_count, bench.channel().stats().delayed_queue_count) == (2, 0)
    assert only.bodies() == []


def test_a_client_that_leaves_a_paused_channel_is_forgotten() -> None:
    bench = make_bench()
    first, second = consume(bench, 1, 5), consume(bench, 2, 5)
    bench.channel().set_paused(True)
    publish(bench, "A1", "D1")
    bench.channel().set_ready(first, 4)
    bench.channel().unsubscribe(first)
    bench.channel().set_paused(False)
    assert second.bodies() == ["A1", "D1"]


def test_messages_with_a_tag_go_to_clients_without_one_when_the_last_of_the_tag_leaves() -> None:
    bench = make_bench()
    plain, tagged = consume(bench, 1, 9), consume(bench, 2, 9, tag="red")
    bench.publish(keyed("m0", A, **{TAG_HEADER: "red"}))
    assert (plain.bodies(), tagged.bodies()) == ([], ["m0"])
    bench.channel().unsubscribe(tagged)
    bench.publish(keyed("m1", A, **{TAG_HEADER: "red"}))
    assert plain.bodies() == ["m0", "m1"]


def test_a_move_discards_what_waits_for_a_client() -> None:
    bench = make_bench()
    first, second = consume(bench, 1, 1), consume(bench, 2, 1)
    publish(bench, "A1", "A2", "A3", "D1")
    assert (first.bodies(), second.bodies()) == (["A1"], ["D1"])
    bench.channel().set_offset(StartPosition("special", -1))
    bench.channel().set_ready(first, 9)
    publish(bench, "A4")
    assert first.bodies() == ["A4"]


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


def test_a_suspended_channel_discards_messages_in_flight() -> None:
    bench = make_bench()
    only = consume(bench, 1, 1)
    publish(bench, "A1", "A2")
    bench.partition.suspend()
    assert only.has_closed
    bench.partition.resume()
    assert consume(bench, 2, 5).attempts() == [("A1", 1), ("A2", 1)]
