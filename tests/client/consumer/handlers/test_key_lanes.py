"""Lanes by key: the order of a key is kept, and a requeue delays only messages of its key."""

from __future__ import annotations

import anyio
import pytest

from nsqext.client.consumer.handlers import key_lanes
from nsqext.client.consumer.handlers.key_lanes import KeyLanes
from nsqext.client.consumer.handlers.message_key import key_reader
from nsqext.client.consumer.handlers.partition_order import is_lost
from nsqext.client.consumer.message import Message
from nsqext.client.consumer.options import DeliveryOptions
from nsqext.errors import InvalidInput, MessageNotInFlight


class Owner:
    """A subscription that records the calls it receives."""

    topic, node, in_order = "t", "127.0.0.1:4150", False
    msg_timeout, max_msg_timeout, ignore_lost = 60.0, 900.0, False

    def __init__(self) -> None:
        self.horizon = 0.0
        self.partition = 0
        self.moved = False
        self.number = 1
        self.ready = 20
        self.commands: list[tuple[str, bytes]] = []
        self.delays: dict[bytes, float] = {}
        self.clock = Clock()

    def finish(self, message: Message) -> None:
        """Record a FIN."""
        self.commands.append(("FIN", message.body))

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Record a REQ."""
        self.commands.append(("REQ", message.body))
        self.delays[message.body] = delay

    def touch(self, message: Message) -> None:
        """Record a TOUCH."""
        if message.received < self.horizon:
            raise MessageNotInFlight("gone")
        self.commands.append(("TOUCH", message.body))
        message.received = self.clock.now

    def record_outcome(self, failed: bool) -> None:
        """Record the outcome."""
        self.commands.append(("record_outcome", b""))

    def expired(self, message: Message) -> bool:
        """Return whether the message is no longer in flight."""
        return message.received < self.horizon

    def reset(self, reason: str) -> None:
        """Record a request to close the connection."""
        self.commands.append(("reset", b""))


class Clock:
    """A clock that tests advance."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """Lanes whose key is the first byte of the body."""

    def __init__(self, count: int = 4, *, ordered_by_server: bool = False) -> None:
        self.clock = Clock()
        self.owner = Owner()
        self.owner.clock = self.clock
        self.lanes = KeyLanes(
            count,
            key_reader(lambda message: message.body[:1]),
            self.clock,
            DeliveryOptions(),
            ordered_by_server=ordered_by_server,
        )

    def put(self, *bodies: str, owner: Owner | None = None) -> list[Message]:
        """Receive messages."""
        messages = self.make(*bodies, owner=owner)
        self.lanes.put(messages)
        return messages

    def make(self, *bodies: str, owner: Owner | None = None) -> list[Message]:
        """Return messages."""
        messages = []
        for body in bodies:
            message = Message(owner or self.owner)
            message.body, message.id = body.encode(), body.encode().ljust(16, b"-")
            message.attempts, message.received, message.delivered = 1, self.clock.now, self.clock.now
            message.version, message.header, message.offset, message.size = 0, b"", -1, 0
            message.timestamp = 1
            messages.append(message)
        return messages

    def rows(self) -> dict[str, list[str]]:
        """Return the bodies that wait in lanes, by key."""
        found: dict[str, list[str]] = {}
        for message in self.lanes.queued():
            found.setdefault(message.body[:1].decode(), []).append(message.body.decode())
        return found

    def take(self, message: Message) -> Message:
        """Take a message out of its lane, like its worker."""
        for row in self.lanes.lanes:
            if row.messages and row.messages[0] is message:
                return row.messages.popleft()
        raise AssertionError("it is not the first of its lane")

    def wait(self, seconds: float) -> None:
        """Advance the clock."""
        self.clock.now += seconds
        self.lanes.tick(self.clock.now)


def test_a_key_is_always_in_the_same_lane() -> None:
    bench = Bench()
    bench.put(*(f"{key}{number}" for number in range(3) for key in "abcdefgh"))
    for row in bench.lanes.lanes:
        for key in {message.body[:1] for message in row.messages}:
            assert [message.body for message in row.messages if message.body[:1] == key] == [
                key + b"%d" % number for number in range(3)
            ]
    assert sum(bool(row.messages) for row in bench.lanes.lanes) > 1


@pytest.mark.anyio
async def test_a_requeue_blocks_its_key_only() -> None:
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
    assert bench.owner.commands == []
    bench.take(first)
    await first.finish()
    assert bench.owner.commands == [("FIN", b"a1")]
    assert [row.messages[0] for row in bench.lanes.lanes] == [second]
    assert not other.answered


@pytest.mark.anyio
async def test_held_messages_are_touched() -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    bench.take(first)
    await first.requeue(100.0)
    bench.wait(20.0)
    assert bench.owner.commands == []
    bench.wait(11.0)
    assert bench.owner.commands == [("TOUCH", b"a1"), ("TOUCH", b"a2")]


def _cut(bench: Bench) -> Owner:
    """Close the connection; return the next one."""
    bench.owner.horizon = float("inf")
    bench.owner = Owner()
    bench.owner.clock = bench.clock
    return bench.owner


@pytest.mark.anyio
async def test_messages_of_a_lost_connection_keep_their_places() -> None:
    bench = Bench(1)
    first, second, _ = bench.put("a1", "a2", "b1")
    bench.take(first)
    await first.requeue(5.0)
    again = _cut(bench)
    bench.put("a3", "a2", "b1", "a1", owner=again)
    bench.wait(6.0)
    assert bench.rows() == {"a": ["a1", "a2", "a3"], "b": ["b1"]}
    assert not [message for message in bench.lanes.queued() if is_lost(message)]
    bench.take(first)
    await first.finish()
    assert again.commands == [("FIN", b"a1")]
    assert bench.lanes.lanes[0].messages[0] is second


@pytest.mark.anyio
async def test_later_messages_wait_for_a_lost_one_and_no_other_key_does() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = _cut(bench)
    bench.put("a2", "b1", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    assert bench.rows() == {"b": ["b1"]}
    bench.wait(59.0)
    assert bench.rows() == {"b": ["b1"]}
    bench.put("a1", owner=again)
    assert bench.rows() == {"a": ["a1", "a2"], "b": ["b1"]}


@pytest.mark.anyio
async def test_waiting_for_a_redelivery_ends(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = _cut(bench)
    bench.put("a2", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    again.ready = 0  # while the server cannot deliver messages, the time does not count
    bench.wait(61.0)
    assert bench.rows() == {}
    again.ready = 20
    bench.wait(61.0)
    assert bench.rows() == {"a": ["a2"]}
    assert "1 messages of a key were not redelivered within 60 s" in caplog.text


@pytest.mark.anyio
async def test_a_handled_message_whose_fin_was_lost_is_not_handled_again() -> None:
    bench = Bench(1)
    finished, running = bench.put("a1", "a2")
    bench.take(finished).finish_now()
    bench.take(running)
    again = _cut(bench)
    running.finish_now()
    bench.put("a2", "a1", owner=again)
    assert bench.rows() == {}
    assert again.commands == [("FIN", b"a2"), ("FIN", b"a1")]
    bench.put("a1", owner=again)
    assert bench.rows() == {}, "a redelivery of an earlier connection"


def _put_replaced(bench: Bench, owner: Owner, body: str, place: str, number: int) -> Message:
    """Receive another message with the id and the position of an earlier one."""
    (message,) = bench.make(body, owner=owner)
    message.id, message.timestamp = place.encode().ljust(16, b"-"), 2
    bench.lanes.put([_place(message, number)])
    return message


@pytest.mark.anyio
async def test_a_message_with_the_id_of_a_finished_one_is_handled() -> None:
    bench = Bench(1)
    first, second = (_place(message, number) for number, message in enumerate(bench.make("a1", "a2")))
    bench.lanes.put([first, second])
    bench.wait(0.3)
    bench.take(first).finish_now()
    bench.take(second).finish_now()
    again = _cut(bench)
    _put_replaced(bench, again, "a3", "a1", 0)
    _put_replaced(bench, again, "b1", "a2", 1)
    assert bench.rows() == {"a": ["a3"], "b": ["b1"]}
    assert again.commands == []


@pytest.mark.anyio
async def test_a_message_with_the_id_of_a_lost_one_is_handled_in_its_place() -> None:
    bench = Bench(1)
    messages = [_place(message, number) for number, message in enumerate(bench.make("a1", "a2", "b1", "b2"))]
    bench.lanes.put(messages)
    bench.wait(0.3)
    running = bench.take(messages[0])
    again = _cut(bench)
    bench.take(messages[1])
    bench.lanes.expired(messages[1])
    third = _put_replaced(bench, again, "a3", "a2", 1)
    assert bench.rows() == {"a": ["a3"]}
    fourth = _put_replaced(bench, again, "a4", "b1", 2)
    assert bench.rows()["a"] == ["a3", "a4"]
    assert (third.body, fourth.body) == (b"a3", b"a4")
    bench.lanes.put([_place(bench.make("a1", owner=again)[0], 0)])
    await running.finish()
    assert again.commands == [("FIN", b"a1")]


@pytest.mark.anyio
async def test_a_handler_whose_message_the_server_has_lost_ends_without_effect_on_the_next() -> None:
    bench = Bench(1)
    (running,) = (_place(message, 0) for message in bench.make("a1"))
    bench.lanes.put([running])
    bench.wait(0.3)
    bench.take(running)
    again = _cut(bench)
    following = _put_replaced(bench, again, "a2", "a1", 0)
    running.owner.order.finish(running)  # type: ignore[attr-defined]
    assert following.owner.order.unfinished == {following.id: following}  # type: ignore[attr-defined]
    assert bench.rows() == {"a": ["a2"]}


@pytest.mark.anyio
async def test_the_handler_of_a_lost_message_answers_its_next_delivery() -> None:
    bench = Bench(1)
    (running,) = bench.put("a1")
    bench.take(running)
    again = _cut(bench)
    bench.put("a1", owner=again)
    assert bench.rows() == {}
    await running.finish()
    assert again.commands == [("FIN", b"a1")]


@pytest.mark.anyio
async def test_after_a_seek_nothing_is_expected_again() -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    bench.take(first).finish_now()
    again = _cut(bench)
    again.moved = True
    bench.put("a1", "a3", owner=again)
    assert bench.rows() == {"a": ["a1", "a3"]}


def _place(message: Message, number: int) -> Message:
    message.offset, message.size = number * 30, 30
    return message


@pytest.mark.anyio
async def test_unseen_messages_are_waited_for() -> None:
    """The server had sent 2 and 3, which were never received; 4 is received first."""
    bench = Bench(1)

    def put(*numbers: int) -> None:
        messages = bench.make(*(f"a{number}" for number in numbers))
        bench.lanes.put([_place(message, number) for message, number in zip(messages, numbers, strict=True)])

    put(1)
    bench.wait(0.3)
    _cut(bench)
    put(4, 3)
    assert bench.rows() == {"a": ["a1"]}
    assert bench.lanes.waiting == 2
    put(2)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"]}
    put(6)
    bench.wait(4.9)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"]}
    bench.wait(0.2)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4", "a6"]}, "a gap that stays"


@pytest.mark.anyio
async def test_the_first_messages_are_sorted_even_when_their_connection_is_lost_meanwhile() -> None:
    bench = Bench(1)

    def put(*numbers: int) -> None:
        messages = bench.make(*(f"a{number}" for number in numbers))
        bench.lanes.put([_place(message, number) for message, number in zip(messages, numbers, strict=True)])

    put(3, 1)
    assert bench.rows() == {}
    _cut(bench)
    put(4, 3)
    bench.wait(0.3)
    assert bench.rows() == {}
    put(2, 1)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"]}


@pytest.mark.anyio
async def test_messages_that_use_up_rdy_while_they_wait_are_requeued() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = _cut(bench)
    again.ready = 4
    bench.put("a2", "a3", "a4", "a5", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    bench.wait(0.5)
    assert again.commands == []
    bench.wait(1.1)
    assert again.commands == [("REQ", b"a4"), ("REQ", b"a5")]
    bench.put("a5", "a1", owner=again)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4", "a5"]}
    assert [is_lost(message) for message in bench.lanes.queued()] == [False, False, False, True, False]


@pytest.mark.anyio
async def test_a_message_that_made_room_has_the_attempts_that_it_was_handled() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = _cut(bench)
    again.ready = 1
    bench.put("a2", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    for attempts in range(2, 10):
        bench.wait(0.1)
        bench.wait(1.1)
        (delivery,) = bench.make("a2", owner=again)
        delivery.attempts = attempts
        bench.lanes.put([delivery])
    assert again.commands == [("REQ", b"a2")] * 8
    bench.put("a1", owner=again)
    assert {message.body: message.attempts for message in bench.lanes.queued()} == {b"a1": 1, b"a2": 1}


@pytest.mark.anyio
async def test_redelivered_messages_that_use_up_rdy_make_room_for_an_earlier_one() -> None:
    """On a new connection to the original NSQ, even if nothing else was received."""
    bench = Bench(1)
    bench.owner.partition = -1
    first, _ = bench.put("a1", "a2")
    again = _cut(bench)
    again.partition, again.ready = -1, 1
    bench.put("a2", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    bench.wait(0.1)
    bench.wait(1.1)
    assert again.commands == [("REQ", b"a2")]
    bench.put("a1", "a2", owner=again)
    assert bench.rows() == {"a": ["a1", "a2"]}


@pytest.mark.anyio
async def test_the_order_is_given_up_when_too_many_messages_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_lanes, "_MOST_RETURNED", 2)
    bench = Bench(1)
    bench.owner.partition = -1
    (first,) = bench.put("a1")
    again = _cut(bench)
    again.partition = -1
    bench.put("b1", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    bench.put("a2", "a3", owner=again)
    bench.wait(0.1)
    assert not caplog.text
    bench.put("a4", owner=again)
    bench.wait(0.1)
    assert "3 messages of t wait for a redelivery of earlier ones" in caplog.text
    bench.put("a3", "a1", owner=again)
    assert bench.rows() == {"b": ["b1"], "a": ["a3", "a1"]}


@pytest.mark.anyio
async def test_the_original_nsq_redelivers_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps messages of a lost connection in flight: the time for a redelivery counts from their timeout."""
    bench = Bench(1)
    bench.owner.partition = -1
    first, finished = bench.put("a1", "b1")
    bench.take(first)
    bench.take(finished).finish_now()
    again = _cut(bench)
    again.partition, again.ready = -1, 2
    bench.put("a2", owner=again)
    bench.lanes.expired(first)
    bench.put("a3", owner=again)
    assert again.delays == {b"a3": 60.0}, "until the first one has timed out"
    bench.wait(1.2)
    bench.wait(117.0)
    assert bench.rows() == {}
    bench.put("a3", "b1", owner=again)
    assert again.commands[-1] == ("FIN", b"b1"), "its first FIN was lost"
    bench.wait(2.0)
    assert bench.rows() == {"a": ["a2", "a3"]}
    assert "1 messages of a key were not redelivered within 60 s" in caplog.text


