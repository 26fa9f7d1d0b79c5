"""A consumer in other programs: opened and closed in any task, fair to other consumers, with logs and events."""

from __future__ import annotations

import gc
import logging
import signal
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

import nsqext
from nsqext import App, ClientEvent, Consumer, ConsumerSettings, Message, MessageBatch, Producer
from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, MessageNotInFlight
from tests.support.consumers import QUICK, depth, eventually, publish, quick, running, sent, server_ready, take
from tests.support.fake_lookupd import answering, http, serving
from tests.support.fake_nsqd import PLAIN, message, obey, scripted_lookup, scripted_node
from tests.support.messages import share_of_a_late_consumer

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


async def test_settings_show_the_current_value_of_what_was_changed() -> None:
    consumer = Consumer("t", "ch", nsqd="127.0.0.1:1", max_in_flight=3)
    consumer.max_in_flight = 7
    assert consumer.settings["max_in_flight"] == 7


def test_a_consumer_that_was_not_closed_is_named_in_a_warning() -> None:
    consumer = Consumer("t", "ch", nsqd="127.0.0.1:1", start_timeout=0.01)
    anyio.run(consumer.start)
    with pytest.warns(ResourceWarning, match="Consumer\\('t', 'ch', nsqd='127.0.0.1:1', .*\\) was not closed"):
        del consumer
        gc.collect()


# --- opened in one task, closed in another ---------------------------------------------------------------------------


