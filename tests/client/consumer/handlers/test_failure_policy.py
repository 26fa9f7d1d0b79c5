"""Requeues and dead letters of messages whose handler raised."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from nsqext import Finish, Reject, Requeue
from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
from nsqext.client.consumer.options import FailureOptions
from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
from nsqext.client.consumer.subscriptions.subscription_group import RejectedCounts
from nsqext.errors import InvalidInput
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

pytestmark = pytest.mark.anyio


def make_policy(
    dead_letters: list[str] | None = None,
    early: EarlyMessages | None = None,
    counts: RejectedCounts | None = None,
    **members: Any,
) -> FailurePolicy:
    """Return a policy without jitter that records dead letters."""

    async def take(message: Message, error: Exception | None) -> None:
        assert dead_letters is not None
        dead_letters.append(f"{message.internal_id} {error}")
        if "refused" in str(error):
            raise OSError("no")

    options = FailureOptions(**members)
    return FailurePolicy(
        options,
        None if dead_letters is None else take,
        lambda: early or EarlyMessages(),
        counts or RejectedCounts(),
        chance=lambda: 0.0,
    )


async def test_failures_are_requeued_with_a_delay_that_grows() -> None:
    owner = RecordingOwner()
    policy = make_policy(requeue_delay=2.0, max_requeue_delay=5.0)
    for attempts in (1, 2, 3):
        await policy.failed(make_message(owner, attempts=attempts), ValueError("x"))
    assert owner.commands == ["REQ 1 2!", "REQ 1 4!", "REQ 1 5!"]


async def test_jitter_stays_within_its_share_and_the_longest_delay() -> None:
    for chance, longest, delay in ((-1.0, 900.0, 1.5), (1.0, 900.0, 2.5), (1.0, 2.0, 2.0)):
        options = FailureOptions(requeue_delay=2.0, requeue_jitter=0.25, max_requeue_delay=longest)
        policy = FailurePolicy(options, None, EarlyMessages, RejectedCounts(), chance=partial(float, chance))
        assert policy.delay(make_message(RecordingOwner())) == delay
    drawn = FailurePolicy(FailureOptions(requeue_delay=2.0, requeue_jitter=0.25), None, EarlyMessages, RejectedCounts())
    assert all(1.5 <= drawn.delay(make_message(RecordingOwner())) <= 2.5 for _ in range(100))


async def test_errors_of_handlers_decide_the_outcome() -> None:
    owner, dead_letters = RecordingOwner(), list[str]()
    policy = make_policy(dead_letters, requeue_delay=2.0)
    for signal in (Finish(), Requeue(), Requeue(7, backoff=False), Reject("enough")):
        await policy.failed(make_message(owner), signal)
    assert owner.commands == ["FIN 1", "REQ 1 2!", "REQ 1 7", "FIN 1"]
    assert dead_letters == ["1 enough"]
    with pytest.raises(InvalidInput):
        Requeue(-1)


async def test_answered_messages_are_not_requeued() -> None:
    owner = RecordingOwner()
    policy = make_policy()
    for error in (Finish(), Requeue(), Reject(), ValueError("x")):
        message = make_message(owner)
        message.answered = True
        await policy.failed(message, error)
    assert owner.commands == []


async def test_the_last_attempt_is_sent_to_the_dead_letters() -> None:
    owner, dead_letters = RecordingOwner(), list[str]()
    policy = make_policy(dead_letters, requeue_delay=0.0, max_attempts=2)
    await policy.failed(make_message(owner), ValueError("first"))
    await policy.failed(make_message(owner, attempts=2), ValueError("second"))
    assert owner.commands == ["REQ 1 0!", "FIN 1"]
    assert dead_letters == ["1 second"]
    assert [policy.attempts_exhausted(make_message(owner, attempts=attempts)) for attempts in (1, 2, 3)] == [
        False,
        False,
        True,
    ]
    await policy.dead_letter(make_message(owner, 8, attempts=3), None)
    assert dead_letters[1:] == ["8 None"]


async def test_dead_letters_that_fail_lose_nothing() -> None:
    owner, dead_letters = RecordingOwner(), list[str]()
    policy = make_policy(dead_letters, requeue_delay=0.0, max_attempts=1)
    await policy.failed(make_message(owner), ValueError("refused"))
    assert owner.commands == ["REQ 1 0!"]


async def test_a_message_that_a_failing_function_for_dead_letters_has_answered_is_not_requeued() -> None:
    async def answer(message: Message, error: Exception | None) -> None:
        message.finish_now()
        raise OSError("no")

    owner = RecordingOwner()
    policy = FailurePolicy(FailureOptions(max_attempts=1), answer, EarlyMessages, RejectedCounts())
    await policy.failed(make_message(owner), ValueError("refused"))
    assert owner.commands == ["FIN 1"]


async def test_without_dead_letters_a_message_is_dropped_and_the_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    owner, counts = RecordingOwner(), RejectedCounts()
    policy = make_policy(counts=counts, max_attempts=2)
    message = make_message(owner, attempts=2)
    await policy.failed(message, ValueError("no price"))
    await policy.failed(make_message(owner), Reject("unknown order"))
    assert owner.commands == ["FIN 1", "FIN 1"]
    once, again = (record.getMessage() for record in caplog.records if "dropped" in record.getMessage())
    assert once == f"dropped after 2 attempts, no dead_letter is set: {message!r}: ValueError: no price"
    assert again.startswith("dropped after 1 attempt, no dead_letter is set: ")
    assert again.endswith(": Reject: unknown order")
    for part in (message.topic, str(message.partition), message.id.hex()):
        assert part in once
    assert (counts.dropped, counts.dead_letters) == (2, 0)


async def test_dead_letters_are_counted_when_they_are_sent(caplog: pytest.LogCaptureFixture) -> None:
    owner, counts = RecordingOwner(), RejectedCounts()
    policy = make_policy([], counts=counts, max_attempts=1)
    await policy.failed(make_message(owner), ValueError("no price"))
    await policy.failed(make_message(owner), ValueError("refused"))
    assert (counts.dropped, counts.dead_letters) == (0, 1)
    assert "sent to the dead letters after 1 attempt: " in caplog.text


# Dead letters of a batch

Letters = Callable[["Message", Exception | None], Awaitable[None]]


def to_topic(take: Letters) -> FailurePolicy:
    """Return a policy whose dead letters are published to a topic, by a function of the test."""
    return FailurePolicy(
        FailureOptions(max_attempts=1, dead_letter="dead", requeue_delay=0.0), take, EarlyMessages, RejectedCounts()
    )


async def test_dead_letters_of_a_batch_are_published_at_the_same_time_up_to_a_bound() -> None:
    owner, many = RecordingOwner(), anyio.Event()
    running = most = 0

    async def take(message: Message, error: Exception | None) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 32:
            many.set()
        await many.wait()
        await checkpoint()
        running -= 1

    with anyio.fail_after(25):
        await to_topic(take).batch_failed([make_message(owner, number) for number in range(500)], Reject())
    assert most == 32
    assert sorted(owner.commands) == sorted(f"FIN {number}" for number in range(500))


async def test_dead_letters_of_a_key_are_published_one_after_the_other() -> None:
    owner, published = RecordingOwner(), dict[str | None, list[int]]()
    running: set[str | None] = set()

    async def take(message: Message, error: Exception | None) -> None:
        assert message.key not in running
        running.add(message.key)
        published.setdefault(message.key, []).append(message.internal_id)
        await checkpoint()
        running.discard(message.key)

    messages = [make_message(owner, number, key="abc"[number % 3]) for number in range(30)]
    await to_topic(take).batch_failed(messages, ValueError("x"))
    assert published == {key: list(range(first, 30, 3)) for first, key in enumerate("abc")}


async def test_only_the_messages_of_a_batch_whose_dead_letters_failed_are_requeued() -> None:
    owner = RecordingOwner()

    async def take(message: Message, error: Exception | None) -> None:
        await checkpoint()
        if message.internal_id % 3 == 0:
            raise OSError("no")

    await to_topic(take).batch_failed([make_message(owner, number) for number in range(9)], Reject())
    requeued = [f"REQ {number} 0!" for number in range(0, 9, 3)]
    assert sorted(owner.commands) == sorted([f"FIN {number}" for number in range(9) if number % 3] + requeued)


async def test_a_message_is_finished_only_after_its_dead_letter_is_stored_also_in_a_cancelled_batch() -> None:
    owner, stored = RecordingOwner(), anyio.Event()
    messages = [make_message(owner, number) for number in range(6)]

    async def take(message: Message, error: Exception | None) -> None:
        if message.internal_id > 2:
            await anyio.sleep_forever()
        if message.internal_id == 2:
            stored.set()

    async with create_task_group() as tasks:
        tasks.start_soon(to_topic(take).batch_failed, messages, Reject())
        await stored.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert sorted(owner.commands) == ["FIN 0", "FIN 1", "FIN 2"]
    assert [message.answered for message in messages] == [True] * 3 + [False] * 3


async def test_a_function_for_dead_letters_is_called_for_one_message_after_the_other() -> None:
    owner, calls = RecordingOwner(), list[int]()
    running = False

    async def take(message: Message, error: Exception | None) -> None:
        nonlocal running
        assert not running
        running = True
        calls.append(message.internal_id)
        await checkpoint()
        running = False

    options = FailureOptions(max_attempts=1, dead_letter=take)
    policy = FailurePolicy(options, take, EarlyMessages, RejectedCounts())
    messages = [make_message(owner, number, key="ab"[number % 2]) for number in range(6)]
    await policy.batch_failed(messages, Reject())
    assert calls == list(range(6))


async def test_ordered_messages_are_rejected_only_with_reject_ordered() -> None:
    for asked, lines in ((False, ["REQ 1 0!"]), (True, ["FIN 1"])):
        owner, dead_letters = RecordingOwner(in_order=True), list[str]()
        policy = make_policy(dead_letters, requeue_delay=0.0, max_attempts=1, reject_ordered=asked)
        await policy.failed(make_message(owner), ValueError("x"))
        assert owner.commands == lines
        assert policy.attempts_exhausted(make_message(owner, attempts=9)) == asked
        assert len(dead_letters) == asked


async def test_delays_of_ordered_messages_are_accepted() -> None:
    owner, early = RecordingOwner(in_order=True), EarlyMessages()
    policy = make_policy(early=early, requeue_delay=5.0)
    message = make_message(owner)
    await policy.failed(message, ValueError("x"))
    assert owner.commands == ["failed"]
    assert set(early.kept) == {message}
    early.tick(0.0)
    assert set(early.kept) == {message}
    early.tick(float("inf"))
    assert owner.commands == ["failed", "REQ 1 0"]
    assert not early.kept
