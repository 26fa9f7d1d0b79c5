"""Lanes by key: the order of a key is kept, and a requeue holds up that key alone."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from nsqext.client.consumer.handlers.key_lanes import KeyLanes, key_reader
from nsqext.client.consumer.message import Message
from nsqext.errors import InvalidInput, MessageNotInFlight
from nsqext.protocol.messages import EXT_JSON


class Owner:
    """A subscription that writes down what it is told."""

    topic, partition, node, in_order = "t", 0, "127.0.0.1:4150", False
    msg_timeout, max_msg_timeout, ignore_lost = 60.0, 900.0, False

    def __init__(self) -> None:
        self.horizon = float("-inf")
        self.told: list[tuple[str, bytes]] = []
        self.delays: dict[bytes, float] = {}
        self.clock = Clock()

    def finish(self, message: Message) -> None:
        """Note a FIN."""
        self.told.append(("FIN", message.body))

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Note a REQ."""
        self.told.append(("REQ", message.body))
        self.delays[message.body] = delay

    def touch(self, message: Message) -> None:
        """Note a TOUCH."""
        if message.received < self.horizon:
            raise MessageNotInFlight("gone")
        self.told.append(("TOUCH", message.body))
        message.received = self.clock.now

    def record_outcome(self, failed: bool) -> None:
        """Note what a backoff would hear."""
        self.told.append(("record_outcome", b""))

    def expired(self, message: Message) -> bool:
        """Return whether it is gone."""
        return message.received < self.horizon


class Clock:
    """Seconds that pass when they are told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Lanes whose key is the first byte of the body."""

    def __init__(self, count: int = 4) -> None:
        self.clock = Clock()
        self.owner = Owner()
        self.owner.clock = self.clock
        self.lanes = KeyLanes(count, key_reader(lambda message: message.body[:1]), self.clock)
        self.numbers = 0

    def put(self, *bodies: str, owner: Owner | None = None) -> list[Message]:
        """Let messages arrive."""
        messages = []
        for body in bodies:
            self.numbers += 1
            message = Message(owner or self.owner)
            message.body, message.id = body.encode(), b"%016d" % self.numbers
            message.attempts, message.received = 1, self.clock.now
            message.version, message.header = 0, b""
            messages.append(message)
        self.lanes.put(messages)
        return messages

    def rows(self) -> dict[str, list[str]]:
        """Return the bodies that wait in lanes, by key."""
        found: dict[str, list[str]] = {}
        for message in self.lanes.here():
            found.setdefault(message.body[:1].decode(), []).append(message.body.decode())
        return found

    def take(self, message: Message) -> Message:
        """Take a message out of its lane, as its worker does."""
        for row in self.lanes.rows:
            if row.messages and row.messages[0] is message:
                return row.messages.popleft()
        raise AssertionError("it is not the first of its lane")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now += seconds
        self.lanes.tick(self.clock.now)


def test_a_key_is_always_in_the_same_lane() -> None:
    bench = Bench()
    bench.put(*(f"{key}{number}" for number in range(3) for key in "abcdefgh"))
    for row in bench.lanes.rows:
        for key in {message.body[:1] for message in row.messages}:
            assert [message.body for message in row.messages if message.body[:1] == key] == [
                key + b"%d" % number for number in range(3)
            ]
    assert sum(bool(row.messages) for row in bench.lanes.rows) > 1


@pytest.mark.anyio
async def test_a_requeue_holds_up_its_key_and_no_other() -> None:
    bench = Bench(1)
    first, second, other = bench.put("a1", "a2", "b1")
    bench.take(first)
    await first.requeue(5.0, backoff=True)
    bench.put("a3", "b2")
    assert bench.rows() == {"b": ["b1", "b2"]}
    assert bench.lanes.waiting == 3
    bench.wait(4.9)
    assert bench.rows() == {"b": ["b1", "b2"]}
    bench.wait(0.2)
    assert bench.rows() == {"a": ["a1", "a2", "a3"], "b": ["b1", "b2"]}
    assert (first.attempts, first.answered, bench.lanes.waiting) == (2, False, 0)
    assert bench.owner.told == []
    bench.take(first)
    await first.finish()
    assert bench.owner.told == [("FIN", b"a1")]
    assert [row.messages[0] for row in bench.lanes.rows] == [second]
    assert not other.answered