async def test_opened_in_one_task_and_closed_in_another(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
    async with create_task_group() as tasks:
        tasks.start_soon(consumer.start)
    publish(cluster, topic, b"a")
    assert await take(consumer, 1) == [b"a"]
    async with create_task_group() as tasks:
        tasks.start_soon(consumer.aclose)
    assert consumer.connections == ()
    await consumer.aclose()
    with pytest.raises(InvalidState, match="opened before"):
        await consumer.start()


async def test_the_task_that_started_it_may_be_cancelled(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)

    started = anyio.Event()

    async def start() -> None:
        await consumer.start()
        started.set()
        await anyio.sleep_forever()

    async with create_task_group() as tasks:
        tasks.start_soon(start)
        await started.wait()
        tasks.cancel_scope.cancel()
    publish(cluster, topic, b"a")
    assert await take(consumer, 1) == [b"a"]
    await consumer.aclose()


async def test_start_runs_the_handler_in_the_background(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
    handled = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        handled.set()

    await consumer.start()
    publish(cluster, topic, b"a")
    with anyio.fail_after(25):
        await handled.wait()
    await consumer.aclose()
    await eventually(lambda: not depth(cluster, topic))


async def test_aclose_in_a_handler_ends_the_run(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)

    @consumer.handler
    async def handle(message: Message) -> None:
        await consumer.aclose()

    publish(cluster, topic, b"a")
    with anyio.fail_after(25):
        await consumer.serve()
    await eventually(lambda: not depth(cluster, topic))


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["consumer", "app"])
async def test_the_handler_that_a_program_has_for_sigterm_stays(cluster: Cluster, topic: str, kind: str) -> None:
    def mine(*given: object) -> None:
        """Replaces the signal handler of a web server."""

    app = App(cluster.lookupd, **QUICK)

    async def handle(message: Message) -> None:
        """Do nothing."""

    if kind == "app":
        app.handler(topic, "ch")(handle)
        consumer, run, stop = app.consumers[0], app.serve, app.stop
    else:
        consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
        consumer.handler(handle)
        run, stop = consumer.serve, consumer.stop
    before = signal.signal(signal.SIGTERM, mine)
    try:
        async with create_task_group() as tasks:
            tasks.start_soon(run)
            await eventually(lambda: consumer.connections)
            await anyio.wait_all_tasks_blocked()
            assert signal.getsignal(signal.SIGTERM) is mine
            stop()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_signals_are_received_before_the_first_message(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
    missed: list[object] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        signal.raise_signal(signal.SIGTERM)

    publish(cluster, topic, b"a")
    before = signal.signal(signal.SIGTERM, lambda *given: missed.append(given))
    try:
        with anyio.fail_after(25):
            await consumer.serve(signals=True)
        assert not missed
    finally:
        signal.signal(signal.SIGTERM, before)


# --- servers that are not up yet, and wrong ones ---------------------------------------------------------------------


async def test_run_waits_for_a_lookup_service_that_starts_later(
    closed_address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer("t", "ch", lookupd=str(closed_address), **quick(lookup_timeout=30.0))
    handled = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        handled.set()

    async def body() -> None:
        await eventually(lambda: "waiting for a partition to subscribe to" in caplog.text)
        node = scripted_node(obey({"RDY": message(1)}))
        async with scripted_lookup(port=closed_address.port) as lookup, node as leader:
            lookup.set_leaders({0: leader}, num=1)
            with anyio.fail_after(25):
                await handled.wait()

    with caplog.at_level(logging.WARNING, "nsqext.consumer"):
        await running(consumer, body)
    assert caplog.text.count("waiting for a partition to subscribe to") == 1


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"<html>no healthy upstream", "is nsqlookupd up"),
        (b'{"message": "no healthy upstream"}', "503 no healthy upstream"),
    ],
)
async def test_a_proxy_whose_lookup_service_is_not_up_is_waited_for(
    body: bytes, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(answering(http(body, status="503 Service Unavailable"))) as address:
        consumer = Consumer("t", "ch", lookupd=str(address), **quick(lookup_timeout=300.0))
        async with create_task_group() as tasks:
            tasks.start_soon(consumer.start)
            await eventually(lambda: "waiting for a partition to subscribe to" in caplog.text)
            tasks.cancel_scope.cancel()
    assert text in caplog.text


async def test_the_wait_for_a_lookup_service_ends(closed_address: Address) -> None:
    consumer = Consumer("t", "ch", lookupd=str(closed_address), **quick(lookup_timeout=0.1))
    with anyio.fail_after(25), pytest.raises(LookupUnreachable):
        await consumer.start()


@pytest.mark.parametrize("way", ["start", "run", "iterate", "serve"])
async def test_an_error_that_prevents_the_start_is_raised_and_not_logged_as_well(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Programs print the exception already."""

    async def handle(message: Message) -> None:
        """Do nothing."""

    async with serving(answering(http(b"<html>"))) as address:
        options = quick(lookup_timeout=300.0, start_timeout=0.0 if way in ("run", "iterate") else 20.0)
        consumer = Consumer("t", "ch", lookupd=str(address), **options)
        app = App(str(address), **options)
        app.handler("t", "ch")(handle)
        if way == "run":
            consumer.handler(handle)
        with anyio.fail_after(25), pytest.raises(LookupFailed):
            if way == "serve":
                await app.serve()
            elif way == "iterate":
                async with consumer:
                    await anext(consumer)
            else:
                await (consumer.start() if way == "start" else consumer.serve())
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_an_error_that_ends_a_consumer_in_the_background_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(answering(http(b"<html>"))) as address:
        consumer = Consumer("t", "ch", lookupd=str(address), **quick(start_timeout=0.0))

        @consumer.handler
        async def handle(message: Message) -> None:
            """Do nothing."""

        await consumer.start()
        await eventually(lambda: "the consumer cannot continue" in caplog.text)
        await consumer.aclose()


# --- fairness --------------------------------------------------------------------------------------------------------


async def test_a_consumer_that_joins_late_gets_work(cluster: Cluster, topic: str) -> None:
    options: ConsumerSettings = {"partitions": (0,)}
    async with Producer(cluster.lookupd) as producer:
        share = await share_of_a_late_consumer(
            lambda: Consumer(topic, "ch", lookupd=cluster.lookupd, **options),
            partial(producer.publish_many, topic, partition=0),
        )
    assert share >= 45


async def test_a_caller_that_holds_messages_gets_more(cluster: Cluster, topic: str) -> None:
    """A batch is collected before the first message of it is finished."""
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [b"x"] * 60, partition=0)
    async with Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        with anyio.fail_after(25):
            held = [await consumer.__anext__() for _ in range(60)]
        for one in held:
            await one.finish()
    await eventually(lambda: not depth(cluster, topic))


# --- what it tells ---------------------------------------------------------------------------------------------------


async def test_statistics(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **quick(partitions=(0,)))
    with pytest.raises(InvalidState, match="not open"):
        consumer.statistics()
    publish(cluster, topic, b"1", b"2", b"3")
    async with consumer:
        first, second, third = [await consumer.__anext__() for _ in range(3)]
        await first.finish()
        await second.requeue(30.0)
        found = consumer.statistics()
        assert (found.received, found.finished, found.requeued, found.in_flight, found.lost) == (3, 1, 1, 1, 0)
        assert found.bytes_received > 3 * 26
        assert found.connections == consumer.connections
        assert found.lookup_age is not None
        assert (found.lookup_failures, found.reconnects) == (0, 0)
        await third.finish()
    assert consumer.statistics().finished == 2


async def test_events_and_log_lines_of_a_consumer(caplog: pytest.LogCaptureFixture) -> None:
    events: list[ClientEvent] = []
    async with scripted_node(obey(), granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **QUICK)
        consumer.on_event(events.append)

        @consumer.on_event
        def fail(event: ClientEvent) -> None:
            raise ValueError("of the callback")

        with caplog.at_level(logging.INFO, "nsqext.consumer"):
            async with consumer:
                await node.peers[0].close()
                await eventually(lambda: len(events) == 3)
    assert [event.kind for event in events] == ["connected", "disconnected", "connected", "disconnected"]
    assert {event.node for event in events} == {str(node)}
    assert consumer.statistics().reconnects == 1
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert texts[0] == f"subscribed to t/ch at {node}"
    assert "back after" in texts[1]
    assert texts[2:] == ["drained and closed t/ch"]


async def test_the_error_of_a_run_is_never_a_group(caplog: pytest.LogCaptureFixture) -> None:
    consumer = nsqext.Consumer("t", "ch", lookupd="127.0.0.1:9", **quick(lookup_timeout=0.0))

    @consumer.handler
    async def handle(message: Message) -> None:
        """Do nothing."""

    with pytest.raises(LookupFailed):
        await consumer.serve()


async def test_a_start_beside_aclose_leaves_nothing_open() -> None:
    """On trio, the order of the two tasks is random."""
    lookup = nsqext.Lookup("127.0.0.1:1")

    async def start(consumer: Consumer) -> None:
        with suppress(InvalidState, LookupUnreachable):
            await consumer.start()

    with anyio.fail_after(25):
        for _ in range(20):
            consumer = Consumer("t", "ch", lookupd=lookup, start_timeout=0.0)
            async with create_task_group() as tasks:
                tasks.start_soon(start, consumer)
                tasks.start_soon(consumer.aclose)
            await consumer.aclose()
            assert lookup.metadata.users == 0


# --- handlers that raise what programs seldom raise ------------------------------------------------------------------


class Unprintable(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("batches", "error", "waits"),
    [
        (False, GeneratorExit, False),
        (False, Unprintable, True),
        (True, GeneratorExit, True),
        (True, Unprintable, False),
    ],
)
async def test_no_error_of_a_handler_ends_the_consumer(
    cluster: Cluster, topic: str, batches: bool, error: type[BaseException], waits: bool
) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, requeue_delay=0.0, backoff="off", **QUICK)
    seen: list[bytes] = []

    async def take_one(body: bytes) -> None:
        seen.append(body)
        if len(seen) == 1:
            if waits:
                await anyio.sleep(0.01)
            raise error

    async def handle(message: Message) -> None:
        await take_one(message.body)

    async def handle_batch(batch: MessageBatch) -> None:
        await take_one(batch[0].body)

    if batches:
        consumer.batch_handler(max_count=1)(handle_batch)
    else:
        consumer.handler(handle)
    async with consumer:
        publish(cluster, topic, b"a")
        await eventually(lambda: seen == [b"a", b"a"])
        await eventually(lambda: not depth(cluster, topic))
        assert consumer.statistics().in_flight == 0


async def test_an_error_without_text_has_a_dead_letter(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(f"{topic}dead", extend=True, channels=["ch"])
    consumer = Consumer(
        topic, "ch", lookupd=cluster.lookupd, max_attempts=1, dead_letter=f"{topic}dead", requeue_delay=0.0, **QUICK
    )

    @consumer.handler
    async def handle(message: Message) -> None:
        raise Unprintable

    async with consumer, Consumer(f"{topic}dead", "ch", lookupd=cluster.lookupd, **QUICK) as letters:
        publish(cluster, topic, b"a")
        with anyio.fail_after(25):
            letter = await anext(letters)
        assert letter.body == b"a"
        assert letter.headers["dead-letter-error"] == "Unprintable: <no text: RuntimeError>"
        await letter.finish()


# --- a process that stood still ------------------------------------------------------------------------------------


async def test_a_message_that_timed_out_while_the_process_stood_still_is_not_handled(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited in the queue of the consumer, behind one that is handled, or was not read from the socket."""
    # a busy machine takes longer than 50 ms to read 24 connections
    monkeypatch.setattr("nsqext.client.pulse._AFTERWARDS", 0.25)
    begun: dict[str, list[tuple[bytes, int]]] = {}
    release = anyio.Event()

    async def handle(message: Message) -> None:
        begun.setdefault(message.topic, []).append((message.body, message.attempts))
        if message.body == b"a":
            await release.wait()
        with suppress(MessageNotInFlight):
            await message.finish()

    async def iterate(consumer: Consumer) -> None:
        async for received in consumer:
            await handle(received)

    async def take_batches(consumer: Consumer) -> None:
        async for batch in consumer.batches(max_count=1):
            await handle(batch[0])

    queued: list[Consumer] = []
    unread: list[Consumer] = []
    async with AsyncExitStack() as stack, create_task_group() as tasks:
        for ordered, way in product((False, True), ("handler", "iteration", "batches")):
            for group in (queued, unread):
                name = f"{topic}{way}{ordered:d}{len(group)}{group is queued:d}"
                cluster.create_topic(name, partitions=2, ordered=ordered, channels=["ch"])
                consumer = Consumer(name, "ch", lookupd=cluster.lookupd, msg_timeout=2.0, auto_touch=False, **QUICK)
                group.append(consumer)
                if way == "handler":
                    consumer.handler(handle)
                await stack.enter_async_context(consumer)
                if way != "handler":
                    tasks.start_soon(iterate if way == "iteration" else take_batches, consumer)
        for consumer in queued:
            publish(cluster, consumer.topics[0], b"a", partition=0)
        await eventually(lambda: len(begun) == len(queued))
        for consumer in queued:
            publish(cluster, consumer.topics[0], b"b", partition=1)
        await eventually(lambda: all(consumer.statistics().in_flight == 2 for consumer in queued))
        await eventually(lambda: all(server_ready(cluster, consumer.topics[0], 1) for consumer in unread))
        for consumer in unread:
            publish(cluster, consumer.topics[0], b"b", partition=1)
        names = [consumer.topics[0] for consumer in (*queued, *unread)]
        waiting = set(names)
        for _ in range(1000):
            waiting -= {name for name in waiting if sent(cluster, name, 1)}
            if not waiting:
                break
            time.sleep(0.01)  # noqa: ASYNC251 - this event loop reads no message
        assert not waiting, "the server did not send the messages of these topics"
        time.sleep(2.5)  # noqa: ASYNC251 - as SIGSTOP: nothing of this process runs
        release.set()
        await eventually(lambda: not any(depth(cluster, name) for name in names))
        tasks.cancel_scope.cancel()
    for name in names:
        assert min(attempts for body, attempts in begun[name] if body == b"b") > 1, name
