"""The administration client on embedded clusters of both generations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import pytest
from attrs import evolve

from nsqext import Admin, Consumer, Position, Producer, sync
from nsqext.admin.requests import ClusterRequests
from nsqext.broker import Cluster
from nsqext.errors import (
    ConnectionFailed,
    InvalidInput,
    InvalidName,
    InvalidSetting,
    InvalidState,
    LookupFailed,
    OperationNotSupported,
    PartitionUnavailable,
    TopicNotFound,
)
from tests.support import plain_http

pytestmark = pytest.mark.anyio


def fresh(word: str = "admin") -> str:
    """Return an unused topic name."""
    return f"{word}_{token_hex(4)}"


async def test_a_created_topic_accepts_publishes_at_once(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(topic, partitions=2, replicas=1, extend=True, channels=["billing"])
        receipt = await producer.publish(topic, b"one", headers={"user": "1"})
        info = (await admin.topics())[topic]
        stats = await admin.stats(topic)
    assert receipt.topic == topic
    assert info.generation == "redesigned"
    assert info.meta is not None
    assert (info.meta.partition_num, info.meta.extend_support) == (2, True)
    assert sorted(info.leaders) == [0, 1]
    assert info.channels == ("billing",)
    assert stats.messages == 1
    assert (stats.channels["billing"].depth, stats.channels["billing"].lag) == (1, 1)


async def test_an_existing_topic_is_an_error_unless_it_may_exist(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin:
        await admin.create_topic(topic)
        with pytest.raises(InvalidInput, match="the topic exists"):
            await admin.create_topic(topic)
        await admin.create_topic(topic, channels=["late"], exist_ok=True)
        assert await admin.channels(topic) == ("late",)


async def test_deleted_topics_do_not_exist(redesigned: Cluster, original: Cluster) -> None:
    for cluster in (redesigned, original):
        topic = fresh()
        async with Admin(cluster.lookupd) as admin:
            await admin.create_topic(topic, channels=["ch"])
            assert topic in await admin.topics()
            await admin.delete_topic(topic)
            with pytest.raises(TopicNotFound):
                await admin.topic(topic)
            with pytest.raises(TopicNotFound):
                await admin.delete_topic(topic)
            await admin.delete_topic(topic, missing_ok=True)
            assert topic not in await admin.topics()


async def test_a_paused_channel_delivers_nothing_until_it_is_unpaused(redesigned: Cluster, original: Cluster) -> None:
    for cluster in (redesigned, original):
        topic = fresh()
        async with (
            Admin(cluster.lookupd) as admin,
            Producer(cluster.lookupd) as producer,
        ):
            await admin.create_topic(topic, channels=["ch"])
            await admin.pause_channel(topic, "ch")
            assert (await admin.stats(topic)).channels["ch"].paused
            await producer.publish(topic, b"waits")
            async with Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
                with anyio.move_on_after(0.3) as scope:
                    await anext(consumer)
                assert scope.cancelled_caught
                await admin.unpause_channel(topic, "ch")
                with anyio.fail_after(25):
                    message = await anext(consumer)
                assert message.body == b"waits"
                clients = (await admin.stats(topic)).channels["ch"].clients
                assert sum(client.in_flight for client in clients) == 1
                assert {client.partition for client in clients} == ({0} if cluster is redesigned else {None})
                await message.finish()
            assert not (await admin.stats(topic)).channels["ch"].paused


async def test_channels_are_created_skipped_and_deleted(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin:
        await admin.create_topic(topic, partitions=2, channels=["keep"])
        await admin.create_channel(topic, "ch")
        assert await admin.channels(topic) == ("ch", "keep")
        await admin.skip_channel(topic, "ch")
        assert (await admin.stats(topic)).channels["ch"].skipped
        await admin.unskip_channel(topic, "ch")
        assert not (await admin.stats(topic)).channels["ch"].skipped
        await admin.delete_channel(topic, "ch")
        assert (await admin.stats(topic)).channels.keys() == {"keep"}
        with pytest.raises(InvalidInput, match=r"CHANNEL_NOT_FOUND.*check the name"):
            await admin.pause_channel(topic, "ch")
        with pytest.raises(InvalidInput, match="has no channel ch"):
            await admin.delete_channel(topic, "ch")
        await admin.delete_channel(topic, "ch", missing_ok=True)


async def test_a_channel_of_a_silent_node_does_not_count_as_missing() -> None:
    topic = fresh()
    with Cluster(2) as frozen:
        frozen.create_topic(topic, partitions=2, channels=["other"])
        async with Admin(frozen.lookupd, timeout=2.0, lookup_request_timeout=0.5) as admin:
            frozen.faults.freeze("n2")
            with pytest.raises((PartitionUnavailable, ConnectionFailed)):
                await admin.delete_channel(topic, "ch", missing_ok=True)
            assert sorted(node.reachable for node in await admin.nodes()) == [False, True]
            frozen.faults.thaw("n2")


async def test_channels_of_a_topic_without_a_leader_are_neither_missing_nor_emptied() -> None:
    """Only leaders report channels."""
    topic = fresh()
    with Cluster(1) as cluster:
        cluster.create_topic(topic, channels=["ch"])
        async with Admin(cluster.lookupd, timeout=0.5) as admin:
            cluster.kill("n1")
            with anyio.fail_after(25):
                while (await admin.topic(topic)).leaders:  # noqa: ASYNC110 - the broker has no event
                    await anyio.sleep(0.01)
            with pytest.raises(PartitionUnavailable):
                await admin.delete_channel(topic, "ch", missing_ok=True)
            with pytest.raises(PartitionUnavailable):
                await admin.empty_topic(topic)


async def test_a_channel_that_lookup_lists_is_not_missing(redesigned: Cluster) -> None:
    """The answer is the server's: it does not delete registered channels."""
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"], register_channels=True)
    async with Admin(redesigned.lookupd) as admin:
        await admin.deliver_delayed(topic, "ch", within_hours=0)
        with pytest.raises(InvalidInput, match="channel auto create disabled"):
            await admin.delete_channel(topic, "ch")


