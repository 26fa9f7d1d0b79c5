"""A partition: commits, replicas, changes of the leader, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.messages import EXT_JSON
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import START, Bench, Consumer
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker.engine.partition import Partition


SCENES = {
    "a resumed partition starts at the acknowledged position": """
        a sub 3; e sub on=tmp#ephemeral; pub m0 m1 m2 m3; a fin 3; topic do suspend; a closed; channels ch; a end;
        wait 100; topic do resume; b sub 10; b gets m0/1 m2/1 m3/1""",
    "an old leader removes messages that the new leader lacks": """
        a sub; pub m0 m1 m2; a fin 2 3; topic do suspend; topic do truncate 32; topic readable=1; acked count=1;
        topic do resume; pub other; b sub 5; b gets other""",
    "channels of a partition are independent": """
        a sub on=one; b sub on=two; pub m0 m1; a fin 2; a gets m0 m1; b gets m0; b fin 3 ! Message ID not in flight""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script), scene


def copy(source: Partition, target: Partition, start: int = 0) -> None:
    entries = [source.log.at(count) for count in range(start + 1, source.log.end_count + 1)]
    target.append_replica([entry for entry in entries if entry is not None])


def test_nothing_is_delivered_before_it_is_committed() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    stored = bench.partition.put([NewMessage(b"m0"), NewMessage(b"m1")])
    assert (consumer.bodies(), bench.partition.readable) == ([], 0)
    bench.partition.commit(stored)
    assert consumer.bodies() == ["m0", "m1"]
    bench.partition.commit(stored)
    assert consumer.bodies() == []
    assert (bench.partition.message_count, bench.partition.message_bytes) == (2, 4)


def test_the_first_id_of_a_node_without_a_cluster() -> None:
    assert [Bench(clustered=clustered).publish("m").message_id for clustered in (True, False)] == [2, 1]


def test_ids_offsets_and_sizes() -> None:
    bench = Bench(number=3)
    stored = bench.publish("one")
    assert (stored.message_id, stored.offset, stored.size) == ((3 << 50) + 2, 0, 33)
    stored = bench.publish("x", "yy")
    assert (stored.message_id, stored.offset, stored.size) == ((3 << 50) + 3, 33, 31 + 32)
    assert [entry.record.timestamp for entry in stored.entries] == [START, START + 1]


def test_sizes_of_extend_topics() -> None:
    bench = Bench(extend=True)
    assert bench.publish("body").size == 31 + 4
    header = b'{"k":"v"}'
    assert bench.publish(NewMessage(b"body", header=header, version=EXT_JSON)).size == 33 + len(header) + 4
    assert bench.publish(NewMessage(b"body", header=b"{}", version=EXT_JSON)).size == 33 + 2 + 4


def test_headers_are_not_kept_on_plain_topics() -> None:
    bench = Bench()
    (entry,) = bench.publish(NewMessage(b"m", header=b"{}", version=EXT_JSON)).entries
    assert (entry.record.version, entry.record.header, entry.size) == (0, b"", 31)


def test_rollback_removes_uncommitted_messages() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    bench.publish("m0")
    first = bench.partition.put([NewMessage(b"lost")])
    bench.partition.put([NewMessage(b"lost too")])
    bench.partition.rollback(first)
    assert bench.publish("m1").message_id == 3
    assert consumer.bodies() == ["m0", "m1"]
    committed = bench.publish("m2")
    bench.partition.rollback(committed)
    assert bench.partition.log.end_count == 3


def test_a_replica_becomes_leader() -> None:
    leader, follower = Bench(), Bench()
    follower.partition.suspend()
    leader.publish("m0", "m1")
    copy(leader.partition, follower.partition)
    with pytest.raises(Refusal, match=r"^Consume is disabled currently$"):
        follower.consume()
    channel = follower.channel("late")
    follower.partition.resume()
    stored = follower.publish("m2")
    assert (stored.message_id, stored.offset) == (4, 64)
    consumer = follower.consume(channel="late")
    assert consumer.bodies() == ["m2"]
    assert channel is follower.partition.channels["late"]


def test_a_replica_of_a_leader_that_has_nothing_older() -> None:
    leader, follower = Bench(memory_bound=70_000), Bench()
    follower.publish("older")
    consumer = leader.consume(ready=2500)
    while leader.partition.log.start_count == 0:
        counter = leader.publish("x" * 1000).message_id
        leader.finish(consumer, [counter])
    copy(leader.partition, follower.partition, leader.partition.log.start_count)
    assert follower.partition.log.start_offset == leader.partition.log.start_offset
    assert follower.partition.log.end_offset == leader.partition.log.end_offset
    assert follower.publish("next").message_id == leader.partition.log.end_count + 2


def test_tick_returns_the_next_deadline() -> None:
    bench = Bench()
    assert bench.partition.tick() is None
    consumer = bench.consume(ready=5, msg_timeout=30.0)
    bench.publish("m0", "m1", "m2")
    assert bench.partition.tick() == bench.now + 30
    bench.channel().requeue(consumer, 2, 10)
    assert bench.partition.tick() == bench.now + 10
    bench.channel().requeue(consumer, 3, 1200)
    bench.finish(consumer, [4])
    bench.now += 5
    assert bench.partition.tick() == bench.now + 5
    bench.wait(5)
    bench.finish(consumer, [2])
    due = bench.partition.tick()
    assert due is not None
    assert due == pytest.approx(bench.now + 1190, abs=30)
    bench.now = due
    bench.wait(1190)
    assert consumer.bodies()[-1] == "m1"


def test_stats() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2", "m3")
    bench.finish(consumer, [2])
    bench.channel().requeue(consumer, 3, 600)
    stats = bench.channel().stats()
    assert (stats.backlogs, stats.depth, stats.depth_size, stats.in_flight_count) == (1, 3, 96, 3)
    assert (stats.deferred_count, stats.message_count, stats.requeue_count) == (1, 4, 0)
    (client,) = bench.channel().clients.values()
    assert (client.ready, client.in_flight, client.messages, client.finished, client.requeued) == (
        2,
        2,
        4,
        1,
        1,
    )
    latencies = bench.channel().latencies
    assert (latencies.delivery[0], latencies.consume[0]) == (1, 1)
    bench.now += 0.1
    bench.finish(consumer, [4])
    assert (latencies.delivery[3], sum(latencies.delivery)) == (1, 2)
    assert bench.channel().acked.intervals == [(64, 96, 3)]


def test_a_session_without_subscription_is_refused() -> None:
    bench = Bench()
    consumer = bench.consume()
    bench.publish("m0")
    stranger = Consumer(9)
    channel = bench.channel()
    with pytest.raises(Refusal):
        channel.finish(stranger, 2)
    with pytest.raises(Refusal):
        channel.requeue(stranger, 2, 0)
    channel.set_ready(stranger, 1)
    channel.unsubscribe(stranger)
    channel.finish(consumer, 2)
