"""Messages that are received before they are due, with a model of the server that delivers them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsqext.client.consumer.subscriptions import early_messages
from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages, due_time
from tests.support.clock import replace_clock
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nsqext.client.consumer.message import Message

START = 1_700_000_000.0
DAY = 86_400.0


@contextmanager
def _clocks(monotonic: Callable[[], float], wall: Callable[[], float] | None = None) -> Iterator[None]:
    """Let the package read the clocks of the test: two different ones, or one."""
    with pytest.MonkeyPatch.context() as patch:
        replace_clock(patch, monotonic)
        patch.setattr("time.time", wall or monotonic)
        yield


def _refuse(message: Message, delay: float) -> None:
    pytest.fail(f"{message!r} is requeued for {delay:g} s")


class Server:
    """A channel with one message: delivers it again after the delay of each requeue, or when it has timed out.

    Args:
        delay: of the publish, in seconds; None for a message without a delay.
        longest: longest requeue that it accepts.
    """

    def __init__(self, delay: float | None, longest: float = 3 * DAY) -> None:
        self.now = START
        self.due = None if delay is None else round((START + delay) * 1000)
        self.attempts = 0
        self.number = 1
        self.requeues: list[float] = []
        self._longest = longest

    def deliver_to(self, early: EarlyMessages) -> Message | None:
        """Deliver the message; return it if its handler would be called."""
        self.attempts += 1
        stored = round(START * 1e9)
        message = make_message(RecordingOwner(), self.number, attempts=self.attempts, timestamp=stored, due=self.due)
        with _clocks(lambda: self.now):
            ready = early.without_early([message], self._requeue, keep=False)
        assert message.answered == (not ready)
        return ready[0] if ready else None

    def fail(self, early: EarlyMessages, message: Message, delay: float) -> None:
        """Requeue a message whose handler failed."""
        with _clocks(lambda: self.now):
            early.postpone(message, delay)
        self._requeue(message, min(delay, 3 * DAY))

    def _requeue(self, _: Message, delay: float) -> None:
        self.requeues.append(delay)
        self.now += min(delay, self._longest)


def handled(server: Server, early: EarlyMessages) -> Message:
    """Deliver until the handler is called."""
    while True:
        message = server.deliver_to(early)
        if message is not None:
            return message


@given(
    delay=st.floats(0.01, 20 * DAY),
    backlog=st.floats(0, 5 * DAY),
    longest=st.sampled_from([900.0, 3600.0, DAY, 3 * DAY]),
    failures=st.integers(0, 3),
)
def test_a_delayed_message_is_handled_when_due_and_its_attempts_are_those_of_the_handler(
    delay: float, backlog: float, longest: float, failures: int
) -> None:
    server, early = Server(delay, longest), EarlyMessages()
    server.now += backlog  # before it is delivered for the first time
    message = handled(server, early)
    assert server.due is not None
    assert server.now * 1000 >= server.due
    assert server.now <= max(server.due / 1000 + 0.01, START + backlog)
    assert message.attempts == 1
    for attempts in range(failures):
        server.now += 5.0
        assert handled(server, early).attempts == attempts + 2


@given(delay=st.floats(0.01, 3 * DAY), backlog=st.floats(0, 1200))
def test_another_consumer_counts_the_same_attempts(delay: float, backlog: float) -> None:
    server = Server(delay)
    server.now += backlog
    requeues = 2 if 10.0 < delay <= 900.0 else 1  # the second one when it is due
    for _ in range(requeues):
        assert server.deliver_to(EarlyMessages()) is None
    message = server.deliver_to(EarlyMessages())
    assert message is not None
    assert message.attempts == 1


def test_deliveries_of_a_refused_requeue_are_not_counted() -> None:
    server, early = Server(600.0, longest=60.0), EarlyMessages()  # redelivered after msg_timeout
    assert handled(server, early).attempts == 1
    assert server.attempts == 11
    assert handled(server, early).attempts == 2


@settings(max_examples=25)
@given(
    delays=st.lists(st.floats(0.01, 20 * DAY), max_size=4),
    longest=st.sampled_from([900.0, 3600.0, DAY, 3 * DAY]),
    published=st.none() | st.floats(1.0, 10 * DAY),
)
def test_a_requeue_that_is_longer_than_servers_accept_is_continued(
    delays: list[float], longest: float, published: float | None
) -> None:
    server, early = Server(published, longest), EarlyMessages()
    message = handled(server, early)
    for attempts, delay in enumerate(delays, 2):
        due = server.now + delay
        server.fail(early, message, delay)
        message = handled(server, early)
        assert message.attempts == attempts
        assert due - 0.001 <= server.now <= due + 0.01 * len(server.requeues)


def test_what_was_postponed_and_came_in_time_is_forgotten() -> None:
    server, early = Server(None), EarlyMessages()
    server.fail(early, handled(server, early), 1000.0)
    assert early.postponed
    handled(server, early)
    assert not early.postponed


def test_on_an_ordered_channel_it_stays_in_flight_until_due() -> None:
    early, owner = EarlyMessages(), RecordingOwner(in_order=True)
    message = make_message(owner, timestamp=round(START * 1e9), due=round((START + 30) * 1000))
    with _clocks(lambda: 0.0, lambda: START):
        assert early.without_early([message], _refuse, keep=False) == []
    assert list(early.kept) == [message]
    early.tick(29.0)
    assert owner.commands == []
    early.tick(30.1)
    assert owner.commands == ["REQ 1 0"]


@pytest.mark.parametrize(
    ("delay", "timeout", "sent"),
    [
        (-1.0, 60.0, ["REQ 1 0"]),
        (2.0, 60.0, ["kept", "REQ 1 0"]),
        (10.0, 60.0, ["kept", "REQ 1 0"]),
        (9.0, 10.0, ["REQ 1 9"]),  # it would time out, or be touched
        (60.0, 60.0, ["REQ 1 50", "kept", "REQ 1 0"]),
        (1000.0, 60.0, ["REQ 1 1000"]),  # on disk, where a message in flight holds up the others
    ],
)
def test_a_message_that_is_due_soon_stays_in_flight(delay: float, timeout: float, sent: list[str]) -> None:
    early, owner, now, attempts = EarlyMessages(), RecordingOwner(), START, 0
    owner.msg_timeout = timeout
    stored, due = round(START * 1e9), round((START + delay) * 1000)

    def requeue(message: Message, delay: float) -> None:
        nonlocal now
        now += delay
        owner.requeue(message, delay, backoff=False)

    while True:
        attempts += 1
        message = make_message(owner, timestamp=stored, due=due, attempts=attempts)
        with _clocks(lambda: now):  # noqa: B023 - used in this round
            if early.without_early([message], requeue, keep=True):
                break
        if early.kept:
            owner.commands.append("kept")
            now = max(now, START + delay)
            early.tick(now + 0.01)
    assert message.attempts == 1
    assert owner.commands == sent
    assert now <= max(START, START + delay) + 0.01


@pytest.mark.parametrize("value", ["", "soon", "-5", "1e9", "1" * 20, "١٢"])
def test_another_value_is_no_due_time(value: str) -> None:
    message = make_message(RecordingOwner(), due=value)
    assert due_time(message) is None
    assert EarlyMessages().without_early([message], _refuse, keep=False) == [message]


def test_a_header_that_no_server_stores_has_no_due_time() -> None:
    message = make_message(RecordingOwner(), due="5")
    message.header = message.header[:-1]
    assert EarlyMessages().without_early([message], _refuse, keep=False) == [message]


def test_the_memory_of_uncounted_deliveries_is_bounded() -> None:
    early, servers = EarlyMessages(), [Server(600.0, longest=60.0) for _ in range(5)]
    with patch.object(early_messages, "MOST_KNOWN", 2):
        for number, server in enumerate(servers):
            server.number = number
            for _ in range(3):
                assert server.deliver_to(early) is None
        found: list[int] = []
        for server in servers:
            server.now = START + 600.0
            found += [message.attempts for message in (server.deliver_to(early),) if message is not None]
    assert found == [2, 2, 2, 1, 1], "the third delivery of the last two is known to be early"


def test_kept_messages_are_requeued_in_the_order_of_their_times_and_not_if_answered_before() -> None:
    owner, early = RecordingOwner(in_order=True), EarlyMessages()
    messages = [make_message(owner, number) for number in range(1, 6)]
    for message, due in zip(messages, (3.0, 1.0, 2.0, 1.0, 2.0), strict=True):
        early.keep(message, due)
    messages[4].answered = True
    for now, sent in ((0.9, []), (1.0, [2, 4]), (2.9, [3]), (3.0, [1])):
        owner.commands.clear()
        early.tick(now)
        assert owner.commands == [f"REQ {number} 0" for number in sent]
    assert not early.kept


def test_messages_of_a_subscription_with_a_backoff_are_requeued_until_they_are_due() -> None:
    """In flight they would use up its RDY, which is 1 until a message was handled."""
    pausing, ordered, other = RecordingOwner(), RecordingOwner(in_order=True), RecordingOwner()
    early = EarlyMessages()
    for number, (owner, due) in enumerate(
        ((pausing, 103.00001), (pausing, 99.0), (pausing, 104.0), (ordered, 105.0), (other, 106.0)), start=1
    ):
        early.keep(make_message(owner, number), due)
    next(message for message in early.kept if message.internal_id == 3).answered = True
    with _clocks(lambda: 100.0):
        early.release({pausing, ordered})
        early.tick(200.0)
    assert pausing.commands == ["REQ 1 3.001", "REQ 2 0"]
    assert (ordered.commands, other.commands) == (["REQ 4 0"], ["REQ 5 0"]), "when due"
    assert not early.kept


def test_what_is_requeued_when_due_has_no_outcome() -> None:
    """Its handler was not called, or its outcome was recorded when it failed; another one would pause again."""
    outcomes: list[bool | None] = []

    class _Owner(RecordingOwner):
        def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
            outcomes.append(backoff)

    early = EarlyMessages()
    early.keep(make_message(_Owner()), 1.0)
    early.tick(1.0)
    assert outcomes == [None]
