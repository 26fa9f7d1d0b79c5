"""Recorded conversations, replayed against a node without sockets, which must respond like the real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import FrameType
from tests.captures import Conversation, Step, conversations, edge_conversations
from tests.support.nsqd_sessions import Client, Clock, host, make_node
from tests.support.tables import table

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node

# conversations that need sockets, HTTP, other nodes or random numbers
_ELSEWHERE = {
    "auth": "asks an HTTP server",
    "channel_empty_connected": "needs HTTP in between",
    "channel_ops_connected": "needs HTTP in between",
    "channel_setoffset": "needs HTTP in between",
    "consumer_leaves": "the client's end of the connection is not recorded",
    "delayed_req_to_queue": "needs HTTP in between",
    "deflate": "replayed by the protocol's tests",
    "fin_errors": "its messages were published elsewhere",
    "fin_req_touch_failed": "its messages were published elsewhere",
    "many_attempts": "depends on speed",
    "not_leader_write": "needs a follower",
    "pause_keeps_heartbeats": "needs HTTP in between",
    "pub_wrong_node": "needs a node without the topic",
    "snappy": "replayed by the protocol's tests",
    "sub_advanced_offset": "its messages were published elsewhere",
    "sub_advanced_timestamp": "depends on the time of day",
    "sub_ordered_first_reset_duplicate": "a race",
    "sub_sample_rate": "depends on random numbers",
    "tls": "needs a certificate",
    "topic_delete": "needs HTTP in between",
    "upgrade_old_records": "needs HTTP in between",
}
_STANDALONE = {"standalone_create_topic"}
_UNREGISTERED = {"sub_channel_not_registered"}
# connections that the client closed after their last step, so that the next one is the only one
_CLOSED = {
    "sub_ordered",
    "sub_ordered_ext",
    "sub_ordered_on_plain",
    "sub_ordered_rdy_zero",
    "ordered_partitions",
    "tag_fallback",
}
_NO_CHANNEL = {"pub_no_channel"}
_TOPIC = re.compile(rb"k_[a-z_]+_([a-z])_[a-z0-9]+|w_[a-z_]+_([a-z])")
_CHANNEL = re.compile(rb"^SUB\w* \S+ (\S+)")
_OWNERS = re.compile(r"\d+ vs \d+")
_PATIENCE = 60

REPLAYED = [pytest.param(one, id=one.name) for one in conversations() if one.name not in _ELSEWHERE]
EDGES = [pytest.param(one, id=one.name) for one in edge_conversations()]


def _topics(recorded: Conversation) -> Iterator[tuple[str, bool, bool]]:
    """Yield name, extend and ordered of each topic; the letter before the last part of the name encodes them."""
    found = {match[0]: match[1] or match[2] for step in recorded.steps for match in _TOPIC.finditer(step.data)}
    for name, letter in found.items():
        ordered = letter == b"o" or recorded.name.startswith("sub_ordered_ext")
        yield name.decode(), letter == b"x", ordered


def _make(recorded: Conversation, clock: Clock) -> Node:
    node = make_node(clock, clustered=recorded.name not in _STANDALONE)
    channels = {match[1].decode() for step in recorded.steps if (match := _CHANNEL.match(step.data))} | {"ch"}
    for name, extend, ordered in _topics(recorded):
        for partition in (0, 1) if recorded.name in ("partition_ids", "ordered_partitions") else (0,):
            hosted = host(node, name, partition, extend=extend, ordered=ordered)
            hosted.auto_create_channels = recorded.name not in _UNREGISTERED
            for channel in channels if recorded.name not in _NO_CHANNEL else ():
                if re.fullmatch(r"[a-z0-9]+", channel) and channel != "unregistered":
                    hosted.partition.channel(channel)
    return node


def comparable(frame: bytes) -> tuple[int, object]:
    """Return a frame without the parts that vary: timestamps, numbers of clients, order of members."""
    (found,) = FrameParser().feed(frame)
    kind, data = found
    if kind == FrameType.MESSAGE:
        return kind, data[8:]
    if data.startswith(b"{"):
        return kind, json.loads(data)
    return kind, _OWNERS.sub("N vs N", data.decode("latin-1"))


class _Replay:
    def __init__(self, recorded: Conversation) -> None:
        self.recorded = recorded
        self.clock = Clock()
        self.node = _make(recorded, self.clock)
        self.clients: dict[int, Client] = {}
        self.frames: dict[int, list[bytes]] = {}

    def client(self, number: int) -> Client:
        if number not in self.clients:
            self.clients[number] = Client(self.node, f"127.0.0.1:{1000 + number}", magic=False)
            self.frames[number] = []
        return self.clients[number]

    def run(self) -> None:
        last = {step.connection: index for index, step in enumerate(self.recorded.steps)}
        for index, step in enumerate(self.recorded.steps):
            getattr(self, step.what)(step)
            if index == last[step.connection] and self.recorded.name in _CLOSED:
                self.client(step.connection).session.end()

    def collect(self, number: int) -> list[bytes]:
        session = self.clients[number].session
        frames = self.frames[number]
        data = session.take() if session.output.urgent else b""
        while data:
            size = 4 + int.from_bytes(data[:4], "big")
            frames.append(data[:size])
            data = data[size:]
        return frames

    def wait(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.node.tick()

    def send(self, step: Step) -> None:
        self.client(step.connection).send(step.data)

    def recv(self, step: Step) -> None:
        for _ in range(_PATIENCE * 4):
            frames = self.collect(step.connection)
            if frames:
                break
            self.wait(0.25)
        else:
            pytest.fail(f"nothing came, wanted {step.data!r}")
        assert comparable(frames.pop(0)) == comparable(step.data)

    def silence(self, step: Step) -> None:
        self.wait(0.3)
        assert self.collect(step.connection) == []

    def open(self, step: Step) -> None:
        self.silence(step)
        assert self.client(step.connection).open

    def closed(self, step: Step) -> None:
        for _ in range(_PATIENCE):
            if not self.client(step.connection).open:
                return
            self.wait(1)
        pytest.fail("the connection stays open")


@table("recorded", REPLAYED + EDGES)
def test_a_node_answers_as_the_real_server_did(recorded: Conversation) -> None:
    _Replay(recorded).run()


def test_the_list_of_skipped_conversations_is_complete() -> None:
    assert _ELSEWHERE.keys() <= {one.name for one in conversations()}
    assert len(REPLAYED) > 60
