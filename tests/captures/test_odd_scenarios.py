"""Odd conversations with nodes of both generations, replayed with a node without sockets and with the real nsqd."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest

from nsqext.broker.nsqd.http.stats import StatsRoutes
from nsqext.protocol.frames import FrameType
from nsqext.protocol.server.negotiate import ServerLimits
from nsqext.types import TopicMeta
from tests.campaigns.soak.clusters import free_ports
from tests.captures import OddConversation, OddTopic, odd_conversations, owner_conversations
from tests.captures.test_replay_tcp import comparable
from tests.support import plain_http
from tests.support.nsqd_sessions import Client, Clock, make_node
from tests.support.plain_http import post
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node

_PROGRAMS = {
    "redesigned": os.environ.get("NSQEXT_TEST_REDESIGNED_PROGRAMS", ""),
    "original": os.environ.get("NSQEXT_TEST_ORIGINAL_PROGRAMS", ""),
}
_PATIENCE = 20.0  # seconds that a frame may take
_STEP = 0.25
_CALM = 0.3
_THOUGHT = 0.01  # seconds before a client sends
_ID = slice(18, 34)  # of a message, in its frame
_TOLERANCE = 1.0  # seconds within which the end of a connection that stands still is that of the recording
ALL = (*odd_conversations(), *owner_conversations())


class Talker(Protocol):
    """One connection to a node."""

    def send(self, data: bytes) -> None:
        """Send bytes."""

    def frame(self, seconds: float) -> bytes | None:
        """Return the next frame; None if it does not come in time, or if the connection ends."""

    def ended(self) -> bool:
        """Wait until the node closes the connection; return whether it does."""

    def close(self) -> None:
        """Close the connection."""

    def now(self) -> float:
        """Return the seconds of its clock."""


class _Embedded:
    """A connection to a node without sockets; waiting moves its clock."""

    def __init__(self, node: Node, clock: Clock, number: int) -> None:
        self._node, self._clock = node, clock
        self._client = Client(node, f"127.0.0.1:{1000 + number}", magic=False)
        self._received = b""

    def send(self, data: bytes) -> None:
        self._clock.seconds += _THOUGHT
        self._client.send(data)

    def frame(self, seconds: float) -> bytes | None:
        end = self._clock.seconds + seconds
        while True:
            session = self._client.session
            while session.output.urgent:
                self._received += session.take()
            if self._received:
                size = 4 + int.from_bytes(self._received[:4], "big")
                frame, self._received = self._received[:size], self._received[size:]
                return frame
            if not self._client.open or self._clock.seconds >= end:
                return None
            self._clock.seconds += _STEP
            self._node.tick()

    def ended(self) -> bool:
        return self.frame(_PATIENCE) is None and not self._client.open

    def close(self) -> None:
        self._client.session.end()

    def now(self) -> float:
        return self._clock.seconds


class _Real:
    """A connection to a running program."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), _PATIENCE)
        self._received = b""

    def send(self, data: bytes) -> None:
        time.sleep(_THOUGHT)
        with suppress(OSError):
            self._socket.sendall(data)

    def frame(self, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        while len(self._received) < 4 or len(self._received) < 4 + int.from_bytes(self._received[:4], "big"):
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(65536)
            except OSError:
                return None
            if not data:
                return None
            self._received += data
        size = 4 + int.from_bytes(self._received[:4], "big")
        frame, self._received = self._received[:size], self._received[size:]
        return frame

    def ended(self) -> bool:
        self._socket.settimeout(_PATIENCE)
        try:
            return not self._socket.recv(1)
        except ConnectionError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()

    def now(self) -> float:
        return time.monotonic()


class _Ids:
    """Ids of messages: those of the original NSQ are random, and numbered in the recording."""

    def __init__(self) -> None:
        self._real: dict[bytes, bytes] = {}

    def learn(self, recorded: bytes, frame: bytes) -> None:
        if int.from_bytes(recorded[4:8], "big") == int.from_bytes(frame[4:8], "big") == FrameType.MESSAGE:
            self._real.setdefault(recorded[_ID], frame[_ID])

    def to_real(self, data: bytes) -> bytes:
        for recorded, real in self._real.items():
            data = data.replace(recorded, real)
        return data


class Server(NamedTuple):
    """How to connect to a node with the topics of a scenario, and how to ask it for the clients of a channel."""

    connect: Any
    ids: _Ids
    clients: Callable[[OddTopic], list[dict[str, Any]]]


def _clients_at(http: int, topic: OddTopic) -> list[dict[str, Any]]:
    """Return the clients of a topic's first channel by the statistics of a running program."""
    time.sleep(_CALM)
    page = plain_http.get(f"http://127.0.0.1:{http}/stats?format=json&topic={topic.name}").json()
    found: list[dict[str, Any]] = page.get("data", page)["topics"][0]["channels"][0]["clients"]
    return found or []


def _clients_of(node: Node, topic: OddTopic) -> list[dict[str, Any]]:
    """Return the same for a node without sockets."""
    (hosted,) = (one for one in node.hosted.values() if one.partition.topic == topic.name)
    routes = StatsRoutes(node, {})
    found: list[dict[str, Any]] = routes._topic(hosted, "", with_clients=True)["channels"][0]["clients"]
    return found


def _replay(recorded: OddConversation, server: Server) -> None:
    talkers: dict[int, Talker] = {}
    try:
        _play(recorded, server, talkers)
    finally:
        for talker in talkers.values():
            talker.close()


def _play(recorded: OddConversation, server: Server, talkers: dict[int, Talker]) -> None:
    for step in recorded.steps:
        if step.what == "clients":
            found = server.clients(recorded.topics[0])
            names = ("client_id", "desired_tag", "ready_count", "in_flight_count")
            assert sorted([client[name] for name in names] for client in found) == json.loads(step.data)
            continue
        if step.connection not in talkers:
            talkers[step.connection] = server.connect(step.connection)
        talker, where = talkers[step.connection], f"connection {step.connection}, {step.data[:60]!r}"
        if step.what == "send":
            talker.send(server.ids.to_real(step.data))
        elif step.what == "recv":
            frame = talker.frame(_PATIENCE)
            assert frame is not None, where
            server.ids.learn(step.data, frame)
            assert comparable(frame) == comparable(server.ids.to_real(step.data)), where
        elif step.what == "silence":
            assert talker.frame(_CALM) is None, where
        elif step.what == "closed":
            assert talker.ended(), where
        elif step.what == "stopped":
            assert abs(_seconds_until_closed(talker) - float(step.data)) < _TOLERANCE, where
        else:
            talker.close()


def _seconds_until_closed(talker: Talker) -> float:
    """Read heartbeats and answer none until the node closes the connection; return how long that took."""
    began = talker.now()
    while (frame := talker.frame(_PATIENCE)) is not None:
        assert b"_heartbeat_" in frame
    assert talker.ended()
    seconds = talker.now() - began
    talker.close()
    return seconds


@table("recorded", [pytest.param(one, id=f"{one.generation}-{one.name}") for one in ALL])
def test_an_embedded_node_answers_as_the_real_one_did(recorded: OddConversation) -> None:
    clock = Clock()
    limits = ServerLimits() if recorded.generation == "redesigned" else ServerLimits.original()
    node = make_node(clock, limits=limits, clustered=False)
    for topic in recorded.topics:
        for partition in topic.partitions:
            hosted = node.host(topic.name, partition, TopicMeta(partition + 1, 1, extend_support=topic.extend))
            for channel in topic.channels:
                node.channel(hosted, channel)
    node.tick()
    _replay(recorded, Server(lambda number: _Embedded(node, clock, number), _Ids(), partial(_clients_of, node)))


@contextmanager
def _program(generation: str, folder: Path) -> Iterator[tuple[int, int]]:
    tcp, http, metrics = free_ports(3)
    words = [f"-tcp-address=127.0.0.1:{tcp}", f"-http-address=127.0.0.1:{http}", f"-data-path={folder}"]
    if generation == "redesigned":
        words += ["-broadcast-interface=lo", f"-metric-address=127.0.0.1:{metrics}", f"-log-dir={folder}"]
    process = Popen([f"{_PROGRAMS[generation]}/nsqd", *words], stdout=DEVNULL, stderr=DEVNULL, cwd=folder)
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", http), 1):
                break
            time.sleep(0.1)
        yield tcp, http
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("generation", ["redesigned", "original"])
def test_the_real_node_still_answers_so(generation: str, tmp_path: Path) -> None:
    if not _PROGRAMS[generation]:
        pytest.skip(f"NSQEXT_TEST_{generation.upper()}_PROGRAMS does not name the folder of the real nsqd")
    wrong = []
    with _program(generation, tmp_path) as (tcp, http):
        for recorded in [one for one in ALL if one.generation == generation]:
            _prepare(recorded, tcp, http)
            try:
                _replay(recorded, Server(lambda _: _Real(tcp), _Ids(), partial(_clients_at, http)))
            except AssertionError as error:
                wrong.append(f"{recorded.name}: {error}")
    assert wrong == []


def _prepare(recorded: OddConversation, tcp: int, http: int) -> None:
    for topic in recorded.topics:
        for partition in topic.partitions:
            if recorded.generation == "redesigned":
                talker = _Real(tcp)
                talker.send(b"  V2INTERNAL_CREATE_TOPIC %s %d %s\n" % _words(topic.name, partition, topic.extend))
                assert talker.frame(_PATIENCE) is not None
                talker.close()
            else:
                post(f"http://127.0.0.1:{http}/topic/create?topic={topic.name}")
        for channel in topic.channels:
            place = f"topic={topic.name}&channel={channel}&partition={topic.partitions[0]}"
            post(f"http://127.0.0.1:{http}/channel/create?{place}")


def _words(name: str, partition: int, extend: bool) -> tuple[bytes, int, bytes]:
    return name.encode(), partition, b"true" if extend else b"false"


def test_the_recording_has_both_generations() -> None:
    generations = [one.generation for one in odd_conversations()]
    assert generations.count("redesigned") >= 20
    assert generations.count("original") >= 20
