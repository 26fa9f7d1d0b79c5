"""Lanes against a model of a hostile server: no message is handled before an earlier one of its key, or twice."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.client.consumer.handlers.key_lanes import KeyLanes
from nsqext.client.consumer.handlers.message_keys import key_reader
from nsqext.client.consumer.message import KeySharing, Message
from nsqext.client.consumer.options import DeliveryOptions
from nsqext.errors import MessageNotInFlight

_TIMEOUT = 60.0
_KEYS = 2
_READY = 5
_SIZE = 30
_FOREVER = DeliveryOptions(redelivery_wait=1e9, gap_wait=1e9)


class _Connection:
    """The subscription interface of the lanes."""

    topic, partition, node, in_order = "t", 0, "127.0.0.1:4150", False
    msg_timeout, max_msg_timeout, ignore_lost, moved, ready = _TIMEOUT, 900.0, False, False, _READY
    taking_over = original = False
    key_sharing = KeySharing.NONE

    def __init__(self, server: _Server) -> None:
        self.horizon = server.now - _TIMEOUT
        self.number = server.subscriptions = server.subscriptions + 1
        self.broken = False
        """Whether commands of the client are lost."""
        self._server = server

    def finish(self, message: Message) -> None:
        self._check(message)
        self._server.finished.add(int(message.body))
        if not self.broken:
            del self._server.in_flight[int(message.body)]

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        self._check(message)
        if not self.broken:
            self._server.take_back(int(message.body), attempts=1)

    def touch(self, message: Message) -> None:
        self._check(message)
        message.received = self._server.now
        if not self.broken:
            self._server.in_flight[int(message.body)] = self._server.now

    def _check(self, message: Message) -> None:
        if message.received < self.horizon:
            raise MessageNotInFlight("not in flight")

    def record_outcome(self, failed: bool) -> None:
        """Ignore the outcome: no backoff."""

    def expired(self, message: Message) -> bool:
        return message.received < self.horizon

    def reset(self, reason: str) -> None:
        raise AssertionError(f"lanes of one consumer never need a new connection: {reason}")


class _Server:
    """Reads its log in order, and redelivers messages in any order, mixed with unread messages."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.published = 0
        self.read = 0
        self.subscriptions = 0
        self.requeued: list[int] = []
        self.in_flight: dict[int, float] = {}
        self.finished: set[int] = set()
        self.attempts: dict[int, int] = {}
        self.connection = _Connection(self)

    def send(self, choices: list[int]) -> list[Message]:
        """Send a message for each choice, as long as RDY allows."""
        messages = []
        for choice in choices:
            unread = self.read < self.published
            candidates = len(self.requeued) + unread
            if not candidates or len(self.in_flight) >= _READY:
                break
            place = choice % candidates
            if place < len(self.requeued):
                number = self.requeued.pop(place)
            else:
                number, self.read = self.read, self.read + 1
            self.in_flight[number] = self.now
            messages.append(self._message(number))
        return messages

    def _message(self, number: int) -> Message:
        message = Message(self.connection)
        message.body, message.id, message.header = b"%06d" % number, b"%016d" % number, b""
        message.version, message.attempts = 0, self.attempts.get(number, 1)
        message.delivered = message.received = self.now
        message.timestamp = number
        message.offset, message.size = number * _SIZE, _SIZE
        return message

    def take_back(self, number: int, *, attempts: int) -> None:
        del self.in_flight[number]
        self.attempts[number] = self.attempts.get(number, 1) + attempts
        self.requeued.append(number)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.connection.horizon = self.now - _TIMEOUT
        for number in [number for number, since in self.in_flight.items() if since < self.connection.horizon]:
            self.take_back(number, attempts=1)

    def cut(self) -> None:
        self.connection.horizon = float("inf")
        for number in list(self.in_flight):
            self.take_back(number, attempts=0)
        self.connection = _Connection(self)


class _Model(RuleBasedStateMachine):
    """Two lanes, two keys; a body is a number, and its key is that number modulo two."""

    def __init__(self) -> None:
        super().__init__()
        self.server = _Server()
        self.lanes = KeyLanes(
            2, key_reader(lambda message: b"%d" % (int(message.body) % _KEYS)), lambda: self.server.now, _FOREVER
        )
        self.done: set[int] = set()
        # the guarantee starts with the first message of the partition
        self.publish(1)
        self.deliver([0])
        self.pass_time(1.0)

    @precondition(lambda self: self.server.published < 30)
    @rule(count=st.integers(1, 6))
    def publish(self, count: int) -> None:
        self.server.published += count

    @rule(choices=st.lists(st.integers(0, 20), min_size=1, max_size=6))
    def deliver(self, choices: list[int]) -> None:
        self.lanes.put(self.server.send(choices))

    @rule(seconds=st.sampled_from([1.0, 35.0]))
    def pass_time(self, seconds: float) -> None:
        self.server.pass_time(seconds)
        self.lanes.tick(self.server.now)

    @rule()
    def break_connection(self) -> None:
        """Lose all later commands of the client."""
        self.server.connection.broken = True

    @rule(choices=st.lists(st.integers(0, 20), max_size=5))
    def cut(self, choices: list[int]) -> None:
        """Close the connection; messages that were sent and not received are lost."""
        self.server.send(choices)
        self.server.cut()

    @invariant()
    def a_waiting_key_is_in_no_lane(self) -> None:
        waits = [self.lanes._delayed, *(order.lost for order in self.lanes._orders.values())]
        waiting = {int(key) for keys in waits for key in keys}
        assert not any(int(message.body) % _KEYS in waiting for message in self.lanes.queued())

    @invariant()
    def memory_is_bounded(self) -> None:
        for order in self.lanes._orders.values():
            assert len(order._finished) <= _READY
            assert len(order.early) <= _READY
            assert len(order.unfinished) <= self.server.published - len(self.done) + 2 * 4  # of two batches

    @invariant()
    def nothing_is_finished_that_was_not_handled(self) -> None:
        assert self.server.finished <= self.done

    def check_order(self, number: int, ahead: Collection[int] = ()) -> None:
        """Check a message that is handed out, together with others ahead of it."""
        earlier = set(range(number % _KEYS, number, _KEYS))
        assert earlier <= {*self.done, *ahead}, f"{number} is started before {min(earlier - self.done)} of its key"
        assert number not in self.done, f"{number} is handled twice"

    def handle_one(self, lane: int) -> None:
        """Handle the next message of a lane, or the next messages, with success."""
        raise NotImplementedError

    def teardown(self) -> None:
        """All messages are handled after the last fault."""
        self.server.connection.broken = False
        self.server.cut()
        for _ in range(200 * (self.server.published + 1)):
            if len(self.done) == self.server.published and not self.server.in_flight and not self.server.requeued:
                return
            self.lanes.put(self.server.send([1, 0, 3]))
            for lane in (0, 1):
                self.handle_one(lane)
            self.pass_time(1.0)
        raise AssertionError(f"not handled: {set(range(self.server.published)) - self.done}")


