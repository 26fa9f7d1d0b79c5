"""The messages of one task, on their way."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import anyio
import pytest
import trustme

from nsqext import OutgoingMessage
from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import (
    BatchFailed,
    DeliveryUnknown,
    InvalidInput,
    InvalidPartition,
    NsqError,
    PublishFailed,
    TopicNotFound,
    TopicNotReady,
)
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.write import publisher
from nsqext.spark.write.publisher import RowPublisher, Tallies, publish_chunks, wait_logging
from nsqext.spark.write.row_mapper import Chunk
from nsqext.sync import Consumer
from nsqext.types import Receipt, TopicMeta
from tests.support.spark_cluster import collect

if TYPE_CHECKING:
    from tests.support.spark_cluster import Servers

Meta = Callable[[str], TopicMeta]


def chunk(*messages: tuple[str, int | None, bytes | OutgoingMessage], first: int = 0) -> Chunk:
    made = Chunk()
    for row, (topic, partition, message) in enumerate(messages, first):
        made.add((topic, partition), row, message, 1)
    return made


def publish(servers: Servers, *chunks: Chunk, **settings: str) -> Tallies:
    return publish_chunks(ClientConfig(tuple(servers.lookupd), settings), 5, lambda meta: chunks)


def test_chunks_are_stored_in_their_order(servers: Servers) -> None:
    topic = servers.make_topic("order", 2)
    other = servers.make_topic("other", 1, extend=True)
    chunks = [
        chunk(
            (topic, 1, b"a%d" % number),
            (topic, None, OutgoingMessage(b"k%d" % number, key="key")),
            (other, None, OutgoingMessage(b"o%d" % number, {"n": str(number)})),
        )
        for number in range(20)
    ]
    tallies = publish(servers, *chunks)
    assert tallies.total() == 60
    bodies = [message.body for message in collect(servers, topic, 40)]
    for letter in (b"a", b"k"):
        assert [body for body in bodies if body.startswith(letter)] == [letter + b"%d" % number for number in range(20)]
    found = collect(servers, other, 20)
    assert [(message.body, dict(message.headers)) for message in found] == [
        (b"o%d" % number, {"n": str(number)}) for number in range(20)
    ]


class Answers:
    """A producer that stores nothing, or a part."""

    def __init__(self, error: NsqError) -> None:
        self._error = error

    async def publish_many(self, topic: str, messages: object, *, partition: int | None) -> list[object]:
        raise self._error


def test_the_first_row_that_was_not_stored_is_named_and_others_count() -> None:
    task = RowPublisher(ClientConfig(("127.0.0.1:1",)), 5)
    outcomes: list[Receipt | NsqError] = [Receipt("t", 0, "n:1"), DeliveryUnknown("no response")]
    task.producer = Answers(BatchFailed(outcomes))  # type: ignore[assignment]
    messages = chunk(("t", 0, b"0"), ("u", 0, b"1"), ("u", 0, b"2"), ("t", 0, b"3"))
    with pytest.raises(DeliveryUnknown, match="row 2 of Spark partition 5: no response"):
        anyio.run(task.publish, messages)
    assert task.tallies == {("t", 0): 1, ("u", 0): 1}


def test_an_error_has_the_attempts_of_its_publish() -> None:
    error = DeliveryUnknown("no response")
    error.attempts = (PublishFailed("refused"),)
    task = RowPublisher(ClientConfig(("127.0.0.1:1",)), 5)
    task.producer = Answers(error)  # type: ignore[assignment]
    with pytest.raises(DeliveryUnknown, match="row 3 ") as caught:
        anyio.run(task.publish, chunk(("t", 0, b"x"), first=3))
    assert caught.value.attempts == error.attempts


class Script:
    """A producer that records publishes and raises the errors of a script, by topic and bodies."""

    def __init__(self, **errors: NsqError) -> None:
        self._errors = errors
        self.sent: list[str] = []

    async def publish_many(self, topic: str, messages: list[bytes], *, partition: int | None) -> list[Receipt]:
        self.sent.append(name := f"{topic}_{b''.join(messages).decode()}")
        if name in self._errors:
            raise self._errors[name]
        return [Receipt(topic, partition, "n:1")] * len(messages)


def described(script: Script) -> RowPublisher:
    task = RowPublisher(ClientConfig(("127.0.0.1:1",)), 5, lambda row, error, fields: (("bad", None), b"x", 1))
    task.producer = script  # type: ignore[assignment]
    return task


def test_rows_behind_a_bad_row_follow_the_rows_before_it() -> None:
    bad = InvalidInput("too large")
    bad.index = 1
    script = Script(t_012=bad, t_0=DeliveryUnknown("no response"))
    with pytest.raises(DeliveryUnknown, match="row 0 "):
        anyio.run(described(script).publish, chunk(*(("t", 0, b"%d" % row) for row in range(3))))
    assert script.sent == ["t_012", "bad_x", "t_0"]


def test_a_bad_row_behind_a_failure_is_not_described() -> None:
    """Its task is run again."""
    outcomes: list[Receipt | NsqError] = [DeliveryUnknown("no response"), InvalidInput("too large")]
    script = Script(t_01=BatchFailed(outcomes))
    with pytest.raises(DeliveryUnknown, match="row 0 "):
        anyio.run(described(script).publish, chunk(("t", 0, b"0"), ("t", 0, b"1")))
    assert script.sent == ["t_01"]


def test_a_bad_row_of_the_topic_of_bad_rows_is_not_described() -> None:
    task = RowPublisher(ClientConfig(("127.0.0.1:1",)), 5, lambda row, error, fields: (("bad", None), b"bad", 3))
    task.producer = Answers(InvalidInput("too large"))  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="row 0 of Spark partition 5: too large"):
        anyio.run(task.publish, chunk(("bad", None, b"x")))


def test_a_task_that_waits_for_the_servers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: Future[None] = Future()
    records: list[str] = []

    def log(text: str, *values: object) -> None:
        records.append(text % values)
        pending.set_result(None)

    monkeypatch.setattr(publisher, "LOG_INTERVAL", 0.01)
    monkeypatch.setattr(publisher.logger, "warning", log)
    wait_logging(pending, 5)
    (record,) = records
    assert re.fullmatch(
        r"Spark partition 5: messages were not acknowledged for \d+ s; the producer tries again", record
    )
    failed: Future[None] = Future()
    failed.set_exception(InvalidInput("a body"))
    with pytest.raises(InvalidInput, match="a body"):
        wait_logging(failed, 5)


def test_an_error_names_row_topic_and_partition(servers: Servers) -> None:
    topic = servers.make_topic("refused", 1)
    good = (topic, None, b"good")
    with pytest.raises(InvalidInput) as caught:
        publish(servers, chunk(good), chunk(good, (topic, None, OutgoingMessage(b"x", {"a": "b"})), good, first=1))
    assert str(caught.value).startswith("row 2 of Spark partition 5: the topic does not accept headers")
    assert caught.value.topic == topic
    with pytest.raises(InvalidPartition) as failed:
        publish(servers, chunk((topic, 0, b"x"), (topic, 7, b"x"), first=40))
    assert str(failed.value).startswith("row 41 of Spark partition 5: ")
    assert (failed.value.topic, failed.value.partition) == (topic, 7)


def test_the_next_chunk_is_not_sent_after_one_that_failed(servers: Servers) -> None:
    topic = servers.make_topic("stop", 1)
    made: list[int] = []

    def chunks(meta: Meta) -> Iterator[Chunk]:
        for number in range(10):
            made.append(number)
            yield chunk(
                (topic, None, OutgoingMessage(b"x", {"a": "b"}) if number == 2 else b"%d" % number), first=number
            )

    with pytest.raises(NsqError, match="row 2 of Spark partition 5"):
        publish_chunks(ClientConfig(tuple(servers.lookupd)), 5, chunks)
    assert made == [0, 1, 2, 3]
    servers.publish(topic, [b"end"])
    assert [message.body for message in collect(servers, topic, 3)] == [b"0", b"1", b"end"]


def test_a_chunk_that_waits_is_cancelled_when_the_rows_fail(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task ended only once its last chunk was stored, and Spark ran it again meanwhile."""
    ended: list[str] = []
    begun = Event()

    async def publish_slowly(task: RowPublisher, made: Chunk) -> None:
        try:
            begun.set()
            await anyio.sleep(60)
            ended.append("stored")
        except anyio.get_cancelled_exc_class():
            ended.append("cancelled")
            raise

    def chunks(meta: Meta) -> Iterator[Chunk]:
        yield chunk(("t", None, b"x"))
        begun.wait()
        raise ValueError("the rows cannot be read")

    monkeypatch.setattr(RowPublisher, "publish", publish_slowly)
    with pytest.raises(ValueError, match="the rows cannot be read"):
        publish_chunks(ClientConfig(tuple(servers.lookupd)), 5, chunks)
    assert ended == ["cancelled"]


