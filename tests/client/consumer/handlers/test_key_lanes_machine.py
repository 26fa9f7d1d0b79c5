"""Lanes against a model of the server: whatever fails, times out or is cut, no key is handled out of its order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nsqext.client.consumer.handlers.key_lanes import KeyLanes, key_reader
from nsqext.client.consumer.message import Message
from nsqext.errors import MessageNotInFlight

_TIMEOUT = 60.0
_KEYS = 2


class _Connection:
    """A subscription, as far as lanes know it."""

    topic, partition, node, in_order = "t", 0, "127.0.0.1:4150", False
    msg_timeout, max_msg_timeout, ignore_lost = _TIMEOUT, 900.0, False

    def __init__(self, server: _Server) -> None:
        self.horizon = float("-inf")
        self._server = server

    def finish(self, message: Message) -> None:
        self._check(message)
        del self._server.in_flight[message]

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        self._check(message)
        self._server.queue.append(self._server.in_flight.pop(message))

    def touch(self, message: Message) -> None:
        self._check(message)
        message.received = self._server.now

    def _check(self, message: Message) -> None:
        if message.received < self.horizon:
            raise MessageNotInFlight("it is no longer ours")

    def record_outcome(self, failed: bool) -> None:
        """Nobody slows down."""

    def expired(self, message: Message) -> bool:
        return message.received < self.horizon


class _Server:
    """Hands out what is lowest first; takes back what has timed out, and everything when the connection is cut."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue: list[bytes] = []
        self.in_flight: dict[Message, bytes] = {}
        self.connection = _Connection(self)

    def deliver(self, count: int) -> list[Message]:
        self.queue.sort()
        messages = []
        for body in self.queue[:count]:
            message = Message(self.connection)
            message.body, message.id, message.header = body, b"%16d" % len(self.queue), b""
            message.version, message.attempts, message.received = 0, 1, self.now
            self.in_flight[message] = body
            messages.append(message)
        del self.queue[:count]
        return messages

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.connection.horizon = self.now - _TIMEOUT
        self._take_back([message for message in self.in_flight if message.received < self.connection.horizon])

    def cut(self) -> None:
        self.connection.horizon = float("inf")
        self._take_back(list(self.in_flight))
        self.connection = _Connection(self)
        self.connection.horizon = self.now - _TIMEOUT

    def _take_back(self, messages: list[Message]) -> None:
        self.queue += [self.in_flight.pop(message) for message in messages]


class LanesMachine(RuleBasedStateMachine):
    """Two lanes, two keys; a body is a number, and its key is that number modulo two."""

    def __init__(self) -> None:
        super().__init__()
        self.server = _Server()
        self.lanes = KeyLanes(
            2, key_reader(lambda message: b"%d" % (int(message.body) % _KEYS)), lambda: self.server.now
        )
        self.at_work: list[Message | None] = [None, None]
        self.done: set[int] = set()
        self.published = 0

    @precondition(lambda self: self.published < 12)
    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        self.server.queue += [b"%06d" % (self.published + number) for number in range(count)]
        self.published += count

    @precondition(lambda self: self.server.queue)
    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        self.lanes.put(self.server.deliver(count))

    @rule(lane=st.integers(0, 1))
    def begin(self, lane: int) -> None:
        """A worker takes the next message of its lane that is still ours, as `Workers` does."""
        row = self.lanes.rows[lane].messages
        while self.at_work[lane] is None and row:
            message = row.popleft()
            if message.received < message.owner.horizon:
                self.lanes.missed(message)
                continue
            number = int(message.body)
            earlier = set(range(number % _KEYS, number, _KEYS))
            assert earlier <= self.done, f"{number} is begun before {min(earlier - self.done)} of its key"
            self.at_work[lane] = message

    @rule(lane=st.integers(0, 1))
    def succeed(self, lane: int) -> None:
        message, self.at_work[lane] = self.at_work[lane], None
        if message is not None:
            self.done.add(int(message.body))
            message.finish_now()

    @rule(lane=st.integers(0, 1), delay=st.sampled_from([0.0, 5.0, 50.0]))
    def fail(self, lane: int, delay: float) -> None:
        message, self.at_work[lane] = self.at_work[lane], None
        if message is not None:
            message.requeue_now(delay, backoff=True)

    @rule(seconds=st.sampled_from([1.0, 35.0]))
    def pass_time(self, seconds: float) -> None:
        self.server.pass_time(seconds)
        self.lanes.tick(self.server.now)

    @rule()
    def cut(self) -> None:
        self.server.cut()

    @invariant()
    def waiting_is_counted(self) -> None:
        assert self.lanes.waiting == sum(1 + len(held.behind) for held in self.lanes._held.values())

    @invariant()
    def a_held_key_waits_in_no_lane(self) -> None:
        held = {int(key) for key in self.lanes._held}
        assert not any(int(message.body) % _KEYS in held for message in self.lanes.here())

    def teardown(self) -> None:
        """Let everything go well from now on: everything is done in the end."""
        self.server.pass_time(0.0)
        for _ in range(50 * (self.published + 1)):
            if len(self.done) == self.published and not self.server.in_flight and not self.server.queue:
                return
            self.lanes.put(self.server.deliver(5))
            for lane in (0, 1):
                self.begin(lane)
                self.succeed(lane)
            self.pass_time(1.0)
        raise AssertionError(f"not done: {set(range(self.published)) - self.done}")


LanesMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestLanes = LanesMachine.TestCase
