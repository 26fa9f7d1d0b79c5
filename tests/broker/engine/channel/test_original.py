"""Topics and channels of the original server."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.engine_partition import Bench, original


def test_the_first_channel_receives_the_messages_of_the_topic() -> None:
    bench = original()
    bench.publish("m0", "m1")
    assert bench.partition.depth == 2
    first = bench.consume(ready=10, channel="one")
    second = bench.consume(2, ready=10, channel="two")
    assert (first.bodies(), second.bodies()) == (["m0", "m1"], [])
    bench.publish("m2")
    assert (first.bodies(), second.bodies()) == (["m2"], ["m2"])
    assert bench.partition.depth == 0


def test_a_paused_topic_passes_no_messages() -> None:
    bench = original()
    consumer = bench.consume(ready=10)
    bench.partition.set_paused(True)
    bench.publish("m0")
    late = bench.consume(2, ready=10, channel="late")
    assert bench.partition.depth == 1
    bench.partition.set_paused(False)
    assert (consumer.bodies(), late.bodies()) == (["m0"], ["m0"])


def test_an_emptied_topic_discards_its_messages() -> None:
    bench = original()
    consumer = bench.consume(ready=10)
    bench.partition.set_paused(True)
    bench.publish("m0", "m1")
    bench.partition.empty()
    bench.partition.set_paused(False)
    bench.publish("m2")
    assert consumer.bodies() == ["m2"]
    bench.finish(consumer, [4])
    assert bench.channel().acked.count == 3
    assert bench.channel().stats().message_count == 1


def test_a_channel_keeps_what_it_had_before_its_topic_was_emptied() -> None:
    bench = original()
    consumer = bench.consume(ready=0)
    bench.publish("m0")
    bench.partition.set_paused(True)
    bench.publish("m1", "m2")
    bench.partition.empty()
    bench.partition.set_paused(False)
    stats = bench.channel().stats()
    assert (stats.depth, stats.backend_depth, stats.message_count) == (1, 0, 1)
    bench.channel().set_ready(consumer, 5)
    assert consumer.bodies() == ["m0"]


def test_a_channel_without_messages_has_no_depth_after_it_was_emptied() -> None:
    bench = original()
    bench.consume(ready=0)
    bench.publish("soon", NewMessage(b"late", delay=60))
    bench.channel().empty()
    stats = bench.channel().stats()
    assert (stats.depth, stats.deferred_count) == (0, 0)


def test_requeue_moves_a_message_to_the_end() -> None:
    bench = original()
    consumer = bench.consume()
    bench.publish("m0", "m1", "m2")
    bench.channel().requeue(consumer, 2, 0)
    for counter in (3, 4):
        bench.finish(consumer, [counter])
    bench.publish("m3")
    assert consumer.attempts() == [("m0", 1), ("m1", 1), ("m2", 1), ("m0", 2)]


def test_a_deferred_message_is_not_in_flight() -> None:
    bench = original()
    consumer = bench.consume()
    bench.publish("m0")
    bench.channel().requeue(consumer, 2, 5)
    stats = bench.channel().stats()
    assert (stats.in_flight_count, stats.deferred_count, stats.requeue_count, stats.depth) == (0, 1, 1, 0)
    with pytest.raises(Refusal, match=r"^ID not in flight$"):
        bench.finish(consumer, [2])
    bench.wait(5)
    assert consumer.attempts() == [("m0", 1), ("m0", 2)]


def test_a_deferred_publish_is_delivered_after_later_ones() -> None:
    bench = original()
    consumer = bench.consume(ready=10)
    bench.publish(NewMessage(b"late", delay=2), "soon")
    assert consumer.bodies() == ["soon"]
    assert bench.channel().stats().deferred_count == 1
    bench.finish(consumer, [3])
    bench.wait(2)
    assert consumer.bodies() == ["late"]
    bench.finish(consumer, [2])
    assert bench.channel().acked.count == 2


def test_a_message_that_no_client_waits_for_is_in_memory() -> None:
    bench = original()
    for depth in (0, 1):
        stats = bench.channel().stats()
        assert (stats.depth, stats.backend_depth) == (depth, 0)
        bench.publish("m0")


def test_depth_counts_what_waits_and_not_what_is_deferred() -> None:
    bench = original()
    consumer = bench.consume(ready=0)
    bench.publish(NewMessage(b"late", delay=2), "soon", NewMessage(b"later", delay=0.5))
    stats = bench.channel().stats()
    assert (stats.depth, stats.backend_depth, stats.deferred_count) == (1, 0, 2)
    bench.channel().set_ready(consumer, 3)
    assert (consumer.bodies(), bench.channel().stats().depth) == (["soon"], 0)
    for wait, bodies in ((0.4, []), (0.2, ["later"]), (1.3, []), (0.2, ["late"])):
        bench.wait(wait)
        assert consumer.bodies() == bodies
    bench.channel().requeue(consumer, 3, 0.5)
    for wait, bodies in ((0.4, []), (0.2, ["soon"])):
        bench.wait(wait)
        assert consumer.bodies() == bodies
    assert bench.channel().stats().depth == 0


def test_a_client_answers_only_its_own_messages() -> None:
    bench = original()
    owner, other = bench.consume(ready=1), bench.consume(2)
    bench.publish("m0")
    with pytest.raises(Refusal, match=r"^client does not own message$"):
        bench.channel().touch(other, 2)
    with pytest.raises(Refusal, match=r"^ID not in flight$"):
        bench.channel().touch(owner, 3)
    bench.channel().touch(owner, 2)


def test_the_delay_starts_when_the_channel_receives_the_message() -> None:
    bench = original()
    bench.publish(NewMessage(b"late", delay=2))
    bench.now += 10
    consumer = bench.consume(ready=10)
    assert consumer.bodies() == []
    bench.wait(2)
    assert consumer.bodies() == ["late"]


def test_messages_of_a_lost_client_stay_in_flight_until_timeout() -> None:
    bench = original()
    gone = bench.consume(ready=1)
    other = bench.consume(2, ready=5)
    bench.publish("m0")
    bench.channel().unsubscribe(gone)
    assert other.bodies() == []
    with pytest.raises(Refusal, match=r"^client does not own message$"):
        bench.finish(other, [2])
    bench.wait(60)
    assert other.attempts() == [("m0", 2)]
    bench.publish("m1", "m2")
    assert (other.bodies(), gone.bodies()) == (["m1", "m2"], ["m0"])


def test_empty_discards_everything() -> None:
    bench = original()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2", "m3")
    consumer.take()
    bench.channel().empty()
    with pytest.raises(Refusal, match=r"^ID not in flight$"):
        bench.finish(consumer, [2])
    bench.publish("new", NewMessage(b"late", delay=60), "more", "over")
    assert (consumer.bodies(), bench.channel().stats().depth) == (["new", "more"], 1)
    bench.channel().empty()
    assert bench.channel().stats().depth == 0
    bench.publish("a", "b", "c")
    assert (consumer.bodies(), bench.channel().stats().depth) == (["a", "b"], 1)


def test_clients_are_limited() -> None:
    bench = Bench(limits=ServerLimits.original(max_channel_consumers=1))
    bench.consume()
    with pytest.raises(Refusal, match=r"^consumers for orders:ch exceeds limit of 1$"):
        bench.consume(2)


def test_an_ephemeral_channel_discards_messages_beyond_its_bound() -> None:
    bench = original(mem_queue_size=2)
    consumer = bench.consume(ready=0, channel="tmp#ephemeral")
    bench.publish("m0", "m1", "m2", "m3")
    stats = bench.channel("tmp#ephemeral").stats()
    assert (stats.depth, stats.backend_depth) == (2, 0)
    bench.channel("tmp#ephemeral").set_ready(consumer, 10)
    assert consumer.bodies() == ["m0", "m1"]
    bench.finish(consumer, [2, 3], "tmp#ephemeral")
    assert bench.channel("tmp#ephemeral").acked.count == 4


def test_numbers_after_a_restart(tmp_path: Path) -> None:
    bench = original(data_path=tmp_path)
    consumer = bench.consume(ready=3)
    bench.publish("m0", "m1", "m2", "m3")
    bench.finish(consumer, [3])
    bench.partition.close()
    again = original(data_path=tmp_path)
    stats = again.channel().stats()
    assert (stats.depth, stats.backend_depth, stats.message_count) == (3, 3, 0)
    assert again.consume(ready=10).bodies() == ["m0", "m2", "m3"]
    again.publish("new")
    stats = again.channel().stats()
    assert (stats.depth, stats.backend_depth, stats.message_count) == (0, 0, 1)


@pytest.mark.parametrize("waits", [0, 10])
def test_numbers_after_a_kill(waits: float, tmp_path: Path) -> None:
    bench = original(data_path=tmp_path)
    bench.channel()
    bench.publish("m0", "m1", "m2")
    bench.wait(waits)
    bench.partition.close(save=False)
    again = original(data_path=tmp_path)
    stats = again.channel().stats()
    assert (stats.depth, stats.backend_depth, stats.message_count) == (3, 3, 0)
    assert again.consume(ready=10).bodies() == ["m0", "m1", "m2"]
    assert again.channel().stats().backend_depth == 0


def test_a_restarted_server_delivers_what_was_in_flight_after_what_waits() -> None:
    bench = original()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2", "m3", "m4")
    bench.channel().requeue(consumer, 2, 60)
    bench.finish(consumer, [3])
    bench.channel("e#ephemeral")
    bench.wait(1)
    bench.partition.restart()
    assert (consumer.has_closed, list(bench.partition.channels)) == (True, ["ch"])
    assert bench.channel().clients == {}
    stats = bench.channel().stats()
    assert (stats.depth, stats.backend_depth, stats.in_flight_count, stats.deferred_count) == (4, 4, 0, 0)
    assert (stats.message_count, stats.requeue_count, bench.partition.message_count) == (0, 0, 0)
    bench.publish("new")
    second = bench.consume(2, ready=10)
    found = second.attempts()
    assert (found[0], found[-1]) == (("m4", 1), ("new", 1))
    assert sorted(found[1:-1]) == [("m0", 2), ("m2", 2), ("m3", 2)]
    assert bench.channel().stats().backend_depth == 0
    bench.channel().set_ready(second, 0)
    bench.channel().requeue(second, 2, 0)
    stats = bench.channel().stats()
    assert (stats.depth, stats.backend_depth) == (1, 0), "it is in memory, though it was stored before the restart"


def test_messages_of_a_topic_are_on_disk_after_a_restart() -> None:
    bench = original()
    bench.publish("m0", "m1")
    assert bench.partition.stored_depth == 0
    bench.partition.restart()
    bench.publish("m2")
    assert (bench.partition.depth, bench.partition.stored_depth) == (3, 2)
    bench.consume(ready=5)
    assert (bench.partition.depth, bench.partition.stored_depth) == (0, 0)


def test_a_topic_keeps_its_messages_across_a_restart(tmp_path: Path) -> None:
    bench = original(data_path=tmp_path)
    bench.partition.set_paused(True)
    bench.publish("m0", "m1")
    again = original(data_path=tmp_path)
    assert (again.partition.paused, again.partition.depth) == (True, 2)
    consumer = again.consume(ready=5)
    again.partition.set_paused(False)
    assert consumer.bodies() == ["m0", "m1"]


def test_messages_of_a_client_are_counted_by_what_became_of_them() -> None:
    bench = original()
    consumer = bench.consume(ready=10)
    bench.publish(*(f"m{number}" for number in range(4)))
    ids = [message.internal_id for message in consumer.take()]
    for internal_id in ids[:2]:
        bench.channel().finish(consumer, internal_id)
    bench.channel().requeue(consumer, ids[2], 60)
    (client,) = bench.channel().clients.values()
    assert (client.finished, client.requeued, client.in_flight) == (2, 1, 1)