def test_requests_for_topics(servers: Servers) -> None:
    topic = servers.make_topic("meta", 2, extend=True)
    expected: list[TopicMeta] = []

    def chunks(meta: Meta) -> Iterable[Chunk]:
        expected.append(meta(topic))
        return ()

    assert publish_chunks(ClientConfig(tuple(servers.lookupd)), 0, chunks) == {}
    assert (expected[0].partition_num, expected[0].extend_support) == (2, True)


def test_a_missing_topic_is_refused(servers: Servers) -> None:
    def chunks(meta: Meta) -> Iterable[Chunk]:
        meta("there_is_no_such_topic")
        return ()

    with pytest.raises(TopicNotFound):
        publish_chunks(ClientConfig(tuple(servers.lookupd)), 0, chunks)


def test_a_topic_without_channel_is_not_ready() -> None:
    with Cluster(nodes=1) as cluster:
        cluster.create_topic("t", channels=[])
        with pytest.raises(TopicNotReady, match=r"row 0 of Spark partition 5: .*no channel"):
            publish_chunks(ClientConfig(tuple(cluster.lookupd)), 5, lambda meta: [chunk(("t", 0, b"x"))])


def test_the_original_nsq_creates_topics() -> None:
    expected: list[TopicMeta] = []

    def chunks(meta: Meta) -> Iterable[Chunk]:
        expected.append(meta("fresh"))
        return [chunk(("fresh", None, b"x"), ("fresh", None, b"y"))]

    with Cluster(nodes=1, generation="original") as cluster:
        tallies = publish_chunks(ClientConfig(tuple(cluster.lookupd)), 0, chunks)
    assert expected == [TopicMeta()]
    assert tallies == {("fresh", None): 2}


