"""The receipts and errors of publishes, over TCP and over HTTP."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest

from nsqext import Consumer, OutgoingMessage, Producer, Receipt
from nsqext.protocol.hashing import java_string_partition, murmur3_partition
from tests.support.cluster import PARTITIONS, ClusterUnderTest
from tests.support.messages import finish_all, placed
from tests.support.transports import Transport, over_tcp_and_http

pytestmark = pytest.mark.anyio

RECORD = 30  # bytes of a record besides its body: length, timestamp, attempts, id, trace id


def unknown(receipt: Receipt) -> bool:
    """Return whether a receipt contains only topic, partition and node."""
    return (receipt.message_id, receipt.trace_id, receipt.offset, receipt.size) == (None, 0, None, None)


@over_tcp_and_http
async def test_a_plain_receipt_has_topic_partition_and_node(
    cluster_under_test: ClusterUnderTest, transport: Transport
) -> None:
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        receipt = await producer.publish(cluster_under_test.plain, b"hi")
    assert receipt.topic == cluster_under_test.plain
    assert receipt.partition in range(PARTITIONS)
    assert receipt.node in {node.tcp for node in cluster_under_test.nodes}
    assert unknown(receipt)


@over_tcp_and_http
async def test_without_key_partitions_take_turns(cluster_under_test: ClusterUnderTest, transport: Transport) -> None:
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        receipts = [await producer.publish(cluster_under_test.plain, b"hi") for _ in range(6)]
    assert Counter(receipt.partition for receipt in receipts) == {0: 3, 1: 3}


@pytest.mark.parametrize("trace_id", [0, 7, 2**64 - 1])
@over_tcp_and_http
async def test_a_traced_receipt_has_id_offset_and_size(
    cluster_under_test: ClusterUnderTest, transport: Transport, trace_id: int
) -> None:
    topic = cluster_under_test.plain
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        first = await producer.publish(topic, b"12345", trace_id=trace_id, partition=1)
        second = await producer.publish(topic, b"6", trace_id=trace_id, partition=1)
    first_id, first_offset, first_size = placed(first)
    assert (first.trace_id, first_size, first_id >> 50) == (trace_id, RECORD + 5, 1)
    assert (second.trace_id, second.size) == (trace_id, RECORD + 1)
    assert second.message_id == first_id + 1
    assert second.offset == first_offset + first_size


@over_tcp_and_http
async def test_records_of_extend_topics_contain_version_and_header(
    cluster_under_test: ClusterUnderTest, transport: Transport
) -> None:
    topic = cluster_under_test.extend
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        bare = await producer.publish(topic, b"12345", trace_id=7)
        full = await producer.publish(topic, b"12345", trace_id=7, headers={"k": "v"})
    assert bare.size == RECORD + 1 + 5
    assert full.size == RECORD + 1 + 2 + len(b'{"k":"v","##trace_id":"7"}') + 5


@over_tcp_and_http
async def test_receipts_of_headers_and_tags_without_trace_have_no_position(
    cluster_under_test: ClusterUnderTest,
    transport: Transport,
) -> None:
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        headed = await producer.publish(cluster_under_test.extend, b"hi", headers={"user": "42"})
        tagged = await producer.publish(cluster_under_test.extend, b"hi", tag="canary")
        plain = await producer.publish(cluster_under_test.extend, b"hi")
    assert unknown(headed)
    assert unknown(tagged)
    assert unknown(plain)


@pytest.mark.parametrize("partition", range(PARTITIONS))
@over_tcp_and_http
async def test_a_partition_can_be_chosen(
    cluster_under_test: ClusterUnderTest, transport: Transport, partition: int
) -> None:
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        receipts = [await producer.publish(cluster_under_test.plain, b"hi", partition=partition) for _ in range(3)]
    assert {receipt.partition for receipt in receipts} == {partition}


@pytest.mark.parametrize("topic", ["plain", "extend", "ordered"])
@over_tcp_and_http
async def test_a_key_decides_the_partition(
    cluster_under_test: ClusterUnderTest, transport: Transport, topic: str
) -> None:
    keys = [f"order {number}" for number in range(12)]
    name: str = getattr(cluster_under_test, topic)
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        found = [(await producer.publish(name, b"hi", key=key)).partition for key in keys]
    assert found == [murmur3_partition(key.encode(), PARTITIONS) for key in keys]
    assert set(found) == {0, 1}


@over_tcp_and_http
async def test_many_bodies_are_one_batch(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    bodies = [b"%d" % number for number in range(100)]
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        receipts = await producer.publish_many(topic, bodies)
        messages = await finish_all(consumer, 100)
    assert len(receipts) == 100
    assert len({receipt.partition for receipt in receipts}) == 1
    assert [message.body for message in messages] == bodies


@over_tcp_and_http
async def test_many_traced_messages_have_their_own_receipts(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    drafts = [OutgoingMessage(b"x" * number, trace_id=number) for number in range(1, 6)]
    async with (
        Consumer(topic, channel, lookupd=lookupd, queue_position=True) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        receipts = await producer.publish_many(topic, drafts, partition=0)
        messages = await finish_all(consumer, 5)
    expected = [(receipt.trace_id, receipt.message_id, receipt.offset, receipt.size) for receipt in receipts]
    assert expected == [(message.trace_id, message.internal_id, message.offset, message.size) for message in messages]
    assert [message.trace_id for message in messages] == [1, 2, 3, 4, 5]


@over_tcp_and_http
async def test_many_mixed_messages_keep_their_headers_and_bodies(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    drafts = [
        OutgoingMessage(b"bare"),
        OutgoingMessage(b"headed", headers={"a": "1"}),
        OutgoingMessage(b"tagged", tag="canary"),
        OutgoingMessage(b"traced", headers={"b": "2"}, trace_id=9),
    ]
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        receipts = await producer.publish_many(topic, drafts, partition=1)
        messages = await finish_all(consumer, 4)
    assert [receipt.partition for receipt in receipts] == [1, 1, 1, 1]
    assert [(message.body, dict(message.headers), message.tag, message.trace_id) for message in messages] == [
        (b"bare", {}, None, 0),
        (b"headed", {"a": "1"}, None, 0),
        (b"tagged", {}, "canary", 0),
        (b"traced", {"b": "2"}, None, 9),
    ]


@over_tcp_and_http
async def test_many_keyed_messages_are_sent_to_the_partitions_of_their_keys(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    keys = [f"key {number % 5}" for number in range(20)]
    drafts = [OutgoingMessage(b"%d" % number, key=key) for number, key in enumerate(keys)]
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        receipts = await producer.publish_many(topic, drafts)
        messages = await finish_all(consumer, 20)
    places = [murmur3_partition(key.encode(), PARTITIONS) for key in keys]
    assert [receipt.partition for receipt in receipts] == places
    for partition in range(PARTITIONS):
        bodies = [int(message.body) for message in messages if message.partition == partition]
        assert bodies == [number for number, place in enumerate(places) if place == partition]


@over_tcp_and_http
async def test_a_batch_larger_than_servers_take_is_split(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    bodies = [b"%02d" % number + b"x" * 1_000_000 for number in range(7)]
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        receipts = await producer.publish_many(topic, bodies)
        messages = await finish_all(consumer, 7)
    assert len(receipts) == 7
    assert sorted(message.body for message in messages) == bodies


@over_tcp_and_http
async def test_publishes_at_the_same_time_are_all_stored_once(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    bodies = {b"%d" % number for number in range(100)}
    receipts: list[Receipt] = []
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):

        async def publish(body: bytes) -> None:
            receipts.append(await producer.publish(topic, body, trace_id=1))

        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(publish, body)
        messages = await finish_all(consumer, 100)
    assert {message.body for message in messages} == bodies
    assert {receipt.message_id for receipt in receipts} == {message.internal_id for message in messages}


@over_tcp_and_http
async def test_the_largest_message_passes(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    body = bytes(range(256)) * 4096
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        await producer.publish(topic, body)
        message = (await finish_all(consumer, 1))[0]
    assert message.body == body


@over_tcp_and_http
async def test_headers_of_any_text_are_delivered_unchanged(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    headers = {"Name_a.b": '% + < > & é " \\ \n \u2028 %41', "number": "12345678901234567890", "long": "x" * 55_000}
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        await producer.publish(topic, b"hi", headers=headers, key="ké %", tag="canary", trace_id=2**64 - 1)
        (message,) = await finish_all(consumer, 1)
    assert (dict(message.headers), message.key, message.tag, message.trace_id) == (headers, "ké %", "canary", 2**64 - 1)


@pytest.mark.parametrize(("path", "stored"), [("/pub", True), ("/mpub", False)])
async def test_a_body_that_is_cut_off_is_stored_by_pub_only(
    cluster_under_test: ClusterUnderTest, channel: str, path: str, stored: bool
) -> None:
    """Therefore producers send even one body as a batch."""
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd, transport="http") as producer:
        node = (await producer.publish(topic, b"before", partition=0)).node
        http = next(one.http for one in cluster_under_test.nodes if one.tcp == node)
        host, _, port = http.partition(":")
        body = b"cut" if stored else b"\0\0\0\1\0\0\0\x64cut"
        query = f"topic={topic}&partition=0{'' if stored else '&binary=true'}"
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(
                f"POST {path}?{query} HTTP/1.1\r\nHost: {http}\r\nContent-Length: 108\r\n\r\n".encode() + body
            )
            await stream.send_eof()
            assert (await stream.receive()).startswith(b"HTTP/1.1 200 OK" if stored else b"HTTP/1.1 500 ")
        await producer.publish(topic, b"after", partition=0)
        messages = await finish_all(consumer, 2 + stored)
    assert [message.body for message in messages] == [b"before", *[b"cut"] * stored, b"after"]


@over_tcp_and_http
async def test_keys_are_hashed_as_by_the_java_client_if_requested(
    cluster_under_test: ClusterUnderTest, transport: Transport
) -> None:

    keys = [f"order {number}" for number in range(6)]
    async with Producer(cluster_under_test.lookupd, transport=transport, key_hash="java_string") as producer:
        found = [(await producer.publish(cluster_under_test.plain, b"hi", key=key)).partition for key in keys]
    assert found == [java_string_partition(key.encode(), PARTITIONS) for key in keys]