async def test_a_channel_moves_back_to_the_start(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(topic, channels=["ch"])
        await producer.publish_many(topic, [b"1", b"2"])
        await admin.empty_channel(topic, "ch")
        assert (await admin.stats(topic)).channels["ch"].lag == 0
        await admin.seek_channel(topic, "ch", Position.earliest())
        assert (await admin.stats(topic)).channels["ch"].lag == 2
        with pytest.raises(InvalidInput, match="no partition 7"):
            await admin.seek_channel(topic, "ch", Position.latest(), partitions=[7])
        with anyio.fail_after(10), pytest.raises(InvalidInput, match=r"CHANNEL_NOT_FOUND.*check the name"):
            await admin.seek_channel(topic, "other", Position.latest())


async def test_a_change_waits_for_a_new_leader(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin:
        await admin.create_topic(topic, replicas=3, channels=["ch"])
        name = redesigned.leader(topic, 0)
        assert name is not None
        redesigned.kill(name)
        try:
            await admin.pause_channel(topic, "ch")
            assert (await admin.stats(topic)).channels["ch"].paused
            down = [node for node in await admin.nodes() if not node.reachable]
            assert len(down) <= 1
        finally:
            redesigned.restart(name)


async def test_nodes_are_listed_with_their_topics(redesigned: Cluster, original: Cluster) -> None:
    for cluster, generation in ((redesigned, "redesigned"), (original, "original")):
        topic = fresh()
        async with Admin(cluster.lookupd) as admin:
            await admin.create_topic(topic, channels=["ch"])
            nodes = await admin.nodes()
        assert {str(node.tcp) for node in nodes} == {node.tcp for node in cluster.nodes.values()}
        assert {node.generation for node in nodes} == {generation}
        assert all(node.reachable for node in nodes)
        holders = [node for node in nodes if topic in node.topics]
        assert holders
        assert holders[0].topics[topic] == ((0,) if cluster is redesigned else ())


async def test_statistics_of_all_topics_take_one_request_per_node(redesigned: Cluster) -> None:
    first, second = fresh(), fresh()
    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(first, partitions=3, channels=["ch"])
        await admin.create_topic(second, replicas=2, channels=["ch"])
        for number in range(6):
            await producer.publish(first, b"%d" % number)
        found = await admin.all_stats()
        assert found[first] == evolve(await admin.stats(first), missing=None)
        assert not found[first].complete  # the number of partitions is not known
        assert (await admin.all_stats(await admin.topics()))[first] == await admin.stats(first)
    assert found[first].messages == 6
    assert (found[second].messages, len(found[second].partitions)) == (0, 1)
    assert [part.partition for part in found[first].partitions] == [0, 1, 2]


async def test_a_pause_of_the_original_nsq_covers_the_topic(redesigned: Cluster, original: Cluster) -> None:
    topic = fresh()
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic, channels=["ch"])
        await admin.pause_topic(topic)
        assert (await admin.stats(topic)).paused
        await admin.unpause_topic(topic)
        assert not (await admin.stats(topic)).paused
        with pytest.raises(OperationNotSupported, match="extend headers"):
            await admin.upgrade_topic(topic)
        with pytest.raises(OperationNotSupported):
            await admin.skip_channel(topic, "ch")
        with pytest.raises(OperationNotSupported):
            await admin.replicas(topic)
        with pytest.raises(OperationNotSupported):
            await admin.expand_topic(topic, 2)
    async with Admin(redesigned.lookupd) as admin:
        await admin.create_topic(topic)
        with pytest.raises(OperationNotSupported, match="pauses channels"):
            await admin.pause_topic(topic)


async def test_a_topic_of_the_original_nsq_without_nodes_keeps_its_generation(original: Cluster) -> None:
    topic = fresh()
    async with Admin(original.lookupd) as admin:
        # lookup's entry of a topic whose nodes are all down
        plain_http.post(f"http://{original.lookupd[0]}/channel/create?topic={topic}&channel=ch")
        info = await admin.topic(topic)
        assert (info.generation, info.meta, info.nodes, info.channels) == ("original", None, (), ("ch",))
        with pytest.raises(OperationNotSupported, match="extend headers"):
            await admin.upgrade_topic(topic)


async def test_a_tombstoned_node_is_reported(original: Cluster) -> None:
    topic = fresh()
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic, channels=["ch"])
        holder = next(node for node in await admin.nodes() if topic in node.topics)
        await admin.tombstone(topic, str(holder.http))
        nodes = await admin.nodes()
    assert [node.tcp for node in nodes if topic in node.tombstoned] == [holder.tcp]


