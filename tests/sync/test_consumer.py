"""The blocking consumer and its messages."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack, cast

import pytest
from anyio.from_thread import BlockingPortalProvider

import nsqext
from nsqext import ConsumerSettings, Position, sync
from nsqext.app import Key  # noqa: TC001 - handlers are annotated with it
from nsqext.client.consumer.handlers.batches import MessageBatch as AsyncMessageBatch
from nsqext.client.consumer.message import requeue_unanswered
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.middleware import CallNext, HandlerTimeout, Handling, Middleware
from nsqext.sync.loop import shared_loop
from tests.support.blocking_client import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from nsqext.broker import Cluster
    from nsqext.client.consumer.message import Message

CALM: ConsumerSettings = {"close_timeout": 20.0, "backoff": "off", "requeue_delay": 0.01, "requeue_jitter": 0}


def fill(cluster: Cluster, topic: str, count: int) -> None:
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish_many(topic, [b"%d" % number for number in range(count)])


def make(
    cluster: Cluster, topic: str, *, middleware: Sequence[Middleware] = (), **settings: Unpack[ConsumerSettings]
) -> sync.Consumer:
    given: ConsumerSettings = {**CALM, **settings}
    return sync.Consumer(topic, "ch", lookupd=cluster.lookupd, middleware=middleware, **given)


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
    meeting = threading.Barrier(3, timeout=30)
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


def test_a_handler_that_returns_a_coroutine_has_failed(cluster: Cluster, topic: str) -> None:
    """Its message was finished, and nothing was done."""
    fill(cluster, topic, 1)
    consumer = make(cluster, topic)
    attempts: list[int] = []

    async def save() -> None:
        raise AssertionError("awaited")

    @consumer.handler  # type: ignore[type-var]
    def handle(message: sync.Message) -> object:
        attempts.append(message.attempts)
        if message.attempts == 1:
            return save()
        consumer.stop()
        return None

    consumer.run()
    assert attempts == [1, 2]


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


def test_a_handler_that_does_not_end_is_cancelled_at_the_timeout(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    consumer = make(cluster, topic, close_timeout=0.1)
    release, ended = threading.Event(), threading.Event()
    late: list[BaseException] = []

    @consumer.handler
    def handle(message: sync.Message) -> None:
        consumer.stop()
        release.wait(30)
        try:
            message.finish()
        except InvalidState as error:
            late.append(error)
        ended.set()

    consumer.run()
    release.set()
    assert ended.wait(30)
    # the event loop has ended, or that of another open client says that closing requeued the message
    assert re.search(r"the consumer was closed|finished or requeued already", str(late[0]))


def test_invalid_arguments(cluster: Cluster) -> None:
    consumer = sync.Consumer("orders", "ch", lookupd=cluster.lookupd)

    async def handle(message: sync.Message) -> None:
        """Never called."""

    def yields(message: object) -> Iterator[None]:
        yield

    async def yields_later(message: object) -> AsyncIterator[None]:
        yield

    with pytest.raises(InvalidSetting, match="coroutine function"):
        consumer.handler(handle)  # type: ignore[type-var]
    with pytest.raises(InvalidSetting, match="not a function"):
        consumer.handler(cast("Callable[..., None]", 5))
    with pytest.raises(InvalidSetting, match="not a function"):
        consumer.batch_handler()(cast("Callable[..., None]", None))
    generators: tuple[Any, ...] = (yields, yields_later)
    for generator in generators:  # messages would be finished, although it never runs
        with pytest.raises(InvalidSetting, match="remove 'yield' from it"):
            consumer.handler(generator)
        with pytest.raises(InvalidSetting, match="remove 'yield' from it"):
            consumer.batch_handler()(generator)
    with pytest.raises(InvalidState, match="no handler"):
        consumer.run()
    with pytest.raises(InvalidState, match="not open"):
        next(consumer)


def test_stop_before_run(cluster: Cluster, topic: str) -> None:
    consumer = make(cluster, topic)
    consumer.handler(lambda message: None)
    consumer.stop()
    consumer.run()


def test_a_pattern_and_topics_that_are_changed(cluster: Cluster, topic: str) -> None:
    consumer = sync.Consumer(f"{topic}*", "ch", lookupd=cluster.lookupd, **CALM)
    consumer.topics = [f"{topic}?"]
    with consumer:
        consumer.topics = f"{topic[:-1]}?"
        fill(cluster, topic, 1)
        next(consumer).finish()
        assert {connection.topic for connection in consumer.connections} == {topic}


def test_pause_seek_and_connections(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 2)
    with make(cluster, topic) as consumer:
        assert (consumer.topics, consumer.channel, consumer.settings["close_timeout"]) == ((topic,), "ch", 20)
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


def test_settings_of_an_open_consumer_are_changed_in_its_event_loop(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[int] = []
    for name in ("max_in_flight", "topics"):
        read = getattr(nsqext.Consumer, name).fget
        monkeypatch.setattr(nsqext.Consumer, name, property(read, lambda *_: changed.append(threading.get_ident())))
    consumer = make(cluster, topic)
    consumer.max_in_flight, consumer.topics = 5, topic
    with consumer:
        consumer.max_in_flight, consumer.topics = 6, topic
    assert [thread == threading.get_ident() for thread in changed] == [True, True, False, False]


def test_an_interrupted_wait_takes_no_message(cluster: Cluster, topic: str) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with make(cluster, topic) as consumer:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                next(consumer)
            fill(cluster, topic, 1)
            (message,) = consumer.fetch(1, 5.0)
            message.finish()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_in_run_ends_without_the_event_loop_of_its_parent(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a handler of a signal; another thread of the parent may have held the lock of its provider."""
    fill(cluster, topic, 1)
    consumer = make(cluster, topic)
    consumer.handler(lambda message: os.kill(os.getpid(), signal.SIGUSR1))
    parent, codes = os.getpid(), list[int]()

    class Provider(BlockingPortalProvider):
        def __exit__(self, *error: Any) -> None:
            if os.getpid() != parent:
                os._exit(9)
            super().__exit__(*error)

    monkeypatch.setattr(shared_loop, "provider", Provider("asyncio"))

    def fork(*_: object) -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(50)
            raise SystemExit
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        consumer.stop()

    before = signal.signal(signal.SIGUSR1, fork)
    code = 8
    try:
        consumer.run()
    except SystemExit:
        code = 7
    finally:
        if os.getpid() != parent:
            os._exit(code)
        signal.signal(signal.SIGUSR1, before)
    assert codes == [7]


