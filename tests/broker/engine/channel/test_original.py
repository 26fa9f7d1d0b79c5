"""Topics and channels of the original server."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench, original
from tests.support.tables import table

ON_DISK = {
    "numbers after a restart": """
        a sub 3; pub m0 m1 m2 m3; a fin 3; reopen; has depth=3 backend_depth=3 message_count=0; b sub 10;
        b gets m0 m2 m3; pub new; has depth=0 backend_depth=0 message_count=1""",
    "numbers after a kill": """
        channel; pub m0 m1 m2; kill; has depth=3 backend_depth=3 message_count=0; a sub 10; a gets m0 m1 m2;
        has backend_depth=0""",
    "numbers after a kill that follows a tick": """
        channel; pub m0 m1 m2; wait 10; kill; has depth=3 backend_depth=3 message_count=0; a sub 10;
        a gets m0 m1 m2; has backend_depth=0""",
    "a topic keeps its messages across a kill": """
        topic do set_paused True; pub m0 m1; kill; topic paused=True depth=2; a sub 5; topic do set_paused False;
        a gets m0 m1""",
    "channels receive what was published after the state was stored": """
        channel; pub m0 m1; kill; topic depth=0; has depth=2; a sub 5; a gets m0 m1""",
    "messages of a topic are on disk after it was opened again": """
        pub m0 m1; topic depth=2 stored_depth=0; reopen; pub m2; topic depth=3 stored_depth=2; a sub 5;
        topic depth=0 stored_depth=0; a gets m0 m1 m2""",
}


@table(("scene", "script"), ON_DISK.items())
def test_scenes_on_disk(scene: str, script: str, tmp_path: Path) -> None:
    assert ChannelScript.checks(script, limits=ServerLimits.original(), data_path=tmp_path), scene


SCENES = {
    "the first channel receives the messages of the topic": """
        pub m0 m1; topic depth=2; a sub 10 on=one; b sub 10 on=two; a gets m0 m1; b gets; pub m2; a gets m2;
        b gets m2; topic depth=0""",
    "a paused topic passes no messages": """
        a sub 10; topic do set_paused True; pub m0; b sub 10 on=late; topic depth=1; topic do set_paused False;
        a gets m0; b gets m0""",
    "an emptied topic discards its messages": """
        a sub 10; topic do set_paused True; pub m0 m1; topic do empty; topic do set_paused False; pub m2; a gets m2;
        a fin 4; acked count=3; has message_count=1""",
    "a channel keeps what it had before its topic was emptied": """
        a sub 0; pub m0; topic do set_paused True; pub m1 m2; topic do empty; topic do set_paused False;
        has depth=1 backend_depth=0 message_count=1; a rdy 5; a gets m0""",
    "a channel without messages has no depth after it was emptied": """
        a sub 0; pub soon late+60; do empty; has depth=0 deferred_count=0""",
    "REQ moves a message to the end": "a sub; pub m0 m1 m2; a req 2 0; a fin 3 4; pub m3; a gets m0/1 m1/1 m2/1 m0/2",
    "a deferred message is not in flight": """
        a sub; pub m0; a req 2 5; has in_flight_count=0 deferred_count=1 requeue_count=1 depth=0;
        a fin 2 ! ID not in flight; wait 5; a gets m0/1 m0/2""",
    "a deferred publish is delivered after later publishes": """
        a sub 10; pub late+2 soon; a gets soon; has deferred_count=1; a fin 3; wait 2; a gets late; a fin 2;
        acked count=2""",
    "a message that no client waits for is in memory": """
        has depth=0 backend_depth=0; pub m0; has depth=1 backend_depth=0""",
    "depth counts what waits, and not what is deferred": """
        a sub 0; pub late+2 soon later+0.5; has depth=1 backend_depth=0 deferred_count=2; a rdy 3; a gets soon;
        has depth=0; wait 0.4; a gets; wait 0.2; a gets later; wait 1.3; a gets; wait 0.2; a gets late; a req 3 0.5;
        wait 0.4; a gets; wait 0.2; a gets soon; has depth=0""",
    "a client answers only its own messages": """
        a sub; b sub; pub m0; b touch 2 ! client does not own message; a touch 3 ! ID not in flight; a touch 2""",
    "messages of a lost client stay in flight until their timeout": """
        a sub; b sub 5; pub m0; a end; b gets; b fin 2 ! client does not own message; wait 60; b gets m0/2;
        pub m1 m2; b gets m1 m2; a gets m0""",
    "empty discards everything": """
        a sub 2; pub m0 m1 m2 m3; a gets m0 m1; do empty; a fin 2 ! ID not in flight; pub new late+60 more over;
        a gets new more; has depth=1; do empty; has depth=0; pub a b c; a gets a b; has depth=1""",
    "messages of a topic are on disk after a restart": """
        pub m0 m1; topic stored_depth=0; topic do restart; pub m2; topic depth=3 stored_depth=2; a sub 5;
        topic depth=0 stored_depth=0""",
    "messages of a client are counted by their outcome": """
        a sub 10; pub m0 m1 m2 m3; a fin 2 3; a req 4 60; client a finished=2 requeued=1 in_flight=1""",
    "a timeout": """
        a sub msg_timeout=1.0; pub m0; wait 0.9; a touch 2; wait 0.9; a gets m0/1; wait 0.2; a gets m0/2;
        has timeout_count=1""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script, limits=ServerLimits.original()), scene


def test_the_delay_starts_when_the_channel_receives_the_message() -> None:
    bench = original()
    bench.publish(NewMessage(b"late", delay=2))
    bench.now += 10
    consumer = bench.consume(ready=10)
    assert consumer.bodies() == []
    bench.wait(2)
    assert consumer.bodies() == ["late"]


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


@pytest.mark.parametrize(("topic", "kept"), [("tmp#ephemeral", ["m0", "m1"]), ("orders", ["m0", "m1", "m2", "m3"])])
def test_a_topic_without_channels_drops_messages_beyond_its_bound_only_if_it_is_ephemeral(
    topic: str, kept: list[str]
) -> None:
    bench = original(mem_queue_size=2, topic=topic)
    bench.publish("m0", "m1", "m2")
    bench.publish(NewMessage(b"m3", delay=1.0))
    assert (bench.partition.depth, bench.partition.message_count) == (len(kept), 4)
    consumer = bench.consume(ready=5)
    bench.publish("last")
    bench.wait(0.5)
    assert consumer.bodies() == [*kept[:3], "last"]
    bench.wait(1)
    assert consumer.bodies() == kept[3:]


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
