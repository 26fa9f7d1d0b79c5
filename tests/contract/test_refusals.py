"""Invalid input is refused with a clear error before anything is sent; invalid data from a peer does not hang."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from nsqext import BatchFailed, Consumer, NsqError, OutgoingMessage, Producer
from nsqext.errors import (
    ExtendNotSupported,
    InvalidBody,
    InvalidHeader,
    InvalidInput,
    InvalidName,
    InvalidPartition,
    InvalidState,
    LookupFailed,
    ProtocolError,
    PublishFailed,
)
from tests.support.cluster import PARTITIONS, ClusterUnderTest
from tests.support.messages import DEADLINE, finish_all
from tests.support.transports import Transport, over_tcp_and_http

pytestmark = pytest.mark.anyio

MEGABYTE = 1024 * 1024

BAD: list[tuple[str, dict[str, Any], type[InvalidInput]]] = [
    ("extend", {"body": b""}, InvalidBody),
    ("extend", {"body": "text"}, InvalidBody),
    ("extend", {"body": b"x" * (MEGABYTE + 1)}, InvalidBody),
    ("extend", {"body": b"x" * (MEGABYTE - 7), "trace_id": 1}, InvalidBody),
    ("extend", {"topic": ""}, InvalidName),
    ("extend", {"topic": "a b"}, InvalidName),
    ("extend", {"topic": "x" * 65}, InvalidName),
    ("extend", {"tag": ""}, InvalidName),
    ("extend", {"tag": "a b"}, InvalidName),
    ("extend", {"tag": "x" * 101}, InvalidName),
    ("extend", {"headers": {"": "1"}}, InvalidHeader),
    ("extend", {"headers": {"a b": "1"}}, InvalidHeader),
    ("extend", {"headers": {"##mine": "1"}}, InvalidHeader),
    ("extend", {"headers": {"a": 1}}, InvalidHeader),
    ("extend", {"headers": {"a": "\ud800"}}, InvalidHeader),
    ("extend", {"headers": {"a": "x" * 65_000}}, InvalidHeader),
    ("extend", {"trace_id": -1}, InvalidInput),
    ("extend", {"trace_id": 2**64}, InvalidInput),
    ("extend", {"partition": 2}, InvalidPartition),
    ("extend", {"partition": -1}, InvalidPartition),
    ("extend", {"partition": 0, "key": "k"}, InvalidPartition),
    ("extend", {"key": 7.5}, InvalidInput),
    ("plain", {"headers": {"a": "1"}}, ExtendNotSupported),
    ("plain", {"tag": "canary"}, ExtendNotSupported),
    ("ordered", {"headers": {"a": "1"}, "key": "k"}, ExtendNotSupported),
]


@pytest.mark.parametrize("kind", ["plain", "extend", "ordered"])
@over_tcp_and_http
async def test_refused_messages_are_not_delivered(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str, kind: str
) -> None:
    topic: str = getattr(cluster_under_test, kind)
    lookupd = cluster_under_test.lookupd
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        for given, error in ((given, error) for of, given, error in BAD if of == kind):
            with anyio.fail_after(DEADLINE), pytest.raises(error):
                await producer.publish(**{"topic": topic, "body": b"hi", **given})
        assert producer.statistics().stored == 0
        for partition in range(PARTITIONS):
            await producer.publish(topic, b"afterwards", partition=partition)
        messages = await finish_all(consumer, PARTITIONS)
    assert [message.body for message in messages] == [b"afterwards"] * PARTITIONS


@over_tcp_and_http
async def test_nothing_of_a_bad_batch_is_sent(
    cluster_under_test: ClusterUnderTest, transport: Transport, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    batches: list[tuple[list[Any], type[InvalidInput]]] = [
        ([b"good", b""], InvalidBody),
        ([b"good", OutgoingMessage(b"bad", headers={"##mine": "1"})], InvalidHeader),
        ([b"good", OutgoingMessage(b"bad", tag="a b")], InvalidName),
        ([b"good", OutgoingMessage(b"bad", trace_id=-1)], InvalidInput),
        ([b"good", b"x" * (MEGABYTE + 1)], InvalidBody),
    ]
    async with (
        Consumer(topic, channel, lookupd=lookupd) as consumer,
        Producer(lookupd, transport=transport) as producer,
    ):
        for batch, error in batches:
            with pytest.raises(error):
                await producer.publish_many(topic, batch, partition=0)
        await producer.publish(topic, b"afterwards", partition=0)
        assert [message.body for message in await finish_all(consumer, 1)] == [b"afterwards"]


@over_tcp_and_http
async def test_headers_in_a_batch_for_a_plain_topic_are_refused(
    cluster_under_test: ClusterUnderTest, transport: Transport
) -> None:
    async with Producer(cluster_under_test.lookupd, transport=transport) as producer:
        with pytest.raises((ExtendNotSupported, BatchFailed), match="headers"):
            await producer.publish_many(cluster_under_test.plain, [OutgoingMessage(b"hi", headers={"a": "1"})])


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "a#b"])
async def test_names_that_no_server_accepts_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        Consumer(name, "ch", lookupd="127.0.0.1:4161")
    with pytest.raises(InvalidName):
        Consumer("orders", name, lookupd="127.0.0.1:4161")


async def test_a_producer_that_is_not_open_raises(cluster_under_test: ClusterUnderTest) -> None:
    producer = Producer(cluster_under_test.lookupd)
    with pytest.raises(InvalidState, match="not open"):
        await producer.publish(cluster_under_test.plain, b"hi")
    async with producer:
        await producer.publish(cluster_under_test.plain, b"hi")
    with pytest.raises(InvalidState):
        await producer.publish(cluster_under_test.plain, b"hi")


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Run a server that responds to any data with the same bytes; yield its address."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            try:
                await stream.receive()
                await stream.send(answer)
            except (anyio.BrokenResourceError, anyio.EndOfStream):
                return

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port: int = listener.extra_attributes[SocketAttribute.local_port]()
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 20\r\n\r\n<html>welcome</html>"


async def lookup_failure(lookupd: str) -> str:
    """Return the error of producer and consumer with a lookup address; both must be equal."""
    with anyio.fail_after(DEADLINE):
        async with Producer(lookupd) as producer:
            with pytest.raises(LookupFailed) as publishing:
                await producer.publish("orders", b"hi")
        with pytest.raises(LookupFailed) as consuming:
            async with Consumer("orders", "ch", lookupd=lookupd):
                pass
    assert publishing.value.message == consuming.value.message
    return str(publishing.value)


async def test_html_from_lookup_is_reported() -> None:
    async with answering(HTML) as address:
        text = await lookup_failure(address)
    assert "<html>welcome" in text
    assert address in text
    assert "nsqlookupd's HTTP side" in text


async def test_the_http_side_of_a_node_is_no_lookup_address(cluster_under_test: ClusterUnderTest) -> None:
    text = await lookup_failure(cluster_under_test.nodes[0].http)
    assert "nsqlookupd's HTTP side" in text


async def test_the_tcp_side_of_a_node_is_no_lookup_address(cluster_under_test: ClusterUnderTest) -> None:
    text = await lookup_failure(cluster_under_test.nodes[0].tcp)
    assert "nsqlookupd's HTTP side" in text


async def test_the_http_side_of_a_node_is_no_address_to_publish_to(cluster_under_test: ClusterUnderTest) -> None:
    address = cluster_under_test.nodes[0].http
    async with Producer(nsqd=address, timeout=5.0) as producer:
        with anyio.fail_after(DEADLINE), pytest.raises((ProtocolError, PublishFailed)) as failed:
            await producer.publish("orders", b"hi")
    assert address in str(failed.value)
    assert "HTTP" in str(failed.value)


async def test_the_http_side_of_a_node_is_no_address_to_consume_from(cluster_under_test: ClusterUnderTest) -> None:
    address = cluster_under_test.nodes[0].http
    with anyio.fail_after(DEADLINE), pytest.raises(NsqError) as failed:
        async with Consumer("orders", "ch", nsqd=address, start_timeout=5.0) as consumer:
            await anext(consumer)
    assert address in str(failed.value)
    assert "HTTP" in str(failed.value)
