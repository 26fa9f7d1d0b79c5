"""A consumer in programs: opened and closed in any task, with their signals, errors, logs and events."""

from __future__ import annotations

import gc
import logging
import signal
import time
from contextlib import AsyncExitStack, suppress
from itertools import product
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

import nsqext
from nsqext import App, ClientEvent, Consumer, Message, sync
from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, MessageNotInFlight
from nsqext.middleware import Middleware
from tests.support.consumers import QUICK, depth, eventually, publish, quick, quick_sharing, sent, server_ready, take
from tests.support.fake_lookupd import answering, http, serving
from tests.support.fake_nsqd import PLAIN, obey, scripted_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


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


async def test_without_auto_finish_a_message_is_finished_by_another_task(cluster: Cluster, topic: str) -> None:
    options = quick(partitions=(0,))
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, max_in_flight=2, **options)
    received: list[Message] = []

    @consumer.handler(auto_finish=False)
    async def handle(message: Message) -> None:
        received.append(message)

    publish(cluster, topic, b"a", b"b", b"c", b"d")
    await consumer.start()
    async with create_task_group() as tasks:
        await eventually(lambda: len(received) == 2)
        await anyio.wait_all_tasks_blocked()
        assert len(received) == consumer.statistics().in_flight == 2, "unfinished messages count for max_in_flight"
        await received[0].finish()
        await received[1].requeue()
        await eventually(lambda: len(received) == 4)
        tasks.start_soon(consumer.aclose)
        await anyio.wait_all_tasks_blocked()
        assert consumer.connections, "closing waits for the responses"
        await received[2].finish()
        await received[3].finish()
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **options) as other:
        (left,) = await other.fetch(1, 10.0)
        await left.finish()
    assert sorted([received[0].body, received[2].body, received[3].body, left.body]) == [b"a", b"b", b"c", b"d"]
    await eventually(lambda: depth(cluster, topic) == 0)


def test_a_blocking_consumer_pauses_one_topic(cluster: Cluster, topic: str) -> None:
    paused, other = f"{topic}_a", f"{topic}_b"
    for name, body in ((paused, b"1"), (other, b"2")):
        cluster.create_topic(name, partitions=2, channels=["ch"])
        publish(cluster, name, body, partition=0)
    with sync.Consumer((paused, other), "ch", cluster.lookupd) as consumer:
        consumer.pause(paused)
        assert consumer.paused_topics == {paused}
        seen = next(consumer)
        while seen.topic == paused:  # received before the pause
            seen.finish()
            seen = next(consumer)
        assert seen.body == b"2"
        assert consumer.is_starved
        seen.finish()
        consumer.resume(paused)
        assert not consumer.paused


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


# --- what it raises, logs and tells ----------------------------------------------------------------------------------


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


async def test_events_and_log_lines_of_a_consumer(caplog: pytest.LogCaptureFixture) -> None:
    events: list[ClientEvent] = []
    async with scripted_node(obey(), granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **quick_sharing())
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


async def test_a_close_while_middleware_starts_leaves_the_lookup_unused() -> None:
    starting, closed = anyio.Event(), anyio.Event()

    class Slow(Middleware):
        async def start(self) -> None:
            starting.set()
            await closed.wait()

    lookup = nsqext.Lookup("127.0.0.1:1")
    consumer = Consumer("t", "ch", lookupd=lookup, start_timeout=0.0, middleware=[Slow()])

    @consumer.handler
    async def handle(message: Message) -> None:
        """Handle a message."""

    async def close() -> None:
        await starting.wait()
        await consumer.aclose()
        closed.set()

    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            tasks.start_soon(close)
            with pytest.raises(InvalidState, match="closed"):
                await consumer.start()
    assert lookup.metadata.users == 0


class Unprintable(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


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


async def test_a_change_from_another_thread_is_refused_and_changes_nothing(cluster: Cluster, topic: str) -> None:
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK) as consumer:

        def refused(change: Callable[[], object]) -> bool:
            with pytest.raises(InvalidState, match="another event loop"):
                change()
            return True

        changes: list[Callable[[], object]] = [
            consumer.pause,
            lambda: consumer.pause(topic),
            lambda: setattr(consumer, "max_in_flight", 3),
            lambda: setattr(consumer, "topics", "other"),
            consumer.resume,
        ]
        before = consumer.max_in_flight
        for change in changes:
            assert await anyio.to_thread.run_sync(refused, change)
        assert (consumer.paused, consumer.paused_topics) == (False, frozenset())
        assert (consumer.max_in_flight, consumer.topics) == (before, (topic,))
        publish(cluster, topic, b"a")
        with anyio.fail_after(25):
            await (await anext(consumer)).finish()
    consumer.max_in_flight = 4  # a closed consumer has no event loop
    await anyio.to_thread.run_sync(consumer.resume)


async def test_a_handler_that_is_registered_after_the_start_is_refused(cluster: Cluster, topic: str) -> None:
    async def handle(message: object) -> None: ...

    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK) as consumer:
        with pytest.raises(InvalidState, match="would not call this handler"):
            consumer.handler(handle)
        with pytest.raises(InvalidState, match="would not call this handler"):
            consumer.batch_handler()(handle)
