"""Compression of bodies by topic."""

from __future__ import annotations

import tracemalloc
from typing import Any

import anyio
import pytest

from nsqext import Consumer, OutgoingMessage, Producer
from nsqext.broker import Cluster
from nsqext.client.producer.options import ProducerOptions, TopicOptions
from nsqext.errors import BatchFailed, ExtendNotSupported, InvalidName, InvalidSetting, NsqError
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, Codec, read_compression
from nsqext.types import TopicMeta
from tests.support.messages import finish_all

BODY = b"x" * 1000


@pytest.mark.parametrize(
    ("topic", "codec"),
    [("logs", "gzip"), ("logs.old", "none"), ("events.a", "snappy"), ("events.b", "gzip"), ("orders", "none")],
)
def test_a_name_goes_before_the_first_pattern(topic: str, codec: str) -> None:
    table = read_compression("events.*=snappy, logs=gzip, events.b=gzip, logs.old=none, l*=snappy")
    options = TopicOptions(ProducerOptions(compression=table))
    assert options.of(topic).compression == codec
    assert options.of(topic) is options.of(topic)


def test_one_codec_is_for_all_topics() -> None:
    options = ProducerOptions(compression="gzip")
    assert TopicOptions(options).of("any") is options


def test_many_topics_take_bounded_memory() -> None:
    options = TopicOptions(ProducerOptions(compression={"*": "gzip"}))
    tracemalloc.start()
    try:
        for number in range(25_000):
            assert options.of(f"t{number}").compression == "gzip"
        assert tracemalloc.get_traced_memory()[0] < 2 << 20, "all of them take 3.5 MiB"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"logs": "zip"}, InvalidSetting, "compression 'zip' is unknown"),
        ({"a b": "gzip"}, InvalidName, "topic name 'a b' is not valid"),
        ({"a b*": "gzip"}, InvalidName, "topic pattern"),
        (["gzip"], InvalidSetting, "compression is a list"),
        (None, InvalidSetting, "compression is a NoneType"),
    ],
)
def test_what_is_not_valid_is_refused(given: Any, kind: type[NsqError], text: str) -> None:
    with pytest.raises(kind, match=text):
        Producer("127.0.0.1:4161", compression=given)


def test_a_url_names_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Producer("nsq://127.0.0.1:4161?compression=logs%3Dsnappy,events.*%3Dgzip")
    assert producer.settings["compression"] == {"logs": "snappy", "events.*": "gzip"}
    monkeypatch.setenv("NSQEXT_COMPRESSION", "logs=snappy,gzip")
    with pytest.raises(InvalidSetting, match="topic=codec"):
        Producer("127.0.0.1:4161", env="NSQEXT_")
    monkeypatch.setenv("NSQEXT_COMPRESSION", "logs=snappy, logs = gzip")
    with pytest.raises(InvalidSetting, match="'logs' is given twice"):
        Producer("127.0.0.1:4161", env="NSQEXT_")


def test_later_changes_of_the_given_table_have_no_effect() -> None:
    given: dict[str, Codec] = {"logs": "gzip"}
    options = TopicOptions(ProducerOptions(compression=given))
    given["orders"] = "snappy"
    assert options.of("orders").compression == "none"


@pytest.mark.parametrize(("partitions", "upgrade"), [(2, True), (0, False)])
def test_only_topics_of_the_redesigned_nsq_can_be_upgraded(partitions: int, upgrade: bool) -> None:
    options = TopicOptions(ProducerOptions(compression={"logs": "gzip"}))
    with pytest.raises(ExtendNotSupported, match="leave it out of compression") as caught:
        options.check("logs", TopicMeta(partitions))
    assert ("upgrade" in str(caught.value)) is upgrade


@pytest.mark.anyio
async def test_bodies_are_compressed_by_topic() -> None:
    with Cluster(nodes=1) as cluster:
        for topic in ("logs", "orders"):
            cluster.create_topic(topic, extend=True, channels=["ch"])
        async with Producer(cluster.lookupd, compression={"logs": "gzip"}, compression_min=100) as producer:
            for topic in ("logs", "orders"):
                await producer.publish(topic, BODY)
                await producer.publish(topic, BODY, key="k", headers={"a": "b"})
                await producer.publish_many(topic, [BODY, OutgoingMessage(BODY, {"a": "b"})])
        for topic, compressed in (("logs", True), ("orders", False)):
            async with Consumer(topic, "ch", cluster.lookupd, decompress=False) as consumer:
                messages = await finish_all(consumer, 4)
            assert [COMPRESS_HEADER in message.headers for message in messages] == [compressed] * 4
            assert [len(message.body) < 100 for message in messages] == [compressed] * 4


@pytest.mark.anyio
async def test_a_named_topic_has_to_support_it() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("logs", channels=["ch"])
        cluster.create_topic("events.plain", channels=["ch"])
        async with Producer(cluster.lookupd, compression={"logs": "gzip", "events.*": "gzip"}) as producer:
            for _ in range(2):
                with pytest.raises(ExtendNotSupported, match="compression has no effect"):
                    await producer.publish("logs", b"hi")
                with pytest.raises((ExtendNotSupported, BatchFailed), match="compression has no effect"):
                    await producer.publish_many("logs", [b"hi"])
            await producer.publish("events.plain", b"hi")
            cluster.upgrade_topic("logs")
            with anyio.fail_after(25):  # lookup is asked again a second after it has refused
                while not await _publishes(producer, "logs"):  # noqa: ASYNC110 - no event for it
                    await anyio.sleep(0.05)


async def _publishes(producer: Producer, topic: str) -> bool:
    try:
        await producer.publish(topic, b"hi")
    except ExtendNotSupported:
        return False
    return True