async def test_a_node_without_the_topic_is_not_tombstoned(redesigned: Cluster, original: Cluster) -> None:
    """Servers ignore the request, and respond that all is well."""
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    leader = redesigned.leader(topic)
    other = next(node.http for name, node in redesigned.nodes.items() if name != leader)
    async with Admin(redesigned.lookupd) as admin:
        with pytest.raises(InvalidInput, match=f"lookup does not list the topic on {other}.*{topic}"):
            await admin.tombstone(topic, other)
        await admin.tombstone(topic, redesigned.nodes[leader].http)
    async with Admin(original.lookupd) as admin:
        holder, empty, *_ = await admin.nodes()
        response = plain_http.post(f"http://{holder.http}/topic/create?topic={topic}")
        assert response.status_code == 200
        with anyio.fail_after(25):
            while topic not in await admin.topics():  # noqa: ASYNC110 - the broker has no event
                await anyio.sleep(0.01)
        with pytest.raises(InvalidInput, match=f"nodes with it: {holder.http}"):
            await admin.tombstone(topic, str(empty.http))
        await admin.tombstone(topic, str(holder.http))
        await admin.tombstone(topic, str(holder.http))


async def test_a_topic_of_the_original_nsq_is_created_on_its_nodes_without_a_wait_too(original: Cluster) -> None:
    topic = fresh()
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic, wait=0)
    for node in original.nodes.values():
        found = plain_http.get(f"http://{node.http}/stats?format=json&topic={topic}").json()
        assert [one["topic_name"] for one in found["topics"]] == [topic]