@pytest.mark.anyio
async def test_a_key_of_another_partition_does_not_wait() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = _cut(bench)
    bench.put("a2", owner=again)
    bench.take(first)
    bench.lanes.expired(first)
    other = Owner()
    other.partition = 1
    bench.put("a7", owner=other)
    assert bench.rows() == {"a": ["a7"]}


@pytest.mark.anyio
async def test_a_key_failover_channel_redelivers_to_any_consumer() -> None:
    """The connection is closed if messages wait for one that timed out, and its messages are dropped.

    It is not enough to requeue the waiting ones: the server may have sent later ones that are not received yet.
    """
    bench = Bench(1, ordered_by_server=True)
    (first,) = bench.put("a1")
    bench.clock.now += 2
    bench.put("a2")
    bench.owner.horizon = bench.clock.now - 1
    bench.take(first)
    bench.lanes.expired(first)
    bench.put("a3")
    assert bench.rows() == {}
    bench.wait(1.9)
    assert bench.owner.commands == []
    bench.wait(0.2)
    assert bench.owner.commands == [("reset", b"")]
    bench.put("a4", "b1")
    assert bench.rows() == {"b": ["b1"]}
    bench.put("a2", "b2", owner=_cut(bench))
    assert bench.rows() == {"a": ["a2"], "b": ["b2"]}