class LanesMachine(_Model):
    """A handler of single messages."""

    def __init__(self) -> None:
        self.running: list[Message | None] = [None, None]
        super().__init__()

    @rule(lane=st.integers(0, 1))
    def begin(self, lane: int) -> None:
        """A worker takes the next message of its lane that is in flight, like `Workers`."""
        messages = self.lanes.lanes[lane].messages
        while self.running[lane] is None and messages:
            message = messages.popleft()
            if message.lost:
                self.lanes.expired(message)
                continue
            self.check_order(int(message.body))
            self.running[lane] = message

    @rule(lane=st.integers(0, 1))
    def succeed(self, lane: int) -> None:
        message, self.running[lane] = self.running[lane], None
        if message is not None:
            self.done.add(int(message.body))
            message.finish_now()

    @rule(lane=st.integers(0, 1), delay=st.sampled_from([0.0, 5.0, 50.0]))
    def fail(self, lane: int, delay: float) -> None:
        message, self.running[lane] = self.running[lane], None
        if message is not None:
            message.requeue_now(delay, backoff=True)

    def handle_one(self, lane: int) -> None:
        """Handle the next message of a lane, or the one that is running."""
        self.begin(lane)
        self.succeed(lane)


class BatchesMachine(_Model):
    """A handler of batches, which answers some of its messages in any way and order, and then returns or raises."""

    def __init__(self) -> None:
        self.running: list[list[Message]] = [[], []]
        super().__init__()

    @rule(lane=st.integers(0, 1), count=st.integers(1, 4))
    def begin(self, lane: int, count: int) -> None:
        """A worker takes a batch."""
        if self.running[lane]:
            return
        self.running[lane] = self.lanes.take(self.lanes.lanes[lane], count)
        ahead: list[int] = []
        for message in self.running[lane]:
            assert not message.answered
            self.check_order(int(message.body), ahead)
            ahead.append(int(message.body))

    @rule(lane=st.integers(0, 1), place=st.integers(0, 3))
    def finish_one(self, lane: int, place: int) -> None:
        for message in self._unanswered(lane)[place:][:1]:
            self.done.add(int(message.body))
            try:
                message.owner.finish(message)
            except MessageNotInFlight:
                self.done.discard(int(message.body))  # the handler fails with it, or returns nevertheless
            else:
                message.mark_answered()

    @rule(lane=st.integers(0, 1), place=st.integers(0, 3), delay=st.sampled_from([0.0, 5.0, 50.0]))
    def requeue_one(self, lane: int, place: int, delay: float) -> None:
        for message in self._unanswered(lane)[place:][:1]:
            message.owner.requeue(message, delay, backoff=False)
            message.mark_answered()

    @rule(lane=st.integers(0, 1), fails=st.booleans())
    def end(self, lane: int, *, fails: bool) -> None:
        """The handler returns or raises: its worker answers the rest as `Workers` does, those held back excepted."""
        held_back = self.lanes.held_back(self.lanes.lanes[lane])
        rest = [message for message in self._unanswered(lane) if message not in held_back]
        if fails:
            for message in rest:
                message.requeue_now(5.0, backoff=True)
        else:
            self.done |= {int(message.body) for message in rest}
            for number in (int(message.body) for message in rest):
                earlier = set(range(number % _KEYS, number, _KEYS))
                assert earlier <= self.done, f"{number} is finished, and {min(earlier - self.done)} was requeued"
            MessageBatch(rest).finish_now()
        self.lanes.end_batch(self.lanes.lanes[lane])
        self.running[lane] = []

    def _unanswered(self, lane: int) -> list[Message]:
        return [message for message in self.running[lane] if not message.answered]

    def handle_one(self, lane: int) -> None:
        """Handle the next batch of a lane, or the one that is running."""
        self.begin(lane, 3)
        self.end(lane, fails=False)


_STEPS = settings(max_examples=60, stateful_step_count=50, deadline=None)
LanesMachine.TestCase.settings = BatchesMachine.TestCase.settings = _STEPS
TestLanes = LanesMachine.TestCase
TestBatches = BatchesMachine.TestCase
