"""Requests of threads on connections that they share: who sends, who reads, and the end."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from nsqext.errors import (
    ConnectionLost,
    NotSent,
    RequestTimeout,
)
from nsqext.transport import thread_connections
from nsqext.transport.connection import Connection
from nsqext.types import Address
from tests.support.blocking_client import eventually
from tests.support.connections import pub
from tests.support.fake_nsqd import ok
from tests.transport.thread_requests import Command, Socket, answer, blocking, sending

if TYPE_CHECKING:
    from nsqext.protocol.client.client_protocol import Reply

_BIG = 20_000_000


def test_a_large_request_is_sent_while_the_server_reads() -> None:
    received: list[int] = []

    def serve() -> None:
        while sum(received) < _BIG:
            received.append(len(right.recv(1 << 20)))
        right.sendall(ok())

    with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
        served = threads.submit(serve)
        assert connection.request(pub(b"b" * (_BIG - 10)), float("inf")) == b"OK"
        served.result(30)

        def serve_again() -> None:
            assert right.recv(100) == pub(b"small")
            right.sendall(ok(b"2"))

        served = threads.submit(serve_again)
        assert connection.request(pub(b"small"), float("inf")) == b"2"
        served.result(30)


def test_a_request_over_a_socket_with_the_number_of_a_closed_one_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAP", "_TICK"):
        monkeypatch.setattr(thread_connections, name, 60.0)
    with blocking() as (shared, right), ThreadPoolExecutor(1) as threads:
        number = shared.connection.fileno()
        lost = threads.submit(shared.request, pub(b"x" * _BIG), float("inf"))
        eventually(lambda: shared.connection.sending)
        right.close()
        with pytest.raises(ConnectionLost):
            lost.result(25)
        ours, peer = socket.socketpair()
        if peer.fileno() == number:
            ours, peer = peer, ours
        given = ours.detach()
        os.dup2(given, number)
        if given != number:
            os.close(given)
        left = Socket(fileno=number)
        left.setblocking(False)
        connection = Connection(left, Address("127.0.0.1", 2), max_frame_size=1000)
        connection.protocol.read_ahead()
        shared.connections.add(connection)
        data = pub(b"y" * _BIG)
        command = Command(connection, data, float("inf"))
        sent = threads.submit(shared.connections.run, command)
        with peer:
            peer.settimeout(25)
            unread = len(data)
            while unread:
                unread -= len(peer.recv(1 << 20))
            peer.sendall(ok(b"y"))
            sent.result(25)
        assert command.result() == b"y"


def test_a_late_response_belongs_to_its_own_request() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
        with pytest.raises(RequestTimeout):
            connection.request(pub(b"first"), time.monotonic() - 1)
        assert right.recv(100) == pub(b"first")
        second = threads.submit(connection.request, pub(b"second"), float("inf"))
        assert right.recv(100) == pub(b"second")
        right.sendall(ok(b"late") + ok(b"own"))
        assert second.result(25) == b"own"


def test_a_silent_server_loses_the_connection() -> None:
    with blocking(request_timeout=0.1) as (connection, _):
        with pytest.raises(RequestTimeout):
            connection.request(pub(b"x"), float("inf"))
        assert not connection.connection.usable
        with pytest.raises(NotSent):
            connection.request(pub(b"x"), float("inf"))


def test_a_connection_that_ends_while_no_thread_publishes_is_forgotten() -> None:
    with blocking(request_timeout=0.1) as (connection, right):
        right.close()

        def ticked_off() -> bool:
            connection.connections.tick()
            return not len(connection.connections)

        eventually(ticked_off)
        assert not connection.connections._poll.poll(0), "threads would poll a closed socket"


def test_a_connection_that_is_shut_down_wakes_its_thread() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(connection.request, pub(b"x"), float("inf"))
        assert right.recv(100)
        connection.connection.shut_down()
        with pytest.raises(ConnectionLost):
            waiting.result(25)


def test_threads_share_a_connection_and_receive_their_own_responses() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(17) as threads:
        ended = threads.submit(answer, right.dup())
        right.close()

        def publish(name: int) -> None:
            for number in range(300):
                body = b"%d-%d" % (name, number)
                assert connection.request(pub(body), float("inf")) == body

        for done in [threads.submit(publish, name) for name in range(16)]:
            done.result(60)
        assert not connection.connections.in_flight
        connection.connection.close()
        ended.result(25)


def test_waiting_requests_are_sent_together() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(8) as threads:
        first = threads.submit(connection.request, pub(b"first"), float("inf"))
        assert right.recv(1000) == pub(b"first")
        with sending(connection, threads):
            others = [threads.submit(connection.request, pub(b"%d" % number), float("inf")) for number in range(6)]
            eventually(lambda: connection.connections.in_flight == 8)
        right.sendall(ok(b"first"))
        assert first.result(25) == b"first"
        sent = right.recv(1000)
        assert len(sent) == 6 * len(pub(b"0"))
        right.sendall(b"".join(ok(sent[end - 1 : end]) for end in range(len(pub(b"0")), len(sent) + 1, len(pub(b"0")))))
        assert [other.result(25) for other in others] == [b"%d" % number for number in range(6)]


def test_a_response_wakes_its_thread_and_the_reader_that_ends_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_connections, "NAP", 3600.0)
    with blocking() as (connection, right), ThreadPoolExecutor(5) as threads:
        reader = threads.submit(connection.request, pub(b"1"), float("inf"))
        assert right.recv(1000) == pub(b"1")
        with sending(connection, threads):
            others = [threads.submit(connection.request, pub(b"2"), float("inf")) for _ in range(3)]
            eventually(lambda: len(connection.connections._sleeping) == 3)
        eventually(lambda: connection.connection.in_flight == 4)
        right.sendall(ok(b"1") + ok(b"2"))
        assert reader.result(25) == b"1"
        eventually(lambda: sum(other.done() for other in others) == 1)
        right.sendall(ok(b"2") * 2)
        assert [other.result(25) for other in others] == [b"2"] * 3


def test_a_thread_that_waits_for_a_tick_reads_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_connections, "NAP", 3600.0)
    entered, leave = threading.Event(), threading.Event()

    def tick() -> None:
        entered.set()
        assert leave.wait(25)

    with blocking() as (shared, right), ThreadPoolExecutor(2) as threads:
        with monkeypatch.context() as patched:
            patched.setattr(shared.connection, "tick", tick)
            ticks = threads.submit(shared.connections.tick)
            assert entered.wait(25)
            waiting = threads.submit(shared.request, pub(b"x"), float("inf"))
            eventually(lambda: len(shared.connections._sleeping) == 1)
            leave.set()
            ticks.result(25)
        assert right.recv(100) == pub(b"x")
        right.sendall(ok(b"x"))
        assert waiting.result(25) == b"x"


def test_a_request_that_waits_while_a_connection_is_retired_is_sent_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_connections, "_TICK", 60.0)
    entered, leave = threading.Event(), threading.Event()

    class Retired:
        closed = False

        @property
        def in_flight(self) -> int:
            entered.set()
            assert leave.wait(25)
            return 1

    with blocking() as (shared, right), ThreadPoolExecutor(2) as threads:
        right.settimeout(25)
        retires = threads.submit(shared.connections.retire, cast("Connection", Retired()))
        assert entered.wait(25)
        waiting = threads.submit(shared.request, pub(b"x"), float("inf"))
        eventually(lambda: shared.connections._reader)
        leave.set()
        assert not retires.result(25)
        assert right.recv(100) == pub(b"x")
        right.sendall(ok(b"x"))
        assert waiting.result(25) == b"x"


def test_the_thread_that_reads_reads_a_connection_that_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NAP", "_TICK"):
        monkeypatch.setattr(thread_connections, name, 3600.0)
    polls = threading.Event()

    class Poll:
        def __init__(self) -> None:
            self.poller = select.poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            polls.set()
            return self.poller.poll(timeout)

    parts = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(thread_connections, "select", parts)
    with blocking() as (shared, right), blocking() as (other, added), ThreadPoolExecutor(2) as threads:
        reads = threads.submit(shared.request, pub(b"1"), float("inf"))
        assert right.recv(100) == pub(b"1")
        assert polls.wait(25)
        shared.connections.add(other.connection)
        command = Command(other.connection, pub(b"2"), float("inf"))
        waiting = threads.submit(shared.connections.run, command)
        assert added.recv(100) == pub(b"2")
        added.sendall(ok(b"2"))
        waiting.result(25)
        assert command.result() == b"2"
        right.sendall(ok(b"1"))
        assert reads.result(25) == b"1"


def test_a_deadline_counts_although_something_arrives_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poll:
        def __init__(self) -> None:
            self.poller = select.poll()
            self.register, self.unregister = self.poller.register, self.poller.unregister

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            return self.poller.poll(1) or [(-1, select.POLLIN)]

    parts = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    monkeypatch.setattr(thread_connections, "select", parts)
    with blocking() as (connection, _), ThreadPoolExecutor(1) as threads:
        late = threads.submit(connection.request, pub(b"x"), time.monotonic() + 0.1)
        with pytest.raises(RequestTimeout):
            late.result(25)


def test_connections_end_when_their_requests_have_outcomes() -> None:
    with blocking() as (connection, right), ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(connection.request, pub(b"x"), float("inf"))
        assert right.recv(100)
        assert not connection.connections.retire(connection.connection)
        assert not connection.connections.close(0.01)
        closes = threads.submit(connection.connections.close, 25)
        eventually(closes.running)
        right.sendall(ok(b"1"))
        assert waiting.result(25) == b"1"
        assert closes.result(25)
        assert connection.connection.closed


def test_the_error_of_a_threads_request_is_not_that_of_another() -> None:
    class Broken(Command):
        def post(self) -> tuple[Connection, Reply]:
            raise ValueError("broken")

    with blocking() as (connection, right), ThreadPoolExecutor(3) as threads:
        with sending(connection, threads):
            broken = Broken(connection.connection, b"", 0)
            ended = threads.submit(connection.connections.run, broken)
            good = threads.submit(connection.request, pub(b"good"), float("inf"))
            eventually(lambda: connection.connections.in_flight == 3)
        assert right.recv(1000) == pub(b"good")
        right.sendall(ok(b"good"))
        assert good.result(25) == b"good"
        ended.result(25)
        with pytest.raises(ValueError, match="broken"):
            broken.result()
        assert connection.connection.usable