@pytest.mark.anyio
async def test_the_place_of_a_message_that_timed_out_is_kept_on_a_key_failover_channel() -> None:
    """It is kept while no message of its key waits, because a later message may still be received."""
    bench = Bench(1, ordered_by_server=True)
    (first,) = bench.put("a1")
    bench.clock.now += 2
    bench.owner.horizon = bench.clock.now - 1
    bench.take(first)
    bench.lanes.expired(first)
    bench.wait(100.0)
    bench.put("a2", "b1")
    assert bench.rows() == {"b": ["b1"]}
    bench.wait(1.9)
    bench.put("a1")
    assert bench.rows() == {"a": ["a1", "a2"], "b": ["b1"]}
    bench.wait(100.0)
    assert ("reset", b"") not in bench.owner.commands


def test_messages_lost_to_other_consumers_are_bounded() -> None:
    bench = Bench(1, ordered_by_server=True)
    bench.owner.ready = 3
    for number in range(7):
        (message,) = bench.put(f"{number}")
        bench.take(message)
        bench.clock.now += 2
        bench.owner.horizon = bench.clock.now - 1
        bench.lanes.expired(message)
        bench.wait(0.0)
        assert (("reset", b"") in bench.owner.commands) == (number == 6)


@pytest.mark.anyio
async def test_no_message_is_handed_out_after_the_stop() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.take(first)
    await first.requeue(5.0)
    bench.lanes.stop()
    bench.wait(6.0)
    bench.put("b1")
    assert bench.rows() == {}