def test_no_row_is_lost_when_a_leader_is_killed() -> None:
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("t", 2, replicas=3, channels=["ready"])

        def chunks(meta: Meta) -> Iterator[Chunk]:
            for number in range(40):
                if number == 10:
                    cluster.kill(cluster.leader("t", 0))
                yield chunk(*(("t", number % 2, b"%d" % (number * 10 + row)) for row in range(10)), first=number * 10)

        tallies = publish_chunks(ClientConfig(tuple(cluster.lookupd)), 0, chunks)
        assert tallies.total() == 400
        found: set[int] = set()
        with Consumer("t", "ready", lookupd=cluster.lookupd) as consumer:
            for message in consumer:
                message.finish()
                found.add(int(message.body))
                if len(found) == 400:
                    break
        assert found == set(range(400))


def test_a_certificate_is_checked(tmp_path: Path) -> None:
    authority = trustme.CA()
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(served)
    file = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(file)
    with Cluster(nodes=1, options=ClusterOptions(tls=served)) as cluster:
        cluster.create_topic("t", channels=["ready"])
        access = ClientConfig(tuple(cluster.lookupd), {"tls": str(file)})
        assert publish_chunks(access, 0, lambda meta: [chunk(("t", None, b"x"))]) == {("t", 0): 1}
        unknown = ClientConfig(tuple(cluster.lookupd), {"tls": "true", "timeout": "2"})
        with pytest.raises(PublishFailed, match=r"row 0 of Spark partition 0.*certificate"):
            publish_chunks(unknown, 0, lambda meta: [chunk(("t", None, b"x"))])


def test_lookup_is_waited_for(servers: Servers) -> None:
    access = ClientConfig(("127.0.0.1:1",), {"timeout": "0.3", "lookup_request_timeout": "0.1"})
    with pytest.raises(PublishFailed, match="row 0 of Spark partition 5: no lookup node returned a usable response"):
        publish_chunks(access, 5, lambda meta: [chunk(("t", None, b"x"))])