def test_an_open_consumer_cannot_run(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    with make(cluster, topic) as consumer:
        with pytest.raises(InvalidState, match="open already"):
            consumer.run()
        next(consumer).finish()


def test_a_batch_is_requeued_with_its_delay(cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    async def requeue(batch: AsyncMessageBatch, *arguments: object, **options: object) -> None:
        given.append((*arguments, options))

    monkeypatch.setattr(AsyncMessageBatch, "requeue", requeue)
    with make(cluster, topic) as consumer:
        consumer.fetch(1, 0.01).requeue(delay=3.0, backoff=True)
        fill(cluster, topic, 1)
        batch = consumer.fetch(1, 10.0)
        batch.requeue([batch[0]])
        batch.requeue([])
        with pytest.raises(InvalidInput, match="5 is not a message of the batch"):
            batch.requeue([cast("sync.Message", 5)])
        batch.finish()
    assert given == [
        (None, 3.0, {"backoff": True}),
        ([batch[0]._original], 0.0, {"backoff": False}),
        ([], 0.0, {"backoff": False}),
    ]


def test_batches_are_finished_in_part_and_leaving_the_loop_requeues_the_rest(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 10)
    seen: list[bytes] = []
    with make(cluster, topic) as consumer:
        for batch in consumer.batches(max_count=5, max_wait=5.0):
            assert 1 <= len(batch) <= 5
            assert [message.body for message in batch] == [batch[number].body for number in range(len(batch))]
            seen.append(batch[0].body)
            batch.finish_up_to(0)
            break
        for batch in consumer.batches(max_count=4, max_wait=0.05):
            seen += [message.body for message in batch if message.attempts == 1]
            seen += [message.body for message in batch if message.attempts == 2]
            if len(batch) > 1 and batch[0].attempts == 1:
                batch.requeue([batch[0]])
                seen.remove(batch[0].body)
            batch.finish()
            assert batch.unanswered == []
            if len(seen) == 10:
                break
    assert sorted(seen) == [b"%d" % number for number in range(10)]


def test_an_exception_in_the_loop_requeues_the_batch(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    with make(cluster, topic) as consumer:
        with pytest.raises(ZeroDivisionError):
            for _ in consumer.batches():
                raise ZeroDivisionError
        again = consumer.fetch(1, 10.0)
        assert [(message.body, message.attempts) for message in again] == [(b"0", 2)]
        again.finish()


def test_closing_does_not_wait_for_batches_of_the_same_thread(cluster: Cluster, topic: str) -> None:
    """It waited for all but the last one."""
    fill(cluster, topic, 5)
    with make(cluster, topic, close_timeout=60.0) as consumer:
        first, *others = (consumer.fetch(count, 10.0) for count in (3, 1, 1))
        first.finish_up_to(first[1])
        assert [message.answered for message in first] == [True, True, False]
        others[0].finish()
    assert [batch.unanswered for batch in (first, *others)] == [[], [], []]


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_that_arrives_as_its_thread_is_interrupted_is_requeued(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It stayed in flight, touched, until the consumer was closed."""
    fill(cluster, topic, 1)
    with make(cluster, topic) as consumer:
        run, left = consumer._run, list[Any]()

        def interrupt(fetch: Any) -> None:
            if late:
                left.append(fetch)
            else:
                run(fetch)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(consumer, "_run", interrupt)
            with pytest.raises(KeyboardInterrupt):
                consumer.fetch(1, 10.0)
        for fetch in left:
            run(fetch)
        again = consumer.fetch(1, 10.0)
        assert [message.attempts for message in again] == [2]
        again.finish()


def test_a_batch_that_is_finished_or_of_an_ended_thread_is_not_kept(cluster: Cluster, topic: str) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(one) is AsyncMessageBatch for one in gc.get_objects())

    fill(cluster, topic, 4)
    with make(cluster, topic) as consumer:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(lambda: consumer.fetch(1, 10.0).finish()).result()
        assert kept() == 0
        for _ in range(3):
            consumer.fetch(1, 10.0).finish()
        assert kept() == 1, "the last, which was in flight when it was fetched"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_takes_no_message_that_its_parent_received(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 2)
    with make(cluster, topic) as consumer:
        next(consumer).finish()
        eventually(lambda: consumer.statistics().in_flight == 1)
        child = os.fork()
        if child == 0:
            code = 1
            with suppress(InvalidState):
                next(consumer)
                code = 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        next(consumer).finish()


def test_the_batch_of_the_thread_that_closes_is_requeued_behind_rdy_0(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused: list[bool] = []

    def requeue(messages: Iterable[Message]) -> None:
        paused.append(consumer.paused)
        requeue_unanswered(messages)

    monkeypatch.setattr("nsqext.sync.consumer.requeue_unanswered", requeue)
    fill(cluster, topic, 1)
    with make(cluster, topic) as consumer:
        consumer.fetch(1, 10.0)
    assert paused == [True], "otherwise the server would send the message to this consumer again"


def test_a_batch_handler_runs_in_a_thread(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 10)
    consumer = make(cluster, topic)
    seen: list[tuple[bytes, int]] = []

    @consumer.batch_handler(max_count=10, max_wait=0.05)
    def handle(batch: sync.MessageBatch) -> None:
        seen.extend((message.body, threading.get_ident()) for message in batch)
        if len(seen) == 10:
            consumer.stop()

    consumer.run()
    assert sorted(body for body, _ in seen) == [b"%d" % number for number in range(10)]
    assert threading.get_ident() not in {thread for _, thread in seen}


def test_a_batch_handler_has_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def batch_handler(_: nsqext.Consumer, **limits: object) -> object:
        given.append(limits)
        return given.append

    monkeypatch.setattr(nsqext.Consumer, "batch_handler", batch_handler)
    consumer = sync.Consumer("orders", "ch", "127.0.0.1:1")
    consumer.batch_handler(max_count=3, max_wait=5.0)(lambda batch: None)
    assert given[0] == {"max_count": 3, "max_wait": 5.0}


def test_a_result_that_nothing_uses_is_one_warning(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    fill(cluster, topic, 3)
    consumer, handled = make(cluster, topic), list[bytes]()

    @consumer.handler
    def handle(message: sync.Message) -> int:
        handled.append(message.body)
        if len(handled) == 3:
            consumer.stop()
        return 5

    consumer.run()
    assert caplog.text.count("returned a value (int), which is not used") == 1


def test_a_consumer_with_transactions_waits_for_its_handler_beyond_the_timeout(cluster: Cluster, topic: str) -> None:
    """Its connection would be rolled back, and used by others, while the handler runs."""

    class Transaction(Middleware):
        opens_transaction = True

    fill(cluster, topic, 1)
    consumer = make(cluster, topic, middleware=[Transaction()], close_timeout=0.05)
    release, ended = threading.Event(), threading.Event()

    @consumer.handler
    def handle(message: sync.Message) -> None:
        consumer.stop()
        threading.Timer(0.5, release.set).start()
        release.wait(30)
        ended.set()

    consumer.run()
    assert ended.is_set()


def test_a_message_is_finished_by_another_thread_after_its_handler(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 3)
    consumer = make(cluster, topic)
    received: list[sync.Message] = []
    complete = threading.Event()

    @consumer.handler(auto_finish=False)
    def handle(message: sync.Message) -> None:
        received.append(message)
        if len(received) == 3:
            complete.set()

    consumer.start()
    assert complete.wait(30)
    assert consumer.statistics().in_flight == 3
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(consumer.close)
        for message in received:
            message.finish()
        closing.result(30)
    with make(cluster, topic) as other:
        assert len(other.fetch(1, 0.2)) == 0


def test_a_handler_is_called_while_the_consumer_starts(cluster: Cluster, topic: str) -> None:
    fill(cluster, topic, 1)
    settings: ConsumerSettings = {**CALM, "start_timeout": 0.5}  # it waits for a topic that does not exist
    consumer = sync.Consumer([topic, "absent"], "ch", lookupd=cluster.lookupd, **settings)
    attempts: list[int] = []

    @consumer.handler
    def handle(message: sync.Message) -> None:
        attempts.append(message.attempts)

    with consumer:
        eventually(lambda: bool(attempts))
    assert attempts == [1]


def test_close_while_it_runs_makes_run_drain_and_return(cluster: Cluster, topic: str) -> None:
    consumer = make(cluster, topic)
    attempts: list[int] = []

    @consumer.handler
    def handle(message: sync.Message) -> None:
        attempts.append(message.attempts)
        consumer.close()

    fill(cluster, topic, 3)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(consumer.run).result(30)
    assert set(attempts) == {1}
    with make(cluster, topic) as other:
        for _ in range(3 - len(attempts)):
            next(other).finish()


def test_it_is_started_in_one_thread_and_closed_in_another(cluster: Cluster, topic: str) -> None:
    consumer = make(cluster, topic)
    received = threading.Event()

    @consumer.handler
    def handle(message: sync.Message) -> None:
        received.set()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(consumer.start).result()
    fill(cluster, topic, 1)
    assert received.wait(30)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(consumer.close).result()
    consumer.close()


def test_middleware_surrounds_a_blocking_handler(cluster: Cluster, topic: str) -> None:
    class Noting(Middleware):
        async def handle(self, handling: Handling, call_next: CallNext) -> object:
            bodies.append(handling.message.body)
            return await call_next(handling)

    fill(cluster, topic, 1)
    bodies: list[bytes] = []
    consumer = make(cluster, topic, middleware=[Noting()])
    consumer.handler(lambda message: consumer.stop())
    consumer.run()
    assert bodies == [b"0"]


def test_a_time_limit_leaves_no_handler_running(cluster: Cluster, topic: str) -> None:
    """The message was handled again while its handler ran, in any number of threads."""
    limited = make(cluster, topic, middleware=[HandlerTimeout(0.05)])
    again, ended = threading.Event(), threading.Event()
    calls: list[int] = []

    @limited.handler
    def handle(message: sync.Message) -> None:
        calls.append(message.attempts)
        if len(calls) > 1:
            again.set()
        again.wait(0.5)
        ended.set()

    fill(cluster, topic, 1)
    with limited:
        assert ended.wait(30)
    assert calls == [1]


def test_a_second_thread_that_closes_it_waits_for_the_first(cluster: Cluster, topic: str) -> None:
    """It ended the event loop below the first: the batch that was handled meanwhile was delivered again."""
    consumer, handling, closing = make(cluster, topic), threading.Event(), threading.Event()
    outcomes: list[str] = []

    @consumer.batch_handler()
    def handle(batch: sync.MessageBatch) -> None:
        handling.set()
        assert closing.wait(30)
        threading.Event().wait(0.1)  # a second `close` that does not wait ends by now
        consumer.statistics()  # it is open until its handlers have ended
        batch.finish()
        outcomes.append("finished")

    def close() -> None:
        consumer.close()
        outcomes.append("closed")

    consumer.start()
    fill(cluster, topic, 1)
    assert handling.wait(30)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(close)
        eventually(lambda: consumer.paused)
        second = threads.submit(close)
        closing.set()
        first.result()
        second.result()
    assert outcomes == ["finished", "closed", "closed"]


def test_handlers_receive_what_their_annotations_name(cluster: Cluster, topic: str) -> None:
    consumer = make(cluster, topic)
    found: list[object] = []

    def takes_message(message: object) -> None:
        found.append(type(message))

    takes_message.__annotations__["message"] = sync.Message  # a module without 'from __future__ import annotations'

    @consumer.handler
    def handle(numbers: list[int], *, message: sync.Message, key: Key) -> None:
        found.extend((numbers, type(message), message.attempts, key))
        consumer.stop()

    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(topic, b"[1, 2]", key="k")
    consumer.run()
    assert found == [[1, 2], sync.Message, 1, "k"]
    plain = make(cluster, topic)
    plain.handler(takes_message)

    with sync.Producer(cluster.lookupd) as producer, plain:
        producer.publish(topic, b"x")
        eventually(lambda: len(found) == 5, seconds=30.0)
    assert found[-1] is sync.Message


@pytest.mark.usefixtures("own_loop")
def test_a_message_of_a_closed_consumer_says_so(cluster: Cluster, topic: str) -> None:
    """The error spoke of a portal that is not running, and of event loops."""
    with sync.Producer(cluster.lookupd) as producer:
        producer.publish(topic, b"one")
    with sync.Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        message = next(consumer)
    for answer in (message.finish, message.requeue, message.touch):
        with pytest.raises(
            InvalidState, match=r"^the consumer was closed: messages are answered inside its 'with' block$"
        ):
            answer()
