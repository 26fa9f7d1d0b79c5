"""A dead letter contains its origin, and is replayed to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from attrs import evolve

from nsqext import Admin, Consumer, Message, Producer, Reject, replay_dead_letters
from nsqext.broker import Cluster, ClusterOptions
from nsqext.client.consumer import replay
from nsqext.client.consumer.replay import _replay, check_complete
from nsqext.errors import InvalidInput, NegotiationFailed, OperationNotSupported, PartitionUnavailable, TopicNotFound
from nsqext.lookup.node_channels import NodeChannels
from nsqext.lookup.partition_map import PartitionMap
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import TopicMeta
from tests.support.consumers import eventually, publish, quick
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext import Lookup
    from nsqext.lookup.node_stats import PartitionChannelStats
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


async def test_a_dead_letter_describes_its_origin_and_is_replayed_to_it() -> None:
    with Cluster(nodes=1) as cluster, anyio.fail_after(60):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", extend=True, channels=["look", "replay"])
        options = quick(max_attempts=1, dead_letter="dead")
        seen: list[tuple[str | None, dict[str, str], str | None, int]] = []
        consumer = Consumer("orders", "billing", lookupd=cluster.lookupd, **options)

        @consumer.handler
        async def handle(message: Message) -> None:
            seen.append((message.key, dict(message.headers), message.tag, message.trace_id))
            if len(seen) == 1:
                raise Reject("no money")
            consumer.stop()

        async with anyio.create_task_group() as tasks, Producer(cluster.lookupd) as producer:
            tasks.start_soon(lambda: consumer.serve(signals=False))
            await producer.publish("orders", b"42", key="ann", headers={"a": "b"}, tag="red", trace_id=7)
            async with Consumer("dead", "look", lookupd=cluster.lookupd, **quick()) as letters:
                letter = await anext(letters)
                await letter.finish()
            assert await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.5) == 1
        assert seen == [("ann", {"a": "b"}, "red", 7)] * 2
    headers = dict(letter.headers)
    assert headers.pop("a") == "b"
    assert float(headers.pop("dead-letter-time")) > 1e9
    assert int(headers.pop("dead-letter-id")[:16], 16) > 0
    assert headers == {
        "dead-letter-error": "Reject: no money",
        "dead-letter-topic": "orders",
        "dead-letter-channel": "billing",
        "dead-letter-partition": "0",
        "dead-letter-attempts": "1",
    }
    assert (letter.key, letter.tag, letter.trace_id) == ("ann", "red", 7)


async def test_a_replay_of_a_part_of_the_partitions_is_reported() -> None:
    with Cluster(nodes=2) as cluster, anyio.fail_after(60):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", partitions=2, extend=True, channels=["replay"])
        kept = cluster.leader("orders")
        (reachable,) = (partition for partition in range(2) if cluster.leader("dead", partition) == kept)
        cluster.kill(cluster.leader("dead", 1 - reachable))
        headers = {"dead-letter-topic": "orders"}
        async with Producer(cluster.lookupd) as producer:
            await producer.publish("dead", b"1", headers=headers, partition=reachable)
        with pytest.raises(PartitionUnavailable, match=rf"partitions \[{1 - reachable}\] may remain") as caught:
            await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.5)
        assert "replayed: 1" in str(caught.value)


async def test_no_partition_waits_for_its_turn_while_a_replay_looks_for_dead_letters() -> None:
    """It ended after ``idle`` seconds, before each of many partitions had its turn."""
    with Cluster(nodes=1) as cluster, anyio.fail_after(60):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", partitions=12, extend=True, channels=["replay"])
        async with Producer(cluster.lookupd) as producer:
            await producer.publish("dead", b"1", headers={"dead-letter-topic": "orders"}, partition=7)
        assert await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.5) == 1


async def test_a_replay_takes_connection_options() -> None:
    """The embedded cluster has no TLS, so the connection is refused instead of sending plain text."""
    with Cluster(nodes=1) as cluster, anyio.fail_after(30):
        cluster.create_topic("dead", extend=True, channels=["replay"])
        with pytest.raises(NegotiationFailed, match="TLS"):
            await replay_dead_letters("dead", lookupd=cluster.lookupd, tls=True)


async def test_what_cannot_be_replayed_stays_and_holds_no_other_back() -> None:
    with Cluster(nodes=1) as cluster, anyio.fail_after(60):
        cluster.create_topic("dead", extend=True, channels=["replay"])
        cluster.create_topic("orders", extend=True, channels=["billing"])
        publish(cluster, "dead", b"no dead letter")
        async with Producer(cluster.lookupd) as producer:
            for origin in ("gone", "not a name", "orders"):
                await producer.publish("dead", origin.encode(), headers={"dead-letter-topic": origin})
        for text in ("3 of 4 dead letters were not replayed; .* is not a dead letter", "3 of 3 dead letters"):
            with pytest.raises((InvalidInput, TopicNotFound), match=text):
                await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.5)
        bodies = {}
        for topic, channel, count in (("orders", "billing", 1), ("dead", "replay", 3)):
            async with Consumer(topic, channel, lookupd=cluster.lookupd, **quick()) as consumer:
                bodies[topic] = {(await anext(consumer)).body for _ in range(count)}
    assert bodies == {"orders": {b"orders"}, "dead": {b"no dead letter", b"gone", b"not a name"}}


class _Redelivering:
    """A consumer that receives one message again and again."""

    max_in_flight = 1

    def __init__(self) -> None:
        self._message = make_message(RecordingOwner())

    async def __anext__(self) -> Message:
        await anyio.sleep(0.01)
        return self._message


async def test_a_replay_ends_although_what_it_refused_times_out_and_is_delivered_again() -> None:
    consumer = cast("Consumer", _Redelivering())
    producer = cast("Producer", None)

    async def unreadable() -> list[int]:
        return []

    stored: Any = SimpleNamespace(has=lambda message: True, unreadable=unreadable)
    with anyio.fail_after(10), pytest.raises(InvalidInput, match="1 of 1 dead letters were not replayed; "):
        await _replay(producer, consumer, stored, 0.2)


@pytest.mark.parametrize("flushed", [True, False])
async def test_a_replay_waits_for_dead_letters_that_the_server_does_not_deliver_yet(
    monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """A busy node of the real server delivers what it stores only after a flush: the last ones were left."""
    monkeypatch.setattr(replay, "_UNREADABLE", 30.0 if flushed else 0.5)
    looks, ask = 0, NodeChannels.channel
    with Cluster(nodes=1) as cluster, anyio.fail_after(60):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", extend=True, channels=["replay"])

        async def ask_before_a_flush(
            channels: NodeChannels, node: Address, topic: str, partition: int | None, channel: str
        ) -> PartitionChannelStats | None:
            nonlocal looks
            looks += 1
            if looks == 3 and flushed:
                async with Admin(cluster.lookupd) as admin:
                    await admin.unpause_channel("dead", "replay")
            found = await ask(channels, node, topic, partition, channel)
            return found if found is None or (looks > 3 and flushed) else evolve(found, unreadable=2)

        async with Producer(cluster.lookupd) as producer, Admin(cluster.lookupd) as admin:
            for body in (b"1", b"2"):
                await producer.publish("dead", body, headers={"dead-letter-topic": "orders"})
            await admin.pause_channel("dead", "replay")
        monkeypatch.setattr(NodeChannels, "channel", ask_before_a_flush)
        if flushed:
            assert await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.2) == 2
            return
        with pytest.raises(PartitionUnavailable, match=r"partitions \[0\] may remain: their leaders do not deliver"):
            await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.2)


async def test_a_replay_that_gives_up_says_that_it_has_not_read_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.client.consumer.replay._MOST_REFUSED", 2)
    with Cluster(nodes=1) as cluster, anyio.fail_after(60):
        cluster.create_topic("dead", extend=True, channels=["replay"])
        publish(cluster, "dead", b"1", b"2", b"3")
        with pytest.raises(InvalidInput, match="2 of 2 dead letters were not replayed, and the rest was not read; "):
            await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.5)


async def test_a_message_that_is_rejected_again_is_published_once() -> None:
    """It was published to all channels of its topic without end."""
    with Cluster(nodes=1) as cluster, anyio.fail_after(30):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", partitions=2, extend=True, channels=["replay"])
        handled: list[bytes] = []
        consumer = Consumer("orders", "billing", lookupd=cluster.lookupd, **quick(max_attempts=1, dead_letter="dead"))

        @consumer.handler
        async def reject(message: Message) -> None:
            handled.append(message.body)
            raise Reject("still no money")

        async with Producer(cluster.lookupd) as producer, consumer:
            for body, partition in ((b"1", 0), (b"2", 1), (b"3", 0)):
                await producer.publish("dead", body, headers={"dead-letter-topic": "orders"}, partition=partition)
            assert await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=1.0) == 3
            await eventually(lambda: consumer.statistics().dead_letters == 3)
            assert await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=1.0) == 3
            await eventually(lambda: consumer.statistics().dead_letters == 6)
        assert sorted(handled) == [b"1", b"1", b"2", b"2", b"3", b"3"]


async def test_a_message_above_a_mebibyte_has_a_dead_letter_and_is_replayed() -> None:
    """The default bound of producers refused it, so that it failed without end; servers may accept more."""
    options = ClusterOptions(limits=ServerLimits(max_msg_size=4 << 20))
    with Cluster(nodes=1, options=options) as cluster, anyio.fail_after(30):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", extend=True, channels=["replay"])
        handled: list[int] = []
        consumer = Consumer("orders", "billing", lookupd=cluster.lookupd, **quick(max_attempts=1, dead_letter="dead"))

        @consumer.handler
        async def handle(message: Message) -> None:
            handled.append(len(message.body))
            if len(handled) == 1:
                raise Reject("no money")

        async with Producer(cluster.lookupd, max_message_size=4 << 20) as producer, consumer:
            await producer.publish("orders", bytes(2 << 20))
            await eventually(lambda: consumer.statistics().dead_letters == 1)
            assert await replay_dead_letters("dead", lookupd=cluster.lookupd, idle=0.5) == 1
            await eventually(lambda: len(handled) == 2)
    assert handled == [2 << 20] * 2


async def test_a_new_channel_replays_what_was_stored_before() -> None:
    with Cluster(nodes=1) as cluster, anyio.fail_after(60):
        cluster.create_topic("orders", extend=True, channels=["billing"])
        cluster.create_topic("dead", extend=True, channels=["look"])
        async with Producer(cluster.lookupd) as producer:
            await producer.publish("dead", b"1", headers={"dead-letter-topic": "orders"})
        assert await replay_dead_letters("dead", lookupd=cluster.lookupd, channel="fresh", idle=0.5) == 1
        assert await replay_dead_letters("dead", lookupd=cluster.lookupd, channel="fresh", idle=0.5) == 0


async def test_a_topic_without_dead_letters_is_refused_at_once() -> None:
    with Cluster(nodes=1) as cluster, anyio.fail_after(25), pytest.raises(TopicNotFound):
        await replay_dead_letters("absent", lookupd=cluster.lookupd)
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("dead")
        with anyio.fail_after(25), pytest.raises(OperationNotSupported, match="do not say where"):
            await replay_dead_letters("dead", lookupd=original.lookupd)


@pytest.mark.parametrize(
    ("partitions", "connected", "missing"),
    [(2, {0, 1}, None), (2, {1}, "[0]"), (3, set(), "[0, 1, 2]"), (None, {0}, None), (None, set(), "[0]")],
)
def test_a_replay_is_complete_when_its_consumer_is_connected_to_all_partitions(
    partitions: int | None, connected: set[int], missing: str | None
) -> None:
    found = None if partitions is None else PartitionMap("dead", meta=TopicMeta(partitions))
    lookup = cast("Lookup", SimpleNamespace(metadata=SimpleNamespace(cached=lambda topic, access: found)))
    consumer = cast(
        "Consumer", SimpleNamespace(connections=[SimpleNamespace(partition=number) for number in connected])
    )
    if missing is None:
        check_complete(lookup, consumer, "dead", 5)
        return
    with pytest.raises(PartitionUnavailable) as caught:
        check_complete(lookup, consumer, "dead", 5)
    assert f"dead letters of partitions {missing} may remain" in str(caught.value)
    assert "replayed: 5" in str(caught.value)
