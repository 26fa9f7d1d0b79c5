"""The blocking consumer and its messages."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

import nsqext
from nsqext import BackoffOptions, ConsumerOptions, FailureOptions, Position, sync
from nsqext.errors import InvalidSetting, InvalidState

if TYPE_CHECKING:
    from nsqext.broker import Cluster

CALM = ConsumerOptions(
    close_timeout=2.0, backoff=BackoffOptions(mode="off"), failure=FailureOptions(requeue_delay=0.01, jitter=0)
)


def fill(cluster: Cluster, topic: str, count: int) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish_many(topic, [b"%d" % number for number in range(count)])


def make(cluster: Cluster, topic: str, options: ConsumerOptions = CALM, concurrency: int = 1) -> sync.Consumer:
    return sync.Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=concurrency, options=options)


def test_iteration(cluster: Cluster, topic: str) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(topic, b"x", headers={"user": "42"}, trace_id=7)
    with make(cluster, topic) as consumer:
        message = next(consumer)
        assert (message.body, dict(message.headers), message.tag, message.trace_id) == (b"x", {"user": "42"}, None, 7)
        assert (message.topic, message.attempts, message.answered, message.expired) == (topic, 1, False, False)
        assert len(message.id) == 16
        assert message.internal_id > 0
        assert message.timestamp > 0
        assert message.node in {node.tcp for node in cluster.nodes.values()}
        assert (message.partition in (0, 1), message.in_order, message.offset, message.size) == (True, False, -1, 0)
        assert "##trace_id" in message.reserved_headers
        assert topic in repr(message)
        message.touch()
        message.requeue()
        again = next(consumer)
        assert (again.body, again.attempts) == (b"x", 2)
        again.finish()
        with pytest.raises(InvalidState):
            again.finish()
    with pytest.raises(InvalidState):
        again.touch()


def test_the_iteration_ends_with_stop(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 3)
    bodies = []
    with make(cluster, topic) as consumer:
        for message in consumer:
            message.finish()
            bodies.append(message.body)
            if len(bodies) == 3:
                threading.Timer(0.05, consumer.stop).start()
    assert sorted(bodies) == [b"0", b"1", b"2"]


def test_many_threads_iterate(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 200)
    seen: list[bytes] = []

    def consume(consumer: sync.Consumer) -> None:
        for message in consumer:
            message.finish()
            seen.append(message.body)
            if len(seen) == 200:
                consumer.stop()

    with make(cluster, topic) as consumer, ThreadPoolExecutor(4) as threads:
        list(threads.map(consume, [consumer] * 4))
    assert len(set(seen)) == len(seen) == 200


def test_handlers_run_in_threads_at_the_same_time(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 3)
    consumer = make(cluster, topic, concurrency=3)
    meeting = threading.Barrier(3, timeout=10)
    threads: set[int] = set()

    @consumer.handler
    def handle(message: sync.Message) -> None:
        meeting.wait()
        threads.add(threading.get_ident())
        consumer.stop()

    consumer.run()
    assert len(threads) == 3
    assert threading.get_ident() not in threads


def test_a_handler_decides_by_its_end(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    consumer = make(cluster, topic)
    attempts: list[int] = []

    @consumer.handler
    def handle(message: sync.Message) -> None:
        attempts.append(message.attempts)
        if message.attempts == 1:
            raise RuntimeError("first")
        if message.attempts == 2:
            raise nsqext.Requeue(0.01, backoff=False)
        if message.attempts == 3:
            message.requeue()
            return
        consumer.stop()

    consumer.run()
    assert attempts == [1, 2, 3, 4]


def test_sigterm_drains(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    consumer = make(cluster, topic)
    before = signal.getsignal(signal.SIGTERM)
    done: list[bytes] = []

    @consumer.handler
    def handle(message: sync.Message) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        done.append(message.body)

    consumer.run()
    assert (done, signal.getsignal(signal.SIGTERM)) == ([b"0"], before)


def test_it_runs_in_other_threads(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    consumer = make(cluster, topic)
    consumer.handler(lambda message: consumer.stop())
    thread = threading.Thread(target=consumer.run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_a_handler_that_does_not_end_is_left_behind(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    consumer = make(cluster, topic, ConsumerOptions(close_timeout=0.1))
    release, ended = threading.Event(), threading.Event()
    late: list[BaseException] = []

    @consumer.handler
    def handle(message: sync.Message) -> None:
        consumer.stop()
        release.wait(10)
        try:
            message.finish()
        except InvalidState as error:
            late.append(error)
        ended.set()

    consumer.run()
    release.set()
    assert ended.wait(10)
    assert "cannot be used here" in str(late[0])


def test_what_cannot_be(cluster: Cluster) -> None:
    consumer = sync.Consumer("orders", "ch", lookupd=cluster.lookupd)

    async def handle(message: sync.Message) -> None:
        """Never called."""

    with pytest.raises(InvalidSetting, match="coroutine function"):
        consumer.handler(handle)
    with pytest.raises(InvalidState, match="no handler"):
        consumer.run()
    with pytest.raises(InvalidState, match="not open"):
        next(consumer)


def test_stop_before_run(cluster: Cluster, topic: str) -> None:
    consumer = make(cluster, topic)
    consumer.handler(lambda message: None)
    consumer.stop()
    consumer.run()


def test_pause_seek_and_connections(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 2)
    with make(cluster, topic) as consumer:
        assert (consumer.topic, consumer.channel, consumer.options) == (topic, "ch", CALM)
        assert {connection.partition for connection in consumer.connections} == {0, 1}
        messages = [next(consumer), next(consumer)]
        first = {message.body for message in messages}
        consumer.max_in_flight = 50
        assert consumer.max_in_flight == 50
        consumer.pause()
        assert consumer.paused
        consumer.resume()
        assert not consumer.paused
        consumer.seek(Position.earliest(), [messages[0].partition])
        again = set()
        while again != first:
            message = next(consumer)
            message.finish()
            again.add(message.body)


def test_a_consumer_that_is_open_does_not_run_as_well(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    with make(cluster, topic) as consumer:
        consumer.handler(lambda message: None)
        with pytest.raises(InvalidState, match="open already"):
            consumer.run()
        next(consumer).finish()