@pytest.mark.anyio
async def test_remaining_messages_are_requeued_with_the_rest_of_their_delay() -> None:
    bench = Bench(2)
    a1, _, b1, _, c1 = bench.put("a1", "a2", "b1", "b2", "c1")
    bench.take(a1)
    await a1.requeue(5.0)
    bench.take(b1)
    bench.lanes.stop()
    bench.wait(2.0)
    await b1.requeue(1.0)  # its handler was still running
    bench.owner.horizon, c1.received = 0.5, 0.0  # no longer in flight
    bench.lanes.requeue_remaining(lambda message: message.body != b"b2")
    assert sorted(bench.owner.delays.items()) == [(b"a1", 3.0), (b"a2", 3.0), (b"b1", 1.0)]
    bench.lanes.requeue_remaining(lambda message: True)
    assert len(bench.owner.delays) == 3
    assert a1.answered


def test_a_key_function_that_fails_is_an_error() -> None:
    bench = Bench()
    bench.lanes = KeyLanes(2, key_reader(lambda message: {b"good": "k"}[message.body]), bench.clock, DeliveryOptions())
    with pytest.raises(InvalidInput, match="must return str, bytes or None"):
        bench.put("good", "bad", "good")
    assert [message.body for message in bench.lanes.queued()] == [b"good"]


@pytest.mark.anyio
async def test_a_waiting_worker_wakes_when_its_key_is_free() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.take(first)
    await first.requeue(0.0)
    woken = anyio.Event()

    async def work() -> None:
        while not bench.lanes.lanes[0].messages:
            await bench.lanes.lanes[0].wait()
        woken.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await anyio.wait_all_tasks_blocked()
        bench.wait(0.1)
        with anyio.fail_after(15):
            await woken.wait()
