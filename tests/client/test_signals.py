"""Signals that end a run."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group, to_thread, wait_all_tasks_blocked

from nsqext import Consumer, Message
from nsqext.client.signals import stop_on_signals, stopping_on_signals
from tests.support.consumers import QUICK, depth, eventually, publish

if TYPE_CHECKING:
    from nsqext.broker import Cluster


@pytest.mark.anyio
async def test_sigterm_drains(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
    started, go_on = anyio.Event(), anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        started.set()
        await go_on.wait()

    publish(cluster, topic, b"a")
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            await started.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await eventually(lambda: consumer.paused)
            go_on.set()
    await eventually(lambda: depth(cluster, topic) == 0)


@pytest.mark.anyio
async def test_signals_are_received_until_the_last_consumer_has_ended(cluster: Cluster, topic: str) -> None:
    first, second = (Consumer(topic, channel, lookupd=cluster.lookupd, **QUICK) for channel in ("ch", "other"))
    before = signal.getsignal(signal.SIGTERM)

    async def handle(message: Message) -> None:
        pass

    async def run(consumer: Consumer, ended: anyio.Event) -> None:
        consumer.handler(handle)
        await consumer.serve()
        ended.set()

    both = anyio.Event(), anyio.Event()
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            tasks.start_soon(run, first, both[0])
            await eventually(lambda: first.connections)
            tasks.start_soon(run, second, both[1])
            await eventually(lambda: second.connections)
            first.stop()
            await both[0].wait()
            assert signal.getsignal(signal.SIGTERM) != before, "the default effect ends the process without draining"
            os.kill(os.getpid(), signal.SIGTERM)
            await both[1].wait()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.anyio
async def test_the_first_signal_stops_all_and_the_second_one_has_its_default_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nsqext.consumer")
    before = signal.getsignal(signal.SIGTERM)
    stopped: list[str] = []
    drained = anyio.Event()
    log = logging.getLogger("nsqext.consumer")

    async def run(name: str) -> None:
        await stop_on_signals(lambda: stopped.append(name), log)
        await drained.wait()

    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            tasks.start_soon(run, "one")
            tasks.start_soon(run, "two")
            await wait_all_tasks_blocked()
            for _ in range(3):  # further ones within a second are ignored, the default effect would end the process
                os.kill(os.getpid(), signal.SIGTERM)
                await eventually(lambda: stopped)
            await eventually(lambda: signal.getsignal(signal.SIGTERM) == before)
            drained.set()
    assert sorted(stopped) == ["one", "two"]
    assert caplog.messages == ["stopping on SIGTERM"]


def test_a_blocking_program_is_stopped_once_and_a_late_signal_has_its_former_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    events: list[object] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: events.append(number))
    try:
        for _ in range(2):  # a program may serve again
            with stopping_on_signals(lambda: events.append("stop")):
                for _ in range(3):
                    signal.raise_signal(signal.SIGTERM)
                assert events == ["stop"]
                now += 1.5
                signal.raise_signal(signal.SIGTERM)
            assert events == ["stop", signal.SIGTERM]
            events.clear()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_have_their_former_effect_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), stopping_on_signals(print):
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) == before


def test_what_a_program_sets_behind_the_last_signal_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stopping_on_signals(lambda: None):
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                now += 1.5
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.anyio
async def test_another_thread_has_no_signals() -> None:
    stopped: list[str] = []

    async def listen() -> None:
        await stop_on_signals(lambda: stopped.append("stopped"), logging.getLogger("nsqext.consumer"))

    with anyio.fail_after(25):
        await to_thread.run_sync(lambda: anyio.run(listen))
    assert stopped == []