@pytest.mark.anyio
async def test_what_is_held_is_touched() -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    bench.take(first)
    await first.requeue(100.0)
    bench.wait(20.0)
    assert bench.owner.told == []
    bench.wait(11.0)
    assert bench.owner.told == [("TOUCH", b"a1"), ("TOUCH", b"a2")]


@pytest.mark.anyio
async def test_a_held_message_whose_connection_is_gone_takes_the_rest_with_it() -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    bench.take(first)
    await first.requeue(5.0)
    bench.owner.horizon = float("inf")
    again = Owner()
    bench.put("a1", "a2", owner=again)
    bench.wait(6.0)
    assert bench.rows() == {"a": ["a1", "a2"]}
    assert {message.owner.node for message in bench.lanes.here()} == {again.node}
    assert all(message.received >= message.owner.horizon for message in bench.lanes.here())
    assert bench.owner.told == []


@pytest.mark.anyio
async def test_a_held_message_that_timed_out_has_the_rest_given_back() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.take(first)
    await first.requeue(5.0)
    bench.clock.now += 2
    second, third = bench.put("a2", "a3")
    bench.owner.horizon = bench.clock.now - 1
    bench.wait(6.0)
    assert bench.rows() == {}
    assert bench.owner.told == [("REQ", b"a2"), ("REQ", b"a3")]
    assert second.answered
    assert third.answered


@pytest.mark.anyio
async def test_after_the_stop_nothing_comes_back() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.take(first)
    await first.requeue(5.0)
    bench.lanes.stop()
    bench.wait(6.0)
    bench.put("b1")
    assert bench.rows() == {}


@pytest.mark.anyio
async def test_what_is_left_is_given_back_with_the_rest_of_its_delay() -> None:
    bench = Bench(2)
    a1, _, b1, _, c1 = bench.put("a1", "a2", "b1", "b2", "c1")
    bench.take(a1)
    await a1.requeue(5.0)
    bench.take(b1)
    bench.lanes.stop()
    bench.wait(2.0)
    await b1.requeue(1.0)  # its handler was still at work
    bench.owner.horizon, c1.received = 0.5, 0.0  # no longer ours
    bench.lanes.give_back(lambda message: message.body != b"b2")
    assert sorted(bench.owner.delays.items()) == [(b"a1", 3.0), (b"a2", 3.0), (b"b1", 1.0)]
    bench.lanes.give_back(lambda message: True)
    assert len(bench.owner.delays) == 3
    assert a1.answered


def test_a_key_that_cannot_be_had_is_an_error() -> None:
    bench = Bench()
    bench.lanes = KeyLanes(2, key_reader(lambda message: {b"good": "k"}[message.body]), bench.clock)
    with pytest.raises(InvalidInput, match="mend the consumer's key function"):
        bench.put("good", "bad", "good")
    assert [message.body for message in bench.lanes.here()] == [b"good"]


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'{"##key":"ann"}', b"ann"),
        (b'{"##key":7}', b"7"),
        (b'{"##key":true}', b"id"),
        (b'{"##key":""}', b"id"),
        (b'{"other":"x"}', b"id"),
        (b"[1]", b"id"),
        (b"broken", b"id"),
    ],
)
def test_the_key_in_a_header(header: bytes, key: bytes) -> None:
    message = Message(Owner())
    message.id, message.header, message.version = b"id", header, EXT_JSON
    assert key_reader("##key")(message) == key


@pytest.mark.parametrize(("value", "key"), [("ä", "ä".encode()), (b"x", b"x"), (None, b"id")])
def test_the_key_by_a_function(value: Any, key: bytes) -> None:
    message = Message(Owner())
    message.id = b"id"
    assert key_reader(lambda _: value)(message) == key


@pytest.mark.anyio
async def test_a_waiting_worker_wakes_when_its_key_goes_on() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.take(first)
    await first.requeue(0.0)
    woken = anyio.Event()

    async def work() -> None:
        while not bench.lanes.rows[0].messages:
            await bench.lanes.rows[0].wait()
        woken.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        bench.wait(0.1)
        with anyio.fail_after(5):
            await woken.wait()
