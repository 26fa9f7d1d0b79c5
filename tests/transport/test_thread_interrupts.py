"""Requests of threads on connections that they share, while signals interrupt their threads."""

from __future__ import annotations

import random
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from nsqext.errors import (
    ConnectionLost,
    NotSent,
)
from nsqext.protocol.client.commands import LARGE, with_body
from nsqext.transport import thread_connections
from nsqext.transport.thread_connections import ThreadConnections, ThreadRequest
from tests.support.blocking_client import eventually
from tests.support.connections import pub
from tests.support.fake_nsqd import ok
from tests.transport.thread_requests import Command, Sending, Shared, answer, blocking, sending

if TYPE_CHECKING:
    from nsqext.protocol.client.client_protocol import Reply
    from nsqext.transport.connection import Connection


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Make SIGALRM raise KeyboardInterrupt."""

    def interrupt(_: int, frame: FrameType | None) -> None:
        # without a trace function, as of the mutation campaign, nothing is interrupted between a lock and its `with`
        if frame is not None and frame.f_code.co_filename.endswith("/mutation/reach.py"):
            signal.setitimer(signal.ITIMER_REAL, 0.00005)
            return
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_interrupts_at_any_point_never_mix_up_responses(interrupts: None) -> None:
    choose = random.Random(1)
    interrupted = closed = responses = 0
    longest = 0.0002  # as long as this machine needs, so that about half of the requests are interrupted
    while interrupted < 200:
        with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
            ended = threads.submit(answer, right.dup())
            right.close()
            while connection.connection.usable:
                body = b"%d" % choose.getrandbits(60)
                try:
                    signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.00001, longest))
                    response = connection.request(pub(body), float("inf"))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(0)  # the signal may have been received
                except KeyboardInterrupt:
                    interrupted += 1
                    longest *= 1.1
                    closed += not connection.connection.usable
                else:
                    longest = max(longest / 1.1, 0.00002)
                    responses += 1
                    assert response == body
                if interrupted >= 200:
                    connection.connection.close()
            ended.result(25)
    assert closed > 20
    assert responses > 20


def test_an_interrupted_send_ends_the_connections_and_the_requests_of_others() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(2) as threads:
        other = threads.submit(connection.request, pub(b"x"), float("inf"))
        assert right.recv(100)
        connection.socket.interrupts = True
        sending = threads.submit(connection.request, with_body(b"PUB t\n", b"b" * LARGE), float("inf"))  # type: ignore[arg-type]
        ends = {type(request.exception(25)) for request in (other, sending)}
        assert ends == {KeyboardInterrupt, ConnectionLost}  # either thread may have sent it
        assert connection.connection.closed
        assert not len(connection.connections)


def test_a_request_whose_sender_is_interrupted_has_an_outcome() -> None:
    class Interrupted(Command):
        def post(self) -> tuple[Connection, Reply]:
            raise KeyboardInterrupt

    with blocking() as (connection, right), ThreadPoolExecutor(3) as threads:
        reader = threads.submit(connection.request, pub(b"reader"), float("inf"))
        assert right.recv(100) == pub(b"reader")
        sender, command = Sending(connection.connection), Interrupted(connection.connection, b"", 0)
        sends = threads.submit(connection.connections.run, sender)
        assert sender.entered.wait(25)
        waits = threads.submit(connection.connections.run, command)
        eventually(lambda: connection.connections.in_flight == 3)
        sender.leave.set()
        waits.result(25)
        with pytest.raises(ConnectionLost, match="was interrupted"):
            command.result()
        assert KeyboardInterrupt in {type(other.exception(25)) for other in (reader, sends)}


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_an_interrupted_thread_leaves_the_others_an_outcome(interrupts: None) -> None:
    choose = random.Random(2)
    interrupted = 0
    while interrupted < 60:
        outcomes: list[object] = []
        with blocking() as (connection, right), ThreadPoolExecutor(5) as threads:
            ended = threads.submit(answer, right.dup())
            right.close()

            def publish(name: int, shared: Shared = connection, outcomes: list[object] = outcomes) -> None:
                number = 0
                while shared.connection.usable:
                    number += 1
                    body = b"%d-%d" % (name, number)
                    try:
                        assert shared.request(pub(body), float("inf")) == body
                    except (ConnectionLost, NotSent) as error:
                        outcomes.append(error)

            ends = [threads.submit(publish, name) for name in range(4)]
            while connection.connection.usable:
                try:
                    signal.setitimer(signal.ITIMER_REAL, choose.uniform(0.00001, 0.003))
                    connection.request(pub(b"main"), float("inf"))
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    time.sleep(0)  # the signal may have been received
                except KeyboardInterrupt:
                    interrupted += 1
                except (ConnectionLost, NotSent):
                    break
                if interrupted >= 60:
                    connection.connection.shut_down()
                    break
            signal.setitimer(signal.ITIMER_REAL, 0)
            for end in ends:
                end.result(25)
            ended.result(25)


def test_what_an_interrupted_send_may_have_sent_counts_as_sent() -> None:
    with blocking() as (shared, right):
        connection = shared.connection
        connection.post(pub(b"first"))
        replies = [connection.post(command) for command in (pub(b"x"), with_body(b"PUB t\n", b"b" * LARGE))]
        shared.socket.interrupts = True
        with pytest.raises(KeyboardInterrupt):
            connection.flush()
        connection.close()
        assert [type(reply.error) for reply in replies] == [ConnectionLost, ConnectionLost]
        assert right.recv(100).startswith(pub(b"first") + pub(b"x"))


def test_an_interrupted_thread_takes_no_request_of_another_from_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed, left = threading.Event(), threading.Event()

    class Interrupted:
        def acquire(self, timeout: float) -> bool:
            noticed.wait(25)
            raise KeyboardInterrupt

        def release(self) -> None: ...

    class Queue(deque[ThreadRequest]):
        def popleft(self) -> ThreadRequest:
            if len(self) == 2:
                noticed.set()
                left.wait(0.2)  # never, if its thread waits for the lock
            return super().popleft()

    def leave(connections: ThreadConnections, command: Command) -> None:
        with pytest.raises(KeyboardInterrupt):
            connections.run(command)
        left.set()

    monkeypatch.setattr(thread_connections, "deque", Queue)
    with blocking() as (shared, right), ThreadPoolExecutor(5) as threads:
        connections = shared.connections
        reader = threads.submit(shared.request, pub(b"reader"), float("inf"))
        assert right.recv(100) == pub(b"reader")
        ended = threads.submit(answer, right.dup())
        command = Command(shared.connection, pub(b"left"), float("inf"))
        command.sleep = Interrupted()  # type: ignore[assignment]
        with sending(shared, threads):
            leaves = threads.submit(leave, connections, command)
            eventually(lambda: connections.in_flight == 3)
            stays = threads.submit(shared.request, pub(b"stays"), time.monotonic() + 25)
            eventually(lambda: connections.in_flight == 4)
            right.sendall(ok(b"reader"))
        assert reader.result(25) == b"reader"
        assert stays.result(25) == b"stays"
        leaves.result(25)
        assert not connections.in_flight
        shared.connection.close()
        ended.result(25)


def test_a_reader_that_was_interrupted_before_it_left_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a thread had the right to read, and did not read."""
    monkeypatch.setattr(thread_connections, "NAP", 0.05)
    stuck, over = threading.Event(), threading.Event()

    class Poll:
        def __init__(self) -> None:
            self.poller = select.poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            if not stuck.is_set():
                stuck.set()
                over.wait(60)
            return self.poller.poll(timeout)

    parts = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(thread_connections, "select", parts)
    with blocking() as (shared, right), ThreadPoolExecutor(2) as threads:
        reads = threads.submit(shared.request, pub(b"reads"), float("inf"))
        assert stuck.wait(25)
        waiting = threads.submit(shared.request, pub(b"x"), float("inf"))
        try:
            assert right.recv(len(pub(b"reads"))) == pub(b"reads")
            assert right.recv(100) == pub(b"x")
            right.sendall(ok(b"reads") + ok(b"x"))
            assert waiting.result(25) == b"x"
        finally:
            over.set()
        assert reads.result(25) == b"reads"
