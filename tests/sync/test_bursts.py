"""Messages that threads take from the queue by themselves, and answers that the event loop sends for them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import nsqext
from nsqext import sync
from nsqext.errors import InvalidState
from nsqext.sync.message import AnswerQueue

if TYPE_CHECKING:
    from nsqext.broker import Cluster
from tests.support.blocking_client import eventually


def publish(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    """Publish numbered messages; return their bodies."""
    bodies = [b"%d" % number for number in range(count)]
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish_many(topic, bodies)
    return bodies


def left_in(cluster: Cluster, topic: str) -> list[bytes]:
    """Return what another consumer still receives."""
    with sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        batch = consumer.fetch(1000, 0.5)
        batch.finish()
        return [message.body for message in batch]


def test_threads_that_share_a_consumer_receive_each_message_once(cluster: Cluster, topic: str) -> None:
    bodies = publish(cluster, topic, 3000)
    received: list[bytes] = []

    def consume() -> None:
        for message in consumer:
            message.finish()
            received.append(message.body)
            assert message.answered
            if len(received) >= len(bodies):
                consumer.stop()

    with sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer, ThreadPoolExecutor(4) as threads:
        for end in [threads.submit(consume) for _ in range(4)]:
            end.result(60)
    assert Counter(received) == Counter(bodies)
    assert left_in(cluster, topic) == []


def test_answering_twice_or_late_raises(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, 2)
    with sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        first, second = next(consumer), next(consumer)
        first.finish()
        with pytest.raises(InvalidState):
            first.finish()
        with pytest.raises(InvalidState):
            first.requeue()
    with pytest.raises(nsqext.NsqError):
        second.finish()
    assert left_in(cluster, topic) == [second.body]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_handler_that_fails_gets_only_its_own_messages_again(cluster: Cluster, topic: str, concurrency: int) -> None:
    bodies = publish(cluster, topic, 1000)
    seen: Counter[bytes] = Counter()
    failing = set(bodies[::250])
    lock = threading.Lock()
    done = threading.Event()
    consumer = sync.Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=concurrency)

    @consumer.handler
    def handle(message: sync.Message) -> None:
        with lock:
            seen[message.body] += 1
            if sum(seen.values()) >= len(bodies) + len(failing):
                done.set()
        if message.body in failing and message.attempts == 1:
            raise nsqext.Requeue(delay=0, backoff=False)

    with consumer:
        assert done.wait(25)
    assert seen == Counter(bodies) + Counter(failing)
    assert left_in(cluster, topic) == []


def test_each_message_has_a_context_of_its_own(cluster: Cluster, topic: str) -> None:
    bodies = publish(cluster, topic, 200)
    variable: ContextVar[bytes] = ContextVar("variable", default=b"unset")
    seen: list[bytes] = []
    consumer = sync.Consumer(topic, "ch", lookupd=cluster.lookupd)

    @consumer.handler
    def handle(message: sync.Message) -> None:
        seen.append(variable.get())
        variable.set(message.body)

    with consumer:
        eventually(lambda: len(seen) == len(bodies))
    assert set(seen) == {b"unset"}


def test_the_message_that_is_handled_is_touched_and_the_earlier_ones_are_finished(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, 20)
    release = threading.Event()
    handled: list[bytes] = []
    consumer = sync.Consumer(topic, "ch", lookupd=cluster.lookupd)

    @consumer.handler
    def handle(message: sync.Message) -> None:
        handled.append(message.body)
        if len(handled) == 10:
            release.wait(25)

    with consumer:
        eventually(lambda: len(handled) == 10)
        receiver = consumer._original._receiver
        eventually(lambda: consumer.statistics().finished == 9)
        assert [message.body for message in receiver._running()] == handled[9:]
        release.set()
        eventually(lambda: len(handled) == 20)
    assert left_in(cluster, topic) == []


def test_messages_that_are_answered_later_are_held(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, 10)
    held: list[sync.Message] = []
    consumer = sync.Consumer(topic, "ch", lookupd=cluster.lookupd)

    @consumer.handler(auto_finish=False)
    def handle(message: sync.Message) -> None:
        held.append(message)

    with consumer:
        eventually(lambda: len(held) == 10)
        assert consumer.statistics().in_flight == 10
        for message in held:
            message.finish()
        eventually(lambda: consumer.statistics().in_flight == 0)
    assert left_in(cluster, topic) == []


def test_a_message_that_its_handler_finished_is_not_finished_again(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    publish(cluster, topic, 20)
    consumer = sync.Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=1)
    consumer.handler(lambda message: message.finish())
    with consumer:
        eventually(lambda: consumer.statistics().finished == 20)
    assert caplog.text == ""


def test_answers_that_are_given_together_wake_the_event_loop_once() -> None:
    calls, sent = list[Callable[[], object]](), list[int]()
    answers = AnswerQueue(cast("Any", None), cast("Any", SimpleNamespace(call_soon=calls.append)))

    def finish(number: int) -> None:
        answers.finish_now(cast("Any", SimpleNamespace(finish_now=lambda: sent.append(number))))

    finish(1)
    finish(2)
    (send,) = calls
    send()
    finish(3)
    assert (sent, len(calls)) == ([1, 2], 2)

    def ended(_: object) -> None:
        raise RuntimeError("the event loop has ended")

    late = AnswerQueue(cast("Any", None), cast("Any", SimpleNamespace(call_soon=ended)))
    with pytest.raises(InvalidState, match="the consumer cannot be used: the event loop has ended: it was closed"):
        late.finish_now(cast("Any", SimpleNamespace()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_takes_no_messages_of_its_parent(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, 3)
    with sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        first = next(consumer)
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(BaseException):
                try:
                    first.finish()
                except InvalidState:
                    try:
                        next(consumer)
                    except InvalidState:
                        consumer.stop()
                        code = 0
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        first.finish()
        for _ in range(2):
            next(consumer).finish()
        consumer.stop()
    assert left_in(cluster, topic) == []