async def test_an_ephemeral_channel_that_lookup_has_forgotten_is_deleted(
    original: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in lookup with the channel of the last node, before lookup is asked."""
    topic = fresh()
    original.create_topic(topic, channels=["ch", "temporary#ephemeral"])
    change = ClusterRequests.change_channel

    async def change_until_lookup_knows(requests: ClusterRequests, *words: str, **settings: Any) -> None:
        await change(requests, *words, **settings)
        with anyio.fail_after(25):
            while (await requests.find_with_channels(topic))[1] != ("ch",):  # noqa: ASYNC110 - the broker has no event
                await anyio.sleep(0.01)

    monkeypatch.setattr(ClusterRequests, "change_channel", change_until_lookup_knows)
    async with Admin(original.lookupd) as admin:
        assert await admin.delete_channel(topic, "temporary#ephemeral")
        assert not await admin.delete_channel(topic, "temporary#ephemeral", missing_ok=True)


async def test_a_channel_that_lookup_alone_knows_is_deleted(original: Cluster) -> None:
    topic = fresh()
    original.create_topic(topic, channels=["ch"])
    async with Admin(original.lookupd) as admin:
        with anyio.fail_after(25):
            while not await admin.channels(topic):  # noqa: ASYNC110 - the broker has no event
                await anyio.sleep(0.01)
        for node in original.nodes.values():
            response = plain_http.post(f"http://{node.http}/channel/delete?topic={topic}&channel=ch")
            assert response.status_code == 200
        assert await admin.channels(topic) == ("ch",)
        assert await admin.delete_channel(topic, "ch")
        assert await admin.channels(topic) == ()


async def test_a_topic_is_deleted_on_a_node_that_a_tombstone_hides() -> None:
    """It would show it again, with its messages."""
    topic = fresh()
    with Cluster(2, generation="original") as cluster:
        async with Admin(cluster.lookupd) as admin:
            await admin.create_topic(topic, channels=["ch"])
            await admin.tombstone(topic, cluster.nodes["n2"].http)
            assert await admin.delete_topic(topic)
        for node in cluster.nodes.values():
            assert plain_http.get(f"http://{node.http}/stats?format=json").json()["topics"] == []


async def test_an_expansion_that_waits_for_a_leader_gives_its_channels_to_new_partitions() -> None:
    topic = fresh()
    with Cluster(2) as cluster:
        cluster.create_topic(topic, channels=["ch"])
        leader = cluster.leader(topic)
        cluster.kill(leader)
        async with Admin(cluster.lookupd) as admin:
            with anyio.fail_after(60):
                while (await admin.topic(topic)).leaders:  # noqa: ASYNC110 - the broker has no event
                    await anyio.sleep(0.01)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(admin.expand_topic, topic, 2)
                    await anyio.sleep(0.3)
                    await anyio.to_thread.run_sync(cluster.restart, leader)
            stats = await admin.stats(topic)
        assert [sorted(part.channels) for part in stats.partitions] == [["ch"], ["ch"]]


@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_a_topic_that_another_call_deletes_meanwhile_is_deleted(
    redesigned: Cluster, original: Cluster, generation: str
) -> None:
    cluster, topic = redesigned if generation == "redesigned" else original, fresh()
    async with Admin(cluster.lookupd) as admin:
        await admin.create_topic(topic, channels=["ch"])
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(partial(admin.delete_topic, topic, missing_ok=True))
        assert topic not in await admin.topics()


async def test_partitions_are_not_reduced(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, partitions=2, channels=["ch"])
    async with Admin(redesigned.lookupd) as admin:
        with pytest.raises(InvalidInput, match="2 partitions: their number cannot be reduced"):
            await admin.expand_topic(topic, 1)


async def test_input_is_checked_before_anything_is_sent(redesigned: Cluster) -> None:
    async with Admin(redesigned.lookupd) as admin:
        with pytest.raises(InvalidName):
            await admin.create_topic("a b")
        with pytest.raises(InvalidInput, match=r"within 1\.\.254"):
            await admin.create_topic("orders", partitions=255)
        with pytest.raises(InvalidInput, match="give wait > 0"):
            await admin.create_topic("orders", channels=["ch"], wait=0)
        with pytest.raises(InvalidName):
            await admin.pause_channel("orders", "a b")
        with pytest.raises(TopicNotFound):
            await admin.stats("unknown_topic")


async def test_a_topic_that_no_node_can_hold_is_refused(redesigned: Cluster) -> None:
    async with Admin(redesigned.lookupd) as admin:
        with pytest.raises(LookupFailed, match="5 replicas need 5 nodes, but the cluster has 3"):
            await admin.create_topic(fresh(), replicas=5)


async def test_a_partition_without_a_leader_ends_in_time(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    async with Admin(redesigned.lookupd, timeout=0.6) as admin:
        name = redesigned.leader(topic, 0)
        assert name is not None
        redesigned.kill(name)
        try:
            with pytest.raises((PartitionUnavailable, ConnectionFailed, TopicNotFound)):
                await admin.pause_channel(topic, "ch")
        finally:
            redesigned.restart(name)


async def test_a_client_of_another_event_loop_or_one_that_was_closed_is_refused(redesigned: Cluster) -> None:
    admin = Admin(redesigned.lookupd)
    await admin.topics()
    with pytest.raises(InvalidState, match="from another event loop"):
        await anyio.to_thread.run_sync(anyio.run, admin.topics)
    await admin.aclose()
    await admin.aclose()
    with pytest.raises(InvalidState, match="the admin client is closed"):
        await admin.topics()


async def test_peek_returns_the_newest_messages_and_consumes_nothing(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(topic, partitions=2, extend=True, channels=["ch"])
        assert await admin.peek(topic) == ()
        for number in range(4):
            await producer.publish(topic, b"%d" % number if number else bytes(200), partition=number % 2)
        last = await producer.publish(topic, b"\xff<b>", headers={"user": "42"}, key="k1", tag="canary", trace_id=7)
        newest, *others = await admin.peek(topic, count=3)
        assert (newest.body, newest.headers, newest.key, newest.tag) == ("\ufffd<b>", {"user": "42"}, "k1", "canary")
        assert (newest.partition, newest.id, newest.offset) == (last.partition, last.message_id, last.offset)
        assert newest.trace_id == 7
        assert [message.body for message in others] == ["3", "2"]
        one = [message.body for message in await admin.peek(topic, partition=1) if message.id != newest.id]
        assert one == ["3", "1"]
        assert len(await admin.peek(topic)) == 5
        stats = await admin.stats(topic)
        assert {name: channel.lag for name, channel in stats.channels.items()} == {"ch": 5}
        with pytest.raises(InvalidInput, match="no partition 5"):
            await admin.peek(topic, partition=5)


async def test_peek_is_refused_on_the_original_nsq(original: Cluster) -> None:
    topic = fresh()
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic)
        with pytest.raises(OperationNotSupported, match="without consuming"):
            await admin.peek(topic)


async def test_stats_list_the_key_ranges_of_consumers(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(topic, extend=True, channels=["other"])
        consumers = [Consumer(topic, "keys", lookupd=redesigned.lookupd, dispatch="key_failover") for _ in range(2)]
        async with consumers[0] as first, consumers[1]:
            with anyio.fail_after(25):
                while True:
                    parts = (await admin.stats(topic)).partitions
                    found = parts[0].channels.get("keys")
                    if found is not None and len(found.key_ranges) == 2:
                        break
                    await anyio.sleep(0.02)
            await producer.publish(topic, b"1", key="a")
            assert first.channel == "keys"
        low, high = found.key_ranges
        assert (found.dispatch, low.low, high.high) == ("key_failover", 0.0, 1.0)
        assert low.high == high.low
        assert {low.client, high.client} == {client.address for client in found.clients}


def test_the_blocking_client_peeks(redesigned: Cluster) -> None:
    topic = fresh()
    redesigned.create_topic(topic, channels=["ch"])
    with sync.Admin(redesigned.lookupd) as admin, sync.Producer(redesigned.lookupd) as producer:
        producer.publish(topic, b"one")
        assert [message.body for message in admin.peek(topic, count=1, partition=0)] == ["one"]


async def test_an_error_of_one_of_several_requests_is_not_wrapped(
    redesigned: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = fresh()

    async def fail(*_: object) -> None:
        raise ConnectionFailed("no answer")

    async def gone(*_: object) -> None:
        raise TopicNotFound("gone")

    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(topic, channels=["ch"])
        await producer.publish_many(topic, [b"1", b"2"])
        monkeypatch.setattr("nsqext.admin.admin._message_at", fail)
        with pytest.raises(ConnectionFailed, match="no answer"):
            await admin.peek(topic)
        monkeypatch.setattr(admin, "topic", fail)
        with pytest.raises(ConnectionFailed, match="no answer"):
            await admin.topics()
        monkeypatch.setattr(admin, "topic", gone)
        assert await admin.topics() == {}, "they were deleted since they were listed"


async def test_added_partitions_have_the_channels(redesigned: Cluster) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin, Producer(redesigned.lookupd) as producer:
        await admin.create_topic(topic, channels=["old"])
        await producer.publish(topic, b"one")
        await admin.expand_topic(topic, 2)
        with anyio.fail_after(25):
            while len((await admin.topic(topic)).leaders) != 2:  # noqa: ASYNC110 - the broker has no event
                await anyio.sleep(0.02)
        assert all("old" in part.channels for part in (await admin.stats(topic)).partitions)
        await admin.empty_topic(topic)
        assert (await admin.stats(topic)).channels["old"].lag == 0
        with pytest.raises(InvalidInput, match="CHANNEL_NOT_FOUND"):
            await admin.empty_channel(topic, "never")
        await admin.delete_channel(topic, "old")
        assert await admin.channels(topic) == ()


async def test_traced_messages_are_logged(redesigned: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    topic, channel = fresh(), f"ch_{token_hex(4)}"
    caplog.set_level("INFO", "nsqext.broker")
    async with (
        Admin(redesigned.lookupd) as admin,
        Producer(redesigned.lookupd) as producer,
        Consumer(topic, channel, lookupd=redesigned.lookupd) as consumer,
    ):
        await admin.create_topic(topic, extend=True, channels=[channel])
        await admin.trace_topic(topic)
        await admin.trace_topic(topic, channel=channel)
        await producer.publish(topic, b"1", trace_id=77)
        await (await anext(consumer)).finish()
        with anyio.fail_after(25):
            while "finished by" not in caplog.text:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.02)
        assert "trace id 77" in caplog.text
        await admin.trace_topic(topic, enabled=False)
        await admin.trace_topic(topic, channel=channel, enabled=False)
        caplog.clear()
        await producer.publish(topic, b"2", trace_id=78)
        await (await anext(consumer)).finish()
        with anyio.fail_after(25):
            while (await admin.stats(topic, channel)).channels[channel].lag:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.02)
    assert "trace id 78" not in caplog.text


async def test_a_topic_is_created_with_storage_limits(tmp_path: Path) -> None:
    with Cluster(nodes=1, data_path=tmp_path) as cluster:
        async with Admin(cluster.lookupd) as admin:
            await admin.create_topic(
                "kept", retention_days=3, sync_every=100, registered_channels_only=True, channels=["ch"]
            )
            meta = (await admin.topic("kept")).meta
            with pytest.raises(InvalidInput, match="retention_days=0"):
                await admin.create_topic(fresh(), retention_days=0)
    assert meta is not None
    assert meta.disable_channel_auto_create
    state = (tmp_path / "cluster.json").read_text(encoding="utf-8")
    assert ('"retention_days":3' in state.replace(" ", ""), '"sync_every":100' in state.replace(" ", "")) == (
        True,
        True,
    )


@pytest.mark.parametrize("wait", [-1, "5", float("nan")])
async def test_a_time_to_wait_that_is_no_time_is_refused_before_anything_is_sent(
    redesigned: Cluster, wait: Any
) -> None:
    topic = fresh()
    async with Admin(redesigned.lookupd) as admin:
        with pytest.raises(InvalidSetting, match="wait="):
            await admin.create_topic(topic, wait=wait)
        await admin.create_topic(topic, channels=["ch"])
        for change in (
            admin.expand_topic(topic, 2, wait=wait),
            admin.move_partition(topic, 0, "n1:1", "n2:1", wait=wait),
        ):
            with pytest.raises(InvalidSetting, match="wait="):
                await change
        assert len((await admin.topic(topic)).leaders) == 1
