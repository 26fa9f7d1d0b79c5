"""Settings of keys over tags, their errors, and what consumers say about a partition that is blocked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import create_task_group

from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions import key_buckets
from nsqext.client.consumer.subscriptions.subscribe_request import SubscribeRequest
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.protocol.identify import Negotiated
from nsqext.types import Address, TopicMeta
from tests.support.consumers import QUICK, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

TAGS: dict[str, Any] = {"dispatch": "key_failover", "key_tags": 4}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node, shared by the tests of this module."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"key_tags": 4}, "key_tags has no effect without dispatch='key_failover'"),
        ({**TAGS, "tag": "blue"}, "tag and key_tags contradict each other"),
        ({**TAGS, "key_tags": -1}, "key_tags=-1 is not a number of buckets, 0 to 1024"),
        ({**TAGS, "ordered": True}, "ordered and dispatch='key_failover' contradict each other"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSetting, match=text):
        Consumer("t", "ch", lookupd="127.0.0.1:1", **settings)


def _request(partition: int, meta: TopicMeta) -> SubscribeRequest:
    return SubscribeRequest("t", "ch", partition, Address("h", 1), meta, "x", ConsumerOptions(**TAGS), "me")


def test_servers_and_topics_without_tags_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="needs a redesigned NSQ with lookup"):
        _request(-1, TopicMeta()).check(Negotiated())
    with pytest.raises(InvalidSetting, match="does not support extend headers, which key_tags needs"):
        _request(0, TopicMeta(1)).check(Negotiated())
    request = _request(0, TopicMeta(1, extend_support=True))
    request.check(Negotiated())  # a server that does not know dispatch types
    asked = request.identify()
    assert (asked.client_id, asked.desired_tag, asked.extra) == ("me", "x", {"dispatch": "shared"})


@pytest.mark.anyio
async def test_a_consumer_without_lookup_is_refused(cluster: Cluster) -> None:
    cluster.create_topic("fixed", extend=True, channels=["ch"])
    [node] = cluster.nodes.values()
    consumer = Consumer("fixed", "ch", nsqd=node.tcp, **TAGS, **QUICK)
    consumer.handler(_nothing)
    with pytest.raises(InvalidSetting, match="needs a redesigned NSQ with lookup"):
        await consumer.serve()


async def _nothing(_: Message) -> None:
    await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_a_tag_of_the_caller_is_refused(cluster: Cluster) -> None:
    cluster.create_topic("tagged", extend=True, channels=["ch"])
    async with Producer(cluster.lookupd, key_tags=4) as producer:
        with pytest.raises(InvalidInput, match="tag='blue' and key_tags contradict each other"):
            await producer.publish("tagged", b"x", key="a", tag="blue")


@pytest.mark.anyio
async def test_a_message_without_a_bucket_is_logged_and_taken_by_another_consumer(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_buckets, "_POLL", 0.05)
    name = "blocked"
    cluster.create_topic(name, extend=True, channels=["ch"])
    got: list[bytes] = []

    async def handle(message: Message) -> None:
        got.append(message.body)

    buckets = Consumer(name, "ch", lookupd=cluster.lookupd, **TAGS, **QUICK)
    plain = Consumer(name, "ch", lookupd=cluster.lookupd, **QUICK)
    for consumer in (buckets, plain):
        consumer.handler(handle)
    async with (
        create_task_group() as tasks,
        Producer(cluster.lookupd) as untagged,
        Producer(cluster.lookupd, key_tags=4) as producer,
    ):
        tasks.start_soon(buckets.serve)
        await eventually(lambda: len(buckets.connections) == 5)
        await untagged.publish(name, b"old", key="a")
        await producer.publish(name, b"new", key="a")
        await eventually(lambda: "the next one has no tag of key_tags=4" in caplog.text)
        assert got == []
        tasks.start_soon(plain.serve)
        await eventually(lambda: got == [b"old", b"new"])
        buckets.stop()
        plain.stop()
